"""Masters and peers of this process on loopback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.master.master_service import MasterService
from holdfast.daemon.master.opened_run import MasterOptions
from holdfast.daemon.master.run_master import Master
from holdfast.daemon.peer.peer_options import PeerOptions
from holdfast.daemon.peer.run_peer import Peer
from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.master.state.journal import RunCreated
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.addresses import Address
from holdfast.protocol.messages import Role
from holdfast.protocol.network.interface import Network
from holdfast.protocol.trust.invite import Invite
from holdfast.simulation.swarm import RUN_ID

LOOPBACK = Address("127.0.0.1", 0)


def a_service(
    spec: str, store: JournalStore, network: Network, where: Sequence[Address], **how: Any
) -> MasterService:
    """Make the service of a master whose journal only says that the run was created."""
    store.append(created := RunCreated(RUN_ID, spec))
    coordinator = Coordinator.restore(RunSpec.parse(spec), RUN_ID, [created], 1)
    return MasterService(coordinator, store, network, where, **how)


def a_master(folder: Path, spec: str) -> Master:
    """Make a whole master, whose state lies in ``master``."""
    path, state = folder / "run.toml", folder / "master"
    path.write_text(spec)
    options = MasterOptions(path, state, [LOOPBACK], [], LOOPBACK, invite=False)
    return Master(options, lambda _line: None)


async def a_peer(master: Master, state: Path, **how: Any) -> Peer:
    """Make a whole peer without a training command, once its master listens."""
    while not master.service.bound:
        await trio.sleep(0.02)
    invite = Invite.decode(master.invites.make(Role.CONTRIBUTOR, True, 1, 1.0))
    options = PeerOptions(invite, (), "alder", state, [LOOPBACK], [], LOOPBACK)
    for name, value in how.items():
        setattr(options, name, value)
    return Peer(options, lambda _line: None)
