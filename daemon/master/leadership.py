"""Which of several masters leads: the lease of a shared journal is waited for, taken, kept and
lost.

    Leadership.take   waits until nobody holds the lease, and takes it
    Leadership.lead   begins a ``Leader`` and renews the lease until one of them ends

A lease is good for ``lease_s`` from the moment *before* its renewal was sent, by this machine's
clock, so it is over here before it is over in the database. From then on this master decides
nothing. Clocks of different machines are never compared. That no two masters write to the journal
depends on no clock: see ``postgres_journal``.

A leader that hears of no member for a while gives the lease up if another master is there: it may
be the only one that is cut off.

This module touches no thread, network or database: ``call`` does, and the simulator has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import trio

from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode
from ..process.tasks import only_error
from .journal.journal_base import FencedError, JournalAwayError
from .journal.lease import Lease, MasterRow

if TYPE_CHECKING:
    from .master_service import MasterService

log = logging.getLogger("holdfast.master")

RENEWALS = 3  # in the time that a lease lasts
LOOKS = 10  # at a lease that another master holds, in the time that it lasts
AGAIN_S = 0.2  # between two attempts to renew, while the database does not answer
SEEN_LEASES = 6  # a master that did not register for so many leases is not named to anybody
SILENCE_SHARE = 0.4  # of the members' deadline, in which a leader that hears none of them gives way
ABSENCE_SHARE = 1.0  # the same for one to which none has come yet
IN_VAIN_MAX = 7  # doublings of that while nobody comes: half an hour by default
MODEST_LEASES = 3  # in which a master that has given way lets others take the lease first
MODEST_SHARE = 0.5  # of a lease, for which it has to be free then
RELEASE_S = 3.0  # to give the lease back at the end; else it runs out

T = TypeVar("T")


class LeaseTable(Protocol):
    """Where the lease is kept. Each call may wait long, and raises JournalAwayError."""

    def take_lease(self, holder: str, lease_s: float, free_s: float) -> Lease | None:
        """Take the lease if nobody has held it for ``free_s``; else return None."""
        ...

    def renew(self, lease: Lease, lease_s: float) -> bool:
        """Make the lease last from now on; return whether it is still this one's."""
        ...

    def release(self, lease: Lease) -> None:
        """Let another master take the lease at once."""
        ...

    def register(self, holder: str, addresses: Sequence[str], page: str) -> None:
        """Say where this master is."""
        ...

    def masters(self, seen_s: float) -> list[MasterRow]:
        """Return the masters that registered within so many seconds, the active one first."""
        ...


class Call(Protocol):
    """Does what may wait long, beside other tasks; cancelled work may go on unseen."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


class Leader(Protocol):
    """The run's master while it leads."""

    @property
    def service(self) -> MasterService: ...

    async def run(self) -> None:
        """Serve until told to end; raises UserError (SUPERSEDED) after ``service.stand_down``."""
        ...

    def know_others(self, addresses: Sequence[str]) -> None:
        """Name these masters to the members, beside itself: only once it listens."""
        ...

    def whereabouts(self) -> tuple[Sequence[str], str] | None:
        """Return addresses and page as they are now; None before it listens."""
        ...


