"""The section about rounds over lines that nobody described: real runs, learnt rates, rivals beside them.

    python -m benchmarks.lines --json lines.json
    python -m benchmarks.lines --profiles even,fibre --peers 2,4 --congestion cubic --rival none

Each case is a run as users start it: a master, so many ``join`` and their trainers, each on a host of its
own behind a line of ``line_profiles.toml``. Nobody tells them the lines. Beside them, in the same lab and on
the same congestion control, goes PyTorch's gloo, whose ring is also that of torchft's plain data parallelism.

A round's time is the master's: from the order to reduce until all have the result. *T_LB* is the time
below which no plan can end it, plus two delays.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from benchmarks.gloo import GlooWorker
from benchmarks.lab_run import LabRun
from benchmarks.report import Measured, Table, keep_json, run_main, say, show
from benchmarks.wan_lab import Host, WanLab
from holdfast.daemon.cli.fleet import Status
from holdfast.membership.planning.bandwidth import Bandwidth
from holdfast.membership.planning.plan import wire_bytes_per_value
from holdfast.membership.planning.shares import Workload, bound_s

PROFILES = Path(__file__).with_name("line_profiles.toml")
SCRIPT = Path(__file__).with_name("one_fragment.py")
VALUE_BYTES = 4
ROUNDS = 7
COUNTED_FROM = 3  # rounds before it find out what the lines carry
SYNC_EVERY, STEP_S = 10, 0.2  # two seconds between rounds, in which connections cool down
WAIT_S = 900.0  # for a case's rounds; some take a minute each
RIVAL_ROUNDS = 3
RIVAL_PORT = 29_550
RIVALS = ("gloo", "none")

SPEC = """\
[run]
name = "lines"
[diloco]
sync_every = {sync_every}
outer_lr = 0.4
[reduce]
codec_up = "{codec}"
codec_down = "{codec}"
congestion = "{congestion}"
[membership]
contributors = {peers}
min_members = {peers}
deadline_s = 60
"""


@frozen
class Profile:
    """What lines a case's machines have.

    Attributes:
      mb: 10^6 bytes of float32 that a round averages.
      hosts: repeated for as many peers as there are.
    """

    name: str
    about: str
    mb: float
    hosts: tuple[Host, ...]

    @classmethod
    def of(cls, name: str, content: dict[str, Any]) -> Profile:
        hosts = tuple(
            Host(
                up_mbit=each["up"],
                down_mbit=each["down"],
                delay_ms=each["round_trip_ms"] / 4,  # a path crosses two hosts' links, both ways
                loss=each["loss"] / 2,
            )
            for each in content["hosts"]
        )
        return cls(name, content["about"], content["mb"], hosts)

    def lines(self, peers: int) -> list[Host]:
        return list(islice(cycle(self.hosts), peers))

    @property
    def value_count(self) -> int:
        return int(self.mb * 1e6) // VALUE_BYTES


def profiles() -> dict[str, Profile]:
    with PROFILES.open("rb") as file:
        return {name: Profile.of(name, each) for name, each in tomllib.load(file).items()}


def workload(profile: Profile, peers: int, codec: str) -> Workload:
    """What one round is, for the formulas."""
    hosts = profile.lines(peers)
    rates = tuple(Bandwidth(h.up_mbit * 1e6 / 8, h.down_mbit * 1e6 / 8) for h in hosts)
    wire_bytes = profile.value_count * wire_bytes_per_value(codec)
    first, second = (sorted(h.delay_ms for h in hosts) * 2)[-2:] if peers > 1 else (0, 0)
    return Workload(rates, peers, wire_bytes, wire_bytes, delay_s=(first + second) / 1e3)


def payload_bytes(profile: Profile, peers: int, codec: str) -> float:
    """What has to leave all peers together in a round: each contribution but the owner's, each result."""
    return 2 * (peers - 1) * profile.value_count * wire_bytes_per_value(codec)


def lab_of(profile: Profile, peers: int, congestion: str, *, master: bool) -> WanLab:
    hosts = profile.lines(peers)
    if master:  # as far away as the others, on a line of its own
        hosts = [Host(delay_ms=min(h.delay_ms for h in hosts)), *hosts]
    return WanLab([evolve(host, congestion=congestion) for host in hosts], seed=1)


# ---------------------------------------------------------------- a run that learns


