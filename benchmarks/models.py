"""Memory and times of a peer by the size of its model, in a real run on this machine's loopback.

    python -m benchmarks.models --params 100,400 --fragments 1,8 --json FILE

Two peers found a run and train, a third one joins, and a peer exports its checkpoint. Every 50 ms the memory
of a peer's daemon and of its trainer is read (proportional set size, so that memory that both map counts
once). What the script itself uses, read just before ``attach``, is subtracted. The rest is given as a multiple
of the float32 model, by phase the most of any peer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen

from benchmarks.commands import HOLDFAST, BenchError
from benchmarks.grounds import Loopback
from benchmarks.lab_run import LabRun, Status, stop_on_signals
from benchmarks.process_memory import pss_bytes
from benchmarks.progress import say
from benchmarks.report import Table, keep_json

SCRIPT = Path(__file__).with_name("one_fragment.py")
SAMPLE_S = 0.05
WAIT_S = 900.0
ROUNDS_COUNT = 3  # that are measured
STEP_S = 0.2
STEPS_A_ROUND = 5
TENSORS = 16
MILLIONS, FRAGMENTS = (100.0, 200.0), (1, 8)  # of the section
BOUND_MODELS, BOUND_FRAGMENTS = 3.0, 4.0  # memory that is asked for: so many models and fragments
SPEC = """\
[run]
name = "models"
[diloco]
sync_every = {steps}
fragments = {fragments}
[membership]
min_members = 2
deadline_s = 60
[checkpoint]
every_rounds = {every}
"""


@frozen
class Case:
    """A measured model.

    Attributes:
      memory_times_model: by phase, the most that daemon and hook of a peer took.
      bound_times_model: asked for.
      times_s: founding (from the first trainer to the first commit), round (median of the reductions),
        join (until the newcomer is in sync), export.
    """

    params: int
    fragments: int
    memory_times_model: dict[str, float]
    bound_times_model: float
    times_s: dict[str, float]


@define
class Memory:
    """The memory of peers' processes, read by a thread."""

    model_bytes: int
    phase: str = "founding"
    most: dict[str, float] = field(factory=dict)
    own_files: dict[str, Path] = field(factory=dict)  # what a script uses before it attaches
    pids: dict[str, tuple[int, int | None]] = field(factory=dict)
    _over: threading.Event = field(factory=threading.Event)

    def watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            for name, (daemon, trainer) in list(self.pids.items()):
                own = self.own_files[name]
                used = pss_bytes(daemon)
                if trainer is not None and own.exists() and (text := own.read_text()):
                    used += max(0, pss_bytes(trainer) - int(text))
                share = used / self.model_bytes
                self.most[self.phase] = max(self.most.get(self.phase, 0.0), share)

    def end(self) -> None:
        self._over.set()


