"""The operator's commands, as the master's HTTP API takes them: one method for each POST; and the
invites that one of them makes.

A command that changes the run answers when the change is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import trio

from ...membership.master.run_end import how_to_go_on, what_is_committed
from ...membership.master.status.why_waiting import WaitReasons
from ...membership.spec.spec import STEPS_MAX, RunSpec
from ...membership.spec.spec_changes import with_end
from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.messages import Role
from ...protocol.trust.invite import ADDRESSES_MAX, Invite
from ..advertised_hosts import dialable
from ..process.exit_codes import ExitCode
from ..web.app import Action, Json
from .admission import find_peer
from .journal.journal_base import Journal, invite_id, storing
from .master_service import MasterService
from .opened_run import MasterOptions, OpenedRun

USES_MAX = 1_000_000  # of an invite
HOURS_MAX = 87_600.0  # of an invite: ten years
REASON_CHARS_MAX = 900
STOP_DELAY_S = 0.2  # the answer is sent first


class MasterInvites:
    """Makes invites; ``others`` are addresses of the other masters of a shared journal."""

    def __init__(
        self, options: MasterOptions, run: OpenedRun, bound: Callable[[], Sequence[Address]]
    ) -> None:
        self._options = options
        self._run = run
        self._bound = bound
        self.others: tuple[str, ...] = ()

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which other machines dial this master."""
        return dialable(self._bound(), self._options.advertise)

    def masters(self) -> tuple[Address, ...]:
        """Return the addresses for invites: this master's, then those of possible successors."""
        known = self._run.coordinator.context.history.masters.addresses
        ours, others = (map(Address.parse, each) for each in (self.addresses(), self.others))
        every = [*ours, *self._options.also, *others, *map(Address.parse, known)]
        return tuple(dict.fromkeys(every))[:ADDRESSES_MAX]

    def make(
        self, role: Role, founder: bool, uses: int, hours: float, *, approve: bool = False
    ) -> str:
        """Return a new invite as text; raise UserError if the disk is full."""
        with storing("the invite"):
            token, expires_s = self._run.store.make_token(
                role, founder=founder, uses=uses, hours=hours, by_hand=approve
            )
        return Invite(
            run_id=self._run.authority.run_id,
            addresses=self.masters(),
            fingerprint=self._run.authority.fingerprint,
            token=token,
            role=role,
            expires_s=int(expires_s),
        ).encode()


