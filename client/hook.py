"""``Run``: the interface of holdfast for a training loop. ``attach`` makes it.

A step boundary is a call of ``Run.step``. Nearly always nothing is due there, and it costs about a
microsecond: three numbers written and one read in memory shared with the daemon. When something is
due, messages are handled in the order in which they came:

    RoundOpened      at its step, post the fragment's pseudo-gradient and send ``Posted``
    RoundEnded       committed: merge the fragment; aborted: keep the local delta
    Load             load the shared state, drop local deltas (a resync, or a promotion)
    ExtendStepLimit  the master is away: train on past rounds and step limit, as far as it says
    KeepState        write the optimizer's state and random number generators, while training goes
                     on
    Finished         load the shared state; ``finished`` becomes true

``boundary.BoundaryMachine`` decides what is due at which step. The trainer waits in ``step``, and
only there: while a round that it posted runs and no overlap is left, while it is a spare, and at
the step limit, which no trainer of the run may pass. A trainer that passed it while the master was
away posts each due round at its present step.

A trainer of several ranks calls ``step`` in each of them. They handle the same messages at the same
steps (see ``ranks``), so that all of what ``BoundaryMachine`` decides is the same in all.

After several losses in a row that are not finite, the trainer sends ``Failing``: its weights are
useless, and the daemon's ``Load`` replaces them, as it does after an update that is not finite. An
exception that ends the script is reported to the daemon, too.
"""

from __future__ import annotations

import math
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Literal, Self, SupportsFloat, SupportsIndex, cast, overload

import numpy as np
import torch
from attrs import evolve

from ..protocol.arena import (
    LOSS_SLOT,
    MAIL_SLOT,
    NAMED_SLOT,
    NO_STEP_NAMED,
    SAMPLES_SLOT,
    SECONDS_SLOT,
    STEP_SLOT,
    TOKENS_SLOT,
    WAITING_SLOT,
    NotWholeError,
)
from ..protocol.errors import NO_LAST_WEIGHTS, RemoteProtocolError
from ..protocol.messages import (
    COUNT_MAX,
    METRICS_MAX,
    NAME_CHARS_MAX,
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
    PostInitial,
    RankPart,
    RankWrites,
    Rejected,
    RoundEnded,
    RoundOpened,
    SetRole,
    TrainerHello,
)
from .attach_errors import AttachRefused, DaemonGone, MisuseError
from .boundary import BoundaryMachine, StepTimes
from .callbacks import Callback, CallbackRunner, Merge
from .crash_report import CrashReport
from .daemon_connection import DaemonConnection
from .data.first_batches import FirstBatches
from .data.leased_data import LeasedData
from .data.sampler import OF_SAMPLES, DaemonSource, DrawRule, LeasedSampler, SampleStream, Source
from .data.shards import OF_SHARDS, LeasedShards, ShardT
from .data.whole_numbers import WHOLE_MAX, whole
from .generators import Generators
from .ranks import RankWord
from .state.arenas import Arenas
from .state.inner_optimizer import InnerOptimizer
from .state.local_checkpoint import LocalCheckpoint, rank_path
from .state.tensors import layout_of
from .state.trained_parameters import TrainedParameters

MEMBER_VARIABLE = "HOLDFAST_MEMBER"  # set by the daemon: the peer's id

# Interval at which a quiet step reads the socket itself, to notice that the daemon died.
POLL_INTERVAL_S = 1.0

WAITED, STEPPED = 0, 1  # indices into ``Arena.seconds``

NO_THREAD = 0  # no thread's identifier
_attached: weakref.WeakSet[Run] = weakref.WeakSet()  # the runs of this process


def _mark_forked() -> None:
    """Mark all runs in a forked child as the parent's."""
    for run in _attached:
        run._thread, run._misuse = (
            NO_THREAD,
            "in a forked process: it belongs to the one that attached",
        )
        run._crash_report.withdraw()


os.register_at_fork(after_in_child=_mark_forked)


