"""The master's rules: every decision of a run is made here, and nothing is carried out here.

The daemon calls one method per event and carries out the effects that it returns, in order. There
is no I/O, no clock and no randomness: the same calls return the same effects.

    Hello --attach----.                                    .--> SendMessage    to a peer
    message --receive-|   handler      settle              |--> RecordDurably  before what follows
    EOF --detach------+-> changes ---> derives the rest, --+--> DropPeer       refuse and close
    time --tick-------|   the state    until nothing       |--> AnnounceEvent  log, dashboard
    operator --kick---'                changes             '--> StandDown      end: superseded

*Theory of operation.* Handlers only note facts. ``_settle`` derives everything else, always in the
same order: adopt or agree on versions, assign places, publish the view, found the run, start
transfers, run the rounds, measure idle lines, release leaving members, finish. A view is published
before any message that names a member of it, and a transfer is started before any commit that would
outdate it.

*Lasting state* changes only through journal records. A restarted master is the replayed history,
plus the peers that attach again. A reduction continues after a restart if all its contributors
still run it (see ``adoption``); any other round that was not committed is void.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec

from ...protocol import messages as m
from ...protocol.errors import LocalProtocolError
from ..planning.bandwidth import Bandwidths
from ..shared.event_kind import EventKind
from ..spec.spec import RunSpec
from . import trainers
from .adoption import Adoption
from .attachment import Attachment
from .departures import Departures
from .leases import Leases
from .lineage import Lineage
from .message_handlers import MessageHandlers
from .places import Founding, Places
from .removal import Removal
from .rounds.round_scheduler import RoundScheduler
from .routes.routes import Routes
from .run_end import RunEnding
from .state.context import Context, format_member, quoted
from .state.history import RunHistory
from .state.journal import JournalRecord, PeerDemoted, PeerRevoked, RunPaused
from .state.master_effects import Effect, StandDown
from .state.roster import Connection, Grant, Member
from .state.succession import Succession
from .sync.state_sync import StateSync

__all__ = ["Coordinator", "Grant"]

SETTLE_PASSES_MAX = 10_000  # each pass changes something finite; more passes than this are a bug

P = ParamSpec("P")


def event(
    handle: Callable[Concatenate[Coordinator, P], bool | None],
) -> Callable[Concatenate[Coordinator, P], list[Effect]]:
    """Make an event of a method that notes what has happened at ``now_s``.

    The method returns True if conclusions are to be drawn now. The event returns its effects, in
    order; none if the master has been superseded before.
    """
    place = list(inspect.signature(handle).parameters).index("now_s") - 1

    @functools.wraps(handle)
    def happens(self: Coordinator, /, *args: P.args, **kwargs: P.kwargs) -> list[Effect]:
        if self.succession.superseded:
            return []
        now_s: Any = args[place]
        self.context.now_s = now_s
        self.departures.expect_return()
        if handle(self, *args, **kwargs):
            self._settle()
        effects = self.context.take_effects()
        if self.succession.superseded:
            # No effect of a superseded master may be seen.
            return [StandDown(self.succession.superseded)]
        return effects

    return happens


class Coordinator:
    """The master of one run.

    Args:
      spec: the run's spec.
      run_id: the id that a ``Hello`` must name.
      term: grows with every start of the master; view numbers are derived from it.
      lot: random and secret; audited chunks and the tickets of relays are derived from it.
      history: replayed from the journal; a new run has none.
    """

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        term: int,
        lot: bytes = b"",
        history: RunHistory | None = None,
    ) -> None:
        context = self.context = Context(spec, run_id, history or RunHistory(), term, lot)
        bandwidths = Bandwidths()
        self.removal = Removal(context, self._removed)
        evict = self.removal.evict
        self.succession = Succession(context)
        self.routes = Routes(context)
        self.state_sync = StateSync(context, self.succession, bandwidths, self.routes)
        self.lineage = Lineage(context, self.state_sync, self.succession, evict)
        self.leases = Leases(context)
        self.scheduler = RoundScheduler(
            context,
            self.state_sync,
            self.succession,
            bandwidths,
            self.routes,
            evict,
            self.leases,
        )
        self.ending = RunEnding(context, self.scheduler, self.leases)
        self.adoption = Adoption(context, self.scheduler.round_table, self.scheduler.driver)
        self.attachment = Attachment(context, self.removal)
        self.founding = Founding(context, self.state_sync, self.removal, self.attachment)
        self.places = Places(context)
        self.departures = Departures(
            context, self.scheduler, self.state_sync, self.succession, self.removal
        )
        self._view_due = False  # a new member needs the view even if nothing in it changed
        self.handlers = MessageHandlers(
            context,
            self.scheduler,
            self.state_sync,
            self.routes,
            self.adoption,
            self.founding,
            self.departures,
            self.removal,
            self.leases,
        )

    @classmethod
    def restore(
        cls,
        spec: RunSpec,
        run_id: str,
        records: Iterable[JournalRecord],
        term: int,
        lot: bytes = b"",
    ) -> Coordinator:
        """Return the master of a run that has a journal."""
        history = RunHistory.replay(records)
        if history.run_id not in ("", run_id):
            raise LocalProtocolError(f"the journal is of run {history.run_id}, not {run_id}")
        return cls(spec, run_id, term, lot, history)

    # ------------------------------------------------------------ events: connections

    @event
    def attach(
        self,
        peer: str,
        hello: m.Hello,
        grant: Grant,
        now_s: float,
        host: str = "",
        *,
        port: int = 0,
        reachable: bool = True,
        settle: bool = True,
    ) -> bool:
        """Handle the ``Hello`` of an authenticated peer (see ``attachment``).

        Args:
          host, port: the address it comes from; empty and 0 if it is not known.
          reachable: the master could dial one of its addresses.
          settle: as of ``receive``.
        """
        if self.attachment.refuse(peer, hello):
            return False
        if self.succession.refuses(peer, hello):
            return False
        if self.attachment.replace_connection(peer, hello):
            self._settle()  # a round that can end without it ends now, and Welcome has the outcome
        connection = Connection.of(hello, host, port, reachable)
        member = self.attachment.admit(peer, hello, grant, connection)
        self.routes.attached(peer)
        if self.succession.came(peer):
            self.departures.expect_return(again=True)
        committed = self.attachment.outcomes(hello)
        self.state_sync.attached(member, hello, committed)
        self.attachment.welcome(member, committed, self.adoption.came(member, hello))
        how = "" if connection.reachable else "; it cannot be dialled, it dials the others"
        text = f"joined as member {member.number}{how}"
        self.context.announce_peer(EventKind.JOIN, peer, text)
        self._view_due = True
        return settle

    @event
    def receive(self, peer: str, message: m.Message, now_s: float, *, settle: bool = True) -> bool:
        """Handle a member's message. A message that was overtaken by its sender's removal is
        ignored.

        Args:
          settle: draw conclusions now; otherwise the caller calls ``settle`` soon, once for many.
        """
        member = self.context.roster.get(peer)
        if member is None:
            return False
        self.context.detector.heard(peer, now_s)
        if isinstance(message, m.Heartbeat | m.Renew):
            return False  # a sign of life; the daemon answers Renew
        self.handlers.handle(member, message)
        self.context.change_count += 1
        return settle and not isinstance(message, m.Progress | m.Measured)

    @event
    def settle(self, now_s: float) -> bool:
        """Draw the conclusions of messages that were only noted."""
        return True

    @event
    def detach(self, peer: str, reason: str, now_s: float, *, settle: bool = True) -> bool:
        """Handle the end of a peer's connection; ``settle`` is as of ``receive``."""
        member = self.context.roster.get(peer)
        if member is None:
            return False
        self.context.announce_peer(EventKind.LEAVE, peer, f"is gone: {quoted(reason)}")
        self.removal.remove(member, reason)
        return settle

    @event
    def moved(
        self, peer: str, addresses: tuple[str, ...], now_s: float, host: str = "", port: int = 0
    ) -> bool:
        """Handle a member that continues over another connection, perhaps from another address."""
        member = self.context.roster.get(peer)
        if member is None:
            return False
        self.context.detector.heard(peer, now_s)
        member.connection.host, member.connection.port = host, port
        if member.connection.addresses == addresses:
            return False
        member.connection.addresses = addresses
        self.context.announce_peer(EventKind.ROUTE, peer, f"is at {', '.join(addresses)} now")
        self.routes.classed(member)
        return True

    @event
    def classed(self, peer: str, reachable: bool, now_s: float) -> bool:
        """Handle the result of another attempt to dial a member."""
        member = self.context.roster.get(peer)
        if member is None or member.connection.reachable == reachable:
            return False
        member.connection.reachable = reachable
        reach = "can be dialled now" if reachable else "cannot be dialled any more"
        self.context.announce_peer(EventKind.ROUTE, peer, reach)
        self.routes.classed(member)
        return True

    # ------------------------------------------------------------ events: the operator

    @event
    def kick(self, peer: str, reason: str, now_s: float) -> bool:
        """Remove a peer for good, on the operator's word; it need not be attached."""
        self.context.record(PeerRevoked(peer, quoted(reason)))
        if self.succession.kicked(peer):
            self.departures.expect_return(again=True)
        why = f"removed by the run's operator: {quoted(reason)}"
        self.removal.evict(peer, m.RefusalCode.KICKED, why)
        self.state_sync.missing.discard(peer)
        self.state_sync.votes.unheard.discard(peer)
        return True

    @event
    def demote(self, peer: str, back: bool, now_s: float) -> bool:
        """Make a peer a spare that takes no place, on the operator's word, or undo that."""
        self.context.record(PeerDemoted(peer, back))
        said = "may take a place again" if back else "is demoted to a spare by the run's operator"
        self.context.announce_peer(EventKind.ROLE, peer, said)
        return True

    @event
    def pause(self, now_s: float) -> bool:
        """Open no more rounds; a round in progress continues."""
        return self._set_paused(True)

    @event
    def resume(self, now_s: float) -> bool:
        """Open rounds again."""
        return self._set_paused(False)

    def _set_paused(self, paused: bool) -> bool:
        if self.context.history.paused != paused:
            self.context.record(RunPaused(paused))
            self.context.announce(EventKind.RUN, None, "paused" if paused else "resumed")
        return True

    @event
    def change_end(self, spec: RunSpec, now_s: float) -> bool:
        """Give the run another number of rounds or epochs, on the operator's word; a finished run
        goes on.

        Args:
          spec: differs from the run's in these numbers only.
        """
        return self.ending.change(spec)

    # ------------------------------------------------------------ events: other masters, the daemon

    @event
    def met(self, claim: m.TermClaim, who: str, now_s: float) -> bool:
        """Handle another master of this run that says which term it serves."""
        return self.succession.met(claim.term, claim.nonce, claim.followers, who)

    @event
    def know_masters(self, addresses: tuple[str, ...], now_s: float) -> None:
        """Note where this master can be reached, and where other masters may take over from it."""
        self.succession.know(addresses)

    @event
    def note(
        self, text: str, now_s: float, kind: EventKind = EventKind.RUN, peer: str | None = None
    ) -> None:
        """Announce an event of the daemon; no decision depends on it."""
        self.context.announce(kind, peer, text)

    # ------------------------------------------------------------ events: time

    @event
    def tick(self, now_s: float) -> bool:
        """Handle the passing of time: call at ``next_deadline_s`` or later, as often as wanted."""
        detector = self.context.detector
        for peer in detector.silent(now_s):
            silent_s = detector.silent_s(peer, now_s)
            self.removal.evict(peer, m.RefusalCode.SILENT, f"no sign of life for {silent_s:.1f} s")
        return True

    @event
    def overslept(self, now_s: float) -> None:
        """Handle that the master's own process stood still (it was stopped, or its machine slept).

        Messages that members sent meanwhile are still unread, so no member is blamed for silence.
        """
        self.context.detector.excuse(now_s)

    def next_deadline_s(self) -> float:
        """Return when ``tick`` has something to do if nothing else happens; infinity if never."""
        return min(
            self.context.detector.next_deadline_s(),
            self.scheduler.next_deadline_s(),
            self.state_sync.next_deadline_s(),
            trainers.next_deadline_s(self.context),
            self.lineage.due_s,
            self.adoption.next_deadline_s(),
            self.leases.next_deadline_s(),
            self.ending.next_deadline_s(),
            self.departures.next_deadline_s(),
        )

    # ------------------------------------------------------------ conclusions

    def _removed(self, member: Member, why: str) -> None:
        """Tell all parts that a member has left the roster."""
        self.founding.withdraw(member.peer)
        self.routes.removed(member.peer)
        self.state_sync.removed(member)
        self.adoption.removed(member.peer)
        self.leases.removed(member.peer)
        self.scheduler.removed(member.peer, f"{format_member(member)} is gone: {quoted(why)}")

    def _receiving(self) -> set[str]:
        """Return the members that receive something over links, which must stay as they are."""
        roster = self.context.roster
        busy = {each.peer for each in roster if any(copy.fetch is not None for copy in each.copies)}
        for round_ in self.scheduler.round_table.reducing():
            busy.update(round_.running().receivers)
        return busy

    def _settle(self) -> None:
        for _pass in range(SETTLE_PASSES_MAX):
            changed = self.departures.give_up_missing()
            changed |= self.adoption.settle(missing=bool(self.state_sync.missing))
            changed |= self.lineage.adopt()
            changed |= self.state_sync.settle(self.scheduler.excluded)
            changed |= self.places.assign()
            self.places.warn_of_invites()
            self.leases.settle(waiting=self.adoption.waiting or bool(self.state_sync.missing))
            self._publish_view()
            self.routes.arrange_again()
            changed |= self.founding.ask()
            self.routes.go_direct(self._receiving)
            if self.adoption.waiting:
                changed |= self._evict_hopeless()
            else:
                changed |= self._go_on()
            changed |= self.departures.release()
            if not changed:
                self.context.settled_s = self.context.now_s
                return
        raise LocalProtocolError("the master's rules do not come to rest")

    def _go_on(self) -> bool:
        """Let copies and rounds begin and end: all that changes the versions which members hold."""
        changed = self.state_sync.transfer(self.scheduler.excluded)
        changed |= self._evict_hopeless()
        changed |= self.scheduler.advance()
        changed |= self.lineage.call_back()
        changed |= self._rewind()
        return changed | self.ending.finish()

    def _publish_view(self) -> None:
        if self.adoption.waiting:
            return
        roster = self.context.roster
        force, self._view_due = self._view_due, False
        if roster.next_view(self.context.history.members.places, force=force):
            self.context.send_all(
                m.View(roster.view_number, roster.view_members, self.context.history.step)
            )

    def _evict_hopeless(self) -> bool:
        hopeless = self.state_sync.hopeless()
        for member, code, reason in hopeless:
            self.removal.evict(member.peer, code, reason)
        return bool(hopeless)

    def _rewind(self) -> bool:
        if not self.lineage.rewind(busy=bool(self.scheduler.rounds)):
            return False
        self.leases.rewound()
        for member in self.context.roster.by_number():
            self.attachment.welcome(member)  # has the number of the branch that the run is on now
        return True
