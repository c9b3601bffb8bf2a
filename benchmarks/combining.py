"""What an owner's arithmetic takes: the mean and the robust rules, by contributors and codec.

    python -m benchmarks.combining
    python -m benchmarks.combining --contributors 8,64 --json combining.json

One thread combines one chunk of 1 MiB of float32 again and again; the best of some tries counts, with
what is measured for the master on the way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for when this file itself is run
from benchmarks.report import Table
from holdfast.collectives.arithmetic import ChunkLayout
from holdfast.collectives.combine import Rule, combine_chunk
from holdfast.collectives.norm_report import NormSums
from holdfast.protocol.messages import Contributor, FragmentSize, OwnerRun, Plan

COUNT = 2**18  # values: a chunk of 1 MiB
CONTRIBUTORS = (4, 8, 16, 64)
CODECS = ("fp32", "int8")
RULES = ("mean", "clipped")
TRIES = 7


def took_s(rule: str, contributors: int, codec: str) -> float:
    """Seconds of a chunk."""
    rng = np.random.default_rng(0)
    peers = [f"{number:032x}" for number in range(contributors)]
    plan = Plan(COUNT, (OwnerRun(peers[0], 1),), codec, codec, combine=rule)
    layout = ChunkLayout.of(plan, FragmentSize(COUNT, COUNT, 0))
    order = [Contributor(peer, 1_000, 1.0) for peer in peers]
    encoded = {}
    for peer in peers:
        room = memoryview(bytearray(layout.cuts[0].up_bytes))
        values = rng.standard_normal(COUNT).astype(np.float32)
        encoded[peer] = room[: layout.codec_up.encode(values, room)]
    momentum = rng.standard_normal(COUNT).astype(np.float32)
    out = np.empty(COUNT, np.float32)
    room = memoryview(bytearray(layout.cuts[0].down_bytes))
    if layout.codec_down.verbatim:
        room = out.data.cast("B")  # as owners have it
    best_s = float("inf")
    for _try in range(TRIES):
        began_s = time.perf_counter()
        gauge = NormSums(momentum)
        combine_chunk(order, encoded, layout, Rule.of(plan), out, room, gauge.take)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


def measure(contributors: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "contributors": count,
            "codec": codec,
            **{rule: took_s(rule, count, codec) for rule in RULES},
        }
        for codec in CODECS
        for count in contributors
    ]


def table(figures: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            f"{row['contributors']}, {row['codec']}",
            *(f"{row[rule] * 1e3:.2f}" for rule in RULES),
            *(f"{row[rule] / row['mean']:.1f}" for rule in RULES[1:]),
        ]
        for row in figures
    ]
    return Table(
        f"Milliseconds in which one core combines a chunk of 1 MiB; best of {TRIES}",
        ["python -m benchmarks.combining"],
        [
            "contributors, codec",
            *(f"`{rule}`" for rule in RULES),
            "clipped: times",
        ],
        rows,
        ["Decoding, encoding and what is measured of contributions included."],
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="combining", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--contributors", default=",".join(map(str, CONTRIBUTORS)), metavar="N,...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    figures = measure([int(count) for count in options.contributors.split(",")])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    for row in table(figures).rows:
        print("  ".join(f"{cell:>14}" for cell in row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
