"""Simulated runs and their faults, as data generated from a seed.

Because it is data, a failing scenario can be shrunk: remove a fault or a lie and try again.
Scenarios are small, so that thousands are cheap: a few peers, states of a few chunks, slow lines
that make a reduction a large part of a round, a handful of faults.

plain     Half of them are aimed: a peer is lost at a chosen instant of a reduction, and the run
          must continue while the fault lasts. The others have a few faults of any kind, at instants
          or random times.
failover  Three masters share a database: the leading one crashes, is stopped, or is cut off from
          the database or from all peers, the database fails, peers crash.
hostile   One of five peers and a spare sends false messages. There are no other faults.
liar      One of four peers lies about sums until checks have made it harmless, without other
          faults.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from random import Random

from attrs import evolve, frozen

from .hostile_peer import Hostile
from .lying_peers import Liar, Lie

FOUND_S = 60.0  # limit until all peers have joined and the first round is committed
DEADLINE_S = 4.0  # the specs' ``deadline_s``; scales the duration of faults
# Default numbers of peers. The cost grows with the number of pairs: five peers have three times as
# many as three. They find faults that three do not, so some scenarios have them.
PEERS = (3, 3, 3, 4, 5)
SPARE_SHARE = 0.3  # share of scenarios with a spare, which costs as much as another peer
SAMPLES_SHARE = 0.5  # share of scenarios with a data set
SAMPLES = 61  # of it: a few rounds are an epoch
LANES = (1, 1, 1, 2)  # lanes of a link
GAP_S = 1.0  # between faults, on average
LARGE_MIN = 700  # values of a tensor; each fragment has one of these
COLLAPSED_BYTES_PER_S = 1.25e6  # 10 Mbit/s
MASTER = "master"
SUCCESSOR = "successor"  # as ``who``: a peer that took over chunks in the current repair
SPARE = "s0"
MASTERS = ("m1", "m2", "m3")  # hosts of masters that share a database
LEADER = "leader"  # as ``who``: the host of the master that holds the lease

Adversary = Hostile | Liar


class RunKind(enum.Enum):
    """The kind of scenarios to draw; see above."""

    PLAIN = "plain"
    FAILOVER = "failover"
    HOSTILE = "hostile"
    HOSTED = "hosted"


class Instant(enum.Enum):
    """The moment of the run at which a fault happens."""

    TIME = "time"  # no event, only ``at_s``
    REDUCTION = "reduction"  # the master orders one; no peer knows of it yet
    FIRST_RESULT = "first result"  # the victim holds the result of at least one chunk
    LAST_REPORT = "last report"  # all contributors but one have reported the result
    COMMIT = "commit"  # the commit is in the journal
    FLUSH = "flush"  # the master asks the survivors what they hold
    REPAIR = "repair"  # the master has reassigned the lost peer's chunks


class Kind(enum.Enum):
    """The kind of a fault. With ``for_s`` 0 a fault lasts until all faults are ended."""

    CRASH = "crash"  # a machine, possibly the master's, crashes and returns after ``for_s``
    FLAP = "flap"  # a peer crashes and returns ``amount`` times in quick succession
    TRAINER = "trainer"  # a peer's trainer crashes
    STALL = "stall"  # a process is stopped, its kernel continues
    SLEEP = "sleep"  # a machine is suspended: its clock jumps ahead
    CLOCK = "clock"  # the master's monotonic clock jumps ahead, its wall clock by ``amount``
    PARTITION = "partition"  # two hosts are separated, both ways
    ONE_WAY = "one way"  # nothing that ``who`` sends reaches ``other``
    ALONE = "alone"  # a peer is separated from all peers, but not from the master
    CUT_OFF = "cut off"  # a peer is separated from all peers and the master
    CUT = "cut"  # the streams between two hosts break
    DELAY = "delay"  # all lines of a host get a delay of ``amount`` seconds
    RATE = "rate"  # all lines of a host carry ``amount`` bytes per second
    LANE = "lane"  # a bit of the next record on a lane is flipped
    CONTROL = "control"  # a bit of the next control message is flipped
    SLOW_DISK = "slow disk"  # every journal record takes ``amount`` seconds
    FULL_DISK = "full disk"  # the master's journal cannot be written
    TWIN = "twin"  # a second process with the same identity starts on another machine
    JOIN = "join"  # a new peer joins
    LEAVE = "leave"
    KICK = "kick"
    PAUSE = "pause"
    NO_DATABASE = "no database"  # one of several masters is cut off from their database


@frozen
class Fault:
    """One fault. Faults happen in order; each waits for its moment.

    Attributes:
      who: name of the victim's host.
      other: name of the other host, for faults of a pair.
      amount: see ``Kind``.
      for_s: duration; 0: until all faults are ended.
      at_s: earliest time, in seconds after the run's first commit.
      instant: the event to wait for after ``at_s``.
      after_s: delay after that event.
    """

    kind: Kind
    who: str = ""
    other: str = ""
    amount: float = 0.0
    for_s: float = 0.0
    at_s: float = 0.0
    instant: Instant = Instant.TIME
    after_s: float = 0.0

    def __str__(self) -> str:
        parts = [self.kind.value, self.who, self.other and f"with {self.other}"]
        parts.append(f"{self.amount:g}" if self.amount else "")
        parts.append(f"for {self.for_s:.3f} s" if self.for_s else "")
        parts.append(f"at {self.at_s:.3f} s")
        parts.append(f"at the {self.instant.value}" if self.instant is not Instant.TIME else "")
        parts.append(f"+{self.after_s:.3f} s" if self.after_s else "")
        return " ".join(filter(None, parts))


@frozen
class Scenario:
    """One run and its faults.

    Attributes:
      seed: seed of the random choices during the run: jitter, identities, the order of tasks.
      peers: number of peers at the start, without the spare.
      places: number of contributors; 0: every peer contributes.
      tensors: number of elements of each tensor.
      overlap: steps that trainers take while a round runs.
      slowness: factor on the first peer's step time.
      telling: pseudo-gradients are such that a mean reveals its contributors.
      audit: the probability that another contributor audits a chunk of a result.
      linger_s: time between the last fault and the end of all faults.
      samples: of the trainers' data set, which is leased; 0: they have none.
      aimed: enough peers survive that a round must be committed before the faults are ended.
      hosted: names of peers of two hosts, of which the further one is harmed by chance.
      masters: hosts of masters that share a database; none: one master with a disk of its own.
      adversary: a peer that lies.
    """

    seed: int
    peers: int
    spare: bool = False
    places: int = 0
    min_members: int = 1
    fragments: int = 1
    overlap: int = 0
    slowness: float = 1.0
    codec: str = "fp32"
    chunk_bytes: int = 4096
    lanes: int = 1
    tensors: tuple[int, ...] = (3_000,)
    counters: int = 0
    step_s: float = 0.15
    delay_s: float = 0.01
    jitter_s: float = 0.0
    bytes_per_s: float = 1e6
    apply_s: float = 0.0
    telling: bool = False
    linger_s: float = 0.0
    audit: float = 0.0
    samples: int = 0
    aimed: bool = False
    hosted: tuple[str, ...] = ()
    masters: tuple[str, ...] = ()
    adversary: Adversary | None = None
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(
        cls,
        seed: int,
        peers: int | None = None,
        audit: float = 0.0,
        kind: RunKind = RunKind.PLAIN,
        liar: Lie | None = None,
    ) -> Scenario:
        """Generate the scenario of a seed; a pure function.

        Args:
          peers: number of peers at the start; None to draw it from the seed. Only plain scenarios
            have a choice.
          audit: the spec's audit probability, of plain scenarios and of those with a liar.
          liar: what the liar lies as; None: nobody lies about sums.
        """
        if liar is not None:
            return _with_liar(seed, audit, liar)
        if kind is RunKind.FAILOVER:
            return _with_masters(seed)
        if kind is RunKind.HOSTILE:
            return _with_hostile(seed)
        rng = Random(seed)
        count = rng.choice(PEERS)
        count = count if peers is None else peers
        made = _aimed(rng, count) if rng.random() < 0.5 else _mixed(rng, count)
        if kind is RunKind.HOSTED:
            return evolve(made, hosted=tuple(made.names[::2]))
        samples = SAMPLES if Random(f"samples {seed}").random() < SAMPLES_SHARE else 0
        return evolve(made, audit=audit, samples=samples)

    @property
    def names(self) -> list[str]:
        """The names of the initial peers without the spare."""
        return [f"p{index}" for index in range(self.peers)]

    @property
    def first_peers(self) -> list[str]:
        """The names of the initial peers with the spare."""
        return [*self.names, *([SPARE] if self.spare else [])]

    @property
    def causes(self) -> list[str]:
        """What may harm the run: the faults, and the lies of the adversary."""
        lies = self.adversary.causes if self.adversary is not None else []
        return [*map(str, self.faults), *lies]

    @property
    def toml(self) -> str:
        return TOML.format(run=self, deadline_s=DEADLINE_S)

    @property
    def reduction_s(self) -> float:
        """Rough duration of the largest fragment's reduction: contributions, then results."""
        return 2.4 * 4 * max(self.tensors) / self.peers / self.bytes_per_s


