"""The arms of ``learning``: what each run is, and what it is compared with.

A name may change some of its arm's settings: ``diloco4@sync_every=10,inner=muon``. Keys are those
of ``[diloco]``, ``[reduce]`` and ``[membership]`` in ``run.toml``, which no two tables share, and
``inner``. A baseline has the same inner optimizer.
"""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import numpy as np
from attrs import asdict, evolve, field, frozen
from attrs.validators import in_

from benchmarks.report import BenchError
from holdfast.membership.spec.spec import DilocoTable, MembershipTable, ReduceTable, RunSpec
from holdfast.protocol.errors import UserError

SYNC_EVERY = 20  # H
FRAGMENTS = 5  # P, where there are several: four layers, and the embeddings
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.7}  # what runs of tens of rounds want

RATE_MAX, RATE_MIN = 1e-3, 1e-4  # of the inner optimizer
VALIDATION_WINDOWS = 4_096  # 262,144 bytes
EVALUATION_BATCH = 64  # windows at once

STEP_S = 0.1  # an inner step, in virtual time
NEAR_S = 0.01  # between two hosts
# An overlap of tau is tau steps only if the round takes longer: else its result is merged as soon
# as it is there. A round takes six trips from host to host one after the other, so this is enough.
TRIPS = 5

_TABLES = {
    key.name: table
    for table, kind in (
        ("diloco", DilocoTable),
        ("reduce", ReduceTable),
        ("membership", MembershipTable),
    )
    for key in attrs.fields(kind)
}

INNER = ("adamw", "muon")


@frozen(eq=False)  # a key of caches by itself: its settings have no hash
class Arm:
    """A run.

    Attributes:
      what: it is, in a few words.
      peers: that contribute at a time.
      baseline: the arm that its loss is compared with.
      settings: of ``run.toml``, by key.
      kill_rounds: after so many rounds one peer dies and another one comes; 0: nobody does.
      inner: optimizer, ``adamw`` or ``muon``.
      slowness: how many times longer the steps of the last peers take, and of those that replace
        them.
    """

    name: str
    what: str
    peers: int
    baseline: str
    settings: dict[str, Any] = field(factory=dict)
    kill_rounds: int = 0
    inner: str = field(default="adamw", validator=in_(INNER))
    slowness: tuple[float, ...] = ()

    @property
    def key(self) -> dict[str, Any]:
        """What its outcome depends on; a name and a description are none of that."""
        told = {"name", "what", "baseline"}
        defaults = Arm("", "", 0, "")
        key = {
            name: value
            for name, value in asdict(self).items()
            if name not in told and value != getattr(defaults, name, None)
        }
        return {**key, "distributed": self.distributed}

    def slowness_of(self, replica: int) -> float:
        """How many times longer this replica's steps take than the fastest one's."""
        behind = self.peers - replica  # the last one: 1
        return self.slowness[-behind] if 1 <= behind <= len(self.slowness) else 1.0

    def batch(self, replica: int, windows: int) -> int:
        """Windows of a step of this replica in data parallel on the tokens that the arm's peers
        train.
        """
        return max(1, round(windows / self.slowness_of(replica)))

    @property
    def distributed(self) -> bool:
        """Whether there are peers at all, or one process that adds up all gradients."""
        return not self.name.startswith("dp")

    @property
    def fragments(self) -> int:
        return int(self.settings.get("fragments", 1))

    @property
    def delay_s(self) -> float:
        """Between two hosts; see ``TRIPS``."""
        if self.slowness:
            return NEAR_S  # speed is the question, not what an overlap does to the loss
        return max(NEAR_S, int(self.settings.get("overlap", 0)) * STEP_S / TRIPS)

    def rounds(self, steps: int) -> int:
        """Rounds in so many steps: each fragment once per ``sync_every``."""
        return steps * self.fragments // int(self.settings["sync_every"])

    def toml(self, steps: int) -> str:
        """The run's ``run.toml``."""
        tables: dict[str, list[str]] = {
            "run": [f'name = "{self.name[:64]}"', f"rounds = {self.rounds(steps)}"],
            "diloco": [],
            "reduce": [],
            "membership": [f"contributors = {self.peers}"],
        }
        for key, value in self.settings.items():
            tables[_TABLES[key]].append(f"{key} = {json.dumps(value)}")
        return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in tables.items())