def learnt(
    profile: Profile, peers: int, codec: str, congestion: str, rounds: int, folder: Path
) -> dict[str, Any]:
    """Measure the rounds of a real run."""
    names = [f"peer{number}" for number in range(1, peers + 1)]
    script = [str(SCRIPT), f"--values={profile.value_count}", f"--step-s={STEP_S}"]
    with (
        lab_of(profile, peers, congestion, master=True) as lab,
        LabRun(lab, folder, script) as run,
    ):
        run.start_master(
            SPEC.format(sync_every=SYNC_EVERY, codec=codec, peers=peers, congestion=congestion)
        )
        for host, name in enumerate(names, 1):
            run.join_on(host, name, founder=name == names[0])
        first = run.until(_committed(1), "a round", WAIT_S)["committed"]
        before = _carried(lab, run, names)
        status = run.until(_committed(rounds), f"{rounds} rounds", WAIT_S)
        after = _carried(lab, run, names)
        done = [each for each in status["past_rounds"] if each["outcome"] == "committed"]
        late_ms = lab.stats()["late_ms_max"]
    due = payload_bytes(profile, peers, codec) * (status["committed"] - first)
    return {
        "rounds_s": tuple(round(each["reduce_s"], 3) for each in done),
        "sent_over_payload": (after[0] - before[0]) / due,
        "wire_over_payload": (after[1] - before[1]) / due,
        "late_ms_max": late_ms,
    }


def _committed(count: int) -> Callable[[Status], bool]:
    return lambda status: bool(status["committed"] >= count)


def _carried(lab: WanLab, run: LabRun, names: Sequence[str]) -> tuple[float, float]:
    """Bytes that lanes have sent, and bytes of packets that the hosts have sent, since the start."""
    sent = sum(run.peer(name)["bulk_sent_bytes"] for name in names)
    return sent, sum(host["up"]["bytes"] for host in lab.stats()["hosts"][1:])


# ---------------------------------------------------------------- a rival


def rival_rounds(profile: Profile, peers: int, congestion: str, rounds: int) -> tuple[float, ...]:
    """Measure gloo's all-reduce of the same float32 values: the slowest rank's time, per round."""
    with lab_of(profile, peers, congestion, master=False) as lab, ExitStack() as stack:
        workers = [
            GlooWorker(
                partial(lab.popen, rank),
                rank=rank,
                peers=peers,
                master=lab.address(0),
                port=RIVAL_PORT,
                address=lab.address(rank),
                values=profile.value_count,
            )
            for rank in range(peers)
        ]
        for worker in workers:
            stack.callback(worker.close)
        _turn(workers, "begin")
        times = []
        for _round in range(rounds):
            times.append(round(max(each["s"] for each in _turn(workers, "reduce")), 3))
            time.sleep(SYNC_EVERY * STEP_S)
    return tuple(times)


def _turn(workers: Sequence[GlooWorker], word: str) -> list[dict[str, Any]]:
    for worker in workers:
        worker.say(word)
    return [worker.hear() for worker in workers]


# ---------------------------------------------------------------- cases


@frozen
class Case:
    """What is measured, and what came of it; times in seconds.

    Attributes:
      round_s: the median from the third round on; ``rounds_s`` are all, in order.
      t_lb_s: below which no plan can end a round.
      rival_s: the median of the rival's; None: not measured.
      sent_over_payload: bytes that all lanes sent over those that had to leave the peers.
      wire_over_payload: the same of IP packets on the lines: headers, control and TCP's retransmissions.
      commit: of the program that was measured.
    """

    profile: str
    peers: int
    codec: str
    congestion: str
    round_s: float
    t_lb_s: float
    rounds_s: tuple[float, ...]
    rival: str = ""
    rival_s: float | None = None
    rival_rounds_s: tuple[float, ...] = ()
    sent_over_payload: float | None = None
    wire_over_payload: float | None = None
    late_ms_max: float = 0.0
    commit: str = ""

    @property
    def share(self) -> float:
        """Of T_LB's speed."""
        return self.t_lb_s / self.round_s


def measure(
    profile: Profile, peers: int, codec: str, congestion: str, *, rounds: int, rival: str
) -> Case:
    say(f"{profile.name}, {peers} peers, {codec}, {congestion}")
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        found = learnt(profile, peers, codec, congestion, rounds, Path(directory))
    theirs: tuple[float, ...] = ()
    if rival != "none" and codec == "fp32":
        theirs = rival_rounds(profile, peers, congestion, RIVAL_ROUNDS)
    return Case(
        profile.name,
        peers,
        codec,
        congestion,
        statistics.median(found["rounds_s"][COUNTED_FROM - 1 :]),
        bound_s(workload(profile, peers, codec)),
        rival=rival if theirs else "",
        rival_s=statistics.median(theirs) if theirs else None,
        rival_rounds_s=theirs,
        **found,
    )


