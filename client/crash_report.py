"""Reports to the daemon the exception that ends a training script.

The exception is not swallowed: the previous ``sys.excepthook`` handles it afterwards.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from ..protocol.messages import FailureKind
from ..protocol.text import escaped

REASON_CHARS_MAX = 300  # of an exception's text; some contain a whole report
CAUSES_MAX = 8  # causes of an exception that are searched for a known kind

# Texts of torch's errors without a class of their own; its classes derive from RuntimeError.
_CUDA_WORDS = ("CUDA error", "cudaError", "CUBLAS_STATUS_", "cuDNN error", "CUDNN_STATUS_")
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")

Send = Callable[[FailureKind, str], None]


class CrashReport:
    """Reports the exception that ends this process, by ``sys.excepthook``.

    Args:
      send: sends kind and text to the daemon; must not raise.
    """

    def __init__(self, send: Send) -> None:
        self._send: Send | None = send
        self._before = sys.excepthook
        sys.excepthook = self._hook

    def withdraw(self) -> None:
        """Report nothing from now on. Harmless twice."""
        self._send = None
        if sys.excepthook == self._hook:  # else a later hook calls this one
            sys.excepthook = self._before

    def report(self, error: BaseException) -> None:
        """Send an exception, once, unless it is a request to stop (Ctrl+C, ``sys.exit``)."""
        send, self._send = self._send, None
        if send is not None and isinstance(error, Exception):
            send(kind_of(error), text_of(error))

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.report(error)
        self._before(kind, error, trace)


def kind_of(error: BaseException) -> FailureKind:
    """Return an exception's kind: memory, CUDA, or crash; its causes count too."""
    memory = (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError))  # since torch 2.5
    cuda = getattr(torch, "AcceleratorError", ())  # since torch 2.8
    for each in _causes(error):
        text = str(each) if isinstance(each, RuntimeError) else ""
        if isinstance(each, memory):
            return FailureKind.MEMORY
        if any(words in text for words in _MEMORY_WORDS):
            return FailureKind.MEMORY
        if isinstance(each, cuda) or any(words in text for words in _CUDA_WORDS):
            return FailureKind.CUDA
    return FailureKind.CRASH


def _causes(error: BaseException) -> Iterator[BaseException]:
    each: BaseException | None = error
    for _cause in range(CAUSES_MAX):
        if each is None:
            return
        yield each
        each = each.__cause__


def text_of(error: BaseException) -> str:
    """Return type and message on one line, even of exceptions that cannot be printed."""
    text = escaped(" ".join("".join(traceback.format_exception_only(error)).split()))
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"
