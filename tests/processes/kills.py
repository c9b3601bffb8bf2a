"""Kills in the middle of reductions: values are equal everywhere, and records tell the truth.

A master and four peers on loopback, with trainers whose updates are powers of two
(``kills_trainer``), so that a mean says who is in it. Peers, now and then two at once or the
master, get SIGKILL at random moments of reductions and are started again. In the end all that every
trainer has seen is compared: at equal versions all values must be equal bit for bit; and who is in
each chunk of a mean must be what ``holdfast rounds --json`` says of that round.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, define

from tests.processes.harness import Fleet, Status
from tests.processes.kills_trainer import PLACES, TOKENS, VALUES

PEERS = ("alder", "birch", "cedar", "douglas")
assert len(PEERS) == PLACES
TRAINER = Path(__file__).with_name("kills_trainer.py")
UPLOAD_MB_S = 1.5  # of each peer, so that a reduction of a mebibyte lasts a second
REDUCTION_S = 1.2  # within which the moment of a kill is drawn
TWICE_SHARE = 0.2  # of the kills, so many are followed by that of another peer
MASTER_SHARE = 0.1  # and so many are the master's
PAUSE_S = 0.5  # at most, until who was killed is started again

SPEC = f"""\
[run]
name = "kills"
[diloco]
sync_every = 5
outer_lr = 1.0
outer_momentum = 0.0
[membership]
contributors = {len(PEERS)}
min_members = 2
deadline_s = 5
grace_s = 2
[reduce]
chunk_bytes = 16384
codec_up = "fp32"
codec_down = "fp32"
"""

Row = dict[str, Any]
Sets = list[frozenset[int]]  # by chunk: places


@define
class Found:
    """What all trainers' lines and the records come to.

    Attributes:
      versions_checked: versions whose values several trainers have seen.
      differing: of these, those that two saw unlike.
      rounds_checked: rounds whose mean was read, chunk by chunk.
      in_part: of these, those in which somebody is in some chunks alone.
      records_wrong: of these, those whose record says something else, or is missing.
      faults: what is wrong, as sentences.
    """

    versions_checked: int = 0
    differing: int = 0
    rounds_checked: int = 0
    in_part: int = 0
    records_wrong: int = 0
    faults: list[str] = Factory(list)


# --------------------------------------------------------- what was seen against what is recorded


def check(
    seen: Mapping[str, Iterable[Row]], records: Iterable[Row], places: Mapping[str, int]
) -> Found:
    """Compare the trainers' lines with each other, and with the records.

    Args:
      seen: by trainer.
      places: by peer id.
    """
    found = Found()
    digests: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    means: dict[int, list[tuple[str, list[list[int]]]]] = defaultdict(list)
    for name, lines in seen.items():
        for line in lines:
            digests[line["version"]][line["digest"]].add(name)
            if "round" in line:
                means[line["round"]].append((name, line["sets"]))
    for version, held in sorted(digests.items()):
        found.versions_checked += len(set().union(*held.values())) > 1
        if len(held) > 1:
            found.differing += 1
            found.faults.append(f"version {version}: {sorted(map(sorted, held.values()))} differ")
    recorded = {row["round"]: row for row in records if row["outcome"] == "committed"}
    for number, told in sorted(means.items()):
        found.rounds_checked += 1
        why = _fault(number, told, recorded.get(number), places)
        if why:
            found.records_wrong += 1
            found.faults.append(why)
        found.in_part += len(told[0][1]) > 1
    return found


def _fault(
    number: int,
    told: Sequence[tuple[str, list[list[int]]]],
    row: Row | None,
    places: Mapping[str, int],
) -> str:
    """What is wrong with a round; empty: nothing."""
    if row is None:
        return f"round {number} has no record"
    recorded = sets_of(row, places)
    for name, runs in told:
        in_values = [(frozenset(_places(bits)), count) for bits, count in runs]
        if any(not inside for inside, _count in in_values):
            return f"round {number} at {name}: no contributors have such a mean"
        if len(recorded) == 1:  # all in all, and nobody knows any more in how many chunks
            recorded_values = [(recorded[0], VALUES)]
        else:
            recorded_values = _joined((inside, VALUES // len(recorded)) for inside in recorded)
        if in_values != recorded_values:
            said = [(sorted(inside), count) for inside, count in recorded_values]
            true = [(sorted(inside), count) for inside, count in in_values]
            return f"round {number} at {name}: the record says {said}, the values {true}"
    return ""


def sets_of(row: Row, places: Mapping[str, int]) -> Sets:
    """Who is in each chunk, as a program reads a record."""
    peers = [places[each["peer"]] for each in row["contributors"]]
    sets: Sets = [frozenset(peers)] * (row["chunk_count"] or 1)
    for part in row["manifest"]:
        inside = frozenset(peers[at] for at in part["contributors"])
        if part["weight"] != TOKENS * len(inside):
            return [frozenset()]
        for first, count in part["chunks"]:
            sets[first:] = [*[inside] * count, *sets[first + count :]]
    return sets


def _places(bits: int) -> list[int]:
    return [place for place in range(PLACES) if bits >> place & 1]


def _joined(runs: Iterable[tuple[frozenset[int], int]]) -> list[tuple[frozenset[int], int]]:
    joined: list[tuple[frozenset[int], int]] = []
    for inside, count in runs:
        if joined and joined[-1][0] == inside:
            joined[-1] = inside, joined[-1][1] + count
        else:
            joined.append((inside, count))
    return joined


def read_seen(path: Path) -> list[Row]:
    """A trainer's lines; the last one may be torn by its death."""
    rows: list[Row] = []
    for text in path.read_text().splitlines():
        try:
            rows.append(json.loads(text))
        except ValueError:
            continue
    return rows


