"""One run of a training script on this machine, through real daemons, and what it came to."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from attrs import evolve, frozen

from ...membership.master.rounds.contribution_checks import WARNING as SAME_SAMPLES
from ...membership.spec.spec import (
    CheckpointTable,
    DilocoTable,
    MembershipTable,
    ReduceTable,
    RunSpec,
    RunTable,
)
from ..process.exit_codes import ExitCode
from ..status_records import MasterStatus, read
from .daemon_client import call
from .fleet import MASTER, Fleet, FleetError, Node

LOSS = "loss"  # of training; compared if not all trials have logged one of ``FIGURES``
FIGURES = ("validation_loss", "eval_loss")
REPLICA = "replica-"  # names of the peers, before a number
POLL_S = 0.2
TOLD_S = 10.0  # between two lines of progress
# Without a step, a member or a round: longer than a script takes to import and compile.
STALLED_S = 180.0
POINTS = 400  # of a curve
SAME = 1e-5  # curves keep seven digits
END_SHARE = 0.2  # of a run's steps, the last ones: what was logged in them is what it came to
NO_MEMORY = ("out of memory", "can't allocate memory")  # in what torch and the kernel say

Curve = Sequence[tuple[float, float]]  # a replica's step, and the value there


@frozen
class Trial:
    """A run to be tried."""

    label: str
    spec: RunSpec

    @property
    def peers(self) -> int:
        return self.spec.membership.contributors

    @property
    def steps(self) -> int:
        """Inner steps of each replica."""
        diloco = self.spec.diloco
        return self.spec.run.rounds * diloco.sync_every // diloco.fragments


def replicas(label: str, spec: RunSpec, peers: int, steps: int) -> Trial:
    """Return a trial of these settings in which each peer trains ``steps``, whole rounds."""
    rounds = spec.diloco.fragments * steps // spec.diloco.sync_every
    settings = evolve(
        spec,
        run=RunTable(name="try", rounds=rounds),
        # All train the same tokens, however they share the devices, and keep each other waiting.
        diloco=evolve(spec.diloco, pace="lockstep"),
        membership=MembershipTable(
            contributors=peers, min_members=peers, deadline_s=60.0, grace_s=60.0
        ),
        checkpoint=CheckpointTable(peers=1, every_rounds=0, every_s=0.0),
    )
    return Trial(label, settings)


def script_alone(spec: RunSpec, steps: int, sync_every: int) -> Trial:
    """Return a trial of one peer; the mean of one is its own weights, so no round changes them."""
    diloco = DilocoTable(sync_every=sync_every, outer_lr=1.0, outer_momentum=0.0)
    return replicas("alone", evolve(spec, diloco=diloco, reduce=ReduceTable()), 1, steps)


@frozen
class Outcome:
    """What a trial came to.

    Attributes:
      tokens: of all replicas.
      seconds: it took here.
      step_s: of a replica, beside the others.
      round_bytes: sent by one peer in one round.
      curves: of the training loss and those of ``FIGURES`` that were logged.
    """

    trial: Trial
    tokens: int
    seconds: float
    step_s: float
    round_bytes: float
    value_count: int
    curves: Mapping[str, Curve]

    def end(self, name: str) -> float | None:
        """Return a figure's mean at the run's end; None if it was not logged then."""
        from_step = (1 - END_SHARE) * self.trial.steps
        last = [value for step, value in self.curves.get(name, ()) if step >= from_step]
        return fmean(last if name == LOSS else last[-1:]) if last else None


def run_trial(
    trial: Trial, folder: Path, command: Sequence[str], tell: Callable[[str], None]
) -> Outcome:
    """Train until the run is finished and all scripts have ended.

    Raises:
      FleetError: a process failed, or nothing moved for ``STALLED_S``.
    """
    folder.mkdir(parents=True)
    fleet = Fleet(folder, run_in=Path.cwd())  # where the script is, and perhaps its data
    began_s = time.monotonic()
    threads = str(max(1, (os.cpu_count() or 1) // trial.peers))
    env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    try:
        fleet.start_master(trial.spec.toml_text)
        for number in range(1, trial.peers + 1):
            fleet.join(f"{REPLICA}{number}", founder=number == 1, command=command, env=env)
        status = _watch(fleet, trial, tell)
        curves = dict(_curves(fleet, trial, status))
    finally:
        fleet.kill_all()  # nothing is worth being ended in good order
    # Copies of the first weights are of no round.
    sent_bytes = sum(row.bytes.bulk_sent - row.bytes.state_received for row in status.departed)
    return Outcome(
        trial,
        status.headline.tokens,
        time.monotonic() - began_s,
        median(each.stepped_s / max(1, each.step) for each in status.departed),
        sent_bytes / trial.peers / max(1, status.committed),
        status.value_count,
        curves,
    )


def _watch(fleet: Fleet, trial: Trial, tell: Callable[[str], None]) -> MasterStatus:
    """Wait for the end of the run and of all scripts; return the last status."""
    moved = None
    moved_s = told_s = time.monotonic()
    peers = [node for name, node in fleet.nodes.items() if name != MASTER]
    while True:
        gone = [node for node in peers if node.process.poll() is not None]
        status = read(fleet.master(), MasterStatus)  # after: who saw the run's end may go
        if status.state == "finished" and len(gone) == len(peers):
            return status
        now_s = time.monotonic()
        stands = status.committed, [(row.step, row.trainer) for row in status.members]
        if stands != moved:
            moved, moved_s = stands, now_s
        if status.state != "finished":
            _check(trial, status, gone, peers[0], now_s - moved_s)
        if now_s - told_s > TOLD_S:
            told_s, found = now_s, status.headline
            loss = "" if found.loss is None else f", loss {found.loss:.3f}"
            left = "" if found.eta_s is None else f", {found.eta_s:.0f} s left"
            tell(f"{trial.label}: {status.state}, step {found.step} of {trial.steps}{loss}{left}")
        time.sleep(POLL_S)


def _check(
    trial: Trial, status: MasterStatus, gone: Sequence[Node], replica: Node, still_s: float
) -> None:
    """Raise FleetError if the run cannot come to its end, or not to a good one."""
    why = next((text for text in status.warnings if SAME_SAMPLES in text), "")
    if still_s > STALLED_S:
        attached = status.committed or any(row.trainer for row in status.members)
        reason = status.why_waiting if attached else "the script has not called holdfast.attach"
        why = f"no step for {still_s:.0f} s: {reason}"
    for row in status.members:
        if row.trainer_state not in ("running", "none"):
            why = f"the script of {row.name} failed: {row.trainer_state}"
    for replica in gone:
        step = max((row.step for row in status.departed), default=0)
        why = f"the script ended at step {step} of {trial.steps}, before run.finished"
        if replica.process.returncode:
            why = replica.log.rpartition("\nholdfast: ")[2].partition("\n")[0]
    if not why:
        return
    if any(words in why + replica.log for words in NO_MEMORY):
        why = f"out of memory: {trial.peers} at a time do not fit this machine, give fewer --peers"
    code = replica.process.returncode or ExitCode.FAILED
    raise FleetError(f"{trial.label}: {why}", exit_code=code, hint=replica.log_tail)


def _curves(fleet: Fleet, trial: Trial, status: MasterStatus) -> Iterator[tuple[str, Curve]]:
    """Yield the means of the training loss and of ``FIGURES``, as far as they were logged."""
    for name in (LOSS, *FIGURES):
        kind = "column" if name == LOSS else "figure"
        told = [row.loss if name == LOSS else row.metrics.get(name) for row in status.departed]
        last = [value for value in told if value is not None]
        if not last:
            continue
        query: dict[str, str | int] = {kind: name, "points": POINTS}
        mean = call(fleet.nodes[MASTER].control(), "lines", None, query=query)["mean"]
        points = zip(mean["step"], mean["value"], strict=True) if mean else ()
        curve = {step: value for step, value in points if None not in (step, value)}
        # Of what was told just before the end no point was made.
        if not math.isclose(fmean(last), [math.inf, *curve.values()][-1], rel_tol=SAME):
            curve[trial.steps] = fmean(last)
        yield name, list(curve.items())