@frozen
class Recipe:
    """What each replica does, whatever the arm.

    Attributes:
      batch: windows of a step.
      seed: of the first weights, and of what is drawn.
    """

    steps: int = 500
    batch: int = 12
    seed: int = 0

    @property
    def warm_up_steps(self) -> int:
        return self.steps // 10

    def rate(self, step: int) -> float:
        """Warm-up, then a cosine down to ``RATE_MIN`` at the last step."""
        if step < self.warm_up_steps:
            return RATE_MAX * (step + 1) / self.warm_up_steps
        share = min(1.0, (step - self.warm_up_steps) / (self.steps - self.warm_up_steps))
        return RATE_MIN + 0.5 * (RATE_MAX - RATE_MIN) * (1 + math.cos(math.pi * share))

    def chance(self, replica: int) -> np.random.Generator:
        """What a replica draws its windows by; the same ones in every arm."""
        return np.random.default_rng((self.seed, replica))


@frozen
class Outcome:
    """What became of an arm with one seed.

    Attributes:
      loss: on the held-out bytes, in nats per byte.
      losses: of parts of these bytes; ``loss`` is their mean.
      tokens: trained by all replicas together.
      round_bytes: handed to all streams between all hosts in a round, from the first to the last;
        of a dp arm, which has none, what a ring all-reduce of bf16 gradients would send in a step.
      speed: tokens per second as a share of what all replicas did if each was alone; None for dp.
      digest: of the final parameters.
      seconds: it took to find out.
    """

    arm: str
    seed: int
    loss: float
    losses: list[float]
    tokens: int
    round_bytes: float
    speed: float | None
    digest: str
    seconds: float
    notes: dict[str, Any] = field(factory=dict)


def _arm(name: str, what: str, peers: int, baseline: str, **settings: Any) -> Arm:
    extra = {key: settings.pop(key) for key in _EXTRA if key in settings}
    # Everybody trains all steps of a round, unless an arm says otherwise: what is compared is the
    # learning.
    common = {"sync_every": SYNC_EVERY, "min_members": peers, "pace": "lockstep", **OUTER}
    return Arm(name, what, peers, baseline, {**common, **settings}, **extra)


_EXTRA = ("kill_rounds", "inner", "slowness")
_STREAMING = {"fragments": FRAGMENTS, "overlap": 2}
_ONE_STEP = {"fragments": FRAGMENTS, "overlap": 1}
_NF4 = {"codec_up": "nf4", "codec_down": "nf4"}
_MUON: dict[str, Any] = {"inner": "muon", "sync_every": 10, "outer_lr": 1.0}
# In place of momentum a rate of 2: with 1 the loss is 4 % higher, with 2.5 1.6 %. So few rounds
# cannot afford to lose anything.
_SPARSE = {"outer_lr": 2.0, "outer_momentum": 0.0, "feedback_decay": 1.0}
_UNEVEN: dict[str, Any] = {
    "slowness": (10 / 3, 10.0),
    "overlap": 2,
    "pace": "elastic",
    "min_members": 2,
}