class OperatorCommands:
    """Check and carry out commands (``stop`` ends the process); a bad request raises UserError."""

    def __init__(
        self,
        service: MasterService,
        store: Journal,
        invites: MasterInvites,
        stop: Callable[[], None],
    ) -> None:
        self._service = service
        self._coordinator = service.coordinator
        self._store = store
        self._invites = invites
        self._stop = stop

    def actions(self) -> Mapping[str, Action]:
        return {
            "invite": self._invite,
            "withdraw": self._withdraw,
            "approve": self._approve,
            "kick": self._kick,
            "demote": self._demote,
            "pause": self._pause,
            "resume": self._resume,
            "finish": self._finish,
            "stop": self._stop_process,
        }

    # ------------------------------------------------------------ invites

    async def _invite(self, body: Json) -> Json:
        try:
            role = Role(body.get("role", "contributor"))
            uses, hours = int(str(body.get("uses", 1))), float(str(body.get("hours", 24.0)))
        except ValueError as error:
            raise UserError(f"invalid invite: {error}", exit_code=ExitCode.USAGE) from error
        founder, approve = body.get("founder", False), body.get("approve", False)
        flags = isinstance(founder, bool) and isinstance(approve, bool)
        if not (1 <= uses <= USES_MAX and 0 < hours <= HOURS_MAX and flags):
            raise UserError(
                f"invalid invite: uses are 1 to {USES_MAX}, hours at most {HOURS_MAX:.0f}, "
                "founder and approve true or false",
                exit_code=ExitCode.USAGE,
            )
        invite = self._invites.make(role, founder is True, uses, hours, approve=approve is True)
        terms = {"role": role.value, "uses": uses, "hours": hours, "approve": approve}
        terms["id"] = invite_id(Invite.decode(invite).token)
        return {"invite": invite, **terms}

    async def _withdraw(self, body: Json) -> Json:
        invite_id = str(body.get("id", ""))
        with storing("the withdrawal"):
            found = self._store.withdraw(invite_id)
        if not found:
            raise UserError(
                f"there is no invite {invite_id!r}",
                exit_code=ExitCode.USAGE,
                hint="`holdfast invite --list` lists them with their ids",
            )
        return {"id": invite_id, "withdrawn": True}

    async def _approve(self, body: Json) -> Json:
        wanted, refuse = str(body.get("peer", "")), body.get("refuse", False)
        if not isinstance(refuse, bool):
            raise UserError("refuse must be true or false", exit_code=ExitCode.USAGE)
        if not refuse:
            return await self._service.admission.approve(wanted)
        return await self._service.admission.refuse(wanted, _reason(body))

    # ------------------------------------------------------------ members

    async def _kick(self, body: Json) -> Json:
        peer, name = self._find_peer(str(body.get("peer", "")))
        await self._service.see_through(partial(self._coordinator.kick, peer, _reason(body)))
        return {"peer": peer, "name": name, "kicked": True}

    async def _demote(self, body: Json) -> Json:
        (peer, name), back = self._find_peer(str(body.get("peer", ""))), body.get("back") is True
        await self._service.see_through(partial(self._coordinator.demote, peer, back))
        return {"peer": peer, "name": name, "demoted": not back}

    def _find_peer(self, wanted: str) -> tuple[str, str]:
        names = {peer: grant.name for peer, grant in self._store.granted().items()}
        history = self._coordinator.context.history
        names |= {peer: admitted.name for peer, admitted in history.members.admitted.items()}
        names |= {member.peer: member.name for member in self._coordinator.context.roster}
        for peer in history.members.revoked:
            names.pop(peer, None)
        hint = "`holdfast status` lists the members; use the peer id's first digits"
        peer = find_peer(wanted, names, "peer", hint)
        return peer, names[peer]

    # ------------------------------------------------------------ the run

    async def _pause(self, _body: Json) -> Json:
        was_paused = self._coordinator.context.history.paused
        self._check_unfinished("there is nothing to pause")
        await self._service.see_through(self._coordinator.pause)
        return {"paused": True, "was_paused": was_paused}

    async def _resume(self, body: Json) -> Json:
        """Open rounds again; with ``rounds`` or ``epochs``, give the run that many in all."""
        context = self._coordinator.context
        history, was_paused = context.history, context.history.paused
        rounds = _new_end("round", body.get("rounds"), history.commit_count)
        epochs = _new_end("epoch", body.get("epochs"), history.data.epoch)
        if rounds is None and epochs is None:
            command, goal = how_to_go_on(history, context.spec)
            self._check_unfinished(f"{command} lets it go on to {goal}")
        else:
            await self._change_end(with_end(context.spec, rounds=rounds, epochs=epochs))
        await self._service.see_through(self._coordinator.resume)
        answer: Json = {"paused": False, "was_paused": was_paused}
        answer["rounds"], answer["epochs"] = context.spec.run.rounds, context.spec.data.epochs
        return answer

    async def _finish(self, _body: Json) -> Json:
        """End the run with the rounds under way or the next one; at once while none can come."""
        self._check_unfinished("there is nothing more to end")
        context, under_way = self._coordinator.context, len(self._coordinator.scheduler.rounds)
        state, _why = WaitReasons(self._coordinator, self._service.now()).of_run()
        rounds = context.history.commit_count + max(under_way, state == "training")
        if not rounds:
            raise UserError(
                "the run has committed no round, so there is nothing to keep",
                hint="to give it up, end its peers and its master with Ctrl+C",
            )
        await self._change_end(with_end(context.spec, rounds=rounds))
        return {"rounds": rounds}

    async def _change_end(self, spec: RunSpec) -> None:
        context = self._coordinator.context
        if context.history.finished and len(context.roster):
            names = ", ".join(member.name for member in context.roster.by_number())
            raise UserError(
                f"the peers of the finished run are still leaving: {names}",
                hint="try again when they have left; `holdfast status` shows them",
            )
        if spec != context.spec:
            await self._service.see_through(partial(self._coordinator.change_end, spec))

    def _check_unfinished(self, hint: str) -> None:
        history = self._coordinator.context.history
        if history.finished:
            done = what_is_committed(history, self._coordinator.context.spec)
            raise UserError(f"the run is finished: {done}", hint=hint)

    async def _stop_process(self, _body: Json) -> Json:
        trio.lowlevel.spawn_system_task(self._stop_soon)
        return {"stopping": True}

    async def _stop_soon(self) -> None:
        await trio.sleep(STOP_DELAY_S)
        self._stop()


def _reason(body: Json) -> str:
    return str(body.get("reason") or "no reason was given")[:REASON_CHARS_MAX]


def _new_end(what: str, count: object, done_count: int) -> int | None:
    """Return a new number of rounds or epochs, None if it stays; raise UserError for a bad one."""
    if count is None:
        return None
    if type(count) is not int or not 0 <= count <= STEPS_MAX:
        raise UserError(f"invalid number of {what}s: {count!r}", exit_code=ExitCode.USAGE)
    if 0 < count <= done_count:
        raise UserError(
            f"{done_count} {what}s are committed already, so {count} in all would end the run",
            exit_code=ExitCode.USAGE,
            hint=f"give the number of all {what}s, the past ones included; 0: no end",
        )
    return count
