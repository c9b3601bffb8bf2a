"""Splitting a layout: complete, deterministic, balanced, layers whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.diloco.fragments import Fragment, TensorShape, grouped, split


def transformer(layer_count: int) -> list[TensorShape]:
    tensors = [TensorShape("wte.weight", (100, 16), "parameter")]
    for layer in range(layer_count):
        tensors += [
            TensorShape(f"h.{layer}.attn.weight", (16, 48), "parameter"),
            TensorShape(f"h.{layer}.norm.running_mean", (16,), "buffer"),
            TensorShape(f"h.{layer}.norm.num_batches_tracked", (), "counter"),
            TensorShape(f"h.{layer}.mlp.weight", (16, 64), "parameter"),
        ]
    return [*tensors, TensorShape("ln_f.weight", (16,), "parameter")]


def layers_of(fragment: Fragment, tensors: list[TensorShape]) -> set[str]:
    return {".".join(tensors[index].name.split(".")[:2]) for index in fragment.tensors}


def test_one_fragment_holds_everything_parameters_first() -> None:
    tensors = [
        TensorShape("steps", (), "counter"),
        TensorShape("mean", (3,), "buffer"),
        TensorShape("weight", (2, 2), "parameter"),
        TensorShape("empty", (0, 5), "parameter"),
        TensorShape("scale", (), "parameter"),
        TensorShape("mask", (2,), "counter"),
    ]
    (fragment,) = split(tensors, 1)
    assert fragment.tensors == (2, 3, 4, 1, 0, 5)
    assert [place.offset for place in fragment.places] == [0, 4, 4, 5, 0, 1]
    assert [place.count for place in fragment.places] == [4, 0, 1, 3, 1, 2]
    assert (fragment.value_count, fragment.momentum_count, fragment.counter_count) == (8, 5, 3)
    assert fragment.bytes == 8 * 4 + 3 * 8


def test_equal_layers_are_strided_over_depth_and_embeddings_are_apart() -> None:
    tensors = transformer(6)
    fragments = split(tensors, 4)
    assert [layers_of(fragment, tensors) for fragment in fragments] == [
        {"h.0", "h.3"},
        {"h.1", "h.4"},
        {"h.2", "h.5"},
        {"wte.weight", "ln_f.weight"},
    ]


def test_a_small_rest_joins_the_lightest_fragment() -> None:
    tensors = [TensorShape(f"layers.{i}.w", (1000 - i,), "parameter") for i in range(4)]
    tensors.append(TensorShape("norm.weight", (10,), "parameter"))
    fragments = split(tensors, 2)
    assert [set(fragment.tensors) for fragment in fragments] == [{0, 3, 4}, {1, 2}]
    assert [fragment.bytes for fragment in fragments] == [4 * (1997 + 10), 4 * 1997]


def test_heavy_late_layers_are_balanced() -> None:
    tensors = [TensorShape(f"stage.{i}.w", (2**i,), "parameter") for i in range(8)]
    loads = [fragment.bytes for fragment in split(tensors, 2)]
    assert max(loads) - min(loads) <= 4 * 2**7
    assert min(loads) >= 4 * (2**6 + 2**4)  # i % 2 would put 85 of 255 on one side too


def test_without_layers_each_module_is_one() -> None:
    tensors = [
        TensorShape(f"{name}.{part}", (8,), "parameter")
        for name in ("fc1", "fc2", "fc3")
        for part in ("weight", "bias")
    ]
    assert [fragment.tensors for fragment in split(tensors, 3)] == [(0, 1), (2, 3), (4, 5)]


def test_encoder_and_decoder_layers_of_one_number_are_different_layers() -> None:
    tensors = [
        TensorShape(f"{side}.layers.{i}.w", (4,), "parameter")
        for side in ("encoder", "decoder")
        for i in range(2)
    ]
    assert len(split(tensors, 4)) == 4


@pytest.mark.parametrize(
    ("tensors", "count", "message"),
    [
        (transformer(3), 5, "5 fragments asked for, but the model has only 4 groups"),
        ([TensorShape("w", (1,), "parameter")], 2, "has only 1 group of"),
        ([], 1, "no tensors"),
    ],
)
def test_what_cannot_be_split_says_why(
    tensors: list[TensorShape], count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split(tensors, count)


# ---------------------------------------------------------------- explicit groups

GPT = [
    TensorShape("embed.weight", (50, 8), "parameter"),
    *(
        TensorShape(f"h.{layer}.{part}", (8, 8), "parameter")
        for layer in range(12)
        for part in ("attn.weight", "mlp.weight")
    ),
    TensorShape("h.1.mlp.steps", (), "counter"),
    TensorShape("norm.mean", (8,), "buffer"),
]


def test_groups_define_the_fragments() -> None:
    """``h.1.*`` is not ``h.10``; embeddings and the rest may have a fragment of their own."""
    fragments = grouped(GPT, [["embed*", "norm.*"], ["h.1.*"], ["h.[02-9].*", "h.1[01].*"]])
    names = [{GPT[index].name for index in fragment.tensors} for fragment in fragments]
    assert names[:2] == [
        {"embed.weight", "norm.mean"},
        {"h.1.attn.weight", "h.1.mlp.weight", "h.1.mlp.steps"},
    ]
    assert len(names[2]) == 22
    assert sorted(i for f in fragments for i in f.tensors) == list(range(len(GPT)))
    assert [fragment.counter_count for fragment in fragments] == [0, 1, 0]
    assert (fragments[0].value_count, fragments[0].momentum_count) == (408, 400)


def test_one_group_of_everything_is_one_fragment_of_everything() -> None:
    assert grouped(GPT, [["*"]]) == split(GPT, 1)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["embed*"], ["h.*"]], "tensor 'norm.mean' is in no group"),
        (
            [["*"], ["h.1.*"]],
            "tensor 'h.1.attn.weight' is in several groups: '[*]' of group 0 and 'h.1.[*]' of",
        ),
        (
            [["*", "head*"]],
            "'head[*]' of group 0 matches no tensor [(]tied tensors have the",
        ),
        ([["EMBED*"], ["h.*", "norm*"]], "tensor 'embed.weight' is in no group"),
    ],
)
def test_groups_that_do_not_fit_the_model_say_why(groups: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped(GPT, groups)


names = st.one_of(
    st.builds("h.{}.{}".format, st.integers(0, 8), st.sampled_from("abc")),
    st.builds("encoder.block.{}.x.1.{}".format, st.integers(0, 3), st.sampled_from("abc")),
    st.sampled_from(["wte.weight", "ln.weight", "head", "steps"]),
)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
layouts = st.lists(
    st.builds(TensorShape, names, shapes, st.sampled_from(["parameter", "buffer", "counter"])),
    min_size=1,
    max_size=60,
)


@given(layouts, st.integers(1, 12))
def test_every_tensor_is_in_one_fragment_at_its_own_place(
    tensors: list[TensorShape], count: int
) -> None:
    try:
        fragments = split(tensors, count)
    except ValueError:
        assert count > 1  # too few groups; the sentence is tested above
        return
    assert fragments == split(list(tensors), count)
    assert len(fragments) == count
    assert sorted(i for f in fragments for i in f.tensors) == list(range(len(tensors)))
    layer_homes: dict[str, set[int]] = {}
    for number, fragment in enumerate(fragments):
        assert fragment.tensors
        value_spans: list[tuple[int, int]] = []
        counter_spans: list[tuple[int, int]] = []
        for place in fragment.places:
            tensor = tensors[place.index]
            assert place.count == tensor.count
            span = (place.offset, place.offset + place.count)
            (counter_spans if tensor.kind == "counter" else value_spans).append(span)
            if tensor.kind == "parameter":
                assert span[1] <= fragment.momentum_count
            elif tensor.kind == "buffer":
                assert span[0] >= fragment.momentum_count
            if tensor.name.startswith(("h.", "encoder.")):
                key = tensor.name.split(".x.")[0].rstrip("abc")
                layer_homes.setdefault(key, set()).add(number)
        for spans, total in (
            (value_spans, fragment.value_count),
            (counter_spans, fragment.counter_count),
        ):
            end = 0
            for start, stop in spans:  # places of one kind follow each other without gaps
                assert start == end
                end = stop
            assert end == total
    assert all(len(homes) == 1 for homes in layer_homes.values())


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 10))
def test_strided_fragments_differ_by_at_most_one_layer(sizes: list[int], count: int) -> None:
    count = min(count, len(sizes))
    tensors = [TensorShape(f"h.{i}.w", (size,), "parameter") for i, size in enumerate(sizes)]
    fragments = split(tensors, count)
    loads = [fragment.value_count for fragment in fragments]
    assert max(loads) - min(loads) <= max(sizes)
    for start in range(0, len(sizes) - count + 1, count):
        for fragment in fragments if count > 1 else ():
            assert len(set(fragment.tensors) & set(range(start, start + count))) == 1
