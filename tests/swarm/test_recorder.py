"""Recording of whole runs in virtual time: production master, peers, history and files."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import msgspec
import pytest
import trio

from holdfast.daemon.cli.run_tables import format_round_reason, show_rounds
from holdfast.daemon.curves import EVERYBODY, as_columns, member_columns
from holdfast.daemon.master import run_recorder
from holdfast.daemon.master.run_recorder import LOOK_S, POINT_S, RunRecorder
from holdfast.daemon.metrics_store import PastEvent
from holdfast.daemon.web.api_description import api_description
from holdfast.daemon.web.json_answers import compact
from holdfast.membership.master.status.headline import headline
from holdfast.membership.shared.run_status import RecordedRound
from holdfast.protocol.messages import METRICS_MAX, Commit, Metrics, Role
from holdfast.simulation.swarm import Swarm

SPEC = """
[run]
name = "recorded"
[diloco]
sync_every = 20
[membership]
contributors = 3
min_members = 2
deadline_s = 3
grace_s = 1
"""
BEGAN_AT = 1e9


def wall_clock() -> float:
    return BEGAN_AT + trio.current_time()


def check_schema(name: str, value: object) -> None:
    """Check a value against its schema in the API's description."""
    schema = {**api_description(), "$ref": f"#/components/schemas/{name}"}
    jsonschema.Draft202012Validator(schema).validate(json.loads(compact(value)))


