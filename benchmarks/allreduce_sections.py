"""The sections about one all-reduce beside gloo's: on this machine, and over a path that loses
packets.
"""

from __future__ import annotations

from benchmarks.ranks import Report, run_ranks
from benchmarks.report import Measured, Table, say
from benchmarks.wan_lab import Host, WanLab

COUNTS, CODECS = (2, 4), ("fp32", "int8", "nf4")  # peers; values on the wire
LOOPBACK_BULK = ("--size=256MiB", "--repeat=7", "--warm-up=2", "--vs=gloo")
LOOPBACK_SMALL = ("--size=4KiB", "--repeat=200", "--warm-up=20", "--vs=gloo")

# A path crosses two hosts' links: 100 ms there and back, and of 10,000 packets two are lost.
LOSSY = Host(up_mbit=300, down_mbit=300, delay_ms=25, loss=0.0001)
LOSSY_BULK = ("--size=64MiB", "--up=300", "--delay-ms=50", "--repeat=5", "--warm-up=4")
LOSSY_GLOO = ("--size=64MiB", "--repeat=1", "--warm-up=0", "--vs=gloo")  # a minute and more each


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
    return tables, raw


ABOUT_LOOPBACK = (
    "Both sides of every pair run on the cores of this one machine. holdfast's bytes are "
    "encrypted (AES-256-GCM) and its results hashed (BLAKE3); gloo's are neither."
)


def _against_gloo(figures: Report) -> list[str]:
    return [
        f"{figures['peers']}, {figures['codec']}",
        _ms(figures["median_s"]),
        _ms(figures["gloo_median_s"]),
        f"{figures['ratio']:.2f}",
        f"{figures['cpu_s']:.3f}",
        f"{figures['gloo_cpu_s']:.3f}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


# ---------------------------------------------------------------- a long lossy path


def lossy() -> Measured:
    """Our rounds with each codec, and one of gloo's, in a lab of equal hosts."""
    rows, raw = [], []
    for peers in COUNTS:
        of = f"--peers={peers}"
        with WanLab([LOSSY] * peers) as lab:
            say(f"{peers} peers, 64 MiB, gloo: a minute and more a round")
            gloo_s = run_ranks("allreduce", peers, [of, *LOSSY_GLOO], lab)["gloo_median_s"]
            fp32: Report = {}
            for codec in CODECS:
                say(f"{peers} peers, 64 MiB, {codec}")
                lab.stats()  # from here on the hub counts for us
                options = [of, *LOSSY_BULK, f"--codec={codec}"]
                figures = run_ranks("allreduce", peers, options, lab)
                figures["hub_late_ms_max"] = lab.stats()["late_ms_max"]
                fp32 = fp32 or {**figures, "gloo_median_s": gloo_s}
                raw.append(fp32 if figures["codec"] == "fp32" else figures)
                rows.append(_of_a_bound(raw[-1], fp32))
    late_ms = max(figures["hub_late_ms_max"] for figures in raw)
    table = Table(
        "64 MiB of float32 over 300 Mbit/s each way, 100 ms round trip, 0.02 % loss; "
        "median of 5 rounds, 4 discarded (gloo: one round)",
        ["make bench ARGS='--only lossy'"],
        [
            *("peers, codec", "holdfast, s", "T_LB, s", "share of T_LB's speed", "gloo fp32, s"),
            *("socket bytes of fp32's", "time of fp32's"),
        ],
        rows,
        [
            "gloo's connections use CUBIC, the system's default; ours ask for BBR. The codecs of"
            f" one number of peers share one lab. The lab's hub was late by {late_ms:.1f} ms at"
            " most; on a quiet machine it is 3 ms."
        ],
    )
    return [table], raw


def _of_a_bound(figures: Report, fp32: Report) -> list[str]:
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
