"""The parts of a peer: what is made, in which order, and what gets what.

    context         what all parts share: configuration, network, trainer, rules, report, spec
    session         MasterSession    the master          greets by ``hello``
    hub             LinkHub          the other members   <- session; hands blocks to state_service
    state_service   StateService     the shared state    <- hub
    reducer         Reducer          rounds              <- hub, state_service
    data            DataService      leased samples
    training        TrainerService   the local trainer   <- hub, state_service, reducer, data
    checkpointer    Checkpointer     the state on disk   <- state_service
    relay           RelayWork        forwarding for others, if this peer offers it
    ports           PortMapper       the router          <- session

A peer of the simulator sets ``session_kind``, or overrides a ``make_...`` method, to get another
part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...checkpoint.checkpoint_store import CheckpointStore
from ...collectives.links.hub import LinkHub
from ...collectives.links.rates.rate_limiter import RateLimiter
from ...protocol.addresses import Address
from ...protocol.messages import Hello
from ..port_mapping.gateway_search import find_gateways
from ..port_mapping.port_mapper import PortMapper
from .checkpointer import Checkpointer
from .data_service import DataService
from .master_session import MasterSession
from .peer_config import PeerContext
from .reducer import Reducer
from .relay import RelayWork, make_forwarder
from .state_service import StateService
from .trainer_service import TrainerService


class WiredPeer:
    """A peer's parts, connected; ``PeerService`` runs them.

    Args:
      hello: returns the greeting for a master.
      checkpoints: where checkpoints are written; None: nowhere.
    """

    session_kind: Callable[..., MasterSession] = MasterSession

    def __init__(
        self,
        context: PeerContext,
        hello: Callable[[str, int], Hello],
        checkpoints: CheckpointStore | None,
    ) -> None:
        self.bound: Sequence[Address] = ()
        self.context, network = context, context.network
        self.config = config = context.config
        self.replica, self.report = context.replica, context.report
        self.session = self.session_kind(
            config, network, context.report, context.spec, hello=hello, obeys=context.replica.obeys
        )
        self.hub = LinkHub(
            network,
            config.me,
            on_message=lambda peer, message: self.state_service.on_link_message(peer, message),
            tell_master=context.tell,
            upload=_cap(config.upload_bytes_per_s),
            download=_cap(config.download_bytes_per_s),
        )
        self.state_service = StateService(context, self.hub)
        self.reducer = self.make_reducer()
        self.data = DataService(context)
        self.training = TrainerService(
            context, self.hub, self.state_service, self.reducer, self.data
        )
        self.checkpointer = self.make_checkpointer(checkpoints)
        self.relay: RelayWork | None = None
        if config.relay is not None:
            desk = make_forwarder(config.relay, network, context.spec)
            self.relay = RelayWork(desk, context.tell)
        self.ports = PortMapper(lambda: find_gateways(self.bound), self.session.tell_addresses)

    def make_reducer(self) -> Reducer:
        return Reducer(self.context, self.hub, self.state_service)

    def make_checkpointer(self, place: CheckpointStore | None) -> Checkpointer:
        return Checkpointer(self.context, self.state_service, place)


def _cap(bytes_per_s: float | None) -> RateLimiter | None:
    return None if bytes_per_s is None else RateLimiter(bytes_per_s)
