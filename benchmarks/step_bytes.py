"""The bytes that a peer sends in a step, beside those of data parallel.

    python -m benchmarks.step_bytes --fragments 1,10

Real masters and peers in the lab. Training steps are noise and a sleep, since two cores cannot
train four models. Bytes are the lab's own count, of packets, the master's and everything that is no
round included; without the packets' headers they are what the sockets carried.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

from benchmarks.lab_run import ONE_FRAGMENT, LabRun, running
from benchmarks.report import Measured, Table, bench_parser, listed, run_main, say, tell
from benchmarks.wan_lab import HEADER_BYTES, Host, WanLab

MBIT, DELAY_MS = 200.0, 10.0  # of a peer's line; 40 ms from a machine to another and back
DATA_PARALLEL_BYTES = 2  # of a gradient in bf16
WAIT_S = 150.0  # for anything
PHASES = 2  # of H steps, that count

SPEC = """
[run]
name = "step-bytes"
[diloco]
sync_every = {sync_every}
fragments = {fragments}
overlap = {overlap}
[reduce]
codec_up = "nf4"
codec_down = "nf4"
[membership]
contributors = {peers}
min_members = {peers}
"""


@frozen
class Case:
    """One run.

    Attributes:
      value_count: of the model's float32 values.
    """

    fragments: int
    overlap: int = 9
    value_count: int = 7_950_000
    sync_every: int = 100
    step_s: float = 0.2
    peers: int = 4

    @property
    def data_parallel_bytes(self) -> float:
        """Of a peer and a step, out and as many in: an all-reduce of bf16 gradients."""
        return 2 * (self.peers - 1) / self.peers * DATA_PARALLEL_BYTES * self.value_count


def measure(case: Case) -> dict[str, Any]:
    """Live through one case, and return its figures."""
    line = Host(up_mbit=MBIT, down_mbit=MBIT, delay_ms=DELAY_MS)
    hosts = [Host(delay_ms=DELAY_MS)] + [line] * case.peers
    script = [
        *(str(ONE_FRAGMENT), f"--values={case.value_count}", f"--tensors={case.fragments}"),
        *(f"--all-in={case.sync_every}", f"--step-s={case.step_s}"),
    ]
    names = [f"peer{host}" for host in range(1, case.peers + 1)]
    spec = SPEC.format(**asdict(case))
    with WanLab(hosts) as lab, running(lab, script, spec, names) as run:
        first = run.reach(1, WAIT_S)["committed"] + case.fragments
        begin = _sent(lab, run, first)
        end = _sent(lab, run, first + PHASES * case.fragments)
    rounds, packets, packet_bytes = (now - was for now, was in zip(end, begin, strict=True))
    peer_steps = case.peers * rounds * case.sync_every / case.fragments
    sent = (packet_bytes - HEADER_BYTES * packets) / peer_steps
    return {
        **asdict(case),
        "rounds": rounds,
        "bytes_per_step": sent,
        "packet_bytes_per_step": packet_bytes / peer_steps,
        "data_parallel_bytes": case.data_parallel_bytes,
        "times_fewer": case.data_parallel_bytes / sent,
    }


def _sent(lab: WanLab, run: LabRun, count: int) -> tuple[int, int, int]:
    """Wait for so many rounds; return the committed ones, and all hosts' packets and bytes."""
    committed = run.reach(count, WAIT_S)["committed"]
    lines = [host["up"] for host in lab.stats()["hosts"]]
    return committed, sum(e["packets"] for e in lines), sum(e["bytes"] for e in lines)


def step_bytes(counts: Sequence[int] = (1, 10)) -> Measured:
    """The section of RESULTS.md."""
    found = []
    for count in counts:
        say(f"a model in {count} fragments")
        found.append(measure(Case(count)))
    case = Case(1)
    table = Table(
        f"Bytes of a peer and a step, each way: {case.value_count / 1e6:.1f} million parameters, "
        f"{case.peers} peers, H={case.sync_every}, nf4 both ways",
        ["python -m benchmarks.step_bytes"],
        ["P", "sent", "data parallel, bf16", "times fewer", "as packets, times fewer"],
        [
            [
                str(each["fragments"]),
                f"{each['bytes_per_step']:,.0f}",
                f"{each['data_parallel_bytes']:,.0f}",
                f"{each['times_fewer']:.1f}",
                f"{each['data_parallel_bytes'] / each['packet_bytes_per_step']:.1f}",
            ]
            for each in found
        ],
        [
            "Sent: the packets of all hosts as the lab counts them, the master's and everything"
            f" that is no round included, less {HEADER_BYTES} bytes of headers each. Data parallel:"
            " 2 (n - 1)/n bf16 gradients of 2 bytes a parameter, out and in, at each step; its"
            " control messages and headers are not counted, so *as packets* is unfair to us."
        ],
    )
    return [table], found


def main() -> int:
    parser = bench_parser("step_bytes", __doc__)
    parser.add_argument("--fragments", default="1,10", metavar="P[,...]")
    options = parser.parse_args()
    return tell(step_bytes([int(each) for each in listed(options.fragments)]), options)


if __name__ == "__main__":
    sys.exit(run_main("step_bytes", main))