def measure(params: int, fragments: int) -> Case:
    """Measure one model."""
    memory = Memory(4 * params)
    times_s: dict[str, float] = {}
    script = [str(SCRIPT), f"--values={params}", f"--tensors={TENSORS}", f"--step-s={STEP_S}"]
    script.append(f"--all-in={STEPS_A_ROUND}")
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-models-") as place,
        Loopback() as ground,
        LabRun(ground, Path(place), script) as run,
    ):
        folder = Path(place)
        # A checkpoint comes once, after the rounds that are measured and the join.
        every = fragments * 1_000_000
        run.start_master(
            SPEC.format(steps=STEPS_A_ROUND * fragments, fragments=fragments, every=every)
        )
        watcher = threading.Thread(target=memory.watch, daemon=True)
        watcher.start()
        try:
            began_s = time.monotonic()
            for number, name in enumerate(("a", "b"), 1):
                _join(run, memory, folder, name, number, founder=name == "a")
            _until(run, memory, lambda s: s["committed"] >= 1, "the first commit")
            times_s["founding"] = time.monotonic() - began_s

            memory.phase = "rounds"
            goal = fragments * ROUNDS_COUNT
            status = _until(run, memory, lambda s: s["committed"] >= goal, "rounds")
            rounds = [each for each in status["past_rounds"] if each["outcome"] == "committed"]
            taken = sorted(each["reduce_s"] for each in rounds)
            times_s["round"] = taken[len(taken) // 2]

            memory.phase = "joining"
            began_s = time.monotonic()
            _join(run, memory, folder, "late", 3)
            _until(run, memory, lambda s: _in_sync(s, "late"), "the newcomer is in sync")
            times_s["join"] = time.monotonic() - began_s
            done = run.master()["committed"]
            _until(run, memory, lambda s: s["committed"] > done, "a round with it")

            memory.phase = "checkpoint"
            began_s = time.monotonic()
            run.stop("late")
            times_s["last checkpoint"] = time.monotonic() - began_s
            began_s = time.monotonic()
            subprocess.run(
                [
                    *HOLDFAST,
                    "export",
                    "--state",
                    str(folder / "late"),
                    str(folder / "m.safetensors"),
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            times_s["export"] = time.monotonic() - began_s
        finally:
            memory.end()
            watcher.join()
    bound = BOUND_MODELS + BOUND_FRAGMENTS / fragments
    rounded = {phase: round(share, 2) for phase, share in memory.most.items()}
    return Case(
        params, fragments, rounded, bound, {name: round(s, 2) for name, s in times_s.items()}
    )


def _join(
    run: LabRun,
    memory: Memory,
    folder: Path,
    name: str,
    host: int,
    *,
    founder: bool = False,
) -> None:
    own = memory.own_files[name] = folder / f"{name}.own"
    run.join(name, host, founder=founder, more=[f"--own={own}"])


def _in_sync(status: Status, name: str) -> bool:
    return any(row["name"] == name and row["in_sync"] for row in status["members"])


def _until(run: LabRun, memory: Memory, condition: Any, what: str) -> Status:
    def seen(status: Status) -> bool:
        for name in memory.own_files:
            if run.ended(name) is None and run.serves(name):
                memory.pids[name] = (run.pid(name), run.peer(name).get("trainer_pid"))
        return bool(condition(status))

    return run.until(seen, what, WAIT_S)


def models() -> tuple[list[Table], Any]:
    """The section of RESULTS.md."""
    cases = [_measured(params, fragments) for params in MILLIONS for fragments in FRAGMENTS]
    phases = ("founding", "rounds", "joining", "checkpoint")
    rows = [
        [
            f"{case.params / 1e6:g} M, {case.fragments}",
            *(f"{case.memory_times_model[phase]:.2f}" for phase in phases),
            f"{case.bound_times_model:.1f}",
            *(f"{case.times_s[name]:.2f}" for name in ("round", "join", "export")),
        ]
        for case in cases
    ]
    table = Table(
        "Memory of daemon and hook of one peer beside the script's own, in float32 models, the most of three "
        "peers; and seconds",
        ["python -m benchmarks.models --params 100,200 --fragments 1,8"],
        ["parameters, fragments", *phases, "asked", "a round", "a join", "an export"],
        rows,
        [
            "Asked: three models and four fragments. Of a daemon some 70 MB are its program: 0.18 models of "
            "100 million parameters. While a newcomer copies, its donors keep the version that it copies: with "
            "one fragment two models more.",
        ],
    )
    return [table], [asdict(case) for case in cases]


def _measured(params: float, fragments: int) -> Case:
    say(f"{params:g} million parameters, {fragments} fragments")
    return measure(int(params * 1e6), fragments)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--params", default="100", help="millions of parameters, comma-separated")
    parser.add_argument("--fragments", default="1,8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stop_on_signals()
    cases = []
    try:
        for params in options.params.split(","):
            for fragments in options.fragments.split(","):
                case = _measured(float(params), int(fragments))
                cases.append(case)
                print(json.dumps(asdict(case)), flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if options.json is not None and cases:
            keep_json([asdict(case) for case in cases], options.json)
    within = all(
        most <= case.bound_times_model
        for case in cases
        for most in case.memory_times_model.values()
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
