"""Export: the plain model loads the file without holdfast, with a trainer's exact bits."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import nn

from holdfast.checkpoint import checkpoints
from holdfast.checkpoint.blocks import BLOCK_BYTES
from holdfast.checkpoint.checkpoint_store import FolderStore
from holdfast.checkpoint.checkpoints import Manifest
from holdfast.client.state.tensors import find_shared, layout_of
from holdfast.daemon.cli.checkpoints.export import export_safetensors, to_bfloat16
from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.fragment_layout import fragments_of, sizes_of
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol.errors import UserError
from tests.checkpoint.saving import save
from tests.checkpoint.test_shared_state import make_state

SPEC = "[diloco]\nfragments = 2\n"


class Odd(nn.Module):
    """Tensors of all kinds, some of them tied, in two layers and some outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.h = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.again = self.h[0]  # a module under two names
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight  # a tensor under two names
        self.coarse = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        self.small = nn.Parameter(torch.randn(7).to(torch.float16))
        self.fine = nn.Parameter(torch.randn(2, 2, dtype=torch.float32).double())
        self.scale = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.void = nn.Parameter(torch.zeros(0).to(torch.bfloat16))  # beside one of another type
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("octets", torch.tensor([1, 255], dtype=torch.uint8))
        self.register_buffer("own", torch.randn(3), persistent=False)


def saved(model: nn.Module, folder: Path, *, step: int = 300, spec: str = SPEC) -> Manifest:
    """A checkpoint of a run that holds this model's weights."""
    tensors = find_shared(model)
    layout = layout_of(tensors)
    fragments = fragments_of(layout, RunSpec.parse(spec).diloco)
    sizes = sizes_of(fragments)
    state = make_state(*sizes)
    for number, fragment in enumerate(fragments):
        values = np.zeros(fragment.value_count, np.float32)
        counters = np.zeros(fragment.counter_count, np.int64)
        for place in fragment.places:
            tensor = tensors[place.index]
            here = slice(place.offset, place.offset + place.count)
            if tensor.spec.kind == "counter":
                counters[here] = tensor.counters(copy=False).numpy()
            else:
                values[here] = tensor.read()
        state.load_initial(number, values, counters)
    return save(
        FolderStore(folder),
        state,
        lineage=state.lineage(),
        step=step,
        layout=layout,
        spec_toml=spec,
        now_s=1e9,
    )


def say(*words: object) -> Result:
    return CliRunner().invoke(commands, [str(word) for word in words])


def told(*words: object) -> Any:
    result = say(*words, "--json")
    assert result.exit_code == 0, result
    return json.loads(result.stdout)


def wrong(*words: object) -> UserError:
    error = say(*words).exception
    assert isinstance(error, UserError), error
    return error


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "saved"


def same(model: nn.Module, other: nn.Module) -> None:
    ours, theirs = model.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.shape == theirs[name].shape, name
        assert torch.equal(tensor, theirs[name]), name


def test_safetensors_load_into_the_plain_model(place: Path, tmp_path: Path) -> None:
    model, out = Odd(), tmp_path / "model.safetensors"
    saved(model, place)
    answer = told("export", out, "--checkpoints", place)
    assert answer["tensors"] == len(find_shared(model))
    again = Odd()
    again.load_state_dict(load_file(out))
    same(model, again)


