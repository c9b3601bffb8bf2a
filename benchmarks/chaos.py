"""A real run under faults at random instants, and what became of it.

    python -m benchmarks.chaos --minutes 30 --seed 1 --json chaos.json

A master and peers with real trainers (``chaos_trainer``) as processes. From the seed follows a
Poisson schedule (``chaos_schedule``) of kills, stops and cuts; as root every process has a network
namespace of its own and can be cut off, else it all happens on loopback and no cuts are made, which
is said. Before it, the same run for a shorter time without faults: the reference.

What must hold; the exit status is 1 otherwise:

    parity      digests of the shared state are equal at equal versions, at every look at every
                peer's status; so are the bits of the parameters themselves, read from the daemons'
                memory; at the end all are equal at rest
    once        the journal commits every version once, one after the other (``rounds_lost`` is 0:
                no committed version is missing at the end, no daemon goes back to an older one)
    recovery    after the last fault everybody is in sync again, and nobody ended by itself
    loss        on held-out text, of the shared parameters at the newest version that was seen in
                both runs: at most ``LOSS_RATIO_MAX`` times the reference's
    goodput     at least ``GOODPUT_MIN``

*Goodput* is useful tokens per live contributor-second, divided by the same figure of the reference.
Useful are tokens that a commit adds (a contributor that is in only some of its chunks counts for
their share), committed between the first and the last look. Live, at a look, is a peer that says
itself that it is a contributor in sync with a trainer attached, unless a fault holds it at that
moment: it is killed, stopped, or cut off from the master. While the master is away, contributors
are live; so are two peers that cannot reach each other. What a run loses by waiting, by steps that
die with their trainer and by rounds without somebody who is well is therefore in the figure; what
is not is the time in which a machine is gone anyway, or its trainer starts.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from attrs import asdict

from benchmarks.chaos_checks import (
    check_journal,
    committed_tokens,
    per_contributor_s,
)
from benchmarks.chaos_run import ChaosRun, Seen
from benchmarks.chaos_schedule import Fault, counts, schedule
from benchmarks.grounds import Loopback, Switch, why_no_switch
from benchmarks.lab_run import LabRun
from benchmarks.report import Measured, Table, bench_parser, run_main, say, tell

STEP_S = 0.025
LOSS_RATIO_MAX = 1.01
GOODPUT_MIN = 0.95
SECTION_MINUTES = 30.0
REFERENCE_SHARE = 1 / 3  # of the time with faults
REFERENCE_MINUTES_MIN = 1.0
PEERS_MIN = 4  # fewer cannot lose one and still have a quorum and a copy to spare
PEERS_MAX = 32

SPEC = """\
[run]
name = "chaos"
[diloco]
sync_every = 100   # 2.5 s
overlap = 80       # 2 s: trainers go on while a round runs, and while somebody is found dead
outer_lr = 0.7
outer_momentum = 0.9
[membership]
contributors = {contributors}
min_members = 2
deadline_s = 5
grace_s = 1
"""


def measure(
    *,
    minutes: float,
    seed: int,
    peers: int,
    per_hour: float,
    reference_minutes: float,
    folder: Path,
) -> dict[str, Any]:
    """The reference, then the run under faults; every figure of the verdict."""
    reason = why_no_switch()
    if reason:
        say(f"on loopback, without cuts: {reason}")
    faults = schedule(seed, minutes=minutes, peers=peers, per_hour=per_hour, cuts=not reason)
    say(f"the reference: {reference_minutes:g} minutes without faults")
    calm = lived(folder / "reference", peers, 60 * reference_minutes, (), cuts=not reason)
    say(f"{minutes:g} minutes with {len(faults)} faults")
    rough = lived(folder / "chaos", peers, 60 * minutes, faults, cuts=not reason)
    return verdict(calm, rough, seed=seed, peers=peers, minutes=minutes, left_out=reason)


def lived(
    folder: Path, peers: int, seconds: float, faults: tuple[Fault, ...], *, cuts: bool
) -> Seen:
    """A whole run, from its founding to rest."""
    folder.mkdir(parents=True)
    script = [str(Path(__file__).with_name("chaos_trainer.py")), f"--step-s={STEP_S}"]
    with (
        Switch(1 + peers) if cuts else Loopback() as ground,
        LabRun(ground, folder, script) as run,
    ):
        chaos = ChaosRun(run, ground, folder, peers, faults)
        chaos.start(SPEC.format(contributors=peers - 1))
        chaos.live_through(seconds)
        chaos.settle()
        return chaos.seen


def verdict(
    calm: Seen, rough: Seen, *, seed: int, peers: int, minutes: float, left_out: str
) -> dict[str, Any]:
    """What was promised, in figures, and whatever of it does not hold, in words."""
    round_table = check_journal(rough.entries)
    gone = max(0, round_table.committed - rough.final_held)
    lost = gone + len(rough.parity.rolled_back)
    worth = {}
    for name, seen in (("reference", calm), ("chaos", rough)):
        tokens = committed_tokens(seen.entries, seen.from_s, seen.to_s)
        worth[name] = per_contributor_s(tokens, seen.live)
    goodput = worth["chaos"] / worth["reference"] if worth["reference"] else 0.0
    version, losses = compared_loss(calm, rough)
    loss_ratio = losses["chaos"] / losses["reference"] if losses else None
    violations = [
        *rough.parity.violations,
        *rough.parity.rolled_back,
        *rough.violations,
        *calm.violations,
        *calm.parity.violations,
        *round_table.faults,
    ]
    if gone:
        violations.append(f"{gone} committed rounds are held by nobody")
    if loss_ratio is None:
        violations.append("no version was seen in both runs: nothing to compare the loss at")
    elif loss_ratio > LOSS_RATIO_MAX:
        violations.append(f"the loss is {loss_ratio:.4f} of the reference's")
    if goodput < GOODPUT_MIN:
        violations.append(f"goodput is {goodput:.3f}")
    return {
        "ok": not violations,
        "seed": seed,
        "minutes": minutes,
        "peers": peers,
        "left_out": left_out,
        "faults": counts(rough.faults),
        "fault_list": [
            asdict(f, value_serializer=lambda _i, _a, v: getattr(v, "value", v))
            for f in rough.faults
        ],
        "heads_compared": rough.parity.heads_seen,
        "parity_violations": len(rough.parity.violations),
        "rounds_committed": round_table.committed,
        "rounds_lost": lost,
        "rounds_aborted": round_table.aborted,
        "loss_ratio": loss_ratio,
        "losses": losses,
        "loss_version": version,
        "goodput": goodput,
        "tokens_per_live_contributor_s": worth,
        "live_contributor_s": rough.live.contributor_s,
        "reference_rounds": check_journal(calm.entries).committed,
        "violations": violations,
    }


def compared_loss(calm: Seen, rough: Seen) -> tuple[int, dict[str, float]]:
    """The newest version that was kept of both runs, and the loss of each there."""
    common = calm.samples.keys() & rough.samples.keys()
    if not common:
        return -1, {}
    version = max(common)
    from benchmarks import chaos_trainer  # and torch, which only this needs

    _, held_out = chaos_trainer.load_corpus()
    return version, {
        name: chaos_trainer.validation_loss(seen.samples[version], held_out)
        for name, seen in (("reference", calm), ("chaos", rough))
    }


def lived_through(**how: Any) -> dict[str, Any]:
    """Measure in a folder that goes if all was well; else it is named. ``how``: see ``measure``."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
    found: dict[str, Any] = {}
    try:
        found = measure(folder=folder, **how)
    finally:
        for each in found.get("violations", ()):
            print(f"VIOLATION: {each}")
        if found.get("ok"):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"chaos: logs and journals are in {folder}", file=sys.stderr)
    return found


