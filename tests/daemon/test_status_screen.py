"""The text output of ``holdfast status``."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from holdfast.daemon.cli.status_screen import ROUTES_SHOWN_MAX, show_status, show_verified
from holdfast.membership.master.status.records import RouteRow
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
