"""``holdfast demo``: the main job on one machine, with real processes and a real kill.

It only uses what any owner and volunteer use: the ``holdfast`` commands and the status over HTTP.

    start      master, three contributors, one spare; each peer with its trainer
    train      until a third of the rounds is committed
    kill       SIGKILL to one contributor (daemon and trainer) in the middle of a reduction
    go on      the spare takes its place
    come back  the killed one is started again, with the identity it had
    verdict    when all rounds are committed
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from attrs import define, field
from rich.console import Console

from ...membership.master.status.records import MemberRow
from ...protocol.errors import UserError
from ..paths import CONTROL_FILE
from ..status_records import MasterStatus, read

CONTRIBUTORS = ("alder", "birch", "cedar")
SPARE = "spruce"
VICTIM = "cedar"
SYNC_EVERY = 20  # inner steps per round
UPLOAD_MB_PER_S = 6.0  # a good home uplink; on bare loopback a round would be over in a blink
POLL_S = 0.02
SECONDS_MAX = 175.0  # two cores do it in about two minutes
START_S = 60.0
EXIT_S = 20.0
FLOAT_BYTES = 4

RUN_TOML = """\
[run]
name = "demo"
rounds = {rounds}

[diloco]
sync_every = {sync_every}
outer_lr = 0.7
outer_momentum = 0.7     # short runs overshoot with 0.9

