"""The model's shared tensors: finding them, reading and writing one.

All parameters and all persistent buffers are shared, each once, in the order and under the names of
``model.state_dict()``. A tensor is looked up in its module at every access, because ``model.to``
and assignments to buffers replace the tensor object. Wrappers (DistributedDataParallel,
DataParallel, torch.compile) are left out of the names, so a peer with two GPUs and a peer with one
declare the same layout. Of a tensor that is sharded over processes (a ``DTensor``) the whole is
declared, and this process reads and writes its part, a box of the whole. A stage of a pipeline
declares all tensors of the whole model, and holds nothing of those of other stages.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import nn

from ...diloco.fragments import BUFFER, COUNTER, PARAMETER
from ...protocol.messages import ModelLayout, TensorBox, TensorSpec
from ..attach_errors import ModelError

Values = NDArray[np.float32] | NDArray[np.int64]
Holder = dict[str, torch.Tensor | None]  # a module's own table of parameters or buffers
Entry = tuple[str, Holder, str, torch.Tensor]  # see ``entries_of``

_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_UNSHARE = "give it memory of its own before holdfast.attach (`.clone()`)"
NOTHING = TensorBox((0,), (0,))  # the part of a tensor that is in other stages alone
_COMPILED = "_orig_mod"  # the one child of a torch.compile wrapper
_PARALLEL = "module"  # the one child of a (Distributed)DataParallel wrapper


@frozen
class SharedTensor:
    """One tensor of the model.

    Attributes:
      spec: its declaration to the run.
      holder: its module's own table of parameters or buffers.
      key: its name in that table.
      box: the part in this process's memory, if it is sharded; None: all of it.
      reshard: makes the module hold parts again, which after a forward pass may hold whole tensors.
      written: called with the module's tensor after its values were overwritten.
    """

    spec: TensorSpec
    holder: Holder
    key: str
    box: TensorBox | None = None
    reshard: Callable[[], None] | None = None
    written: Callable[[torch.Tensor], None] | None = None

    @property
    def absent(self) -> bool:
        """The tensor is in other stages of a pipeline, and not in this process."""
        return self.box is NOTHING

    @property
    def present(self) -> torch.Tensor | None:
        """The module's tensor now, sharded if it was; None if it is gone."""
        tensor = self.holder.get(self.key)
        if self.box is not None and self.reshard is not None and not is_sharded(tensor):
            self.reshard()
            tensor = self.holder.get(self.key)
        return tensor

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self.present
        if tensor is None or tuple(tensor.shape) != self.spec.shape:
            found = "gone" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise ModelError(
                f"tensor {self.spec.name!r} was of shape {self.spec.shape} when the run was "
                f"attached and is now {found}; its shape must not change during a run"
            )
        part = local_part(tensor.detach())
        if tuple(part.shape) != self.shape:
            raise ModelError(
                f"this process held {self.shape} of tensor {self.spec.name!r} when the run was"
                f" attached and now holds {tuple(part.shape)}"
            )
        return part

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what this process holds."""
        return self.spec.shape if self.box is None else self.box.shape

    @property
    def count(self) -> int:
        """The number of elements that this process holds."""
        return math.prod(self.shape)

    @property
    def low_precision(self) -> bool:
        """Float32 values are rounded when they are written into it."""
        return self.tensor.dtype in _LOW_PRECISION

    def read(self) -> NDArray[np.float32]:
        """Return its values on the host, ``(count,)`` float32; may be a view, so do not write."""
        values: NDArray[np.float32] = self.values(copy=False).cpu().numpy()
        return values

    def values(self, *, copy: bool) -> torch.Tensor:
        """Return its values on its device, ``(count,)`` float32; without ``copy`` maybe a view."""
        return self.tensor.to(torch.float32, copy=copy).reshape(-1)

    def precise_values(self) -> torch.Tensor:
        """Return its values as ``values`` without ``copy`` does, in float64 if they are float64."""
        tensor = self.tensor
        precise = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        return tensor.to(precise).reshape(-1)

    def counters(self, *, copy: bool) -> torch.Tensor:
        """Return an integer tensor's ``(count,)`` int64 on its device; without ``copy`` a view."""
        return self.tensor.to(torch.int64, copy=copy).reshape(-1)

    def write(self, values: Values | torch.Tensor) -> None:
        """Overwrite it with ``(count,)`` values, rounded to its dtype (nearest, ties to even)."""
        tensor = self.tensor
        if not isinstance(values, torch.Tensor):
            values = torch.as_tensor(values, device="cpu")
        tensor.copy_(values.view(tensor.shape))
        if self.written is not None and (present := self.present) is not None:
            self.written(present)