class Stage:
    """A swarm and its recorder."""

    def __init__(self, swarm: Swarm, folder: Path) -> None:
        self.swarm = swarm
        self.folder = folder
        self.published: list[tuple[str, Any]] = []
        self.scope = trio.CancelScope()

    def record(self) -> None:
        """Record the present master, as its process would."""
        assert self.swarm.master is not None
        self.recorder = RunRecorder(
            self.swarm.master, self.folder, live=self, wall_clock=wall_clock
        )
        self.scope = trio.CancelScope()
        self.swarm.nursery.start_soon(self._run, self.recorder, self.scope)

    @staticmethod
    async def _run(recorder: RunRecorder, scope: trio.CancelScope) -> None:
        with scope:
            await recorder.run()

    def publish(self, kind: str, row: object) -> None:
        self.published.append((kind, json.loads(compact(row))))

    async def restart_master(self) -> None:
        self.swarm.crash_master()
        self.scope.cancel()
        await trio.sleep(0.01)
        self.recorder.look()
        self.recorder.close()
        await trio.sleep(20)
        await self.swarm.start_master()
        self.record()

    def rounds(self) -> list[dict[str, Any]]:
        """Return the recorded rounds, the oldest first."""
        return [json.loads(row) for row in reversed(self.recorder.history.rounds(200, None))]

    def columns(self) -> dict[str, list[Any]]:
        return as_columns(self.recorder.history.points(5_000, None, None))

    def events(self) -> list[PastEvent]:
        return self.recorder.history.events(1_000, None)[::-1]

    def log(self, name: str, **figures: float) -> None:
        """Log figures, as a training script does with ``run.log``."""
        training = self.swarm.peers[name].service.training
        training.trainer_sent(Metrics(training.progress().step, figures))

    def member(self, name: str) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the recorded columns of a member, or of the means, and the values of figures."""
        peer = self.swarm.peers[name].peer if name else EVERYBODY
        points = self.recorder.history.member_points(peer, 5_000, None, None)
        columns, figures = member_columns(points)
        return columns, {
            name: [value for value in values if value is not None]
            for name, values in figures.items()
        }

    async def commit(self, count: int) -> None:
        target = self.swarm.committed + count
        await self.swarm.until(lambda: self.swarm.committed >= target)
        await trio.sleep(2 * LOOK_S)


@asynccontextmanager
async def a_stage(folder: Path, names: str = "abc", spares: str = "") -> AsyncIterator[Stage]:
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, SPEC)
        await swarm.start_master()
        stage = Stage(swarm, folder)
        stage.record()
        for name in names:
            swarm.add_peer(name)
        for name in spares:
            swarm.add_peer(name, role=Role.SPARE)
        await swarm.until(lambda: swarm.committed >= 1 and all(map(swarm.in_sync, names + spares)))
        try:
            yield stage
        finally:
            stage.recorder.close()
        nursery.cancel_scope.cancel()


async def test_every_round_is_recorded_with_its_members_times(tmp_path: Path) -> None:
    async with a_stage(tmp_path, "abc", "d") as stage:
        await stage.commit(3)
        stage.swarm.crash("c")
        await stage.commit(3)
        rows = stage.rounds()
        committed = [row["round"] for row in rows if row["outcome"] == "committed"]
        made = [commit.round for commit in stage.swarm.witness.commits]
        assert committed == made[: len(committed)]
        assert len(committed) > 6
        for row in rows:
            check_schema("RecordedRound", row)
            assert row["ended_at"] - row["opened_at"] == pytest.approx(
                row["open_s"] + row["reduce_s"]
            )
            for mark in row["marks"].values():
                if mark["state"] == "contributed":
                    assert 0.0 <= mark["ready_s"] <= row["open_s"] + 1e-6
                    assert row["open_s"] <= mark["reduced_s"] + 1e-6
                    assert mark["reduced_s"] <= row["open_s"] + row["reduce_s"] + 1e-6
        states = [{m["name"]: m["state"] for m in row["marks"].values()} for row in rows]
        assert {
            "a": "contributed",
            "b": "contributed",
            "c": "contributed",
            "d": "received",
        } in states
        assert any(state.get("c") == "lost" for state in states)
        assert states[-1] == {"a": "contributed", "b": "contributed", "d": "contributed"}
        assert [row for kind, row in stage.published if kind == "round"] == rows


async def test_records_of_repaired_rounds_name_the_contributors_of_each_chunk(
    tmp_path: Path,
) -> None:
    """One of four dies at several moments of a reduction; the witness checks what was applied."""
    seen: set[str] = set()
    for delay_s in (0.0, 0.01, 0.03, 0.05):
        async with a_stage(tmp_path / str(delay_s), "abcd") as stage:
            await until_reducing(stage.swarm)
            await trio.sleep(delay_s)
            stage.swarm.crash("d")
            await stage.commit(2)
            made = {commit.round: commit for commit in stage.swarm.witness.commits}
            for row in stage.rounds():
                check_schema("RecordedRound", row)
                if row["outcome"] == "committed":
                    seen.add(compare(row, made[row["round"]]))
    assert seen == {"all in all", "somebody in none"}


async def until_reducing(swarm: Swarm) -> None:
    round_table = swarm.coordinator.scheduler.round_table
    await swarm.until(lambda: bool(round_table.reducing()))


def compare(row: dict[str, Any], commit: Commit) -> str:
    """Check that both name the same contributors of each chunk; return the kind of the round."""
    peers = [each["peer"] for each in row["contributors"]]
    order = [each.peer for each in commit.contributors]
    sets = [set(peers) for _ in range(row["chunk_count"])]
    for part in row["manifest"]:
        for first, count in part["chunks"]:
            inside = {peers[place] for place in part["contributors"]}
            sets[first : first + count] = [inside] * count
    if not commit.manifest:
        assert sets == [set(order)] * len(sets)
        return "all in all"
    true = [
        {
            peer
            for at, peer in enumerate(order)
            if int.from_bytes(run.contributors, "little") >> at & 1
        }
        for run in commit.manifest
        for _ in range(run.chunk_count)
    ]
    assert sets == true
    return "somebody in none" if len(peers) < len(order) else "somebody in some"


@pytest.mark.fault(
    "the master is killed before the history has its last rounds",
    "the journal has rounds that the history lacks",
    "they come from the journal at the next start, without what only the history knew",
)
async def test_rounds_committed_before_a_kill_come_back_from_the_journal(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.commit(2)
        full = stage.rounds()
        stage.scope.cancel()  # from now on nothing is written down, as in a process that is killed
        await stage.commit(3)
        stage.swarm.crash_master()
        stage.recorder.files.close()
        await stage.swarm.start_master()
        stage.record()
        rows = stage.rounds()
        assert rows[: len(full)] == full
        *bare, open_then = rows[len(full) :]
        made = {commit.round: commit for commit in stage.swarm.witness.commits}
        assert [row["round"] for row in rows[:-1]] == sorted(made)
        check_schema("RecordedRound", open_then)
        assert open_then["round"] == max(made) + 1
        assert format_round_reason(msgspec.convert(open_then, RecordedRound)) == (
            "the master was restarted while the round was open"
        )
        assert (open_then["version"], open_then["at_step"]) == (
            max(row["version"] for row in rows[:-1]) + 1,
            max(row["at_step"] for row in rows[:-1]) + 20,
        )
        stage.recorder.files.rebuild()
        assert stage.rounds()[: len(rows)] == rows, "it is there once"
        assert len(bare) >= 3
        for row in bare:
            check_schema("RecordedRound", row)
            assert row["digest"] == made[row["round"]].digest.hex()
            assert {mark["name"] for mark in row["marks"].values()} == {"a", "b", "c"}
            assert row["opened_at"] <= row["ended_at"]  # the journal's clock stands still here
            assert [row["open_s"], row["reduce_s"], row["plan"], row["repairs"]] == [None] * 4
            shown = msgspec.convert(row, RecordedRound)
            assert "only the journal's part" in format_round_reason(shown)
        show_rounds(msgspec.convert(rows, list[RecordedRound]))


@pytest.mark.fault("history cannot be written")
async def test_rounds_of_a_full_disk_are_kept_when_it_has_room_again(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        db = stage.recorder.history._db
        size = db.execute("pragma page_count").fetchone()[0]
        db.execute(f"pragma max_page_count = {size}")
        await stage.commit(25)
        kept = len(stage.rounds())
        assert kept < len(stage.swarm.witness.commits) - 2
        db.execute("pragma max_page_count = 1000000")
        await stage.commit(1)
        rows = stage.rounds()
        made = [commit.round for commit in stage.swarm.witness.commits]
        assert [row["round"] for row in rows] == made[: len(rows)]
        assert len(rows) >= len(made) - 1
        times = [row["open_s"] is not None for row in rows]
        assert times.count(False) > 3, "these are of the journal"
        assert times[-1]


async def test_events_are_in_the_history_and_the_stream(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        stage.swarm.crash("c")
        await stage.commit(2)
        events = stage.events()
        assert [event.id for event in events] == list(range(1, len(events) + 1))
        gone = next(event for event in events if event.kind == "leave")
        assert gone.name == "c"
        assert gone.peer == stage.swarm.peers["c"].peer
        assert BEGAN_AT < gone.at < wall_clock()
        told = [row for kind, row in stage.published if kind == "log"]
        assert [row["id"] for row in told] == [event.id for event in events]
        for row in told:
            check_schema("PastEvent", row)


async def test_the_curve_goes_with_the_run(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await trio.sleep(15)
        columns = stage.columns()
        at = columns["at"]
        assert len(at) >= 5
        assert all(later - earlier >= POINT_S - 1e-6 for earlier, later in itertools.pairwise(at))
        assert columns["rounds"] == sorted(columns["rounds"])
        assert columns["sent_bytes"] == sorted(columns["sent_bytes"])
        assert columns["members"][-1] == 3
        points = [row for kind, row in stage.published if kind == "point"]
        assert [row["at"] for row in points] == at
        for row in points:
            check_schema("Point", row)


async def test_each_member_has_a_curve_and_figures_have_a_mean(tmp_path: Path) -> None:
    async with a_stage(tmp_path, spares="d") as stage:
        stage.log("d", accuracy=0.99, rank=7.0)  # before it stood by
        stage.log("a", accuracy=0.25)
        stage.log("b", accuracy=0.75, rate=1e-3)
        await trio.sleep(15)
        columns, figures = stage.member("b")
        assert len(columns["at"]) >= 5
        assert columns["step"] == sorted(columns["step"])
        assert columns["step"][-1] > columns["step"][0]
        assert columns["sent_bytes"][-1] > 0
        assert columns["tokens_per_s"][-1] > 0
        assert figures == {"accuracy": [0.75], "rate": [1e-3]}, "each where it was logged"
        means, mean_figures = stage.member("")
        assert mean_figures == {"accuracy": [0.5], "rate": [1e-3], "rank": [7.0]}
        assert means["loss"][-1] is not None
        assert stage.recorder.figures == {"accuracy": 0.5, "rate": 1e-3, "rank": 7.0}
        assert means["step"][-1] >= columns["step"][-1] - 20
        samples = [row for kind, row in stage.published if kind == "sample"]
        assert {row["name"] for row in samples[-1]} == {"mean", *"abcd"}
        for row in itertools.chain(*samples):
            check_schema("MemberPoint", row)

        await stage.restart_master()
        await trio.sleep(12)
        after, after_figures = stage.member("b")
        assert after["at"][: len(columns["at"]) - 1] == columns["at"][:-1]
        assert after["at"][-1] > columns["at"][-1] + 15.0
        assert after_figures["accuracy"][-1] == 0.75


async def test_the_loss_of_a_spare_is_not_drawn(tmp_path: Path) -> None:
    """Its trainer has one if it was a contributor before: an old one, that does not change."""
    async with a_stage(tmp_path, spares="d") as stage:
        roster = stage.swarm.coordinator.context.roster
        for name in "ad":
            member = roster.get(stage.swarm.peers[name].peer)
            assert member is not None
            assert member.progress is not None
            member.progress = attrs.evolve(member.progress, loss=9.0)
        stage.recorder._take_point(wall_clock())
        stage.recorder._take_members(wall_clock())
        losses = {row["name"]: row["loss"] for row in stage.published[-1][1]}
        assert (losses["a"], losses["d"]) == (9.0, None)


async def test_with_many_members_each_has_fewer_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_recorder, "MEMBER_POINTS_PER_S", 0.3)  # three members: every 10 s
    monkeypatch.setattr(run_recorder, "FIGURE_MEMBERS_MAX", 1)
    async with a_stage(tmp_path) as stage:
        for name in "abc":
            stage.log(name, accuracy=1.0)
        await trio.sleep(60)
        columns, _figures = stage.member("a")
        assert 5 <= len(columns["at"]) <= 9
        kept = [name for name in "abc" if stage.member(name)[1]]
        assert len(kept) == 1, "the figures of the others are in the mean only"
        assert stage.member("")[1]["accuracy"][-1] == 1.0


async def test_a_script_that_logs_ever_new_figures_keeps_its_peer_alive(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        for number in range(3 * METRICS_MAX):
            stage.log("a", **{f"figure {number}": 1.0}, accuracy=number)
        await stage.commit(2)
        metrics = stage.swarm.peers["a"].service.training.progress().metrics
        assert len(metrics) == METRICS_MAX
        assert metrics["accuracy"].value == 3 * METRICS_MAX - 1
        assert "figure 0" not in metrics, "those logged the longest ago make way"
        assert len(stage.recorder.figures) <= METRICS_MAX


async def test_a_finished_run_has_an_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_stage(tmp_path) as stage:
        assert stage.recorder.ending() is None
        await stage.commit(3)
        coordinator = stage.swarm.coordinator
        spec = coordinator.context.spec
        rounds = attrs.evolve(spec.run, rounds=coordinator.context.history.commit_count + 1)
        coordinator.context.spec = attrs.evolve(spec, run=rounds)
        await stage.swarm.until(lambda: coordinator.context.history.finished)
        with monkeypatch.context() as slow_disk:
            slow_disk.setattr(stage.swarm.store, "run_times", lambda: (0.0, None))
            early = stage.recorder.ending()
            assert early is not None
            assert early.duration_s is None
        await trio.sleep(2 * LOOK_S)
        ending = stage.recorder.ending()
        assert ending is not None
        assert ending.weights_at == ("a", "b", "c")
        assert ending.loss_start is not None
        assert ending.loss_end is not None
        assert ending.duration_s == 0.0, "the swarm's journal has no clock"
        check_schema("Ending", ending)
        await stage.restart_master()
        again = stage.recorder.ending()
        assert again is not None
        assert attrs.evolve(again, loss_end=ending.loss_end) == ending
        assert again.loss_end is not None


async def test_a_run_that_waits_has_no_speed_no_end_and_a_gap_in_its_curves(tmp_path: Path) -> None:
    """Its peers say the same time that is left as the master does."""
    async with a_stage(tmp_path) as stage:
        context = stage.swarm.coordinator.context
        run = attrs.evolve(context.spec.run, rounds=1_000)
        context.spec = attrs.evolve(context.spec, run=run)
        await stage.commit(3)
        report = stage.swarm.peers["a"].service.report
        await trio.sleep(2 * context.spec.heartbeat_s)
        told = headline(stage.swarm.coordinator, "training").eta_s
        assert told is not None
        assert report.left_s == pytest.approx(told, rel=0.2)
        stage.swarm.pause()
        await trio.sleep(25)
        names = ("step", "loss", "utilisation", "tokens_per_s")
        assert [stage.columns()[name][-1] for name in names] == [None, None, None, 0.0]
        columns, _figures = stage.member("a")
        assert [columns[name][-1] for name in names] == [None] * 4
        assert report.left_s == 0.0


async def test_nothing_is_written_while_nothing_changes(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        stage.swarm.pause()
        await trio.sleep(25)  # until nobody has a rate any more
        kept, published = stage.columns(), len(stage.published)
        events = stage.events()
        await trio.sleep(20)
        assert stage.columns() == kept
        assert len(stage.published) == published
        assert stage.events() == events
        paused_at = wall_clock()
        stage.swarm.resume()
        await stage.commit(2)
        columns = stage.columns()
        after = next(i for i, at in enumerate(columns["at"]) if at > paused_at - 2 * POINT_S)
        assert columns["at"][after] < paused_at + LOOK_S, "the line stays level until then"
        assert columns["rounds"][after] == kept["rounds"][-1]
        assert None not in columns["rounds"], "it is no gap"


async def test_a_restarted_master_continues_the_history(tmp_path: Path) -> None:
    async with a_stage(tmp_path) as stage:
        await stage.commit(5)
        before, rounds, events = stage.columns(), stage.rounds(), stage.events()
        await stage.restart_master()
        await trio.sleep(12)
        columns = stage.columns()
        count = columns["rounds"].index(None)
        assert 0 <= count - len(before["at"]) <= 1
        hole = {name: column[count] for name, column in columns.items()}
        assert hole.pop("at") < columns["at"][count + 1] - 15.0
        assert set(hole.values()) == {None}
        assert columns["sent_bytes"][count + 1] >= before["sent_bytes"][-1] > 0
        assert columns["sent_bytes"][-1] > before["sent_bytes"][-1]
        assert stage.rounds()[: len(rounds)] == rounds
        numbers = [row["round"] for row in stage.rounds()]
        assert numbers == sorted(set(numbers))
        assert stage.events()[: len(events)] == events
        ids = [event.id for event in stage.events()]
        assert ids == list(range(1, len(ids) + 1))


@pytest.mark.fault("history cannot be written")
async def test_files_that_cannot_be_written_cost_the_run_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "not there"
    async with a_stage(folder) as stage:
        await stage.commit(3)
        assert len(stage.rounds()) >= 3, "kept in memory"
        told = [event.text for event in stage.events() if str(folder) in event.text]
        assert len(told) == 1