def told_of(case: Case) -> str:
    rival = f", {case.rival} {case.rival_s:.2f} s" if case.rival_s else ""
    sent = f", sent {case.sent_over_payload:.3f}" if case.sent_over_payload else ""
    wire = f", on the wire {case.wire_over_payload:.3f}" if case.wire_over_payload else ""
    rounds = " ".join(f"{each:.2f}" for each in case.rounds_s)
    return (
        f"  {case.round_s:.2f} s of T_LB {case.t_lb_s:.2f}: {case.share:.0%}{rival}{sent}{wire}\n"
        f"  rounds {rounds}; hub late {case.late_ms_max:.1f} ms"
    )


# What the section of RESULTS.md measures: profiles, peers, codecs, congestion control, and the rival.
MATRIX = (
    ("even,cable,fibre,far-fibre,lte", "2,4", "fp32", "bbr,cubic", "gloo"),
    ("mixed", "4", "fp32", "bbr,cubic", "gloo"),
    ("even,cable,lte", "8", "fp32", "bbr,cubic", "none"),
    ("long", "4", "fp32,int8", "bbr", "none"),
    ("satellite", "4", "fp32", "bbr", "none"),
    ("data-centre", "2", "fp32", "cubic", "gloo"),
    ("even", "4", "nf4", "bbr", "none"),
)


def table_of(cases: Sequence[Case]) -> Table:
    return Table(
        "Rounds over lines that nobody described, in real runs; medians from the third round on",
        ["python -m benchmarks.lines --json lines.json"],
        [
            "line, peers, codec",
            "congestion control",
            "a round, s",
            "T_LB, s",
            "share of T_LB's speed",
            "first round, s",
            "rival, s",
            "sent over payload",
        ],
        [
            [
                f"{case.profile}, {case.peers}, {case.codec}",
                case.congestion,
                f"{case.round_s:.2f}",
                f"{case.t_lb_s:.2f}",
                f"{case.share:.0%}",
                f"{case.rounds_s[0]:.2f}",
                f"{case.rival_s:.2f} ({case.rival})" if case.rival_s else "",
                f"{case.sent_over_payload:.3f}" if case.sent_over_payload else "",
            ]
            for case in cases
        ],
        [
            *(f"- {each.name}: {each.about}" for each in profiles().values()),
            "Each peer's own line, and each peer on a host of its own. A rival's time is that of the slowest"
            " rank, without a master, membership or encryption.",
        ],
    )


def lines() -> Measured:
    """Measure the section of RESULTS.md; takes about an hour."""
    cases = [
        case
        for part in MATRIX
        for case in measured_cases(*map(_listed, part[:4]), rival=part[4], rounds=ROUNDS)
    ]
    return [table_of(cases)], [asdict(case) for case in cases]


def measured_cases(
    names: Sequence[str],
    peers: Sequence[str],
    codecs: Sequence[str],
    congestion: Sequence[str],
    *,
    rival: str,
    rounds: int,
) -> Iterator[Case]:
    """Measure all combinations, one after the other."""
    known = profiles()
    for name, count, codec, control in product(names, peers, codecs, congestion):
        case = measure(known[name], int(count), codec, control, rounds=rounds, rival=rival)
        say(told_of(case))
        yield case


def _listed(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lines", description=(__doc__ or "").partition("\n")[0]
    )
    known = profiles()
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--profiles", default=",".join(known), help=", ".join(known))
    parser.add_argument("--peers", default="2,4,8")
    parser.add_argument("--congestion", default="bbr,cubic")
    parser.add_argument("--codecs", default="fp32")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--rival", choices=RIVALS, default=RIVALS[0])
    options = parser.parse_args()
    cases = []
    for case in measured_cases(
        _listed(options.profiles),
        _listed(options.peers),
        _listed(options.codecs),
        _listed(options.congestion),
        rival=options.rival,
        rounds=options.rounds,
    ):
        cases.append(case)
        keep_json([asdict(each) for each in cases], options.json)
    show([table_of(cases)])
    return 0


if __name__ == "__main__":
    sys.exit(run_main("lines", main))
