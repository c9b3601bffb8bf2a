"""The benchmark of the bytes of a step: one case in small."""

from __future__ import annotations

import pytest

from benchmarks import wan_lab
from benchmarks.step_bytes import Case, measure
from tests import needs


@pytest.mark.nightly
@pytest.mark.slow
def test_two_real_peers_send_what_the_codec_says_and_little_more() -> None:
    needs.need(needs.namespaces(wan_lab.missing, wan_lab.why_not))
    case = Case(2, overlap=4, value_count=80_000, sync_every=10, step_s=0.05, peers=2)
    found = measure(case)

    assert found["rounds"] >= 4
    needed = 0.53125 * found["value_count"] / 10  # 2 (n - 1)/n is 1, once in ten steps
    assert needed < found["bytes_per_step"] < 4 * needed
    assert found["packet_bytes_per_step"] > found["bytes_per_step"]
    assert found["data_parallel_bytes"] == 2 * 0.5 * 2 * 80_000
