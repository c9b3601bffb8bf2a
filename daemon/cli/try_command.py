"""``holdfast try``: a training script alone and as several replicas, on this machine."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import asdict, evolve

from ..process.exit_codes import ExitCode
from .options import FILE, json_option
from .plan_command import LATENCY, LINE

if TYPE_CHECKING:
    from .trial import Trial

PEERS_MAX = 16
ROUNDS_MIN = 5  # of each fragment: fewer say nothing
PRESETS = ("diloco", "streaming")
GRID_SYNC_EVERY = (20, 50, 100)


@click.command("try")
@click.argument("command", nargs=-1, required=True, metavar="SCRIPT.py [-- ARGUMENTS...]")
@click.option("--peers", type=click.IntRange(2, PEERS_MAX), default=4, help="Replicas.")
@click.option("--steps", type=click.IntRange(1), default=500, help="Inner steps of each replica.")
@click.option(
    "--run-toml",
    "run_tomls",
    type=FILE,
    multiple=True,
    help=f"Settings to try; repeatable (default: the presets {' and '.join(PRESETS)}).",
)
@click.option(
    "--grid",
    is_flag=True,
    help=f"Try them with a round every {', '.join(map(str, GRID_SYNC_EVERY))} steps.",
)
@click.option("--bandwidth", type=LINE, default="100mbit", help="Each machine's line, both ways.")
@click.option(
    "--latency",
    type=LATENCY,
    default="50ms",
    help="Round-trip time between two machines, as ping reports it.",
)
@click.option("--picture", type=FILE, default="try.svg", help="Where to draw the losses.")
@json_option
def try_script(
    command: tuple[str, ...],
    peers: int,
    steps: int,
    run_tomls: tuple[Path, ...],
    grid: bool,
    bandwidth: float,
    latency: float,
    picture: Path,
    as_json: bool,
) -> None:
    """Train a script alone and as several replicas on this machine, and compare the losses.

    All train the same number of tokens, through real daemons: the script alone takes as many steps
    as all replicas together. Replicas share this machine's devices, so times are computed: for a
    machine for each replica, as fast as this one is for the script alone, with these lines.

    \b
    Examples:
      holdfast try train.py
      holdfast try train.py --grid --bandwidth 20mbit --latency 80ms
      holdfast try train.py --run-toml my-run/run.toml --peers 2 -- --model small
    """
    from .fleet import FleetError, interrupt_on_signals
    from .training_command import check_command
    from .trial import run_trial
    from .trial_report import Comparison, draw, show

    tell = partial(click.echo, err=True)
    if command[0].endswith(".py"):
        command = (sys.executable, *command)
    check_command(command)
    trials = list(_trials(peers, steps, run_tomls, grid=grid))
    interrupt_on_signals()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="holdfast-try-", ignore_cleanup_errors=True) as folder:
        for number, trial in enumerate(trials, start=1):
            tell(f"{trial.label}: {trial.steps} steps, run {number} of {len(trials)}")
            try:
                outcomes.append(run_trial(trial, Path(folder) / str(number), command, tell))
            except FleetError as error:
                others = outcomes and (len(outcomes) > 1 or number < len(trials))
                if error.exit_code != ExitCode.CONFIG or not others:
                    raise
                tell(f"left out: {error}")
    found = Comparison.of(outcomes, bandwidth, latency)
    draw(found, picture)
    if as_json:
        best = found.best()
        answer = {"take": best and best.label, **asdict(found)}
        click.echo(json.dumps(answer, indent=2))
    else:
        show(found)
        click.echo(f"the curves: {picture}")


def _trials(peers: int, steps: int, run_tomls: Sequence[Path], *, grid: bool) -> Iterator[Trial]:
    """Yield what is to be tried: first the script alone, then each of the settings."""
    from ...membership.spec.spec import RunSpec
    from ..spec_file import read_spec
    from .trial import replicas, script_alone

    specs = {str(path): read_spec(path) for path in run_tomls}
    for preset in () if specs else PRESETS:
        specs[preset] = RunSpec.parse(f'[run]\npreset = "{preset}"')
    found = []
    for name, spec in specs.items():
        for every in GRID_SYNC_EVERY if grid else (spec.diloco.sync_every,):
            label = f"{peers} x {name}, every {every}"
            if steps < ROUNDS_MIN * every or steps % every:
                least = max(ROUNDS_MIN, math.ceil(steps / every)) * every
                raise click.UsageError(
                    f"{label}: --steps must be a multiple of {every}, for {ROUNDS_MIN} rounds or"
                    f" more, e.g. {least}"
                )
            try:
                diloco = evolve(spec.diloco, sync_every=every)
                found.append(replicas(label, evolve(spec, diloco=diloco), peers, steps))
            except ValueError as error:
                raise click.UsageError(f"{label}: {error}") from error
    every = max(trial.spec.diloco.sync_every for trial in found)
    yield script_alone(found[0].spec, peers * steps, every)
    yield from found
