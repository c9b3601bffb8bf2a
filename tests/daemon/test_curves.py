"""Members' curves and figures of ``run.log`` on disk: restarts, merging, limits, gaps and lines."""

from __future__ import annotations

import pytest

from holdfast.daemon import curves as module
from holdfast.daemon.curves import EVERYBODY, MemberPoint, Point, member_columns
from holdfast.daemon.sampling import UTILISATION_S, Sampler, newest_means
from holdfast.protocol.messages import COUNT_MAX, METRICS_MAX, LoggedFigure, Progress
from tests.daemon.kept_history import Kept, kept

__all__ = ["kept"]

ALDER, BIRCH = "a" * 32, "b" * 32
BEGAN_AT = 1e9


def point(at: float, peer: str = ALDER, loss: float | None = 1.0, **more: object) -> MemberPoint:
    name = {ALDER: "alder", BIRCH: "birch", EVERYBODY: "mean"}.get(peer, peer)
    return MemberPoint(peer, name, BEGAN_AT + at, int(at), loss, **more)  # type: ignore[arg-type]


def columns(kept: Kept, peer: str = ALDER, count: int = 5_000) -> dict[str, list[object]]:
    return member_columns(kept.history.member_points(peer, count, None, None))[0]


def test_points_and_figures_survive_a_restart(kept: Kept) -> None:
    figures = {"accuracy": 0.25, "eval/loss": 1.23456789e-3}
    kept.history.write(members=[point(i, tokens_per_s=7.0, sent_bytes=i) for i in range(5)])
    kept.history.write(members=[point(5, figures=figures), point(5, BIRCH, 3.0)])
    kept.reopen()
    found, logged = member_columns(kept.history.member_points(ALDER, 100, None, None))
    assert found["at"] == [BEGAN_AT + i for i in range(6)]
    assert found["step"] == [0, 1, 2, 3, 4, 5]
    assert found["tokens_per_s"] == [7.0] * 5 + [None]
    assert found["sent_bytes"] == [0, 1, 2, 3, 4, None]
    assert logged == {
        "accuracy": [None] * 5 + [0.25],
        "eval/loss": [None] * 5 + [pytest.approx(1.234568e-3)],
    }
    assert kept.history.figures() == ["accuracy", "eval/loss"]
    assert kept.history.member("birch") == kept.history.member(BIRCH) == (BIRCH, "birch")
    assert kept.history.member("cedar") is None
    assert kept.history.member(EVERYBODY) is None, "the means are no member"
    assert kept.warnings == []


def test_of_two_members_of_one_name_the_one_seen_last_is_found(kept: Kept) -> None:
    kept.history.write(members=[MemberPoint(ALDER, "x", 2.0), MemberPoint(BIRCH, "x", 1.0)])
    assert kept.history.member("x") == (ALDER, "x")
    kept.history.write(members=[MemberPoint(BIRCH, "x", 3.0)])
    assert kept.history.member("x") == (BIRCH, "x")


def test_what_members_claim_is_kept_however_large(kept: Kept) -> None:
    nonsense = {"inf": float("inf"), "nan": float("nan"), "large": 1e308}
    assert kept.history.write(members=[point(0, sent_bytes=2**80, figures=nonsense)])
    assert columns(kept)["sent_bytes"] == [COUNT_MAX]
    _found, figures = member_columns(kept.history.member_points(ALDER, 10, None, None))
    assert figures == {"large": [1e308]}


