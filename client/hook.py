"""``Run``: the interface of holdfast for a training loop. ``attach`` makes it.

A step boundary is a call of ``Run.step``. Nearly always nothing is due there, and it costs about a
microsecond (``QuietStep``). When something is due, ``StepBoundary`` does it, which handles the
daemon's messages by ``Orders``. A trainer of several ranks calls ``step`` in each of them.

An exception that ends the script is reported to the daemon.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from threading import get_ident
from types import TracebackType
from typing import Literal, Self, SupportsFloat, SupportsIndex, overload

import numpy as np
import torch

from ..protocol import messages as m
from ..protocol.arena import SAMPLES_SLOT, STEP_SLOT, TOKENS_SLOT
from .attach_errors import MisuseError
from .boundary import BoundaryMachine
from .callbacks import Callback, CallbackRunner
from .crash_report import CrashReport
from .daemon_connection import DaemonConnection
from .data.first_batches import FirstBatches
from .data.leased_data import OF_SHARDS, WHOLE_MAX, LeasedData, LeasedShards, ShardT, whole
from .data.sampler import OF_SAMPLES, DaemonSource, DrawRule, LeasedSampler, SampleStream, Source
from .generators import MEMBER_VARIABLE, Generators, seed_of
from .orders import Orders
from .quiet_step import QuietStep
from .state.inner_optimizer import InnerOptimizer
from .state.trained_parameters import TrainedParameters
from .step_boundary import StepBoundary

NO_THREAD = 0  # no thread's identifier
_attached: weakref.WeakSet[Run] = weakref.WeakSet()  # the runs of this process


def _mark_forked() -> None:
    """Mark all runs in a forked child as the parent's."""
    for run in _attached:
        run._thread = NO_THREAD
        run._misuse = "in a forked process: it belongs to the one that attached"
        run._crash_report.withdraw()


os.register_at_fork(after_in_child=_mark_forked)


class Run:
    """A trainer's part in a run; made by ``attach``. It belongs to the thread that made it.

    Attributes:
      seed: a number of this peer, the same after a restart. Samples drawn from it repeat then; draw
        them from ``generator()``.
    """

    def __init__(
        self,
        connection: DaemonConnection,
        trained: TrainedParameters,
        clock: Callable[[], float] = time.monotonic,
        callbacks: Sequence[Callback] = (),
        part: m.RankPart | None = None,
        socket_path: str = "",
        first_batches: FirstBatches | None = None,
    ) -> None:
        part = m.RankPart() if part is None else part
        self.seed = seed_of(part.data_rank)
        self._part = part
        self._socket_path = socket_path
        self._data = LeasedData()
        self._connection = connection
        self._clock = clock
        self._generators = Generators(os.environ.get(MEMBER_VARIABLE, ""), data_rank=part.data_rank)
        self._thread = get_ident()  # the one that may call; NO_THREAD after ``close`` and in forks
        self._misuse = "from another thread than the one that attached"
        _attached.add(self)
        self._crash_report = CrashReport(
            lambda kind, reason: connection.send_last(m.Failing(kind, reason))
        )
        callbacks_runner = CallbackRunner(callbacks, clock()) if callbacks else None
        optimizer = InnerOptimizer(trained.optimizer)
        machine = BoundaryMachine(by_steps=part.world_size > 1, data_rank=part.data_rank)
        quiet = QuietStep(machine, connection, clock)
        orders = Orders(connection, trained, optimizer, machine, quiet, part, callbacks_runner)
        self._callbacks = callbacks_runner
        self._inner_optimizer = optimizer
        self._machine = machine
        self._quiet = quiet
        self._orders = orders
        self._step_boundary = StepBoundary(
            connection, trained, optimizer, machine, quiet, orders, first_batches
        )
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        self._step_boundary.attach(self._part)
        if self._callbacks is not None:
            self._callbacks.begin(self._clock(), self.waited_s)

    def _boundary(self) -> None:
        self._step_boundary.cross()

    @property
    def round_count(self) -> int:
        """Committed rounds merged into the model since ``attach``."""
        return self._orders.round_count

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting inside ``step``."""
        return self._quiet.waited_s

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
        one does, as soon as the master has noticed; until then, and at the run's end, none does.
        """
        return self._machine.leads

    @property
    def total_steps(self) -> int | None:
        """The step at which the run ends, as planned; None for a run without an end.

        Rounds that are repeated make a run end later. It grows when the operator raises ``rounds``.
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
        """The epoch, from 0, of the last sample or shard that this trainer has trained on."""
        return self._data.epoch

    def sampler(self, data: Sized | int, *, endless: bool = True) -> LeasedSampler:
        """Make the sampler of this trainer's ``DataLoader``: the run shares out the samples.

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
        """Make an iterable over leased shards, for data that is read in order.

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

    @contextmanager
    def _waiting_for_samples(self) -> Iterator[None]:
        """Wait for samples, which is no hanging; another thread of the script may do so as well."""
        if self._thread != get_ident():
            yield
            return
        with self._quiet.waiting():
            yield

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
        machine, quiet = self._machine, self._quiet
        slots = quiet.slots
        if machine.finished:
            return
        if machine.draws:
            machine.samples += self._data.train(samples)
            slots[SAMPLES_SLOT] = machine.samples
        machine.step = step = machine.step + 1
        machine.tokens = trained = machine.tokens + tokens
        slots[STEP_SLOT] = step
        slots[TOKENS_SLOT] = trained
        if loss is not None:
            if loss.__class__ is not float:
                loss = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
            quiet.loss[0] = loss
            if loss - loss != 0.0:  # not finite
                self._orders.count_spoilt()
            elif quiet.spoilt_count:
                quiet.spoilt_count = 0
        if (
            step >= quiet.due_step
            or step >= quiet.named[0]
            or quiet.mail[0] != self._connection.received_count
            or self._clock() >= quiet.poll_at_s
        ):
            self._boundary()
        if self._callbacks is not None:
            self._callbacks.stepped(step, loss, tokens, self._clock(), quiet.waited_s)

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
        if len(values) > m.METRICS_MAX:
            raise ValueError(f"{len(values)} figures at once, at most {m.METRICS_MAX} are taken")
        numbers = {name: float(value) for name, value in values.items()}
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        short = {name[: m.NAME_CHARS_MAX]: value for name, value in finite.items()}
        self._orders.send(m.Metrics(self._machine.step, short))
        if self._callbacks is not None:
            self._callbacks.logged(self._machine.step, finite)

    def close(self) -> None:
        """Leave the daemon; the model keeps its weights. Harmless twice."""
        self._thread, self._misuse = NO_THREAD, "after run.close()"
        self._crash_report.withdraw()
        self._connection.close()
        self._orders.close()
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
