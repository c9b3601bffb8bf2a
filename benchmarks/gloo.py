"""torch's gloo beside a measurement: a process of each rank that waits for its turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import BenchError

WORKER = Path(__file__).with_name("gloo_worker.py")


class GlooWorker:
    """The process of one rank.

    Args:
      popen: as ``subprocess.Popen``; decides where it runs.
      arguments: see ``gloo_worker``.
    """

    def __init__(self, popen: Callable[..., subprocess.Popen[Any]], **arguments: Any) -> None:
        self._process = popen(
            [sys.executable, str(WORKER), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
