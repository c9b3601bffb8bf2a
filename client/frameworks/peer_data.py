"""Which samples a framework's loader gives: in an order of this peer's own, or leased ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, Sampler

from ..attach_errors import MisuseError
from ..data.sampler import LeasedSampler
from ..hook import Run


class _SizedSampler(Sampler[int]):
    """A leased sampler with the data set's length, by which frameworks count the steps of an epoch.

    They begin a new iteration after that many samples; it goes on where training is.
    """

    def __init__(self, leased: LeasedSampler, length: int) -> None:
        self._leased = leased
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(self._leased)

    def __len__(self) -> int:
        return self._length


def _batches_of(loader: object) -> Any:
    """Return what makes a loader's batches out of its sampler's samples, if it has that."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches, "batch_sampler", batches)  # Accelerate's, for several processes


def draw_apart(loader: object, run: Run) -> None:
    """Make a loader that is not iterated over yet draw in an order of this peer's own."""
    sampler: Any = getattr(_batches_of(loader), "sampler", None)
    generator = run.generator()
    if hasattr(sampler, "initial_seed"):  # Accelerate's, which seeds its generator at each epoch
        sampler.initial_seed = generator.initial_seed() % 2**62  # to which it adds the epoch
    elif hasattr(sampler, "generator"):
        sampler.generator = generator


def draw_leased(loader: object, run: Run, process_count: int) -> int:
    """Make a loader draw samples that the run leases to this peer; not its iterators.

    Args:
      loader: a ``DataLoader``; it keeps its data set, batch size, workers and collation.
      process_count: of the framework, among which it divides batches.

    Returns:
      The samples of a batch; all are whole.

    Raises:
      MisuseError: there are several processes, or the loader makes its batches in a way of its own.
      TypeError, ValueError, AttachRefused: see ``Run.sampler``.
    """
    if process_count > 1:
        raise MisuseError(
            f"leased=True is for one process, and there are {process_count}",
            hint="in a loop of your own, give each process's loader run.sampler(dataset)",
        )
    batches = _batches_of(loader)
    data: Any = getattr(loader, "dataset", None)
    size = getattr(batches, "batch_size", None)
    if isinstance(data, IterableDataset) or not hasattr(batches, "sampler") or not size:
        raise MisuseError(
            "leased=True needs a DataLoader with a batch size, over a data set with a length",
            hint="data that is read in order is leased with run.shards, in a loop of your own",
        )
    if not isinstance(batches.sampler, _SizedSampler):
        batches.sampler = _SizedSampler(run.sampler(data), len(data))
    return int(size)


def is_leased(loader: object) -> bool:
    """Return whether a loader draws leased samples."""
    return isinstance(getattr(_batches_of(loader), "sampler", None), _SizedSampler)
