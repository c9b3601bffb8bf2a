"""The text output of ``holdfast status``."""

from __future__ import annotations

import re
import time
from typing import Any

import attrs
import pytest

from holdfast.daemon.cli.run_tables import FIGURE_MEMBERS_SHOWN
from holdfast.daemon.cli.status_screen import ROUTES_SHOWN_MAX, show_status, show_verified
from holdfast.daemon.status_records import Ending
from holdfast.membership.master.status.records import MemberRow, RouteRow
from tests.membership.test_trees import LAB, OUTSIDE, a_tree
from tests.plain import master_status


def test_a_tree_round_shows_its_expected_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table, order = a_tree()
    show_status(master_status(table.master, table.now_s, "run"))
    out = capsys.readouterr().out
    assert f"round {order.round}: a tree" in out
    assert "sites: a, b, c, d" in out
    table.leave(LAB[0])
    show_status(master_status(table.master, table.now_s, "run"))
    assert "a tree" not in capsys.readouterr().out
    table.master.pause(table.now_s)
    for peer in (*LAB[1:], *OUTSIDE):
        table.leave(peer)
    show_status(master_status(table.master, table.now_s, "run"))


def test_figures_of_the_scripts_are_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table, _order = a_tree()
    status = master_status(table.master, table.now_s, "run")
    show_status(status)
    assert "figure" not in capsys.readouterr().out

    def logged(count: int) -> tuple[MemberRow, ...]:
        first = (
            attrs.evolve(m, metrics={"accuracy": 0.25, "rate": 1e-3}) for m in status.members[:1]
        )
        more = (
            attrs.evolve(m, name=f"m{i}", metrics={"accuracy": i / 100})
            for i, m in enumerate([status.members[1]] * (count - 1), start=1)
        )
        return (*first, *more)

    show_status(attrs.evolve(status, members=(*logged(2), status.members[2])))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert rows == [
        ["figure", "mean", status.members[0].name, "m1"],
        ["accuracy", "0.13", "0.25", "0.01"],
        ["rate", "0.001", "0.001", "-"],
    ]
    show_status(attrs.evolve(status, members=logged(FIGURE_MEMBERS_SHOWN + 1)))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert rows[0] == ["figure", "mean", "lowest", "highest"]
    assert rows[1] == ["accuracy", "0.06778", "0.01", "0.25"]


def test_a_finished_run_says_how_it_went_and_where_its_weights_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table, _order = a_tree()
    status = master_status(table.master, table.now_s, "run")
    ending = Ending(
        finished_at=time.time(),
        duration_s=7_500.0,
        loss_start=5.5714,
        loss_end=2.5,
        weights_at=("alder", "birch"),
    )
    ended = attrs.evolve(status, state="finished", why_waiting="", ending=ending, members=())
    show_status(attrs.evolve(ended, committed=1))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run  finished  1 round committed, 0 aborted"
    assert re.fullmatch(
        r"finished at [\d :-]+, after 2 h 5 min: loss 5\.571 -> 2\.500, \d+ tokens", lines[1]
    )
    assert lines[2] == "final weights: in the checkpoints of alder, birch"
    assert lines[3] == "to get a file of them, run there: holdfast export model.safetensors"
    unknown = attrs.evolve(
        ending, finished_at=None, duration_s=None, loss_start=None, weights_at=()
    )
    show_status(attrs.evolve(ended, ending=unknown))
    assert capsys.readouterr().out.splitlines()[1].startswith("finished: loss - -> 2.500, ")


def test_pairs_that_cannot_simply_dial_each_other_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table, _order = a_tree()
    status = master_status(table.master, table.now_s, "run")
    relay = status.members[0]

    def row(one: str, other: str, route: str, **more: Any) -> RouteRow:
        fields = {"dials": None, "relay": None, "works": True, "tried": (), **more}
        return RouteRow(peers=(one, other), names=(one, other), route=route, **fields)

    routes = (
        row("a", "b", "punched"),
        row("a", "c", "relayed", relay=relay.peer),
        row("b", "c", "none", works=False, tried=("refused", "lost")),
        *(row("d", str(n), "punched") for n in range(ROUTES_SHOWN_MAX)),
    )
    show_status(attrs.evolve(status, routes=routes))
    out = capsys.readouterr().out
    assert "route: a and b: punched" in out
    assert f"route: a and c: relayed by {relay.name}" in out
    assert "route: b and c: no link; tried now: none (lost)" in out
    assert "route: 3 more pairs, see --json" in out


@pytest.mark.parametrize(
    ("same", "differences", "said"),
    [
        (True, 0, "all peers hold the same bytes"),
        (False, 0, "not all peers could be compared"),
        (False, 1, "the fragment's next committed round repairs"),
    ],
)
def test_a_verification_ends_with_its_conclusion(
    same: bool,
    differences: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    peer = {"peer": "f" * 32, "name": "b", "text": "1 of 3 fragments differ"}
    found = {**peer, "fragment": 2, "version": 7, "text": "block 4 of 9, compared with a"}
    show_verified({"same": same, "peers": [peer], "differences": [found] * differences})
    out = capsys.readouterr().out
    assert "ffffffff (b): 1 of 3 fragments differ" in out
    assert ("ffffffff (b) differs in fragment 2, version 7: block 4 of 9" in out) == (
        differences > 0
    )
    assert said in out
