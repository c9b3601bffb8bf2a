"""The shared tensors of a model, their names, and reading and writing them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from holdfast.client.attach_errors import ModelError
from holdfast.client.state.tensors import find_shared


def names(model: nn.Module) -> list[str]:
    return [tensor.spec.name for tensor in find_shared(model)]


def kinds(model: nn.Module) -> dict[str, str]:
    return {tensor.spec.name: tensor.spec.kind for tensor in find_shared(model)}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    )


def test_order_and_names_are_those_of_state_dict() -> None:
    assert names(network()) == list(network().state_dict())


def test_statistics_are_buffers_and_their_count_is_a_counter() -> None:
    found = kinds(nn.BatchNorm1d(3))
    assert found == {
        "weight": "parameter",
        "bias": "parameter",
        "running_mean": "buffer",
        "running_var": "buffer",
        "num_batches_tracked": "counter",
    }


def test_buffers_that_are_not_persistent_stay_local() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.register_buffer("kept", torch.zeros(3))
    assert names(model) == ["weight", "bias", "kept"]


def test_what_is_one_tensor_is_declared_once() -> None:
    tied: Any = nn.ModuleDict(
        {"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)}
    )
    tied["head"].weight = tied["embedding"].weight
    assert names(tied) == ["embedding.weight"]
    over_one_memory: Any = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
    over_one_memory[1].weight = nn.Parameter(over_one_memory[0].weight.detach())
    assert names(over_one_memory) == ["0.weight"]
    layer = nn.Linear(2, 2)
    assert names(nn.Sequential(layer, layer)) == ["0.weight", "0.bias"], "it is used twice"


def test_wrappers_leave_no_trace_in_the_names() -> None:
    plain = names(network())
    assert names(nn.DataParallel(network())) == plain
    compiled = torch.compile(network(), backend="eager")
    assert isinstance(compiled, nn.Module)
    assert names(compiled) == plain
    assert names(nn.DataParallel(compiled)) == plain
    inside = network()
    assert isinstance(inside, nn.Sequential)
    inside[2] = torch.compile(inside[2], backend="eager")  # type: ignore[assignment]
    assert names(inside) == plain


def test_a_childs_own_name_module_stays() -> None:
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert names(model) == ["module.weight", "module.bias"]


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (torch.zeros(2, dtype=torch.uint64), "uint64"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
    ],
)
def test_a_tensor_that_cannot_be_shared_is_named(tensor: torch.Tensor, why: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("odd", tensor)
    with pytest.raises(ModelError, match=rf"'0\.odd'.*{why}"):
        find_shared(model)


@pytest.mark.parametrize(
    "view",
    [
        lambda weight: weight[1:3],
        lambda weight: weight.t(),
        lambda weight: weight.view(2, 8),
        lambda _: torch.zeros(1).expand(3),
        lambda _: torch.zeros(2, 1).expand(2, 3),
        lambda _: torch.zeros(5).unfold(0, 2, 1),
    ],
    ids=["slice", "transpose", "view", "expand", "rows", "unfold"],
)
def test_memory_that_is_shared_twice_is_named(view: Any) -> None:
    model = nn.Linear(4, 4, bias=False)
    model.register_buffer("other", view(model.weight.detach()))
    with pytest.raises(ModelError, match=r"'other' share memory") as caught:
        find_shared(model)
    assert "clone" in caught.value.hint


def test_parts_of_one_memory_that_do_not_overlap_are_shared() -> None:
    memory = torch.zeros(4, 6)
    assert len(find_shared(nn.ParameterList([memory[2:, :4], memory[:2].t()]))) == 2


class Scaled(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)


def test_extra_state_that_is_not_shared_is_named() -> None:
    with pytest.warns(UserWarning, match=r"extra state of module '0' .* an export lacks it"):
        find_shared(nn.Sequential(Scaled(2, 2)))


def test_a_lazy_parameter_asks_for_a_batch_first() -> None:
    with pytest.raises(ModelError, match="run one batch"):
        find_shared(nn.LazyLinear(3))


def test_a_model_without_tensors_is_refused() -> None:
    with pytest.raises(ModelError, match="no parameters"):
        find_shared(nn.ReLU())


def test_a_tensor_of_over_sixteen_dimensions_is_named() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("deep", torch.zeros([1] * 17))
    with pytest.raises(ModelError, match="'deep'"):
        find_shared(model)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_write_then_read_gives_the_values_back(dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2, bias=False).to(dtype)
    (shared,) = find_shared(model)
    values = np.array([0.5, -0.0, 3.0, -2.0, 1.25, 8.0], np.float32)
    with torch.device("meta"):  # whatever device the script has chosen for new tensors
        shared.write(values)
    assert shared.read().tobytes() == values.tobytes()
    assert model.weight.dtype == dtype


def test_low_precision_rounds_to_nearest_even() -> None:
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    (shared,) = find_shared(model)
    ulp = 2.0**-7  # of bfloat16 at 1
    shared.write(np.array([1 + 0.49 * ulp, 1 + 0.5 * ulp, 1 + 0.51 * ulp, 1 + 1.5 * ulp], "f4"))
    assert shared.read().tolist() == [1.0, 1.0, 1 + ulp, 1 + 2 * ulp]


def test_scalars_and_empty_tensors() -> None:
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.nothing = nn.Parameter(torch.zeros(0, 4))
    model.other = nn.Parameter(torch.zeros(0, 4))  # empty ones have no memory: never tied
    scale, nothing, other = find_shared(model)
    assert (scale.count, nothing.count, other.count) == (1, 0, 0)
    scale.write(np.array([5.0], np.float32))
    nothing.write(np.array([], np.float32))
    assert model.scale.item() == 5.0
    assert nothing.read().shape == (0,)


def test_a_buffer_that_is_assigned_again_is_still_the_shared_one() -> None:
    model = nn.Module()
    model.register_buffer("average", torch.zeros(2))
    (shared,) = find_shared(model)
    model.average = torch.ones(2)
    assert shared.read().tolist() == [1, 1]
    shared.write(np.array([3.0, 4.0], np.float32))
    assert model.average.tolist() == [3, 4]


def test_a_tensor_that_changes_its_shape_is_named() -> None:
    model = nn.Linear(2, 2, bias=False)
    (shared,) = find_shared(model)
    model.weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ModelError, match=r"'weight'.*must not change"):
        shared.read()


@pytest.mark.filterwarnings("ignore:FSDP:UserWarning")  # one process has nothing to shard
@pytest.mark.usefixtures("group_of_one")
def test_flattened_parameters_of_fsdp1_are_refused() -> None:
    sharded = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(ModelError, match="FullyShardedDataParallel") as caught:
        find_shared(nn.Sequential(sharded))
    assert "fully_shard" in str(caught.value.hint)