TOML = """
[run]
name = "simulated"
[diloco]
sync_every = 2
fragments = {run.fragments}
overlap = {run.overlap}
[membership]
contributors = {run.places}
min_members = {run.min_members}
deadline_s = {deadline_s}
grace_s = 1
[reduce]
codec_up = "{run.codec}"
codec_down = "{run.codec}"
chunk_bytes = {run.chunk_bytes}
lanes = {run.lanes}
audit = {run.audit}
"""


# ---------------------------------------------------------------- a peer is lost in a reduction


def _aimed(rng: Random, peers: int) -> Scenario:
    plain = Scenario(
        seed=rng.getrandbits(32),
        peers=peers,
        spare=rng.random() < SPARE_SHARE,
        min_members=max(2, peers - 2),
        codec=rng.choice(["fp32", "fp32", "int8"]),
        lanes=rng.choice(LANES),
        tensors=(rng.choice([3_000, 3_000, 5_000, 7_000]),),
        counters=rng.randint(0, 1),
        delay_s=rng.choice([0.001, 0.01]),
        jitter_s=rng.choice([0.0, 0.005]),
        bytes_per_s=rng.choice([1e5, 4e5]),
        telling=rng.random() < 0.5,
        aimed=peers > 2,  # two peers that lose each other cannot continue
    )
    who, other = rng.sample(plain.names, 2)
    faults = _loss(rng, plain, who, other, at_s=0.0)
    return evolve(plain, faults=faults, linger_s=_linger_s(rng))