class Large(nn.Module):
    """Tensors of several blocks each, and small ones between them; nothing begins with a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5))
        self.h = nn.ModuleList(
            nn.Linear(1_031, 1_033, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
        )
        self.last = nn.Linear(1_021, 1_019)
        self.tied = nn.Linear(1_021, 1_019)
        self.tied.weight = self.last.weight
        self.register_buffer("counts", torch.arange(300_007))


@pytest.mark.parametrize("fragments", [1, 2])
def test_an_export_needs_the_memory_of_some_blocks(
    place: Path, tmp_path: Path, fragments: int
) -> None:
    model, out = Large(), tmp_path / "model.safetensors"
    saved(model, place, spec=f"[diloco]\nfragments = {fragments}\n")
    (name,) = checkpoints.names(FolderStore(place))
    found = checkpoints.open_checkpoint(FolderStore(place), name)
    assert (place / name).stat().st_size > 20 * BLOCK_BYTES
    tracemalloc.start()
    try:
        export_safetensors(found, out)
        assert tracemalloc.get_traced_memory()[1] < 6 * BLOCK_BYTES
    finally:
        tracemalloc.stop()
    again = Large()
    again.load_state_dict(load_file(out))
    same(model, again)


def test_torchs_own_format(place: Path, tmp_path: Path) -> None:
    model, out = Odd(), tmp_path / "model.pt"
    name = saved(model, place).name
    told("export", "--format", "torch", out, "--name", name, "--checkpoints", place)
    state = torch.load(out, weights_only=True)  # no class of holdfast is in it
    again = Odd()
    again.load_state_dict(state)
    same(model, again)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr(), "tied as it was"
    assert [path.name for path in tmp_path.iterdir() if path != place] == ["model.pt"]


def test_bfloat16_is_rounded_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    ties = np.arange(0, 2**32, 2**15, dtype=np.uint32).view(np.float32)
    for each in (values, ties[~np.isnan(ties)]):
        wanted = torch.from_numpy(each.copy()).to(torch.bfloat16).view(torch.int16).numpy()
        assert np.array_equal(to_bfloat16(each), wanted.view(np.uint16))
    assert to_bfloat16(np.array([np.nan], np.float32))[0] == 0x7FC0


def test_tied_tensors_are_exported_under_all_names() -> None:
    names = {t.spec.name: t.spec.aliases for t in find_shared(Odd())}
    assert names["embed.weight"] == ("head.weight",)
    assert names["h.0.weight"] == ("again.weight",)
    assert names["scale"] == ()
    assert {*names, *(a for each in names.values() for a in each)} == set(Odd().state_dict())


def test_an_existing_file_is_not_replaced_without_force(place: Path, tmp_path: Path) -> None:
    saved(Odd(), place)
    out = tmp_path / "model.safetensors"
    out.write_text("precious")
    assert "already exists" in str(wrong("export", out, "--checkpoints", place))
    assert out.read_text() == "precious"
    told("export", out, "--force", "--checkpoints", place)
    assert load_file(out)


# ---------------------------------------------------------------- checkpoint list, verify, delete


def test_list_verify_and_delete(place: Path) -> None:
    model = Odd()
    names = [saved(model, place, step=step).name for step in (300, 400, 500)][::-1]
    rows = told("checkpoint", "list", "--checkpoints", place)["checkpoints"]
    assert [row["name"] for row in rows] == names
    assert [row["step"] for row in rows] == [500, 400, 300]
    assert names[1] in say("checkpoint", "list", "--checkpoints", place).stdout
    (one,) = told("checkpoint", "list", "0400-", "--checkpoints", place)["checkpoints"]
    assert (one["name"], one["step"], len(one["heads"])) == (names[1], 400, 2)
    assert {"lineage", "term", "spec"} <= set(one)
    verified = told("checkpoint", "verify", "--checkpoints", place)
    assert verified["checkpoints"] == [{"name": name, "fault": ""} for name in names]
    gone = told("checkpoint", "delete", "0300-", "0400-", "--checkpoints", place)["deleted"]
    assert gone == [names[2], names[1]]
    assert [path.name for path in place.iterdir()] == [names[0]]


def test_one_that_its_writer_deletes_meanwhile_is_left_out(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [saved(Odd(), place, step=step).name for step in (400, 300)]
    gone = names[0].replace("-", "-9", 1)
    monkeypatch.setattr(checkpoints, "names", lambda _place: [gone, *names])  # as they were before
    listed = told("checkpoint", "list", "--checkpoints", place)["checkpoints"]
    assert [each["name"] for each in listed] == names
    verified = told("checkpoint", "verify", "--checkpoints", place)["checkpoints"]
    assert [each["name"] for each in verified] == names
    assert say("export", tmp_path / "newest.safetensors", "--checkpoints", place).exit_code == 0


def test_a_damaged_one_is_named(place: Path, tmp_path: Path) -> None:
    names = [saved(Odd(), place, step=step).name for step in (300, 400)]
    path = place / names[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    error = wrong("checkpoint", "verify", "--checkpoints", place)
    assert "1 of 2 checkpoints are damaged" in str(error)
    assert error.exit_code == 1
    said = say("checkpoint", "verify", "--checkpoints", place).stdout
    assert f"{names[0]}  whole" in said
    assert "does not have its root" in said
    out = tmp_path / "model.safetensors"
    assert "does not have its root" in str(wrong("export", out, "--checkpoints", place))
    assert not out.exists()
    path.write_bytes(b"what is this")
    listed = told("checkpoint", "list", "--checkpoints", place)["checkpoints"]
    assert ["damaged" in row["fault"] for row in listed] == [True, False]
    told("export", out, "--checkpoints", place)  # the newest that says what it is


def test_where_there_is_none(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    assert "no peer has checkpoints here" in str(wrong("checkpoint", "list"))
    assert told("checkpoint", "list", "--checkpoints", place)["checkpoints"] == []
    assert "there is no checkpoint" in str(wrong("checkpoint", "verify", "--checkpoints", place))
    assert "0 checkpoints" in str(wrong("checkpoint", "delete", "x", "--checkpoints", place))
    assert "nosuch" in str(wrong("checkpoint", "list", "--checkpoints", "nosuch://x"))


def test_the_only_one_here_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    saved(Odd(), tmp_path / "peers" / "a" / "checkpoints")
    (tmp_path / "peers" / "b" / "checkpoints").mkdir(parents=True)
    assert len(told("checkpoint", "list")["checkpoints"]) == 1
    saved(Odd(), tmp_path / "peers" / "b" / "checkpoints")
    assert "several peers" in str(wrong("checkpoint", "list"))
    state = tmp_path / "peers" / "b"
    assert str(state) in told("checkpoint", "list", "--state", state)["place"]
