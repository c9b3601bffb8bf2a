"""Admission of newcomers: by a token alone, or by a token and the operator's approval.

    EnrolRequest --known key?--> another certificate
                 --revoked?----> refused
                 --token good?-> by hand? --no--> token used up, grant written, certificate
                                   | yes
                                   '--> pending: told to ask again   --approve--> as above
                                                                     --refuse---> revoked

Pending newcomers are not stored: after a restart of the master they ask again and are pending
again. The token is checked each time and used up only on approval.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import trio
from attrs import define, field

from ...membership.master.coordinator import Coordinator
from ...membership.master.hello_checks import shut_out
from ...membership.master.state.context import quoted
from ...membership.master.state.master_effects import Decide
from ...membership.shared.event_kind import EventKind
from ...protocol.addresses import host_of
from ...protocol.enrolment import Refusal, answer_newcomer
from ...protocol.errors import UserError
from ...protocol.machine_check import Checkups
from ...protocol.messages import EnrolRequest, RefusalCode, Role
from ...protocol.network.interface import Channel, Network
from ...protocol.trust.authority import Authority
from ..process.exit_codes import ExitCode
from ..status_records import PendingRow
from ..web.app import Json
from .journal.journal_base import Journal, JournalError, TokenError, storing

log = logging.getLogger("holdfast.master")

ID_DIGITS = re.compile(r"[0-9a-f]{4,32}")
PENDING_MAX = 64  # newcomers that wait for approval; more are told to come back later
PENDING_S = 300.0  # since its last request; then a newcomer counts as gone


@define
class Pending:
    """A newcomer with a valid token that waits for approval.

    Its role and name do not change while it waits: the operator approves what was shown.
    """

    peer: str
    name: str
    role: Role
    founder: bool
    host: str
    token: str = field(repr=False)
    asked_s: float  # its first request
    seen_s: float  # its last request
    approved: bool = False  # its admission is being written

    @property
    def role_text(self) -> str:
        return f"{self.role.value} and founder" if self.founder else self.role.value


class Admission:
    """Admit newcomers, and keep the list of those that wait for approval.

    Args:
      recorded: waits until all decisions are on disk.
      checkups: answers machines that only want to be checked.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Journal,
        network: Network,
        decide: Decide,
        recorded: Callable[[], Awaitable[None]],
        checkups: Checkups,
    ) -> None:
        self.change_count = 0
        self._coordinator = coordinator
        self._store = store
        self._network = network
        self._decide = decide
        self._recorded = recorded
        self._checkups = checkups
        self._pending: dict[str, Pending] = {}

    async def enrol(self, channel: Channel, authority: Authority) -> None:
        """Hold a newcomer's whole conversation; raises what ``answer_newcomer`` raises."""
        host = host_of(channel.remote_address)

        async def admit(request: EnrolRequest, peer: str) -> None:
            self.check_not_shut_out(peer)
            try:
                if (
                    self._store.valid(request.token).by_hand
                    or self._coordinator.context.spec.membership.approve
                ):
                    raise self._keep_waiting(request, peer, host)
                await self._redeem(request.token, peer, request.name)
            except TokenError as error:
                if self._is_known(peer):  # since a moment ago, by a connection that broke
                    return
                raise Refusal(RefusalCode.TOKEN, str(error)) from error
            except JournalError as error:
                raise Refusal(
                    RefusalCode.BUSY,
                    f"the master cannot store new members ({error}): its operator must free some"
                    " disk space, or see to its database; then try again",
                ) from error
            log.info("admitted %s (%s)", request.name, peer[:8])

        check = partial(self._checkups.answer, host=host)
        await answer_newcomer(channel, authority, admit, check=check, known=self._is_known)

    async def _redeem(self, token: str, peer: str, name: str) -> None:
        await self._network.run_sync(lambda: self._store.redeem(token, peer, name))

    def _is_known(self, peer: str) -> bool:
        """Return whether a peer was admitted before and not shut out since."""
        out = self._coordinator.context.history.members.is_out(peer)
        return self._store.grant(peer) is not None and not out

    def check_not_shut_out(self, peer: str) -> None:
        """Raise Refusal if this key was shut out, whatever token it shows now."""
        refused = shut_out(self._coordinator.context.history, peer)
        if refused is not None:
            raise Refusal(*refused)

    # ------------------------------------------------------------ approval

    def _keep_waiting(self, request: EnrolRequest, peer: str, host: str) -> Refusal:
        """List a newcomer as pending; return the refusal that tells it to wait."""
        now_s = trio.current_time()
        self._forget_gone(now_s)
        known = self._pending.get(peer)
        if known is not None:
            try:
                self._store.valid(known.token)
            except TokenError:
                del self._pending[peer]  # it may wait again, with the invite that it shows now
                known = None
        if known is None:
            token = self._store.valid(request.token)
            waiting = sum(each.token == request.token for each in self._pending.values())
            if waiting >= token.uses_left or len(self._pending) >= PENDING_MAX:
                return Refusal(
                    RefusalCode.BUSY,
                    "too many newcomers wait for approval already; try again later",
                )
            known = Pending(
                peer, request.name, token.role, token.founder, host, request.token, now_s, now_s
            )
            self._pending[peer] = known
            self.change_count += 1
            text = (
                f"{peer[:8]} at {host} asks to join as {known.role_text} "
                f"(`holdfast approve {peer[:8]}`); it calls itself {quoted(request.name)!r}"
            )
            self._note(peer, text)
        known.seen_s = now_s
        return Refusal(
            RefusalCode.APPROVAL,
            f"the run's operator has to approve this machine: `holdfast approve {peer[:8]}`",
        )

    def _forget_gone(self, now_s: float) -> None:
        gone = [each.peer for each in self._pending.values() if each.seen_s + PENDING_S < now_s]
        for peer in gone:
            del self._pending[peer]
            self.change_count += 1

    def rows(self) -> tuple[PendingRow, ...]:
        """Return the newcomers that wait for approval, in the order in which they asked."""
        now_s = trio.current_time()
        self._forget_gone(now_s)
        return tuple(
            PendingRow(
                peer=each.peer,
                name=each.name,
                role=each.role.value,
                founder=each.founder,
                host=each.host,
                waits_s=now_s - each.asked_s,
            )
            for each in self._pending.values()
        )

    async def approve(self, wanted: str) -> Json:
        """Approve a pending newcomer; it gets its certificate when it asks again."""
        pending = self._find(wanted)
        pending.approved = True  # before the first await: two approvals use the token once
        try:
            with storing("the approval"):
                await self._redeem(pending.token, pending.peer, pending.name)
        except TokenError:  # the newcomer gets the same answer when it asks again
            if self._pending.get(pending.peer) is pending:
                del self._pending[pending.peer]
                self.change_count += 1
            raise
        except BaseException:
            pending.approved = False
            raise
        self._take(pending, "was approved by the run's operator")
        return {"peer": pending.peer, "name": pending.name, "approved": True}

    async def refuse(self, wanted: str, reason: str) -> Json:
        """Refuse a pending newcomer; its key is never admitted again."""
        pending = self._find(wanted)
        self._decide(partial(self._coordinator.kick, pending.peer, reason))
        self._take(pending, f"was refused by the run's operator: {quoted(reason)}")
        await self._recorded()
        return {"peer": pending.peer, "name": pending.name, "approved": False}

    def _take(self, pending: Pending, what: str) -> None:
        self._pending.pop(pending.peer, None)
        self.change_count += 1
        self._note(pending.peer, f"{quoted(pending.name)} ({pending.peer[:8]}) {what}")

    def _note(self, peer: str, text: str) -> None:
        note = partial(self._coordinator.note, text, kind=EventKind.JOIN, peer=peer)
        self._decide(note)

    def _find(self, wanted: str) -> Pending:
        names = {peer: each.name for peer, each in self._pending.items() if not each.approved}
        hint = "`holdfast approve` lists pending newcomers; use the id's first digits"
        return self._pending[find_peer(wanted, names, "pending newcomer", hint)]


def find_peer(wanted: str, names: Mapping[str, str], kind: str, hint: str) -> str:
    """Return the peer that an operator means: by the first digits of the id, else by the name.

    A word of hex digits is always an id. A machine chooses its own name, and must not receive what
    was meant for another one by choosing that one's id. Without one peer, UserError is raised.
    """
    if ID_DIGITS.fullmatch(wanted):
        matches = [peer for peer in names if peer.startswith(wanted)]
    else:
        matches = [peer for peer, name in names.items() if name == wanted]
    if len(matches) == 1:
        return matches[0]
    text = f"several {kind}s are" if matches else f"no {kind} is"
    text += f" called {wanted!r}"
    if matches:
        text += f": {', '.join(peer[:8] for peer in matches[:8])}"
    raise UserError(text, exit_code=ExitCode.USAGE, hint=hint)


async def check_token(store: Journal, token: str) -> None:
    """Raise Refusal if a token admits no newcomer."""
    try:
        store.valid(token)
    except TokenError as error:
        raise Refusal(RefusalCode.TOKEN, str(error)) from error
