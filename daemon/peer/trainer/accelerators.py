"""The GPUs that a training command may use: those that NVML finds healthy.

A GPU that has failed answers with an error, or is not there any more. NVML (NVIDIA Management
Library) is asked through ``nvidia-ml-py``, NVIDIA's own binding; on a machine without its driver
there are no GPUs. The variable ``HOLDFAST_GPUS`` names a file that is read instead, for machines
without NVML and for tests: a line for each GPU, its index for ``CUDA_VISIBLE_DEVICES`` and what is
wrong with it, if anything.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import trio
from attrs import define, field, frozen

log = logging.getLogger("holdfast.supervisor")

FILE_VARIABLE = "HOLDFAST_GPUS"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
COUNT_PLACEHOLDER = "{gpus}"  # in a training command
GPUS_LOOK_S = 2.0  # between two looks at the GPUs, of some milliseconds each


@frozen
class Gpu:
    """A GPU.

    Attributes:
      index: as ``CUDA_VISIBLE_DEVICES`` takes it.
      fault: what is wrong; empty: it is healthy.
    """

    index: str
    fault: str = ""


@frozen
class Gpus:
    """This machine's GPUs, or those of them that its owner has made visible."""

    all: tuple[Gpu, ...] = ()

    @property
    def healthy(self) -> tuple[str, ...]:
        return tuple(gpu.index for gpu in self.all if not gpu.fault)

    def faults(self) -> str:
        """Return what is wrong with which GPU; empty if all are healthy."""
        return "; ".join(f"GPU {gpu.index}: {gpu.fault}" for gpu in self.all if gpu.fault)

    def __str__(self) -> str:
        return f"{len(self.healthy)} of {len(self.all)} GPUs"

    def among(self, seen: Gpus) -> Gpus:
        """Return these with all that were seen before: those that are missing have failed."""
        here = {gpu.index: gpu for gpu in self.all}
        gone = (Gpu(gpu.index, "it is not there any more") for gpu in seen.all)
        return Gpus(tuple({gpu.index: gpu for gpu in (*gone, *here.values())}.values()))


@define(eq=False)
class GpuWatch:
    """This machine's GPUs, as they were seen last.

    Args:
      minimum: the command waits for so many healthy GPUs; 0: the GPUs do not matter.
      show: takes what is known of the GPUs, for people.

    Attributes:
      why_waiting: why the command waits, if too few GPUs are healthy; else empty.
    """

    _minimum: int
    _show: Callable[[str], None]
    why_waiting: str = field(default="", init=False)
    _gpus: Gpus = field(factory=Gpus, init=False)  # all that were seen

    def counts(self) -> tuple[int, int]:
        """Return how many GPUs were healthy, and how many there were, when looked at last."""
        return len(self._gpus.healthy), len(self._gpus.all)

    def environment(self) -> dict[str, str]:
        """Return what hides failed GPUs from the command."""
        return {VISIBLE_VARIABLE: ",".join(self._gpus.healthy)} if self._gpus.faults() else {}

    def filled(self, command: Sequence[str]) -> Sequence[str]:
        """Return the command with the number of healthy GPUs where it asks for it."""
        if not self._minimum:
            return command
        return [each.replace(COUNT_PLACEHOLDER, str(len(self._gpus.healthy))) for each in command]

    async def enough(self) -> None:
        """Wait until as many GPUs are healthy as the command needs."""
        if not self._minimum:
            return
        await self._look()
        while len(self._gpus.healthy) < self._minimum:
            why = f"{self._gpus}, {self._minimum} needed{self._faults()}"
            if why != self.why_waiting:
                log.warning("the training command waits: %s", why)
            self.why_waiting = why
            await trio.sleep(GPUS_LOOK_S)
            await self._look()
        self.why_waiting = ""

    async def change(self) -> str:
        """Wait until another number of GPUs is healthy and return what is so now."""
        if not self._minimum:
            await trio.sleep_forever()
        before = self._gpus.healthy
        while self._gpus.healthy == before:
            await trio.sleep(GPUS_LOOK_S)
            await self._look()
        return f"{self._gpus} are healthy{self._faults()}"

    async def _look(self) -> None:
        self._gpus = (await trio.to_thread.run_sync(look)).among(self._gpus)
        self._show(str(self._gpus) if self._gpus.all else "")

    def _faults(self) -> str:
        return f" ({faults})" if (faults := self._gpus.faults()) else ""


def look(environment: Mapping[str, str] = os.environ) -> Gpus:
    """Look at this machine's GPUs; takes some milliseconds, seconds for the first time."""
    path = environment.get(FILE_VARIABLE)
    found = _from_nvml() if path is None else _from_file(Path(path))
    visible = environment.get(VISIBLE_VARIABLE)
    if visible is None:
        return found
    wanted = {each.strip() for each in visible.split(",")}
    return Gpus(tuple(gpu for gpu in found.all if gpu.index in wanted))


def _from_file(path: Path) -> Gpus:
    gpus = []
    with suppress(OSError):
        for line in path.read_text().splitlines():
            index, _, fault = line.strip().partition(" ")
            if index:
                gpus.append(Gpu(index, fault.strip()))
    return Gpus(tuple(gpus))


def _from_nvml() -> Gpus:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Gpus()
    try:
        count = pynvml.nvmlDeviceGetCount()
        return Gpus(tuple(Gpu(str(index), _fault(index)) for index in range(count)))
    except pynvml.NVMLError:
        return Gpus()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _fault(index: int) -> str:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    except pynvml.NVMLError as error:
        return str(error)
    return ""
