"""Runs of many seeds in several processes; a seed that fails is shrunk to fewer faults."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from attrs import frozen

from .lying_peers import Lie
from .scenario import RunKind, Scenario
from .scenario_run import RunOutcome, run_scenario
from .shrink import shrink
from .witness import Tell, ViolationError

WHAT_CHARS_MAX = 4_000  # of a violation's description
# New objects until the next garbage collection: with Python's 700 a tenth of a run's time is
# collections, which find little.
COLLECT_AFTER = 20_000


@frozen
class BatchOptions:
    """Options common to all seeds.

    Attributes:
      peers: number of peers at the start; None to draw it from the seed.
      audit, kind, liar: as of ``Scenario.of``.
    """

    peers: int | None = None
    audit: float = 0.0
    kind: RunKind = RunKind.PLAIN
    liar: Lie | None = None

    @property
    def options(self) -> str:
        """The options as words of the simulator's command line."""
        return "".join(
            [
                f" --peers {self.peers}" if self.peers is not None else "",
                f" --audit {self.audit:g}" if self.audit else "",
                f" --liar {self.liar.value}" if self.liar is not None else "",
                f" --{self.kind.value}" if self.kind is not RunKind.PLAIN else "",
            ]
        )

    def scenario(self, seed: int) -> Scenario:
        return Scenario.of(seed, self.peers, self.audit, self.kind, self.liar)


PLAIN = BatchOptions()


@frozen
class Violation:
    """A seed whose run violated an invariant.

    Attributes:
      what: the first error's type and text.
      faults: the faults and lies of its scenario.
      shrunk: those of the smallest scenario found that still fails.
      reproduce: the command that reproduces it.
    """

    seed: int
    what: str
    faults: list[str]
    shrunk: list[str]
    reproduce: str


def broken_by(scenario: Scenario) -> str:
    """Run a scenario and return its first error, or an empty string if it has none.

    Any error that ends a daemon counts, not only the violations that the witness finds.
    """
    try:
        run_scenario(scenario)
    except (BaseExceptionGroup, ViolationError) as error:
        return _describe(error)
    return ""


def _describe(error: BaseException) -> str:
    leaves = list(_leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt | SystemExit) for leaf in leaves):
        raise error
    return f"{type(leaves[0]).__name__}: {leaves[0]}"[:WHAT_CHARS_MAX]


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


def try_seed(
    seed: int, choice: BatchOptions = PLAIN, tell: Tell | None = None
) -> RunOutcome | Violation:
    """Run one seed, and shrink its scenario if it fails.

    Args:
      tell: receives every witnessed event.
    """
    scenario = choice.scenario(seed)
    try:
        return run_scenario(scenario, tell)
    except (BaseExceptionGroup, ViolationError) as error:
        what = _describe(error)
    shrunk = shrink(scenario, lambda each: bool(broken_by(each))).causes
    reproduce = f"python -m holdfast.simulation --start {seed} --seeds 1{choice.options}"
    return Violation(seed, what, scenario.causes, shrunk, reproduce)


def collect_rarely() -> None:
    """Exempt the imported modules from garbage collection, and collect what runs leave less often.

    For processes that run nothing but simulations or tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


def _prepare(parent: Connection) -> None:
    """Initialize a process that runs seeds; it ends when the other end of ``parent`` is closed."""
    collect_rarely()
    # The daemons' logs are part of the trace, which ``--trace`` prints for one seed.
    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    with suppress(EOFError, OSError):
        parent.recv()
    os._exit(1)


def try_seeds(
    start: int, count: int, choice: BatchOptions, jobs: int
) -> Iterator[RunOutcome | Violation]:
    """Run many seeds in ``jobs`` processes and yield their results in order."""
    run, seeds = partial(try_seed, choice=choice), range(start, start + count)
    if jobs == 1:
        yield from map(run, seeds)
        return
    spawn = multiprocessing.get_context("spawn")
    theirs, ours = spawn.Pipe(duplex=False)
    with (
        theirs,
        ProcessPoolExecutor(jobs, spawn, initializer=_prepare, initargs=(theirs,)) as pool,
        ours,  # closed first, in this process or by its death: the workers end at once
    ):
        # SIGINT is blocked in the processes that are started here: it is the parent's to end them.
        # A thread of a library may get it for this process, so until then it is only noted.
        noted: list[int] = []
        handler = signal.signal(signal.SIGINT, lambda number, _frame: noted.append(number))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            results = pool.map(run, seeds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            signal.signal(signal.SIGINT, handler)
        if noted:
            raise KeyboardInterrupt
        yield from results
