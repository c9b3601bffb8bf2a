"""The cause of a trainer's death, from its exit status and the kernel's counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.daemon.peer.trainer.failures import failure_of, memory_kills
from holdfast.protocol.messages import FailureKind


@pytest.mark.parametrize(
    ("status", "kernel_killed", "kind", "reason"),
    [
        (1, False, FailureKind.CRASH, "ended with exit status 1"),
        (1, True, FailureKind.CRASH, "ended with exit status 1"),
        (128, False, FailureKind.CRASH, "ended with exit status 128"),
        (255, False, FailureKind.CRASH, "ended with exit status 255"),
        (-11, False, FailureKind.CRASH, "was killed by SIGSEGV"),
        (139, False, FailureKind.CRASH, "was killed by SIGSEGV (exit status 139)"),
        (-9, False, FailureKind.CRASH, "was killed by SIGKILL (out of memory?)"),
        (-9, True, FailureKind.MEMORY, "was killed by the kernel: out of memory"),
        (
            137,
            True,
            FailureKind.MEMORY,
            "was killed by the kernel: out of memory (exit status 137)",
        ),
        (-60, False, FailureKind.CRASH, "was killed by signal 60"),
    ],
)
def test_a_status_is_put_into_words(
    status: int, kernel_killed: bool, kind: FailureKind, reason: str
) -> None:
    failure = failure_of(status, kernel_killed=kernel_killed)
    assert (failure.kind, failure.reason) == (kind, reason)


def test_the_kernels_count_of_both_kinds_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    assert memory_kills(own, tmp_path) == 0, "nothing is known"
    own.write_text("0::/user/job\n")
    assert memory_kills(own, tmp_path) == 0
    events = tmp_path / "user/job/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("low 0\nhigh 3\nmax 12\noom 2\noom_kill 7\n")
    assert memory_kills(own, tmp_path) == 7
    own.write_text("4:cpu,cpuacct:/a\n3:memory:/b\n")
    control = tmp_path / "memory/b/memory.oom_control"
    control.parent.mkdir(parents=True)
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert memory_kills(own, tmp_path) == 2
    control.write_text("what is this")
    assert memory_kills(own, tmp_path) == 0
