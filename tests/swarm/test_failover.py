"""Three masters on one simulated database: whatever befalls them, no version is committed twice.

Each planted bug removes one rule, and the runs must find it; beside each bug is a seed that does:

    no fence      what a master had begun to write before it was frozen comes after the next one's
                  records
    no lease      a master goes on after its lease, with no fence either: members and journal are of
                  two masters
    never modest  a master that no member reaches keeps the lease
    no memory     a frozen master is waited for again and again, while the others wait for members
"""

from __future__ import annotations

import pytest

from holdfast.daemon.master import leadership
from holdfast.daemon.peer.master_search import MasterSearch
from holdfast.simulation.batch import BatchOptions, broken_by
from holdfast.simulation.scenario import RunKind
from holdfast.simulation.scenario_run import run_scenario
from holdfast.simulation.simulated_database import DatabaseClient, LeasedJournal
from tests.planting import Bugs, Note, Patch

SEEDS_MAX = 600
FAILOVER = BatchOptions(kind=RunKind.FAILOVER)
BUGS = Bugs()


# 169: the last leader is frozen, and dialled last. 436: another one leads when all is over.
@pytest.mark.parametrize("first", [0, 10, 160, 430])
@pytest.mark.fault(
    "the leading one of several masters crashes, freezes, or loses database or members",
    "its lease",
    "another one leads; no version is committed twice",
)
def test_the_run_goes_on_under_other_masters(first: int) -> None:
    for seed in range(first, first + 10):
        outcome = run_scenario(FAILOVER.scenario(seed))
        assert outcome.faults
        assert outcome.committed >= 3


def test_the_same_seed_is_the_same_history() -> None:
    scenario = FAILOVER.scenario(3)
    assert run_scenario(scenario).trace == run_scenario(scenario).trace


# ---------------------------------------------------------------- planted


@BUGS.named("no fence", seed=2)
def _(patch: Patch) -> None:
    patch.setattr(LeasedJournal, "_check", lambda self: self._client.check())


@BUGS.named("no lease", seed=0)
def _(patch: Patch) -> None:
    patch.setattr(leadership.Leadership, "is_held", lambda _self: True)
    patch.setattr(DatabaseClient, "holds", lambda *_: True)


@BUGS.named("never modest", seed=9)
def _(patch: Patch) -> None:
    patch.setattr(leadership, "SILENCE_SHARE", 1e9)
    patch.setattr(leadership, "ABSENCE_SHARE", 1e9)


@BUGS.named("no memory", seed=252793692)
def _(patch: Patch) -> None:
    patch.setattr(MasterSearch, "answering", lambda self: self.masters)


def shows(seed: int) -> bool:
    return bool(broken_by(FAILOVER.scenario(seed)))


@pytest.mark.planted
@pytest.mark.parametrize("name", BUGS)
def test_a_rule_that_is_taken_out_is_missed(
    name: str, monkeypatch: Patch, record_property: Note
) -> None:
    assert BUGS.is_found(name, monkeypatch, record_property, shows, range(SEEDS_MAX))


@pytest.mark.parametrize("name", BUGS)
def test_with_all_rules_those_seeds_hold(name: str) -> None:
    assert not shows(BUGS.seeds[name])
