"""The search for a run's master among the addresses at which it may be.

Several masters share a run: all but the one that leads it are silent, refuse, or are dead.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

import trio
from attrs import define, field

from ...protocol.addresses import Address
from ...protocol.durable_files import write_private
from ...protocol.errors import RemoteProtocolError, UserError, cause_of
from ...protocol.messages import Masters, Welcome
from ...protocol.network.interface import Channel, Network
from ...protocol.trust.authority import Party
from ..advertised_hosts import doubt_of_loopback
from ..process.exit_codes import ExitCode
from ..process.paths import MASTERS_FILE
from .peer_config import PeerConfig, PeerReport

DIAL_S = 10.0  # one attempt to reach the master, TLS handshake included
BACKOFF_FIRST_S = 0.2
# The master dials us back before it answers. One that was silent is not dialled for as long again
# while there are others: they may give the lease to each other only because all members wait here.
WELCOME_S = 3 * DIAL_S
STAGGER_S = 1.0  # from dialling a master that does not answer to dialling the next one beside it

IS_IT_THERE = "is `holdfast master` running, and its port open? `holdfast doctor INVITE` tells"

DIAL_ERRORS = (OSError, trio.TooSlowError, RemoteProtocolError)

# This machine has no address, no route or no device.
OFFLINE = (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)


@define(eq=False)
class MasterSearch:
    """The addresses of a run's masters, and how one that answers is found."""

    _config: PeerConfig
    _network: Network
    _report: PeerReport
    masters: list[Address] = field(init=False)
    # Masters that took a greeting and did not answer, and when.
    _silent: dict[Address, float] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.masters = list(self._config.masters)

    def learn(self, message: Welcome | Masters) -> None:
        """Take the addresses at which the run's master may be, beside those known at the start."""
        before, credentials = self.masters, self._config.credentials
        self.masters = with_masters(self._config.masters, message.masters)
        if credentials is not None and self.masters != before:
            with suppress(OSError):  # it is known until this process ends
                write_private(
                    credentials.directory / MASTERS_FILE, "\n".join(message.masters).encode()
                )

    def was_silent(self, address: Address) -> None:
        self._silent[address] = trio.current_time()

    def answering(self) -> list[Address]:
        """Return the masters without those that were silent lately; all if no other is left."""
        lately_s = trio.current_time() - WELCOME_S
        return [
            m for m in self.masters if self._silent.get(m, lately_s) <= lately_s
        ] or self.masters

    async def first(
        self, untried: list[Address], failed: Callable[[Exception], None]
    ) -> tuple[Address, Channel] | None:
        """Dial masters in turn, and return the first that answers; None if none does.

        A master whose process is frozen is reached by the kernel and never answers: after
        ``STAGGER_S`` the next one is dialled beside it. While one does not answer, those that
        refused are dialled again: one of them may take the run over meanwhile. Those that were
        dialled are taken from ``untried``.
        """
        found: list[tuple[Address, Channel]] = []
        refused: list[Address] = []
        pending = 0

        async def dial(address: Address, over: trio.Event) -> None:
            nonlocal pending
            try:
                channel = await self._dial(address)
            except DIAL_ERRORS as error:
                failed(error)
                refused.append(address)
            else:
                if found:  # at the same moment as another one
                    with trio.CancelScope(shield=True):
                        await trio.aclose_forcefully(channel.stream)
                    return
                found.append((address, channel))
                nursery.cancel_scope.cancel()
            finally:
                pending -= 1
                over.set()

        async with trio.open_nursery() as nursery:
            again: list[Address] = []
            while not found and (untried or pending):
                if not untried and not again:
                    again, refused = refused, []
                    await trio.sleep(STAGGER_S)
                    continue
                over, pending = trio.Event(), pending + 1
                nursery.start_soon(dial, (untried or again).pop(0), over)
                with trio.move_on_after(STAGGER_S):
                    await over.wait()
        return found[0] if found else None

    async def reach(self, masters: Sequence[Address]) -> tuple[Address, Channel] | None:
        """Dial while this machine is offline; return None if it is online and no master answers."""
        while True:
            errors: list[Exception] = []
            reached = await self.first(list(masters), errors.append)
            if reached is not None or not all(map(_means_offline, errors)):
                return reached
            await trio.sleep(BACKOFF_FIRST_S)

    async def _dial(self, address: Address) -> Channel:
        """Connect to the master at an address; raises ``DIAL_ERRORS``."""
        try:
            with trio.fail_after(DIAL_S):
                return await self._network.dial(address, party=Party.MASTER)
        except DIAL_ERRORS as error:
            self._report.phase = "looking for the master"
            self._report.why = f"{address}: {why_not(error)}"
            raise


def with_masters(known: Sequence[Address], masters: Sequence[str]) -> list[Address]:
    """Return the known addresses and these, as far as they are addresses."""
    found = list(known)
    for text in masters:
        with suppress(UserError):
            found.append(Address.parse(text))
    return list(dict.fromkeys(found))


def _means_offline(error: Exception) -> bool:
    if not isinstance(error, OSError | trio.TooSlowError):
        return False
    cause = cause_of(error)
    return getattr(cause, "errno", None) in OFFLINE or isinstance(cause, socket.gaierror)


def why_not(error: Exception) -> str:
    """Format one of ``DIAL_ERRORS``."""
    return str(error) or "it does not answer in time"


def no_master(addresses: Sequence[Address], failure: str, hint: str = IS_IT_THERE) -> UserError:
    return UserError(
        f"no master of this run at {', '.join(map(str, addresses))}: {failure}",
        exit_code=ExitCode.UNREACHABLE,
        hint=(doubt_of_loopback(addresses) if hint == IS_IT_THERE else "") or hint,
    )
