"""The benchmark of overlap: cases that a run's spec allows, figures from counts, one case in small."""

from __future__ import annotations

import pytest

from benchmarks import wan_lab
from tests import needs
from tests.lab.telling import told

PLANS = """
from functools import cache
from benchmarks.overlap import CASES, LINE_SHARE, MEMBERSHIP, Case
from benchmarks.report import BenchError
from benchmarks.overlap_trainer import scaled_model
from holdfast.diloco.fragments import PARAMETER, TensorShape, split
from holdfast.membership.planning.predict import predict
from holdfast.membership.spec.spec import RunSpec
@cache
def shapes(width, layers):
    named = scaled_model(width, layers).named_parameters()
    return [TensorShape(name, tuple(values.shape), PARAMETER) for name, values in named]
rows = []
for case in (case for cases in CASES.values() for case in cases):
    spec = RunSpec.parse(toml_of(case.spec()) + MEMBERSHIP.format(peers=case.peers))
    parts = [e.value_count for e in split(shapes(case.width, case.layers), spec.diloco.fragments)]
    slow = predict(spec, case.conditions(LINE_SHARE))
    rows.append({"name": case.name, "counted": sum(parts), "said": case.value_count,
        "uneven": max(parts) * len(parts) / sum(parts), "busy": slow.utilisation,
        "overlap": spec.diloco.overlap_steps, "members": spec.membership.min_members,
        "round_steps": slow.round_s / case.step_s})
try:
    Case("too slow", 256, 4, 1.0, 0.01, 10, "nf4").spec()
except BenchError as error:
    refused = str(error)
print(json.dumps({"rows": rows, "refused": refused}))
"""


def test_cases_are_runs_that_the_spec_allows_and_that_keep_nobody_waiting() -> None:
    found = told(PLANS)

    rows = {row["name"]: row for row in found["rows"]}
    assert all(row["counted"] == row["said"] for row in rows.values())
    assert all(row["uneven"] < 1.1 for row in rows.values()), "so the formulas hold"
    assert {row["members"] for row in rows.values()} == {4}
    assert rows["30 million"]["said"] == pytest.approx(30e6, rel=0.02)
    assert rows["blocking"]["busy"] < 0.7
    for name in ("streaming", "30 million"):
        assert rows[name]["busy"] == 1.0
    assert 0.8 < rows["streaming"]["round_steps"] / rows["streaming"]["overlap"] <= 1.0
    assert found["refused"].startswith("too slow: no settings keep trainers busy on 1 Mbit/s")


FIGURES = """
from benchmarks.overlap import Case, Sample, Watched, found, most_within
case = Case("figures", 256, 10, 200.0, 0.1, 100, "nf4", 10, 8, rounds=2)
def mark(at_s, steps, stepping_s, waited_s, hook_s):
    return dict(at_s=at_s, rounds=0, steps=steps, stepping_s=stepping_s, waited_s=waited_s, hook_s=hook_s)
spans = [(mark(5.0, 40, 4.0, 0.5, 0.1), mark(25.0, 230, 23.2, 1.0, 0.2))] * 4
samples = [Sample(at, 10 + n, 1_000 * n, 1_052_000 * n) for n, at in enumerate([5.0, 5.5, 6.2, 15.0])]
rounds = [{"contributors": [1, 2, 3], "reduce_s": 0.5}] * 20
each = found(case, case.spec(), Watched(samples, rounds, 0.1), spans)
print(json.dumps({"busy": each.mean_busy, "waited": each.waited, "hook": each.hook, "late": each.late,
    "bytes": each.bytes_per_step, "peak": each.peak_bytes_per_s, "came": each.contributed,
    "parallel": each.data_parallel_bytes, "within": [most_within(samples, s) for s in (0.1, 1.0, 2.0)]}))
"""


def test_figures_follow_from_what_was_counted() -> None:
    found = told(FIGURES)

    assert found["busy"] == pytest.approx(190 * 0.1 / 20)
    assert found["waited"] == pytest.approx(0.5 / 20)
    assert found["hook"] == pytest.approx(0.1 / 20)
    assert found["late"] == pytest.approx(0.2 / 20)
    # Three rounds, of ten a phase of 100 steps; 1,000 packets of 52 bytes of headers for each.
    assert found["bytes"] == pytest.approx(3_000_000 / (4 * 30))
    assert found["within"] == [0, 1_000_000, 2_000_000]
    assert found["peak"] == pytest.approx(1_000_000 / 0.8 / 4)
    assert found["came"] == 0.75
    assert found["parallel"] == 2 * 0.75 * 2 * 7_951_616


TINY = """
from attrs import asdict
from benchmarks.overlap import Case, measure
case = Case("tiny", 32, 2, 50.0, 0.05, 10, "nf4", 2, 4, rounds=3, peers=2)
print(json.dumps({**asdict(measure(case)), "values": case.value_count}))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_two_real_peers_in_the_lab_account_for_all_of_their_time() -> None:
    needs.need(needs.namespaces(wan_lab.missing, wan_lab.why_not))
    found = told(TINY, seconds=140)

    assert found["round_count"] == 6
    assert found["contributed"] == 1.0
    for busy in found["busy"]:
        assert 0.2 < busy <= 1.0
    lost = found["waited"] + found["hook"] + found["late"]
    assert min(found["waited"], found["hook"], found["late"]) >= 0.0
    # What is neither is the loop itself.
    assert 0.95 < sum(found["busy"]) / 2 + lost <= 1.001
    needed = 0.53125 * found["values"] / 10  # 2 (n - 1)/n is 1, once in ten steps
    assert needed < found["bytes_per_step"] < 4 * needed
    assert found["packet_bytes_per_step"] > found["bytes_per_step"]
    assert found["peak_bytes_per_s"] > found["bytes_per_step"] / 0.05
