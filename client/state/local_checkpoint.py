"""The trainer's local state on disk: its optimizer's state, and its random number generators.

    trainer.safetensors    tensors of the optimizer's state and of generators; as metadata, in JSON,
                           the rest, the step, and the shapes of the parameters

Written when the daemon asks for it, with each checkpoint: copied at the step boundary, then written
by a thread under a temporary name, and renamed at the end. The optimizer's settings (above all its
rate) are not stored: the script sets them. Nothing is unpickled.
"""

from __future__ import annotations

import json
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...protocol.durable_files import put_in_place
from ...protocol.messages import RankPart
from .inner_optimizer import has_state, local_optimizer
from .tensors import box_of, is_sharded, local_part

FORMAT = 1
KEY = "holdfast.trainer"  # of the JSON, among the file's metadata

# The errors of reading and interpreting a file that is damaged or not of this format.
_UNREADABLE = (
    OSError,
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
)

Tensors = dict[str, torch.Tensor]


def rank_path(path: Path, part: RankPart) -> Path:
    """Return where a rank keeps its state: another number of ranks has other parts."""
    if part.world_size == 1:
        return path
    return path.with_name(f"{path.stem}-{part.rank}-of-{part.world_size}{path.suffix}")


class LocalCheckpoint:
    """Writes and restores the local state.

    Args:
      optimizer: the script's; None: only the generators are stored, which is said once.
    """

    def __init__(self, path: Path, optimizer: torch.optim.Optimizer | None) -> None:
        self._path = path
        self._optimizer = local_optimizer(optimizer)
        if optimizer is None:
            _say_not_kept("pass the optimizer to holdfast.attach")
        elif self._optimizer is optimizer and hasattr(optimizer, "consolidate_state_dict"):
            _say_not_kept("ZeroRedundancyOptimizer hides it with overlap_with_ddp=True")
        self._writer: threading.Thread | None = None

    # ------------------------------------------------------------ keeping

    def keep(self, step: int) -> None:
        """Copy the state now and write it in a thread, unless an earlier one is being written."""
        if self._writer is not None and self._writer.is_alive():
            return
        try:
            tensors, figures = self._collect()
        except _UNREADABLE as error:
            _say_not_kept(str(error))
            return
        text = json.dumps({"format": FORMAT, "step": step, **figures})
        self._writer = threading.Thread(
            target=self._write, args=(tensors, text), name="holdfast-own-state", daemon=True
        )
        self._writer.start()

    def close(self) -> None:
        """Wait until a state that is being written is on disk."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, tensors: Tensors, text: str) -> None:
        """Write the file whole or not at all, with mode 0600."""
        scratch = self._path.with_name(f"{self._path.name}.part")
        try:
            save_file(tensors, scratch, metadata={KEY: text})
            scratch.chmod(0o600)
            put_in_place(scratch, self._path)
        except _UNREADABLE as error:
            warnings.warn(f"{self._path} cannot be written: {error}", stacklevel=2)

    def _collect(self) -> tuple[Tensors, dict[str, Any]]:
        tensors: Tensors = {"random.torch": torch.get_rng_state()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for number, state in enumerate(torch.cuda.get_rng_state_all()):
                tensors[f"random.cuda.{number}"] = state
        version, numbers, gauss = random.getstate()
        kind, words, place, has_gauss, cached = np.random.get_state(legacy=True)
        tensors["random.numpy"] = torch.from_numpy(words.astype(np.int64))  # type: ignore[union-attr]
        figures: dict[str, Any] = {
            "python": [version, list(numbers), gauss],
            "numpy": [kind, int(place), int(has_gauss), float(cached)],
            "shapes": self._shapes(),
            "state": {},
        }
        if self._optimizer is not None:
            for index, entries in self._optimizer.state_dict()["state"].items():
                figures["state"][str(int(index))] = {
                    name: _flatten(f"optimizer.{index}.{name}", value, tensors)
                    for name, value in entries.items()
                }
        return tensors, figures

    def _shapes(self) -> list[list[int]]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [list(_place(parameter)) for group in groups for parameter in group["params"]]

    # ------------------------------------------------------------ restoring

    def restore(self, step_limit: int) -> bool:
        """Restore optimizer and generators; return whether the optimizer has a state now.

        A state that the script has loaded itself stays. A file that is damaged, of another
        optimizer, or of a later step than the run's limit is ignored with a warning: up to there
        the trainer goes while a checkpoint is written, so that this one was kept with another.
        """
        if not self._path.exists() or (self._optimizer is not None and has_state(self._optimizer)):
            return False
        try:
            with safe_open(self._path, framework="pt") as file:
                figures = json.loads((file.metadata() or {})[KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if figures["format"] != FORMAT:
                raise ValueError(f"format {figures['format']}")
            if figures["step"] > step_limit:
                raise ValueError(
                    f"it is of step {figures['step']}, and the run goes to {step_limit} now"
                )
            if figures["shapes"] != self._shapes():
                raise ValueError("the optimizer trains tensors of other shapes")
            self._restore_optimizer(figures["state"], tensors)
            _restore_generators(figures, tensors)
        except _UNREADABLE as error:
            warnings.warn(f"{self._path} is not used: {error}", stacklevel=2)
            return False
        return bool(figures["state"])

    def _restore_optimizer(self, state: dict[str, Any], tensors: Tensors) -> None:
        if self._optimizer is None or not state:
            return
        groups = self._optimizer.state_dict()["param_groups"]
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        entries = {
            int(index): {
                name: _unflatten(value, tensors, parameters[int(index)])
                for name, value in flat.items()
            }
            for index, flat in state.items()
        }
        self._optimizer.load_state_dict({"state": entries, "param_groups": groups})
        # Torch gives tensors the parameter's dtype: others lose digits.
        for index, values in entries.items():
            loaded = self._optimizer.state[parameters[index]]
            for name, value in loaded.items():
                if isinstance(value, torch.Tensor):
                    loaded[name] = values[name].to(value.device)


def _place(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return a parameter's shape; of a sharded one the start and the shape of the part here."""
    box = box_of("", parameter)
    return tuple(parameter.shape) if box is None else (*box.start, *box.shape)


