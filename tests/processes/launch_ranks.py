"""launch_ranks.py COUNT SCRIPT ...: run a script as several ranks, as torchrun does, on the
loopback alone.

torchrun's rendezvous listens on all addresses of the machine; here the ranks meet in a file, whose
URL is in the environment and replaces "{meeting}" in the arguments. As with torchrun, all end when
one has failed, and the status is its own.

The ranks are forks of a process that has imported torch: that takes three seconds of a core, which
each rank would otherwise spend.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shutil
import signal
import sys
import tempfile
from pathlib import Path

# All that ranks import, also what torch imports late: its optimizers need ``torch._dynamo``.
IMPORTED = (
    "holdfast.client.attach",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


def be_rank(rank: int, command: list[str]) -> None:
    """Run the script in this process, a fork, as if it had been started."""
    os.environ["RANK"] = str(rank)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


def status_of(ranks: set[int]) -> int:
    """Wait for the first rank that fails, or for all; return the exit status. ``ranks`` are then
    those that run.
    """
    while ranks:
        pid, status = os.waitpid(-1, 0)
        ranks.discard(pid)
        if status:
            return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
    return 0


def main() -> int:
    count, command = int(sys.argv[1]), sys.argv[2:]
    for name in IMPORTED:
        importlib.import_module(name)
    folder = Path(tempfile.mkdtemp())
    meeting = (folder / "meeting").as_uri()
    command = [each.replace("{meeting}", meeting) for each in command]
    os.environ.update(WORLD_SIZE=str(count), GLOO_SOCKET_IFNAME="lo", RANKS_MEET_AT=meeting)
    ranks: set[int] = set()
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            be_rank(rank, command)
            return 0
        ranks.add(pid)
    try:
        return status_of(ranks)
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
