"""Copies between devices that end when a test says so.

This is the seam that production puts CUDA streams into: what a copier is given must stay as it is
until the copy ends, and what it returns is not there before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.client.copier import CudaCopier, Transfer


class Slow(CudaCopier):
    """A copier whose transfers end when the test ends them, or when they are waited for."""

    def __init__(self) -> None:
        self.under_way: list[Late] = []
        self.waited_count = 0

    def defers(self, tensor: torch.Tensor) -> bool:
        return True

    def down(self, parts: Sequence[torch.Tensor]) -> Late:
        return self._begin(parts)

    def up(self, parts: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> Late:
        assert len(parts) == len(devices)
        return self._begin(parts)

    def end(self) -> None:
        """Let all transfers arrive."""
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
