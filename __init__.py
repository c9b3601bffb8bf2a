"""holdfast: one model, trained together by machines that are not one cluster.

A training script needs ``attach`` and the ``Run`` that it returns. They import torch, which the daemon
must never do, so they are imported at their first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client.attach_errors import AttachRefused, DaemonGone, ModelError, NoDaemonError
    from .client.callbacks import Callback, TensorBoard, Wandb
    from .client.hook import Run, attach

__version__ = "0.1.0"

__all__ = [
    "AttachRefused",
    "Callback",
    "DaemonGone",
    "ModelError",
    "NoDaemonError",
    "Run",
    "TensorBoard",
    "Wandb",
    "__version__",
    "attach",
]


def __getattr__(name: str) -> object:
    if name in ("Run", "attach"):
        from .client import hook

        return getattr(hook, name)
    if name in ("Callback", "TensorBoard", "Wandb"):
        from .client import callbacks

        return getattr(callbacks, name)
    if name in __all__:
        from .client import attach_errors

        return getattr(attach_errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