def _as_part(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a state's tensor, sharded as its parameter is if it has the shape of the part here."""
    if not is_sharded(parameter) or value.shape != local_part(parameter.detach()).shape:
        return value
    from torch.distributed.tensor import DTensor  # only scripts that have made one need it

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _say_not_kept(why: str) -> None:
    warnings.warn(f"the optimizer's state is not kept: {why}", stacklevel=3)


def _flatten(key: str, value: object, tensors: Tensors) -> object:
    """Return a value with each tensor replaced by its name; the tensors go to ``tensors``.

    Raises:
      TypeError: it holds a value that is neither a tensor nor a JSON value.
    """
    if isinstance(value, torch.Tensor):
        tensors[key] = local_part(value.detach()).to("cpu", copy=True).contiguous()
        return {"tensor": key}
    if isinstance(value, list):
        return [_flatten(f"{key}.{place}", each, tensors) for place, each in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{key!r} is a {type(value).__name__}")


def _unflatten(value: Any, tensors: Tensors, parameter: torch.Tensor) -> Any:
    """Return the value of which ``_flatten`` made this one."""
    if isinstance(value, dict):
        # Copied: BLAS adds up in another order where memory is not aligned, as the file's is.
        return _as_part(tensors[value["tensor"]].clone(), parameter)
    if isinstance(value, list):
        return [_unflatten(each, tensors, parameter) for each in value]
    return value


def _restore_generators(figures: dict[str, Any], tensors: Tensors) -> None:
    version, numbers, gauss = figures["python"]
    kind, place, has_gauss, cached = figures["numpy"]
    words = tensors["random.numpy"].numpy().astype(np.uint32)
    torch.set_rng_state(tensors["random.torch"])
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state((kind, words, place, has_gauss, cached))
    states = [tensors[name] for name in sorted(tensors) if name.startswith("random.cuda.")]
    if states and torch.cuda.is_available() and len(states) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states)
