"""A member that sends false messages of every kind to its master and to other peers.

It holds a grant and a key as any member. Its daemon's messages are changed, dropped or repeated on
the way out, and at random moments it sends unrequested ones. In a reduction it withholds data from
other peers, or sends each of them different data. None of this is in production code. For results
that are wrong but equal for all receivers, see ``lying_peers``.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from random import Random
from typing import Any

import trio
from attrs import evolve, frozen

from ..collectives.chunk_sender import OnBad, Send
from ..collectives.links.send_queue import Frame
from ..collectives.reduction import Reduction
from ..daemon.peer.master_session import MasterSession
from ..daemon.peer.peer_service import PeerService
from ..daemon.peer.reducer import Reducer
from ..protocol import messages as m
from .lying_peers import CorruptReducer
from .witnessed_services import WitnessedPeer

LIES_MAX = 3  # kinds of lies of one peer
PAUSE_S = 0.4  # mean time between two unrequested messages
FALSE_FINDINGS_MAX = 6  # chunks that it reports at once
REPEATABLE_MAX = 64  # messages that may be repeated


class Falsehood(enum.Enum):
    """A kind of lie that a hostile peer tells repeatedly."""

    LOST = "claims that it lost other peers in a reduction"
    LOST_ONE = "claims that it lost one peer in each reduction"
    BAD = "claims that other peers sent invalid contributions"
    BAD_ONE = "claims so of one peer in each reduction"
    FOUND = "reports large norms for one peer, and that it copies and opposes the others"
    DIGEST = "reports other results than it holds"
    MANIFEST = "reports contributors missing in results"
    ROOT = "reports other roots than it holds"
    HELLO = "claims in its hello that it holds other state"
    READY = "announces wrong norms, steps and roots of its update"
    NOT_READY = "claims that it is not ready"
    ROUTES = "claims that it reaches no peer"
    ROUTES_WORK = "claims that arbitrary routes work"
    BROKEN = "claims that all its links broke"
    MOVES = "claims that bytes move, and reports no result"
    HELD = "claims that it holds other chunks than it does"
    MUTE = "drops some of its messages"
    DONORS = "claims that donors serve wrong blocks"
    RATES = "reports wrong rates"
    TRAINER = "claims repeatedly that its trainer fails"
    AUDITS = "sends random audit verdicts"
    AGAIN = "repeats its messages"
    DIAGNOSIS = "sends random diagnoses"
    KEEPS_ONE = "withholds results from one peer"
    KEEPS_ALL = "withholds results from all peers"
    OWES_ONE = "withholds its contributions from one chunk owner"
    OWES_ALL = "withholds its contributions from all chunk owners"
    TWO_FACED = "sends every peer a different result"
    NOT_FINITE = "sends one chunk owner invalid values"


@frozen
class Hostile:
    """A hostile peer, as data.

    Attributes:
      name: of its host.
      kinds: the kinds of its lies.
      always: it lies at every opportunity, instead of at random.
    """

    seed: int
    name: str
    kinds: tuple[Falsehood, ...]
    always: bool

    @classmethod
    def of(cls, seed: int, name: str) -> Hostile:
        """Generate the hostile peer of a seed."""
        kinds, always = _drawn(Random(f"hostile {seed}"))
        return cls(seed, name, kinds, always)

    @property
    def causes(self) -> list[str]:
        return [f"{self.name} {kind.value}" for kind in sorted(self.kinds, key=lambda k: k.name)]

    def simpler(self) -> list[Hostile]:
        """Return it with one kind of lie less, each in turn; it keeps one."""
        fewer = [tuple(k for k in self.kinds if k is not kind) for kind in self.kinds]
        return [evolve(self, kinds=kinds) for kinds in fewer if kinds]


def _drawn(rng: Random) -> tuple[tuple[Falsehood, ...], bool]:
    kinds = rng.sample(list(Falsehood), rng.randint(1, LIES_MAX))
    return tuple(kinds), rng.random() < 0.5


class HostilePeer:
    """A hostile peer at work.

    Attributes:
      rng: decides the content and the times of its lies.
      lie_count: lies so far.
    """

    def __init__(self, hostile: Hostile) -> None:
        self.rng = Random(f"hostile {hostile.seed}")
        _drawn(self.rng)  # the run's choices follow those of the scenario
        self.kinds, self.always = hostile.kinds, hostile.always
        self.lie_count = 0
        self._sent: list[m.Message] = []
        self._moved = 0
        self._quarry = ""  # the peer that it lies about, the same for a long time

    def service(self, *args: Any, **options: Any) -> WitnessedPeer:
        """Make a service whose session and reductions carry lies."""
        return _HostileService(self, *args, **options)

    # ------------------------------------------------------------ falsified messages

    def does(self, kind: Falsehood, often: float = 0.7) -> bool:
        """Return whether it tells a kind of lie now, and count the lie."""
        lies = kind in self.kinds and (self.always or self.rng.random() < often)
        self.lie_count += lies
        return lies

    def greeting(self, hello: m.Hello) -> m.Hello:
        if not self.does(Falsehood.HELLO):
            return hello
        heads = tuple(evolve(h, root=self.rng.randbytes(32)) for h in hello.heads)
        later = tuple(evolve(head, version=head.version + 1) for head in heads)
        return evolve(hello, heads=self.rng.choice([(), heads, later]), kept=(), undecided=())

    def instead(self, service: PeerService, message: m.Message) -> Iterator[m.Message]:
        """Yield the messages to send instead of one of its daemon's."""
        self._sent = [*self._sent, message][-REPEATABLE_MAX:]
        if self.does(Falsehood.MUTE, 0.2):
            return
        match message:
            case m.Reduced():
                if not self.does(Falsehood.MOVES):
                    yield self._reduced(service, message)
            case m.Applied() | m.Synced() if self.does(Falsehood.ROOT):
                yield evolve(message, head=evolve(message.head, root=self.rng.randbytes(32)))
            case m.Ready() if self.does(Falsehood.NOT_READY):
                yield m.NotReady(message.round, "it does not please me")
            case m.Ready() if self.does(Falsehood.READY):
                yield self._ready(message)
            case m.Held() if self.does(Falsehood.HELD):
                yield evolve(message, results=self.rng.randbytes(len(message.results)))
            case m.Audited() if self.does(Falsehood.AUDITS):
                yield evolve(message, findings=self._findings(service))
            case m.Diagnosis() if self.does(Falsehood.DIAGNOSIS):
                yield self._diagnosis(service, message)
            case _:
                yield message

    def _findings(self, service: PeerService) -> tuple[m.ChunkFinding, ...]:
        peers = [*self._others(service), ""]
        return tuple(
            m.ChunkFinding(chunk, self.rng.random() < 0.5, self.rng.choice(peers))
            for chunk in range(self.rng.randint(0, FALSE_FINDINGS_MAX))
        )

    def _diagnosis(self, service: PeerService, message: m.Diagnosis) -> m.Diagnosis:
        def some() -> tuple[str, ...]:
            others = self._others(service)
            return tuple(self.rng.sample(others, self.rng.randint(0, len(others))))

        made = tuple(m.MadeDigest(peer, self.rng.randbytes(32)) for peer in some())
        return evolve(message, contributions=some(), results=some(), made=made)

    def _ready(self, message: m.Ready) -> m.Ready:
        norm = message.norm * 10 ** self.rng.uniform(-6, 6)
        root = self.rng.choice([message.state_root, self.rng.randbytes(32)])
        step_s = self.rng.choice([0.0, 1e-6, 1e6])
        step = self.rng.choice([0, message.step, 2**40])
        return evolve(message, norm=norm, state_root=root, step_s=step_s, step=step)

    def _reduced(self, service: PeerService, message: m.Reduced) -> m.Reduced:
        order = service.replica.rounds[message.round].order
        assert order is not None
        peers = [contributor.peer for contributor in order.contributors]
        if self.does(Falsehood.DIGEST):
            message = evolve(message, digest=self.rng.randbytes(32))
        if self.does(Falsehood.MANIFEST):
            bits = self.rng.getrandbits(len(peers)).to_bytes((len(peers) + 7) // 8, "little")
            count = sum(run.chunk_count for run in order.plan.owners)
            message = evolve(message, manifest=(m.ContributorRun(bits, count),))
        if self.does(Falsehood.FOUND):
            square = 10 ** self.rng.uniform(0, 12)
            quarry = self.quarry_of(service)
            if quarry in peers:
                found = _slander(quarry, square, peers, service.config.me)
                message = evolve(message, norm_sums=found)
        return message

    # ------------------------------------------------------------ unrequested messages

    async def harass(self, service: PeerService) -> None:
        while True:
            await trio.sleep(self.rng.expovariate(1 / PAUSE_S))
            if service.session.connected:
                for message in list(self._unasked(service)):
                    self.lie_count += 1
                    MasterSession.tell(service.session, message)

    def _others(self, service: PeerService) -> list[str]:
        view = service.replica.view
        me = service.config.me
        return [] if view is None else [each.peer for each in view.members if each.peer != me]

    def quarry_of(self, service: PeerService) -> str:
        """Return the peer that it lies about."""
        others = self._others(service)
        if others and (self._quarry not in others or self.rng.random() < 0.05):
            self._quarry = self.rng.choice(others)
        return self._quarry

    def _unasked(self, service: PeerService) -> Iterator[m.Message]:
        others, kinds = self._others(service), self.kinds
        if not others:
            return
        some = tuple(self.rng.sample(others, self.rng.randint(1, len(others))))
        one = (self.quarry_of(service),)
        for here in list(service.replica.rounds.values()):
            for kind, named, bad in (
                (Falsehood.LOST, some, False),
                (Falsehood.LOST_ONE, one, False),
                (Falsehood.BAD, some, True),
                (Falsehood.BAD_ONE, one, True),
            ):
                if kind in kinds and here.order is not None:
                    yield m.ReduceFailed(here.round, here.attempt, named, bad, "because I say so")
            if Falsehood.AUDITS in kinds:
                transfer = self.rng.getrandbits(32)
                yield m.Audited(here.round, here.attempt, transfer, self._findings(service))
        if Falsehood.ROUTES in kinds:
            for peer in others:
                worked = self.rng.random() < 0.5
                yield m.RouteWanted(peer, self.rng.choice([0, 1, 2, 2**40]), worked, "no way")
        if Falsehood.ROUTES_WORK in kinds:
            yield from (m.RouteWorks(peer, self.rng.choice([0, 1, 2])) for peer in others)
        if Falsehood.BROKEN in kinds:
            yield from map(m.LinkBroken, others)
        if Falsehood.MOVES in kinds:
            self._moved += 1_000_000
            moved = self._moved
            yield m.Progress(2**40, moved, 1e9, 0.0, "training", moved, moved, moved, {})
        yield from self._about_the_rest(one[0])

    def _about_the_rest(self, quarry: str) -> Iterator[m.Message]:
        kinds, rng = self.kinds, self.rng
        if Falsehood.DONORS in kinds:
            yield m.SyncFailed(0, rng.randint(0, 5), (quarry,), "wrong blocks")
            yield m.Synced(m.FragmentHead(0, 0, rng.randbytes(32)), 1, (quarry,))
        if Falsehood.RATES in kinds:
            rate = 10 ** rng.uniform(-3, 12)
            load = m.LinkLoad(quarry, int(rate), 1.0)
            yield m.Measured(int(rate), 1.0, int(rate), 1.0, (load,))
        if Falsehood.TRAINER in kinds:
            kind, remedy = rng.choice(list(m.FailureKind)), rng.choice(list(m.Remedy))
            yield m.TrainerFailed(kind, "it fails", remedy, rng.randint(0, 9), 1e9)
        if Falsehood.AGAIN in kinds and self._sent:
            yield rng.choice(self._sent)


def _slander(quarry: str, square: float, peers: Sequence[str], me: str) -> bytes:
    """Return ``norm_sums`` by which one peer sends too much, which opposes what all others send and
    is the same as this one's.
    """
    rows = [(square, 1.0, -9.0) if p == quarry else (1.0, 1.0, 9.0) for p in peers]
    sums = struct.pack(f"<{3 * len(rows) + 3}f", *chain(*rows), 1.0, 99.0, 0.0)
    drawn = {peer: Random(f"sketch {place}").randbytes(8) for place, peer in enumerate(peers)}
    return sums + b"".join((drawn | {quarry: bytes(8), me: bytes(8)})[peer] for peer in peers)


class _HostileService(WitnessedPeer):
    def __init__(self, hostile: HostilePeer, *args: Any, **options: Any) -> None:
        self.hostile = hostile
        self.session_kind = partial(_HostileSession, self)
        super().__init__(*args, **options)

    def make_reducer(self) -> Reducer:
        corrupt = partial(_HostileSending, self.hostile, self)
        return CorruptReducer(self.context, self.hub, self.state_service, corrupt)

    def hello(self, master_host: str, local_port: int) -> m.Hello:
        return self.hostile.greeting(super().hello(master_host, local_port))

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.hostile.harass, self)
            try:
                await super().run()
            finally:
                nursery.cancel_scope.cancel()


