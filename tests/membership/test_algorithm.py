"""Algorithms by name: fixed settings, defaults, and the explanation of a contradiction."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.membership.spec.algorithm import ALGORITHMS
from holdfast.membership.spec.spec import OVERLAP_AUTO_MAX, RunSpec
from holdfast.protocol.errors import UserError


def spec(algorithm: str = "", diloco: str = "", reduce: str = "") -> RunSpec:
    named = f'algorithm = "{algorithm}"' if algorithm else ""
    return RunSpec.parse(f"[diloco]\n{named}\n{diloco}\n[reduce]\n{reduce}\n")


def outer(of: RunSpec) -> tuple[int, int, float, float, bool]:
    """Return the settings that an algorithm results in."""
    table = of.diloco
    return (
        table.fragments,
        table.overlap_steps,
        table.outer_lr,
        table.outer_momentum,
        table.nesterov,
    )


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("", (1, 0, 0.7, 0.9, True)),
        ("diloco", (1, 0, 0.7, 0.9, True)),
        ("streaming", (1, 10, 0.4, 0.9, True)),
        ("delayed", (1, 60, 0.7, 0.0, True)),
        ("sparse", (1, 0, 1.0, 0.0, True)),
        ("allreduce", (1, 0, 1.0, 0.0, True)),
    ],
)
def test_what_an_algorithm_is_when_nothing_else_is_said(
    algorithm: str, expected: tuple[Any, ...]
) -> None:
    found = spec(algorithm, "" if algorithm == "allreduce" else "sync_every = 60")
    assert outer(found) == expected
    assert found.diloco.sync_every == (1 if algorithm == "allreduce" else 60)


def test_every_algorithm_is_valid_as_it_is_and_with_a_single_step() -> None:
    for name in ALGORITHMS:
        one = spec(name, "sync_every = 1").diloco
        assert one.overlap_steps == (1 if name == "delayed" else 0)


def test_only_sparse_says_how_bytes_travel() -> None:
    for name in ("", *ALGORITHMS):
        reduce = spec(name).reduce
        found = (reduce.codec_up, reduce.codec_down, reduce.error_feedback, reduce.feedback_decay)
        if name == "sparse":
            assert found == ("topk", "int8+zstd", True, 0.95)
        else:
            assert found == ("fp32", "fp32", True, 1.0)


def test_what_is_presumed_may_be_changed_and_what_is_fixed_repeated() -> None:
    changed = spec("streaming", "sync_every = 20\nfragments = 5\noverlap = 2\nouter_lr = 0.7")
    assert outer(changed) == (5, 2, 0.7, 0.9, True)
    assert spec("diloco", "overlap = 0\nfragments = 1").diloco == spec("diloco").diloco
    assert spec("delayed", "sync_every = 20\noverlap = 20").diloco.overlap_steps == 20
    sparse = spec("sparse", "outer_lr = 0.65", "codec_down = 'topk'\nfeedback_decay = 1.0").reduce
    assert (sparse.codec_down, sparse.feedback_decay) == ("topk", 1.0)


@pytest.mark.parametrize(
    ("algorithm", "diloco", "reduce", "words"),
    [
        ("diloco", "overlap = 3", "", "diloco has no overlap; use streaming"),
        ("diloco", "overlap = 'auto'", "", "diloco has no overlap; use streaming"),
        ("diloco", "fragments = 2", "", "diloco synchronises the whole model; use streaming"),
        ("delayed", "fragments = 2", "", "delayed synchronises the whole model"),
        ("delayed", "overlap = 99", "", "delayed overlaps the whole next phase"),
        ("sparse", "outer_momentum = 0.9", "", "residual in place of outer momentum"),
        ("sparse", "", "codec_up = 'nf4'", 'codec_up = "nf4" contradicts algorithm = "sparse"'),
        ("sparse", "", "error_feedback = false", "error_feedback = false contradicts"),
        ("streaming", "overlap = 100", "", "must be less than sync_every"),
        ("", "overlap = 100", "", "must be less than sync_every"),
        ("", "overlap = 'always'", "", 'must be "auto" or a whole number'),
        ("", "overlap = true", "", "must be a whole number, got True"),
        ("", "algorithm = 'adamw'", "", "streaming, delayed, allreduce, sparse;"),
        ("allreduce", "sync_every = 2", "", "allreduce averages every step; use diloco"),
        ("", "algorithm = 3", "", "one of diloco, streaming"),
        ("delayed", "sync_every = 'often'", "", "sync_every must be a whole number, got 'often'"),
    ],
)
def test_a_contradiction_is_explained(algorithm: str, diloco: str, reduce: str, words: str) -> None:
    with pytest.raises(UserError, match=r"run\.toml") as caught:
        spec(algorithm, diloco, reduce)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sync_every", "fragments", "steps"),
    [(100, 1, OVERLAP_AUTO_MAX), (100, 5, 10), (20, 5, 4), (20, 20, 1), (7, 2, 3), (2, 1, 1)],
)
def test_an_automatic_overlap_lasts_until_the_next_turn(
    sync_every: int, fragments: int, steps: int
) -> None:
    table = f"sync_every = {sync_every}\nfragments = {fragments}\noverlap = 'auto'"
    assert spec("", table).diloco.overlap_steps == steps


def test_streaming_of_one_fragment_without_overlap_is_diloco() -> None:
    """Nothing tells the two apart but the name: so they are the same bit for bit."""
    streaming = spec("streaming", "fragments = 1\noverlap = 0\nouter_lr = 0.7")
    assert outer(streaming) == outer(spec("diloco"))
    assert streaming.reduce == spec("diloco").reduce
