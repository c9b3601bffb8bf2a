"""The relay service: forwards for pairs that cannot reach each other, and does nothing else in the run.

    run                     one nursery; a bug in any task ends the process
     ├── network.serve      the two of a pair; the master's dialling back
     ├── session.keep       dials the master again and again
     └── report             what is forwarded, every few seconds while it changes

It holds no state, has no trainer and no links of its own. What it may forward the master says.
``RelayWork`` is the part of it that a peer which also forwards has too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from ...collectives.links.relay_forwarding import RelayForwarder
from ...membership.spec.spec import RunSpec
from ...protocol.addresses import Address
from ...protocol.errors import EvictedError
from ...protocol.messages import (
    VERSION_MAX,
    VERSION_MIN,
    Hello,
    Leaving,
    Message,
    Relayed,
    RelayPair,
    Released,
    Renewed,
    StopRelayingPair,
    Welcome,
)
from ...protocol.network.interface import Channel, Network
from ..advertised_hosts import dialable
from .master_session import MasterSession
from .peer_parts import PeerConfig, PeerReport

REPORT_S = 5.0  # between two reports of what is forwarded
LEAVE_S = 5.0  # for the master to let a relay go that wants to


class RelayWork:
    """A desk, and its master's orders and reports.

    Args:
      tell: says something to the master.
    """

    def __init__(self, desk: RelayForwarder, tell: Callable[[Message], None]) -> None:
        self.desk = desk
        self._tell = tell
        self._told: Relayed | None = None

    def welcome(self) -> None:
        """A session has begun: all is told anew. Pairs that use tickets may go on with them."""
        self._told = None

    def hear(self, message: Message) -> bool:
        """Whether it was for us."""
        if isinstance(message, RelayPair):
            self.desk.carry(message)
        elif isinstance(message, StopRelayingPair):
            self.desk.uncarry(message.ticket)
        else:
            return False
        return True

    async def report(self) -> None:
        while True:
            await trio.sleep(REPORT_S)
            report = self.desk.report()
            if report != self._told:
                self._told = report
                self._tell(report)


class RelayService:
    """A relay of a run, on any ``Network``; ``config.relay`` says what it forwards at most."""

    def __init__(
        self,
        config: PeerConfig,
        network: Network,
        *,
        renew: Callable[[], bytes] | None = None,
        renewed: Callable[[bytes], None] | None = None,
        renew_every_s: float = 6 * 3600.0,
    ) -> None:
        assert config.relay is not None
        self.config = config
        self.network = network
        self.report = PeerReport()
        self._renewed = renewed
        self._bound: Sequence[Address] = ()
        self._master = (0, b"")  # the newest that we have obeyed
        self._over: EvictedError | None = None
        self._stop = trio.CancelScope()
        self.session = MasterSession(
            config,
            network,
            self.report,
            hello=self._hello,
            welcome=self._welcome,
            hear=self._hear,
            lost=lambda: None,
            obeys=self._obeys,
            renew=renew,
            renew_every_s=renew_every_s,
        )
        self.work = RelayWork(RelayForwarder(config.relay, network.proven), self.session.tell)

    async def run(self) -> None:
        """Forward until we left, or were sent away.

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
        """The master dials us to see whether it can; members have no links to us."""

    async def _keep_session(self) -> None:
        try:
            await self.session.keep()
        except EvictedError as error:
            self._over = error
        self._stop.cancel()

    async def leave(self, reason: str) -> None:
        """Tell the master, so that it arranges other routes, then end ``run``."""
        self.session.leaving = True
        if self.session.connected:
            self.session.tell(Leaving(reason))
            with trio.move_on_after(LEAVE_S):
                await self.session.released.wait()
        self._stop.cancel()

    # ------------------------------------------------------------ what the master says

    def _hello(self, master_host: str, local_port: int) -> Hello:
        config = self.config
        return Hello(
            VERSION_MIN,
            VERSION_MAX,
            config.run_id,
            config.name,
            dialable(self._bound, config.advertise, master_host),
            config.incarnation,
            None,
            (),
            b"",
            (),
            site=config.site,
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

    def _welcome(self, message: Welcome) -> RunSpec:
        self.report.phase = "in the run"
        self.report.why = ""
        self.work.welcome()
        return RunSpec.parse(message.spec_toml)

    def _hear(self, message: Message) -> None:
        if self.work.hear(message):
            return
        if isinstance(message, Released):
            self.session.released.set()
        elif isinstance(message, Renewed) and self._renewed is not None:
            self._renewed(message.certificate_pem)
