"""Copies between devices, and work beside them, that end when a test says so.

This is the seam that production puts CUDA streams and a thread into: what a copier is given must
stay as it is until the copy ends, and what it returns is not there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch

from holdfast.client.state.copier import CudaCopier, Result, Transfer, WorkBeside
from holdfast.protocol.errors import HoldfastError

Work = Literal["at once", "early", "late"]


class Slow(CudaCopier):
    """A copier whose transfers end when the test ends them, or when they are waited for.

    Args:
      work: when work beside is done: "at once"; or "early" as it begins, but seen only when the
        test ends it; or "late", as it is seen.
    """

    def __init__(self, work: Work = "at once") -> None:
        self.under_way: list[Late | LateWork[Any]] = []
        self.waited_count = 0
        self._work = work

    def defers(self, tensor: torch.Tensor) -> bool:
        return True

    def down(self, parts: Sequence[torch.Tensor]) -> Late:
        return self._begin(parts)

    def up(self, parts: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> Late:
        assert len(parts) == len(devices)
        return self._begin(parts)

    def beside(self, work: Callable[[], Result]) -> LateWork[Result]:
        late = LateWork(work, self)
        if self._work == "at once":
            late.arrive()
            return late
        if self._work == "early":
            late.do()
        self.under_way.append(late)
        return late

    def end(self) -> None:
        """Let all transfers arrive, and all work be done."""
        for late in self.under_way:
            late.arrive()
        self.under_way.clear()

    def _begin(self, parts: Sequence[torch.Tensor]) -> Late:
        late = Late(parts, self)
        self.under_way.append(late)
        return late


class Late(Transfer):
    def __init__(self, given: Sequence[torch.Tensor], copier: Slow) -> None:
        self.parts: list[torch.Tensor] = []
        self._given: Sequence[torch.Tensor] | None = given
        self._copier = copier

    def arrive(self) -> None:
        if self._given is not None:
            self.parts = [each.clone() for each in self._given]
            self._given = None

    def ready(self) -> bool:
        return self._given is None

    def wait(self) -> None:
        if not self.ready():
            self._copier.waited_count += 1
            self.arrive()


class LateWork(WorkBeside[Result]):
    def __init__(self, work: Callable[[], Result], copier: Slow) -> None:
        super().__init__(Future())
        self._work: Callable[[], Result] | None = work
        self._copier = copier
        self._seen = False

    def do(self) -> None:
        if (work := self._work) is None:
            return
        self._work = None
        try:
            self._future.set_result(work())
        except HoldfastError as error:
            self._future.set_exception(error)

    def arrive(self) -> None:
        self.do()
        self._seen = True

    def ready(self) -> bool:
        return self._seen

    def wait(self) -> None:
        if not self._seen:
            self._copier.waited_count += 1
            self.arrive()
        super().wait()

    def drop(self) -> None:
        self.do()  # the thread cannot be stopped
        super().drop()
