"""holdfast: one model, trained together by machines that are not one cluster.

A training script needs ``attach`` and the ``Run`` that it returns. They import torch, which the daemon
must never do, so they are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client.attach import attach
    from .client.attach_errors import AttachRefused, DaemonGone, ModelError, NoDaemonError
    from .client.callbacks import Callback, TensorBoard, Wandb
    from .client.hook import Run

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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = {"attach": "attach", "Run": "hook"}
    callbacks = dict.fromkeys(("Callback", "TensorBoard", "Wandb"), "callbacks")
    module = (room | callbacks).get(name, "attach_errors")
    return getattr(importlib.import_module(f".client.{module}", __name__), name)