def _linger_s(rng: Random) -> float:
    """Draw the time before faults are ended; rarely so long that a silent peer is declared dead."""
    return 2.5 * DEADLINE_S if rng.random() < 0.05 else rng.uniform(0, 0.5)


def _loss(rng: Random, run: Scenario, who: str, other: str, at_s: float) -> tuple[Fault, ...]:
    """Draw the loss of a peer at an instant of a reduction, perhaps of a second one soon after."""

    def anywhere() -> float:
        return rng.uniform(0, run.reduction_s)

    def first(kind: Kind, instant: Instant = Instant.REDUCTION, after_s: float = 0.0) -> Fault:
        return Fault(kind, who, at_s=at_s, instant=instant, after_s=after_s)

    somewhere = first(Kind.CRASH, after_s=anywhere())
    then = Fault(Kind.CRASH, other, at_s=at_s)
    cut = Fault(Kind.CUT, who, MASTER, at_s=at_s)
    choices: list[Callable[[], tuple[Fault, ...]]] = [
        lambda: (first(Kind.CRASH),),  # before the first byte
        lambda: (somewhere,),
        lambda: (first(Kind.CRASH, Instant.FIRST_RESULT),),
        lambda: (first(Kind.CRASH, Instant.COMMIT, rng.uniform(0, 0.05)),),
        lambda: (first(Kind.CRASH, Instant.LAST_REPORT),),
        lambda: (somewhere, then),  # two at once
        lambda: (somewhere, evolve(then, after_s=anywhere())),  # one after the other
        lambda: (
            somewhere,
            Fault(Kind.CRASH, SUCCESSOR, other, 0, 0, at_s, Instant.REPAIR, rng.uniform(0, 0.1)),
        ),
        lambda: (somewhere, evolve(then, instant=Instant.FLUSH, after_s=rng.uniform(0, 0.05))),
        lambda: (evolve(cut, instant=Instant.REDUCTION, after_s=anywhere()),),
        lambda: (
            evolve(cut, instant=Instant.REDUCTION, after_s=anywhere()),
            Fault(Kind.PARTITION, who, MASTER, at_s=at_s),
        ),
        lambda: (first(Kind.ALONE, after_s=anywhere()),),
        lambda: (evolve(first(Kind.PARTITION, after_s=anywhere()), other=other),),
        lambda: (evolve(first(Kind.ONE_WAY, after_s=anywhere()), other=other),),
        lambda: (evolve(first(Kind.CUT, after_s=anywhere()), other=other),),
        lambda: (first(Kind.CUT_OFF, after_s=anywhere()),),
        lambda: (
            evolve(
                first(rng.choice([Kind.STALL, Kind.SLEEP, Kind.CUT_OFF]), after_s=anywhere()),
                for_s=rng.uniform(0, 2 * DEADLINE_S),
            ),
        ),
        lambda: (
            evolve(
                first(Kind.CRASH, rng.choice(list(_ANYTIME)), rng.uniform(0, 0.1)),
                who=MASTER,
                for_s=rng.uniform(0.1, 2.0),
            ),
        ),
    ]
    return rng.choice(choices)()


