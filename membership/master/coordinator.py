"""The master's rules: every decision of a run is made here, and nothing is done.

The daemon calls one method per event and carries out the effects that come back, in order. There is
no I/O, no clock and no randomness: the same calls give the same effects.

    Hello --attach----.                                   .--> Send      to a peer
    message --receive-|    facts        settle            |--> Record    durable before what follows
    EOF --detach------+--> change --> what follows from --+--> Drop      refuse and close
    time --tick-------|    the        them, until         |--> Announce  log, dashboard
    owner --kick------'    state      nothing does        '--> StandDown end: superseded

*Theory of operation.* Handlers only note facts; ``_settle`` derives everything else, always in the
same order: found the run, find out which versions are the run's, agree on roots, give out places,
publish the view, start transfers, run the rounds, probe a line if all are idle, let the leaving go,
finish. A view is published before any message that names a member of it, and a transfer is started
before any commit that would outdate it.

*Lasting state* changes only through journal records, so a restarted master is the history replayed,
plus peers that attach anew. A reduction goes on after a restart if all who add are still at it (see
``adoption``); any other round that was not committed is void.

*Connections.* A peer has at most one. When it attaches again, the newer connection wins: the
effects begin with ``Drop(peer, DUPLICATE, previous=True)`` for the old one (the daemon must not
report that end by ``detach``). The same incarnation is a reconnect and keeps its number and its
place; another incarnation is a new process and gets a new number. A refused newcomer gets
``Drop(previous=False)`` and the old connection is not touched.

*Founding.* The first weights come from the trainer of the first member whose token allows it. When
the run is founded, everybody else who is attached gets a second ``Welcome``, with layout and heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from ...protocol.errors import LocalProtocolError
from ...protocol.messages import (
    VERSION_MAX,
    Applied,
    Audited,
    Commit,
    Diagnosis,
    Finish,
    FragmentHead,
    Heartbeat,
    Held,
    Hello,
    Leaving,
    LinkBroken,
    Measured,
    Message,
    NotReady,
    Probed,
    Progress,
    ProofPiece,
    Ready,
    Reduced,
    ReduceFailed,
    RefusalCode,
    Relayed,
    Released,
    Renew,
    RouteWanted,
    RouteWorks,
    SupplyWeights,
    Synced,
    SyncFailed,
    TrainerAttached,
    TrainerFailed,
    TrainerLost,
    View,
    WeightsSupplied,
    Welcome,
)
from ..planning.bandwidth import Bandwidths
from ..spec.spec import RunSpec
from . import trainers
from .adoption import Adoption
from .hello_checks import Processes, Refusal, founding_fault, layout_refusal, refusal
from .lineage import Lineage
from .rounds.round import RoundPhase
from .rounds.round_scheduler import RoundScheduler
from .routes.probing import Probing
from .routes.routes import Routes
from .state.context import Context, quoted, said
from .state.journal import (
    JournalRecord,
    PeerAdmitted,
    PeerCleared,
    PeerRevoked,
    PlaceTaken,
    PlaceVacated,
    RunFinished,
    RunFounded,
    RunHistory,
    RunPaused,
)
from .state.master_effects import CheckProof, Effect, EventKind, StandDown
from .state.roster import Grant, Member, new_member, next_to_seat
from .state.succession import Succession
from .state.voting_blocs import format_invite_warning, large_invites
from .sync.state_sync import ROOT_BYTES, StateSync

__all__ = ["Coordinator", "Grant"]

SETTLE_PASSES_MAX = 10_000  # every pass changes something finite; more than this is a bug
DRAIN_DEADLINES_MAX = 1.5  # who wants to leave is let go after so many, unless a reduction runs


class Coordinator:
    """One run's master.

    Args:
      spec: the run's spec.
      run_id: what a ``Hello`` must name.
      term: grows with every start of the master; view numbers follow from it.
      lot: random and secret; which results are audited follows from it.
    """

    def __init__(self, spec: RunSpec, run_id: str, term: int, lot: bytes = b"") -> None:
        self._start(spec, run_id, RunHistory(), term, lot)

    @classmethod
    def restore(
        cls,
        spec: RunSpec,
        run_id: str,
        records: Iterable[JournalRecord],
        term: int,
        lot: bytes = b"",
    ) -> Coordinator:
        """The master of a run that has a journal."""
        coordinator = cls.__new__(cls)
        history = RunHistory.replay(records)
        if history.run_id not in ("", run_id):
            raise LocalProtocolError(f"the journal is of run {history.run_id}, not {run_id}")
        coordinator._start(spec, run_id, history, term, lot)
        return coordinator

    def _start(
        self, spec: RunSpec, run_id: str, history: RunHistory, term: int, lot: bytes
    ) -> None:
        self.context = Context(spec, run_id, history, term, lot)
        self.succession = Succession(self.context)
        bandwidths = Bandwidths()
        self.routes = Routes(self.context)
        self.state_sync = StateSync(self.context, self.succession, bandwidths, self.routes)
        self.lineage = Lineage(self.context, self.state_sync, self.succession, self._evict)
        self.scheduler = RoundScheduler(
            self.context, self.state_sync, self.succession, bandwidths, self.routes, self._evict
        )
        driver = self.scheduler.driver
        self.adoption = Adoption(self.context, self.scheduler.round_table, driver)
        self.probing = Probing(self.context, bandwidths, self.routes)
        self.state_sync.missing = set(history.places)
        self.state_sync.votes.unheard = set(history.places)
        self._missing_until_s: float | None = None  # set by the first event after a restart
        self._processes = Processes()
        self.founder: str | None = None  # who was sent Found
        self._finish_due_s = (
            math.inf
        )  # then Finish goes out, whoever has not applied the last round
        self._finish_sent = False
        self._warned: set[str] = set()  # invites of which the owner was told
        self._view_due = False  # a newcomer needs the view even if nothing in it changed
        self._handlers: dict[type[Message], Callable[[Member, Any], None]] = {
            Progress: self._on_progress,
            TrainerAttached: self._on_trainer_attached,
            TrainerLost: self._on_trainer_lost,
            TrainerFailed: self._on_trainer_failed,
            WeightsSupplied: self._on_founded,
            Ready: self.scheduler.ready,
            NotReady: self.scheduler.not_ready,
            Reduced: self._on_reduced,
            Held: driver.held,
            Diagnosis: driver.diagnosed,
            ReduceFailed: self._on_reduce_failed,
            Audited: driver.audits.audited,
            ProofPiece: driver.audits.proof,
            Measured: self.scheduler.measured,
            Probed: self.probing.probed,
            LinkBroken: self.routes.broken,
            RouteWanted: self.routes.wanted,
            RouteWorks: self.routes.works,
            Relayed: self.routes.relayed,
            Applied: self._on_applied,
            Synced: self._on_synced,
            SyncFailed: self.state_sync.failed,
            Leaving: self._on_leaving,
        }

    # ------------------------------------------------------------ events

    def attach(
        self,
        peer: str,
        hello: Hello,
        grant: Grant,
        now_s: float,
        host: str = "",
        *,
        port: int = 0,
        reachable: bool = True,
    ) -> list[Effect]:
        """A connection of an authenticated peer sent its ``Hello``.

        Args:
          host, port: the address it comes from; empty and 0: unknown.
          reachable: it was dialled back at one of its addresses.
        """
        if not self._begin(now_s):
            return []
        refused = refusal(self.context, peer, hello) or self._too_often(peer, hello)
        if refused is not None:
            code, reason = refused
            self.context.announce(
                EventKind.JOIN, peer, f"{quoted(hello.name)} ({peer[:8]}) was refused: {reason}"
            )
            self.context.drop(peer, code, reason)
            return self.context.take_effects()
        if self.succession.met(hello.term, hello.nonce, self.context.name(peer)):
            return self._stand_down()
        self._replace_connection(peer, hello)
        history, number_before = self.context.history, self.context.history.next_number
        member = new_member(
            peer,
            hello,
            grant,
            self._number(peer, hello),
            history.fragment_count,
            now_s,
            host,
            port=port,
            reachable=reachable,
        )
        self.context.roster.members[peer] = member
        self.context.totals.attached(member, known=member.number < number_before)
        self.context.detector.heard(peer, now_s)
        self.routes.attached(peer)
        self._taken_over(self.succession.came(peer))
        committed = self._outcomes(hello)
        self.state_sync.attached(member, hello, committed)
        self._welcome(member, committed, self.adoption.came(member, hello))
        self.context.announce(
            EventKind.JOIN,
            peer,
            f"{said(member)} joined as member {member.number}"
            + ("" if reachable else "; nobody can dial it, it dials the others"),
        )
        self._view_due = True
        self._settle()
        return self.context.take_effects()

    def receive(
        self, peer: str, message: Message, now_s: float, *, settle: bool = True
    ) -> list[Effect]:
        """A message from a member; one from anybody else was overtaken by its removal.

        Args:
          settle: False: only note what it says; the caller calls ``settle`` soon, once for many.
        """
        if not self._begin(now_s):
            return []
        member = self.context.roster.get(peer)
        if member is None:
            return self.context.take_effects()
        self.context.detector.heard(peer, now_s)
        if isinstance(message, Heartbeat | Renew):
            return self.context.take_effects()  # a sign of life; the daemon answers Renew
        handler = self._handlers.get(type(message))
        if handler is None:
            self._violation(member, f"it sent {type(message).__name__}, which peers never send")
        else:
            handler(member, message)
        self.context.change_count += 1
        if settle and not isinstance(message, Progress | Measured):
            self._settle()
        return self.context.take_effects()

    def settle(self, now_s: float) -> list[Effect]:
        """Draw the conclusions of messages that were only noted."""
        if not self._begin(now_s):
            return []
        self._settle()
        return self.context.take_effects()

    def detach(self, peer: str, reason: str, now_s: float) -> list[Effect]:
        """The peer's connection ended."""
        if not self._begin(now_s):
            return []
        member = self.context.roster.get(peer)
        if member is not None:
            self.context.announce(
                EventKind.LEAVE, peer, f"{said(member)} is gone: {quoted(reason)}"
            )
            self._remove(member, reason)
            self._settle()
        return self.context.take_effects()

    def moved(
        self, peer: str, addresses: tuple[str, ...], now_s: float, host: str = "", port: int = 0
    ) -> list[Effect]:
        """A member goes on over another connection, perhaps from elsewhere."""
        if not self._begin(now_s):
            return []
        member = self.context.roster.get(peer)
        if member is not None:
            self.context.detector.heard(peer, now_s)
            member.host, member.port = host, port
            if member.addresses != addresses:
                member.addresses = addresses
                self.context.announce(
                    EventKind.ROUTE, peer, f"{said(member)} is at {', '.join(addresses)} now"
                )
                self.routes.classed(member)
                self._settle()
        return self.context.take_effects()

    def classed(self, peer: str, reachable: bool, now_s: float) -> list[Effect]:
        """A member was dialled back again."""
        if not self._begin(now_s):
            return []
        member = self.context.roster.get(peer)
        if member is not None and member.reachable != reachable:
            member.reachable = reachable
            said_now = "can be dialled now" if reachable else "cannot be dialled any more"
            self.context.announce(EventKind.ROUTE, peer, f"{said(member)} {said_now}")
            self.routes.classed(member)
            self._settle()
        return self.context.take_effects()

    def kick(self, peer: str, reason: str, now_s: float) -> list[Effect]:
        """The run's owner removes a peer for good; it need not be attached."""
        if not self._begin(now_s):
            return []
        self.context.record(PeerRevoked(peer, quoted(reason)))
        self._taken_over(self.succession.kicked(peer))
        if peer in self.context.roster:
            self._evict(peer, RefusalCode.KICKED, f"removed by the run's owner: {quoted(reason)}")
        self.state_sync.missing.discard(peer)
        self.state_sync.votes.unheard.discard(peer)
        self._settle()
        return self.context.take_effects()

    def clear(self, peer: str, now_s: float) -> list[Effect]:
        """The run's owner lifts a quarantine; the peer may come back with what it has."""
        if not self._begin(now_s):
            return []
        self.scheduler.driver.audits.cleared(peer)
        if peer in self.context.history.quarantined:
            name = self.context.name(peer)
            self.context.record(PeerCleared(peer))
            self.context.announce(EventKind.JOIN, peer, f"{name} was cleared by the run's owner")
        self._settle()
        return self.context.take_effects()

    def judged(self, case: CheckProof, fault: str, now_s: float) -> list[Effect]:
        """What came of a ``CheckProof``: what is wrong with the chunk; empty: nothing is proven."""
        if not self._begin(now_s):
            return []
        self.scheduler.driver.audits.judged(case.order.round, case.attempt, fault)
        self._settle()
        return self.context.take_effects()

    def met(self, term: int, nonce: bytes, who: str, now_s: float) -> list[Effect]:
        """Another master of this run says which term it serves."""
        if not self._begin(now_s) or self.succession.outranks(term, nonce):
            return self.context.take_effects()
        return self._stand_down() if self.succession.met(term, nonce, who) else []

    def note(
        self, text: str, now_s: float, kind: EventKind = EventKind.RUN, peer: str | None = None
    ) -> list[Effect]:
        """Something that people should read among the events, and from which nothing follows."""
        if not self._begin(now_s):
            return []
        self.context.announce(kind, peer, text)
        return self.context.take_effects()

    def know_masters(self, addresses: tuple[str, ...], now_s: float) -> list[Effect]:
        """Where this master can be reached, and where others may take over from it."""
        if not self._begin(now_s):
            return []
        self.succession.know(addresses)
        return self.context.take_effects()

    def pause(self, now_s: float) -> list[Effect]:
        """Open no more rounds; the one that is running goes on."""
        return self._set_paused(True, now_s)

    def resume(self, now_s: float) -> list[Effect]:
        return self._set_paused(False, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed: call at ``next_deadline_s`` or later, as often as you like."""
        if not self._begin(now_s):
            return []
        for peer in self.context.detector.silent(now_s):
            silent_s = self.context.detector.silent_s(peer, now_s)
            self._evict(peer, RefusalCode.SILENT, f"no sign of life for {silent_s:.1f} s")
        self._settle()
        return self.context.take_effects()

    def overslept(self, now_s: float) -> list[Effect]:
        """The master's own process stood still (stopped, or its machine slept).

        What the members sent meanwhile is still to be read, so none of them is blamed for silence.
        """
        if not self._begin(now_s):
            return []
        self.context.detector.excuse(now_s)
        return self.context.take_effects()

    def next_deadline_s(self) -> float:
        """When ``tick`` has something to do at the latest, if nothing else happens; or infinity."""
        drain_s = DRAIN_DEADLINES_MAX * self.context.spec.membership.deadline_s
        return min(
            self.context.detector.next_deadline_s(),
            self.scheduler.next_deadline_s(),
            self.state_sync.next_deadline_s(),
            self.probing.next_deadline_s(),
            trainers.next_deadline_s(self.context),
            self.lineage.due_s,
            self._finish_due_s if not self._finish_sent else math.inf,
            self._missing_until_s
            if (self.state_sync.missing or self.state_sync.votes.unheard)
            and self._missing_until_s is not None
            and not self.succession.waiting
            else math.inf,
            min(
                (
                    member.draining_s + drain_s
                    for member in self.context.roster
                    if member.draining_s is not None
                    and member.draining_s + drain_s > self.context.settled_s
                ),
                default=math.inf,
            ),
        )

    # ------------------------------------------------------------ attaching

    def _begin(self, now_s: float) -> bool:
        """Note the time; False: another master is obeyed, nothing is decided here any more."""
        if self.succession.superseded:
            return False
        self.context.now_s = now_s
        if self._missing_until_s is None:
            self._missing_until_s = now_s + self.context.spec.membership.deadline_s
        return True

    def _stand_down(self) -> list[Effect]:
        self.context.take_effects()  # nobody may hear of them
        return [StandDown(self.succession.superseded)]

    def _taken_over(self, over: bool) -> None:
        """Enough members have attached to a master that was behind: the rest has a deadline."""
        if over:
            self._missing_until_s = self.context.now_s + self.context.spec.membership.deadline_s

    def _replace_connection(self, peer: str, hello: Hello) -> None:
        old = self.context.roster.get(peer)
        if old is None:
            return
        again = old.incarnation == hello.incarnation
        reason = "it connected again" if again else "another process of this peer connected"
        self.context.drop(peer, RefusalCode.DUPLICATE, reason, previous=True)
        self.context.announce(EventKind.JOIN, peer, f"{said(old)}: {reason}")
        self._remove(old, reason, keep_place=again)
        self._settle()  # a round that can end without it ends now, and Welcome tells the outcome

    def _too_often(self, peer: str, hello: Hello) -> Refusal | None:
        admitted = self.context.history.admitted.get(peer)
        if admitted is not None and admitted.incarnation == hello.incarnation:
            return None
        return self._processes.refusal(peer, self.context.now_s)

    def _number(self, peer: str, hello: Hello) -> int:
        history = self.context.history
        admitted = history.admitted.get(peer)
        if admitted is not None and admitted.incarnation == hello.incarnation:
            return admitted.number
        number = history.next_number
        self.context.record(PeerAdmitted(peer, hello.name, number, hello.incarnation))
        return number

    def _outcomes(self, hello: Hello) -> tuple[Commit, ...]:
        """Commits of rounds whose result the peer holds without knowing what became of them."""
        held = {(reduced.round, reduced.digest) for reduced in hello.undecided}
        return tuple(
            commit
            for commit in self.context.history.commits.values()
            if (commit.round, commit.digest) in held
        )

    def _welcome(
        self, member: Member, committed: tuple[Commit, ...], going_on: tuple[int, ...] = ()
    ) -> None:
        history = self.context.history
        self.context.send(
            member.peer,
            Welcome(
                version=VERSION_MAX,
                number=member.number,
                spec_toml=self.context.spec.toml_text,
                layout=history.layout,
                lineage=history.lineage,
                heads=history.heads(),
                step=history.step,
                committed=committed,
                term=self.context.term,
                nonce=history.nonce,
                masters=history.masters,
                branch=history.branch,
                going_on=going_on,
            ),
        )

    # ------------------------------------------------------------ messages

    def _on_progress(self, member: Member, message: Progress) -> None:
        before = member.progress
        member.progress = message
        self.context.totals.progress(member, message)
        received = before is None or message.bulk_received_bytes > before.bulk_received_bytes
        if received or (before and message.bulk_sent_bytes > before.bulk_sent_bytes):
            self.scheduler.driver.moved(member)
        state = before is None or message.state_received_bytes > before.state_received_bytes
        if received or state:
            self.state_sync.moved(member, state=state)

    def _on_trainer_attached(self, member: Member, message: TrainerAttached) -> None:
        refused = layout_refusal(self.context, message.layout)
        if refused is not None:
            self._evict(member.peer, *refused)
            return
        if member.layout is None:  # peers say it again after a reconnect
            self.context.announce(EventKind.ROLE, member.peer, f"{said(member)} has a trainer")
        member.layout, member.trainerless_s, member.failed = message.layout, None, None

    def _on_trainer_failed(self, member: Member, message: TrainerFailed) -> None:
        trainers.failed(self.context, member, message)

    def _on_trainer_lost(self, member: Member, message: TrainerLost) -> None:
        if member.layout is not None or member.trainerless_s is None:
            member.trainerless_s = self.context.now_s
        member.layout = None
        self.scheduler.trainer_lost(member)
        if self.founder == member.peer:
            self.founder = None
        self.context.announce(
            EventKind.ROLE,
            member.peer,
            f"{said(member)} has lost its trainer: {quoted(message.reason)}",
        )

    def _on_founded(self, member: Member, message: WeightsSupplied) -> None:
        if self.context.history.founded or self.founder != member.peer:
            return  # its trainer was lost in between and somebody else was asked
        fault = founding_fault(member, message, self.context.spec)
        if fault is not None:
            self._violation(member, f"its Founded is void: {fault}")
            return
        self.founder = None
        self.context.record(
            RunFounded(message.layout, message.sizes, message.lineage, message.heads)
        )
        self.state_sync.founded(member)
        self.context.announce(
            EventKind.RUN, member.peer, f"{said(member)} gave the run its first weights"
        )
        for other in self.context.roster.by_number():
            refused = layout_refusal(self.context, other.layout)
            if refused is not None:
                self._evict(other.peer, *refused)
            elif other is not member:
                self._welcome(other, ())

    def _on_reduced(self, member: Member, message: Reduced) -> None:
        if not self.adoption.hears(member, message):
            self.scheduler.driver.reduced(member, message)

    def _on_reduce_failed(self, member: Member, message: ReduceFailed) -> None:
        if not self.adoption.hears(member, message):
            self.scheduler.driver.reduce_failed(member, message)

    def _on_applied(self, member: Member, message: Applied) -> None:
        if self._known_head(member, message.head):
            self.state_sync.report(member, message.head)

    def _on_synced(self, member: Member, message: Synced) -> None:
        if self._known_head(member, message.head):
            self.state_sync.synced(member, message)

    def _known_head(self, member: Member, head: FragmentHead) -> bool:
        history = self.context.history
        versions = history.versions
        if (
            head.fragment < len(versions)
            and head.version <= versions[head.fragment]
            and len(head.root) == ROOT_BYTES
        ):
            return True
        doubtful = history.branch > 0  # commits were lost or undone: it may be of another branch
        if doubtful and head.fragment < len(versions) and len(head.root) == ROOT_BYTES:
            self.state_sync.beyond(member, head)
            return False
        self._violation(member, f"it reports version {head.version} of fragment {head.fragment}")
        return False

    def _on_leaving(self, member: Member, message: Leaving) -> None:
        if member.draining_s is None:
            member.draining_s = self.context.now_s
            member.draining_why = message.reason
            self.context.announce(
                EventKind.LEAVE, member.peer, f"{said(member)} leaves: {quoted(message.reason)}"
            )

    def _set_paused(self, paused: bool, now_s: float) -> list[Effect]:
        if not self._begin(now_s):
            return []
        if self.context.history.paused != paused:
            self.context.record(RunPaused(paused))
            self.context.announce(EventKind.RUN, None, "paused" if paused else "resumed")
        self._settle()
        return self.context.take_effects()

    # ------------------------------------------------------------ removal

    def _violation(self, member: Member, what: str) -> None:
        self._evict(member.peer, RefusalCode.PROTOCOL, f"broke the protocol: {what}")

    def _evict(self, peer: str, code: RefusalCode, reason: str) -> None:
        member = self.context.roster.get(peer)
        if member is None:
            return
        self.context.announce(EventKind.LEAVE, peer, f"{said(member)} was removed: {reason}")
        self.context.drop(peer, code, reason)
        self._remove(member, reason)

    def _remove(self, member: Member, why: str, *, keep_place: bool = False) -> None:
        del self.context.roster.members[member.peer]
        self.context.departed.append((member, why))
        self.context.detector.forget(member.peer)
        if self.founder == member.peer:
            self.founder = None
        if not keep_place and member.peer in self.context.history.places:
            self.context.record(PlaceVacated(member.peer))
        self.routes.removed(member.peer)
        self.probing.removed(member)
        self.state_sync.removed(member)
        self.adoption.removed(member.peer)
        self.scheduler.removed(member.peer, f"{said(member)} is gone: {quoted(why)}")

    # ------------------------------------------------------------ what follows

    def _settle(self) -> None:
        for _pass in range(SETTLE_PASSES_MAX):
            changed = self._give_up_missing()
            changed |= self.adoption.settle(missing=bool(self.state_sync.missing))
            changed |= self.lineage.adopt()
            changed |= self.state_sync.settle(self.scheduler.excluded)
            changed |= self._give_places()
            self._warn_of_invites()
            self._publish_view()
            self.routes.arrange_again()
            changed |= self._ask_founder()
            if not self.adoption.waiting:
                changed |= self.state_sync.transfer(self.scheduler.excluded)
            changed |= self._remove_hopeless()
            changed |= self.scheduler.advance()
            changed |= self.lineage.call_back()
            changed |= self._rewind()
            changed |= self.probing.advance(lines_busy=self._lines_busy())
            changed |= self._release_leaving()
            changed |= self._finish()
            if not changed:
                self.context.settled_s = self.context.now_s
                return
        raise LocalProtocolError("the master's rules do not come to rest")

    def _rewind(self) -> bool:
        if not self.lineage.rewind(busy=bool(self.scheduler.rounds)):
            return False
        for member in self.context.roster.by_number():
            self._welcome(member, ())  # tells of the branch that the run is on now
        return True

    def _lines_busy(self) -> bool:
        """Whether bulk bytes move: of a reduction or of a transfer."""
        rounds, roster = self.scheduler.rounds.values(), self.context.roster
        return any(round_.phase is RoundPhase.REDUCING for round_ in rounds) or any(
            copy.fetch is not None for member in roster for copy in member.copies
        )

    def _ask_founder(self) -> bool:
        if self.context.history.founded or self.founder is not None:
            return False
        for member in self.founders():
            if member.layout is not None:
                self.founder = member.peer
                self.context.send(member.peer, SupplyWeights())
                return True
        return False

    def founders(self) -> list[Member]:
        """Who may give the run its first weights: of all who came by one invite, who came first."""
        found, invites = [], set()
        for member in self.context.roster.by_number():
            invite = member.grant.invite
            if member.grant.founder and not member.draining and invite not in invites:
                found.append(member)
                invites |= {invite} - {""}
        return found

    def _warn_of_invites(self) -> None:
        """Tell the owner once of each invite by which a good part of the contributors came."""
        for invite, count in large_invites(self.contributing()).items():
            if invite not in self._warned:
                self._warned.add(invite)
                self.context.announce(EventKind.RUN, None, format_invite_warning(invite, count))

    def contributing(self) -> list[Member]:
        """Members that have a place."""
        places = self.context.history.places
        return [member for member in self.context.roster.by_number() if member.peer in places]

    def _give_up_missing(self) -> bool:
        """A deadline after a restart, contributors that have not come back lose their places."""
        state_sync = self.state_sync
        if not (state_sync.missing or state_sync.votes.unheard) or self._missing_until_s is None:
            return False
        if self.succession.waiting or self.context.now_s < self._missing_until_s:
            return False
        for peer in sorted(state_sync.missing):
            self.context.record(PlaceVacated(peer))
            self.context.announce(
                EventKind.LEAVE,
                peer,
                f"{self.context.name(peer)} did not come back after the master's restart",
            )
        state_sync.missing.clear()
        state_sync.votes.unheard.clear()
        return True

    def _give_places(self) -> bool:
        history = self.context.history
        changed = False
        while (holder := trainers.unseated(self.context)) is not None:
            self.context.record(PlaceVacated(holder.peer))
            self.context.announce(
                EventKind.ROLE, holder.peer, f"{said(holder)} gives up its place: it has no trainer"
            )
            changed = True
        while (late := trainers.too_late(self.context)) is not None:
            self.context.record(PlaceVacated(late.peer))
            why = trainers.rest(self.context, late)
            self.context.announce(
                EventKind.ROLE, late.peer, f"{said(late)} gives up its place: {why}"
            )
            changed = True
        while True:
            member = next_to_seat(
                self.context.roster,
                history.places,
                history.vacancies,
                self.context.spec.membership.contributors,
                history.versions,
                self.context.now_s,
            )
            if member is None:
                return changed
            self.context.record(PlaceTaken(member.peer))
            self.context.announce(
                EventKind.ROLE, member.peer, f"{said(member)} is now a contributor"
            )
            changed = True

    def _publish_view(self) -> None:
        if self.adoption.waiting:
            return
        roster = self.context.roster
        force, self._view_due = self._view_due, False
        if roster.next_view(self.context.history.places, force=force):
            self.context.send_all(
                View(roster.view_number, roster.view_members, self.context.history.step)
            )

    def _remove_hopeless(self) -> bool:
        hopeless = self.state_sync.hopeless()
        for member, code, reason in hopeless:
            self._evict(member.peer, code, reason)
        return bool(hopeless)

    def _release_leaving(self) -> bool:
        """Let go whoever wants to leave and is not needed any more, or has waited long enough."""
        drain_s = DRAIN_DEADLINES_MAX * self.context.spec.membership.deadline_s
        for member in self.context.roster.by_number():
            if member.draining_s is None:
                continue
            patient = self.context.now_s < member.draining_s + drain_s
            if self.scheduler.adds(member.peer) or (
                patient
                and (self.scheduler.awaits(member.peer) or self.state_sync.is_only_donor(member))
            ):
                continue
            self.context.send(member.peer, Released())
            self.context.announce(EventKind.LEAVE, member.peer, f"{said(member)} has left")
            self.context.drop(member.peer, RefusalCode.LEFT, "you asked to leave")
            self._remove(member, f"it left: {quoted(member.draining_why)}")
            return True
        return False

    def _finish(self) -> bool:
        history, wanted = self.context.history, self.context.spec.run.rounds
        if not wanted or history.commit_count < wanted or self._finish_sent:
            return False
        if not history.finished:
            self.context.record(RunFinished(history.last_round))
            self.context.announce(
                EventKind.RUN, None, f"all {wanted} rounds are committed; the run is finished"
            )
            self._finish_due_s = self.context.now_s + self.context.spec.membership.deadline_s
            return True
        applied = all(
            copy.version == version
            for member in self.context.roster
            if member.in_sync
            for copy, version in zip(member.copies, history.versions, strict=True)
        )
        if not applied and self.context.now_s < self._finish_due_s:
            return False
        self._finish_sent = True
        self.context.send_all(Finish(history.last_round))
        return True
