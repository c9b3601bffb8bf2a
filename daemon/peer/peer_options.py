"""Options of ``holdfast join`` and ``holdfast relay``."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from ... import __version__
from ...protocol.addresses import Address
from ...protocol.messages import RelayOffer
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.identity import Identity
from ...protocol.trust.invite import ADDRESSES_MAX, Invite
from ..process.log_ring import LogRing
from ..process.paths import IDENTITY_FILE, MASTERS_FILE, make_private
from ..status_records import PeerStatus
from ..web.run_history import log_reading
from .away_peer import AwayPeer
from .master_search import with_masters
from .peer_config import PeerConfig
from .volunteer_limits import DiskQuota


@define
class PeerOptions:
    """Options of ``holdfast join``."""

    invite: Invite
    command: Sequence[str]
    name: str
    state: Path
    listen: Sequence[Address]
    advertise: Sequence[Address]
    http: Address
    map_ports: bool = False  # ask the router for a port if other machines cannot dial this one
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    patience_s: float | None = 120.0
    checkpoints: str | None = None  # a folder or URL; None: a folder in ``state``
    memory_bytes: int | None = None  # limit for the state; None: this machine's memory
    disk_quota: DiskQuota | None = None  # None: no limit
    relay: RelayOffer | None = None  # limits on forwarding for other pairs; None: no forwarding
    gpus_min: int = 0  # the training command waits for so many healthy GPUs
    hosts: int = 1  # of this peer, this one included
    hosts_min: int = 0  # the training command waits for so many
    limits: dict[str, str] = field(factory=dict)  # volunteer limits, for the status page
    http_names: Sequence[str] = ()  # host names that HTTP answers to, beside this machine's own

    def config(self, credentials: Credentials, **more: Any) -> PeerConfig:
        """Return the service's configuration, with more of its fields."""
        return PeerConfig(
            me=credentials.identity.peer_id,
            name=self.name,
            run_id=self.invite.run_id,
            masters=self.known_invite().addresses,
            bind=self.listen,
            advertise=self.advertise,
            map_ports=self.map_ports,
            incarnation=secrets.randbits(62),
            patience_s=self.patience_s,
            upload_bytes_per_s=self.upload_bytes_per_s,
            download_bytes_per_s=self.download_bytes_per_s,
            relay=self.relay,
            credentials=credentials,
            **more,
        )

    def known_invite(self) -> Invite:
        """Return the invite with the addresses that the master told an earlier process."""
        told: list[str] = []
        with contextlib.suppress(OSError, UnicodeDecodeError):
            told = (self.state / MASTERS_FILE).read_text(encoding="utf-8").splitlines()
        addresses = with_masters(self.invite.addresses, told)[:ADDRESSES_MAX]
        return evolve(self.invite, addresses=tuple(addresses))

    def away(self, phase: str, why: str, ring: LogRing) -> AwayPeer:
        """Return what serves this peer's name and the reason while it is not a member."""

        def status(why: str) -> PeerStatus:
            identity = Identity.load_or_create(make_private(self.state) / IDENTITY_FILE)
            return PeerStatus(
                version=__version__,
                peer=identity.peer_id,
                name=self.name,
                run_id=self.invite.run_id,
                phase=phase,
                why=why,
                limits=self.limits,
            )

        log = log_reading(self.name, ring)
        return AwayPeer(self.state, self.http, self.http_names, status, log, why)