def find_shared(model: nn.Module, whole: nn.Module | None = None) -> tuple[SharedTensor, ...]:
    """Find all shared tensors of a model; tied tensors appear once, under their first name.

    Args:
      whole: ``model`` is a stage of this one, of which the tensors' declarations are taken; may be
        on the meta device. Tensors that the stage does not have are ``absent``.

    Raises:
      ModelError: a tensor cannot be shared (it is named), or there is none; or the stage is none of
        the whole model.
    """
    _refuse_flattened(model)
    _name_extra_state(model)
    reshard = _resharding(model)
    if reshard is not None:
        reshard()
    found = tuple(
        SharedTensor(spec, holder, key, box_of(spec.name, tensor), reshard)
        for spec, holder, key, tensor in _distinct(entries_of(model))
    )
    _refuse_overlaps(found)
    if whole is not None:
        found = _placed(found, [spec for spec, *_ in _distinct(entries_of(whole, meta=True))])
    if not found:
        raise ModelError(f"the model ({type(model).__name__}) has no parameters to share")
    return found


def _distinct(entries: Iterable[Entry]) -> list[tuple[TensorSpec, Holder, str, torch.Tensor]]:
    """Return each tensor once, with its declaration, in which its other names are."""
    specs: list[TensorSpec] = []
    found: list[tuple[Holder, str, torch.Tensor]] = []
    seen: dict[object, int] = {}  # a tensor's identity -> its index in ``found``
    for name, holder, key, tensor in entries:
        first = next((seen[each] for each in identities_of(tensor) if each in seen), None)
        if first is None:
            seen.update((each, len(found)) for each in identities_of(tensor))
            specs.append(_spec(name, tensor))
            found.append((holder, key, tensor))
        elif name != specs[first].name:
            specs[first] = evolve(specs[first], aliases=(*specs[first].aliases, name))
    return [(spec, *each) for spec, each in zip(specs, found, strict=True)]


def _placed(held: Sequence[SharedTensor], whole: Sequence[TensorSpec]) -> tuple[SharedTensor, ...]:
    """Return a stage's tensors in the place, and under the names, that the whole model has."""
    places = {name: place for place, spec in enumerate(whole) for name in _names(spec)}
    placed = [SharedTensor(spec, {}, "", NOTHING) for spec in whole]
    for tensor in held:
        name = tensor.spec.name
        found = {places.get(each) for each in _names(tensor.spec)}
        place = found.pop()
        if place is None:
            raise ModelError(
                f"tensor {name!r} of this stage is not in the whole model",
                hint="build the stage such that its tensors keep the whole model's names: layers in"
                " an nn.ModuleDict under their numbers, other stages' modules left out",
            )
        if found or not placed[place].absent:
            raise ModelError(f"tensor {name!r} is tied otherwise in this stage than in the whole")
        spec = whole[place]
        own = evolve(tensor.spec, name=spec.name, aliases=spec.aliases)
        if own != spec:
            raise ModelError(
                f"tensor {name!r} of this stage is a {own.kind} of {own.shape} in {own.dtype}, and"
                f" in the whole model a {spec.kind} of {spec.shape} in {spec.dtype}"
            )
        placed[place] = evolve(tensor, spec=spec)
    return tuple(placed)


def _names(spec: TensorSpec) -> tuple[str, ...]:
    return (spec.name, *spec.aliases)


