"""What one trainer's optimizer has gathered, for another one whose optimizer knows nothing of the run.

    BEGINNING.given    written when the daemon asks for it: copied at a step boundary, put into 8 bits
                       and written by a thread beside the steps that follow
    BEGINNING.taken    another trainer's, from the daemon: read and taken over at a step boundary

Both are safetensors; nothing is unpickled. State is told by parameters' names. Of each parameter, what
is known to be a moment goes in 8 bits (``eight_bits``); what is small, as step counters are, and numbers
go as they are. A parameter with anything else in its state is left out, and begins anew at whoever takes
the rest. On a GPU the 8 bits are made there, and copied beside the training stream.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from . import trainer_file
from .copier import Streams, Transfer
from .eight_bits import Coded, decode, encode
from .tensors import SharedTensor

FORMAT = 1
KEY = "holdfast.moments"

# By the names that torch's optimizers, and others after them, give to them.
SIGNED = frozenset({"exp_avg", "momentum_buffer", "grad_avg"})
POSITIVE = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta", "exp_avg_diff_sq"}
)
PLAIN_VALUES_MAX = 4_096  # of a tensor that goes as it is: they are few bytes, and exact
# Settings that change how an optimizer computes, and not what it keeps.
_MANNERS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})

Background = Callable[[Callable[[], None]], None]


def in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="holdfast-moments", daemon=True).start()


class MomentsError(Exception):
    """There is nothing to give, or what came is not for this optimizer; the text says why."""


class Moments:
    """Gives and takes the state of one optimizer.

    Args:
      beginning: of both files' paths.
    """

    def __init__(
        self,
        beginning: str,
        optimizer: torch.optim.Optimizer,
        tensors: Sequence[SharedTensor],
        background: Background = in_a_thread,
    ) -> None:
        self._given, self._taken = Path(f"{beginning}.given"), Path(f"{beginning}.taken")
        self._optimizer = optimizer
        self._tensors = tensors
        self._background = background
        self._streams = Streams()
        self._writing = False

    # ------------------------------------------------------------ giving

    def give(self, tell: Callable[[str], None]) -> None:
        """Copy it now; the rest is the background's. One that is still being written will do.

        Args:
          tell: is told in the background that the file is there (empty), or why it is not.

        Raises:
          MomentsError: there is nothing to copy.
        """
        if self._writing:
            return
        copied = _copy(self._optimizer, self._parameters(), self._streams)
        self._writing = True
        self._background(lambda: self._write(copied, tell))

    def _write(self, copied: _Copied, tell: Callable[[str], None]) -> None:
        try:
            tensors, text = copied.coded(), json.dumps(copied.said)
            trainer_file.write(self._given, KEY, text, tensors, durable=False)
            reason = ""
        except MomentsError as error:
            reason = str(error)
        except trainer_file.UNWRITABLE as error:
            reason = f"it cannot be written: {error}"
        self._writing = False
        tell(reason)

    # ------------------------------------------------------------ taking

    def take(self) -> None:
        """The optimizer goes on from what lies there; its settings stay.

        Raises:
          MomentsError: what lies there does not fit, or is damaged. Nothing has changed.
        """
        try:
            with trainer_file.reading(self._taken, KEY) as (said, file):
                entries = self._entries(said, file.get_tensor)
        except MomentsError:
            raise
        except trainer_file.UNREADABLE as error:
            raise MomentsError(f"it cannot be read: {error}") from error
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": entries, "param_groups": groups})

    def _entries(self, said: Any, tensor: Callable[[str], torch.Tensor]) -> dict[int, Any]:
        """By the parameter's number, as ``load_state_dict`` wants it."""
        if said["format"] != FORMAT:
            raise MomentsError(f"it is of format {said['format']}")
        if said["optimizer"] != _kind(self._optimizer):
            raise MomentsError(
                f"it is of the optimizer {_text(said['optimizer'])}, and ours is "
                f"{_text(_kind(self._optimizer))}"
            )
        ours = {each.name: each for each in self._parameters()}
        entries: dict[int, Any] = {}
        for one in said["parameters"]:
            mine = ours.get(one["name"])
            if mine is None or list(mine.parameter.shape) != one["shape"]:
                raise MomentsError(f"our optimizer trains no {one['name']!r} of {one['shape']}")
            entries[mine.index] = {
                name: _value(mine, value, tensor) for name, value in one["state"].items()
            }
        if not entries:
            raise MomentsError("it has nothing in it")
        return entries

    def _parameters(self) -> list[_Parameter]:
        """The model's, of those that the optimizer trains."""
        names = {id(each.holder.get(each.key)): each.spec.name for each in self._tensors}
        groups = self._optimizer.param_groups
        trained = enumerate(parameter for group in groups for parameter in group["params"])
        return [
            _Parameter(index, names[id(parameter)], parameter)
            for index, parameter in trained
            if id(parameter) in names
        ]


