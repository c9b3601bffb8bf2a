"""The invites of a run: they name its master, and the machines that may take over from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...protocol.addresses import Address
from ...protocol.messages import Role
from ...protocol.trust.invite import ADDRESSES_MAX, Invite
from ..advertised_hosts import dialable
from .journal.journal_base import storing
from .opened_run import MasterOptions, OpenedRun


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
