"""What the parts of a peer service share, and what its person is shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import trio
from attrs import define, field

from ...collectives.links.hub import LinkHub
from ...collectives.links.rate_meter import Reading
from ...membership.peer.peer_effects import PeerEffect
from ...membership.peer.replica import Replica
from ...membership.spec.spec import RunSpec
from ...protocol.addresses import Address
from ...protocol.messages import LinkLoad, Measured, Message, RelayOffer
from ...protocol.network.interface import Network
from ...protocol.trust.notary import Notary
from .trainer_port import TrainerPort
from .volunteer_limits import DiskQuota

LINKS_TOLD_MAX = 64  # of a peer's links the master hears what they carried
TOLD_MAX = 20  # sentences for this peer's person that the status page keeps


@define
class PeerConfig:
    """What a peer is told by its command line and its certificate."""

    me: str
    name: str
    run_id: str
    masters: Sequence[Address]
    bind: Sequence[Address]
    advertise: Sequence[Address] = ()  # port 0: the bound one; empty: guessed from ``bind``
    incarnation: int = 0
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    patience_s: float | None = 120.0  # without any master for so long: give up; None: never
    local_checkpoint: str = ""  # where the trainer may keep what is only its own
    asked: bool = False  # this peer's person wants checkpoints, whoever else writes some
    notary: Notary | None = None  # signs what we contribute; None: we cannot
    site: str = ""  # members with the same name share a line; empty: their addresses tell
    partial: Path | None = None  # a folder for what has come of a copy; None: nothing is kept
    memory_bytes: int | None = None  # of this machine; None: no state is too large
    disk_quota: DiskQuota | None = None  # of this machine's disk, for checkpoints; None: all
    partial_bytes: int | None = None  # of it, for what has come of a copy; None: all
    relay: RelayOffer | None = None  # what is forwarded for others; None: nothing


@define
class PeerReport:
    """What the status page shows of this peer."""

    phase: str = "starting"
    why: str = ""
    told: deque[str] = field(factory=lambda: deque(maxlen=TOLD_MAX))


@define(eq=False)
class PeerParts:
    """One per peer service. Everything in it belongs to the event loop.

    Attributes:
      spec: the run's, from the first ``Welcome`` on.
      tell_master: puts a message into the session's outbox; without a session it is dropped, the
        next ``Hello`` says where we are.
      perform: carries out deeds of the replica, in order; nothing in it waits.
      nursery: of the service, while it runs.
    """

    config: PeerConfig
    network: Network
    hub: LinkHub
    trainer: TrainerPort
    replica: Replica
    report: PeerReport
    tell_master: Callable[[Message], None]
    perform: Callable[[list[PeerEffect]], None]
    known_spec: RunSpec | None = None
    nursery: trio.Nursery | None = None

    @property
    def spec(self) -> RunSpec:
        """Nothing that needs it begins before the first ``Welcome``."""
        assert self.known_spec is not None
        return self.known_spec

    def tell_measured(self) -> None:
        """Report to the master what the lines carried since the last time, and how busy they were."""
        seen = self.hub.take_measurements()
        self.tell_master(
            Measured(
                sent_bytes=seen.sent.carried_bytes,
                sending_s=seen.sent.busy_s,
                received_bytes=seen.received.carried_bytes,
                receiving_s=seen.received.busy_s,
                links=tuple(
                    LinkLoad(peer, reading.carried_bytes, reading.busy_s)
                    for peer, reading in heaviest(seen.sent_to)
                ),
            )
        )

    def start(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task until the service ends."""
        assert self.nursery is not None
        self.nursery.start_soon(function, *args)


def heaviest(sent_to: Mapping[str, Reading]) -> list[tuple[str, Reading]]:
    """The links that carried most: all members' reports of all links would grow with the square."""
    links = sorted(sent_to.items(), key=lambda each: -each[1].carried_bytes)
    return links[:LINKS_TOLD_MAX]


def cancel(scopes: dict[int, trio.CancelScope], key: int) -> None:
    """End a task that may be over already."""
    scope = scopes.pop(key, None)
    if scope is not None:
        scope.cancel()
