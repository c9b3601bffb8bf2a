"""Lines about a run: made of status records, without a terminal and without a clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from holdfast.daemon.progress_lines import (
    PROGRESS_S,
    PeerChanges,
    PeerRecord,
    ProgressClock,
    SavedWeights,
    master_line,
    peer_line,
    peer_summary,
)
from holdfast.daemon.status_records import FellowRow, PeerStatus
from holdfast.membership.shared.run_status import Headline, HeadRow
from holdfast.protocol.text import format_duration

LENDING = (Path(__file__).resolve().parents[2] / "docs" / "lending.md").read_text()
ME, BIRCH, CEDAR = "a" * 32, "b" * 32, "c" * 32

AWAY = PeerStatus(version="0", peer=ME, name="alder", run_id="5" * 32, why="", limits={})
TRAINING = attrs.evolve(
    AWAY,
    attached=True,
    role="contributor",
    in_sync=True,
    phase="in the run",
    trainer_state="running",
    heads=(
        HeadRow(fragment=0, version=7, root=""),
        HeadRow(fragment=1, version=5, root=""),
    ),
    rounds_wanted=20,
    loss=2.8714,
    tokens=1_000_000,
    tokens_per_s=8_120.4,
    stepped_s=90.0,
    waited_s=10.0,
)
HEADLINE = Headline(
    loss=3.2,
    loss_min=3.0,
    loss_max=3.4,
    tokens=5_000,
    tokens_per_s=12_345.0,
    utilisation=0.876,
    step=100,
    rounds=3,
    rounds_wanted=None,
    eta_s=None,
    sent_bytes=0,
    saved_bytes=0,
)


def fellow(peer: str, name: str) -> FellowRow:
    return FellowRow(peer=peer, name=name, role="contributor")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"left_s": 250.0},
            "contributor  round 12/20  loss 2.871  8,120 tokens/s  90% utilised  4 min 10 s left",
        ),
        ({"why": "no step for 60 s", "loss": None, "tokens_per_s": 0.0},
         "contributor  round 12/20  90% utilised  no step for 60 s"),
        ({"rounds_wanted": 0, "role": "spare", "stepped_s": 0.0, "waited_s": 0.0},
         "spare  round 12  loss 2.871  8,120 tokens/s"),
        ({"attached": False, "loss": None, "tokens_per_s": 0.0, "stepped_s": 0.0, "waited_s": 0.0},
         "no master  round 12/20"),
    ],
)  # fmt: skip
def test_a_peer_in_one_line(change: dict[str, Any], line: str) -> None:
    assert peer_line(attrs.evolve(TRAINING, **change)) == line
    assert change != {"left_s": 250.0} or line in LENDING, "the page shows the first one"


def test_a_peer_that_looks_for_its_master() -> None:
    looking = attrs.evolve(AWAY, phase="looking for the master", why="127.0.0.1:1: refused")
    assert peer_line(looking) == "looking for the master  127.0.0.1:1: refused"


def test_a_run_in_one_line() -> None:
    line = "training  round 3  loss 3.200  12,345 tokens/s  88% utilised  2 members"
    assert master_line("training", "", HEADLINE, 2) == line
    ending = attrs.evolve(HEADLINE, rounds_wanted=9, eta_s=42.0)
    line = "waiting for members  round 3/9  loss 3.200  12,345 tokens/s  88% utilised  1 member  "
    said = master_line("waiting for members", "1 of 2 members", ending, 1)
    assert said == line + "42 s left  1 of 2 members"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min"),
        (61.0, "1 min 1 s"),
        (660.0, "11 min"),
        (661.0, "11 min"),
        (3_600.0, "1 h"),
        (8_000.0, "2 h 13 min"),
        (200_000.0, "2 days 7 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


# ---------------------------------------------------------------- in time


def test_a_log_has_a_line_a_round_and_no_more_than_one_each_half_minute() -> None:
    clock = ProgressClock()
    seen = [(0, 0.0), (1, 5.0), (2, PROGRESS_S), (3, PROGRESS_S + 1), (3, 2 * PROGRESS_S + 1)]
    assert [clock.is_due(*each) for each in seen] == [False, False, True, False, True]
    long = [(3, 10 * PROGRESS_S), (3, 20 * PROGRESS_S), (4, 20 * PROGRESS_S + 1)]
    assert [clock.is_due(*each) for each in long] == [False, False, True], "rounds are long"


# ---------------------------------------------------------------- changes


def test_each_change_is_a_sentence() -> None:
    changes = PeerChanges()

    def said(**change: Any) -> list[str]:
        return list(changes.of(attrs.evolve(TRAINING, **change)))

    alone, both = (fellow(ME, "alder"),), (fellow(ME, "alder"), fellow(BIRCH, "birch"))
    starting: dict[str, Any] = {"trainer_state": "starting", "role": "spare"}
    assert list(changes.of(AWAY)) == []
    assert said(in_sync=False, members=both, **starting) == []
    why = "its trainer is starting"
    assert said(members=both, role_why=why, **starting) == [f"alder joined as a spare: {why}"]
    assert said(members=both) == ["the trainer has attached", "alder is now a contributor"]
    assert said(members=both) == []
    assert said(members=(*both, fellow(CEDAR, "cedar"))) == ["cedar has joined the run"]
    assert said(members=alone) == ["birch is gone", "cedar is gone"]
    away = said(attached=False, members=both)
    assert away == ["the master is gone; the trainer goes on as far as it may"]
    assert said(attached=False) == []
    assert said(members=both) == ["the master is back", "birch has joined the run"]


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_of_a_run_or_of_a_peers_part_is_no_lost_master(finished: bool) -> None:
    changes = PeerChanges()
    list(changes.of(TRAINING))
    ended = attrs.evolve(TRAINING, attached=False, finished=finished)
    assert list(changes.of(ended, leaving=not finished)) == []


# ---------------------------------------------------------------- the end


def test_a_summary_of_what_a_peer_has_done() -> None:
    record = PeerRecord()
    record.see(AWAY)
    assert not record.took_part
    for version, loss in ((0, None), (7, 5.5), (8, 4.0), (9, 2.25)):
        heads = (HeadRow(fragment=0, version=version, root=""),)
        record.see(attrs.evolve(TRAINING, heads=heads, loss=loss, in_sync=version > 0))
    assert record.took_part
    saved = SavedWeights("/a place/checkpoints", 450, ("--state", "/a place"))
    assert list(peer_summary(record, 725.0, saved)) == [
        "took part for 12 min, 9 rounds, 1,000,000 tokens, loss 5.500 -> 2.250",
        "the weights of step 450 are in /a place/checkpoints; to export them:",
        "  holdfast export --state '/a place' model.safetensors",
    ]


def test_a_peer_that_came_later_counts_its_own_rounds() -> None:
    record = PeerRecord()
    copying = attrs.evolve(TRAINING, in_sync=False, heads=TRAINING.heads[:1], loss=None)
    for status in (copying, TRAINING, attrs.evolve(TRAINING, tokens=5)):
        record.see(status)
    (line,) = peer_summary(record, 3.0, None)
    assert line == "took part for 3 s, 0 rounds, 1,000,000 tokens, loss 2.871 -> 2.871"
