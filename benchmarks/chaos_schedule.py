"""Which faults happen when: a Poisson process whose every draw comes from a seed.

The same seed, length, rate and number of peers give the same schedule. What is drawn does not look
at the run: if a fault's target is already down when its time comes, the next peer is hit instead
(the driver says so); if that would leave nobody to hold the state, it waits.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping

from attrs import frozen


class Kind(enum.Enum):
    """What can be done to a run from outside."""

    KILL_PEER = "kill peer"  # SIGKILL to daemon and trainer; started again later
    KILL_TRAINER = "kill trainer"  # SIGKILL to the trainer; its daemon starts it again
    KILL_MASTER = "kill master"  # SIGKILL; started again after a second
    STOP_PEER = "stop peer"  # SIGSTOP to daemon and trainer, as a machine that sleeps; SIGCONT
    STOP_TRAINER = "stop trainer"
    STOP_MASTER = "stop master"
    CUT_MASTER = "cut from master"  # no packet between a peer and the master
    CUT_PAIR = "cut from a peer"  # no packet between two peers
    CUT_ALL = "cut from all"  # no packet between a peer and anybody
    CUT_ONE_WAY = "cut one way"  # what a peer sends to another, or to the master, is lost


CUTS = frozenset({Kind.CUT_MASTER, Kind.CUT_PAIR, Kind.CUT_ALL, Kind.CUT_ONE_WAY})

WEIGHTS: Mapping[Kind, float] = {
    Kind.KILL_PEER: 22,
    Kind.KILL_TRAINER: 14,
    Kind.KILL_MASTER: 12,
    Kind.STOP_PEER: 12,
    Kind.STOP_TRAINER: 8,
    Kind.STOP_MASTER: 6,
    Kind.CUT_MASTER: 8,
    Kind.CUT_PAIR: 8,
    Kind.CUT_ALL: 5,
    Kind.CUT_ONE_WAY: 5,
}

# Seconds that a fault lasts, drawn evenly: some end before anybody can notice, some after all
# deadlines. A killed trainer is its daemon's business.
LASTS_S: Mapping[Kind, tuple[float, float]] = {
    Kind.KILL_PEER: (1.0, 6.0),
    Kind.KILL_TRAINER: (0.0, 0.0),
    Kind.KILL_MASTER: (1.0, 1.0),
    Kind.STOP_PEER: (0.3, 12.0),
    Kind.STOP_TRAINER: (0.3, 8.0),
    Kind.STOP_MASTER: (0.3, 8.0),
    Kind.CUT_MASTER: (0.5, 12.0),
    Kind.CUT_PAIR: (0.5, 12.0),
    Kind.CUT_ALL: (0.5, 12.0),
    Kind.CUT_ONE_WAY: (0.5, 12.0),
}
OTHER_MASTER_SHARE = 0.3  # of the cuts one way, which are towards the master


@frozen
class Fault:
    """One fault.

    Attributes:
      at_s: since the faults began.
      target: a peer's number, from 0; None: the master is hit.
      other: of a cut between two peers, the other one; None: the master.
    """

    at_s: float
    kind: Kind
    target: int | None
    other: int | None
    lasts_s: float


def schedule(
    seed: int, *, minutes: float, peers: int, per_hour: float, cuts: bool
) -> tuple[Fault, ...]:
    """All faults of a run, in order.

    Args:
      cuts: whether hosts can be cut off from each other here; without, those kinds are left out.
    """
    chance = random.Random(f"chaos {seed}")
    kinds = [kind for kind in WEIGHTS if cuts or kind not in CUTS]
    weights = [WEIGHTS[kind] for kind in kinds]
    found: list[Fault] = []
    at_s = 0.0
    while True:
        at_s += chance.expovariate(per_hour / 3600.0)
        if at_s >= 60.0 * minutes:
            return tuple(found)
        (kind,) = chance.choices(kinds, weights)
        target: int | None = chance.randrange(peers)
        assert target is not None
        other: int | None = (target + chance.randrange(1, peers)) % peers
        to_master = chance.random() < OTHER_MASTER_SHARE
        lasts_s = chance.uniform(*LASTS_S[kind])
        if kind in (Kind.KILL_MASTER, Kind.STOP_MASTER):
            target, other = None, None
        elif kind is Kind.CUT_MASTER or (kind is Kind.CUT_ONE_WAY and to_master):
            other = None
        found.append(Fault(at_s, kind, target, other, lasts_s))


def counts(faults: tuple[Fault, ...] | list[Fault]) -> dict[str, int]:
    """How many of each kind, in the kinds' order; those that did not happen are left out."""
    number = {kind: sum(fault.kind is kind for fault in faults) for kind in Kind}
    return {kind.value: count for kind, count in number.items() if count}
