"""The sections whose figures come from benches with ranks: what is measured, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.commands import (
    ALLREDUCE,
    Figures,
    allreduce_in,
    command_of,
    figures_of,
    lab_command,
)
from benchmarks.report import Measured, Table, say
from benchmarks.wan_lab import Host, WanLab

MIB = 2**20

# ---------------------------------------------------------------- loopback

LOOPBACK_BULK = ("--size=256MiB", "--repeat=7", "--warm-up=2")
LOOPBACK_SMALL = ("--size=4KiB", "--repeat=200", "--warm-up=20")


def loopback() -> Measured:
    rows, commands, raw = [], [], []
    small_rows, small_commands = [], []
    for peers in (2, 4):
        for codec in ("fp32", "int8", "nf4"):
            options = [f"--peers={peers}", f"--codec={codec}", *LOOPBACK_BULK, "--vs=gloo"]
            say(f"{peers} peers, 256 MiB, {codec}, in turns with gloo")
            figures = figures_of(ALLREDUCE, *options)
            raw.append(figures)
            rows.append(_against_gloo(figures))
            commands.append(command_of(ALLREDUCE, options))
        options = [f"--peers={peers}", *LOOPBACK_SMALL, "--vs=gloo"]
        say(f"{peers} peers, 4 KiB, in turns with gloo")
        figures = figures_of(ALLREDUCE, *options)
        raw.append(figures)
        small_rows.append(_against_gloo(figures))
        small_commands.append(command_of(ALLREDUCE, options))
    header = [
        "peers, codec",
        "holdfast, ms",
        "gloo fp32, ms",
        "times gloo's speed",
        "holdfast's CPU, s a peer",
        "gloo's",
    ]
    what = (
        "Both sides of every pair run on the cores of this one machine. holdfast's bytes are "
        "encrypted (AES-256-GCM) and its results hashed (BLAKE3); gloo's are neither."
    )
    bulk = Table(
        "256 MiB of float32; median of 7 rounds, 2 discarded", commands, header, rows, [what]
    )
    small = Table("4 KiB; median of 200 rounds, 20 discarded", small_commands, header, small_rows)
    return [bulk, small], raw


def _against_gloo(figures: Figures) -> list[str]:
    return [
        f"{figures['peers']}, {figures['codec']}",
        _ms(figures["median_s"]),
        _ms(figures["gloo_median_s"]),
        f"{figures['ratio']:.2f}",
        f"{figures['cpu_s']:.3f}",
        f"{figures['gloo_cpu_s']:.3f}",
    ]


# ---------------------------------------------------------------- a long lossy path

# A path crosses two hosts' links: 100 ms there and back, and of 10,000 packets two are lost.
LOSSY = Host(up_mbit=300, down_mbit=300, delay_ms=25, loss=0.0001)
LOSSY_BULK = ("--size=64MiB", "--up=300", "--delay-ms=50", "--repeat=5", "--warm-up=4")
LOSSY_GLOO = ("--size=64MiB", "--repeat=1", "--warm-up=0", "--vs=gloo")  # a minute and more each


def lossy() -> Measured:
    rows, commands, raw = [], [], []
    for peers in (2, 4):
        with WanLab([LOSSY] * peers) as lab:
            fp32: Figures = {}
            for turn, codec in enumerate(("fp32", "int8", "nf4")):
                options = [*LOSSY_BULK, f"--codec={codec}"]
                say(f"{peers} peers, 64 MiB, {codec}")
                figures = allreduce_in(lab, turn, *options)
                if codec == "fp32":
                    say(f"{peers} peers, 64 MiB, gloo: a minute and more a round")
                    versus = allreduce_in(lab, turn + 10, *LOSSY_GLOO)
                    figures["gloo_median_s"] = versus["gloo_median_s"]
                    commands.append(lab_command(LOSSY, peers, LOSSY_GLOO))
                raw.append(figures)
                fp32 = fp32 or figures
                rows.append(_of_a_bound(figures, fp32))
                commands.append(lab_command(LOSSY, peers, options))
    table = Table(
        "64 MiB of float32 over 300 Mbit/s each way, 100 ms round trip, 0.02 % loss; "
        "median of 5 rounds, 4 discarded (gloo: one round)",
        commands,
        [
            "peers, codec",
            "holdfast, s",
            "T_LB, s",
            "share of T_LB's speed",
            "gloo fp32, s",
            "socket bytes of fp32's",
            "time of fp32's",
        ],
        rows,
        [
            "gloo's connections use CUBIC, the system's default; ours ask for BBR. The codecs of one number of peers share one lab."
            + _hub_note(raw)
        ],
    )
    return [table], raw


def _of_a_bound(figures: Figures, fp32: Figures) -> list[str]:
    sent = sum(figures["sent_bytes_per_peer"]) / sum(fp32["sent_bytes_per_peer"])
    gloo_s = figures["gloo_median_s"]
    return [
        f"{figures['peers']}, {figures['codec']}",
        f"{figures['median_s']:.2f}",
        f"{figures['t_lb_s']:.2f}",
        f"{figures['t_lb_s'] / figures['median_s']:.0%}",
        f"{gloo_s:.2f}" if gloo_s else "",
        f"{sent:.3f}",
        f"{figures['median_s'] / fp32['median_s']:.2f}",
    ]


def _hub_note(raw: Sequence[Figures]) -> str:
    late_ms = max(figures["hub_late_ms_max"] for figures in raw)
    return f" The lab's hub was late by {late_ms:.1f} ms at most; on a quiet machine it is 3 ms."


# ---------------------------------------------------------------- copies of the state

TRANSFER = "benchmarks.transfer"
TRANSFERS = ((1, 256), (3, 256), (1, 1_024))  # donors, MiB of state
# PCCL's shared-state synchronization of 256 MiB, as it was measured for this project: between two
# processes on one machine like this one, not encrypted.
PCCL = "PCCL moves 256 MiB in 1.28 s in the clear, and needs 0.24 s to find it equal."


def transfer() -> Measured:
    rows, commands, raw = [], [], []
    for donors, size_mib in TRANSFERS:
        options = [f"--donors={donors}", f"--size={size_mib}MiB", "--repeat=7", "--warm-up=2"]
        say(f"{size_mib} MiB from {donors} donors, and once more when they are equal")
        figures = figures_of(TRANSFER, *options)
        raw.append(figures)
        commands.append(command_of(TRANSFER, options))
        copy_s, equal_s = (figures[each]["median_s"] for each in ("copy", "equal"))
        rows.append(
            [
                f"{size_mib} MiB, {donors} donor{'s' * (donors > 1)}",
                f"{copy_s:.2f}",
                f"{size_mib * MIB / copy_s / 1e9:.2f}",
                f"{figures['copier_cpu_s']:.2f}",
                f"{figures['donor_cpu_s']:.2f}",
                f"{equal_s:.3f}",
            ]
        )
    table = Table(
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
        ],
        rows,
        [
            "The copier begins with fresh memory each time. Found equal: the order to copy what is "
            f"here already; all bytes are digested, none travels. {PCCL}"
        ],
    )
    return [table], raw


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
