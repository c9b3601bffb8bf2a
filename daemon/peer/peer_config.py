"""What the parts of a peer share: its configuration, its rules, its report, the run's spec."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import define, field

from ...membership.peer.peer_effects import PeerEffect
from ...membership.peer.replica import Replica
from ...membership.spec.spec import RunSpec
from ...protocol.addresses import Address
from ...protocol.messages import Message, RelayOffer
from ...protocol.network.interface import Network
from ...protocol.trust.credentials import Credentials
from .trainer.port import TrainerPort
from .volunteer_limits import DiskQuota

NOTICES_MAX = 20  # newest notices to the operator that the status page shows


@define
class PeerConfig:
    """Settings of a peer, from its command line and its certificate."""

    me: str  # this peer's id
    name: str
    run_id: str
    masters: Sequence[Address]
    bind: Sequence[Address]
    advertise: Sequence[Address] = ()  # port 0: the bound one; empty: guessed from ``bind``
    map_ports: bool = False  # ask the router for a port if other machines cannot dial this one
    incarnation: int = 0
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    patience_s: float | None = 120.0  # give up after this time without a master; None: never
    local_checkpoint: str = ""  # file for the trainer's local checkpoint; empty: none
    credentials: Credentials | None = None  # renewed in time; None: nothing to renew
    always_writes: bool = False  # write checkpoints whatever the spec's ``peers`` is
    versions: Path | None = None  # folder for versions and results that wait; None: memory
    memory_bytes: int | None = None  # of this machine; None: no state is too large
    disk_quota: DiskQuota | None = None  # for checkpoints on this disk; None: no limit
    relay: RelayOffer | None = None  # limits on forwarding for other pairs; None: no forwarding


@define
class PeerReport:
    """The part of the status page that the services write."""

    number: int = 0  # of this member; 0: not known
    phase: str = "starting"
    why: str = ""
    left_s: float = 0.0  # until the run's end, as the master said last; 0.0: not known
    accelerators: str = ""  # "7 of 8 GPUs"; empty: the training command does not ask for them
    notices: deque[str] = field(factory=lambda: deque(maxlen=NOTICES_MAX))


@define(eq=False)
class CurrentSpec:
    """The run's spec: None until the first ``Welcome``."""

    known: RunSpec | None = None

    @property
    def value(self) -> RunSpec:
        """Return the spec; nothing that needs it begins before the first ``Welcome``."""
        assert self.known is not None
        return self.known

    def take(self, toml: str) -> RunSpec:
        self.known = RunSpec.parse(toml)
        return self.known


@define(eq=False)
class PeerContext:
    """What all parts of a peer share.

    Attributes:
      start: runs a task until the service ends.
      tell: sends a message to the master.
      perform: carries out effects of the replica.
    """

    config: PeerConfig
    network: Network
    trainer: TrainerPort
    replica: Replica
    start: Callable[..., None]
    tell: Callable[[Message], None]
    perform: Callable[[list[PeerEffect]], None]
    report: PeerReport = field(factory=PeerReport)
    spec: CurrentSpec = field(factory=CurrentSpec)