class Leadership:
    """One master's part in it.

    Args:
      holder: names this process; no other one has the name.
      clock: seconds, of this machine; goes on while the process is stopped.

    Attributes:
      addresses, page: where this master is.
      known: the masters, this one included, as of the last look.
      away: why the database does not answer; empty while it does.
    """

    def __init__(
        self,
        table: LeaseTable,
        holder: str,
        lease_s: float,
        *,
        call: Call,
        clock: Callable[[], float],
        addresses: Sequence[str] = (),
    ) -> None:
        self._table = table
        self._lease_s = lease_s
        self._call = call
        self._clock = clock
        self.holder = holder
        self.addresses = tuple(addresses)
        self.page = ""
        self.known: Sequence[MasterRow] = ()
        self.away = ""
        self._good_until_s = 0.0  # of the present lease
        self._in_vain = 0  # times in a row that it has given way; nobody is there, perhaps
        self._modest_until_s = 0.0  # this one has given way: another one is to take the lease first

    @property
    def others(self) -> list[MasterRow]:
        return [row for row in self.known if row.holder != self.holder]

    @property
    def leader(self) -> MasterRow | None:
        return next((row for row in self.known if row.active), None)

    def is_held(self) -> bool:
        """Return whether this master's lease is good now. May be called from any thread."""
        return self._clock() < self._good_until_s

    # ------------------------------------------------------------ waiting

    async def take(self, looked: Callable[[], None]) -> Lease:
        """Wait for the lease; ``looked`` is called after each look at the lease of another one."""
        while True:
            asked_s = self._clock()
            try:
                lease = await self._call(self._look)
                self.away = ""
            except JournalAwayError as error:
                lease, self.away = None, str(error)
            if lease is not None:
                self._good_until_s = asked_s + self._lease_s
                return lease
            looked()
            await trio.sleep(self._lease_s / LOOKS)

    def _look(self) -> Lease | None:
        modest = self._clock() < self._modest_until_s
        free_s = MODEST_SHARE * self._lease_s if modest else 0.0
        lease = self._table.take_lease(self.holder, self._lease_s, free_s)
        self._register()
        return lease

    def _register(self) -> None:
        self._table.register(self.holder, self.addresses, self.page)
        self.known = self._table.masters(SEEN_LEASES * self._lease_s)

    # ------------------------------------------------------------ leading

    async def lead(self, lease: Lease, begin: Callable[[], Awaitable[Leader]]) -> str:
        """Lead until the lease is lost, or the leader ends by itself.

        Returns:
          Why the lease was lost; empty if the leader has ended by itself.
        """
        leader: Leader | None = None
        reason = ""

        def lose(why: str) -> None:
            nonlocal reason
            reason = reason or why
            log.warning("the lease is lost: %s", why)
            if leader is not None:
                leader.service.stand_down(why)

        def renewed() -> None:
            where = None if leader is None else leader.whereabouts()
            if leader is not None and where is not None:
                addresses = (each for row in self.others for each in row.addresses)
                leader.know_others(tuple(dict.fromkeys(addresses)))
                self.addresses, self.page = tuple(where[0]), where[1]

        async def give_way() -> None:
            while True:
                await trio.sleep(self._lease_s / LOOKS)
                # A process that was frozen hears of nobody either, but has lost the lease.
                if leader is None or not self.others or not self.is_held():
                    continue
                service = leader.service
                if service.has_members:
                    self._in_vain, share = 0, SILENCE_SHARE
                else:
                    share = ABSENCE_SHARE * 2**self._in_vain
                deadline_s = service.coordinator.context.spec.membership.deadline_s
                if service.cut_off_s() > share * deadline_s:
                    self._in_vain = min(self._in_vain + 1, IN_VAIN_MAX)
                    self._modest_until_s = self._clock() + MODEST_LEASES * self._lease_s
                    lose("no member is heard of, and another master is there")
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep, lease, renewed, lose)
            nursery.start_soon(give_way)
            try:
                leader = await begin()
                if reason:  # while it began
                    leader.service.stand_down(reason)
                await leader.run()
            except BaseExceptionGroup as group:
                error = only_error(group)
                if not isinstance(error, UserError) or error.exit_code is not ExitCode.SUPERSEDED:
                    raise
                reason = reason or str(error)
            except (FencedError, JournalAwayError) as error:
                reason = reason or str(error)
            finally:
                nursery.cancel_scope.cancel()
                if self.is_held():
                    self._good_until_s = 0.0
                    await self._release(lease)
        return reason

    async def _keep(
        self, lease: Lease, renewed: Callable[[], None], lose: Callable[[str], None]
    ) -> None:
        why = ""
        while True:
            await trio.sleep(AGAIN_S if why else self._lease_s / RENEWALS)
            began_s = self._clock()
            still: bool | None = None
            with trio.move_on_after(max(0.0, self._good_until_s - began_s)):
                try:
                    still = await self._call(lambda: self._renew(lease))
                    why = ""
                except JournalAwayError as error:
                    why = str(error)
            if still is False:
                self._good_until_s = 0.0
                lose("another master has taken the journal's lease")
                return
            # It must not have run out before this renewal, or this master could decide again after
            # it did not.
            if not self.is_held():
                lose(f"it could not be renewed for {self._lease_s:g} s: {why or 'no answer'}")
                return
            if still:
                self._good_until_s = began_s + self._lease_s
                renewed()

    def _renew(self, lease: Lease) -> bool:
        if not self._table.renew(lease, self._lease_s):
            return False
        self._register()
        return True

    async def _release(self, lease: Lease) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(RELEASE_S):
            try:
                await self._call(lambda: self._table.release(lease))
            except JournalAwayError as error:
                log.warning("the lease could not be given back, it runs out: %s", error)
