"""torch's gloo beside a measurement: a process of each rank that waits for its turns.

The process (this module as a command) waits on standard input for its turns, ``begin``, then
``reduce`` again and again, and answers each with a line of JSON. Between turns it does nothing, so
that it disturbs nobody's measurement. The sum is made in place, on memory that has been used
before, which is the best case for gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from benchmarks.report import ROOT, BenchError

if TYPE_CHECKING:
    import torch  # only the process itself imports it

TIMEOUT = timedelta(minutes=10)
CHECKED_VALUES = 2**16


class GlooWorker:
    """The process of one rank.

    Args:
      popen: as ``subprocess.Popen``; decides where it runs.
      arguments: ``rank`` of ``peers``, ``master`` and ``port`` of rank 0, the ``interface`` to use,
        and how many ``values`` to add up.
    """

    def __init__(self, popen: Callable[..., subprocess.Popen[Any]], **arguments: Any) -> None:
        self._process = popen(
            [sys.executable, "-m", "benchmarks.gloo", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def say(self, word: str) -> None:
        """Tell it to ``begin``, or to ``reduce`` once."""
        self._to.write(word + "\n")
        self._to.flush()

    def hear(self) -> dict[str, Any]:
        """Wait until it has done so, and return what came of it."""
        line = self._from.readline()
        if not line:
            raise BenchError("a gloo worker ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def turn(self, word: str) -> dict[str, Any]:
        self.say(word)
        return self.hear()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# ---------------------------------------------------------------- the process


def begin(arguments: dict[str, Any]) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = arguments["interface"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments['master']}:{arguments['port']}",
        rank=arguments["rank"],
        world_size=arguments["peers"],
        timeout=TIMEOUT,
    )


def reduce(
    values: torch.Tensor, initial: torch.Tensor, arguments: dict[str, Any]
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    values.copy_(initial)
    cpu_before_s = time.process_time()
    started_s = time.monotonic()
    dist.all_reduce(values)
    took_s = time.monotonic() - started_s
    cpu_s = time.process_time() - cpu_before_s
    scale = sum(range(1, arguments["peers"] + 1)) / (arguments["rank"] + 1)
    wanted = initial[:CHECKED_VALUES] * scale
    error = torch.linalg.norm(values[:CHECKED_VALUES] - wanted) / torch.linalg.norm(wanted)
    return {"s": took_s, "cpu_s": cpu_s, "error": float(error)}


def main() -> None:
    import torch

    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(arguments["values"], generator=generator) * (arguments["rank"] + 1)
    values = torch.empty_like(initial)
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if line.strip() == "begin":
            begin(arguments)
        else:
            answer = reduce(values, initial, arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
