"""Many seeds, in several processes: what broke, with fewer faults if that breaks it, too."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice

from attrs import define, field, frozen

from .hostile_peer import Hostile
from .hostile_run import live_with_hostile
from .liar_run import FoundOut, live_with_a_liar
from .lying_peers import Lie
from .scenario import Scenario
from .scenario_run import RunOutcome, run_scenario
from .shrink import shrink
from .witness import Tell, ViolationError

WHAT_CHARS_MAX = 4_000  # of a violation's story
AHEAD = 4  # seeds per process that wait their turn: few, so that Ctrl+C ends soon


@frozen
class BatchOptions:
    """What is the same for all seeds.

    Attributes:
      peers: that begin; None: as the seed has it.
      audit: the probability with which a chunk of a result is looked at.
      liar: instead of faults: one peer that lies, in ``lies`` chunks of each round.
      hostile: instead of faults: one peer that tells its master lies of every kind.
    """

    peers: int | None = None
    audit: float = 0.0
    liar: Lie | None = None
    lies: int = 1
    hostile: bool = False

    @property
    def options(self) -> str:
        """For the command line."""
        return "".join(
            [
                f" --peers {self.peers}" if self.peers is not None else "",
                f" --audit {self.audit:g}" if self.audit else "",
                f" --liar {self.liar.value}" if self.liar is not None else "",
                f" --lies {self.lies}" if self.lies != 1 else "",
                " --hostile" if self.hostile else "",
            ]
        )


PLAIN = BatchOptions()


@define
class Violation:
    """A seed that broke a promise.

    Attributes:
      faults: of its scenario.
      shrunk: those of the smallest scenario that was found to fail, too.
    """

    seed: int
    what: str
    faults: list[str]
    shrunk: list[str]
    reproduce: str


@define
class SeedResult:
    """What came of one seed; exactly one of the three."""

    seed: int
    outcome: RunOutcome | None = None
    found_out: FoundOut | None = None
    violation: Violation | None = None


@define
class BatchReport:
    """What came of many."""

    start: int
    seeds: int = 0
    events: int = 0
    committed: int = 0
    faults: int = 0
    repairs: int = 0
    reruns: int = 0
    aborts: int = 0
    lied: list[int] = field(factory=list)  # rounds with a lie until the liar was found out, by run
    violations: list[Violation] = field(factory=list)

    def add(self, result: SeedResult) -> None:
        self.seeds += 1
        if result.violation is not None:
            self.violations.append(result.violation)
        if result.found_out is not None:
            self.events += result.found_out.events
            self.lied.append(result.found_out.rounds)
        if result.outcome is not None:
            self.events += result.outcome.events
            self.committed += result.outcome.committed
            self.faults += len(result.outcome.faults)
            self.repairs += result.outcome.repairs
            self.reruns += result.outcome.reruns
            self.aborts += result.outcome.aborts


def broken_by(scenario: Scenario) -> str:
    """What breaks in it; empty: nothing.

    Whatever ends a daemon that must not end counts, not only what the witness objects to.
    """
    try:
        run_scenario(scenario)
    except (BaseExceptionGroup, ViolationError) as error:
        return _told_of(error)
    return ""


def _told_of(error: BaseException) -> str:
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


def try_seed(seed: int, choice: BatchOptions = PLAIN, tell: Tell | None = None) -> SeedResult:
    """Live through one seed; shrink it if it fails.

    Args:
      tell: hears of every event that is witnessed.
    """
    reproduce = f"holdfast simulate --start {seed} --seeds 1{choice.options}"
    if choice.hostile:
        try:
            return SeedResult(seed, outcome=live_with_hostile(seed, tell))
        except (BaseExceptionGroup, ViolationError) as error:
            lies = [kind.value for kind in Hostile.of(seed).kinds]
            violation = Violation(seed, _told_of(error), sorted(lies), [], reproduce)
            return SeedResult(seed, violation=violation)
    if choice.liar is not None:
        try:
            lived = live_with_a_liar(seed, choice.liar, choice.audit, choice.lies, tell)
        except (BaseExceptionGroup, ViolationError) as error:
            what = _told_of(error)
            return SeedResult(seed, violation=Violation(seed, what, [], [], reproduce))
        return SeedResult(seed, found_out=lived)
    scenario = Scenario.of(seed, choice.peers, choice.audit)
    try:
        return SeedResult(seed, outcome=run_scenario(scenario, tell))
    except (BaseExceptionGroup, ViolationError):
        what = broken_by(scenario)  # the same seed, the same story
    smaller = shrink(scenario, lambda each: bool(broken_by(each)))
    return SeedResult(
        seed,
        violation=Violation(
            seed,
            what,
            [str(fault) for fault in scenario.faults],
            [str(fault) for fault in smaller.faults],
            reproduce,
        ),
    )


def _prepare() -> None:
    """Of a process that lives through seeds."""
    gc.freeze()  # what is imported lives as long as the process: nothing to look through for garbage
    # What daemons log is part of the story; it is told of one seed, by ``--trace``.
    logging.getLogger("holdfast").addHandler(logging.NullHandler())


def try_seeds(
    start: int, count: int, choice: BatchOptions, jobs: int, heard: Callable[[SeedResult], None]
) -> None:
    """Live through many, in so many processes; results come in the order in which they are there.

    Raises:
      KeyboardInterrupt: at once; what ``heard`` has heard until then is whole.
    """
    if jobs == 1:
        gc.freeze()  # as ``_prepare`` does
        try:
            for seed in range(start, start + count):
                heard(try_seed(seed, choice))
        finally:
            gc.unfreeze()
        return
    seeds = iter(range(start, start + count))
    waiting: set[Future[SeedResult]] = set()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_prepare) as pool:
        try:
            while True:
                with _ctrl_c_is_ours():  # processes are started by submitting to them
                    for seed in islice(seeds, AHEAD * jobs - len(waiting)):
                        waiting.add(pool.submit(try_seed, seed, choice))
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda f: f.result().seed):
                    heard(future.result())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    """Processes that are started in here do not hear of it: we let them finish what they are at."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
