"""``holdfast demo``: a whole run on one machine, with real processes and a real kill.

The demo uses only the ``holdfast`` commands and the status over HTTP, as any operator would.

    start      a master, three contributors, one spare; every peer has its own trainer
    train      until a third of the rounds is committed
    kill       SIGKILL to one contributor (daemon and trainer) in the middle of a reduction
    promote    the spare takes the killed peer's place
    return     the killed peer is started again with its old identity
    verdict    when all rounds are committed
"""

from __future__ import annotations

import enum
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from attrs import define, field
from rich.console import Console

from ...membership.shared.run_status import MemberRow
from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode
from ..status_records import MasterStatus, read
from .fleet import MASTER, Fleet, interrupt_on_signals

CONTRIBUTORS = ("alder", "birch", "cedar")
SPARE = "spruce"
VICTIM = "cedar"
SYNC_EVERY = 20  # inner steps per round
UPLOAD_MB_PER_S = 6.0  # a good home uplink; over unlimited loopback a reduction is too short to hit
POLL_S = 0.02
STALLED_S = 120.0  # without a new round or state; two cores need five seconds for a round
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
    AWAIT_REDUCTION = "waiting for a reduction to interrupt"
    KILLED = "one contributor was killed"
    RETURNED = "the killed peer was started again"


