"""``holdfast status`` for people."""

from __future__ import annotations

import pytest

from holdfast.daemon.show import show_status
from tests.membership.test_trees import LAB, OUTSIDE, a_tree


def test_a_round_that_is_a_tree_says_what_it_saves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table, order = a_tree()
    show_status("master", {**table.master.status(table.now_s), "name": "run"})
    out = capsys.readouterr().out
    assert f"round {order.round}: a tree" in out
    assert "behind one line: a, b, c, d" in out
    table.leave(LAB[0])
    show_status("master", {**table.master.status(table.now_s), "name": "run"})
    assert "a tree" not in capsys.readouterr().out
    table.master.pause(table.now_s)
    for peer in (*LAB[1:], *OUTSIDE):
        table.leave(peer)
    show_status("master", {**table.master.status(table.now_s), "name": "run"})
