"""The text output of ``holdfast status``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from holdfast.daemon.cli.run_tables import FIGURE_MEMBERS_SHOWN
from holdfast.daemon.cli.status_screen import LINKS_SHOWN_MAX, ROUTES_SHOWN_MAX, show_status
from holdfast.daemon.status_records import (
    CongestionReport,
    Ending,
    FellowRow,
    LinkRow,
    MasterStatus,
    PeerStatus,
)
from holdfast.membership.shared.run_status import MemberRow, RouteRow
from tests.membership.table import A, B, C, D, E, Table
from tests.plain import master_status, peer_status

Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Return what is printed of a status, with changes to it, on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")

    def show(status: MasterStatus | PeerStatus, **changes: Any) -> str:
        show_status(attrs.evolve(status, **changes))
        return capsys.readouterr().out

    return show


def status_of(table: Table) -> MasterStatus:
    return master_status(table.master, table.now_s, "run")


def a_round() -> Table:
    """Five members, and a reduction that runs."""
    table = Table()
    table.start(A, B, C, D, E)
    table.reduce(A, B, C, D, E)
    return table


def test_a_paused_run_without_members_is_shown(shown: Shown) -> None:
    table = a_round()
    table.master.pause(table.now_s)
    for peer in (A, B, C, D, E):
        table.leave(peer)
    assert "paused" in shown(status_of(table))


def test_figures_of_the_scripts_are_a_table(shown: Shown) -> None:
    status = status_of(a_round())
    assert "figure" not in shown(status)

    def logged(count: int) -> tuple[MemberRow, ...]:
        first = (
            attrs.evolve(m, metrics={"accuracy": 0.25, "rate": 1e-3}) for m in status.members[:1]
        )
        more = (
            attrs.evolve(m, name=f"m{i}", metrics={"accuracy": i / 100})
            for i, m in enumerate([status.members[1]] * (count - 1), start=1)
        )
        return (*first, *more)

    status = attrs.evolve(status, figures={"accuracy": 0.13, "rate": 1e-3})
    two = shown(status, members=(*logged(2), status.members[2]))
    rows = [line.split() for line in two.splitlines()[-3:]]
    assert rows == [
        ["figure", "mean", status.members[0].name, "m1"],
        ["accuracy", "0.13", "0.25", "0.01"],
        ["rate", "0.001", "0.001", "-"],
    ]
    many = shown(status, members=logged(FIGURE_MEMBERS_SHOWN + 1))
    rows = [line.split() for line in many.splitlines()[-3:]]
    assert rows[0] == ["figure", "mean", "lowest", "highest"]
    assert rows[1] == ["accuracy", "0.13", "0.01", "0.25"]


def test_a_finished_run_says_how_it_went_and_where_its_weights_are(shown: Shown) -> None:
    status = status_of(a_round())
    ending = Ending(
        finished_at=time.time(),
        duration_s=7_500.0,
        loss_start=5.5714,
        loss_end=2.5,
        weights_at=("alder", "birch"),
    )
    ended = attrs.evolve(status, state="finished", why_waiting="", ending=ending, members=())
    lines = shown(ended).splitlines()
    assert lines[0] == "run  finished  round 0, 0 aborted  step 0"
    running = attrs.evolve(status.headline, rounds=6, rounds_wanted=40, step=313, eta_s=102.0)
    first = shown(status, headline=running, aborted=3).splitlines()[0]
    assert first == "run  training  round 6/40, 3 aborted  step 313  1 min 42 s left"
    assert lines[1] == "all 5 copies equal at version 0 (compared 0 s ago)"
    assert re.fullmatch(
        r"finished at [\d :-]+, after 2 h 5 min: loss 5\.571 -> 2\.500, \d+ tokens", lines[2]
    )
    assert lines[3] == "final weights: in the checkpoints of alder, birch"
    assert lines[4] == "to get a file of them, run there: holdfast export model.safetensors"
    unknown = attrs.evolve(
        ending, finished_at=None, duration_s=None, loss_start=None, weights_at=()
    )
    assert "\nfinished: loss - -> 2.500, " in shown(ended, ending=unknown)


def test_pairs_that_cannot_simply_dial_each_other_are_named(shown: Shown) -> None:
    status = status_of(a_round())
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
    out = shown(status, routes=routes)
    assert "route: a and b: punched" in out
    assert f"route: a and c: relayed by {relay.name}" in out
    assert "route: b and c: no link; tried now: none (lost)" in out
    assert "route: 3 more pairs, see --json" in out


def test_equal_copies_are_told_with_the_age_of_the_last_digest(shown: Shown) -> None:
    table = Table()
    table.start(A, B)
    table.now_s += 75
    told = shown(status_of(table)).splitlines()
    assert "all 2 copies equal at version 0 (compared 1 min 15 s ago)" in told
    table.join(C)
    assert "2 of 3 copies equal at version 0; c is copying the state" in shown(status_of(table))
    for peer in (A, B, C):
        table.leave(peer)
    assert "cop" not in shown(status_of(table)).partition("weights")[0]


def link_row(number: int, **changes: Any) -> LinkRow:
    row = LinkRow(
        peer=f"{number:032x}",
        lanes=4,
        congestion=("cubic",),
        round_trip_s=0.08,
        sent_bytes=number * 10**6,
        retransmitted_bytes=0,
    )
    return attrs.evolve(row, **changes)


def test_a_peer_lists_its_links_with_what_tcp_sent_again(shown: Shown) -> None:
    idle = attrs.evolve(peer_status("a" * 32, "alder"), bulk_sent_bytes=0, bulk_received_bytes=0)
    assert "sent" not in shown(idle)
    links = (
        link_row(1, retransmitted_bytes=None, round_trip_s=None, congestion=("",)),
        link_row(2, retransmitted_bytes=500_000, lanes=7, congestion=("bbr", "cubic")),
    )
    told = attrs.evolve(
        peer_status("a" * 32, "alder"),
        links=links,
        members=(FellowRow(peer=links[1].peer, name="birch", role="contributor"),),
        bulk_sent_bytes=3_000_000,
        bulk_retransmitted_bytes=500_000,
        bulk_received_bytes=7_000_000,
        congestion=CongestionReport(wanted="bbr", used="cubic", text="no bbr", fix="`modprobe`"),
    )
    out = shown(told)
    assert "sent 3.0 MB, of which 14.3 % retransmitted; received 7.0 MB\n" in out
    rows = [re.split(r" {2,}", line.strip()) for line in out.splitlines()]
    headings = ["linked to", "connections", "round trip", "congestion control", "sent"]
    start = rows.index([*headings, "retransmitted"])
    assert rows[start + 1 : start + 3] == [
        ["birch", "7", "80 ms", "bbr, cubic", "2.0 MB", "20 %"],
        ["00000000", "4", "-", "-", "1.0 MB", "-"],
    ]
    assert "congestion control: no bbr\n  fix: `modprobe`\n" in out
    fine = CongestionReport(wanted="bbr", used="bbr", text="lanes use bbr")
    many = tuple(map(link_row, range(LINKS_SHOWN_MAX + 3)))
    untold = attrs.evolve(told, links=many, bulk_retransmitted_bytes=None, congestion=fine)
    out = shown(untold)
    assert "sent 3.0 MB; received" in out
    assert "3 more links, see --json" in out
    assert "fix:" not in out
