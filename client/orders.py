"""The daemon's messages to a trainer, carried out on its model.

    RoundOpened      at its step, post the fragment's pseudo-gradient and send ``Posted``
    RoundEnded       committed: merge the fragment; aborted: keep the local delta
    Load             load the shared state, drop local deltas (a resync, or a promotion)
    ExtendStepLimit  the master is away: train on past rounds and step limit, as far as it says
    KeepState        write the optimizer's state and random number generators, while training goes
                     on
    Finished         load the shared state; ``finished`` becomes true

After several losses in a row that are not finite, the trainer sends ``Failing``: its weights are
useless, and the daemon's ``Load`` replaces them, as it does after an update that is not finite.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from attrs import define, field

from ..protocol import messages as m
from ..protocol.arena import STEP_SLOT, NotWholeError
from ..protocol.errors import NO_LAST_WEIGHTS, RemoteProtocolError
from .attach_errors import AttachRefused, DaemonGone
from .boundary import BoundaryMachine
from .callbacks import CallbackRunner, Merge
from .daemon_connection import DaemonConnection
from .quiet_step import QuietStep
from .state.arenas import Arenas
from .state.inner_optimizer import InnerOptimizer
from .state.local_checkpoint import LocalCheckpoint, rank_path
from .state.tensors import SharedTensor
from .state.trained_parameters import TrainedParameters


@define(eq=False)
class Orders:
    """See the top of this file.

    Attributes:
      tensors: of the model, as they are shared.
      writes: the indices of those that this rank writes; None: all.
      round_count: committed rounds merged into the model since ``attach``.
    """

    _connection: DaemonConnection
    _trained: TrainedParameters
    _inner_optimizer: InnerOptimizer
    _machine: BoundaryMachine
    _quiet: QuietStep
    _part: m.RankPart
    _callbacks: CallbackRunner | None
    tensors: tuple[SharedTensor, ...] = field(init=False)
    writes: tuple[int, ...] | None = field(default=None, init=False)
    round_count: int = field(default=0, init=False)
    _arenas: Arenas | None = field(default=None, init=False)
    _local_checkpoint: LocalCheckpoint | None = field(default=None, init=False)
    _spoilt_max: int = field(default=m.COUNT_MAX, init=False)

    def __attrs_post_init__(self) -> None:
        self.tensors = self._inner_optimizer.bind(self._trained.tensors)

    @property
    def arenas(self) -> Arenas:
        """The daemon's arenas; raises RemoteProtocolError before it has opened them."""
        if self._arenas is None:
            raise RemoteProtocolError("the daemon sent orders before it opened its arenas")
        return self._arenas

    def handle(self, message: m.Message) -> None:
        """Carry out a message."""
        try:
            self._obey(message)
        except NotWholeError:
            # After it sent the message, the daemon began to fetch that fragment again. It sends
            # ``Load`` when the fragment is whole. Of several ranks all must do the same until then,
            # and the others may have found it whole: they train on, and what they post is refused.
            if self._part.world_size == 1:
                self._machine.loaded = False

    def _obey(self, message: m.Message) -> None:
        machine = self._machine
        match message:
            case m.RoundOpened():
                machine.open_round(message)
            case m.RoundEnded():
                self._end_round(message)
            case m.SetRole():
                machine.contributing = message.contributing
                machine.leads, machine.total_steps = message.leads, message.total_steps
            case m.Load():
                self._move_to(message)
            case m.ExtendStepLimit():
                arenas = self.arenas
                if arenas.overlap_steps == 0:
                    for fragment in machine.posted_fragments:
                        arenas.replicas[fragment].keep()
                machine.extend_limit(message.step_limit)
            case m.KeepState():
                checkpoint = self._local_checkpoint
                if checkpoint is not None and machine.loaded and not self._quiet.spoilt_count:
                    checkpoint.keep(machine.step)
            case m.Finished():
                self._finish()
            case m.ArenaOpened():
                self._open_arenas(message)
            case m.PostInitial():
                for fragment, replica in enumerate(self.arenas.replicas):
                    replica.post_present()
                    self.arenas.spent.add(fragment)
                self.send(m.InitialPosted())
            case m.Rejected():
                raise AttachRefused(f"the run does not take this trainer: {message.reason}")
            case _:
                raise RemoteProtocolError(f"the daemon sent a {type(message).__name__}")

    def _open_arenas(self, message: m.ArenaOpened) -> None:
        if self._arenas is not None:
            raise RemoteProtocolError("the daemon opened its arenas a second time")
        descriptors = self._connection.take_descriptors()
        self._arenas = Arenas.open(message, descriptors, self.tensors, self._pause, self.writes)
        self._spoilt_max = message.nan_steps or m.COUNT_MAX
        if message.local_checkpoint:
            path = rank_path(Path(message.local_checkpoint), self._part)
            self._local_checkpoint = LocalCheckpoint(path, self._trained.optimizer)
        self._quiet.open(self._arenas, self._part)

    def _pause(self) -> None:
        """Wait a moment for the daemon, which is writing a fragment that this trainer reads."""
        with self._quiet.waiting():
            self._connection.pause()

    # ------------------------------------------------------------ rounds and loads

    def _end_round(self, message: m.RoundEnded) -> None:
        arenas, machine = self.arenas, self._machine
        fragment = message.fragment
        replica = arenas.replicas[fragment]
        ended = machine.end_round(message)
        if ended.posted:
            arenas.spent.add(fragment)
        contributed = ended.contributed
        if ended.posted and not contributed:
            replica.withdraw()
        if not message.committed:
            return
        self._quiet.slots[STEP_SLOT] = machine.step
        if not machine.contributing and not contributed:
            replica.load()
        elif contributed or replica.version < message.version:
            replica.merge(contributed=contributed)
        if replica.version < message.version:
            raise RemoteProtocolError(
                f"fragment {fragment} should be at version {message.version} "
                f"and is at {replica.version}"
            )
        self.round_count += 1
        if self._callbacks is not None:
            merged = (message.round, fragment, message.version, contributed, self.round_count)
            self._callbacks.merged(Merge(machine.step, *merged))

    def _move_to(self, message: m.Load) -> None:
        machine = self._machine
        first = not machine.loaded
        machine.move_to(message.step, message.step_limit)
        self._quiet.slots[STEP_SLOT] = machine.step
        self._quiet.spoilt_count = 0
        if message.spoilt:
            self._inner_optimizer.mark_spoilt()
        try:
            self._load()
        except NotWholeError:
            if self._part.world_size == 1:
                raise
            machine.load()  # whatever this rank finds, since the others count as loaded
        self._inner_optimizer.renew(machine.own_step if machine.step else None, first=first)
        machine.finished = message.finished

    def _load(self) -> None:
        for replica in self.arenas.replicas:
            replica.load()
        self._machine.load()

    def _finish(self) -> None:
        if self._arenas is not None:
            try:
                self._load()
            except NotWholeError:
                raise AttachRefused(NO_LAST_WEIGHTS) from None
        self._machine.finished = True

    # ------------------------------------------------------------ what the trainer tells

    def count_spoilt(self) -> None:
        """Count a loss that is not finite. After enough of them ask for other weights."""
        quiet, machine = self._quiet, self._machine
        quiet.spoilt_count += 1
        unread = quiet.mail[0] != self._connection.received_count  # ``Load``, perhaps
        if quiet.spoilt_count >= self._spoilt_max and machine.loaded and not unread:
            count, quiet.spoilt_count = quiet.spoilt_count, 0
            if self._part.world_size == 1:  # several ranks stop together: ``Load`` comes to all
                machine.loaded, quiet.due_step = False, 0
            reason = f"the loss was not finite {count} times in a row, up to step {machine.step}"
            self.send(m.Failing(m.FailureKind.NAN, reason))

    def send(self, message: m.Message) -> None:
        """Send a message. A daemon that has ended is no error once the run is over."""
        with suppress(DaemonGone):
            self._connection.send(message)
            return
        # Its last messages are unread, up to ``Finished``, or DaemonGone is raised again.
        with torch.no_grad():
            while not self._machine.finished:
                last = self._connection.receive()
                if self._part.world_size == 1:  # ranks get the last messages when all wait
                    self.handle(last)

    # ------------------------------------------------------------ the local checkpoint

    def restore_local(self) -> None:
        """Restore what the last process kept, if there is anything."""
        checkpoint = self._local_checkpoint
        if checkpoint is not None and checkpoint.restore(self._machine.step_limit):
            self._inner_optimizer.mark_restored()

    def close(self) -> None:
        """Let go of the arenas, and wait for the local checkpoint that is being written."""
        self._arenas = None
        if self._local_checkpoint is not None:
            self._local_checkpoint.close()
