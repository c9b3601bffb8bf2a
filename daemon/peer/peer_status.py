"""What a peer's page and commands show: its status, and its own curves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import trio
from attrs import define, field

from ... import __version__
from ...collectives.links.hub import LinkHub
from ...collectives.links.lane_pool import LanePool
from ...membership.shared.peer_rows import copy_row, format_copy, head_row
from ...protocol.messages import Progress, Role
from ...protocol.network.interface import Network
from ...protocol.network.socket_options import counts_retransmissions
from ..congestion import CongestionCheck
from ..metrics_store import MetricsStore
from ..progress_lines import SavedWeights
from ..sampling import Sampler
from ..status_records import (
    CheckpointStatus,
    CongestionReport,
    FellowRow,
    LinkRow,
    PeerRoundRow,
    PeerStatus,
)
from ..web.live_stream import LiveStream
from .checkpointer import Checkpointer
from .peer_options import PeerOptions
from .peer_service import PeerService
from .trainer.bridge import UnixBridge
from .trainer.supervisor import TrainerSupervisor
from .trainer_service import format_failure

SAMPLE_S = 2.0  # between two points of a curve
PROGRESS_SHOWN = (  # fields of ``Progress`` that the status repeats
    *("step", "tokens", "tokens_per_s", "loss", "waited_s", "stepped_s", "accelerators"),
    *("bulk_sent_bytes", "bulk_received_bytes", "state_received_bytes"),
)


@define(eq=False)
class StatusSource:
    """The parts of a peer's daemon that its status is gathered from."""

    options: PeerOptions
    service: PeerService
    bridge: UnixBridge
    supervisor: TrainerSupervisor | None  # None: there is no training command
    _congestion_check: CongestionCheck = field(factory=CongestionCheck, init=False)

    def status(self) -> PeerStatus:
        service = self.service
        replica, progress = service.replica, service.training.progress()
        return PeerStatus(
            version=__version__,
            attached=service.session.connected,
            peer=service.config.me,
            name=service.config.name,
            run_id=service.config.run_id,
            number=service.report.number,
            role=replica.trainer.role.value,
            role_why=self._why_spare(),
            in_sync=replica.trainer.in_sync,
            phase=service.report.phase,
            why="; ".join(map(format_copy, progress.copies))
            or service.report.why
            or service.training.why_still(),
            notices=tuple(service.report.notices),
            links=tuple(_link_row(peer, link.lanes) for peer, link in service.hub.links.items()),
            bulk_retransmitted_bytes=_known_retransmitted(service.hub),
            congestion=self._congestion(),
            copies=tuple(map(copy_row, progress.copies)),
            heads=tuple(map(head_row, replica.heads())),
            rounds=tuple(
                PeerRoundRow(
                    round=each.round,
                    fragment=each.fragment,
                    phase=each.phase.value,
                    attempt=each.attempt,
                )
                for each in replica.rounds.values()
            ),
            rounds_wanted=service.rounds_wanted,
            left_s=service.report.left_s if service.session.connected else 0.0,
            members=tuple(
                FellowRow(peer=each.peer, name=each.name, role=each.role.value)
                for each in (replica.view.members if replica.view is not None else ())
            ),
            checkpoints=_checkpoints(service.checkpointer),
            finished=replica.trainer.finished,
            trainer_pid=self.bridge.attached_pid,
            command_pid=None if self.supervisor is None else self.supervisor.pid,
            trainer_restarts=0 if self.supervisor is None else self.supervisor.restarts,
            trainer_state=self._trainer_state(),
            limits=self.options.limits,
            mapped_port=service.ports.said,
            metrics=progress.figures,
            **{name: getattr(progress, name) for name in PROGRESS_SHOWN},
        )

    def saved_weights(self) -> SavedWeights | None:
        """Return where this peer's newest checkpoint is; None if it has none."""
        checkpointer = self.service.checkpointer
        newest = checkpointer.newest or self.service.state_service.restored
        if newest is None:
            return None
        where = self.options.checkpoints
        option = ("--state", str(self.options.state))
        if where is not None:
            option = ("--checkpoints", where)
        return SavedWeights(str(checkpointer.place), newest.step, option)

    def _congestion(self) -> CongestionReport | None:
        service = self.service
        if service.spec is None:
            return None
        return self._congestion_check.look(service.spec.reduce.congestion)

    def _why_spare(self) -> str:
        """Return why this peer has no place; empty if it has one, or the reason is not known."""
        spec, view = self.service.spec, self.service.replica.view
        if spec is None or view is None or self.service.replica.trainer.role is not Role.SPARE:
            return ""
        if self.options.invite.role is Role.SPARE:
            return "its invite is a spare's; it takes a place that another peer gives up"
        if self.service.training.layout is None:
            if self.supervisor is not None and self.supervisor.gpus.why_waiting:
                return self.supervisor.gpus.why_waiting
            starting = self.supervisor is not None and self.supervisor.failed is None
            return "its trainer is starting" if starting else "it has no trainer"
        limit = spec.membership.contributors
        taken = sum(member.role is Role.CONTRIBUTOR for member in view.members)
        if limit and taken >= limit:
            return f"all {limit} places of contributors are taken"
        return ""

    def _trainer_state(self) -> str:
        training = self.service.training
        if training.layout is not None:
            return "running"
        if self.supervisor is not None and self.supervisor.failed is not None:
            return format_failure(self.supervisor.failed)
        if self.supervisor is not None and self.supervisor.gpus.why_waiting:
            return f"waits: {self.supervisor.gpus.why_waiting}"
        return "none" if self.supervisor is None else "starting"


def _link_row(peer: str, lanes: LanePool) -> LinkRow:
    return LinkRow(
        peer=peer,
        lanes=len(lanes.working),
        congestion=tuple(sorted({lane.facts.congestion for lane in lanes.working})),
        round_trip_s=lanes.round_trip_s if lanes.round_trip_s < math.inf else None,
        sent_bytes=lanes.sent_bytes,
        retransmitted_bytes=_known_retransmitted(lanes),
    )


def _known_retransmitted(of: LanePool | LinkHub) -> int | None:
    """Return how many bytes TCP sent again; None if the kernel does not tell."""
    return of.count_retransmitted() if counts_retransmissions() else None


def _checkpoints(checkpointer: Checkpointer) -> CheckpointStatus:
    newest = checkpointer.newest
    return CheckpointStatus(
        place=str(checkpointer.place),
        writing=checkpointer.writing,
        newest=None if newest is None else newest.name,
        step=None if newest is None else newest.step,
        error=checkpointer.error,
    )


class OwnHistory:
    """The recorder of a peer's points, in memory as long as its daemon runs.

    They are loss, speed, utilisation, bytes and figures of ``run.log``, and are thinned as a
    member's at the master are.
    """

    def __init__(
        self,
        peer: str,
        name: str,
        progress: Callable[[], Progress],
        live: LiveStream,
        network: Network,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = MetricsStore(":memory:")
        self._peer = peer
        self._name = name
        self._progress = progress
        self._live = live
        self._network = network
        self._wall_clock = wall_clock
        self._sampler = Sampler()

    async def run(self) -> None:
        """Take a point every ``SAMPLE_S``, if there is progress."""
        last: Progress | None = None
        while True:
            progress = self._progress()
            if progress != last:
                last = progress
                row = self._sampler.take(self._peer, self._name, self._wall_clock(), 0, progress)
                self._live.publish("sample", [row])
                await self._network.run_sync(partial(self.store.write, members=[row]))
            await trio.sleep(SAMPLE_S)