def chaos(
    minutes: float = SECTION_MINUTES,
    seed: int = 1,
    peers: int = 6,
    per_hour: float = 120.0,
    reference_minutes: float | None = None,
) -> Measured:
    """The section of RESULTS.md: half an hour, and ten minutes of reference before it."""
    found = lived_through(
        minutes=minutes,
        seed=seed,
        peers=peers,
        per_hour=per_hour,
        reference_minutes=reference_minutes
        or max(REFERENCE_MINUTES_MIN, REFERENCE_SHARE * minutes),
    )
    faults = ", ".join(f"{count} {kind}" for kind, count in found["faults"].items())
    ratio = found["loss_ratio"]
    table = Table(
        f"{minutes:g} minutes, {peers} peers with real trainers, "
        f"{len(found['fault_list'])} faults on a Poisson schedule",
        [f"python -m benchmarks.chaos --minutes {minutes:g} --seed {seed}"],
        ["what", "measured", "promised"],
        [
            ["heads compared", f"{found['heads_compared']:,}", ""],
            ["digests or bits that differ", str(found["parity_violations"]), "0"],
            ["rounds committed", str(found["rounds_committed"]), ""],
            ["rounds lost", str(found["rounds_lost"]), "0"],
            ["rounds aborted and tried again", str(found["rounds_aborted"]), ""],
            [
                f"loss at version {found['loss_version']}, of the undisturbed run's",
                "" if ratio is None else f"{ratio:.4f}",
                f"at most {LOSS_RATIO_MAX}",
            ],
            ["goodput", f"{found['goodput']:.1%}", f"at least {GOODPUT_MIN:.0%}"],
            ["whatever else was promised and broken", str(len(found["violations"])), "0"],
        ],
        [
            f"Faults: {faults}. {found['left_out']}".strip(),
            "Goodput: useful tokens per live contributor-second, of the undisturbed run's; "
            "[chaos.py](chaos.py) says what counts.",
        ],
    )
    return [table], found


def main() -> int:
    parser = bench_parser("chaos", __doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--faults-per-hour", type=float, default=120.0)
    parser.add_argument(
        "--reference-minutes", type=float, help="without faults; a third of --minutes"
    )
    options = parser.parse_args()
    if not (0 < options.minutes <= 24 * 60 and PEERS_MIN <= options.peers <= PEERS_MAX):
        parser.error(f"up to a day, and from {PEERS_MIN} to {PEERS_MAX} peers")
    if not 0 <= options.faults_per_hour <= 3_600:
        parser.error("from 0 to 3600 faults an hour")
    tables, found = chaos(
        options.minutes,
        options.seed,
        options.peers,
        options.faults_per_hour,
        options.reference_minutes,
    )
    tell((tables, found), options)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(run_main("chaos", main))
