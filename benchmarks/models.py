"""Memory and times of a peer by the size of its model, in a real run on this machine's loopback.

    python -m benchmarks.models --params 100,400 --fragments 1,8 --json FILE

Some peers found a run and train, another one joins; all write a checkpoint, compare their memory, and one is
exported. Meanwhile the memory of every peer's daemon and trainer is read (proportional set size, so that memory
that both map counts once). What the script itself uses, read just before ``attach``, is subtracted. The rest is
given as a multiple of the float32 model, by phase the most of any peer. All daemons are asked for their status
again and again; the slowest answer is noted.

What each piece of work takes is compared with what memory or disk alone would take for its bytes, at the speed
of a copy that is timed in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from attrs import asdict, define, field, frozen

from benchmarks.commands import HOLDFAST, BenchError
from benchmarks.grounds import Loopback
from benchmarks.lab_run import LabRun, Status, stop_on_signals
from benchmarks.machine_speed import VALUES_MAX, MachineSpeed, outer_step_s
from benchmarks.process_memory import pss_bytes
from benchmarks.progress import say
from benchmarks.report import Table, keep_json
from holdfast.membership.planning.predict import memory_bytes
from holdfast.membership.spec.spec import RunSpec

SCRIPT = Path(__file__).with_name("one_fragment.py")
SAMPLE_S = 0.05
SAMPLING_SHARE = 0.05  # of a core that reading memory may take: of large processes it is slow
ASKED_EVERY_S = 0.1
WAIT_S = 900.0
ROUNDS_COUNT = 3  # that are measured
# A step takes the longer, the larger a fragment is: rounds come once a second for each ``STEP_VALUES`` of it.
STEP_S, STEP_VALUES = 0.2, 12.5e6
STEPS_A_ROUND = 5
TENSORS = 16
MILLIONS, FRAGMENTS = (100.0, 400.0), (1, 8)  # of the section
LARGE = 200e6  # parameters: three peers of more do not fit a machine of 24 GiB
BOUND_MODELS, BOUND_FRAGMENTS = 3.0, 4.0  # memory that is asked for: so many models and fragments
PHASES = ("founding", "rounds", "joining", "checkpoint", "export")
SPEC = """\
[run]
name = "models"
[diloco]
sync_every = {steps}
fragments = {fragments}
[membership]
min_members = {members}
deadline_s = 60
[checkpoint]
every_rounds = 0
every_s = 0
"""


@frozen
class Case:
    """A measured model.

    Attributes:
      peers: with the one that joins.
      memory_times_model: by phase, the most that daemon and hook of a peer took; the export's is its own.
      bound_times_model: asked for.
      planned_times_model: what ``holdfast config plan`` says.
      times_s: founding (from the founder's trainer to all in sync), join (from the newcomer's admission until
        it is in sync), round (median of the reductions), outer step (of one thread that does nothing else),
        checkpoint (the last one of a peer that leaves), export.
      carried_s: what memory or disk takes for the same, see ``machine_speed``.
      start_s: of founding and join, from the start of a peer's command until its trainer attaches.
      status_s: by phase, the slowest answer of any daemon to a request for its status.
      copy_s, fresh_s, write_s, digest_s: one copy of the model in memory, one into memory that this process has
        not used yet, one to disk, synced, and its BLAKE3 digests in one thread.
    """

    params: int
    fragments: int
    peers: int
    memory_times_model: dict[str, float]
    bound_times_model: float
    planned_times_model: float
    times_s: dict[str, float]
    carried_s: dict[str, float]
    start_s: dict[str, float]
    status_s: dict[str, float]
    copy_s: float
    fresh_s: float
    write_s: float
    digest_s: float


@define
class Watch:
    """The memory of peers' processes and the speed of their answers, read by threads."""

    model_bytes: int
    phase: str = "founding"
    most: dict[str, float] = field(factory=dict)
    slowest_s: dict[str, float] = field(factory=dict)
    own_files: dict[str, Path] = field(factory=dict)  # what a script uses before it attaches
    pids: dict[str, tuple[int, int | None]] = field(factory=dict)  # of a daemon and its trainer
    urls: dict[str, str] = field(factory=dict)
    _over: threading.Event = field(factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=each) for each in (self._weigh, self._ask)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _weigh(self) -> None:
        pause_s = SAMPLE_S
        while not self._over.wait(pause_s):
            began_s = time.thread_time()
            self.weigh()
            pause_s = max(SAMPLE_S, (time.thread_time() - began_s) / SAMPLING_SHARE)

    def weigh(self) -> None:
        """Read the memory of all peers once."""
        phase = self.phase
        for name, (daemon, trainer) in list(self.pids.items()):
            used = pss_bytes(daemon)
            if trainer is not None and (text := _read(self.own_files[name])):
                used += max(0, pss_bytes(trainer) - int(text))
            if phase == self.phase:
                self.note(used)

    def note(self, used_bytes: int) -> None:
        share = used_bytes / self.model_bytes
        self.most[self.phase] = max(self.most.get(self.phase, 0.0), share)

    def _ask(self) -> None:
        with httpx.Client(timeout=WAIT_S) as client:
            while not self._over.wait(ASKED_EVERY_S):
                for url in list(self.urls.values()):
                    began_s = time.monotonic()
                    with suppress(httpx.HTTPError):
                        client.get(f"{url}/api/status?past=0")
                        took_s = time.monotonic() - began_s
                        self.slowest_s[self.phase] = max(
                            self.slowest_s.get(self.phase, 0.0), took_s
                        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def measure(params: int, fragments: int) -> Case:
    """Measure one model."""
    peers = 2 if params > LARGE else 3
    watch = Watch(4 * params)
    step_s = STEP_S * max(1.0, params / fragments / STEP_VALUES)
    script = [str(SCRIPT), f"--values={params}", f"--tensors={TENSORS}", f"--step-s={step_s}"]
    script += [f"--all-in={STEPS_A_ROUND}", "--drawn"]
    spec = SPEC.format(steps=STEPS_A_ROUND * fragments, fragments=fragments, members=peers - 1)
    with tempfile.TemporaryDirectory(prefix="holdfast-models-") as place:
        speed = MachineSpeed.measure(Path(place), params)
        with Loopback() as ground, LabRun(ground, Path(place), script) as run, watch.running():
            run.start_master(spec)
            measured = _Measured(run, watch, Path(place), fragments, peers)
            times_s = measured.all()
    times_s["outer step"] = params * outer_step_s(min(params, VALUES_MAX))
    planned = memory_bytes(RunSpec.parse(spec), params) / (4 * params)
    return Case(
        params,
        fragments,
        peers,
        {phase: round(watch.most[phase], 2) for phase in PHASES},
        BOUND_MODELS + BOUND_FRAGMENTS / fragments,
        round(planned, 2),
        {name: round(each, 3) for name, each in times_s.items()},
        {name: round(each, 3) for name, each in speed.carried_s(peers, fragments).items()},
        {name: round(each, 2) for name, each in measured.start_s.items()},
        {phase: round(watch.slowest_s.get(phase, 0.0), 3) for phase in PHASES},
        round(speed.copy_s, 3),
        round(speed.fresh_s, 3),
        round(speed.write_s, 3),
        round(speed.digest_s, 3),
    )


@define
class _Measured:
    """One run, phase by phase."""

    run: LabRun
    watch: Watch
    folder: Path
    fragments: int
    peers: int
    times_s: dict[str, float] = field(factory=dict)
    start_s: dict[str, float] = field(factory=dict)

    def all(self) -> dict[str, float]:
        founders = ["a", "b"][: self.peers - 1]
        began_s = time.monotonic()
        for number, name in enumerate(founders, 1):
            self._join(name, number, founder=name == "a")
        status = self._until(lambda s: s["committed"] >= 1, "the first commit")
        came_s = _event_s(status, "a", "has a trainer")
        self.start_s["founding"] = came_s - began_s
        in_sync_s = max(_event_s(status, name, "is in sync") for name in founders)
        self.times_s["founding"] = in_sync_s - came_s
        if self.peers > 2:
            self._rounds()
        self._phase("joining")
        began_s = time.monotonic()
        self._join("late", self.peers)
        status = self._until(lambda s: _contributes(s, "late"), "a round with the newcomer")
        self.start_s["join"] = _event_s(status, "late", "has a trainer") - began_s
        joined_s = _event_s(status, "late", "joined as member")
        self.times_s["join"] = _event_s(status, "late", "is in sync") - joined_s
        if self.peers == 2:  # one peer alone sends nothing
            self._rounds()
        self.run.act("pause", {})
        self._until(
            lambda s: not s["rounds"] and s["copies"]["equal"] == self.peers, "all copies are equal"
        )
        self.watch.weigh()
        self._phase("checkpoint")
        with self._timed("checkpoint"):
            self.run.stop("late")
        self.watch.pids.clear()  # the export's own memory counts
        self._phase("export")
        with self._timed("export"):
            self._export()
        return self.times_s

    def _rounds(self) -> None:
        self._phase("rounds")
        last = max((each["round"] for each in self.run.master()["past_rounds"]), default=0)
        goal = self.run.master()["committed"] + self.fragments * ROUNDS_COUNT
        status = self._until(lambda s: s["committed"] >= goal, "rounds")
        taken = sorted(
            each["reduce_s"]
            for each in status["past_rounds"]
            if each["outcome"] == "committed" and each["round"] > last
        )
        self.times_s["round"] = taken[len(taken) // 2]

    def _export(self) -> None:
        state, target = str(self.folder / "late"), str(self.folder / "m.safetensors")
        with subprocess.Popen(
            [*HOLDFAST, "export", "--state", state, target], stdout=subprocess.DEVNULL
        ) as process:
            while process.poll() is None:
                self.watch.note(pss_bytes(process.pid))
                time.sleep(SAMPLE_S)
        if process.returncode:
            raise BenchError(f"export ended with {process.returncode}")

    def _phase(self, name: str) -> None:
        self.watch.phase = name

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self.times_s[name] = time.monotonic() - began_s

    def _join(self, name: str, host: int, *, founder: bool = False) -> None:
        own = self.watch.own_files[name] = self.folder / f"{name}.own"
        self.run.join(name, host, founder=founder, more=[f"--own={own}"])

    def _until(self, condition: Callable[[Status], object], what: str) -> Status:
        def seen(status: Status) -> bool:
            for name in ("master", *self.watch.own_files):
                if name not in self.watch.urls and self.run.serves(name):
                    self.watch.urls[name] = self.run.url(name)
            for name in self.watch.own_files:
                trainer = self.watch.pids.get(name, (0, None))[1]
                if trainer is None and name in self.watch.urls:
                    pid = self.run.peer(name).get("trainer_pid")
                    self.watch.pids[name] = (self.run.pid(name), pid)
            return bool(condition(status))

        return self.run.until(seen, what, WAIT_S)


def _event_s(status: Status, name: str, what: str) -> float:
    """Return when the master last said this of a member, by this process's clock."""
    offset_s = status["asked_s"] - status["now_s"]
    for event in reversed(status["events"]):
        if event["text"].startswith(f"{name} (") and what in event["text"]:
            at_s: float = event["at_s"] + offset_s
            return at_s
    raise BenchError(f"the master never said: {name} {what}")


def _contributes(status: Status, name: str) -> bool:
    """Return whether the last committed round contains a contribution of this peer."""
    ended = [each for each in status["past_rounds"] if each["outcome"] == "committed"]
    peers = {row["peer"] for row in status["members"] if row["name"] == name}
    return bool(ended) and any(each["peer"] in peers for each in ended[-1]["contributors"])


def models() -> tuple[list[Table], Any]:
    """The section of RESULTS.md."""
    cases = [_measured(params, fragments) for params in MILLIONS for fragments in FRAGMENTS]
    return tables(cases), [asdict(case) for case in cases]


def tables(cases: list[Case]) -> list[Table]:
    """The section's tables."""
    names = [f"{case.params / 1e6:g} M, {case.fragments}" for case in cases]
    command = f"python -m benchmarks.models --params {','.join(f'{each:g}' for each in MILLIONS)}"
    memory = Table(
        "Memory of daemon and hook of one peer beside the script's own, in float32 models, the most of any peer",
        [command],
        ["parameters, fragments", *PHASES, "asked", "planned"],
        [
            [
                name,
                *(f"{case.memory_times_model[phase]:.2f}" for phase in PHASES),
                f"{case.bound_times_model:.1f}",
                f"{case.planned_times_model:.2f}",
            ]
            for name, case in zip(names, cases, strict=True)
        ],
        [
            "Three peers, of which one joins; two with more than 200 million parameters, as more do not fit "
            "this machine. Asked: three models and four fragments. Some 80 MB are the daemon's program: 0.2 "
            "models of 100 million parameters. An export is a process of its own.",
        ],
    )
    times = ("founding", "join", "round", "outer step", "checkpoint", "export")
    seconds = Table(
        "Seconds, and in brackets the part of them that memory or disk alone would take",
        [command],
        [
            "parameters, fragments",
            *times,
            "a copy in memory",
            "into fresh memory",
            "to disk",
            "digests",
        ],
        [
            [
                name,
                *(
                    f"{case.times_s[each]:.2f} ({100 * case.carried_s[each] / case.times_s[each]:.0f} %)"
                    for each in times
                ),
                f"{case.copy_s:.2f}",
                f"{case.fresh_s:.2f}",
                f"{case.write_s:.2f}",
                f"{case.digest_s:.2f}",
            ]
            for name, case in zip(names, cases, strict=True)
        ],
        [
            "All peers, their trainers and the reading of their memory share two cores. Founding: from the "
            "founder's trainer until all peers are in sync. Join: from the newcomer's admission until it is in "
            "sync, beside rounds and the start of its trainer. A round is of one fragment, fp32; the outer step "
            "is that of the whole model in one thread; a checkpoint is two models, and all peers write one at "
            "the same time. What memory or disk would take is what copies of so many bytes took in the same "
            "run, in one thread, for founding and join into memory that the process had not used yet: the rest are "
            "digests (BLAKE3 of the model in one thread stands in the last column), encryption between "
            "processes, and waiting for one of the two cores. The host of a virtual machine may take long to provide "
            "memory that was not used before, as a disk may that is written to for long: these two copies differ "
            "tenfold from run to run, and shares above 100 % are of runs in which they were slow.",
        ],
    )
    waits = Table(
        "Seconds until a peer's trainer attaches, and the slowest answer of any daemon to a request for its status",
        [command],
        ["parameters, fragments", "start, founder", "start, newcomer", *PHASES],
        [
            [
                name,
                *(f"{case.start_s[each]:.1f}" for each in ("founding", "join")),
                *(f"{case.status_s[each]:.2f}" for each in PHASES),
            ]
            for name, case in zip(names, cases, strict=True)
        ],
        [
            "The start is that of the daemon, of Python and torch, and of the script's own model, which it draws "
            "at random.",
        ],
    )
    return [memory, seconds, waits]


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