ARMS = (
    Arm("dp", "data parallel, 2 replicas", 2, "dp"),
    _arm("diloco2", "DiLoCo, 2 peers", 2, "dp"),
    _arm("diloco4", "DiLoCo, 4 peers", 4, "dp4"),
    _arm("streaming2", "streaming, overlap 2", 2, "diloco2", **_STREAMING),
    _arm(
        "streaming2-nf4",
        "streaming, overlap 2, NF4 both ways",
        2,
        "streaming2",
        **_STREAMING,
        **_NF4,
    ),
    _arm(
        "sparse2",
        "the 4th part of the values with 2 bits each, no outer momentum",
        2,
        "diloco2",
        codec_up="topk4",
        **_SPARSE,
    ),
    # What was found since: see ``docs/choosing.md``.
    _arm("muon4", "DiLoCo, 4 peers, Muon, H = 10, outer rate 1", 4, "dp4@inner=muon", **_MUON),
    _arm("muon8", "DiLoCo, 8 peers, Muon, H = 10, outer rate 1", 8, "dp8@inner=muon", **_MUON),
    _arm("streaming2-1", "streaming, overlap 1", 2, "diloco2", **_ONE_STEP),
    _arm(
        "sparse2-10",
        "the 8th part of the values with 2 bits each, H = 10, no outer momentum",
        2,
        "diloco2",
        codec_up="topk8",
        codec_down="int8+zstd",
        sync_every=10,
        **_SPARSE,
    ),
    _arm(
        "streaming2-1-nf4",
        "streaming, overlap 1, NF4 both ways",
        2,
        "diloco2",
        **_ONE_STEP,
        **_NF4,
    ),
    _arm(
        "muon-streaming2",
        "streaming, overlap 1, NF4 both ways, Muon, H = 10, outer rate 1",
        2,
        "dp@inner=muon",
        **_MUON,
        **_ONE_STEP,
        **_NF4,
    ),
    # As fast as 10, 3 and 1: in the steps of the fastest one the last one takes a tenth as many.
    _arm("uneven3", "3 peers, 10, 3 and 1 times as fast", 3, "dp-uneven3", **_UNEVEN),
    _arm(
        "elastic3",
        "the same, one killed and one joins every three rounds",
        3,
        "uneven3",
        **_UNEVEN,
        kill_rounds=3,
    ),
    # What others are compared with.
    Arm("dp4", "data parallel, 4 replicas", 4, "dp4"),
    Arm("dp8", "data parallel, 8 replicas", 8, "dp8"),
    Arm(
        "dp-uneven3",
        "data parallel on the tokens of `uneven3`",
        3,
        "dp-uneven3",
        slowness=_UNEVEN["slowness"],
    ),
)
BY_NAME = {arm.name: arm for arm in ARMS}


def arm_of(name: str) -> Arm:
    """The arm of this name, with the settings that the name changes.

    Raises:
      BenchError: there is no such arm, or it cannot have these settings.
    """
    base, _, changes = name.partition("@")
    if base not in BY_NAME:
        raise BenchError(f"no arm {base!r}; there are {', '.join(BY_NAME)}")
    arm = BY_NAME[base]
    if not changes:
        return arm
    changed = evolve(arm, name=name, what=f"{arm.what}; {changes}")
    for change in changes.split(","):
        key, _, text = change.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        try:
            changed = _changed(changed, key, value)
        except (TypeError, ValueError) as error:
            raise BenchError(f"arm {base}, {key}: {error.args[0]}") from error
    if arm.distributed:
        try:
            RunSpec.parse(changed.toml(steps=100_000))
        except (UserError, TypeError, ValueError) as error:
            raise BenchError(f"arm {base}: {error}") from error
    return changed


def _changed(arm: Arm, key: str, value: Any) -> Arm:
    if key == "inner":
        own = arm.baseline == arm.name.partition("@")[0]
        return evolve(
            arm, inner=value, baseline=arm.name if own else f"{arm.baseline}@inner={value}"
        )
    if arm.distributed and key in _TABLES:
        return evolve(arm, settings={**arm.settings, key: value})
    raise ValueError("no setting that a name could change")


# A section of its own: what was found since, and what that is compared with.
FOUND = ["muon4", "diloco4@inner=muon", "muon8", "streaming2-1", "streaming2-1-nf4", "sparse2-10"]
FOUND += ["muon-streaming2", "uneven3", "elastic3"]
# The arm that measures a preset's settings; ``allreduce`` with SGD is data parallel to the last
# bit.
OF_PRESET = {
    "diloco": "diloco2",
    "streaming": "streaming2-1-nf4",
    "sparse": "sparse2-10",
    "muon": "muon4",
    "muon-streaming": "muon-streaming2",
}
_OTHERS = {*FOUND, "dp8", "dp-uneven3"}
DEFAULT = [*(arm.name for arm in ARMS if arm.name not in _OTHERS), "diloco4@sync_every=10"]


def with_baselines(names: list[str]) -> list[str]:
    """These and what they are compared with, each once, baselines first."""
    return list(dict.fromkeys(each for name in names for each in (arm_of(name).baseline, name)))