@frozen(eq=False)
class _Parameter:
    index: int  # as its optimizer counts
    name: str
    parameter: torch.Tensor


@frozen(eq=False)
class _Waiting:
    """A moment that is still to be coded."""

    key: str
    signed: bool
    values: torch.Tensor


@frozen(eq=False)
class _Copied:
    """All that is to be written: nothing in it changes with the next step.

    Attributes:
      said: what goes as text.
      waiting: copies on the host.
      keys, transfer: what comes from GPUs, coded already where it need be.
    """

    said: dict[str, Any]
    waiting: list[_Waiting]
    keys: list[str]
    transfer: Transfer

    def coded(self) -> dict[str, torch.Tensor]:
        """The file's tensors; raises MomentsError if a value is not what a moment is."""
        self.transfer.wait()
        tensors = dict(zip(self.keys, self.transfer.parts, strict=True))
        for each in self.waiting:
            tensors.update(_named(each.key, encode(each.values, signed=each.signed)))
        for key, tensor in tensors.items():
            if key.endswith(".scales") and not bool(tensor.isfinite().all()):
                raise MomentsError("its optimizer's moments are not finite")
        return tensors


def _copy(
    optimizer: torch.optim.Optimizer, parameters: Sequence[_Parameter], streams: Streams
) -> _Copied:
    state = optimizer.state_dict()["state"]
    told, waiting, parts, keys = [], list[_Waiting](), list[torch.Tensor](), list[str]()
    numbers: Iterator[str] = map(str, range(2**63))
    strange: dict[str, str] = {}

    def entry(one: _Parameter, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key, values = next(numbers), value.detach()
        if values.numel() <= PLAIN_VALUES_MAX:
            parts.append(values.clone(memory_format=torch.contiguous_format))
            keys.append(key)
            return {"tensor": key}
        signed = name in SIGNED
        if streams.defers(values):
            for its, part in _named(key, encode(values, signed=signed)).items():
                keys.append(its)
                parts.append(part)
        else:
            waiting.append(_Waiting(key, signed, values.clone()))
        return {"signed" if signed else "positive": key}

    for one in parameters:
        entries = state.get(one.index) or {}
        unknown = [name for name, value in entries.items() if not _known(name, value, one)]
        if unknown:
            strange[one.name] = unknown[0]
        elif entries:
            told.append(
                {
                    "name": one.name,
                    "shape": list(one.parameter.shape),
                    "state": {name: entry(one, name, value) for name, value in entries.items()},
                }
            )
    if strange:
        name, what = next(iter(strange.items()))
        warnings.warn(
            f"the state of {len(strange)} parameters is not given to joiners, who begin it anew: "
            f"nobody here knows what {what!r} of {name!r} is",
            stacklevel=2,
        )
    if not told:
        raise MomentsError("its optimizer has no state that could be given")
    said = {"format": FORMAT, "optimizer": _kind(optimizer), "parameters": told}
    return _Copied(said, waiting, keys, streams.down(parts))


def _named(key: str, coded: Coded) -> dict[str, torch.Tensor]:
    return {f"{key}.codes": coded.codes, f"{key}.scales": coded.scales}


def _known(name: str, value: Any, one: _Parameter) -> bool:
    if not isinstance(value, torch.Tensor):
        return value is None or isinstance(value, bool | int | float | str)
    if value.numel() <= PLAIN_VALUES_MAX:
        return True
    moment = value.is_floating_point() and value.shape == one.parameter.shape
    return moment and name in SIGNED | POSITIVE


def _value(one: _Parameter, said: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if not isinstance(said, dict):
        return said
    ((how, key),) = said.items()
    if how == "tensor":
        value = tensor(key)
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise MomentsError("its values are not finite")
        return _laid_out(value, one.parameter)
    if how not in ("signed", "positive"):
        raise MomentsError(f"it has values in a code {_text(how)}")
    device, signed = one.parameter.device, how == "signed"
    coded = Coded(tensor(f"{key}.codes").to(device), tensor(f"{key}.scales").to(device))
    values = decode(coded, one.parameter.numel(), signed=signed).view(one.parameter.shape)
    return _laid_out(values, one.parameter)


def _laid_out(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In memory as the parameter is, which fused optimizers count on."""
    if values.shape != parameter.shape or values.stride() == parameter.stride():
        return values
    like = torch.empty_like(parameter, dtype=values.dtype, device=values.device)
    return like.copy_(values)


def _kind(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What its state's form follows from: its class, and switches such as ``amsgrad``."""
    switches = {
        name: value
        for name, value in sorted(optimizer.defaults.items())
        if isinstance(value, bool) and name not in _MANNERS
    }
    return [type(optimizer).__name__, switches]


def _text(value: Any) -> str:
    return json.dumps(value)[:100]