# ---------------------------------------------------------------- the run


class Kills:
    """A run in which somebody dies again and again."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._chance = random.Random(f"kills {seed}")
        self.kill_count = 0

    def start(self) -> None:
        self._fleet.start_master(SPEC)
        for name in PEERS:
            self._join(name)
        self._fleet.until(self._all_here, "all are in sync and contribute")

    def _join(self, name: str) -> None:
        place = PEERS.index(name)
        self._fleet.join(
            name,
            *("--place", str(place), "--seen", str(self._fleet.folder / f"{name}.seen")),
            command=(sys.executable, str(TRAINER)),
            founder=place == 0,
            more=("--max-upload", str(UPLOAD_MB_S)),
        )

    def one(self) -> None:
        """Kill somebody in a reduction of all, or two; start them again, and wait until all are
        back.
        """
        self._fleet.until(self._reducing, "a reduction of all begins")
        time.sleep(self._chance.uniform(0.0, REDUCTION_S))
        if self._chance.random() < MASTER_SHARE:
            self._kill("master")
            time.sleep(self._chance.uniform(0.0, PAUSE_S))
            self._fleet.restart_master()
        else:
            victims = self._chance.sample(PEERS, 2 if self._chance.random() < TWICE_SHARE else 1)
            for name in victims:
                self._kill(name)
                time.sleep(self._chance.uniform(0.0, PAUSE_S))
            for name in victims:
                self._join(name)
        self._fleet.until(self._all_here, "all are back")

    def _kill(self, name: str) -> None:
        self._fleet.kill(name)
        self.kill_count += 1

    def check(self) -> Found:
        self._fleet.settle(*PEERS)
        status = self._fleet.master()
        time.sleep(1.0)  # the trainers' last lines
        places = {m["peer"]: PEERS.index(m["name"]) for m in status["members"]}
        seen = {name: read_seen(self._fleet.folder / f"{name}.seen") for name in PEERS}
        command = [sys.executable, "-m", "holdfast", "rounds", "--json", "--limit", "100000"]
        command += ["--state", str(self._fleet.folder / "master")]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
        found = check(seen, json.loads(said.stdout)["rounds"], places)
        if found.rounds_checked < 0.9 * status["committed"]:
            found.faults.append(f"{status['committed']} rounds, {found.rounds_checked} were read")
        return found

    @staticmethod
    def _all_here(status: Status) -> bool:
        return (
            len(status["members"]) == len(PEERS)
            and status["counts"]["participating"] == len(PEERS)
            and all(member["in_sync"] for member in status["members"])
        )

    @staticmethod
    def _reducing(status: Status) -> bool:
        return any(
            each["phase"] == "reducing" and len(each["contributors"]) == len(PEERS)
            for each in status["rounds"]
        )


def run_with_kills(fleet: Fleet, kills: int, seed: int) -> tuple[int, Found]:
    """Live through a run with so many kills, and return how many there were and what was found."""
    course = Kills(fleet, seed)
    course.start()
    while course.kill_count < kills:
        course.one()
    return course.kill_count, course.check()
