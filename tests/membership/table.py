"""A master, and peers whose messages the test writes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from holdfast.membership.master.coordinator import Coordinator, Grant
from holdfast.membership.master.state.journal import JournalRecord, RunCreated
from holdfast.membership.master.state.master_effects import (
    AnnounceEvent,
    DropPeer,
    Effect,
    RecordDurably,
    SendMessage,
)
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol import messages as m
from holdfast.simulation.invariants import check_invariants
from tests.plain import describe

M = TypeVar("M", bound=m.Message)
R = TypeVar("R", bound=JournalRecord)

RUN_ID = "ab" * 16
LAYOUT = m.ModelLayout((m.TensorSpec("w", (4, 4), "float32", "parameter"),))
LINEAGE = b"L" * 32
A, B, C, D, E = ("a" * 32, "b" * 32, "c" * 32, "d" * 32, "e" * 32)
CONTRIBUTOR = Grant(m.Role.CONTRIBUTOR)
FOUNDER = Grant(m.Role.CONTRIBUTOR, founder=True)
SPARE = Grant(m.Role.SPARE)
DIGEST = b"D" * 32
OTHER_DIGEST = b"X" * 32
TEN_SECONDS = "[membership]\ndeadline_s = 10.0\n"


def root_of(fragment: int, version: int) -> bytes:
    return bytes([fragment, version % 256]) * 16


def head_of(fragment: int, version: int, root: bytes | None = None) -> m.FragmentHead:
    return m.FragmentHead(fragment, version, root_of(fragment, version) if root is None else root)


def hello_of(
    peer: str,
    *,
    incarnation: int = 1,
    layout: m.ModelLayout | None = LAYOUT,
    heads: Sequence[m.FragmentHead] = (),
    lineage: bytes = b"",
    undecided: Sequence[m.Reduced] = (),
    run_id: str = RUN_ID,
    versions: tuple[int, int] = (m.VERSION_MIN, m.VERSION_MAX),
) -> m.Hello:
    return m.Hello(
        version_min=versions[0],
        version_max=versions[1],
        run_id=run_id,
        name=peer[0],
        addresses=("127.0.0.1:1",),
        incarnation=incarnation,
        layout=layout,
        heads=tuple(heads),
        lineage=lineage,
        undecided=tuple(undecided),
    )


def holding(peer: str, version: int, *undecided: m.Reduced, incarnation: int = 1) -> m.Hello:
    """Return the ``Hello`` of a peer that holds a version of the run's first fragment."""
    return hello_of(
        peer,
        heads=[head_of(0, version)],
        lineage=LINEAGE,
        incarnation=incarnation,
        undecided=undecided,
    )


def sizes_of(fragments: int) -> tuple[m.FragmentSize, ...]:
    """``LAYOUT``'s sixteen values, all but one of them in the first fragments."""
    counts = [16 - (fragments - 1), *[1] * (fragments - 1)]
    return tuple(m.FragmentSize(count, count, 0) for count in counts)


