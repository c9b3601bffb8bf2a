"""The section about rounds over lines that nobody described: real runs, learnt rates, gloo beside
them.

    python -m benchmarks.lines --json lines.json
    python -m benchmarks.lines --profiles even --peers 2,4 --congestion cubic --no-gloo

Each case is a run as users start it: a master, so many ``join`` and their trainers, each on a host
of its own behind a line of ``PROFILES``. Nobody tells them the lines. Beside them, in the same lab
and on the same congestion control, goes PyTorch's gloo, whose ring is also that of torchft's plain
data parallelism.

A round's time is the master's: from the order to reduce until all have the result. *T_LB* is the
time below which no plan can end it, plus two delays.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

from attrs import asdict, evolve, frozen

from benchmarks.gloo import GlooWorker
from benchmarks.lab_run import ONE_FRAGMENT, LabRun, running
from benchmarks.report import Measured, Table, bench_parser, listed, run_main, say, tell
from benchmarks.wan_lab import DEVICE, Host, WanLab
from holdfast.membership.planning.bandwidth import Bandwidth
from holdfast.membership.planning.plan import wire_bytes_per_value
from holdfast.membership.planning.shares import Workload, bound_s

VALUE_BYTES = 4
ROUNDS = 7
COUNTED_FROM = 3  # rounds before it find out what the lines carry
SYNC_EVERY, STEP_S = 10, 0.2  # two seconds between rounds, in which connections cool down
WAIT_S = 900.0  # for a case's rounds; some take a minute each
GLOO_ROUNDS = 3
GLOO_PORT = 29_550

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
    """What line each of a case's machines has.

    Attributes:
      mb: 10^6 bytes of float32 that a round averages.
      host: its part of a path, of which there are two, one at each end.
    """

    about: str
    mb: float
    host: Host

    @property
    def value_count(self) -> int:
        return int(self.mb * 1e6) // VALUE_BYTES

    def lab(self, peers: int, congestion: str, *, master: bool) -> WanLab:
        hosts = [self.host] * peers
        if master:  # as far away as the others, on a line of its own
            hosts = [Host(delay_ms=self.host.delay_ms), *hosts]
        return WanLab([evolve(host, congestion=congestion) for host in hosts], seed=1)

    def workload(self, peers: int, codec: str) -> Workload:
        """What one round is, for the formulas."""
        host, wire_bytes = self.host, self.value_count * wire_bytes_per_value(codec)
        rate = Bandwidth(host.up_mbit * 1e6 / 8, host.down_mbit * 1e6 / 8)
        delay_s = 2 * host.delay_ms / 1e3
        return Workload((rate,) * peers, peers, wire_bytes, wire_bytes, delay_s=delay_s)


# A path crosses two of these: 100 ms there and back, and of 10,000 packets two are lost.
FAR_FIBRE = Host(up_mbit=300, down_mbit=300, delay_ms=25, loss=0.0001)
PROFILES = {
    "even": Profile("equal lines, a continent apart", 32, Host(50, 50, 25, 0.0001)),
    "far-fibre": Profile("fibre, a continent apart", 64, FAR_FIBRE),
}


@frozen
class Case:
    """What is measured, and what came of it; times in seconds.

    Attributes:
      rounds_s: the master's; ``gloo_rounds_s``: the slowest rank's, empty if not measured.
      t_lb_s: below which no plan can end a round.
      daemon_s, trainer_s: processor seconds of a peer's daemon, and of its trainer with the steps
        between two rounds, by round; ``gloo_processor_s``: of a rank.
      sent_over_payload: bytes that all lanes sent over those that had to leave the peers.
    """

    profile: str
    peers: int
    codec: str
    congestion: str
    rounds_s: tuple[float, ...]
    t_lb_s: float
    sent_over_payload: float
    late_ms_max: float
    daemon_s: float
    trainer_s: float
    gloo_rounds_s: tuple[float, ...] = ()
    gloo_processor_s: float = 0.0

    @property
    def round_s(self) -> float:
        return statistics.median(self.rounds_s[COUNTED_FROM - 1 :])

    @property
    def row(self) -> list[str]:
        gloo = self.gloo_rounds_s
        return [
            f"{self.profile}, {self.peers}, {self.codec}",
            self.congestion,
            f"{self.round_s:.2f}",
            f"{self.t_lb_s:.2f}",
            f"{self.t_lb_s / self.round_s:.0%}",
            f"{self.rounds_s[0]:.2f}",
            f"{statistics.median(gloo):.2f}" if gloo else "",
            f"{self.daemon_s:.2f} + {self.trainer_s:.2f}",
            f"{self.gloo_processor_s:.2f}" if gloo else "",
            f"{self.sent_over_payload:.3f}",
        ]


def measure(name: str, peers: int, codec: str, congestion: str, rounds: int, gloo: bool) -> Case:
    say(f"{name}, {peers} peers, {codec}, {congestion}")
    profile = PROFILES[name]
    names = [f"peer{number}" for number in range(1, peers + 1)]
    script = [str(ONE_FRAGMENT), f"--values={profile.value_count}", f"--step-s={STEP_S}"]
    spec = SPEC.format(sync_every=SYNC_EVERY, codec=codec, peers=peers, congestion=congestion)
    with (
        profile.lab(peers, congestion, master=True) as lab,
        running(lab, script, spec, names) as run,
    ):
        first = run.reach(1, WAIT_S)["committed"]
        before = _sent(run, names)
        used_before = _processor_s(run, names)
        status = run.reach(rounds, WAIT_S)
        sent = _sent(run, names) - before
        counted = status["committed"] - first
        daemon_s, trainer_s = (
            (after - used) / (peers * counted)
            for after, used in zip(_processor_s(run, names), used_before, strict=True)
        )
        done = [each for each in status["past_rounds"] if each["outcome"] == "committed"]
        late_ms = lab.stats()["late_ms_max"]
    # Each contribution but the owner's has to leave the peers, and each result.
    payload = 2 * (peers - 1) * profile.value_count * wire_bytes_per_value(codec)
    return Case(
        name,
        peers,
        codec,
        congestion,
        tuple(round(each["reduce_s"], 3) for each in done),
        bound_s(profile.workload(peers, codec)),
        sent / (payload * counted),
        late_ms,
        round(daemon_s, 3),
        round(trainer_s, 3),
        *gloo_rounds(profile, peers, congestion) if gloo and codec == "fp32" else ((), 0.0),
    )


def _processor_s(run: LabRun, names: Sequence[str]) -> tuple[float, float]:
    """Processor seconds so far of all daemons, and of all trainers."""
    daemons, trainers = zip(*map(run.processor_s, names), strict=True)
    return sum(daemons), sum(trainers)


def _sent(run: LabRun, names: Sequence[str]) -> float:
    """Bytes that lanes have sent since the start."""
    return float(sum(run.peer(name)["bulk_sent_bytes"] for name in names))


def gloo_rounds(profile: Profile, peers: int, congestion: str) -> tuple[tuple[float, ...], float]:
    """Measure gloo's all-reduce of the same float32 values.

    Returns:
      The slowest rank's time, by round, and a rank's processor seconds for one.
    """
    with profile.lab(peers, congestion, master=False) as lab, ExitStack() as stack:
        workers = [
            GlooWorker(
                partial(lab.popen, rank),
                rank=rank,
                peers=peers,
                master=lab.address(0),
                port=GLOO_PORT,
                interface=DEVICE,
                values=profile.value_count,
            )
            for rank in range(peers)
        ]
        for worker in workers:
            stack.callback(worker.close)
        _turn(workers, "begin")
        turns = []
        for _round in range(GLOO_ROUNDS):
            turns.append(_turn(workers, "reduce"))
            time.sleep(SYNC_EVERY * STEP_S)
    times = tuple(round(max(each["s"] for each in ranks), 3) for ranks in turns)
    used = statistics.mean(each["cpu_s"] for ranks in turns for each in ranks)
    return times, round(used, 3)


def _turn(workers: Sequence[GlooWorker], word: str) -> list[dict[str, Any]]:
    for worker in workers:
        worker.say(word)
    return [worker.hear() for worker in workers]


def lines(
    profiles: Sequence[str] = tuple(PROFILES),
    peers: Sequence[str] = ("2", "4"),
    congestion: Sequence[str] = ("bbr", "cubic"),
    codecs: Sequence[str] = ("fp32",),
    *,
    rounds: int = ROUNDS,
    gloo: bool = True,
) -> Measured:
    """The section of RESULTS.md; takes a quarter of an hour."""
    cases = []
    for name, count, codec, control in product(profiles, peers, codecs, congestion):
        cases.append(measure(name, int(count), codec, control, rounds, gloo))
        say(" | ".join(cases[-1].row))
    table = Table(
        "Rounds over lines that nobody described, in real runs; medians from the third round on",
        ["python -m benchmarks.lines --json lines.json"],
        [
            *("line, peers, codec", "congestion control", "a round, s", "T_LB, s"),
            *("share of T_LB's speed", "first round, s", "gloo, s"),
            *("processor s, daemon + trainer", "processor s, gloo", "sent over payload"),
        ],
        [case.row for case in cases],
        [
            *(f"- {name}: {each.about}" for name, each in PROFILES.items()),
            (
                "Each peer's own line, and each peer on a host of its own. gloo's time is that of"
                " the slowest rank, without a master, membership or encryption. Processor seconds:"
                " of a peer and a round, with the two seconds of steps before it."
            ),
        ],
    )
    return [table], [asdict(case) for case in cases]


def main() -> int:
    parser = bench_parser("lines", __doc__)
    parser.add_argument("--profiles", default=",".join(PROFILES), help=", ".join(PROFILES))
    parser.add_argument("--peers", default="2,4")
    parser.add_argument("--congestion", default="bbr,cubic")
    parser.add_argument("--codecs", default="fp32")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--no-gloo", action="store_true", help="only ours")
    options = parser.parse_args()
    lists = (options.profiles, options.peers, options.congestion, options.codecs)
    found = lines(*map(listed, lists), rounds=options.rounds, gloo=not options.no_gloo)
    return tell(found, options)


if __name__ == "__main__":
    sys.exit(run_main("lines", main))