@define
class DemoProgress:
    """Observations of the demo so far."""

    stage: DemoStage = DemoStage.TRAIN
    committed: int = 0
    killed_s: float = 0.0
    kill_round: int | None = None
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
    """The demo's processes and the observations made of them."""

    def __init__(self, folder: Path, rounds: int, console: Console) -> None:
        self.rounds = rounds
        self.console = console
        self.progress = DemoProgress()
        self.fleet = Fleet(folder)
        self.began_s = self.moved_s = time.monotonic()

    def start_peer(self, name: str, *, role: str = "contributor", founder: bool = False) -> None:
        script = Path(__file__).resolve().parents[2] / "examples" / "train.py"
        self.fleet.join(
            name,
            "--validate-every=0",
            role=role,
            founder=founder,
            more=(f"--max-upload={UPLOAD_MB_PER_S}",),
            command=(sys.executable, str(script)),
        )

    # ------------------------------------------------------------ stages

    def run(self) -> dict[str, Any]:
        """Run the demo to its end, or until it stands still, and return the verdict."""
        self.start()
        while True:
            status = self.poll()
            self.fleet.check_alive()
            nodes = self.fleet.nodes.items()
            exited = (node.process.poll() is not None for name, node in nodes if name != MASTER)
            if status.state == "finished" and all(exited):
                return self.verdict(status)
            if time.monotonic() - self.moved_s > STALLED_S:
                self.report(f"gave up: no new round for {STALLED_S:.0f} s: {status.why_waiting}")
                return self.verdict(status)
            time.sleep(POLL_S)

    def start(self) -> None:
        self.report("starting a master, three contributors and a spare ...")
        self.fleet.start_master(RUN_TOML.format(rounds=self.rounds, sync_every=SYNC_EVERY))
        for name in (*CONTRIBUTORS, SPARE):
            role = "spare" if name == SPARE else "contributor"
            self.start_peer(name, role=role, founder=name == CONTRIBUTORS[0])

    def poll(self) -> MasterStatus:
        """Fetch the run's status, do what the current stage requires, and return the status."""
        status = read(self.fleet.master(), MasterStatus)
        self.record(status)
        self.advance(status)
        self.show(status)
        return status

    def record(self, status: MasterStatus) -> None:
        """Record what the verdict needs, because members vanish from the status when they leave."""
        progress = self.progress
        progress.committed = status.committed
        for member in [*status.members, *status.departed]:
            name = member.name
            metrics = member.metrics
            if name == CONTRIBUTORS[0] and progress.loss_start is None:
                progress.loss_start = metrics.get("validation_loss")
            if "final_validation_loss" in metrics:
                progress.loss_end[name] = metrics["final_validation_loss"]
            key = f"{name}#{member.number}"
            sent = member.bytes.bulk_sent
            progress.sent_bytes[key] = max(sent, progress.sent_bytes.get(key, 0))
            for head in member.heads:
                if head.state == "held" and head.version >= progress.versions.get(name, -1):
                    progress.versions[name] = head.version
                    progress.digests[name] = head.root

    def advance(self, status: MasterStatus) -> None:
        progress = self.progress
        if progress.stage is DemoStage.TRAIN and progress.committed >= max(1, self.rounds // 3):
            progress.stage = DemoStage.AWAIT_REDUCTION
        elif progress.stage is DemoStage.AWAIT_REDUCTION:
            self.kill_during_reduction(status)
        elif progress.stage is DemoStage.KILLED:
            self.follow_promotion(status)
        elif progress.stage is DemoStage.RETURNED and not progress.returned_in_sync:
            progress.returned_in_sync = any(m.name == VICTIM and m.in_sync for m in status.members)
            if progress.returned_in_sync:
                self.report(f"{VICTIM} is in sync again, as a spare")

    def kill_during_reduction(self, status: MasterStatus) -> None:
        """Kill the victim once a reduction has begun and the spare is in sync."""
        reducing = [r for r in status.rounds if r.phase == "reducing"]
        if not reducing:
            return
        progress = self.progress
        spare = self.member(status, SPARE)
        if spare is None or not spare.in_sync:
            return
        time.sleep(0.1)  # at this upload rate a reduction takes most of a second
        progress.killed_s = time.monotonic()
        self.fleet.kill(VICTIM)
        progress.stage, progress.kill_round = DemoStage.KILLED, reducing[0].round
        progress.committed_at_kill = progress.committed
        progress.spare_bytes_at_kill = spare.bytes.state_received
        self.report(f"SIGKILL {VICTIM} in the middle of round {progress.kill_round}'s reduction")

    def follow_promotion(self, status: MasterStatus) -> None:
        progress = self.progress
        if progress.kill_to_commit_s is None and progress.committed > progress.committed_at_kill:
            progress.kill_to_commit_s = time.monotonic() - progress.killed_s
            self.report(f"next commit {progress.kill_to_commit_s:.2f} s after the kill")
        spare = self.member(status, SPARE)
        if spare is not None and spare.role == "contributor":
            received = spare.bytes.state_received - progress.spare_bytes_at_kill
            if progress.promotion_state_bytes is None:
                self.report(f"{SPARE} is a contributor now; {received} bytes of state were moved")
            progress.promotion_state_bytes = received
        if progress.committed >= progress.committed_at_kill + max(2, self.rounds // 5):
            progress.stage = DemoStage.RETURNED
            self.report(f"starting {VICTIM} again")
            self.start_peer(VICTIM)

    def member(self, status: MasterStatus, name: str) -> MemberRow | None:
        return next((m for m in status.members if m.name == name), None)

    # ------------------------------------------------------------ output

    def report(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.began_s:6.1f} s[/dim]  {text}")

    def show(self, status: MasterStatus) -> None:
        progress = self.progress
        losses = [m.loss for m in status.members if m.loss is not None and m.role == "contributor"]
        rate = sum(m.tokens_per_s for m in status.members)
        line = (
            f"round {progress.committed:2d}/{self.rounds}  {status.state:<24.24}  "
            f"loss {sum(losses) / len(losses) if losses else float('nan'):.3f}  "
            f"{rate:6.0f} tokens/s  {len(status.members)} members  "
            f"{sum(progress.sent_bytes.values()) / 1e6:7.1f} MB sent"
        )
        mark = f"{progress.committed} {status.state}"
        if mark != progress.line:
            progress.line, self.moved_s = mark, time.monotonic()
            self.report(line)

    def verdict(self, status: MasterStatus) -> dict[str, Any]:
        """Return the demo's verdict: every claim with the observation behind it."""
        progress = self.progress
        final = max(progress.versions.values(), default=-1)
        digests = {name: progress.digests[name] for name in sorted(progress.digests)}
        expected = {*CONTRIBUTORS, SPARE}
        equal = set(digests) == expected and len(set(digests.values())) == 1
        lost = sum(progress.committed - progress.versions.get(name, 0) for name in expected)
        loss_end = max(progress.loss_end.values(), default=None)
        model_bytes = FLOAT_BYTES * status.value_count
        n = len(CONTRIBUTORS)
        verdict = {
            "ok": False,
            "loss_start": progress.loss_start,
            "loss_end": loss_end,
            "rounds_committed": progress.committed,
            "rounds_lost": lost,
            "digests": digests,
            "digests_equal": equal,
            "final_version": final,
            "bytes_sent": sum(progress.sent_bytes.values()),
            # Ring all-reduce of float32 gradients at every inner step, summed over all peers.
            "bytes_data_parallel": progress.committed * SYNC_EVERY * 2 * (n - 1) * model_bytes,
            "killed": VICTIM,
            "kill_round": progress.kill_round,
            "kill_to_commit_s": progress.kill_to_commit_s,
            "promotion_state_bytes": progress.promotion_state_bytes,
            "returned_in_sync": progress.returned_in_sync,
            "seconds": time.monotonic() - self.began_s,
        }
        verdict["ok"] = (
            progress.loss_start is not None
            and loss_end is not None
            and loss_end < progress.loss_start
            and equal
            and lost == 0
            and progress.committed == self.rounds
            and progress.kill_to_commit_s is not None
            and progress.promotion_state_bytes == 0
            and progress.returned_in_sync
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
            ("digests", _compared(verdict)),
        ]
        self.console.print()
        for label, value in rows:
            self.console.print(f"  {label:<26} {value}")
        for name, digest in verdict["digests"].items():
            self.console.print(f"    {name:<24} {digest[:32]}")
        word = "[green]ok[/green]" if verdict["ok"] else "[red]FAILED[/red]"
        self.console.print(f"  {'verdict':<26} {word} after {verdict['seconds']:.0f} s")


def _compared(verdict: Mapping[str, Any]) -> str:
    """Return what the peers' digests say about their states."""
    if verdict["digests_equal"]:
        return "all equal"
    if len(verdict["digests"]) <= len(CONTRIBUTORS):
        return f"known of {len(verdict['digests'])} of {len(CONTRIBUTORS) + 1} peers only"
    return "DIFFERENT"


def _folder(keep: Path | None) -> AbstractContextManager[str | Path]:
    if keep is None:
        return tempfile.TemporaryDirectory(prefix="holdfast-demo-", ignore_cleanup_errors=True)
    if keep.exists() and any(keep.iterdir()):
        raise UserError(f"{keep} is not empty", exit_code=ExitCode.USAGE, hint="name a new folder")
    keep.mkdir(parents=True, exist_ok=True)
    return nullcontext(keep.resolve())


def run_demo(json_path: Path | None, rounds: int, keep: Path | None) -> int:
    """Run the demo and return its exit status, which is 0 only if every claim holds."""
    console = Console(highlight=False, soft_wrap=True)
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"the demo trains with torch, which {sys.executable} does not have",
            exit_code=ExitCode.CONFIG,
            hint="install it: pip install torch (or: pip install 'holdfast[train]')",
        )
    interrupt_on_signals()
    with _folder(keep) as folder:
        demo = Demo(Path(folder), rounds, console)
        try:
            verdict = demo.run()
        finally:
            demo.fleet.stop()
        demo.show_verdict(verdict)
        if json_path is not None:
            json_path.write_text(json.dumps(verdict, indent=2) + "\n")
        return 0 if verdict["ok"] else 1