[membership]
contributors = 3
min_members = 3
deadline_s = 10
grace_s = 10
"""


class DemoStage(enum.Enum):
    TRAIN = "training"
    HUNT = "waiting for a reduction to interrupt"
    KILLED = "one contributor was killed"
    BACK = "the killed one is back"


@define
class DemoProgress:
    """What the demo has seen so far."""

    stage: DemoStage = DemoStage.TRAIN
    committed: int = 0
    killed_s: float = 0.0
    kill_round: int | None = None
    kill_phase: str = ""
    kill_to_commit_s: float | None = None
    committed_at_kill: int = 0
    spare_bytes_at_kill: int = 0
    promotion_state_bytes: int | None = None
    returned_in_sync: bool = False
    loss_start: float | None = None
    loss_end: dict[str, float] = field(factory=dict)
    digests: dict[str, str] = field(factory=dict)
    versions: dict[str, int] = field(factory=dict)
    sent_bytes: dict[str, int] = field(factory=dict)  # by peer and daemon process
    line: str = ""


class Demo:
    """The demo's processes, and what is seen of them."""

    def __init__(self, folder: Path, rounds: int, console: Console) -> None:
        self.folder = folder
        self.rounds = rounds
        self.console = console
        self.watch = DemoProgress()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.invites: dict[str, str] = {}
        self.began_s = time.monotonic()
        self.client = httpx.Client(timeout=10.0)

    # ------------------------------------------------------------ processes

    def spawn(self, name: str, *arguments: str) -> None:
        """Start ``holdfast ARGUMENTS``, its output to a log of its own."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "holdfast", "--log-level", "info", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def start_master(self) -> None:
        spec = self.folder / "run.toml"
        spec.write_text(RUN_TOML.format(rounds=self.rounds, sync_every=SYNC_EVERY))
        self.spawn(
            "master",
            "master",
            str(spec),
            "--state",
            str(self.folder / "master"),
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--no-invite",
        )
        self.await_control("master")

    def start_peer(self, name: str) -> None:
        script = Path(__file__).resolve().parents[2] / "examples" / "train.py"
        self.spawn(
            name,
            "join",
            self.invites[name],
            "--name",
            name,
            "--state",
            str(self.folder / name),
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--max-upload",
            str(UPLOAD_MB_PER_S),
            "--patience",
            "30",
            "--",
            sys.executable,
            str(script),
            "--validate-every",
            "0",
        )

    def await_control(self, name: str) -> dict[str, Any]:
        """How to reach a daemon, once it runs; raises UserError with its log's end otherwise."""
        until = time.monotonic() + START_S
        path = self.folder / name / CONTROL_FILE
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):
                control: dict[str, Any] = json.loads(path.read_text())
                if control["pid"] == self.processes[name].pid:
                    return control
            if self.processes[name].poll() is not None:
                break
            time.sleep(POLL_S)
        tail = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
        raise UserError(f"{name} did not start", hint=f"its log ends with:\n{tail}")

    def ask(self, name: str, what: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        control = self.await_control(name)
        if body is None:
            response = self.client.get(f"{control['url']}/api/{what}")
        else:
            headers = {"authorization": f"Bearer {control['token']}"}
            response = self.client.post(f"{control['url']}/api/{what}", json=body, headers=headers)
        answer: dict[str, Any] = response.json()
        return answer

    def stop_all(self) -> None:
        """End whatever still runs: politely, then not."""
        for name, process in self.processes.items():
            if process.poll() is None:
                process.send_signal(signal.SIGINT if name != "master" else signal.SIGTERM)
        until = time.monotonic() + EXIT_S
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        self.client.close()

    def kill(self, name: str) -> None:
        """As if its power were cut: the daemon and its trainer at once."""
        trainer = self.ask(name, "status").get("command_pid")
        self.watch.killed_s = time.monotonic()
        self.processes[name].kill()
        if trainer:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer, signal.SIGKILL)
        self.processes[name].wait()

    # ------------------------------------------------------------ the story

    def run(self) -> dict[str, Any]:
        self.start()
        while True:
            status = self.follow()
            if status.state == "finished" and self.all_gone():
                return self.verdict(status)
            if time.monotonic() - self.began_s > SECONDS_MAX:
                self.say(f"gave up after {SECONDS_MAX:.0f} s: {status.why_waiting}")
                return self.verdict(status)
            time.sleep(POLL_S)

    def start(self) -> None:
        self.say("starting a master, three contributors and a spare ...")
        self.start_master()
        for name in (*CONTRIBUTORS, SPARE):
            role = "spare" if name == SPARE else "contributor"
            body = {"role": role, "uses": 1, "hours": 1, "founder": name == CONTRIBUTORS[0]}
            self.invites[name] = str(self.ask("master", "invite", body)["invite"])
            self.start_peer(name)

    def follow(self) -> MasterStatus:
        """Look at the run, and do what the story has there; its status."""
        status = read(self.ask("master", "status"), MasterStatus)
        self.see(status)
        self.act(status)
        self.show(status)
        return status

    def all_gone(self) -> bool:
        return all(p.poll() is not None for n, p in self.processes.items() if n != "master")

    def see(self, status: MasterStatus) -> None:
        """Keep what the verdict needs; members vanish from the status when they leave."""
        watch = self.watch
        watch.committed = status.committed
        for member in [*status.members, *status.departed]:
            name = member.name
            metrics = member.metrics
            if name == CONTRIBUTORS[0] and watch.loss_start is None:
                watch.loss_start = metrics.get("validation_loss")
            if "final_validation_loss" in metrics:
                watch.loss_end[name] = metrics["final_validation_loss"]
            key = f"{name}#{member.number}"
            sent = member.bytes.bulk_sent
            watch.sent_bytes[key] = max(sent, watch.sent_bytes.get(key, 0))
            for head in member.heads:
                if head.state == "held" and head.version >= watch.versions.get(name, -1):
                    watch.versions[name] = head.version
                    watch.digests[name] = head.root

    def act(self, status: MasterStatus) -> None:
        watch = self.watch
        if watch.stage is DemoStage.TRAIN and watch.committed >= max(1, self.rounds // 3):
            watch.stage = DemoStage.HUNT
        elif watch.stage is DemoStage.HUNT:
            self.hunt(status)
        elif watch.stage is DemoStage.KILLED:
            self.follow_promotion(status)
        elif watch.stage is DemoStage.BACK and not watch.returned_in_sync:
            watch.returned_in_sync = any(m.name == VICTIM and m.in_sync for m in status.members)
            if watch.returned_in_sync:
                self.say(f"{VICTIM} is in sync again, as a spare")

    def hunt(self, status: MasterStatus) -> None:
        """Kill the victim when a reduction it takes part in has begun."""
        reducing = [r for r in status.rounds if r.phase == "reducing"]
        if not reducing:
            return
        watch = self.watch
        spare = self.member(status, SPARE)
        if spare is None or not spare.in_sync:
            return
        time.sleep(0.1)  # well into it: at this upload rate it takes the better part of a second
        self.kill(VICTIM)
        watch.stage, watch.kill_round = DemoStage.KILLED, reducing[0].round
        watch.kill_phase = reducing[0].phase
        watch.committed_at_kill = watch.committed
        watch.spare_bytes_at_kill = spare.bytes.state_received
        self.say(f"SIGKILL {VICTIM} in the middle of round {watch.kill_round}'s reduction")

    def follow_promotion(self, status: MasterStatus) -> None:
        watch = self.watch
        if watch.kill_to_commit_s is None and watch.committed > watch.committed_at_kill:
            watch.kill_to_commit_s = time.monotonic() - watch.killed_s
            self.say(f"next commit {watch.kill_to_commit_s:.2f} s after the kill")
        spare = self.member(status, SPARE)
        if spare is not None and spare.role == "contributor":
            received = spare.bytes.state_received - watch.spare_bytes_at_kill
            if watch.promotion_state_bytes is None:
                self.say(f"{SPARE} is a contributor now; {received} bytes of state were moved")
            watch.promotion_state_bytes = received
        if watch.committed >= watch.committed_at_kill + max(2, self.rounds // 5):
            watch.stage = DemoStage.BACK
            self.say(f"starting {VICTIM} again")
            self.start_peer(VICTIM)

    def member(self, status: MasterStatus, name: str) -> MemberRow | None:
        return next((m for m in status.members if m.name == name), None)

    # ------------------------------------------------------------ what people see

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.began_s:6.1f} s[/dim]  {text}")

    def show(self, status: MasterStatus) -> None:
        """One line per committed round."""
        watch = self.watch
        losses = [m.loss for m in status.members if m.loss is not None and m.role == "contributor"]
        rate = sum(m.tokens_per_s for m in status.members)
        line = (
            f"round {watch.committed:2d}/{self.rounds}  {status.state:<24.24}  "
            f"loss {sum(losses) / len(losses) if losses else float('nan'):.3f}  "
            f"{rate:6.0f} tokens/s  {len(status.members)} members  "
            f"{sum(watch.sent_bytes.values()) / 1e6:7.1f} MB sent"
        )
        mark = f"{watch.committed} {status.state}"
        if mark != watch.line:
            watch.line = mark
            self.say(line)

    def verdict(self, status: MasterStatus) -> dict[str, Any]:
        """Every claim of the demo, from what was seen."""
        watch = self.watch
        final = max(watch.versions.values(), default=-1)
        digests = {name: watch.digests[name] for name in sorted(watch.digests)}
        expected = {*CONTRIBUTORS, SPARE}
        equal = set(digests) == expected and len(set(digests.values())) == 1
        lost = sum(watch.committed - watch.versions.get(name, 0) for name in expected)
        loss_end = max(watch.loss_end.values(), default=None)
        elements = status.value_count
        n = len(CONTRIBUTORS)
        verdict = {
            "ok": False,
            "loss_start": watch.loss_start,
            "loss_end": loss_end,
            "rounds_committed": watch.committed,
            "rounds_lost": lost,
            "digests": digests,
            "digests_equal": equal,
            "final_version": final,
            "bytes_sent": sum(watch.sent_bytes.values()),
            # Ring all-reduce of float32 gradients at every inner step, all peers together.
            "bytes_data_parallel": watch.committed
            * SYNC_EVERY
            * 2
            * (n - 1)
            * FLOAT_BYTES
            * elements,
            "killed": VICTIM,
            "kill_round": watch.kill_round,
            "kill_phase": watch.kill_phase,
            "kill_to_commit_s": watch.kill_to_commit_s,
            "promotion_state_bytes": watch.promotion_state_bytes,
            "returned_in_sync": watch.returned_in_sync,
            "seconds": time.monotonic() - self.began_s,
        }
        verdict["ok"] = (
            watch.loss_start is not None
            and loss_end is not None
            and loss_end < watch.loss_start
            and equal
            and lost == 0
            and watch.committed == self.rounds
            and watch.kill_to_commit_s is not None
            and watch.promotion_state_bytes == 0
            and watch.returned_in_sync
        )
        return verdict

    def show_verdict(self, verdict: Mapping[str, Any]) -> None:
        def number(value: float | None, form: str) -> str:
            return "-" if value is None else format(value, form)

        sent, parallel = verdict["bytes_sent"], verdict["bytes_data_parallel"]
        rows = [
            (
                "validation loss",
                f"{number(verdict['loss_start'], '.3f')} -> {number(verdict['loss_end'], '.3f')}",
            ),
            ("rounds", f"{verdict['rounds_committed']} committed, {verdict['rounds_lost']} lost"),
            ("from kill to next commit", f"{number(verdict['kill_to_commit_s'], '.2f')} s"),
            ("state moved at promotion", f"{verdict['promotion_state_bytes']} bytes"),
            (
                "bytes sent",
                f"{sent / 1e6:.1f} MB; data parallel: {parallel / 1e6:.0f} MB "
                f"({parallel / sent if sent else 0:.0f} times as many)",
            ),
            ("digests", "all equal" if verdict["digests_equal"] else "THEY DIFFER"),
        ]
        self.console.print()
        for label, value in rows:
            self.console.print(f"  {label:<26} {value}")
        for name, digest in verdict["digests"].items():
            self.console.print(f"    {name:<24} {digest[:32]}")
        word = "[green]ok[/green]" if verdict["ok"] else "[red]FAILED[/red]"
        self.console.print(f"  {'verdict':<26} {word} after {verdict['seconds']:.0f} s")


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise UserError(f"{keep} is not empty", exit_code=2, hint="name a new folder")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_demo(json_path: Path | None, rounds: int, keep: Path | None) -> int:
    """Run the demo; returns the exit status: 0 only if everything it claims came true."""
    console = Console(highlight=False, soft_wrap=True)
    with _folder(keep) as folder:
        demo = Demo(folder, rounds, console)
        try:
            verdict = demo.run()
        finally:
            demo.stop_all()
        demo.show_verdict(verdict)
        if json_path is not None:
            json_path.write_text(json.dumps(verdict, indent=2) + "\n")
        return 0 if verdict["ok"] else 1
