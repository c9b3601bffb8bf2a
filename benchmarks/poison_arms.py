"""The arms of ``poison``: who lies how, under which rule.

A name says it: ``clipped``, nobody lies and owners clip; ``mean-flipped2``, two of eight send their
updates with the sign changed; ``mean-flipped2@scale=30``, thirty times as long.

A liar trains as everybody does, so it knows an honest update: its own. What it sends is as many times
as long as that as its arm's ``scale`` says. ``SCALE`` is below what the master's norm gate looks at
(three times the median): it sees nothing. ``CAUGHT`` is above what it refuses (ten times).
"""

from __future__ import annotations

from functools import partial

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from benchmarks.commands import BenchError
from benchmarks.learning_arms import OUTER, Arm, Lie

PEERS = 8
LIARS = (1, 2)
SYNC_EVERY = 10  # H
SCALE = 2.5  # times an honest update's length
CAUGHT = 30.0
RATIO_MAX = 1.02  # of the clean mean's loss, under a robust rule

RULES = ("mean", "clipped")
ATTACKS = {
    "flipped": "minus their own update",
    "scaled": "their own update",
    "random": "noise, each its own",
    "constant": "the same number everywhere, both the same",
}

Values = NDArray[np.float32]


def flipped(scale: float, _replica: int, _round: int, update: Values) -> None:
    update *= np.float32(-scale)


def scaled(scale: float, _replica: int, _round: int, update: Values) -> None:
    update *= np.float32(scale)


def random(scale: float, replica: int, round_: int, update: Values) -> None:
    length = scale * float(np.linalg.norm(update.astype(np.float64)))
    noise = np.random.default_rng((replica, round_)).standard_normal(update.size)
    update[:] = noise * (length / float(np.linalg.norm(noise)))


def constant(scale: float, _replica: int, _round: int, update: Values) -> None:
    length = scale * float(np.linalg.norm(update.astype(np.float64)))
    update[:] = length / float(np.sqrt(update.size))


LIES = {"flipped": flipped, "scaled": scaled, "random": random, "constant": constant}


@frozen(eq=False)
class PoisonArm(Arm):
    """An arm of which some peers lie.

    Attributes:
      attack: of ``ATTACKS``; empty: nobody lies.
      liars: the last so many peers.
    """

    attack: str = ""
    liars: int = 0
    scale: float = SCALE

    def lie_of(self, replica: int) -> Lie | None:
        if self.attack and replica >= self.peers - self.liars:
            return partial(LIES[self.attack], self.scale, replica)
        return None


def _arm(rule: str, attack: str = "", liars: int = 0) -> PoisonArm:
    name = f"{rule}-{attack}{liars}" if attack else rule
    what = f"{liars} of {PEERS} send {ATTACKS[attack]}" if attack else "nobody lies"
    settings = {
        "sync_every": SYNC_EVERY,
        # The run goes on when the liars are sent away.
        "min_members": PEERS - max(LIARS),
        "pace": "lockstep",
        "combine": rule,
        **OUTER,
    }
    asked = RATIO_MAX if rule != "mean" else None
    return PoisonArm(
        name, what, PEERS, "mean", settings, ratio_max=asked, attack=attack, liars=liars
    )


BY_NAME = {
    arm.name: arm
    for arm in (
        *(_arm(rule) for rule in RULES),
        *(_arm(rule, attack, liars) for attack in ATTACKS for liars in LIARS for rule in RULES),
    )
}
GATED = [f"mean-flipped{liars}@scale={CAUGHT:g}" for liars in LIARS]
DEFAULT = [*BY_NAME, *GATED]


def arm_of(name: str) -> PoisonArm:
    """The arm of this name; after an @ it may say ``scale=X``, ``combine=RULE`` or both.

    Raises:
      BenchError: there is no such arm.
    """
    base, _, changes = name.partition("@")
    if base not in BY_NAME:
        raise BenchError(f"no arm {base!r}; there are {', '.join(BY_NAME)}")
    arm = BY_NAME[base]
    for change in filter(None, changes.split(",")):
        key, _, value = change.partition("=")
        if key == "scale":
            arm = evolve(arm, scale=float(value))
        elif key == "combine":
            arm = evolve(arm, settings={**arm.settings, "combine": value})
        else:
            raise BenchError(f"arm {base}: {key!r} is neither scale nor combine")
    return evolve(arm, name=name)