# ---------------------------------------------------------------- anything happens

_ANYTIME = (Instant.REDUCTION, Instant.FIRST_RESULT, Instant.LAST_REPORT, Instant.COMMIT)


def _mixed(rng: Random, peers: int) -> Scenario:
    large = rng.random() < 0.05  # large enough for 10 Mbit/s to hurt
    plain = Scenario(
        seed=rng.getrandbits(32),
        peers=peers,
        spare=rng.random() < SPARE_SHARE,
        places=rng.choice([0, max(2, peers - 1)]),
        codec=rng.choice(["fp32", "int8"]),
        fragments=rng.choice([1, 1, 2]),
        chunk_bytes=65_536 if large else 4096,
        lanes=rng.choice(LANES),
        tensors=(200_000, 50_000)
        if large
        else tuple(rng.choice([1, 3, 700, 3_000]) for _ in range(rng.randint(2, 4))),
        counters=rng.randint(0, 2),
        step_s=rng.choice([0.3, 0.5]),
        delay_s=rng.choice([0.001, 0.02, 0.08]),
        jitter_s=rng.choice([0.0, 0.01]),
        bytes_per_s=1e7 if large else rng.choice([1e5, 4e5]),
        apply_s=rng.choice([0.0, 0.02]),
        telling=rng.random() < 0.3,
    )
    plain = evolve(plain, tensors=_enough(plain.tensors, plain.fragments))
    faults: list[Fault] = []
    at_s = 0.0
    for _ in range(rng.randint(2, 4)):
        at_s += rng.expovariate(1 / GAP_S)
        who, other = rng.sample(plain.names, 2)
        if rng.random() < 0.2:
            faults += _loss(rng, plain, who, other, at_s)
            continue
        instant = rng.choice(_ANYTIME) if rng.random() < 0.3 else Instant.TIME
        after_s = rng.uniform(0, plain.reduction_s) if instant is not Instant.TIME else 0.0
        fault = Fault(Kind.CRASH, who, at_s=at_s, instant=instant, after_s=min(after_s, 1.0))
        faults.append(_anything(rng, fault, other))
    linger_s = _linger_s(rng)
    # With fragments and an overlap several rounds are in flight. A slow peer is nudged, or late.
    overlap, slowness = rng.choice([0, 0, 1]), rng.choice([1.0, 1.0, 1.0, 5.0])
    return evolve(
        plain, faults=tuple(faults), linger_s=linger_s, overlap=overlap, slowness=slowness
    )


def _enough(tensors: tuple[int, ...], fragments: int) -> tuple[int, ...]:
    """Add tensors until each fragment is large: a tiny one's update norm varies by chance."""
    large = sum(size >= LARGE_MIN for size in tensors)
    return tensors + (LARGE_MIN,) * max(0, fragments - large)


