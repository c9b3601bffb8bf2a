"""The section about overlap: trainers that nobody keeps waiting, and the bytes that takes.

Real masters and peers in the lab, each peer with a real trainer and the production hook; only the
trainers' steps are sleeps of a given length (``overlap_trainer``), since two cores cannot train four
models. *Busy* is steps times their length by the time that they took, from one merge to another one
of the same fragment, after a warm-up: what the hook copies and merges counts as lost, too.

    python -m benchmarks.overlap --cases wan              one table by itself
    make bench ARGS='--only overlap'                      all of them, into RESULTS.md

The settings of a case are given; or fragments and overlap are what ``holdfast config plan``'s formulas come
to, for its H and codec the fewest with which nobody waits on ``LINE_SHARE`` of the line. Bytes are the
lab's own count, of packets; without their headers they are what the sockets carried.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from benchmarks.lab_run import LabRun
from benchmarks.report import BenchError, Measured, Table, keep_json, run_main, say, show
from benchmarks.wan_lab import Host, WanLab
from holdfast.daemon.cli.fleet import Status
from holdfast.daemon.cli.plan_table import format_codec
from holdfast.membership.master.rounds.round_scheduler import ROUNDS_IN_FLIGHT_MAX
from holdfast.membership.planning.bandwidth import Bandwidth
from holdfast.membership.planning.predict import Conditions, predict
from holdfast.membership.spec.spec import OVERLAP_AUTO_MAX, DilocoTable, ReduceTable, RunSpec

PEERS = 4
DELAY_MS = 10.0  # of a host's line, one way: 40 ms from a machine to another and back
LINE_SHARE = 0.7  # of a line, for which settings are chosen: headers, hiccups, and TCP starts anew
HEADER_BYTES = 52  # of a packet: IPv4 and TCP with time stamps
DATA_PARALLEL_BYTES = 2  # of a gradient in bf16
WAIT_S = 150.0  # for anything
BUSY_GOAL, BLOCKING_MAX = 0.98, 0.70  # of the demo's model, with overlap and without
SLOW_GOAL = 0.90  # of 30 million parameters
TIMES_GOAL = 370.0

MEMBERSHIP = """
[run]
name = "overlap"
[membership]
contributors = {peers}
min_members = {peers}
"""


@frozen
class Case:
    """One run.

    Attributes:
      width, layers: of the demo's model.
      mbit: of each peer's line, both ways.
      sync_every: H.
      codec: both ways.
      fragments, overlap: P and tau; None: as planned.
      warm, rounds: H steps before anything counts, and in which it does.
    """

    name: str
    width: int
    layers: int
    mbit: float
    step_s: float
    sync_every: int
    codec: str
    fragments: int | None = None
    overlap: int | None = None
    warm: int = 1
    rounds: int = 3
    peers: int = PEERS

    @property
    def value_count(self) -> int:
        """Blocks of matrices of 12 widths squared and two norms; two embeddings, the last norm."""
        return self.layers * (12 * self.width**2 + 2 * self.width) + (256 + 64 + 1) * self.width

    def conditions(self, line_share: float = 1.0) -> Conditions:
        rate = line_share * self.mbit * 1e6 / 8
        return Conditions(
            self.value_count,
            self.step_s,
            self.peers,
            Bandwidth(rate, rate),
            2 * DELAY_MS / 1e3,
            ROUNDS_IN_FLIGHT_MAX,
        )

    def spec(self) -> RunSpec:
        """As given, or else the least overlap with which nobody waits.

        Raises:
          BenchError: none would do.
        """
        if self.fragments is not None and self.overlap is not None:
            return self._with(self.fragments, self.overlap)
        conditions = self.conditions(LINE_SHARE)
        for overlap in range(min(OVERLAP_AUTO_MAX, self.sync_every - 1) + 1):
            for fragments in range(1, self.layers + 1):
                if self.sync_every % fragments:
                    continue
                spec = self._with(fragments, overlap)
                needed_bits_per_s = predict(spec, conditions).needed_bits_per_s
                if needed_bits_per_s <= 8 * conditions.line.up_bytes_per_s:
                    return spec
        raise BenchError(f"{self.name}: no settings keep trainers busy on {self.mbit:g} Mbit/s")

    def _with(self, fragments: int, overlap: int) -> RunSpec:
        return RunSpec(
            diloco=DilocoTable(sync_every=self.sync_every, fragments=fragments, overlap=overlap),
            reduce=ReduceTable(codec_up=self.codec, codec_down=self.codec),
        )


# The demo's model, wider, so that a fragment takes about the overlap's steps on the line; its
# blocking counterpart; thirty million parameters; and what H=100 and 4 bits come to.
WAN = Case("streaming", 208, 4, 20.0, 0.2, 40, "fp32")
BLOCKING = Case("blocking", 208, 4, 20.0, 0.2, 40, "fp32", 1, 0, rounds=2)
# Four daemons and trainers with so much share two cores, which the formulas leave out: a round takes
# 0.6 s, not 0.3 s.
LARGE = Case("30 million", 396, 16, 50.0, 0.1, 128, "nf4", 16, 12, rounds=2)
WHOLE = Case("whole", 256, 10, 200.0, 0.2, 100, "nf4", 1, 9, rounds=1)
PARTS = Case("in parts", 256, 10, 200.0, 0.2, 100, "nf4", 10, 9, rounds=1)
CASES = {"wan": (WAN, BLOCKING), "large": (LARGE,), "bytes": (WHOLE, PARTS)}


@frozen
class Found:
    """What one case came to.

    Attributes:
      busy: by peer, of its time.
      waited, hook, late: of all time, means: in which trainers waited for the run, in which the hook
        worked, and by which steps were longer than they should have been.
      contributed: of all rounds' places, those that were taken.
      reduce_s: from the order to reduce to the commit, the median.
      bytes_per_step: that a peer's sockets sent, with its part of the master's.
      packet_bytes_per_step: with TCP's and IP's headers.
      peak_bytes_per_s: in the time of the overlap, at the most.
      predicted: busy, by the formulas.
    """

    case: Case
    fragments: int
    overlap: int
    codecs: str
    seconds: float
    round_count: int
    busy: list[float]
    waited: float
    hook: float
    late: float
    contributed: float
    reduce_s: float
    bytes_per_step: float
    packet_bytes_per_step: float
    peak_bytes_per_s: float
    predicted: float
    hub_late_ms: float

    @property
    def mean_busy(self) -> float:
        return statistics.fmean(self.busy)

    @property
    def data_parallel_bytes(self) -> float:
        """Of a peer and a step, out and as many in: an all-reduce of bf16 gradients."""
        peers = self.case.peers
        return 2 * (peers - 1) / peers * DATA_PARALLEL_BYTES * self.case.value_count

    @property
    def times_fewer(self) -> float:
        return self.data_parallel_bytes / self.bytes_per_step


@frozen
class Sample:
    """What all hosts had sent when so many rounds were committed."""

    at_s: float
    committed: int
    packets: int
    packet_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.packet_bytes - HEADER_BYTES * self.packets


@frozen
class Watched:
    """The part of a run that counts."""

    samples: Sequence[Sample]
    rounds: Sequence[Mapping[str, Any]]
    hub_late_ms: float


def measure(case: Case) -> Found:
    """Live through one case."""
    spec = case.spec()
    hosts = [Host(delay_ms=DELAY_MS)]
    hosts += [Host(up_mbit=case.mbit, down_mbit=case.mbit, delay_ms=DELAY_MS)] * case.peers
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        WanLab(hosts) as lab,
        LabRun(lab, Path(directory), _script(case)) as run,
    ):
        run.start_master(toml_of(spec) + MEMBERSHIP.format(peers=case.peers))
        logs = {name: Path(directory) / f"{name}.steps" for name in names_of(case)}
        for host, (name, log) in enumerate(logs.items(), 1):
            run.join_on(host, name, "--log", str(log), founder=host == 1)
        run.until(lambda s: s["committed"] >= 1, "a first round", WAIT_S)
        say(f"{case.name}: {toml_of(spec).replace(chr(10), ' ')}; the first round is committed")
        fragments = spec.diloco.fragments
        first = (run.master()["committed"] // fragments + case.warm) * fragments
        last = first + case.rounds * fragments
        watched = watch(lab, run, first, last)
        spans = [span_of(log, first, last) for log in logs.values()]
    return found(case, spec, watched, spans)


def toml_of(spec: RunSpec) -> str:
    """Return the settings of a case as TOML for run.toml."""
    diloco, reduce = spec.diloco, spec.reduce
    return (
        f"[diloco]\nsync_every = {diloco.sync_every}\nfragments = {diloco.fragments}\n"
        f"overlap = {diloco.overlap}\n[reduce]\n"
        f'codec_up = "{reduce.codec_up}"\ncodec_down = "{reduce.codec_down}"'
    )


def names_of(case: Case) -> list[str]:
    return [f"peer{number}" for number in range(1, case.peers + 1)]


def _script(case: Case) -> list[str]:
    options = {
        "width": case.width,
        "layers": case.layers,
        "step-s": case.step_s,
        "all-in": case.sync_every,
    }
    given = [f"--{name}={value}" for name, value in options.items()]
    return [str(Path(__file__).with_name("overlap_trainer.py")), *given]


def watch(lab: WanLab, run: LabRun, first: int, last: int) -> Watched:
    """Count what is sent from one commit to another."""
    samples: list[Sample] = []
    rounds: dict[int, Mapping[str, Any]] = {}
    late_ms = 0.0

    def over(status: Status) -> bool:
        nonlocal late_ms
        stats = lab.stats()
        lines = [host["up"] for host in stats["hosts"]]
        if status["committed"] >= first:
            packets, sent = (sum(line[key] for line in lines) for key in ("packets", "bytes"))
            if samples:  # before, it was late while processes started
                late_ms = max(late_ms, stats["late_ms_max"])
            samples.append(Sample(status["asked_s"], status["committed"], packets, sent))
        for each in status["past_rounds"]:
            rounds[each["round"]] = each
        return bool(status["committed"] >= last)

    run.until(over, f"{last} rounds", WAIT_S)
    if samples[0].committed == samples[-1].committed:
        raise BenchError("the rounds were over before they were looked at: take more of them")
    committed = [each for _, each in sorted(rounds.items()) if each["outcome"] == "committed"]
    return Watched(samples, committed[first:last], late_ms)


def span_of(log: Path, first: int, last: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A trainer's marks when these rounds had been merged; waits for the last one."""
    until_s = time.monotonic() + WAIT_S
    while True:
        text = log.read_text() if log.exists() else ""
        marks = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        if marks and marks[-1]["rounds"] >= last:
            return tuple(
                next(mark for mark in marks if mark["rounds"] >= count) for count in (first, last)
            )
        if time.monotonic() > until_s:
            raise BenchError(f"{log.name}: no trainer has merged {last} rounds")
        time.sleep(0.05)


