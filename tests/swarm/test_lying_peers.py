"""Liars in runs of the production master and peers: they are found out, and harm no honest member.

More seeds are run with `python -m holdfast.simulation --audit P --liar KIND`. Each planted bug
removes one rule:

    one word          the word of one checker removes an owner
    two bytes         a contributor that sends unlike bytes is no suspect
    owns again        the suspects own chunks again when the round is run again
    heard for ever    false words of a checker have no end
    nobody checks     no chunk is ever drawn
    what is missing   a chunk whose contributions did not all come counts as wrong
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from attrs import evolve

from holdfast.membership.master.rounds import audits
from holdfast.membership.master.rounds.audits import Auditing
from holdfast.simulation.batch import broken_by
from holdfast.simulation.lying_peers import Liar, Lie
from holdfast.simulation.scenario import Scenario
from holdfast.simulation.scenario_run import RunOutcome, run_scenario
from tests import planting
from tests.planting import Bugs, Note, Patch

AUDIT = 0.5  # so that it does not take long
SEEDS_MAX = 30

BUGS = Bugs()
bug = BUGS.named


def outcome_of(seed: int, lie: Lie) -> RunOutcome:
    return run_scenario(Scenario.of(seed, audit=AUDIT, liar=lie))


@pytest.mark.fault(
    "an owner adds up something else than it was given",
    "another member adds the chunk up again",
    "the round is run again; an owner that two contradict leaves",
)
def test_a_lying_owner_is_found_out() -> None:
    seeds = range(3)
    rounds = [outcome_of(seed, Lie.OWNER).lies for seed in seeds]
    expected = Liar("p3", Lie.OWNER).expected_rounds(AUDIT)
    assert 1 <= sum(rounds) / len(rounds) <= 3 * expected, rounds


@pytest.mark.fault(
    "a checker says that an honest owner's sum is wrong",
    "nobody joins it",
    "the round is run again; the second time it checks no more",
)
def test_a_lying_checker_is_heard_no_more() -> None:
    assert outcome_of(1, Lie.CHECKER).lies <= audits.ALONE_MAX


@pytest.mark.fault(
    "a contributor sends checkers something else than the owner",
    "the owner's digests of what it added",
    "the round is run again; the member that all contradictions have in common leaves",
)
@pytest.mark.parametrize("seed", range(2))
def test_a_contributor_that_sends_unlike_bytes_is_found_out(seed: int) -> None:
    assert outcome_of(seed, Lie.CONTRIBUTOR).lies >= 1


@pytest.mark.parametrize("seed", [3, 11])
def test_where_nobody_lies_nobody_is_contradicted(seed: int) -> None:
    outcome = run_scenario(Scenario.of(seed, audit=0.3))
    assert outcome.committed > 1


@bug("one word", Lie.CHECKER, seed=0)
def _(patch: Patch) -> None:
    planting.one_word(patch)


@bug("two bytes", Lie.CONTRIBUTOR, seed=2)
def _(patch: Patch) -> None:
    contradicted = Auditing._contradicted

    def without(self: Auditing, round_: Any, checker: str, owner: str, found: Any) -> str:
        return contradicted(self, round_, checker, owner, evolve(found, peer=""))

    patch.setattr(Auditing, "_contradicted", without)


@bug("owns again", Lie.CHECKER, seed=0)
def _(patch: Patch) -> None:
    planting.owns_again(patch)


@bug("heard for ever", Lie.CHECKER, seed=0)
def _(patch: Patch) -> None:
    patch.setattr(audits, "ALONE_MAX", 99)
    patch.setattr(Auditing, "_has_contradicted", lambda *_: False)
    patch.setattr("holdfast.simulation.honest_peers.PATIENCE", 6)


@bug("nobody checks", Lie.OWNER, seed=0)
def _(patch: Patch) -> None:
    patch.setattr(Auditing, "_draw", lambda *_args: ())
    patch.setattr("holdfast.simulation.honest_peers.PATIENCE", 6)


@bug("what is missing", None, seed=12)
def _(patch: Patch) -> None:
    planting.silence_is_guilt(patch)


def shows(lie: Lie | None, seed: int) -> bool:
    return bool(broken_by(Scenario.of(seed, audit=AUDIT, liar=lie)))


@pytest.mark.planted
@pytest.mark.parametrize("name", BUGS)
def test_a_rule_that_is_taken_out_is_missed(
    name: str, monkeypatch: Patch, record_property: Note
) -> None:
    reveals = partial(shows, *BUGS.shown_by[name])
    assert BUGS.is_found(name, monkeypatch, record_property, reveals, range(SEEDS_MAX))


def test_every_rule_is_listed_above() -> None:
    assert BUGS.are_listed(__doc__)
