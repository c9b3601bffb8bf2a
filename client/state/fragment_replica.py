"""A trainer's replica of one fragment: the local tensors, their anchor, posts and merges.

The *anchor* is the start of local training: the shared values as of the version merged last. The
pseudo-gradient is the anchor minus the local tensors, and every operation here keeps that so:

    load      local <- theta                           anchor <- theta     nothing is pending
    post      posted arena <- anchor - local           snapshot <- local   only with overlap
    merge     local <- theta + (local - base)          anchor <- theta
    withdraw  nothing moves                            the posted delta is not counted

The base of a merge is the snapshot when the round contains this trainer's contribution, else the
anchor. So training that the run has not counted yet stays in the local tensors and in the next
pseudo-gradient. Tensors in 16 bits are rounded when they are written. Their anchor moves by the
same rounding, so that the rounding does not count as training.

A post and a merge copy between the model's device and the host, which may take some training steps
(see ``copier``). Such an *operation* is a generator that yields the transfer that it waits for.
``advance`` continues it if the transfer has arrived, ``finish`` waits; the next operation finishes
it first. A post copies the tensors at once, a merge applies to the tensors as they are at its end.
Between transfers an operation also yields its work on the host's memory, which a thread does; the
tensors are changed by the trainer's thread only. With all tensors in the host's memory everything
is done at once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from ...diloco.fragments import BUFFER, COUNTER, PARAMETER
from ...diloco.outer import merged
from ...protocol.arena import FOUNDING_VERSION, Arena, NotWholeError
from .box_views import BoxViews
from .copier import CudaCopier, Result, Transfer, WorkBeside
from .tensors import SharedTensor

# Of a parameter that two ranks have, so many values are compared; what the copies have trained is
# unlike if it is this share of its norm apart. Sums in another order are far less.
SAMPLE_COUNT = 1024
UNLIKE = 0.1

Values = NDArray[np.float32]
Counters = NDArray[np.int64]
Parts = list[torch.Tensor]  # values of the floating tensors, each flat, on its tensor's device
Awaited = Transfer | WorkBeside[object]
TensorMerge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Operation = Generator[Awaited, None, None]

# The daemon refuses weights that are not finite, and masks of infinities are handled below.
_IGNORE_NONFINITE = np.errstate(invalid="ignore", over="ignore")


class FragmentReplica:
    """A fragment's tensors and their anchor.

    Args:
      index: the fragment's number.
      tensors: the fragment's, in its order: parameters, buffers, counters.
      shared: the arena that the daemon writes.
      posted: the arena that the trainer writes.
      overlap: training goes on while a round runs; takes memory for a snapshot.
      copier: copies between the tensors' devices and the host.
      wait: waits while the daemon writes to the shared arena; see ``Arena.read``.
      writes: the tensors that this process writes into the posted arena, if it is one of several;
        None: all. It keeps and reads its parts of all of them.

    Attributes:
      version: the version of the shared state that the local tensors are based on.
      written: the data of the last ``post`` is in the posted arena.
      lost: a merge found the fragment being fetched when it came to read it, and was given up;
        ``load`` must follow.
    """

    def __init__(
        self,
        index: int,
        tensors: Sequence[SharedTensor],
        shared: Arena,
        posted: Arena,
        overlap: bool,
        copier: CudaCopier | None = None,
        wait: Callable[[], None] = os.sched_yield,
        writes: Collection[SharedTensor] | None = None,
    ) -> None:
        floating = [tensor for tensor in tensors if tensor.spec.kind != COUNTER]
        floating.sort(key=lambda tensor: tensor.spec.kind != PARAMETER)  # stable
        self._index = index
        integer = [tensor for tensor in tensors if tensor.spec.kind == COUNTER]
        self._floating = _slices(floating)
        self._integer = _slices(integer)
        held = [*self._floating, *self._integer]
        self._shared = shared
        self._shared_views = BoxViews.of(shared, index, floating, integer)
        self._posted = posted
        self._posted_views = BoxViews.of(posted, index, floating, integer)
        self._writes = None if writes is None else {id(tensor) for tensor in writes}
        self._wait = wait
        self._overlap = overlap
        self._copier = CudaCopier() if copier is None else copier
        self._anchor: Values = np.zeros(sum(tensor.count for tensor in floating), np.float32)
        self._snapshot: Parts | None = None
        self._operation: Operation | None = None
        self._transfer: Awaited | None = None  # the operation waits for it
        self._defers = any(self._copier.defers(each.tensor) for each, _ in held)
        self.version = FOUNDING_VERSION
        self.written = False
        self.lost = False

    @property
    def under_way(self) -> bool:
        """An operation is not finished."""
        return self._transfer is not None

    def advance(self) -> None:
        """Continue the present operation as far as its transfers have arrived."""
        while self._transfer is not None and self._transfer.ready():
            self._continue()

    def finish(self) -> None:
        """Finish the present operation, waiting for its transfers."""
        while self._transfer is not None:
            self._continue()

    # ------------------------------------------------------------ interface

    def post_present(self) -> None:
        """Write the tensors themselves into the posted arena, as the run's initial weights."""
        posted = self._posted_views
        with self._writing(FOUNDING_VERSION):
            for (tensor, _), part in zip(self._floating, posted.values, strict=True):
                if self._is_written(tensor):
                    part[...] = tensor.read().reshape(part.shape)
            for (tensor, _), count in zip(self._integer, posted.counters, strict=True):
                if self._is_written(tensor):
                    count[...] = tensor.counters(copy=False).cpu().numpy().reshape(count.shape)

    def release(self) -> None:
        """Give back the posted arena's memory of a round that is over; several processes keep it.

        They come to one step at different moments: one may have posted again before another calls.
        """
        if self._writes is None:
            self._posted.release(self._index)

    def post(self) -> None:
        """Begin to write the pseudo-gradient, anchor minus local, into the posted arena."""
        self.withdraw()
        self.written = False
        self._begin(self._post())

    def keep(self) -> None:
        """Take a snapshot of the posted tensors, because training goes on in spite of no overlap.

        The trainer must not have trained since the post. Harmless if there is a snapshot.
        """
        if self._snapshot is None:
            self._snapshot = [tensor.values(copy=True) for tensor, _ in self._floating]

    def withdraw(self) -> None:
        """Give the last post up, if any: its delta is in no version and will be in none."""
        self.finish()
        self._snapshot = None

    def load(self) -> None:
        """Replace the tensors by the shared state; local training is dropped.

        Raises:
          NotWholeError: the shared state is not whole. Call again when it is.
        """
        if self._transfer is not None:
            self._transfer.drop()
        self._operation = self._transfer = self._snapshot = None
        self.lost = False
        counters: Counters = np.empty(sum(tensor.count for tensor, _ in self._integer), np.int64)
        self.version = self._read(partial(self._copy_shared, self._anchor, counters))
        for tensor, place in self._floating:
            tensor.write(self._anchor[place])
            if tensor.low_precision:
                self._anchor[place] = tensor.read()
        for tensor, place in self._integer:
            tensor.write(counters[place])

    def merge(self, *, contributed: bool) -> None:
        """Take over a committed version, and keep the training that is not part of it.

        Args:
          contributed: the version contains this trainer's contribution; ``post`` was called for the
            round, and no ``load`` nor ``withdraw`` since.

        Raises:
          NotWholeError: the fragment is being fetched; ``load`` must follow.
        """
        self.finish()
        if contributed and self._writes is not None:
            self._compare_copies()
        if contributed and self._snapshot is None:
            self.load()  # nothing was trained since the post
        else:
            self._begin(self._merge(contributed=contributed))

    def _compare_copies(self) -> None:
        """Warn of a parameter of which another rank posted a copy that was trained otherwise.

        The posted arena still has the last round's values: the ranks' next post of this fragment is
        at least one common step away.
        """
        for number, ((tensor, place), part) in enumerate(
            zip(self._floating, self._posted_views.values, strict=True)
        ):
            if self._is_written(tensor) or tensor.spec.kind != PARAMETER or not tensor.count:
                continue
            own = tensor.values(copy=False) if self._snapshot is None else self._snapshot[number]
            some = slice(None, None, max(1, tensor.count // SAMPLE_COUNT))
            theirs = part.reshape(-1)[some]
            if not theirs.any():
                continue  # on another host: what the writer posts does not come here
            apart = self._anchor[place][some] - own[some].cpu().numpy() - theirs
            if np.square(apart).sum() > UNLIKE**2 * np.square(theirs).sum():
                warnings.warn(
                    f"two ranks have copies of {tensor.spec.name!r} that they train differently,"
                    " and one of them is lost with every round: let all ranks that have it add up"
                    " its gradients (all_reduce; DistributedDataParallel does)",
                    stacklevel=2,
                )
                return

    # ------------------------------------------------------------ operations

    def _begin(self, operation: Operation) -> None:
        self.finish()
        self._operation = operation
        self._transfer = next(operation, None)
        self.advance()

    def _continue(self) -> None:
        assert self._operation is not None
        assert self._transfer is not None
        self._transfer.wait()
        self._transfer = next(self._operation, None)

    def _post(self) -> Operation:
        values = [
            tensor.values(copy=self._overlap or self._copier.defers(tensor.tensor))
            for tensor, _ in self._floating
        ]
        counters = [
            tensor.counters(copy=self._copier.defers(tensor.tensor)) for tensor, _ in self._integer
        ]
        if self._overlap:
            self._snapshot = values
        taken = self._copier.down([*values, *counters])
        yield taken
        yield from self._beside(partial(self._write_post, taken.parts))
        self.written = True

    def _write_post(self, taken: Parts) -> None:
        """Write the posted arena."""
        posted, local = self._posted_views, iter(taken)
        with self._writing(self.version):
            for (tensor, place), part in zip(self._floating, posted.values, strict=True):
                now = next(local).numpy().reshape(part.shape)
                if self._is_written(tensor):
                    _subtract(self._anchor[place].reshape(part.shape), now, part, tensor)
            for (tensor, _), count in zip(self._integer, posted.counters, strict=True):
                counter = next(local).numpy().reshape(count.shape)
                if self._is_written(tensor):
                    count[...] = counter

    def _merge(self, *, contributed: bool) -> Operation:
        version = self.version
        # Raises NotWholeError here, where the caller expects it.
        self.version = self._read(_nothing)
        fetch = partial(self._fetch, with_anchor=not contributed)
        try:
            while (fetched := (yield from self._beside(fetch))) is None:
                self.version = self._read(_nothing)
        except NotWholeError:
            self.version = version
            if not self._defers:
                raise  # the caller waits
            self.lost = True
            return
        theta, sent, self.version = fetched
        news = [theta[place] for _, place in self._floating]
        yield sent
        here = len(news) * (1 if contributed else 2)
        bases = self._snapshot if contributed else sent.parts[len(news) : here]
        assert bases is not None
        roundings = self._shift(sent.parts[: len(news)], bases)
        for (tensor, _), count in zip(self._integer, sent.parts[here:], strict=True):
            tensor.write(torch.maximum(count, tensor.counters(copy=False)))
        if contributed:
            self._snapshot = None
        self._anchor = theta
        yield from self._move_anchor(roundings)

    def _fetch(self, *, with_anchor: bool) -> tuple[Values, Transfer, int] | None:
        """Read the shared state and begin to copy it to the tensors' devices, or the anchor too.

        Returns:
          The values, the transfer of them, of the anchor and of the counters, and their version.
          None if the daemon wrote meanwhile.
        """
        theta = np.empty_like(self._anchor)
        counters: Counters = np.empty(sum(tensor.count for tensor, _ in self._integer), np.int64)
        found = self._shared.read_once(self._index, partial(self._copy_shared, theta, counters))
        if found is None:
            return None
        values = [theta[place] for _, place in self._floating]
        if with_anchor:
            values += [self._anchor[place] for _, place in self._floating]
        devices = [tensor.tensor.device for tensor, _ in self._floating]
        sent = self._copier.up(
            [
                *(torch.from_numpy(each) for each in values),
                *(torch.from_numpy(counters[place]) for _, place in self._integer),
            ],
            [
                *(devices * 2 if with_anchor else devices),
                *(tensor.tensor.device for tensor, _ in self._integer),
            ],
        )
        return theta, sent, found

    def _beside(self, work: Callable[[], Result]) -> Generator[Awaited, None, Result]:
        """Have the copier's thread work on the host's memory; at once if there is no device."""
        if not self._defers:
            return work()
        pending = self._copier.beside(work)
        yield cast("WorkBeside[object]", pending)
        return pending.result

    def _shift(self, targets: Parts, bases: Parts) -> list[torch.Tensor | None]:
        """Set the floating tensors to ``merged(target, local, base)``.

        Returns:
          For each tensor in 16 bits its rounding, for the others None.
        """
        roundings: list[torch.Tensor | None] = []
        for (tensor, _), target, base in zip(self._floating, targets, bases, strict=True):
            new = _merged(tensor.spec.kind, target, tensor.precise_values(), base)
            tensor.write(new)
            roundings.append(tensor.values(copy=False) - new if tensor.low_precision else None)
        return roundings

    def _move_anchor(self, roundings: Sequence[torch.Tensor | None]) -> Operation:
        """Move the anchor of tensors in 16 bits by their rounding."""
        pairs = zip(self._floating, roundings, strict=True)
        rounded = [(place, part) for (_, place), part in pairs if part is not None]
        if not rounded:
            return
        fetched = self._copier.down([part for _, part in rounded])
        yield fetched
        for (place, _), part in zip(rounded, fetched.parts, strict=True):
            _add(self._anchor[place], part.numpy())

    def _copy_shared(self, values: Values, counters: Counters) -> None:
        self._copy_counters(counters)
        for (_, place), part in zip(self._floating, self._shared_views.values, strict=True):
            values[place].reshape(part.shape)[...] = part

    def _read(self, copy: Callable[[], None]) -> int:
        return self._shared.read(self._index, copy, self._wait)

    def _copy_counters(self, counters: Counters) -> None:
        for (_, place), count in zip(self._integer, self._shared_views.counters, strict=True):
            counters[place].reshape(count.shape)[...] = count

    # ------------------------------------------------------------ the posted arena

    def _writing(self, version: int) -> AbstractContextManager[None]:
        """Mark the posted fragment as being written, unless other processes write to it, too."""
        if self._writes is not None:
            return nullcontext()
        return self._posted.writing(self._index, version)

    def _is_written(self, tensor: SharedTensor) -> bool:
        """Return whether this process writes the tensor, and not another rank."""
        return self._writes is None or id(tensor) in self._writes


def _nothing() -> None:
    pass


def _merged(
    kind: str, target: torch.Tensor, local: torch.Tensor, base: torch.Tensor
) -> torch.Tensor:
    """Return ``merged(target, local, base)``, in the precision of ``local``.

    Elements of a buffer that did not move get the target: the difference of two infinities is NaN.
    """
    # ``merged`` uses operators only, so it works on tensors as on arrays.
    new = cast("TensorMerge", merged)(target, local, base)
    return torch.where(local == base, target, new) if kind == BUFFER else new


def _slices(tensors: Sequence[SharedTensor]) -> list[tuple[SharedTensor, slice]]:
    """Return the tensors that are here, each with its place in the anchor."""
    places = []
    start = 0
    for tensor in tensors:
        if tensor.absent:
            continue
        places.append((tensor, slice(start, start + tensor.count)))
        start += tensor.count
    return places


@_IGNORE_NONFINITE
def _subtract(anchor: Values, local: Values, out: Values, tensor: SharedTensor) -> None:
    np.subtract(anchor, local, out=out)
    if tensor.spec.kind == BUFFER:
        out[anchor == local] = 0.0  # a mask of infinities has not moved


@_IGNORE_NONFINITE
def _add(anchor: Values, rounding: Values) -> None:
    np.add(anchor, rounding, out=anchor)