def _anything(rng: Random, fault: Fault, other: str) -> Fault:
    """Draw a fault of any kind at the moment of the given fault."""
    kind = rng.choice(_KINDS)
    anybody = other if rng.random() < 0.6 else MASTER
    lasting_s = rng.choice([0.0, rng.uniform(0.1, 1.0), rng.uniform(1.0, 2 * DEADLINE_S)])
    match kind:
        case Kind.PARTITION | Kind.ONE_WAY | Kind.CUT | Kind.CONTROL:
            ends = [fault.who, anybody] if rng.random() < 0.5 else [anybody, fault.who]
            return evolve(fault, kind=kind, who=ends[0], other=ends[1], for_s=lasting_s)
        case Kind.LANE:
            return evolve(fault, kind=kind, other=other)
        case Kind.FLAP:
            return evolve(fault, kind=kind, amount=rng.randint(2, 4))
        case Kind.DELAY:
            return evolve(fault, kind=kind, amount=rng.uniform(0.1, 1.0), for_s=lasting_s)
        case Kind.RATE:
            rate = rng.choice([COLLAPSED_BYTES_PER_S, 1e5, 2e4])
            return evolve(fault, kind=kind, amount=rate, for_s=lasting_s)
        case Kind.CLOCK:
            return evolve(fault, kind=kind, who=MASTER, amount=rng.choice([0.5, 2.5, 20, 86_400]))
        case Kind.SLOW_DISK:
            return evolve(
                fault, kind=kind, who=MASTER, amount=rng.uniform(0.01, 0.7), for_s=lasting_s
            )
        case Kind.FULL_DISK:
            return evolve(fault, kind=kind, who=MASTER, for_s=lasting_s)
        case Kind.CRASH | Kind.STALL | Kind.SLEEP:
            who = fault.who if rng.random() < 0.6 else MASTER
            return evolve(fault, kind=kind, who=who, for_s=lasting_s)
        case Kind.JOIN | Kind.PAUSE:
            return evolve(fault, kind=kind, who="", for_s=lasting_s if kind is Kind.PAUSE else 0.0)
        case _:
            return evolve(fault, kind=kind, for_s=lasting_s)


_ONE_MASTER = tuple(kind for kind in Kind if kind is not Kind.NO_DATABASE)
_KINDS = (*_ONE_MASTER, Kind.CRASH, Kind.CRASH, Kind.CRASH, Kind.JOIN, Kind.STALL)


# ---------------------------------------------------------------- several masters

_MASTERS_FAULTS = (2, 3, 4, 5)
_MASTERS_GAP_S = 1.5  # between the beginnings of two faults, on average
_MASTERS_FAULT_S = (0.3, 6.0)
_LASTING_SHARE = 0.5  # of the scenarios, in which the leader's last fault does not end
_LASTING = (Kind.CRASH, Kind.STALL, Kind.NO_DATABASE, Kind.ALONE)
_OF_DATABASE = (Kind.SLOW_DISK, Kind.FULL_DISK)


def _with_masters(seed: int) -> Scenario:
    rng = Random(f"failover {seed}")
    plain = Scenario(
        seed=seed,
        peers=3,
        min_members=2,
        tensors=(2_000,),
        step_s=0.05,
        delay_s=rng.uniform(0.001, 0.03),
        bytes_per_s=1e9,
        telling=True,
        aimed=True,
        masters=MASTERS,
    )
    faults: list[Fault] = []
    at_s = 0.0
    for _ in range(rng.choice(_MASTERS_FAULTS)):
        at_s += rng.expovariate(1 / _MASTERS_GAP_S)
        who = LEADER if rng.random() < 0.8 else rng.choice(MASTERS)
        fault = Fault(Kind.CRASH, who, at_s=at_s, for_s=rng.uniform(*_MASTERS_FAULT_S))
        kind = rng.choice((*_LASTING, Kind.SLEEP, *_OF_DATABASE, None))  # None: a peer crashes
        if kind is None:
            fault = evolve(fault, who=rng.choice(plain.names))
        else:
            amount = rng.uniform(0.05, 0.4) if kind is Kind.SLOW_DISK else 0.0
            fault = evolve(fault, kind=kind, amount=amount)
        faults.append(fault)
    if rng.random() < _LASTING_SHARE:
        over_s = max(fault.at_s + fault.for_s for fault in faults)
        faults.append(Fault(rng.choice(_LASTING), LEADER, at_s=over_s))
    return evolve(plain, faults=tuple(faults))


# ---------------------------------------------------------------- an adversary

HOSTILE_AUDIT = 0.2  # in a quarter of the scenarios


def _with_hostile(seed: int) -> Scenario:
    rng = Random(f"harassed {seed}")
    plain = Scenario(
        seed=seed,
        peers=5,
        spare=True,
        min_members=2,
        tensors=(6_000,),  # six chunks, so that each of the five owns one
        step_s=0.1,
        delay_s=0.005,
        telling=True,
        audit=HOSTILE_AUDIT if rng.random() < 0.25 else 0.0,
    )
    return evolve(plain, adversary=Hostile.of(seed, rng.choice([*plain.names, SPARE])))


def _with_liar(seed: int, audit: float, lie: Lie) -> Scenario:
    return Scenario(
        seed=seed,
        peers=4,
        min_members=2,
        tensors=(7_000,),  # seven chunks, so that each of the four owns one
        step_s=0.05,
        delay_s=0.001,
        telling=True,
        audit=audit,
        adversary=Liar("p3", lie),
    )
