"""Liars in runs of the production master and peers: only they are convicted, and in time.

The statements about 50 and 2,000 seeds are checked with `python -m holdfast.simulation`; these tests run fewer.
"""

from __future__ import annotations

import pytest

from holdfast.membership.master.rounds.audits import FALSE_MAX, Auditing
from holdfast.simulation.batch import BatchOptions, try_seed
from holdfast.simulation.liar_run import expected_rounds, live_with_a_liar
from holdfast.simulation.lying_peers import Lie
from holdfast.simulation.scenario import Scenario
from holdfast.simulation.scenario_run import run_scenario

AUDIT = 0.5  # so that it does not take long


@pytest.mark.fault(
    "an owner adds up something else than it was given",
    "an audit, its own seal",
    "convicted, quarantined, the round is run again without it",
)
@pytest.mark.parametrize("lie", [Lie.OWNER, Lie.FORGER])
def test_a_lying_owner_is_found_out(lie: Lie) -> None:
    seeds = range(2)
    rounds = [live_with_a_liar(seed, lie, AUDIT).rounds for seed in seeds]
    expected = expected_rounds(lie, AUDIT)
    assert 1 <= sum(rounds) / len(rounds) <= 3 * expected, rounds


def test_who_lies_everywhere_is_found_out_at_once() -> None:
    assert live_with_a_liar(0, Lie.OWNER, 1.0, 2).rounds == 1


@pytest.mark.fault(
    "an owner shows nothing, or leaves before it is looked at",
    "silence; its connection",
    "the round is run again; who does it again and again owns nothing",
)
def test_who_never_shows_anything_owns_nothing_in_the_end() -> None:
    found = live_with_a_liar(1, Lie.SILENT, 1.0)
    assert found.rounds == expected_rounds(Lie.SILENT, 1.0)


@pytest.mark.fault(
    "a member accuses an honest owner",
    "the master judges the proof",
    "nothing happens to the owner; the accuser is quarantined at the third time",
)
def test_who_accuses_falsely_is_found_out_and_nobody_else() -> None:
    assert live_with_a_liar(1, Lie.ACCUSER, AUDIT).rounds <= FALSE_MAX


@pytest.mark.parametrize("seed", [3, 11])
def test_where_nobody_lies_nobody_is_convicted(seed: int) -> None:
    outcome = run_scenario(Scenario.of(seed, audit=0.3))
    assert outcome.committed > 1


def test_without_audits_a_liar_lies_for_ever() -> None:
    """Without audits no liar is convicted, so the other tests show the effect of audits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Auditing, "_draw", lambda *_args: ())
        patch.setattr("holdfast.simulation.liar_run.PATIENCE", 6)
        result = try_seed(0, BatchOptions(audit=1.0, liar=Lie.OWNER))
    assert result.violation is not None
    assert "the liar lied in" in result.violation.what
    assert "--audit 1 --liar owner" in result.violation.reproduce


def test_a_convicted_honest_owner_is_a_broken_promise() -> None:
    """Planted bug: every accused peer is convicted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "holdfast.daemon.master.master_service._fault_proven",
            lambda *_args: "because it is said",
        )
        result = try_seed(1, BatchOptions(audit=AUDIT, liar=Lie.ACCUSER))
    assert result.violation is not None
    assert "is honest" in result.violation.what
