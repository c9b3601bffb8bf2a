"""What a run costs the training of a GPU: two peers on one GPU, with holdfast and without.

    python -m benchmarks.cuda --json FILE

Two processes train the demo's model, wider, on the same GPU and at the same time: first alone, then as the two
peers of a run with daemons and master on this machine's loopback, then alone again. Compared are the steps that
both take in a second. Their states are compared at the end. With ``--device cpu`` it shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from benchmarks.commands import ROOT, BenchError
from benchmarks.grounds import Loopback
from benchmarks.lab_run import LabRun, all_equal, stop_on_signals
from benchmarks.poison import why_no_torch
from benchmarks.progress import say
from benchmarks.report import Table, keep_json
from benchmarks.sections import Measured

PEERS = ("a", "b")
SCRIPT = ("-m", "benchmarks.cuda_trainer")
SECONDS = 20.0
WAIT_S = 180.0
SPEC = """\
[run]
name = "cuda"
[diloco]
algorithm = "{algorithm}"
sync_every = {sync_every}
{more}
[membership]
contributors = 2
min_members = 2
[checkpoint]
every_rounds = 0
every_s = 0
"""


@frozen
class Case:
    """Settings of a run; ``size`` are arguments of the trainer."""

    name: str
    algorithm: str
    sync_every: int
    more: str
    size: tuple[str, ...] = ()


SMALL = ("--width=768", "--layers=12", "--heads=12")
LARGE = ("--width=1024", "--layers=24", "--heads=16", "--batch=16")
CASES = (
    Case("diloco", "diloco", 50, "", SMALL),
    Case("streaming", "streaming", 60, "fragments = 4\noverlap = 10", SMALL),
    Case("eager", "eager", 40, "", SMALL),
    Case("streaming, large", "streaming", 60, "fragments = 6\noverlap = 10", LARGE),
)


@frozen
class Found:
    """One case.

    Attributes:
      device: its name.
      alone: steps a second of both processes together, before and after.
      steps_per_s: in the run.
      share: of the mean of ``alone``.
      waited: for the run, of the time, the mean of the peers.
      call_us, call_us_p99, call_ms_max: of ``run.step``; the longest includes what was waited.
      rounds: in the time that counts.
      same: whether the peers' states were equal at the end.
    """

    case: Case
    device: str
    params: int
    alone: list[float]
    steps_per_s: float
    share: float
    waited: float
    call_us: float
    call_us_p99: float
    call_ms_max: float
    gpu_gib: float
    gpu_gib_alone: float
    rounds: int
    same: bool


def measure(case: Case, device: str, seconds: float) -> Found:
    """Measure one case; takes some three times ``seconds`` and a minute."""
    script = [*SCRIPT, *case.size, f"--device={device}", f"--seconds={seconds}"]
    with tempfile.TemporaryDirectory(prefix="holdfast-cuda-") as place:
        folder = Path(place)
        before = _alone(script, folder)
        with Loopback() as ground, LabRun(ground, folder, script) as run:
            run.start_master(
                SPEC.format(algorithm=case.algorithm, sync_every=case.sync_every, more=case.more)
            )
            for host, name in enumerate(PEERS, 1):
                log = f"--log={folder / name}.json"
                run.join(name, host, founder=host == 1, more=[log])
            logs = [folder / f"{name}.json" for name in PEERS]
            run.until(
                lambda _: all(each.exists() for each in logs), "the trainers' figures", WAIT_S
            )
            inside = [json.loads(each.read_text()) for each in logs]
            run.act("pause", {})
            run.until(lambda s: not s["rounds"], "no round is under way", WAIT_S)
            same = all_equal(run)
        after = _alone(script, folder)
    alone = [sum(each["steps_per_s"] for each in some) for some in (before, after)]
    steps_per_s = sum(each["steps_per_s"] for each in inside)
    return Found(
        case,
        _name_of(device),
        inside[0]["params"],
        alone,
        steps_per_s,
        steps_per_s / statistics.fmean(alone),
        statistics.fmean(each["waited_s"] / each["seconds"] for each in inside),
        statistics.median(each["call_us_median"] for each in inside),
        max(each["call_us_p99"] for each in inside),
        max(each["call_us_max"] for each in inside) / 1e3,
        max(each["gpu_bytes_max"] for each in inside) / 2**30,
        max(each["gpu_bytes_max"] for each in before) / 2**30,
        min(each["rounds"] for each in inside),
        same,
    )


def _alone(script: list[str], folder: Path) -> list[dict[str, Any]]:
    logs = [folder / f"alone-{name}.json" for name in PEERS]
    for log in logs:
        log.unlink(missing_ok=True)
    trainers = [
        subprocess.Popen(
            [sys.executable, *script, "--alone", f"--log={log}"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # as in the run
        )
        for log in logs
    ]
    until_s = time.monotonic() + WAIT_S
    try:
        while not all(log.exists() for log in logs):
            if any(trainer.poll() is not None for trainer in trainers):
                raise BenchError("a trainer ended before its figures were there")
            if time.monotonic() > until_s:
                raise BenchError(f"a trainer takes longer than {WAIT_S:g} s")
            time.sleep(0.05)
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
    return [json.loads(log.read_text()) for log in logs]


def _name_of(device: str) -> str:
    """Return a GPU's name, or an empty text if there is none."""
    import torch

    if not device.startswith("cuda"):
        return device
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def tables(found: list[Found]) -> list[Table]:
    """The section's table."""
    return [
        Table(
            f"Two peers on one GPU ({found[0].device}) beside the same two processes without a run",
            ["python -m benchmarks.cuda"],
            [
                "algorithm",
                "parameters",
                "H",
                "steps a second alone, before and after",
                "in the run",
                "share",
                "waited",
                "`run.step`, us",
                "99 %, us",
                "longest, ms",
                "GPU memory, GiB (alone)",
                "rounds",
                "digests",
            ],
            [
                [
                    each.case.name,
                    f"{each.params / 1e6:.0f} M",
                    str(each.case.sync_every),
                    " and ".join(f"{value:.1f}" for value in each.alone),
                    f"{each.steps_per_s:.1f}",
                    f"{each.share:.1%}",
                    f"{each.waited:.1%}",
                    f"{each.call_us:.1f}",
                    f"{each.call_us_p99:.0f}",
                    f"{each.call_ms_max:.0f}",
                    f"{each.gpu_gib:.2f} ({each.gpu_gib_alone:.2f})",
                    str(each.rounds),
                    "equal" if each.same else "DIFFERENT",
                ]
                for each in found
            ],
            [
                "The demo's model with bytes of Python's library, context 256, autocast to bfloat16, weights in "
                "float32. Both processes share the GPU, so one trains while the other waits for a round: *waited* "
                "is of each peer's time, *share* is of both peers' steps together. Master, daemons and trainers "
                "run on the GPU machine's own processor, over loopback.",
            ],
        )
    ]