class Table:
    """Calls the master, checks its invariants after every call and sorts its effects."""

    def __init__(self, toml: str = "", fragments: int = 1) -> None:
        text = f"[diloco]\nfragments = {fragments}\n" + toml
        self.spec = RunSpec.parse(text)
        self.journal: list[JournalRecord] = [RunCreated(RUN_ID, self.spec.toml_text)]
        self.term = 1
        self.now_s = 100.0
        self.master = Coordinator.restore(self.spec, RUN_ID, self.journal, self.term)
        self.effects: list[Effect] = []  # of the last call
        self.heard: dict[str, list[m.Message]] = {}  # not asked for yet, by peer

    # ------------------------------------------------------------ what happens

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.effects = effects
        for effect in effects:
            if isinstance(effect, RecordDurably):
                self.journal.append(effect.record)
            elif isinstance(effect, SendMessage):
                self.heard.setdefault(effect.peer, []).append(effect.message)
        check_invariants(self.master)
        return effects

    def join(
        self, peer: str, grant: Grant = CONTRIBUTOR, hello: m.Hello | None = None, host: str = ""
    ) -> None:
        self.take(self.master.attach(peer, hello or hello_of(peer), grant, self.now_s, host=host))

    def say(self, peer: str, *messages: m.Message) -> None:
        for message in messages:
            self.take(self.master.receive(peer, message, self.now_s))

    def leave(self, peer: str, reason: str = "the connection broke") -> None:
        self.take(self.master.detach(peer, reason, self.now_s))

    def wait(self, seconds: float, *alive: str) -> None:
        """Let time pass with ticks where they are due; ``alive`` peers show signs of life."""
        end_s = self.now_s + seconds
        while True:
            self._beat(alive)
            due_s = self.master.next_deadline_s()
            if due_s >= end_s:
                break
            self.now_s = due_s
            self._beat(alive)
            self._tick()
        self.now_s = end_s
        self._beat(alive)
        self._tick()

    def _tick(self) -> None:
        self.take_all(self.master.tick(self.now_s))
        assert self.master.next_deadline_s() > self.now_s, "tick has left something undone"

    def _beat(self, alive: Sequence[str]) -> None:
        for peer in alive:
            self.take_all(self.master.receive(peer, m.Heartbeat(), self.now_s))

    def take_all(self, effects: list[Effect]) -> None:
        before = self.effects
        self.take(effects)
        self.effects = before + effects

    def restart(self) -> None:
        self.term += 1
        self.now_s += 1_000.0  # another process has another clock
        self.heard.clear()
        self.master = Coordinator.restore(self.spec, RUN_ID, self.journal, self.term)

    # ------------------------------------------------------------ what is heard

    def hear(self, peer: str, kind: type[M]) -> M:
        """Return the first message of this kind that was not returned before."""
        inbox = self.heard.get(peer, [])
        for index, message in enumerate(inbox):
            if isinstance(message, kind):
                del inbox[: index + 1]
                return message
        raise AssertionError(f"{peer[0]} has not heard {kind.__name__}, only {inbox}")

    def hears_no(self, peer: str, kind: type[m.Message]) -> None:
        assert not [each for each in self.heard.get(peer, []) if isinstance(each, kind)]

    def forget(self) -> None:
        """Forget all messages so far."""
        self.heard.clear()
        self.effects = []

    def records(self, kind: type[R]) -> list[R]:
        return [record for record in self.journal if isinstance(record, kind)]

    def dropped(self, peer: str) -> m.RefusalCode:
        (drop,) = [e for e in self.effects if isinstance(e, DropPeer) and e.peer == peer]
        return drop.code

    def announced(self) -> str:
        return "\n".join(e.event.text for e in self.effects if isinstance(e, AnnounceEvent))

    def roles(self) -> dict[str, str]:
        """Return roles by peer in the last view, with a star if the peer is in sync."""
        return {
            info.peer[0]: info.role.value + ("*" if info.in_sync else "")
            for info in self.master.context.roster.view_members
        }

    def status(self) -> dict[str, Any]:
        return describe(self.master, self.now_s)

    def why(self, peer: str) -> str:
        members = self.status()["members"]
        return str(next(row["why"] for row in members if row["peer"] == peer))

    # ------------------------------------------------------------ whole chapters

    def found(
        self,
        peer: str = A,
        hello: m.Hello | None = None,
        host: str = "",
        grant: Grant = FOUNDER,
    ) -> None:
        """Found the run with this peer's weights."""
        count = self.spec.diloco.fragments
        self.join(peer, grant, hello, host)
        self.say(
            peer,
            m.WeightsSupplied(
                LAYOUT,
                sizes_of(count),
                tuple(head_of(fragment, 0) for fragment in range(count)),
                LINEAGE,
            ),
        )

    def join_in_sync(self, peer: str, grant: Grant = CONTRIBUTOR, incarnation: int = 1) -> None:
        """Attach a peer that fetches the whole state."""
        self.join(peer, grant, hello_of(peer, incarnation=incarnation))
        self.sync(peer)

    def sync(self, peer: str) -> None:
        for order in [
            each for each in self.heard.get(peer, []) if isinstance(each, m.SyncFragment)
        ]:
            self.say(peer, m.Synced(order.head, 64))

    def start(self, *peers: str, spares: Sequence[str] = ()) -> None:
        """Set up a run with contributors (the first founds it) and spares, all in sync."""
        self.found(peers[0])
        for peer in peers[1:]:
            self.join_in_sync(peer)
        for peer in spares:
            self.join_in_sync(peer, SPARE)
        self.forget()

    def open_round(self) -> int:
        (number,) = self.master.scheduler.rounds
        return number

    def ready(
        self,
        peer: str,
        weight: int = 10,
        norm: float = 1.0,
        step: int | None = None,
        step_s: float = 0.0,
    ) -> None:
        """Send a peer's Ready, by default at the round's step."""
        round_ = self.master.scheduler.rounds[self.open_round()]
        root = root_of(round_.fragment, round_.version)
        at_step = round_.at_step if step is None else step
        self.say(peer, m.Ready(round_.number, weight, norm, root, at_step, step_s))

    def reduce(self, *peers: str) -> m.Reduce:
        """Send the Ready of these peers and return the order that they get."""
        for peer in peers:
            self.ready(peer)
        return self.hear(peers[0], m.Reduce)

    def hold(self, flush: m.Flush, *peers: str, results: bytes | None = None) -> None:
        """Send the Held of these peers, by default without results."""
        owners = self.master.scheduler.rounds[flush.round].running().owners
        empty = bytes((len(owners) + 7) // 8)
        for peer in peers:
            self.say(
                peer, m.Held(flush.round, flush.attempt, empty if results is None else results)
            )

    def repair(self, *survivors: str) -> m.Repair:
        """Answer a flush, with no results held, and return the repair that follows."""
        self.hold(self.hear(survivors[0], m.Flush), *survivors)
        return self.hear(survivors[0], m.Repair)

    def diagnosed(
        self,
        order: m.Reduce,
        *peers: str,
        contributions: tuple[str, ...] = (),
        results: tuple[str, ...] = (),
        made: dict[str, bytes] | None = None,
    ) -> None:
        """Send the Diagnosis of these peers, which were asked for it."""
        digests = tuple(m.MadeDigest(owner, digest) for owner, digest in (made or {}).items())
        for peer in peers:
            asked = self.hear(peer, m.Diagnose)
            assert asked.round == order.round
            self.say(peer, m.Diagnosis(order.round, asked.attempt, contributions, results, digests))

    def reduced(
        self,
        order: m.Reduce,
        *peers: str,
        digest: bytes = DIGEST,
        attempt: int | None = None,
        manifest: tuple[m.ContributorRun, ...] = (),
    ) -> None:
        """Send the Reduced of these peers, by default for the order's attempt."""
        for peer in peers:
            self.say(peer, m.Reduced(order.round, attempt or order.attempt, digest, manifest))

    def applied(self, order: m.Reduce, *peers: str, root: bytes | None = None) -> None:
        head = head_of(order.fragment, order.version + 1, root)
        for peer in peers:
            self.say(peer, m.Applied(order.round, head))

    def complete(self, order: m.Reduce, *contributors: str, others: Sequence[str] = ()) -> None:
        """Run a reduction to its end: Reduced of the contributors, Applied of all."""
        self.reduced(order, *contributors)
        self.applied(order, *contributors, *others)

    def commit(self, *contributors: str, others: Sequence[str] = ()) -> m.Reduce:
        """Run a round from Ready to Applied with these peers."""
        order = self.reduce(*contributors)
        self.complete(order, *contributors, others=others)
        return order


def started(*peers: str, spares: Sequence[str] = (), toml: str = "", fragments: int = 1) -> Table:
    """Return a run with contributors (the first founded it) and spares, all in sync."""
    table = Table(toml, fragments)
    table.start(*peers, spares=spares)
    return table


def reducing(*peers: str, spares: Sequence[str] = (), toml: str = "") -> tuple[Table, m.Reduce]:
    """Return a run of which all contributors reduce, and the order that they got."""
    table = started(*peers, spares=spares, toml=toml)
    return table, table.reduce(*peers)


def owners_of(table: Table, *owners: str) -> None:
    """Change an order's plan to these owners."""
    for round_ in table.master.scheduler.rounds.values():
        attempt = round_.running()
        attempt.owners, attempt.makers = list(owners), list(owners)