def found(
    case: Case,
    spec: RunSpec,
    watched: Watched,
    spans: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> Found:
    """The figures of a case from what was counted."""
    busy, waited, hook, late = [], [], [], []
    for begin, end in spans:
        gone = {key: end[key] - begin[key] for key in end}
        stepped_s = gone["steps"] * case.step_s
        busy.append(stepped_s / gone["at_s"])
        waited.append(gone["waited_s"] / gone["at_s"])
        hook.append(gone["hook_s"] / gone["at_s"])
        late.append((gone["stepping_s"] - stepped_s) / gone["at_s"])
    samples, rounds = watched.samples, watched.rounds
    round_count = samples[-1].committed - samples[0].committed
    peer_steps = case.peers * round_count * case.sync_every / spec.diloco.fragments
    window_s = max(1, spec.diloco.overlap_steps) * case.step_s
    return Found(
        case=case,
        fragments=spec.diloco.fragments,
        overlap=spec.diloco.overlap_steps,
        codecs=" and ".join(
            dict.fromkeys(map(format_codec, (spec.reduce.codec_up, spec.reduce.codec_down)))
        ),
        seconds=statistics.fmean(end["at_s"] - begin["at_s"] for begin, end in spans),
        round_count=len(rounds),
        busy=busy,
        waited=statistics.fmean(waited),
        hook=statistics.fmean(hook),
        late=statistics.fmean(late),
        contributed=statistics.fmean(len(each["contributors"]) / case.peers for each in rounds),
        reduce_s=statistics.median(each["reduce_s"] for each in rounds),
        bytes_per_step=(samples[-1].payload_bytes - samples[0].payload_bytes) / peer_steps,
        packet_bytes_per_step=(samples[-1].packet_bytes - samples[0].packet_bytes) / peer_steps,
        peak_bytes_per_s=most_within(samples, window_s) / window_s / case.peers,
        predicted=predict(spec, case.conditions()).utilisation,
        hub_late_ms=watched.hub_late_ms,
    )


def most_within(samples: Sequence[Sample], window_s: float) -> int:
    """The most that was sent in any such time."""
    most = begin = 0
    for end in samples:
        while end.at_s - samples[begin].at_s > window_s:
            begin += 1
        most = max(most, end.payload_bytes - samples[begin].payload_bytes)
    return most


# ---------------------------------------------------------------- as a page


def overlap() -> Measured:
    """The section of RESULTS.md."""
    return sections(list(CASES))


def sections(names: Sequence[str]) -> Measured:
    """Measure these tables of cases."""
    all_found = {name: [measured(case) for case in CASES[name]] for name in names}
    raw = {
        name: [
            {
                **asdict(each),
                "value_count": each.case.value_count,
                "mean_busy": each.mean_busy,
                "data_parallel_bytes": each.data_parallel_bytes,
                "times_fewer": each.times_fewer,
            }
            for each in some
        ]
        for name, some in all_found.items()
    }
    return [_table(all_found)], raw


def measured(case: Case) -> Found:
    say(
        f"{case.name}: {case.value_count / 1e6:.1f} million parameters, {case.peers} peers at "
        f"{case.mbit:g} Mbit/s, steps of {case.step_s:g} s, H={case.sync_every}"
    )
    each = measure(case)
    say(
        f"{case.name}: busy {each.mean_busy:.1%} ({min(each.busy):.1%} at least), waited "
        f"{each.waited:.1%}, hook {each.hook:.1%}, late {each.late:.1%}; "
        f"{each.times_fewer:.1f} times fewer bytes, {8 * each.peak_bytes_per_s / 1e6:.2f} Mbit/s "
        f"at the peak; {each.contributed:.0%} contributed, a round takes {each.reduce_s:.2f} s"
    )
    return each


def _table(all_found: Mapping[str, Sequence[Found]]) -> Table:
    rows = [
        [
            f"{each.case.value_count / 1e6:.1f} million parameters, H={each.case.sync_every}, steps of "
            f"{each.case.step_s:g} s, {each.case.mbit:g} Mbit/s",
            str(each.fragments),
            str(each.overlap),
            each.codecs,
            f"{each.mean_busy:.1%} ({min(each.busy):.1%})",
            f"{each.waited:.1%}",
            f"{each.hook:.1%}",
            f"{each.late:.1%}",
            f"{each.predicted:.1%}",
            f"{each.reduce_s:.2f}",
            f"{each.bytes_per_step:,.0f}",
            f"{each.times_fewer:.1f}",
            f"{8 * each.peak_bytes_per_s / 1e6:.2f}",
        ]
        for found in all_found.values()
        for each in found
    ]
    return Table(
        f"How busy {PEERS} trainers are on slow lines, {4 * DELAY_MS:g} ms round trip, and what they send",
        ["python -m benchmarks.overlap"],
        [
            "the demo's model, in size",
            "P",
            "tau",
            "codecs",
            "busy (least)",
            "waited",
            "copied and merged",
            "steps were late",
            "predicted",
            "a round, s",
            "bytes of a peer and a step",
            "times fewer than data parallel",
            "peak, Mbit/s",
        ],
        rows,
        [
            "Busy is steps times their length by the time that they took, in the trainers "
            "themselves. Trainers are simulated: a step changes a part of the weights by noise and "
            "sleeps; daemons, hook, arenas and lines are real, all on the cores of this machine. P, "
            "tau and codecs of the first row are the gentlest with which by the formulas of the plan "
            f"nobody waits on {LINE_SHARE:.0%} of the line; the others' are given. Predictions "
            "leave out what it takes to encode, copy and merge.",
            "Bytes: the packets of all hosts as the lab counts them, the master's and everything that "
            f"is no round included, less {HEADER_BYTES} bytes of headers each. Data parallel: "
            "2 (n - 1)/n bf16 gradients of 2 bytes a parameter, out and in, at each step. The peak is "
            f"the most sent within tau steps. Promised: busy at least {BUSY_GOAL:.0%}, where without "
            f"overlap it is under {BLOCKING_MAX:.0%}, and at least {SLOW_GOAL:.0%} with 30 million "
            f"parameters; {TIMES_GOAL:g} times fewer bytes, and a peak that is lower by P.",
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help=", ".join(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = options.cases.split(",")
    if unknown := {*names} - CASES.keys():
        raise BenchError(f"no cases {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    tables, raw = sections(names)
    keep_json(raw, options.json)
    show(tables)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("overlap", main))
