"""The sections whose figures come from ``holdfast bench``: what is measured, and how it is shown.

Each section is one function that gives tables and raw figures. It says what it does before it does
it, since some take minutes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import HOLDFAST, allreduce, allreduce_in, lab_command, run
from benchmarks.progress import say
from benchmarks.report import Table
from benchmarks.wan_lab import Host, WanLab

MIB = 2**20
Figures = dict[str, Any]
Measured = tuple[list[Table], Any]

# ---------------------------------------------------------------- codecs


def codecs() -> Measured:
    say("every codec, one core")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        path = Path(directory) / "codecs.json"
        run([*HOLDFAST, "bench", "codecs", "--json", str(path)])
        raw = json.loads(path.read_text())
    rows = []
    for row in raw["codecs"]:
        noise = ["exact" if db is None else f"{db:.1f}" for db in row["noise_db"].values()]
        speeds = [f"{row[name]:.2f}" for name in ("encode_gb_s", "decode_gb_s")]
        saving = f"{row['zstd_saving']:.0%}" if row["zstd_saving"] else ""
        rows.append([row["codec"], f"{row['bits']:.3f}", *speeds, saving, *noise])
    names = [f"{name}, dB" for name in raw["codecs"][0]["noise_db"]]
    table = Table(
        "Size, speed on one core, and signal-to-noise of one trip, by the values' distribution",
        ["holdfast bench codecs"],
        ["codec", "bits a value", "encode, GB/s", "decode, GB/s", "zstd saves", *names],
        rows,
        [
            "GB/s of float32 values, chunks of 1 MiB, best of many runs. "
            f"*student* has {raw['student_freedom']:g} degrees of freedom. Scales are included in "
            "the bits; error feedback brings what is lost back in later rounds."
        ],
    )
    return [table], raw


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
            figures = allreduce(*options)
            raw.append(figures)
            rows.append(_against_gloo(figures))
            commands.append(_loopback_command(options))
        options = [f"--peers={peers}", *LOOPBACK_SMALL, "--vs=gloo"]
        say(f"{peers} peers, 4 KiB, in turns with gloo")
        figures = allreduce(*options)
        raw.append(figures)
        small_rows.append(_against_gloo(figures))
        small_commands.append(_loopback_command(options))
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


def _loopback_command(options: Sequence[str]) -> str:
    return f"holdfast bench allreduce {' '.join(options)}"


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
    sent = sum(figures["socket_bytes_per_peer"]) / sum(fp32["socket_bytes_per_peer"])
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
    late_ms = max(figures["hub"]["late_ms_max"] for figures in raw)
    return f" The lab's hub was late by {late_ms:.1f} ms at most; on a quiet machine it is 3 ms."


# ---------------------------------------------------------------- homes

HOME = Host(up_mbit=20, down_mbit=300, delay_ms=10)
OFFICE = Host(up_mbit=300, down_mbit=300, delay_ms=10)
RESIDENTIAL = [HOME] * 6 + [OFFICE] * 2


def residential() -> Measured:
    options = [
        "--size=16MiB",
        f"--up={','.join(f'{host.up_mbit:g}' for host in RESIDENTIAL)}",
        f"--down={','.join(f'{host.down_mbit:g}' for host in RESIDENTIAL)}",
        f"--delay-ms={2 * HOME.delay_ms:g}",
        "--repeat=5",
        "--warm-up=2",
    ]
    say("eight peers, 16 MiB")
    with WanLab(RESIDENTIAL) as lab:
        figures = allreduce_in(lab, 0, *options)
    best_s, took_s = figures["t_lb_s"], figures["median_s"]
    rows = [
        ["holdfast, measured", f"{took_s:.2f}", f"{took_s / best_s:.2f}"],
        ["the plan, predicted", *_of_best(figures["predicted_s"], best_s)],
        ["T_LB", *_of_best(best_s, best_s)],
        ["a ring, predicted", *_of_best(figures["ring_s"], best_s)],
    ]
    table = Table(
        "16 MiB of float32, eight peers: six at 20 Mbit/s up and 300 down, two at 300 both ways, "
        "40 ms round trip; median of 5 rounds, 2 discarded",
        [f"holdfast bench allreduce --rank R --peers 8 {' '.join(options)}   # on each host"],
        ["", "seconds", "times T_LB"],
        rows,
        [
            "The planner is told the lines; who has a slow uplink owns nothing."
            + _hub_note([figures])
            + f" It used {figures['hub']['cpu_s']:.1f} s of a processor in all, a peer "
            f"{figures['cpu_s']:.2f} s a round."
        ],
    )
    return [table], figures


def _of_best(seconds: float, best_s: float) -> list[str]:
    return [f"{seconds:.2f}", f"{seconds / best_s:.2f}"]


# ---------------------------------------------------------------- memory

MEMORY = ("--size=256MiB", "--repeat=2", "--warm-up=1")
MEMORY_SLOW = ("--size=256MiB", "--repeat=1", "--warm-up=0")  # a minute and more each
UNLIMITED_MBIT = 1e6
SLOW_MBIT = 50.0
# Chunks that wait for others, of up to 5 contributors: collectives.chunk_sender.CONTRIBUTIONS_BYTES_MAX.
WAITING_BYTES_MAX = 64 * MIB


def memory() -> Measured:
    cases = [(peers, codec, 0.0) for peers in (2, 4) for codec in ("fp32", "int8")] + [
        (4, "fp32", SLOW_MBIT)
    ]
    rows, commands, raw = [], [], []
    for peers, codec, slow_mbit in cases:
        rounds = MEMORY_SLOW if slow_mbit else MEMORY
        options = [f"--peers={peers}", f"--codec={codec}", *rounds]
        name = f"{peers}, {codec}"
        if slow_mbit:
            options += [f"--max-upload={slow_mbit:g}{f',{UNLIMITED_MBIT:g}' * (peers - 1)}"]
            name += f", one sends {slow_mbit:g} Mbit/s"
        say(f"peers, codec: {name}")
        figures = allreduce(*options)
        raw.append(figures)
        most = max(figures["extra_memory_bytes_per_peer"])
        # Half of what a round takes that holds its own encoded contribution, the encoded result and
        # the decoded result whole.
        bound = (2 * figures["encoded_bytes"] + figures["bytes"] + WAITING_BYTES_MAX) // 2
        held = "yes" if most <= bound else "NO"
        rows.append([name, f"{most / MIB:.0f}", f"{bound / MIB:.0f}", held])
        commands.append(_loopback_command(options))
    table = Table(
        "Memory that a round of 256 MiB of float32 takes beside the values themselves; "
        "the peer that took most, over all rounds",
        commands,
        ["peers, codec", "at most, MiB", "bound, MiB", "within"],
        rows,
        [
            "Peak resident memory of the process minus that before the first round. The bound is half of what a "
            "round takes that holds its own encoded contribution, the encoded result and the decoded "
            f"result whole, beside {WAITING_BYTES_MAX // MIB} MiB for chunks that wait for slower "
            "contributors. What a round does take: the encoded result, the chunks that wait (at most "
            f"{WAITING_BYTES_MAX // MIB} MiB), and the chunks that threads work on or that are not "
            "acknowledged yet."
        ],
    )
    return [table], raw


# ---------------------------------------------------------------- caps

CAPPED_MBIT = (20.0, 100.0)
CAP_SECONDS = 4  # of a round at the cap: long next to the burst that a cap allows


def caps() -> Measured:
    rows, commands, raw = [], [], []
    for cap_mbit in CAPPED_MBIT:
        size = int(cap_mbit * 1e6 / 8 * CAP_SECONDS) // 4 * 4
        options = ["--peers=2", f"--size={size}", f"--max-upload={cap_mbit:g}"]
        options += ["--repeat=3", "--warm-up=1"]
        say(f"an upload cap of {cap_mbit:g} Mbit/s")
        figures = allreduce(*options)
        raw.append(figures)
        sent = max(figures["socket_bytes_per_peer"]) + max(figures["retransmitted_bytes_per_peer"])
        found_mbit = sent * 8 / figures["median_s"] / 1e6
        cells = [f"{cap_mbit:g}", f"{found_mbit:.2f}", f"{found_mbit / cap_mbit:.1%}"]
        rows.append(["upload", *cells])
        commands.append(_loopback_command(options))
    table = Table(
        f"A peer's cap and what its sockets carried in rounds of about {CAP_SECONDS} s; "
        "median of 3 rounds, 1 discarded",
        commands,
        ["direction", "asked, Mbit/s", "found, Mbit/s", "share"],
        rows,
        ["Bytes of TCP's payload: headers of lanes, tags and control messages included."],
    )
    return [table], raw


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
