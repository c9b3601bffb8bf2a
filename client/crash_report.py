"""What a training script says before it dies of an exception, so that its daemon can tell why.

The exception goes its way: whatever handled it before us handles it after us.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from ..protocol.messages import FailureKind
from ..protocol.text import escaped

REASON_CHARS_MAX = 300  # of an exception's text; some carry a whole report
CAUSES_MAX = 8  # of an exception, looked through for what began it

# What torch says where it has no class of its own; the classes are derived from RuntimeError too.
_CUDA_WORDS = ("CUDA error", "cudaError", "CUBLAS_STATUS_", "cuDNN error", "CUDNN_STATUS_")
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")

Say = Callable[[FailureKind, str], None]


class CrashReport:
    """Reports the exception that ends this process, by ``sys.excepthook``.

    Args:
      say: sends kind and text to the daemon; must not raise.
    """

    def __init__(self, say: Say) -> None:
        self._say: Say | None = say
        self._before = sys.excepthook
        sys.excepthook = self._hook

    def withdraw(self) -> None:
        """From now on say nothing. Harmless twice."""
        self._say = None
        if sys.excepthook == self._hook:  # else somebody else's leads to ours
            sys.excepthook = self._before

    def report(self, error: BaseException) -> None:
        """Say once what is wrong, if this is a failure and not somebody's wish to stop."""
        say, self._say = self._say, None
        if say is not None and isinstance(error, Exception):
            say(kind_of(error), text_of(error))

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.report(error)
        self._before(kind, error, trace)


def kind_of(error: BaseException) -> FailureKind:
    """Memory, CUDA, or anything else; a wrapped exception counts as what it was raised from."""
    for each in _causes(error):
        text = str(each) if isinstance(each, RuntimeError) else ""
        if isinstance(each, MemoryError | torch.OutOfMemoryError):
            return FailureKind.MEMORY
        if any(words in text for words in _MEMORY_WORDS):
            return FailureKind.MEMORY
        if isinstance(each, torch.AcceleratorError) or any(words in text for words in _CUDA_WORDS):
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
    """Type and message on one line. Works for exceptions that cannot even be printed."""
    text = escaped(" ".join("".join(traceback.format_exception_only(error)).split()))
    return text if len(text) <= REASON_CHARS_MAX else text[: REASON_CHARS_MAX - 1] + "…"
