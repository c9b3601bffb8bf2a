"""holdfast: one model, trained together by machines that are not one cluster.

    run = holdfast.attach(model, optimizer)     # the model holds the run's weights from here on
    while not run.finished:
        ...                                     # your training step
        run.step(loss=loss.item(), tokens=n)    # may wait, may change the weights
    run.close()

``attach`` and the ``Run`` that it returns are all that a training script needs. They import torch,
which the daemon must never do, so they are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client.attach import attach
    from .client.attach_errors import (
        AttachRefused,
        DaemonGone,
        MisuseError,
        ModelError,
        NoDaemonError,
    )
    from .client.callbacks import Callback, Merge, Step, TensorBoard, Wandb
    from .client.frameworks.accelerate_run import AccelerateRun as AccelerateRun
    from .client.frameworks.lightning_callback import LightningCallback as LightningCallback
    from .client.frameworks.transformers_callback import (
        TransformersCallback as TransformersCallback,
    )
    from .client.hook import Run

__version__ = "0.1.0"

__all__ = [
    "AttachRefused",
    "Callback",
    "DaemonGone",
    "Merge",
    "MisuseError",
    "ModelError",
    "NoDaemonError",
    "Run",
    "Step",
    "TensorBoard",
    "Wandb",
    "__version__",
    "attach",
]

_MODULES = {  # the module in ``client`` that defines a name
    "AttachRefused": "attach_errors",
    "Callback": "callbacks",
    "DaemonGone": "attach_errors",
    "Merge": "callbacks",
    "MisuseError": "attach_errors",
    "ModelError": "attach_errors",
    "NoDaemonError": "attach_errors",
    "Run": "hook",
    "Step": "callbacks",
    "TensorBoard": "callbacks",
    "Wandb": "callbacks",
    "attach": "attach",
    # Not in ``__all__``: each imports its framework, which need not be installed.
    "AccelerateRun": "frameworks.accelerate_run",
    "LightningCallback": "frameworks.lightning_callback",
    "TransformersCallback": "frameworks.transformers_callback",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".client.{_MODULES[name]}", __name__)
    return getattr(module, name)


def __dir__() -> list[str]:
    return [
        *_MODULES,
        "__all__",
        "__version__",
        *(name for name in globals() if name.startswith("__")),
    ]
