"""``holdfast join --hosts``: what makes a peer's daemon the head of several hosts."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import trio

from ....protocol.addresses import Address
from ....protocol.errors import UserError
from ....protocol.network.sockets import SocketNetwork, bind_all
from ....protocol.trust.identity import Identity
from ....protocol.trust.invite import ADDRESSES_MAX
from ...advertised_hosts import dialable
from ..peer_options import PeerOptions
from ..trainer.bridge import UnixBridge
from ..trainer.host_places import HostPlaces
from ..trainer.port import TrainerEvents
from .head import Head
from .site import Site


class Hosting:
    """The site of a head: its network, its string, its hosts.

    Args:
      tell: takes sentences for the operator.
      show: called when another number of hosts or of their GPUs is there.
      events: returns what takes the questions of the trainer's samplers.

    Attributes:
      places: which hosts take part in the training command.
    """

    def __init__(
        self,
        options: PeerOptions,
        identity: Identity,
        bridge: UnixBridge,
        tell: Callable[[str], None],
        show: Callable[[], None],
        events: Callable[[], TrainerEvents],
    ) -> None:
        self._options, self._tell = options, tell
        self._site = Site.open(options.state, identity, options.name)
        minimum = options.hosts_min or 1
        self.places = HostPlaces(
            options.hosts,
            minimum,
            options.command,
            identity.peer_id,
            self._addresses([Address(each.host, 1) for each in options.listen])[0].host,
            tell,
            show,
        )
        self._head = Head(
            identity.peer_id,
            options.name,
            SocketNetwork(self._site.credentials, newcomers=True),
            self._site.authority,
            self._site.token,
            bridge,
            self.places,
            events,
            self._site.renew,
        )

    def _addresses(self, bound: list[Address]) -> tuple[Address, ...]:
        """Return where hosts dial this machine: in its own network first."""
        own = tuple(map(Address.parse, dialable(bound, ())))
        told = [Address(each.host, bound[0].port) for each in self._options.advertise]
        return (*own, *(each for each in told if each not in own))[:ADDRESSES_MAX]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take hosts until cancelled, at the port that an earlier string names if it is free."""
        async with trio.open_nursery() as nursery:
            port = self._site.port
            try:
                for listener in await bind_all(self._bind(port)):
                    listener.socket.close()
            except UserError:
                self._tell(f"port {port} of the hosts' string is taken: there is another string")
                port = 0
            bound = await nursery.start(self._head.run, self._bind(port))
            self._site.keep_port(bound[0].port)
            command = shlex.join(self._options.command)
            string = self._site.string(self._addresses(list(bound)))
            self._tell(f"on each further host run: holdfast host {string} -- {command}")
            task_status.started()

    def _bind(self, port: int) -> list[Address]:
        return [Address(each.host, port) for each in self._options.listen]