def why_no_cuda() -> str:
    """Say why this machine cannot measure it; empty if it can."""
    return why_no_torch() or ("" if _name_of("cuda") else "torch sees no CUDA device here")


def cuda() -> Measured:
    """The section of RESULTS.md."""
    found = [_said(case, "cuda", SECONDS) for case in CASES]
    return tables(found), [asdict(each) for each in found]


def _said(case: Case, device: str, seconds: float) -> Found:
    say(f"{case.name}: H={case.sync_every}")
    each = measure(case, device, seconds)
    say(f"{case.name}: {each.share:.1%} of the steps of the same processes without a run")
    return each


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that count")
    parser.add_argument("--cases", help="names, separated by semicolons; default: all")
    parser.add_argument("--small", action="store_true", help="a model of a million parameters")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stop_on_signals()
    names = [each.name for each in CASES] if options.cases is None else options.cases.split(";")
    found = []
    try:
        for case in CASES:
            if case.name in names:
                size = ("--width=128", "--layers=4", "--heads=4") if options.small else case.size
                found.append(_said(evolve(case, size=size), options.device, options.seconds))
                print(json.dumps(asdict(found[-1])), flush=True)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if options.json is not None and found:
            keep_json([asdict(each) for each in found], options.json)
    return 0 if all(each.same for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
