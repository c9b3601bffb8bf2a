"""``python -m holdfast.simulation``: whole runs in virtual time, with faults drawn from seeds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import click

from ..daemon.process.exit_codes import ExitCode
from .batch import BatchOptions, Violation, collect_rarely, try_seed, try_seeds
from .lying_peers import Lie
from .scenario import RunKind
from .scenario_run import RunOutcome

SEEDS_MAX = 10_000_000
PEERS_MIN, PEERS_MAX = 2, 1_000


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option(
    "--seeds", type=click.IntRange(1, SEEDS_MAX), default=100, help="Number of seeds, one run each."
)
@click.option("--start", type=click.IntRange(0), default=0, help="The first seed.")
@click.option(
    "--peers",
    type=click.IntRange(PEERS_MIN, PEERS_MAX),
    help="Number of peers at the start (default: 3 to 5, drawn from the seed).",
)
@click.option(
    "--audit",
    type=click.FloatRange(0.0, 1.0),
    default=0.0,
    help="Share of all result chunks that another peer adds up again.",
)
@click.option(
    "--liar",
    type=click.Choice([lie.value for lie in Lie]),
    help=(
        "Instead of faults, one of four peers lies until it is found out: as a chunk owner in its"
        " sums, as a checker in its findings, or as a contributor that sends checkers something"
        " else."
    ),
)
@click.option(
    "--hostile",
    "kind",
    flag_value="hostile",
    help=(
        "Instead of faults, one of five peers and a spare sends its master false messages of every"
        " kind. No other peer may be removed, excluded for long or out-voted, and rounds must"
        " continue."
    ),
)
@click.option(
    "--failover",
    "kind",
    flag_value="failover",
    help=(
        "Instead of the usual faults, three masters share a database: the leading one crashes, is"
        " frozen, or is cut off from the database or its members, and the database fails. No"
        " version may be committed twice."
    ),
)
@click.option(
    "--hosted",
    "kind",
    flag_value="hosted",
    help=(
        "Every second peer is one of two hosts; beside the usual faults its further host, the"
        " processes there and the line to it are lost."
    ),
)
@click.option(
    "--jobs", type=click.IntRange(1, 1_024), help="Number of processes (default: one per core)."
)
@click.option("--trace", is_flag=True, help="Print every recorded event; needs --seeds 1.")
def simulate(
    seeds: int,
    start: int,
    peers: int | None,
    audit: float,
    liar: str | None,
    kind: str | None,
    jobs: int | None,
    trace: bool,
) -> None:
    """Run the production master and peers in virtual time, with faults drawn from seeds.

    Each seed is a run of a few peers on virtual lines, in which machines crash, stall and return,
    lines break and disks fill up. The invariants are checked after every event. The same seed gives
    the same run. A single seed prints its faults. A seed that fails is rerun with fewer faults, and
    the exit status is 11. With --audit any contradiction is a violation, because no peer lies. With
    --liar it is a violation if another peer is removed, or if the liar is not found out.

    \b
    Examples:
      python -m holdfast.simulation --seeds 2000
      python -m holdfast.simulation --seeds 2000 --audit 0.2
      python -m holdfast.simulation --seeds 50 --audit 0.05 --liar owner
      python -m holdfast.simulation --seeds 100 --hostile
      python -m holdfast.simulation --seeds 2000 --failover
      python -m holdfast.simulation --seeds 200 --hosted
      python -m holdfast.simulation --start 17 --seeds 1
    """
    if liar and not audit:
        raise click.UsageError("only checks find a --liar out: give --audit as well")
    if liar and peers:
        raise click.UsageError("--liar always uses four peers: omit --peers")
    if kind and (liar or peers or audit):
        raise click.UsageError(f"--{kind} cannot be combined with --liar, --peers or --audit")
    run_kind = RunKind(kind) if kind else RunKind.PLAIN
    choice = BatchOptions(peers, audit, run_kind, Lie(liar) if liar else None)
    if trace and seeds != 1:
        raise click.UsageError("--trace prints one seed: give --seeds 1 as well")
    results: list[RunOutcome | Violation] = []
    began_s, interrupted = time.monotonic(), False
    try:
        if seeds == 1:
            results.append(_run_one(start, choice, trace=trace))
        else:
            for result in try_seeds(start, seeds, choice, min(jobs or os.cpu_count() or 1, seeds)):
                results.append(result)
                if isinstance(result, Violation):
                    click.echo(format_violation(result))
    except KeyboardInterrupt:
        interrupted = True
    click.echo(summary(results, time.monotonic() - began_s))
    if any(isinstance(result, Violation) for result in results):
        sys.exit(ExitCode.VIOLATION)
    if interrupted:
        click.echo(f"simulation: stopped after {len(results)} of {seeds} seeds", err=True)
        sys.exit(ExitCode.INTERRUPTED)


def _run_one(seed: int, choice: BatchOptions, *, trace: bool) -> RunOutcome | Violation:
    scenario = choice.scenario(seed)
    click.echo(f"{scenario.peers} peers, spare: {scenario.spare}, places: {scenario.places}")
    for cause in scenario.causes:
        click.echo(f"  planned    {cause}")
    result = try_seed(seed, choice, tell=click.echo if trace else None)
    if isinstance(result, Violation):
        click.echo(format_violation(result))
    else:
        for line in result.faults:
            click.echo(f"  happened   {line}")
        click.echo(f"  trace      {result.trace}")
    return result


def format_violation(violation: Violation) -> str:
    """Format a violation with its faults or lies and the command that reproduces it."""
    lines = [f"seed {violation.seed} violated an invariant: {violation.what}"]
    lines += [f"  fault      {fault}" for fault in violation.faults]
    lines += [f"  minimal    {fault}" for fault in violation.shrunk or ["nothing at all"]]
    return "\n".join([*lines, f"  reproduce  {violation.reproduce}"])


def summary(results: Sequence[RunOutcome | Violation], seconds: float) -> str:
    """Summarize the results in one line."""
    whole = [result for result in results if isinstance(result, RunOutcome)]
    return (
        f"{len(results)} seeds, {sum(len(run.faults) for run in whole)} faults, "
        f"{sum(run.events for run in whole)} events, "
        f"{sum(run.committed for run in whole)} rounds committed, "
        f"{sum(run.repairs for run in whole)} repairs, {sum(run.reruns for run in whole)} reruns, "
        f"{sum(run.aborts for run in whole)} aborts, {sum(run.lies for run in whole)} lies, "
        f"{len(results) - len(whole)} violations, {seconds:.1f} s"
    )


if __name__ == "__main__":
    collect_rarely()
    simulate(prog_name="python -m holdfast.simulation")
