"""The master's gate: newcomers are let in by a token, or by hand; nobody else becomes a member.

    EnrolRequest --known key?--> another certificate
                 --revoked?----> refused
                 --token good?-> by hand? --no--> token used up, grant written, certificate
                                   | yes
                                   '--> pending: told to ask again   --approve--> as above
                                                                     --refuse---> revoked

Who waits is not remembered on disk: it asks again, and is pending again. Its token is looked at each
time and used up only when it is approved.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable, Mapping
from functools import partial

import trio
from attrs import define, evolve, field

from ...membership.master.coordinator import Coordinator
from ...membership.master.hello_checks import shut_out
from ...membership.master.state.context import quoted
from ...membership.master.state.master_effects import Effect, EventKind
from ...protocol.addresses import host_of
from ...protocol.enrolment import AdmittedNewcomer, Refusal, answer_newcomer
from ...protocol.errors import UserError
from ...protocol.machine_check import Checkups
from ...protocol.messages import CheckRequest, EnrolRequest, RefusalCode, Role
from ...protocol.network.interface import Channel, Network
from ...protocol.network.stream import MessageStream
from ...protocol.trust.authority import Authority
from ..exit_codes import ExitCode
from ..status_records import PendingRow
from ..web.app import Json
from .journal_store import GrantRow, JournalStore, TokenError

log = logging.getLogger("holdfast.master")

ID_DIGITS = re.compile(r"[0-9a-f]{4,32}")
PENDING_MAX = 64  # newcomers that wait to be approved; others are told to come later
PENDING_S = 300.0  # without having asked again: it has given up, and its place is free

Decide = Callable[[Callable[[float], list[Effect]]], None]


@define
class Pending:
    """Somebody with a good token who waits to be approved.

    What the run's owner reads is what is approved: it does not change while somebody waits.
    """

    peer: str
    name: str
    role: Role
    founder: bool
    host: str
    token: str = field(repr=False)
    asked_s: float  # first
    seen_s: float  # last

    @property
    def role_said(self) -> str:
        return f"{self.role.value} and founder" if self.founder else self.role.value


class Admission:
    """Who may enrol.

    Args:
      decide: lets the coordinator decide something.
      checkups: for who only wants to be looked at.

    Attributes:
      change_count: grows whenever other people wait.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: JournalStore,
        network: Network,
        decide: Decide,
        checkups: Checkups,
    ) -> None:
        self.change_count = 0
        self._coordinator = coordinator
        self._store = store
        self._network = network
        self._decide = decide
        self._checkups = checkups
        self._pending: dict[str, Pending] = {}

    async def enrol(self, channel: Channel, authority: Authority) -> None:
        """A newcomer's whole conversation. Raises: as ``answer_newcomer``."""
        grants: list[GrantRow] = []
        host = host_of(channel.remote_address)

        async def redeem(request: EnrolRequest, peer: str) -> Role:
            self.check_not_shut_out(peer)
            try:
                if self._store.look_at(request.token) or self._spec_wants_approval:
                    raise self._keep_waiting(request, peer, host)
                grants.append(
                    await self._network.run_sync(lambda: self._store.redeem(request.token))
                )
            except TokenError as error:
                raise Refusal(RefusalCode.TOKEN, str(error)) from error
            except sqlite3.Error as error:
                raise _cannot_note(error) from error
            return grants[0].role

        async def admitted(admission: AdmittedNewcomer) -> None:
            grant = evolve(grants[0], name=admission.name)
            try:
                await self._network.run_sync(lambda: self._store.admit(admission.peer, grant))
            except sqlite3.Error as error:
                raise _cannot_note(error) from error
            log.info("admitted %s (%s)", admission.name, admission.peer[:8])

        async def check(messages: MessageStream, request: CheckRequest) -> None:
            await self._checkups.answer(messages, request, host)

        await answer_newcomer(
            channel, authority, redeem, admitted=admitted, check=check, known=self._known_role
        )

    def _known_role(self, peer: str) -> Role | None:
        """Of who was admitted before, and not shut out since."""
        grant = self._store.grant(peer)
        out = self._coordinator.context.history.is_out(peer)
        return None if grant is None or out else grant.role

    def check_not_shut_out(self, peer: str) -> None:
        """Raises Refusal: this key was shut out, whatever token it shows now."""
        refused = shut_out(self._coordinator.context.history, peer)
        if refused is not None:
            raise Refusal(*refused)

    @property
    def _spec_wants_approval(self) -> bool:
        return self._coordinator.context.spec.membership.approve

    # ------------------------------------------------------------ by hand

    def _keep_waiting(self, request: EnrolRequest, peer: str, host: str) -> Refusal:
        """What somebody is told who has to be approved first."""
        now_s = trio.current_time()
        self._forget_the_gone(now_s)
        known = self._pending.get(peer)
        if known is not None and not self._store.is_good(known.token):
            del self._pending[peer]  # it may wait anew, with the invite that it shows now
            known = None
        if known is None:
            granted, uses_left = self._store.offers(request.token)
            waiting = sum(each.token == request.token for each in self._pending.values())
            if waiting >= uses_left or len(self._pending) >= PENDING_MAX:
                return Refusal(
                    RefusalCode.BUSY,
                    "as many newcomers as can be let in wait to be approved already; come back later",
                )
            known = Pending(
                peer, request.name, granted.role, granted.founder, host, request.token, now_s, now_s
            )
            self._pending[peer] = known
            self.change_count += 1
            text = (
                f"{peer[:8]} at {host} wants in as {known.role_said} "
                f"(`holdfast approve {peer[:8]}`); it calls itself {quoted(request.name)!r}"
            )
            self._note(peer, text)
        known.seen_s = now_s
        return Refusal(
            RefusalCode.APPROVAL,
            f"the run's owner has to approve this machine: `holdfast approve {peer[:8]}`",
        )

    def _forget_the_gone(self, now_s: float) -> None:
        gone = [each.peer for each in self._pending.values() if each.seen_s + PENDING_S < now_s]
        for peer in gone:
            del self._pending[peer]
            self.change_count += 1

    def rows(self) -> tuple[PendingRow, ...]:
        """Return the newcomers that wait for approval, in the order in which they asked."""
        now_s = trio.current_time()
        self._forget_the_gone(now_s)
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
        """Let somebody in who waits; it gets its certificate when it asks again.

        Raises:
          UserError: nobody is called that, its token admits nobody any more, or the disk is full.
        """
        pending = self._find(wanted)
        del self._pending[pending.peer]  # now: who approves twice uses the token once
        try:
            grant = await self._network.run_sync(lambda: self._store.redeem(pending.token))
            row = evolve(grant, name=pending.name)
            await self._network.run_sync(lambda: self._store.admit(pending.peer, row))
        except TokenError:
            raise  # it is told the same when it asks again
        except sqlite3.Error as error:
            self._pending[pending.peer] = pending
            raise UserError(
                f"the approval cannot be written down: {error}",
                hint="free some space on the disk of the master's state",
            ) from error
        self._take(pending, "was approved by the run's owner")
        return {"peer": pending.peer, "name": pending.name, "approved": True}

    async def refuse(self, wanted: str, reason: str) -> Json:
        """Send somebody away who waits; its key is admitted no more.

        Raises:
          UserError: nobody is called that.
        """
        pending = self._find(wanted)
        self._decide(partial(self._coordinator.kick, pending.peer, reason))
        self._take(pending, f"was refused by the run's owner: {quoted(reason)}")
        return {"peer": pending.peer, "name": pending.name, "approved": False}

    def _take(self, pending: Pending, what: str) -> None:
        self._pending.pop(pending.peer, None)
        self.change_count += 1
        self._note(pending.peer, f"{quoted(pending.name)} ({pending.peer[:8]}) {what}")

    def _note(self, peer: str, text: str) -> None:
        note = partial(self._coordinator.note, text, kind=EventKind.JOIN, peer=peer)
        self._decide(note)

    def _find(self, wanted: str) -> Pending:
        waiting = self._pending
        matches = [waiting[peer] for peer in called(wanted, {p: waiting[p].name for p in waiting})]
        if len(matches) == 1:
            return matches[0]
        raise UserError(
            f"{'nobody who waits is' if not matches else 'several who wait are'} called {wanted!r}"
            + (f": {', '.join(each.peer[:8] for each in matches[:8])}" if matches else ""),
            exit_code=ExitCode.USAGE,
            hint="`holdfast approve` lists those who wait; use the id's first digits",
        )


def called(wanted: str, names: Mapping[str, str]) -> list[str]:
    """The peers that a person may mean: by the first digits of the id, else by the name.

    A word of hex digits is an id, whoever is called that: a name is its owner's choice, and must not
    get its owner what was meant for somebody else.
    """
    if ID_DIGITS.fullmatch(wanted):
        return [peer for peer in names if peer.startswith(wanted)]
    return [peer for peer, name in names.items() if name == wanted]


async def look_at(store: JournalStore, token: str) -> None:
    """Whether a token is good, for a checkup; raises Refusal."""
    try:
        store.look_at(token)
    except TokenError as error:
        raise Refusal(RefusalCode.TOKEN, str(error)) from error


def _cannot_note(error: sqlite3.Error) -> Refusal:
    return Refusal(
        RefusalCode.BUSY,
        f"the master cannot write down who joins ({error}): its owner must free some disk space; "
        "then try again",
    )
