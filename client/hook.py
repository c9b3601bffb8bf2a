"""``attach`` and ``Run``: what a training script sees of holdfast.

A step boundary is a call of ``Run.step``. Nearly always nothing is due there, and it costs about a
microsecond: three numbers written and one read in memory shared with the daemon. When something is
due, messages are handled in the order in which they came:

    RoundOpened   at its step: post the fragment's pseudo-gradient, ``Posted``
    RoundEnded    committed: merge the fragment.  aborted: the delta stays where it is
    Load          take over the shared state, drop local deltas (a resync, or a promotion)
    Lift          the master is away: train on, past the round or the hold that we wait for
    KeepState     write the optimizer's state and random numbers down, beside the steps that follow
    Finished      take over the shared state, ``finished`` becomes true

The trainer waits in ``step`` (and only there) while a round that it posted is not over and no
overlap is left, while it is a spare, and at ``step_limit``, beyond which the run lets nobody train.
Who has gone further while the master was away posts each round that is due where it is.

Losses that are not finite, several in a row, are ``Failing``: the weights are lost, and the daemon's
``Load`` replaces them. An exception that ends the script is told to the daemon as well.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, SupportsFloat, cast

import numpy as np
import torch
from torch import nn

from ..protocol.arena import MAIL_SLOT, STEP_SLOT, TOKENS_SLOT, WAITING_SLOT, NotWholeError
from ..protocol.errors import RemoteProtocolError
from ..protocol.messages import (
    COUNT_MAX,
    METRICS_MAX,
    VERSION_MAX,
    ArenaOpened,
    ExtendStepLimit,
    Failing,
    FailureKind,
    Finished,
    InitialPosted,
    KeepState,
    Load,
    Message,
    Metrics,
    Posted,
    PostInitial,
    Rejected,
    RoundEnded,
    RoundOpened,
    SetContributing,
    TrainerHello,
)
from .arenas import Arenas
from .attach_errors import AttachRefused, DaemonGone, NoDaemonError
from .callbacks import Callback, CallbackRunner, Merge
from .crash_report import CrashReport
from .daemon_connection import DaemonConnection
from .local_checkpoint import LocalCheckpoint
from .open_rounds import OpenRound, must_wait, next_due_step
from .rate_ramp import RateRamp
from .step_times import StepTimes
from .tensors import SharedTensor, check_optimizer, find_shared, layout_of

SOCKET_VARIABLE = "HOLDFAST_SOCKET"  # set by the daemon: the path of its Unix socket
MEMBER_VARIABLE = "HOLDFAST_MEMBER"  # set by the daemon: the peer's number in the run

# How often a quiet step looks at the socket itself, where the death of the daemon shows.
POLL_INTERVAL_S = 1.0

WAITED, STEPPED = 0, 1  # of ``Arena.seconds``


class Run:
    """A trainer's part in a run; made by ``attach``. Not for use from several threads.

    Attributes:
      finished: the run is over and the model holds its final weights; leave the loop.
      contributing: False while this peer is a spare, whose steps end in waiting.
      round_count: committed rounds merged into the model since ``attach``.
      waited_s: seconds spent waiting inside ``step``.
      seed: differs from peer to peer; stays the same when a peer's trainer is restarted.
    """

    def __init__(
        self,
        connection: DaemonConnection,
        tensors: tuple[SharedTensor, ...],
        optimizer: torch.optim.Optimizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.finished = False
        self.contributing = True
        self.round_count = 0
        self.waited_s = 0.0
        self.seed = _seed()
        self._connection = connection
        self._clock = clock
        self._tensors = tensors
        self._optimizer = optimizer
        # Until something is posted, if it came without a state: what it gathers is from warm-up.
        self._idle_optimizer = optimizer if optimizer is not None and not optimizer.state else None
        self._ramp = RateRamp()
        self._pace = StepTimes()
        self._arenas: Arenas | None = None
        self._local_checkpoint: LocalCheckpoint | None = None
        self._loaded = False
        self._rounds: dict[int, OpenRound] = {}  # by fragment
        self._tokens_from: list[int] = []  # by fragment: tokens when it last contributed
        self._step_limit = COUNT_MAX
        self._lifted = False  # the master is away
        self._spoilt_count = 0  # losses in a row that are not finite
        self._spoilt_max = COUNT_MAX
        self._spoilt = False  # the weights are given up, and with them the optimizer's state
        self._left_at_s = self._clock()  # when the last boundary was over
        self._last_words = CrashReport(self._say_failing)
        self._watch = CallbackRunner(callbacks, self._clock()) if callbacks else None
        # What the quick path of ``step`` needs. Memory views: they give and take plain numbers
        # several times faster than numpy does. They are replaced once the arenas are there.
        self._step = 0
        self._skipped_count = 0
        self._tokens = 0
        self._due_step = 0
        self._poll_at_s = 0.0
        self._mail: memoryview[int] = np.zeros(1, np.uint64).data
        self._slots: memoryview[int] = np.zeros(8, np.uint64).data
        self._loss = cast("memoryview[float]", np.zeros(1, np.float64).data)
        self._seconds = cast("memoryview[float]", np.zeros(2, np.float64).data)

    @property
    def global_step(self) -> int:
        """Inner steps of the run, not of this process; learning rate schedules follow it."""
        return self._step

    @property
    def rate_scale(self) -> float:
        """What to multiply the learning rate by: 1.0, but less in the first steps of an optimizer
        without a state that joins a run under way. See ``rate_ramp``."""
        return self._ramp.scale(self._own_step)

    @property
    def _own_step(self) -> int:
        """As ``global_step``, but without the steps of the run that were not ours."""
        return self._step - self._skipped_count

    def step(self, *, loss: float | None = None, tokens: int = 1) -> None:
        """Tell the run that one inner step is done; call it after ``optimizer.step()``.

        Usually returns at once. It waits, and may change the model's weights, when a round of the
        run asks for it. Ctrl+C works while it waits.

        Args:
          loss: of this step, for people.
          tokens: trained on in this step; the weight of this peer's contribution.

        Raises:
          DaemonGone: the daemon closed the connection before the run was over.
          AttachRefused: the run does not go on with this trainer; the text says why.
        """
        if self.finished:
            return
        self._step = step = self._step + 1
        self._tokens = trained = self._tokens + tokens
        slots = self._slots
        slots[STEP_SLOT] = step
        slots[TOKENS_SLOT] = trained
        if loss is not None:
            self._loss[0] = loss
            if loss - loss != 0.0:  # not finite
                self._spoil()
            elif self._spoilt_count:
                self._spoilt_count = 0
        if (
            step < self._due_step
            and self._mail[MAIL_SLOT] == self._connection.received_count
            and self._clock() < self._poll_at_s
        ):
            if self._watch is not None:
                self._watch.stepped(step, loss, tokens, self._clock(), self.waited_s)
            return
        self._boundary()
        if self._watch is not None:
            self._watch.stepped(step, loss, tokens, self._clock(), self.waited_s)

    def log(self, **values: SupportsFloat) -> None:
        """Report named figures to the dashboard, and to callbacks. Those that are not finite are
        left out.

        Raises:
          ValueError: more than 32 at once.
          DaemonGone: the daemon closed the connection before the run was over.
        """
        if len(values) > METRICS_MAX:
            raise ValueError(f"{len(values)} figures at once, at most {METRICS_MAX} are taken")
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._send(Metrics(self._step, finite))
        if self._watch is not None:
            self._watch.logged(self._step, finite)

    def close(self) -> None:
        """Leave the daemon; the model keeps the weights that it has. Harmless twice."""
        self._last_words.withdraw()
        self._connection.close()
        self._arenas = None
        if self._local_checkpoint is not None:
            self._local_checkpoint.close()
        if self._watch is not None:
            self._watch.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._last_words.report(error)
        self.close()

    # ------------------------------------------------------------ attaching

    def _attach(self) -> None:
        self._send(TrainerHello(VERSION_MAX, os.getpid(), layout_of(self._tensors)))
        with torch.no_grad():
            while not self._loaded:
                self._handle(self._connection.receive())
            self._due_step = self._next_due_step()
        if self._local_checkpoint is not None and self._local_checkpoint.restore(self._step):
            # It is worth something: no ramp, and nothing to put back.
            self._idle_optimizer = None
            self._ramp.begin(None)
        self._left_at_s = self._clock()
        self._pace.measure(self._own_step, self._clock() - self.waited_s)
        if self._watch is not None:
            self._watch.begin(self._clock(), self.waited_s)

    def _open_arenas(self, message: ArenaOpened) -> None:
        if self._arenas is not None:
            raise RemoteProtocolError("the daemon opened its arenas a second time")
        descriptors = self._connection.take_descriptors()
        self._arenas = arenas = Arenas.open(message, descriptors, self._tensors, self._pause)
        self._spoilt_max = message.nan_steps or COUNT_MAX
        if message.local_checkpoint:
            self._local_checkpoint = LocalCheckpoint(
                Path(message.local_checkpoint), self._optimizer
            )
        self._tokens_from = [0] * len(arenas.replicas)
        arenas.posted.loss[0] = math.nan  # none so far
        self._mail = arenas.shared.slots.data
        self._slots = arenas.posted.slots.data
        self._loss = cast("memoryview[float]", arenas.posted.loss.data)
        self._seconds = cast("memoryview[float]", arenas.posted.seconds.data)
        self._slots[WAITING_SLOT] = 0  # a process before this one may have died while it waited

    # ------------------------------------------------------------ a step boundary

    @torch.no_grad()
    def _boundary(self) -> None:
        """Do all that is due at this step, waiting where the run wants it."""
        now_s = self._clock()
        self._poll_at_s = now_s + POLL_INTERVAL_S
        if self.contributing:
            self._seconds[STEPPED] += now_s - self._left_at_s
        while not self.finished:
            message = self._connection.receive_nowait()
            if message is not None:
                self._handle(message)
                continue
            if self._post_due():
                continue  # much may have come in the meantime
            must_wait = self._must_wait()
            self._require_arenas().advance(wait=must_wait)
            if self._tell_posted():
                continue
            if not must_wait:
                break
            self._handle(self._wait())
        self._due_step = self._next_due_step()
        self._left_at_s = self._clock()

    def _wait(self) -> Message:
        with self._waiting():
            return self._connection.receive()

    def _pause(self) -> None:
        """The daemon writes what we want to read, and may take its time."""
        with self._waiting():
            self._connection.pause()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._slots[WAITING_SLOT] = self._connection.received_count + 1
        started_s = self._clock()
        yield
        waited_s = self._clock() - started_s
        self._slots[WAITING_SLOT] = 0
        self.waited_s += waited_s
        if self.contributing:
            self._seconds[WAITED] += waited_s

    def _post_due(self) -> bool:
        """Post the fragment of one round whose step has come; False if there is none."""
        if self._lifted or not (self._loaded and self.contributing):
            return False
        for fragment, opened in self._rounds.items():
            tokens = self._tokens - self._tokens_from[fragment]
            if (
                opened.posted_tokens is None
                and opened.at_step <= self._step
                and not opened.too_early(self._step, tokens)
            ):
                self._require_arenas().replicas[fragment].post()
                opened.posted_tokens, opened.posted_step = self._tokens, self._step
                self._idle_optimizer = None
                self._pace.measure(self._own_step, self._clock() - self.waited_s)
                self._tell_posted()
                return True
        return False

    def _tell_posted(self) -> bool:
        """Say of one round that it was posted, if all of it has come to the host; False if none."""
        for fragment, opened in self._rounds.items():
            replica = self._require_arenas().replicas[fragment]
            if opened.posted_tokens is None or opened.told or not replica.written:
                continue
            opened.told = True
            tokens = opened.posted_tokens - self._tokens_from[fragment]
            step = opened.posted_step
            posted = Posted(
                opened.number, fragment, replica.version, tokens, step, self._pace.step_s
            )
            self._send(posted)
            return True
        return False

    def _must_wait(self) -> bool:
        if not (self._loaded and self.contributing):
            return True
        if self._lifted:
            return self._step >= self._step_limit
        overlap_steps = self._require_arenas().overlap_steps
        return must_wait(self._rounds.values(), self._step, self._step_limit, overlap_steps)

    def _next_due_step(self) -> int:
        """The first step at which something is to be done even if no message comes."""
        if self.finished:
            return COUNT_MAX
        if not self.contributing:
            return 0
        if self._require_arenas().under_way:
            return self._step + 1
        rounds = () if self._lifted else self._rounds.values()
        overlap_steps = self._require_arenas().overlap_steps
        return next_due_step(rounds, self._step, self._step_limit, overlap_steps)

    # ------------------------------------------------------------ messages

    def _handle(self, message: Message) -> None:
        try:
            self._obey(message)
        except NotWholeError:
            # Since the daemon said so it has begun to fetch that fragment anew. It says ``Load`` when
            # it has it.
            self._loaded = False

    def _obey(self, message: Message) -> None:
        match message:
            case RoundOpened():
                self._step_limit, self._lifted = message.step_limit, False
                self._open_round(message)
            case RoundEnded():
                self._end_round(message)
            case SetContributing():
                self.contributing = message.contributing
            case Load():
                first = not self._loaded
                self._set_step(message.step)
                self._step_limit, self._lifted = message.step_limit, False
                self._load()
                self._renew_optimizer(first)
                self.finished = message.finished
            case ExtendStepLimit():
                self._lift(message)
            case KeepState():
                if self._local_checkpoint is not None and self._loaded and not self._spoilt_count:
                    self._local_checkpoint.keep(self._step)
            case Finished():
                self._finish()
            case ArenaOpened():
                self._open_arenas(message)
            case PostInitial():
                for replica in self._require_arenas().replicas:
                    replica.post_present()
                self._send(InitialPosted())
            case Rejected():
                raise AttachRefused(f"the run does not take this trainer: {message.reason}")
            case _:
                raise RemoteProtocolError(f"the daemon sent a {type(message).__name__}")

    def _open_round(self, message: RoundOpened) -> None:
        """A round is open; or one that is open already waits for us, and wants what we have."""
        known = self._rounds.get(message.fragment)
        if known is None or known.number != message.round or message.at_step >= known.at_step:
            self._rounds[message.fragment] = OpenRound(message.round, message.at_step)
        elif known.posted_tokens is None:  # else they have it by now
            known.at_step = min(known.at_step, self._step)

    def _end_round(self, message: RoundEnded) -> None:
        arenas = self._require_arenas()
        fragment = message.fragment
        if message.committed or not self._lifted:
            self._step_limit, self._lifted = message.step_limit, False
        opened = self._rounds.get(fragment)
        posted_tokens = None
        if opened is not None and opened.number == message.round:
            posted_tokens = opened.posted_tokens
            del self._rounds[fragment]
        replica = arenas.replicas[fragment]
        # Rounds that were posted before a ``Load`` are forgotten: their delta is in no tensor.
        contributed = message.contributed and posted_tokens is not None
        if posted_tokens is not None and not contributed:
            replica.withdraw()
        if not message.committed:
            return
        self._catch_up(message.step)
        if not self.contributing and not contributed:
            replica.load()
        elif contributed or replica.version < message.version:
            replica.merge(arenas.merge, contributed=contributed, share=message.share)
        if replica.version < message.version:
            raise RemoteProtocolError(
                f"fragment {fragment} should be at version {message.version} "
                f"and is at {replica.version}"
            )
        if contributed and posted_tokens is not None:
            self._tokens_from[fragment] = posted_tokens
        self.round_count += 1
        if self._watch is not None:
            merged = (message.round, fragment, message.version, contributed, self.round_count)
            self._watch.merged(Merge(self._step, *merged))

    def _lift(self, message: ExtendStepLimit) -> None:
        arenas = self._require_arenas()
        for fragment, opened in self._rounds.items():
            if opened.posted_tokens is not None and arenas.overlap_steps == 0:
                arenas.replicas[fragment].keep()
        self._step_limit, self._lifted = message.step_limit, True

    def _load(self) -> None:
        for replica in self._require_arenas().replicas:
            replica.load()
        self._tokens_from = [self._tokens] * len(self._tokens_from)
        posted = [
            fragment
            for fragment, opened in self._rounds.items()
            if opened.posted_tokens is not None
        ]
        for fragment in posted:
            del self._rounds[fragment]
        self._loaded = True

    def _renew_optimizer(self, first: bool) -> None:
        """After a load: forget what an optimizer has gathered in steps that are dropped."""
        if self._idle_optimizer is not None:
            self._idle_optimizer.state.clear()  # torch makes it anew at the next step
        elif self._spoilt and self._optimizer is not None:
            self._optimizer.state.clear()  # its moments are not finite either
        elif not (first and self._optimizer is None):  # unknown to us: taken for a new one
            return
        self._spoilt = False
        self._ramp.begin(self._own_step if self._step else None)

    def _spoil(self) -> None:
        """A loss was not finite. After enough of them ask for other weights, and wait for them."""
        self._spoilt_count += 1
        if self._spoilt_count >= self._spoilt_max and self._loaded:
            count, self._spoilt_count = self._spoilt_count, 0
            self._loaded, self._spoilt, self._due_step = False, True, 0
            reason = f"the loss was not finite {count} times in a row, up to step {self._step}"
            self._send(Failing(FailureKind.NAN, reason))

    def _say_failing(self, kind: FailureKind, reason: str) -> None:
        """The script ends by an exception: tell why, if the daemon still listens."""
        self._connection.send_last(Failing(kind, reason))

    def _finish(self) -> None:
        if self._arenas is not None:
            try:
                self._load()
            except NotWholeError:
                raise AttachRefused(
                    "the run is over, and its last weights had not come here by then: take them from "
                    "another peer's checkpoint (`holdfast export`)"
                ) from None
        self.finished = True

    def _set_step(self, step: int) -> None:
        self._skipped_count += step - self._step
        self._step = step
        self._slots[STEP_SLOT] = step

    def _catch_up(self, step: int) -> None:
        """The run is further. Steps that we skip we did not train: the overlap of what we posted is
        as long as it was."""
        skipped = step - self._step
        if skipped > 0:
            self._set_step(step)
            for opened in self._rounds.values():
                if opened.told:
                    opened.posted_step += skipped

    def _require_arenas(self) -> Arenas:
        if self._arenas is None:
            raise RemoteProtocolError("the daemon sent orders before it opened its arenas")
        return self._arenas

    def _send(self, message: Message) -> None:
        """Send, unless the run is over: a daemon that goes home then is no error."""
        try:
            self._connection.send(message)
        except DaemonGone:
            if not self.finished:
                self._hear_last_words()

    @torch.no_grad()
    def _hear_last_words(self) -> None:
        """After a failed send: what the daemon said before it went, or DaemonGone."""
        while not self.finished:
            self._handle(self._connection.receive())


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    socket_path: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Join the run that this process was started for; returns with the run's weights in the model.

    Every parameter and persistent buffer becomes part of the run's shared state. Gradients and the
    optimizer's state stay local. They are not touched, with one exception: an optimizer that comes
    without any state is put back to that when steps that trained nothing yet (a spare takes one, to
    be warm when its turn comes) are dropped with what they did to the weights.

    Args:
      model: on any device, in float32, float64, bfloat16 or float16; may be wrapped by
        DistributedDataParallel or torch.compile.
      optimizer: the inner optimizer; if it has a state already, of this run, it needs no ramp of
        its rate (``Run.rate_scale``).
      socket_path: of the daemon; normally the environment variable ``HOLDFAST_SOCKET`` says it.
      callbacks: told of steps, merges, logged figures and the end: ``TensorBoard``, ``Wandb``, or a
        ``Callback`` of the script's.

    Raises:
      NoDaemonError: the script was not started by ``holdfast join``.
      AttachRefused: the run does not take this model; the text says why.
      ModelError: a tensor cannot be shared, or the optimizer trains something else.
      DaemonGone: the daemon went away meanwhile.
    """
    path = socket_path or os.environ.get(SOCKET_VARIABLE)
    if not path:
        raise NoDaemonError(
            "this process has no holdfast daemon: "
            "start the script with `holdfast join INVITE -- python train.py`"
        )
    return attach_over(lambda: DaemonConnection.open(path), model, optimizer, callbacks=callbacks)


def attach_over(
    connect: Callable[[], DaemonConnection],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    clock: Callable[[], float] = time.monotonic,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """As ``attach``, over whatever leads to the daemon, by any clock; raises what it raises."""
    tensors = find_shared(model)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    run = Run(connect(), tensors, optimizer, clock, callbacks)
    try:
        run._attach()
    except BaseException:
        run.close()
        raise
    return run


def _seed() -> int:
    """The peer's number if the daemon told it, else this process's."""
    text = os.environ.get(MEMBER_VARIABLE)
    if text is None:
        return os.getpid()
    return int(text) if text.isdecimal() else zlib.crc32(text.encode())