def layout_of(tensors: tuple[SharedTensor, ...]) -> ModelLayout:
    """Return the layout that the trainer declares to the run."""
    try:
        return ModelLayout(tuple(tensor.spec for tensor in tensors))
    except ValueError as error:
        raise ModelError(f"the model has {len(tensors)} tensors, more than a run takes") from error


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over modules as ``state_dict`` does, under each of their names without wrappers."""
    hidden = {
        f"{path}.{_PARALLEL}" if path else _PARALLEL
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel)
    }
    for path, module in model.named_modules(remove_duplicate=False):
        parts = path.split(".") if path else []
        kept = [
            part
            for depth, part in enumerate(parts, 1)
            if part != _COMPILED and ".".join(parts[:depth]) not in hidden
        ]
        yield ".".join(kept), module


def entries_of(model: nn.Module, *, meta: bool = False) -> Iterator[Entry]:
    """Iterate over all names of tensors to share: name, its module's table, its key, tensor.

    Args:
      meta: take tensors without values, too.
    """
    for prefix, module in _modules(model):
        parameters: Holder = module._parameters  # type: ignore[assignment]
        for holder in (parameters, module._buffers):
            for key, tensor in holder.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    name = f"{prefix}.{key}" if prefix else key
                    _require_plain(name, tensor, meta=meta)
                    yield name, holder, key, tensor


def _refuse_flattened(model: nn.Module) -> None:
    """Refuse FullyShardedDataParallel: its parameters do not have the model's shapes."""
    wrappers = sys.modules.get("torch.distributed.fsdp")  # a script that uses it has imported it
    if wrappers is not None and any(
        isinstance(module, wrappers.FullyShardedDataParallel) for module in model.modules()
    ):
        raise ModelError(
            "the model is wrapped by FullyShardedDataParallel, whose parameters are flattened",
            hint="shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead",
        )


def _name_extra_state(model: nn.Module) -> None:
    for name, module in _modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            warnings.warn(
                f"the extra state of module {name!r} is not shared, and an export lacks it",
                stacklevel=2,
            )


def _require_plain(name: str, tensor: torch.Tensor, *, meta: bool) -> None:
    """Refuse a tensor without dense memory of its own."""
    if nn.parameter.is_lazy(tensor):
        raise ModelError(f"tensor {name!r} has no shape yet: run one batch before attaching")
    if tensor.is_meta and not meta:
        raise ModelError(f"tensor {name!r} is on the meta device and has no values to share")
    if tensor.layout != torch.strided:
        raise ModelError(f"tensor {name!r} is sparse; only dense ones can be shared")


def identities_of(tensor: torch.Tensor) -> Iterator[object]:
    """Yield keys that two names of one tensor share: the object, or the same view of one memory."""
    yield id(tensor)
    part = local_part(tensor.detach())
    if part.numel() and not part.is_meta:
        yield (part.data_ptr(), tuple(part.shape), part.stride(), part.dtype)


def _refuse_overlaps(tensors: Sequence[SharedTensor]) -> None:
    """Refuse memory that is in two tensors, or twice in one: a merge would move it twice."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda each: each.tensor.data_ptr()):
        part, name, reach = tensor.tensor, tensor.spec.name, 0
        for stride, size in sorted(zip(part.stride(), part.shape, strict=True)):
            if size > 1 and stride <= reach:
                raise ModelError(f"elements of tensor {name!r} share memory", hint=_UNSHARE)
            reach += stride * (size - 1)
        if part.numel():
            if part.data_ptr() < end:
                raise ModelError(f"tensors {before!r} and {name!r} share memory", hint=_UNSHARE)
            end, before = part.data_ptr() + (reach + 1) * part.element_size(), name


def is_sharded(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is a ``DTensor``, of which this process holds a part or a copy."""
    return hasattr(tensor, "to_local")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def box_of(name: str, tensor: torch.Tensor) -> TensorBox | None:
    """Return the part of a tensor that this process holds, or None if it holds all of it."""
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import _utils  # only scripts that have made one need it

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    if any(each.is_partial() for each in placements):
        raise ModelError(
            f"tensor {name!r} is a sum of parts that the processes have not added up",
            hint="redistribute it before attaching (`tensor.redistribute(...)`)",
        )
    shape, start = _utils.compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(shape) == tuple(tensor.shape):
        return None
    # An empty part may begin behind the tensor's end.
    return TensorBox(tuple(min(*each) for each in zip(start, tensor.shape, strict=True)), shape)


def _resharding(model: nn.Module) -> Callable[[], None] | None:
    """Return what makes all modules under FSDP2 hold their parts; None if there are none."""
    sharded = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]

    def reshard() -> None:
        for module in sharded:
            module.reshard()  # type: ignore[operator]

    return reshard if sharded else None


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype in _FLOATS:
        kind = PARAMETER if isinstance(tensor, nn.Parameter) else BUFFER
    elif tensor.dtype in _INTEGERS:
        kind = COUNTER
    else:
        raise ModelError(
            f"tensor {name!r} is {dtype}, which cannot be averaged over peers",
            hint="register it as a non-persistent buffer, or keep it as floats",
        )
    try:
        return TensorSpec(name, tuple(tensor.shape), dtype, kind)
    except ValueError as error:
        raise ModelError(f"tensor {name[:100]!r} cannot be declared: {error}") from error