def test_old_points_of_each_member_are_merged_in_pairs(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMBER_LEVEL_POINTS", 16)
    monkeypatch.setattr(module, "MERGED_SHARE", 4)
    monkeypatch.setattr(module, "LEVELS", 6)
    for start in range(0, 3_000, 30):
        kept.history.write(
            members=[
                point(at, loss=at % 2, sent_bytes=at, figures={"even": float(at % 2)})
                for at in range(start, start + 30)
            ]
        )
    kept.history.write(members=[point(0, BIRCH)])
    found, logged = member_columns(kept.history.member_points(ALDER, 5_000, None, None))
    assert len(found["at"]) < 6 * 20
    assert found["at"] == sorted(found["at"])
    assert found["step"] == sorted(found["step"])
    assert found["sent_bytes"] == found["step"], "the newest of those merged"
    assert found["step"][-16:] == list(range(2_984, 3_000)), "the newest are all there"
    assert set(found["loss"][:20]) == {0.5}, "the mean of those merged"
    assert logged["even"] == found["loss"]
    assert found["step"][0] > 500, "the oldest of all are deleted"
    assert columns(kept, BIRCH)["step"] == [0]


def test_a_thinned_answer_has_means_and_the_newest_point(kept: Kept) -> None:
    kept.history.write(members=[point(at, loss=float(at), sent_bytes=at) for at in range(100)])
    found = columns(kept, count=10)
    assert len(found["at"]) == 10
    assert found["step"][-1] == 99
    assert found["loss"][0] == pytest.approx(5.0)  # of steps 0 to 10
    part = kept.history.member_points(ALDER, 50, BEGAN_AT + 10, BEGAN_AT + 12)
    assert [row[1] for row in part] == [10, 11, 12]


def test_slow_points_are_no_gaps(kept: Kept) -> None:
    """With 1,000 members each has a point every 50 seconds."""
    kept.history.write(members=[point(at) for at in range(0, 1_000, 50)])
    assert None not in columns(kept)["step"]


def test_only_so_many_members_are_kept(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SERIES_MAX", 4)
    kept.history.write(members=[point(0, EVERYBODY)])
    for number in range(6):
        kept.history.write(members=[point(number, f"peer {number}")])
    known = [kept.history.member(f"peer {number}") is not None for number in range(6)]
    assert known == [False, False, False, True, True, True], "those seen last, beside the means"
    assert kept.count("points") == 4
    assert columns(kept, EVERYBODY)["step"] == [0]


def test_one_members_new_names_take_the_place_of_its_own(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEVEL_POINTS", 32)
    kept.history.write(members=[point(0, BIRCH, figures={"once": 1.0})])
    for at in range(1, 100):
        many = {f"{at} {number}": 1.0 for number in range(METRICS_MAX)}
        means = module.mean_figures([many, {"accuracy": 0.5}])
        members = [point(at, figures=many), point(at, BIRCH, figures={"accuracy": 0.5})]
        kept.history.write([Point(BEGAN_AT + at, figures=means)], members=members)
    names = kept.history.figures()
    assert names[:2] == ["once", "accuracy"]
    assert len(names) == 2 + module.FIGURES_MAX
    mean, birch = kept.history.lines("accuracy", 1_000, None, None, figure=True)[0]
    assert (set(mean.value), set(birch.value)) == ({0.5}, {0.5})


def test_lines_are_the_mean_and_the_members_seen_last(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINES_MAX", 2)
    for number in range(4):
        kept.history.write(
            members=[
                point(number, EVERYBODY, 5.0, figures={"accuracy": 0.5}),
                point(number, f"peer {number}", float(number), figures={"accuracy": number / 10}),
            ]
        )
    kept.history.write(members=[point(9, "spare", None)])
    lines, left_out = kept.history.lines("loss", 100, None, None, figure=False)
    assert [line.peer for line in lines] == [EVERYBODY, "peer 3", "peer 2"]
    assert left_out == 2
    assert lines[0].value == [5.0] * 4
    assert (lines[1].step, lines[1].value) == ([3], [3.0])
    lines, _left_out = kept.history.lines("accuracy", 100, None, None, figure=True)
    assert [line.value for line in lines] == [[0.5] * 4, [0.3], [0.2]]
    assert kept.history.lines("nothing", 100, None, None, figure=True)[0] == []


def test_a_figure_logged_now_and_then_is_one_line(kept: Kept) -> None:
    """``run.log`` is called at some steps only; the peer keeps the last value, a restart begins
    without.
    """
    for at in range(10):
        figures = {"accuracy": at / 10} if at in (3, 7) else {}
        kept.history.write(members=[point(at, figures=figures)])
    (line,) = kept.history.lines("accuracy", 100, None, None, figure=True)[0]
    assert (line.step, line.value) == ([3, 7], [0.3, 0.7])


def test_the_first_and_last_loss_are_found(kept: Kept) -> None:
    assert kept.history.losses() == (None, None)
    kept.history.write([Point(1.0), Point(2.0, loss=4.0), Point(3.0, loss=2.0), Point(4.0)])
    assert kept.history.losses() == (4.0, 2.0)


def test_utilisation_is_of_the_last_seconds() -> None:
    sampler = Sampler()

    def utilisation(after_s: float, number: int, stepped_s: float, waited_s: float) -> float | None:
        progress = Progress(1, 2, 3.0, 0.5, "training", 4, 5, 6, {}, waited_s, stepped_s)
        point = sampler.take(ALDER, "alder", BEGAN_AT + after_s, number, progress)
        assert (point.step, point.loss, point.tokens_per_s) == (1, 0.5, 3.0)
        assert (point.sent_bytes, point.received_bytes) == (4, 5)
        return point.utilisation

    assert utilisation(0.0, 7, 3.0, 1.0) == 0.75, "of all until now"
    assert utilisation(UTILISATION_S / 2, 7, 3.0, 3.0) == 0.5
    assert utilisation(UTILISATION_S, 7, 6.0, 6.0) == 3.0 / 8.0, "since the first point"
    assert utilisation(2 * UTILISATION_S, 7, 7.0, 9.0) == 0.25, "since the point before"
    assert utilisation(3 * UTILISATION_S, 7, 7.0, 9.0) is None, "a trainer that is paused"
    assert utilisation(3 * UTILISATION_S, 8, 1.0, 0.0) == 1.0, "another process counts anew"


def logged(step: int = 9, **figures: tuple[float, int]) -> Progress:
    metrics = {name: LoggedFigure(*each) for name, each in figures.items()}
    return Progress(step, 2, 3.0, 0.5, "training", 4, 5, 6, metrics)


def test_a_figure_is_in_the_point_after_it_was_logged_only() -> None:
    """Else it is a flat line from then on, as long as its script logs no other."""
    sampler = Sampler()

    def figures(number: int, progress: Progress) -> dict[str, float]:
        return dict(sampler.take(ALDER, "alder", BEGAN_AT, number, progress).figures)

    assert figures(1, logged(a=(1.0, 3), b=(2.0, 3))) == {"a": 1.0, "b": 2.0}
    assert figures(1, logged(a=(1.0, 3), b=(2.0, 3))) == {}
    assert figures(1, logged(a=(1.0, 8), b=(2.0, 3))) == {"a": 1.0}, "the same value, logged again"
    assert figures(1, logged(a=(5.0, 8), b=(2.0, 3))) == {"a": 5.0}, "another at the same step"
    assert figures(2, logged(a=(5.0, 8))) == {"a": 5.0}


def test_a_mean_is_of_what_was_logged_last() -> None:
    reports = [logged(90, a=(6.0, 0), b=(1.0, 90)), logged(95, a=(4.0, 0), b=(3.0, 94)), logged()]
    assert newest_means(reports, 10) == {"a": 5.0, "b": 2.0}
    reports[0] = logged(110, a=(2.0, 100), b=(1.0, 110))
    assert newest_means(reports, 10) == {"a": 2.0, "b": 2.0}, "nobody else has logged a since"
    reports[1] = logged(500, a=(4.0, 499), b=(3.0, 494))
    assert newest_means(reports, 10) == {"a": 3.0, "b": 2.0}, "its report came later, no more"
    reports[1] = logged(95, a=(4.0, 2**62), b=(3.0, 96))
    assert newest_means(reports, 10) == {"a": 2.0, "b": 1.0}, "of before a rewind, or a lie"
