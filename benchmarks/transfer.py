"""The section about copies of the state on one machine: ``holdfast bench transfer`` on loopback."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.commands import HOLDFAST, run
from benchmarks.progress import say
from benchmarks.report import Table
from benchmarks.sections import MIB, Measured

# (donors, MiB of state)
CASES = ((1, 256), (3, 256), (1, 1_024))
ROUNDS = ("--repeat=7", "--warm-up=2")
# PCCL's shared-state synchronization of 256 MiB, as it was measured for this project: between two
# processes on one machine like this one, not encrypted.
PCCL = "PCCL moves 256 MiB in 1.28 s in the clear, and needs 0.24 s to find it equal."


def transfer() -> Measured:
    rows, digests, commands, raw = [], [], [], []
    for donors, size_mib in CASES:
        options = [f"--donors={donors}", f"--size={size_mib}MiB", *ROUNDS]
        say(f"{size_mib} MiB from {donors} donors, and once more when they are equal")
        figures: dict[str, Any] = json.loads(
            run([*HOLDFAST, "bench", "transfer", *options, "--json=-"])
        )
        raw.append(figures)
        commands.append(f"holdfast bench transfer {' '.join(options)}")
        name = f"{size_mib} MiB, {donors} donor{'s' * (donors > 1)}"
        copy_s, equal_s = (figures[each]["median_s"] for each in ("copy", "equal"))
        rows.append(
            [
                name,
                f"{copy_s:.2f}",
                f"{size_mib * MIB / copy_s / 1e9:.2f}",
                f"{figures['copier_cpu_s']:.2f}",
                f"{figures['donor_cpu_s']:.2f}",
                f"{equal_s:.3f}",
                f"{figures['memory_bytes'] / MIB - size_mib:.0f}",
            ]
        )
        digest = figures["digest"]
        rates = [digest[each] for each in ("ours_gb_s", "one_gb_s", "all_gb_s")]
        digests.append(
            [name, *(f"{rate:.2f}" for rate in rates), f"{rates[0] / max(rates[1:]):.0%}"]
        )
    moved = Table(
        "A copy of the state between processes on this machine: checked by BLAKE3, encrypted; "
        "median of 7, 2 discarded",
        commands,
        [
            "state, from",
            "copied, s",
            "GB/s",
            "CPU of the copier, s",
            "of a donor",
            "found equal, s",
            "memory beside the state, MiB",
        ],
        rows,
        [
            "The copier begins with fresh memory each time. Found equal: the order to copy what is "
            f"here already; all bytes are digested, none travels. Memory: the copier's peak, less what "
            f"it had before and the state. {PCCL}"
        ],
    )
    digested = Table(
        "Digests of all blocks of that state, GB/s",
        commands,
        ["state", "ours", "BLAKE3, one core", "BLAKE3, all cores", "ours of the faster"],
        digests,
        ["BLAKE3 itself: one call for each array of a fragment, single- and multi-threaded."],
    )
    return [moved, digested], raw
