"""Copies between the model's devices and the host's memory that stall neither.

Tensors in the host's memory are not copied at all. To and from a GPU everything goes through pinned
memory on a side stream, beside the stream that computes, and an event marks its arrival:

    down    side stream: wait for the work queued so far, device -> pinned, event
    up      pageable -> pinned, side stream: pinned -> device, event

So a transfer is begun at one step and ended at a later one, and the trainer's steps go on in
between. Work on the host's memory that belongs to such a transfer (a hundred milliseconds for 50
million values) is done by a thread, so that the trainer's own thread can queue work for the GPU
meanwhile: *work beside*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


class CudaCopier:
    """Copies by pinned memory and one side stream for each GPU, and one thread for work beside."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: ThreadPoolExecutor | None = None

    def defers(self, tensor: torch.Tensor) -> bool:
        """Return whether ``down`` reads the tensor later, so that it must not change until then."""
        return tensor.device.type == "cuda"

    def down(self, parts: Sequence[torch.Tensor]) -> Transfer:
        """Begin to copy tensors to the host; those that it ``defers`` must not change meanwhile."""
        hosts: list[torch.Tensor] = []
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for part in parts:
            if part.device.type != "cuda":
                hosts.append(part.cpu())
                continue
            stream = streams.get(part.device)
            if stream is None:
                streams[part.device] = stream = self._stream(part.device)
                stream.wait_stream(torch.cuda.current_stream(part.device))
            host = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
            with torch.cuda.stream(stream):
                host.copy_(part, non_blocking=True)
            part.record_stream(stream)  # its memory is not reused before the copy has read it
            hosts.append(host)
        return Transfer(hosts, streams, to_host=True)

    def up(self, parts: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> Transfer:
        """Begin to copy host tensors to devices; they must not change meanwhile."""
        sent: list[torch.Tensor] = []
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for part, device in zip(parts, devices, strict=True):
            if device.type != "cuda":
                sent.append(part.to(device))
                continue
            streams[device] = stream = self._stream(device)
            pinned = part.pin_memory()
            with torch.cuda.stream(stream):
                sent.append(pinned.to(device, non_blocking=True))
        return Transfer(sent, streams, to_host=False)

    def beside(self, work: Callable[[], Result]) -> WorkBeside[Result]:
        """Begin work in the thread, in the order of the calls. It must not touch the model."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-copier")
        return WorkBeside(self._thread.submit(work))

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class Transfer:
    """Tensors being copied, in the order in which they were given.

    It is over once the streams have done the work that was queued at its construction.

    Attributes:
      parts: the copies; not to be used before ``wait`` was called.
    """

    def __init__(
        self,
        parts: list[torch.Tensor],
        streams: dict[torch.device, torch.cuda.Stream],
        *,
        to_host: bool,
    ) -> None:
        self.parts = parts
        self._events = {device: stream.record_event() for device, stream in streams.items()}
        self._to_host = to_host

    def ready(self) -> bool:
        """Return whether the copies have arrived, so that ``wait`` returns at once."""
        return all(event.query() for event in self._events.values())

    def wait(self) -> None:
        """Order all later uses of ``parts`` after their arrival.

        This blocks for copies to the host; for copies to a GPU its computing stream waits.
        """
        if self._to_host:
            for event in self._events.values():
                event.synchronize()
            return
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)
        for part in self.parts:
            if part.device in self._events:  # its memory was made on the side stream
                part.record_stream(torch.cuda.current_stream(part.device))

    def drop(self) -> None:
        """Nobody will use ``parts``."""


class WorkBeside(Generic[Result]):
    """Work that another thread does; has the same methods as ``Transfer``."""

    def __init__(self, future: Future[Result]) -> None:
        self._future = future

    @property
    def result(self) -> Result:
        """What the work returned, only after ``wait``; raises what the work raised."""
        return self._future.result(timeout=0)

    def ready(self) -> bool:
        """Return whether ``wait`` returns at once."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the work is done."""
        wait([self._future])

    def drop(self) -> None:
        """Wait until the memory that the work uses is free, whatever its outcome."""
        wait([self._future])
