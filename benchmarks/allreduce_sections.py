"""The section about one all-reduce on this machine, beside gloo's."""

from __future__ import annotations

from benchmarks.ranks import Report, run_ranks
from benchmarks.report import Measured, Table, say

COUNTS, CODECS = (2, 4), ("fp32", "int8", "nf4")  # peers; values on the wire
LOOPBACK_BULK = ("--size=256MiB", "--repeat=7", "--warm-up=2", "--vs=gloo")
LOOPBACK_SMALL = ("--size=4KiB", "--repeat=200", "--warm-up=20", "--vs=gloo")


def loopback() -> Measured:
    """Our rounds in turns with gloo's, large and small ones."""
    tables, raw = [], []
    for title, codecs, options in (
        ("256 MiB of float32; median of 7 rounds, 2 discarded", CODECS, LOOPBACK_BULK),
        ("4 KiB; median of 200 rounds, 20 discarded", ("fp32",), LOOPBACK_SMALL),
    ):
        rows = []
        for peers in COUNTS:
            for codec in codecs:
                say(f"{peers} peers, {options[0]}, {codec}, in turns with gloo")
                figures = run_ranks(
                    "allreduce", peers, [f"--peers={peers}", f"--codec={codec}", *options]
                )
                raw.append(figures)
                rows.append(_against_gloo(figures))
        command = "python -m benchmarks.allreduce --peers=PEERS --codec=CODEC " + " ".join(options)
        header = ["peers, codec", "holdfast, ms", "gloo fp32, ms", "times gloo's speed"]
        header += ["holdfast's CPU, s a peer", "gloo's"]
        tables.append(Table(title, [command], header, rows, [ABOUT_LOOPBACK]))
    by_part = raw[: len(COUNTS) * len(CODECS)]
    parts = list(by_part[0]["parts_s"])
    rows = [[_case(each), *(f"{each['parts_s'][part]:.3f}" for part in parts)] for each in by_part]
    title = "CPU seconds of one peer's round of 256 MiB, by part, in the first table's runs"
    tables.append(Table(title, [], ["peers, codec", *parts], rows, [ABOUT_PARTS]))
    return tables, raw


ABOUT_LOOPBACK = (
    "Both sides of every pair run on the cores of this one machine. holdfast's bytes are "
    "encrypted (AES-256-GCM) and its results hashed (BLAKE3); gloo's are neither."
)


ABOUT_PARTS = (
    "*Adding* is decoding, too, and the sums of squares; the *interpreter* has what is left: "
    "encoding, the event loop, threads, locks. What gloo does of it is copying and adding."
)


def _case(figures: Report) -> str:
    return f"{figures['peers']}, {figures['codec']}"


def _against_gloo(figures: Report) -> list[str]:
    return [
        _case(figures),
        _ms(figures["median_s"]),
        _ms(figures["gloo_median_s"]),
        f"{figures['ratio']:.2f}",
        f"{figures['cpu_s']:.3f}",
        f"{figures['gloo_cpu_s']:.3f}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
