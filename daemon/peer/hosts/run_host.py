"""``holdfast host`` as a process: it keeps its link to the head, and comes back when it breaks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import trio
from attrs import frozen

from ....protocol.enrolment import enrol
from ....protocol.errors import EvictedError, RemoteProtocolError, UserError
from ....protocol.messages import RefusalCode
from ....protocol.network.sockets import SocketNetwork
from ....protocol.trust.authority import Party
from ....protocol.trust.credentials import Credentials
from ....protocol.trust.identity import Identity
from ....protocol.trust.invite import Invite
from ...advertised_hosts import host_towards, is_loopback
from ...process.exit_codes import ExitCode
from ...process.paths import IDENTITY_FILE, OWN_STATE_FILE, make_private, socket_folder
from ...process.screen import Screen
from ...process.tasks import wait_for_signals
from ..peer_credentials import stored_credentials
from ..trainer.accelerators import COUNT_PLACEHOLDER, look
from ..trainer.failures import last_error
from ..trainer.supervisor import TrainerSupervisor
from .host import FurtherHost, HostBridge
from .site import head_of

LINK_WAIT_S = 15.0
LINES_QUOTED = 40  # of the command's output, in which its error is looked for
AGAIN_S = 2.0  # between two attempts to reach the head


@frozen
class HostOptions:
    """Options of ``holdfast host``."""

    site: Invite
    command: Sequence[str]
    name: str
    state: Path
    patience_s: float | None


async def run_host(options: HostOptions, screen: Screen) -> None:
    """Take part until the run is finished, or Ctrl+C.

    Raises:
      UserError: the head refuses this host, or was not there for ``patience_s``.
    """
    _refuse_own_machine(options.site)
    with socket_folder() as folder:
        async with trio.open_nursery() as nursery:
            stopped = trio.Event()
            nursery.start_soon(wait_for_signals, stopped.set)

            async def stop() -> None:
                await stopped.wait()
                screen.tell("stopped by its owner: the head goes on without this host")
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop)
            await _keep(options, screen, folder / "trainer.sock")
            nursery.cancel_scope.cancel()


async def _keep(options: HostOptions, screen: Screen, socket_path: Path) -> None:
    head, missing_s = head_of(options.site), trio.current_time()
    supervise = partial(TrainerSupervisor, socket_path=socket_path, output=screen.output)

    def make(
        command: Sequence[str], member: str, start: str, bridge: HostBridge
    ) -> TrainerSupervisor:
        return supervise(
            command,
            member=member,
            start=start,
            crash_report=bridge.crash_report,
            ready=bridge.listening,
        )

    kept = str((options.state / OWN_STATE_FILE).absolute())
    counts = any(COUNT_PLACEHOLDER in each for each in options.command)
    while True:
        try:
            credentials = await _enter(options)
            host = FurtherHost(
                credentials.peer_id,
                options.name,
                options.site,
                SocketNetwork(credentials),
                lambda say: HostBridge(socket_path, say, kept),
                make,
                options.command,
                screen.tell,
                _gpu_counts if counts else lambda: (0, 0),
                lambda: last_error(
                    line.text for line in screen.ring.tail(LINES_QUOTED, source="trainer")
                ),
            )
            try:
                why = await host.run_link(LINK_WAIT_S)
            finally:
                missing_s = trio.current_time() if host.linked else missing_s
            if host.finished:
                screen.tell("the run is finished")
                return
        except OSError as error:
            why = str(error)
        except EvictedError as error:
            if error.code != RefusalCode.BUSY.value:
                raise UserError(error.reason, exit_code=ExitCode.REFUSED) from error
            why = error.reason
        except RemoteProtocolError as error:
            raise UserError(
                str(error),
                exit_code=ExitCode.REFUSED,
                hint="another program is at the string's address: copy the string from the head",
            ) from error
        waited_s = trio.current_time() - missing_s
        if options.patience_s is not None and waited_s > options.patience_s:
            where = ", ".join(map(str, options.site.addresses))
            raise UserError(
                f"no head {head[:8]} at {where}: {why}",
                exit_code=ExitCode.UNREACHABLE,
                hint="is `holdfast join --hosts` running there, with this string, and its port"
                " open?",
            )
        screen.tell(f"no link to the head ({why}); trying again ...")
        await trio.sleep(AGAIN_S)


async def _enter(options: HostOptions) -> Credentials:
    identity = Identity.load_or_create(make_private(options.state) / IDENTITY_FILE)
    known = stored_credentials(options.state, options.site)
    if known is not None:
        return known
    pair = await enrol(options.site, identity, options.name, Party.PEER)
    return Credentials(options.state, identity, *pair)


def _gpu_counts() -> tuple[int, int]:
    gpus = look()
    return len(gpus.healthy), len(gpus.all)


def _refuse_own_machine(site: Invite) -> None:
    """Raise UserError on the head itself. Loopback addresses are for trying it on one machine."""
    for address in site.addresses:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        own = host_towards(address.host, family)
        if own == address.host and not is_loopback(own):
            raise UserError(
                f"this machine ({own}) is the head itself, whose processes `holdfast join` starts",
                exit_code=ExitCode.USAGE,
                hint="use the string on each further host",
            )
