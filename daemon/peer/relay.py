"""``holdfast relay``: forwards for pairs that cannot connect directly, and does nothing else.

    run                     one nursery; a bug in any task ends the process
     ├── network.serve      connections of a pair, and the master's reachability test
     ├── session.keep       keeps the session with the master
     └── report             forwarded bytes, every few seconds while they change

It holds no state, has no trainer and no links of its own. The master orders which pairs it forwards
for. ``RelayWork`` is also a part of a peer that forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from ...collectives.links.relay_forwarding import RelayForwarder
from ...protocol import messages as m
from ...protocol.addresses import Address
from ...protocol.errors import EvictedError, UserError
from ...protocol.network.interface import Channel, Network
from ...protocol.network.sockets import SocketNetwork
from ..advertised_hosts import dialable
from ..process.exit_codes import ExitCode
from ..process.tasks import wait_for_signals
from .master_session import Handlers, MasterSession
from .peer_config import CurrentSpec, PeerConfig, PeerReport
from .peer_credentials import as_user_error, obtain_credentials
from .peer_options import PeerOptions

REPORT_S = 5.0  # between two reports
LEAVE_S = 5.0  # for the master to release a relay that wants to leave


def make_forwarder(offer: m.RelayOffer, network: Network, spec: CurrentSpec) -> RelayForwarder:
    """Make a forwarder whose connections use the congestion control of the run's lanes.

    The relay is the sender on each pair's second hop. Tickets come after the spec.
    """
    return RelayForwarder(
        offer, lambda stream: network.prepare_lane(stream, spec.value.reduce.congestion)
    )


class RelayWork:
    """A relay forwarder with its orders from the master and its reports."""

    def __init__(self, desk: RelayForwarder, tell: Callable[[m.Message], None]) -> None:
        self.desk = desk
        self._tell = tell
        self._sent: m.Relayed | None = None

    def welcome(self) -> None:
        """Begin a session: report again in full. Pairs may go on using their tickets."""
        self._sent = None

    def handlers(self) -> Handlers:
        """Return the table of the master's messages about pairs."""
        return {
            m.RelayPair: self.desk.carry,
            m.StopRelayingPair: lambda message: self.desk.uncarry(message.ticket),
        }

    async def report(self) -> None:
        while True:
            await trio.sleep(REPORT_S)
            report = self.desk.report()
            if report != self._sent:
                self._sent = report
                self._tell(report)


class RelayService:
    """A relay of a run, on any ``Network``; ``config.relay`` limits what it forwards."""

    def __init__(self, config: PeerConfig, network: Network) -> None:
        assert config.relay is not None
        self.config = config
        self.network = network
        self.report = PeerReport()
        self._bound: Sequence[Address] = ()
        self._master = (0, b"")  # term and nonce of the newest master that it obeyed
        self._over: EvictedError | None = None
        self._stop = trio.CancelScope()
        self._spec = spec = CurrentSpec()
        self.session = MasterSession(
            config,
            network,
            self.report,
            spec,
            hello=self._hello,
            obeys=self._obeys,
        )
        self.work = RelayWork(make_forwarder(config.relay, network, spec), self.session.tell)
        self.session.handlers |= {m.Welcome: self._welcome, **self.work.handlers()}

    async def run(self) -> None:
        """Forward until this relay leaves or is refused.

        Raises:
          EvictedError: the master refuses this relay and coming back would not help.
          UserError: the address cannot be bound, or no master was found for ``patience_s``.
        """
        with self._stop:
            async with trio.open_nursery() as nursery:
                self._bound = await nursery.start(self._serve)
                nursery.start_soon(self.work.report)
                nursery.start_soon(self._keep_session)
        if self._over is not None:
            raise self._over

    async def _serve(
        self, task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        await self.network.serve(
            self.config.bind,
            self._on_channel,
            None,
            on_relay=self.work.desk.handle,
            task_status=task_status,
        )

    async def _on_channel(self, _channel: Channel) -> None:
        """Do nothing: the master only tests reachability, and members have no links to a relay."""

    async def _keep_session(self) -> None:
        try:
            await self.session.keep()
        except EvictedError as error:
            self._over = error
        self._stop.cancel()

    async def leave(self, reason: str) -> None:
        """Tell the master, which then arranges other routes, and end ``run``."""
        self.session.leaving = True
        if self.session.connected:
            self.session.tell(m.Leaving(reason))
            with trio.move_on_after(LEAVE_S):
                await self.session.released.wait()
        self._stop.cancel()

    # ------------------------------------------------------------ the master

    def _hello(self, master_host: str, local_port: int) -> m.Hello:
        config = self.config
        return m.Hello(
            m.VERSION_MIN,
            m.VERSION_MAX,
            config.run_id,
            config.name,
            dialable(self._bound, config.advertise, master_host),
            config.incarnation,
            None,
            (),
            b"",
            (),
            term=self._master[0],
            nonce=self._master[1],
            relay=config.relay,
            local_port=local_port,
        )

    def _obeys(self, term: int, nonce: bytes) -> bool:
        if term < self._master[0]:
            return False
        self._master = (term, nonce)
        return True

    def _welcome(self, message: m.Welcome) -> None:
        self._spec.take(message.spec_toml)
        self.report.phase, self.report.why = "in the run", ""
        self.work.welcome()


async def run_relay(options: PeerOptions, tell: Callable[[str], None]) -> None:
    """Forward until stopped or refused, as a process.

    Args:
      options: the command and the limits for the state have no effect here.
      tell: takes sentences for the operator.

    Raises:
      UserError: with the exit code for what went wrong.
    """
    failure: UserError | None = None
    signals = 0
    credentials = await obtain_credentials(
        options.state, options.known_invite(), options.name, options.patience_s, tell
    )
    config = options.config(credentials)
    service = RelayService(config, SocketNetwork(credentials))
    async with trio.open_nursery() as nursery:

        def on_signal() -> None:
            nonlocal failure, signals
            signals += 1
            if signals > 1:
                failure = UserError("stopped at once", exit_code=ExitCode.INTERRUPTED)
                nursery.cancel_scope.cancel()
                return
            tell("leaving (again: stop at once) ...")
            nursery.start_soon(service.leave, "stopped by its owner")

        nursery.start_soon(wait_for_signals, on_signal)
        tell(f"relay {config.me[:8]} ({config.name})")
        try:
            await service.run()
        except EvictedError as error:
            failure = as_user_error(error)
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    tell(f"left the run; {service.work.desk.carried_bytes / 1e6:.1f} MB forwarded")