class Run:
    """A trainer's part in a run; made by ``attach``. It belongs to the thread that made it.

    Attributes:
      round_count: committed rounds merged into the model since ``attach``.
      waited_s: seconds spent waiting inside ``step``.
      seed: a number of this peer, the same after a restart. Samples drawn from it repeat then; draw
        them from ``generator()``.
    """

    def __init__(
        self,
        connection: DaemonConnection,
        trained: TrainedParameters,
        clock: Callable[[], float] = time.monotonic,
        callbacks: Sequence[Callback] = (),
        part: RankPart | None = None,
        socket_path: str = "",
        first_batches: FirstBatches | None = None,
    ) -> None:
        part = RankPart() if part is None else part
        self.round_count = 0
        self.waited_s = 0.0
        self.seed = _seed(part.data_rank)
        self._part = part
        self._socket_path = socket_path
        self._data = LeasedData()
        self._word = RankWord(connection) if part.world_size > 1 else None
        self._writes: tuple[int, ...] | None = None
        self._connection = connection
        self._clock = clock
        self._trained_parameters = trained
        self._optimizer = trained.optimizer
        self._inner_optimizer = InnerOptimizer(trained.optimizer)
        self._tensors = self._inner_optimizer.bind(trained.tensors)
        self._first_batches = first_batches
        self._generators = Generators(os.environ.get(MEMBER_VARIABLE, ""), data_rank=part.data_rank)
        self._thread = get_ident()  # the one that may call; NO_THREAD after ``close`` and in forks
        self._misuse = "from another thread than the one that attached"
        _attached.add(self)
        self._machine = BoundaryMachine(by_steps=part.world_size > 1, data_rank=part.data_rank)
        self._step_times = StepTimes()
        self._arenas: Arenas | None = None
        self._local_checkpoint: LocalCheckpoint | None = None
        self._spent: set[int] = set()  # fragments that nothing needs in the posted arena any more
        self._spoilt_count = 0  # losses in a row that are not finite
        self._spoilt_max = COUNT_MAX
        self._left_at_s = self._clock()  # the end of the last boundary
        self._crash_report = CrashReport(
            lambda kind, reason: self._connection.send_last(Failing(kind, reason))
        )
        self._callbacks = CallbackRunner(callbacks, self._clock()) if callbacks else None
        # For the quick path of ``step``. Memory views give and take plain numbers several times
        # faster than numpy does. They are replaced once the arenas are open.
        self._due_step = 0
        self._poll_at_s = 0.0
        self._mail: memoryview[int] = np.zeros(1, np.uint64).data
        self._named: memoryview[int] = np.full(1, NO_STEP_NAMED, np.uint64).data
        self._slots: memoryview[int] = np.zeros(8, np.uint64).data
        self._loss = cast("memoryview[float]", np.zeros(1, np.float64).data)
        self._seconds = cast("memoryview[float]", np.zeros(2, np.float64).data)
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> bool:
        """The run is over and the model holds its final weights; leave the loop."""
        return self._machine.finished

    @property
    def contributing(self) -> bool:
        """False while this peer is a spare, which waits in ``step``."""
        return self._machine.contributing

    @property
    def is_leader(self) -> bool:
        """This peer is the one that evaluates and saves for the run.

        Of the members that train, the one that joined first leads. When it leaves or dies, the next
        one does, as soon as the master has noticed; until then nobody does. At the run's end nobody
        follows.
        """
        return self._machine.leads

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, as planned; None for a run without an end.

        Rounds that have to be repeated make a run end later. It grows when the operator raises
        ``rounds``.
        """
        return self._machine.total_steps or None

    @property
    def global_step(self) -> int:
        """Inner steps of the run, not of this process; learning rate schedules follow it."""
        return self._machine.step

    @property
    def rate_scale(self) -> float:
        """The factor to multiply the learning rate by: 1.0, but less in the first steps of an
        optimizer without a state that joins a run under way. See ``inner_optimizer``."""
        return self._inner_optimizer.rate_scale(self._machine.own_step)

    @property
    def epoch(self) -> int:
        """The epoch of the last sample or shard that this trainer was given and has trained on,
        from 0.
        """
        return self._data.epoch

    def sampler(self, data: Sized | int, *, endless: bool = True) -> LeasedSampler:
        """Make the sampler of this trainer's ``DataLoader``: the run shares out the data set's
        samples.

        Each sample is used once an epoch in the run's committed work. ``step`` has to be told how
        many samples each step took: ``run.step(samples=len(batch))``. All trainers of a run have
        the same data set.

        Args:
          data: the data set, or its number of samples.
          endless: one iteration of the loader goes on over all epochs, until the script leaves it.
            False: it ends with each epoch, as far as this trainer takes part in it; not with
            several ranks.

        Raises:
          TypeError, ValueError: ``data`` has no length, another one than before, or no samples.
          AttachRefused: the run's data set has another length.
          MisuseError: after ``close``, from another thread, or in a forked process.
        """
        stream = self._leased("sampler", data, OF_SAMPLES, endless=endless)
        return LeasedSampler(stream, endless=endless)

    def shards(self, shards: Sequence[ShardT], *, endless: bool = True) -> LeasedShards[ShardT]:
        """Make an iterable over leased shards, for data that is read in order: the run shares out
        the shards.

        Each shard (a file's name, a part of a data set, ...) is used once an epoch in the run's
        committed work. It is used up when the script asks for the next one, and counts with the
        next ``step``, which takes no ``samples`` then. A shard in which the trainer dies is read
        again, from its beginning, here or elsewhere.

        Args:
          shards: all shards of the run, in the same order at every trainer.
          endless: one iteration goes on over all epochs, until the script leaves it. False: it ends
            with each epoch, as far as this trainer takes part in it; not with several ranks.

        Raises:
          TypeError, ValueError: there are no shards, or another number than before.
          AttachRefused: the run has another number of shards.
          MisuseError: after ``close``, from another thread, or in a forked process.
        """
        stream = self._leased("shards", shards, OF_SHARDS, endless=endless)
        return LeasedShards(stream, shards, endless=endless)

    def _leased(
        self, name: str, data: Sized | int, rule: DrawRule, *, endless: bool
    ) -> SampleStream:
        if self._thread != get_ident():
            self._refuse_misuse(name)
        if not endless and self._part.world_size > 1:
            raise ValueError(
                f"with several ranks run.{name} is endless: they must take equal steps"
            )
        stream = self._data.open(name, data, rule, self._source)
        self._machine.draws = True
        return stream

    def _source(self, length: int, ahead: int) -> Source:
        return DaemonSource(
            self._socket_path, self._part.data_rank, length, ahead, self._waiting_for_samples
        )

    @overload
    def generator(self, kind: Literal["torch"] = "torch") -> torch.Generator: ...

    @overload
    def generator(self, kind: Literal["numpy"]) -> np.random.Generator: ...

    def generator(self, kind: str = "torch") -> torch.Generator | np.random.Generator:
        """Make a random number generator for this trainer's data, on the CPU.

        Its seed depends on the peer, on the run's step, and on the start of this process: no other
        peer draws the same samples, and neither does this one after a restart. Every call makes
        another.

        Args:
          kind: "torch" for a ``torch.Generator``, "numpy" for a ``numpy.random.Generator``.

        Raises:
          ValueError: for another kind.
        """
        return self._generators.make(kind, self._machine.step)

    def step(
        self,
        *,
        loss: SupportsFloat | None = None,
        tokens: SupportsIndex = 1,
        samples: SupportsIndex | None = None,
    ) -> None:
        """Report one inner step as done; call it after ``optimizer.step()``.

        Usually returns at once. It waits, and may change the model's weights, when a round of the
        run requires it. Ctrl+C works while it waits.

        Args:
          loss: of this step, shown to people.
          tokens: trained on in this step, a whole number; the weight of this peer's contribution.
          samples: of ``sampler`` that this step trained on, in the order in which they were drawn;
            needed if there is one.

        Raises:
          DaemonGone: the daemon closed the connection before the run was over.
          AttachRefused: the run does not go on with this trainer; the text gives the reason.
          ModelError: the model has, or the optimizer trains, a parameter that came after
            ``attach``.
          MisuseError: after ``close``, from another thread, or in a forked process; or ``samples``
            is missing, or more than were drawn.
          TypeError, ValueError: ``tokens`` or ``samples`` is no whole number, negative, or more
          than 2**40.
        """
        if tokens.__class__ is not int or not 0 <= tokens <= WHOLE_MAX:
            tokens = whole("tokens", tokens)
        if self._thread != get_ident():
            self._refuse_misuse("step")
        machine, slots = self._machine, self._slots
        if machine.finished:
            return
        if self._data.stream is not None:
            machine.samples += self._data.train(samples)
            slots[SAMPLES_SLOT] = machine.samples
        machine.step = step = machine.step + 1
        machine.tokens = trained = machine.tokens + tokens
        slots[STEP_SLOT] = step
        slots[TOKENS_SLOT] = trained
        if loss is not None:
            if loss.__class__ is not float:
                loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            self._loss[0] = loss
            if loss - loss != 0.0:  # not finite
                self._spoil()
            elif self._spoilt_count:
                self._spoilt_count = 0
        if (
            step < self._due_step
            and step < self._named[0]
            and self._mail[MAIL_SLOT] == self._connection.received_count
            and self._clock() < self._poll_at_s
        ):
            if self._callbacks is not None:
                self._callbacks.stepped(step, loss, tokens, self._clock(), self.waited_s)
            return
        self._boundary()
        if self._callbacks is not None:
            self._callbacks.stepped(step, loss, tokens, self._clock(), self.waited_s)

    def log(self, **values: SupportsFloat) -> None:
        """Report named figures to the dashboard and to callbacks. Figures that are not finite are
        left out; the dashboard has the first 64 characters of a name.

        Raises:
          ValueError: more than 32 figures at once.
          DaemonGone: the daemon closed the connection before the run was over.
          MisuseError: after ``close``, from another thread, or in a forked process.
        """
        if self._thread != get_ident():
            self._refuse_misuse("log")
        if len(values) > METRICS_MAX:
            raise ValueError(f"{len(values)} figures at once, at most {METRICS_MAX} are taken")
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        short = {name[:NAME_CHARS_MAX]: value for name, value in finite.items()}
        self._send(Metrics(self._machine.step, short))
        if self._callbacks is not None:
            self._callbacks.logged(self._machine.step, finite)

    def close(self) -> None:
        """Leave the daemon; the model keeps its weights. Harmless twice."""
        self._thread, self._misuse = NO_THREAD, "after run.close()"
        self._crash_report.withdraw()
        self._connection.close()
        self._arenas = None
        if self._local_checkpoint is not None:
            self._local_checkpoint.close()
        if self._callbacks is not None:
            self._callbacks.end()

    def __repr__(self) -> str:
        machine = self._machine
        if self._thread == NO_THREAD:
            state = "closed"
        elif machine.finished:
            state = "finished"
        else:
            state = "contributing" if machine.contributing else "spare"
        of = "" if machine.total_steps == 0 else f" of {machine.total_steps}"
        leads = ", leader" if machine.leads else ""
        return (
            f"<holdfast.Run at step {machine.step}{of}, {self.round_count} rounds, {state}{leads}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._crash_report.report(error)
        self.close()

    def _refuse_misuse(self, name: str) -> None:
        raise MisuseError(
            f"run.{name} was called {self._misuse}",
            hint=(
                "call the methods of a run from the thread that called holdfast.attach, before"
                " close"
            ),
        )

    # ------------------------------------------------------------ attaching

    def _attach(self) -> None:
        self._send(TrainerHello(VERSION_MAX, os.getpid(), layout_of(self._tensors), self._part))
        with torch.no_grad():
            if self._word is None:
                while not self._machine.loaded:
                    self._handle(self._connection.receive())
            else:
                self._attach_rank(self._word)
            self._due_step = self._next_due_step()
        checkpoint = self._local_checkpoint
        if checkpoint is not None and checkpoint.restore(self._machine.step_limit):
            self._inner_optimizer.mark_restored()
        self._left_at_s = self._clock()
        self._measure_steps()
        if self._callbacks is not None:
            self._callbacks.begin(self._clock(), self.waited_s)

    def _attach_rank(self, word: RankWord) -> None:
        first = self._connection.receive()
        if isinstance(first, Rejected):
            self._handle(first)
        if not isinstance(first, RankWrites):
            raise RemoteProtocolError(f"the daemon sent a {type(first).__name__}")
        self._writes = first.tensors
        messages = word.receive()
        while True:
            for message in messages or ():
                self._handle(message)
            if self._machine.loaded:
                word.train_on()
                self._mail[MAIL_SLOT] = self._connection.received_count
                return
            messages = word.wait(0, must=True)

    def _open_arenas(self, message: ArenaOpened) -> None:
        if self._arenas is not None:
            raise RemoteProtocolError("the daemon opened its arenas a second time")
        descriptors = self._connection.take_descriptors()
        self._arenas = arenas = Arenas.open(
            message, descriptors, self._tensors, self._pause, self._writes
        )
        self._spoilt_max = message.nan_steps or COUNT_MAX
        if message.local_checkpoint:
            path = rank_path(Path(message.local_checkpoint), self._part)
            self._local_checkpoint = LocalCheckpoint(path, self._optimizer)
        slots = arenas.posted.slots
        if self._word is None:
            self._mail = arenas.shared.slots.data
        else:
            slots = arenas.posted.rank_slots(self._part.rank)
            self._named = arenas.shared.slots[NAMED_SLOT : NAMED_SLOT + 1].data
        self._slots = slots.data
        self._loss = cast(
            "memoryview[float]", slots[LOSS_SLOT : LOSS_SLOT + 1].view(np.float64).data
        )
        self._seconds = cast(
            "memoryview[float]", slots[SECONDS_SLOT : SECONDS_SLOT + 2].view(np.float64).data
        )
        self._loss[0] = math.nan  # none so far
        self._slots[WAITING_SLOT] = 0  # an earlier process may have died while it waited
        self._slots[SAMPLES_SLOT] = self._machine.samples

    # ------------------------------------------------------------ a step boundary

    @torch.no_grad()
    def _boundary(self) -> None:
        """Do all that is due at this step, waiting where the run requires it."""
        if self._machine.step >= self._due_step:  # not at each look at the mail: 10 us a tensor
            self._trained_parameters.check()
        self._inner_optimizer.name_copies()
        now_s = self._clock()
        self._poll_at_s = now_s + POLL_INTERVAL_S
        if self.contributing:
            self._seconds[STEPPED] += now_s - self._left_at_s
        if self._word is not None:
            self._rank_boundary(self._word)
            return
        while not self.finished:
            message = self._connection.receive_nowait()
            if message is not None:
                self._handle(message)
                continue
            arenas = self._require_arenas()
            if self._post_due(arenas):
                continue  # messages may have come in the meantime
            must_wait = self._machine.must_wait(arenas.overlap_steps)
            arenas.advance(wait=must_wait)
            if self._machine.loaded and arenas.lost:
                self._machine.loaded = False  # see ``_handle``
                continue
            if self._announce_post(arenas):
                continue
            if not must_wait:
                break
            self._handle(self._wait())
        self._due_step = self._next_due_step()
        self._left_at_s = self._clock()

    def _rank_boundary(self, word: RankWord) -> None:
        """Do what is due at this step as ``_boundary`` does, in one rank of several.

        What is done depends on the step and on messages only, never on how long a copy takes: one
        that begins at a boundary ends at the next one.
        """
        arenas, machine = self._require_arenas(), self._machine
        arenas.advance(wait=True)
        while not self.finished:
            if self._announce_post(arenas) or self._post_due(arenas):
                continue
            must_wait = machine.must_wait(arenas.overlap_steps)
            arenas.advance(wait=must_wait)
            if self._announce_post(arenas):
                continue
            if not must_wait and self._named[0] != machine.step:
                break
            with self._waiting():
                messages = word.wait(machine.step, must=must_wait)
            if messages is None and not must_wait:
                break  # it was named, and is not any more
            for message in messages or ():
                self._handle(message)
        if self.finished:
            return
        word.train_on()
        self._connection.check()
        self._mail[MAIL_SLOT] = self._connection.received_count
        self._due_step = self._next_due_step()
        self._left_at_s = self._clock()

    def _wait(self) -> Message:
        with self._waiting():
            return self._connection.receive()

    def _pause(self) -> None:
        """Wait a moment for the daemon, which is writing a fragment that this trainer reads."""
        with self._waiting():
            self._connection.pause()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._slots[WAITING_SLOT] = self._connection.received_count + 1
        started_s = self._clock()
        try:
            yield
        finally:  # Ctrl+C ends the wait, and a script may train on
            waited_s = self._clock() - started_s
            self._slots[WAITING_SLOT] = 0
            self.waited_s += waited_s
            if self.contributing:
                self._seconds[WAITED] += waited_s

    @contextmanager
    def _waiting_for_samples(self) -> Iterator[None]:
        """Wait for samples, which is no hanging; another thread of the script may do so as well."""
        if self._thread != get_ident():
            yield
            return
        with self._waiting():
            yield

    def _post_due(self, arenas: Arenas) -> bool:
        """Post the fragment of one due round, and return whether there was one."""
        fragment = self._machine.next_to_post()
        if fragment is None:
            return False
        self._release_spent(arenas, fragment)
        arenas.replicas[fragment].post()
        self._machine.post(fragment)
        self._inner_optimizer.mark_used()
        self._measure_steps()
        self._announce_post(arenas)
        return True

    def _release_spent(self, arenas: Arenas, posting: int) -> None:
        """Give back the posted arena's memory of rounds that are over; the last one's daemon may
        still read.
        """
        for fragment in self._spent.difference(self._machine.posted_fragments, {posting}):
            arenas.replicas[fragment].release()
        self._spent.clear()

    def _announce_post(self, arenas: Arenas) -> bool:
        """Send ``Posted`` for one round whose data is in the arena; return whether there was
        one.
        """
        for fragment in self._machine.unannounced_fragments():
            replica = arenas.replicas[fragment]
            if replica.written:
                step_s = self._step_times.step_s
                posted = self._machine.announce_post(fragment, replica.version, step_s)
                if self._first_batches is not None:
                    posted = evolve(posted, first_batches=self._first_batches.digest)
                self._send(posted)
                return True
        return False

    def _next_due_step(self) -> int:
        """Return the first step at which something is due even if no message comes."""
        if self.finished:
            return COUNT_MAX
        arenas = self._require_arenas()
        if arenas.under_way:
            return self._machine.step + 1
        return self._machine.next_due_step(arenas.overlap_steps)

    def _measure_steps(self) -> None:
        self._step_times.measure(self._machine.own_step, self._clock() - self.waited_s)

    # ------------------------------------------------------------ messages

    def _handle(self, message: Message) -> None:
        try:
            self._obey(message)
        except NotWholeError:
            # After it sent the message, the daemon began to fetch that fragment again. It sends
            # ``Load`` when the fragment is whole. Of several ranks all must do the same until then,
            # and the others may have found it whole: they train on, and what they post is refused.
            if self._word is None:
                self._machine.loaded = False

    def _obey(self, message: Message) -> None:
        machine = self._machine
        match message:
            case RoundOpened():
                machine.open_round(message)
            case RoundEnded():
                self._end_round(message)
            case SetRole():
                machine.contributing = message.contributing
                machine.leads, machine.total_steps = message.leads, message.total_steps
            case Load():
                first = not machine.loaded
                machine.move_to(message.step, message.step_limit)
                self._slots[STEP_SLOT] = machine.step
                self._spoilt_count = 0
                if message.spoilt:
                    self._inner_optimizer.mark_spoilt()
                if self._word is None:
                    self._load()
                else:
                    self._load_rank()
                self._inner_optimizer.renew(machine.own_step if machine.step else None, first=first)
                machine.finished = message.finished
            case ExtendStepLimit():
                arenas = self._require_arenas()
                if arenas.overlap_steps == 0:
                    for fragment in machine.posted_fragments:
                        arenas.replicas[fragment].keep()
                machine.extend_limit(message.step_limit)
            case KeepState():
                checkpoint = self._local_checkpoint
                if checkpoint is not None and machine.loaded and not self._spoilt_count:
                    checkpoint.keep(machine.step)
            case Finished():
                self._finish()
            case ArenaOpened():
                self._open_arenas(message)
            case PostInitial():
                for fragment, replica in enumerate(self._require_arenas().replicas):
                    replica.post_present()
                    self._spent.add(fragment)
                self._send(InitialPosted())
            case Rejected():
                raise AttachRefused(f"the run does not take this trainer: {message.reason}")
            case _:
                raise RemoteProtocolError(f"the daemon sent a {type(message).__name__}")

    def _end_round(self, message: RoundEnded) -> None:
        arenas = self._require_arenas()
        fragment = message.fragment
        replica = arenas.replicas[fragment]
        ended = self._machine.end_round(message)
        if ended.posted:
            self._spent.add(fragment)
        contributed = ended.contributed
        if ended.posted and not contributed:
            replica.withdraw()
        if not message.committed:
            return
        self._slots[STEP_SLOT] = self._machine.step
        if not self.contributing and not contributed:
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
            self._callbacks.merged(Merge(self._machine.step, *merged))

    def _load(self) -> None:
        for replica in self._require_arenas().replicas:
            replica.load()
        self._machine.load()

    def _spoil(self) -> None:
        """Count a loss that is not finite. After enough of them ask for other weights."""
        self._spoilt_count += 1
        unread = self._mail[MAIL_SLOT] != self._connection.received_count  # ``Load``, perhaps
        if self._spoilt_count >= self._spoilt_max and self._machine.loaded and not unread:
            count, self._spoilt_count = self._spoilt_count, 0
            if self._word is None:  # one rank of several does not stop alone: ``Load`` comes to all
                self._machine.loaded, self._due_step = False, 0
            step = self._machine.step
            reason = f"the loss was not finite {count} times in a row, up to step {step}"
            self._send(Failing(FailureKind.NAN, reason))

    def _finish(self) -> None:
        if self._arenas is not None:
            try:
                self._load()
            except NotWholeError:
                raise AttachRefused(NO_LAST_WEIGHTS) from None
        self._machine.finished = True

    def _load_rank(self) -> None:
        """Load as ``_load`` does, and count as loaded whatever this rank finds, since the others
        do.
        """
        try:
            self._load()
        except NotWholeError:
            self._machine.load()

    def _require_arenas(self) -> Arenas:
        if self._arenas is None:
            raise RemoteProtocolError("the daemon sent orders before it opened its arenas")
        return self._arenas

    def _send(self, message: Message) -> None:
        """Send a message. A daemon that has ended is no error once the run is over."""
        with suppress(DaemonGone):
            self._connection.send(message)
            return
        if self.finished:
            return
        while self._word is not None:  # the last messages come only to ranks that all wait
            self._connection.receive()
        self._handle_remaining()

    @torch.no_grad()
    def _handle_remaining(self) -> None:
        """After a failed send, handle the daemon's last messages, up to ``Finished`` or
        DaemonGone.
        """
        while not self.finished:
            self._handle(self._connection.receive())


def _seed(data_rank: int) -> int:
    """Return the peer's number from the environment, or this process's id; each data rank has its
    own.
    """
    text = os.environ.get(MEMBER_VARIABLE)
    if text is None:
        return os.getpid()
    if data_rank:
        text = f"{text}.{data_rank}"
    return int(text) if text.isdecimal() else zlib.crc32(text.encode())
