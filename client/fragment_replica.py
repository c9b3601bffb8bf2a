"""One fragment as this trainer sees it: its tensors, what they are measured against, its merges.

The *anchor* is where local training started from: the shared values as of the version merged last.
Its distance to the local tensors is the pseudo-gradient, and every operation here keeps that so:

    load      local <- theta                           anchor <- theta     nothing is pending
    post      posted arena <- anchor - local           snapshot <- local   only with overlap
    merge     local <- theta + (local - base)          anchor <- theta     or the spec's other merge
    withdraw  local <- snapshot + (local - base)       what was posted is not counted

The base of a merge is the snapshot when the round contains our contribution, else the anchor, so
that what the run has not counted yet stays in the local tensors and in the next pseudo-gradient.
With eager updates a post also moves the local tensors, from the snapshot to the *preview* of what the
round may come to; until the round ends that is the base, and ``withdraw`` takes it back.
Tensors in 16 bits are rounded when they are written; their anchor moves by the same rounding, which
therefore never passes for training.

A post and a merge take copies between the model's device and the host, which may end some steps
later (see ``copier``). Such an operation is a *course*, a generator that yields the transfer it
waits for. ``advance`` takes it on if that has come, ``conclude`` waits; whatever is begun next
concludes it first. A post takes its copy of the tensors at once, a merge applies to the tensors as
they are when it comes to that. With everything in the host's memory all is done at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..diloco.eager import FOUNDING_VERSION, OuterEstimate
from ..diloco.fragments import BUFFER, COUNTER, PARAMETER
from ..diloco.merge import Merge, merged
from ..protocol.arena import Arena
from ..protocol.messages import FragmentSize
from .copier import CudaCopier, DeviceCopier, Transfer
from .tensors import SharedTensor

Values = NDArray[np.float32]
Counters = NDArray[np.int64]
Parts = list[torch.Tensor]  # values of the floating tensors, each flat, on its tensor's device
Course = Generator[Transfer, None, None]
TensorMerge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Weights that are not finite are the daemon's to refuse, and masks of infinities are handled below.
_ROUGH = np.errstate(invalid="ignore", over="ignore")


class FragmentReplica:
    """A fragment's tensors and their anchor.

    Args:
      index: of the fragment.
      tensors: the fragment's, in its order: parameters, buffers, counters.
      shared: the arena that the daemon writes.
      posted: the arena that we write.
      overlap: whether training goes on while a round runs; takes memory for a snapshot.
      copier: between the tensors' devices and the host.
      outlook: for previews; only with overlap.
      wait: for the daemon, while it writes to the shared arena; see ``Arena.read``.

    Attributes:
      version: of the shared state that the local tensors are based on.
      written: whether what ``post`` took last lies in the posted arena.
    """

    def __init__(
        self,
        index: int,
        tensors: Sequence[SharedTensor],
        shared: Arena,
        posted: Arena,
        overlap: bool,
        copier: DeviceCopier | None = None,
        outlook: OuterEstimate | None = None,
        wait: Callable[[], None] = os.sched_yield,
    ) -> None:
        floating = [tensor for tensor in tensors if tensor.spec.kind != COUNTER]
        floating.sort(key=lambda tensor: tensor.spec.kind != PARAMETER)  # stable
        self._index = index
        self._floating = _places(floating)
        self._integer = _places([tensor for tensor in tensors if tensor.spec.kind == COUNTER])
        self._shared = shared
        self._posted = posted
        self._wait = wait
        self._overlap = overlap
        self._copier: DeviceCopier = CudaCopier() if copier is None else copier
        self._anchor: Values = np.zeros(sum(tensor.count for tensor in floating), np.float32)
        self._outlook = outlook
        self._snapshot: Parts | None = None
        self._preview: Parts | None = None
        self._driver: Course | None = None
        self._transfer: Transfer | None = None  # what the course waits for
        self.version = FOUNDING_VERSION
        self.written = False

    @property
    def size(self) -> FragmentSize:
        """What the tensors need; the arenas must agree."""
        momentum_count = sum(
            tensor.count for tensor, _ in self._floating if tensor.spec.kind == PARAMETER
        )
        counter_count = sum(tensor.count for tensor, _ in self._integer)
        return FragmentSize(len(self._anchor), momentum_count, counter_count)

    @property
    def under_way(self) -> bool:
        """Whether something that was begun is not done."""
        return self._driver is not None

    def advance(self) -> None:
        """Do what can be done by now of what is under way."""
        while self._transfer is not None and self._transfer.ready():
            self._go_on()

    def conclude(self) -> None:
        """Do all of what is under way, waiting for it."""
        while self._transfer is not None:
            self._go_on()

    # ------------------------------------------------------------ what is done to it

    def post_present(self) -> None:
        """Write the tensors themselves into the posted arena: the run's first weights."""
        with self._posted.writing(self._index, FOUNDING_VERSION):
            values, counters = self._posted.values(self._index), self._posted.counters(self._index)
            for tensor, place in self._floating:
                values[place] = tensor.read()
            for tensor, place in self._integer:
                counters[place] = tensor.counters(copy=False).cpu().numpy()

    def post(self) -> None:
        """Take the pseudo-gradient, anchor minus local, for the posted arena."""
        self.withdraw()
        self.written = False
        self._begin(self._post())

    def keep(self) -> None:
        """Training goes on though there is no overlap: remember what was posted.

        For a trainer that has stood still since; harmless if the snapshot is there.
        """
        if self._snapshot is None:
            self._snapshot = [tensor.values(copy=True) for tensor, _ in self._floating]

    def withdraw(self) -> None:
        """What was posted last, if anything, is in no version and will be in none."""
        self.conclude()
        if self._preview is not None:
            self._begin(self._take_back())
        self._snapshot = None

    def load(self) -> None:
        """Take the shared state as it is; what was trained since the last post is dropped.

        Raises:
          NotWholeError: it is not whole. Call again when it is.
        """
        self._driver = self._transfer = self._snapshot = self._preview = None
        counters = self._read_shared(self._anchor)
        if self._outlook is not None:
            self._outlook.loaded(self._anchor, self.version)
        for tensor, place in self._floating:
            tensor.write(self._anchor[place])
            if tensor.low_precision:
                self._anchor[place] = tensor.read()
        for tensor, place in self._integer:
            tensor.write(counters[place])

    def merge(self, merge: Merge, *, contributed: bool, share: float = 0.0) -> None:
        """Take over a committed version and keep what was trained beside it.

        Args:
          merge: for a round that contains our contribution; without it, the delta always stays.
          contributed: whether it does; ``post`` was called for it and no ``load`` nor ``withdraw``
            since.
          share: of its weights that was ours.

        Raises:
          NotWholeError: the fragment is being fetched, so only ``load`` will help.
        """
        self.conclude()
        if contributed and self._snapshot is None and merge is merged:
            self.load()  # the trainer has stood still since it posted: nothing is pending
            return
        self._begin(self._merge(merge, contributed, share))

    # ------------------------------------------------------------ courses

    def _begin(self, course: Course) -> None:
        self.conclude()
        self._driver = course
        self._transfer = next(course, None)
        self._end_if_over()
        self.advance()

    def _go_on(self) -> None:
        assert self._driver is not None
        assert self._transfer is not None
        self._transfer.wait()
        self._transfer = next(self._driver, None)
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._transfer is None:
            self._driver = None

    def _post(self) -> Course:
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
        with self._posted.writing(self._index, self.version):
            posted = self._posted.values(self._index)
            posted_counters = self._posted.counters(self._index)
            local = iter(taken.parts)
            for tensor, place in self._floating:
                _subtract(self._anchor[place], next(local).numpy(), posted[place], tensor)
            for _, place in self._integer:
                posted_counters[place] = next(local).numpy()
        self.written = True
        if self._outlook is not None:
            ahead = self._outlook.preview(posted)
            if ahead is not None:
                yield from self._look_ahead(ahead)

    def _look_ahead(self, ahead: Values) -> Course:
        """Train on from there, until the round that was posted is over. Of parameters only."""
        assert self._snapshot is not None
        parameters = [each for each in self._floating if each[0].spec.kind == PARAMETER]
        sent = self._copier.up(
            [torch.from_numpy(ahead[place]) for _, place in parameters],
            [tensor.tensor.device for tensor, _ in parameters],
        )
        yield sent
        roundings = self._shift(sent.parts, self._snapshot, merged)
        moved = [
            part if rounding is None else part + rounding
            for part, rounding in zip(sent.parts, roundings, strict=True)
        ]
        self._preview = [*moved, *self._snapshot[len(moved) :]]

    def _take_back(self) -> Course:
        """Train on from where we were without the preview, taking along what was trained since."""
        snapshot, preview = self._snapshot, self._preview
        assert snapshot is not None
        self._snapshot = self._preview = None
        count = sum(tensor.spec.kind == PARAMETER for tensor, _ in self._floating)
        yield from self._move_anchor(self._shift(snapshot[:count], preview, merged))

    def _merge(self, merge: Merge, contributed: bool, share: float) -> Course:
        theta, version = np.empty_like(self._anchor), self.version
        counters = self._read_shared(theta)
        if self._outlook is not None:
            own = self._posted.values(self._index) if contributed else None
            self._outlook.committed(theta, self.version - version, own, share)
        news = [theta[place] for _, place in self._floating]
        anchors = [] if contributed else [self._anchor[place] for _, place in self._floating]
        devices = [tensor.tensor.device for tensor, _ in self._floating]
        sent = self._copier.up(
            [
                *(torch.from_numpy(each) for each in (*news, *anchors)),
                *(torch.from_numpy(counters[place]) for _, place in self._integer),
            ],
            [
                *(devices if contributed else devices * 2),
                *(tensor.tensor.device for tensor, _ in self._integer),
            ],
        )
        yield sent
        here = len(news) + len(anchors)
        bases: Parts | None = sent.parts[len(news) : here]
        if contributed:
            bases = self._snapshot if self._preview is None else self._preview
        rule = merge if contributed else merged
        roundings = self._shift(sent.parts[: len(news)], bases, rule)
        for (tensor, _), count in zip(self._integer, sent.parts[here:], strict=True):
            tensor.write(torch.maximum(count, tensor.counters(copy=False)))
        if contributed:
            self._snapshot = self._preview = None
        self._anchor = theta
        yield from self._move_anchor(roundings)

    def _shift(
        self, targets: Parts, bases: Parts | None, merge: Merge
    ) -> list[torch.Tensor | None]:
        """Tensors, the first ones, become ``merge(target, local, base)``; without bases they are
        their own. Returns by what those in 16 bits were rounded."""
        # The rules know arithmetic only, so they do for tensors what they do for arrays. A tensor
        # in float64 goes through them in its own precision.
        rule = cast("TensorMerge", merge)
        roundings: list[torch.Tensor | None] = []
        for number, ((tensor, _), target) in enumerate(zip(self._floating, targets, strict=False)):
            local = tensor.precise_values()
            base = local if bases is None else bases[number]
            new = rule(target, local, base)
            if tensor.spec.kind == BUFFER:
                # A mask of infinities has no differences; where nothing moved there is no need.
                new = torch.where(local == base, target, new)
            tensor.write(new)
            roundings.append(tensor.values(copy=False) - new if tensor.low_precision else None)
        return roundings

    def _move_anchor(self, roundings: Sequence[torch.Tensor | None]) -> Course:
        """The anchor goes with its tensors in 16 bits, by what they were rounded."""
        pairs = zip(self._floating, roundings, strict=False)
        rounded = [(place, part) for (_, place), part in pairs if part is not None]
        if not rounded:
            return
        fetched = self._copier.down([part for _, part in rounded])
        yield fetched
        for (place, _), part in zip(rounded, fetched.parts, strict=True):
            _add(self._anchor[place], part.numpy())

    def _read_shared(self, values: Values) -> Counters:
        """Copy the fragment's shared values to ``values``; returns its counters."""
        counters: Counters = np.empty(self.size.counter_count, np.int64)

        def copy() -> None:
            np.copyto(values, self._shared.values(self._index))
            np.copyto(counters, self._shared.counters(self._index))

        self.version = self._shared.read(self._index, copy, self._wait)
        return counters


def _places(tensors: Sequence[SharedTensor]) -> list[tuple[SharedTensor, slice]]:
    places = []
    start = 0
    for tensor in tensors:
        places.append((tensor, slice(start, start + tensor.count)))
        start += tensor.count
    return places


@_ROUGH
def _subtract(anchor: Values, local: Values, out: Values, tensor: SharedTensor) -> None:
    np.subtract(anchor, local, out=out)
    if tensor.spec.kind == BUFFER:
        out[anchor == local] = 0.0  # a mask of infinities has not moved


@_ROUGH
def _add(anchor: Values, rounding: Values) -> None:
    np.add(anchor, rounding, out=anchor)