class _HostileSession(MasterSession):
    """Says other things to the master than its daemon does."""

    def __init__(self, service: _HostileService, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._service = service

    def tell(self, message: m.Message) -> None:
        for sent in self._service.hostile.instead(self._service, message):
            super().tell(sent)


class _HostileSending:
    """Keeps what a reduction owes to others, or corrupts it; the liar's own result is whole.

    Args:
      reduction: an honest one that has not begun; its sender is wrapped.
    """

    def __init__(self, hostile: HostilePeer, service: PeerService, reduction: Reduction) -> None:
        context = reduction._context
        receivers = [peer for peer in context.order.receivers if peer != context.me]
        quarry = hostile.quarry_of(service)
        one = {quarry} if quarry in receivers else set(receivers[:1])
        self._kept_from = {True: set[str](), False: set[str]()}  # contributions; results
        for kind, contribution, peers in (
            (Falsehood.OWES_ONE, True, one),
            (Falsehood.OWES_ALL, True, set(receivers)),
            (Falsehood.KEEPS_ONE, False, one),
            (Falsehood.KEEPS_ALL, False, set(receivers)),
        ):
            if hostile.does(kind):
                self._kept_from[contribution] |= peers
        self._two_faced = hostile.does(Falsehood.TWO_FACED)
        self._spoilt = one if hostile.does(Falsehood.NOT_FINITE) else set()
        self._given = 0
        self._tracker = context.tracker
        sender = reduction._sender
        self._plan, sender.plan = sender.plan, self._plan_less  # type: ignore[method-assign]
        self._contribution, sender.contribution_load = (  # type: ignore[method-assign]
            sender.contribution_load,
            lambda *which: partial(self._spoil_contribution, *which),
        )
        self._result, sender.result_load = (  # type: ignore[method-assign]
            sender.result_load,
            lambda *which: partial(self._spoil_result, *which),
        )

    def _plan_less(self, chunks: Iterable[int], on_bad: OnBad) -> list[Send]:
        sends = self._plan(chunks, on_bad)
        return [send for send in sends if send.peer not in self._kept_from[send.contribution]]

    def _spoil_contribution(self, index: int, attempt: int) -> Frame | None:
        frame = self._contribution(index, attempt)()
        if frame is None or self._tracker.owner(index) not in self._spoilt:
            return frame
        header, payload = frame
        return header, b"\xff" * len(payload)

    def _spoil_result(self, index: int, attempt: int) -> Frame | None:
        frame = self._result(index, attempt)()
        if frame is None:
            return None
        header, payload = frame
        if self._two_faced:
            self._given += 1
            other = bytearray(payload)
            other[4 * self._given % len(other)] ^= 1
            payload = other
        return header, payload
