"""Fragments as the spec says; a model that does not fit it is explained when it founds a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from holdfast.client.state.tensors import find_shared, layout_of
from holdfast.daemon.fragment_layout import fragments_of
from holdfast.daemon.master.opened_run import MasterOptions, check_same_run
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.spec.spec import DilocoTable, RunSpec
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError


class Tied(nn.Module):
    """Embeddings that are the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 4)
        self.h = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(4, 100, bias=False)
        self.head.weight = self.embed.weight


LAYOUT = layout_of(find_shared(Tied()))


def table(toml: str) -> DilocoTable:
    return RunSpec.parse(f"[diloco]\n{toml}").diloco


def names(toml: str) -> list[set[str]]:
    return [
        {LAYOUT.tensors[index].name.removesuffix(".weight") for index in fragment.tensors}
        - {f"h.{layer}.bias" for layer in range(4)}
        for fragment in fragments_of(LAYOUT, table(toml))
    ]


def test_embeddings_are_apart_and_tied_weights_once() -> None:
    assert names("fragments = 3") == [{"h.0", "h.2"}, {"h.1", "h.3"}, {"embed"}]
    assert names("groups = [['embed*', 'h.3.*'], ['h.[012].*']]") == [
        {"embed", "h.3"},
        {"h.0", "h.1", "h.2"},
    ]


@pytest.mark.parametrize(
    ("toml", "words", "key"),
    [
        ("fragments = 6", "has only 5 groups", "fragments"),
        ("groups = [['embed*'], ['h.[012].*']]", "tensor 'h.3.weight' is in no group", "groups"),
        ("groups = [['*'], ['h.2.bias']]", "tensor 'h.2.bias' is in several", "groups"),
        (
            "groups = [['embed*', 'head*'], ['h.*']]",
            "'head*' of group 0 matches no tensor",
            "groups",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_explained(toml: str, words: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        fragments_of(LAYOUT, table(toml))
    assert words in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert f"`{key}`" in caught.value.hint


@pytest.mark.parametrize("now", ["fragments = 3", "groups = [['*'], ['a']]"])
def test_a_runs_fragments_cannot_be_changed(now: str) -> None:
    here = Address("127.0.0.1", 0)
    options = MasterOptions(Path("run.toml"), Path("state"), [here], [], here)
    before = RunSpec.parse("[diloco]\nfragments = 2")
    check_same_run(options, before, RunSpec.parse("[diloco]\nfragments=2\nouter_lr=1.0"))
    with pytest.raises(UserError, match=r"run\.toml says"):
        check_same_run(options, before, RunSpec.parse(f"[diloco]\n{now}"))
