"""The cases of ``benchmarks.lines``: what was measured of each, kept in a file, in a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from benchmarks.report import RESULTS, Record, Table

PLOT = RESULTS / "lines.png"
KEPT = RESULTS / "lines.json"


@frozen
class Case:
    """What is measured, and what came of it; times in seconds.

    Attributes:
      learnt: whether the planner knew the lines only by what they carried.
      round_s: the median from the third round on; ``rounds_s`` are all, in order.
      t_lb_s: below which no plan can end a round.
      predicted_s: what the plan of each round said; None: its lines were not known.
      rival_s: the median of the rival's; None: not measured.
      sent_over_payload: bytes that all lanes sent over those that had to leave the peers.
      wire_over_payload: the same of IP packets on the lines: headers, control and TCP's retransmissions.
      commit: of the program that was measured.
    """

    profile: str
    peers: int
    codec: str
    congestion: str
    learnt: bool
    round_s: float
    t_lb_s: float
    rounds_s: tuple[float, ...]
    predicted_s: tuple[float | None, ...] = ()
    rival: str = ""
    rival_s: float | None = None
    rival_rounds_s: tuple[float, ...] = ()
    sent_over_payload: float | None = None
    wire_over_payload: float | None = None
    late_ms_max: float = 0.0
    commit: str = ""

    @property
    def key(self) -> tuple[str, int, str, str, bool]:
        """Which case it is: two of one key are measurements of the same."""
        return self.profile, self.peers, self.codec, self.congestion, self.learnt

    @property
    def share(self) -> float:
        """Of T_LB's speed."""
        return self.t_lb_s / self.round_s

    @property
    def first_over_fifth(self) -> float | None:
        return self.rounds_s[0] / self.rounds_s[4] if len(self.rounds_s) > 4 else None


def case_of(content: dict[str, Any]) -> Case:
    """Return a case that was kept in a file."""
    values: dict[str, Any] = {
        key: tuple(each) if isinstance(each, list) else each for key, each in content.items()
    }
    return Case(**values)


def with_kept(cases: Sequence[Case]) -> list[Case]:
    """Return the section's cases with these in place of earlier measurements of the same.

    The rival's figures stay where it was not measured again.
    """
    fresh = {case.key: case for case in cases}
    record = Record.load(KEPT)
    merged: dict[tuple[object, ...], Case] = {}
    for content in record.raw:
        old = case_of(content)
        old = evolve(old, commit=old.commit or record.commit)
        new = fresh.pop(old.key, old)
        if new.rival_s is None:
            new = evolve(
                new, rival=old.rival, rival_s=old.rival_s, rival_rounds_s=old.rival_rounds_s
            )
        merged[old.key] = new
    return [*merged.values(), *fresh.values()]


def plot(cases: Sequence[Case], path: Path) -> None:
    """Draw each case's share of T_LB's speed, the rival's beside it, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(f"{each.profile}, {each.peers}, {each.codec}" for each in cases))
    figure = Figure(figsize=(9, 0.9 + 0.33 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    marks = {"bbr": ("o", "C0"), "cubic": ("s", "C1")}
    for congestion, (mark, color) in marks.items():
        chosen = [each for each in cases if each.congestion == congestion and each.learnt]
        rows = [names.index(f"{each.profile}, {each.peers}, {each.codec}") for each in chosen]
        shares = [100 * each.share for each in chosen]
        axes.plot(shares, rows, mark, color=color, label=f"holdfast, {congestion.upper()}")
        beside = [(each, row) for each, row in zip(chosen, rows, strict=True) if each.rival_s]
        theirs = [100 * each.t_lb_s / (each.rival_s or 1.0) for each, _ in beside]
        axes.plot(
            theirs,
            [row for _, row in beside],
            mark,
            color=color,
            markerfacecolor="none",
            label=f"a rival, {congestion.upper()}",
        )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 100), xlabel="share of T_LB's speed, %")
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the program's version in it, the same figures make the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})


def table_of(cases: Sequence[Case], about: Sequence[str]) -> Table:
    """Return the section's table; ``about`` says what each line is."""
    return Table(
        "Rounds over lines that nobody described, in real runs; medians from the third round on",
        ["python -m benchmarks.lines --json lines.json"],
        [
            "line, peers, codec",
            "congestion control",
            "a round, s",
            "T_LB, s",
            "share of T_LB's speed",
            "first round, s",
            "rival, s",
            "sent over payload",
            "commit",
        ],
        [
            [
                f"{case.profile}, {case.peers}, {case.codec}" + ("" if case.learnt else ", told"),
                case.congestion,
                f"{case.round_s:.2f}",
                f"{case.t_lb_s:.2f}",
                f"{case.share:.0%}",
                f"{case.rounds_s[0]:.2f}",
                f"{case.rival_s:.2f} ({case.rival})" if case.rival_s else "",
                f"{case.sent_over_payload:.3f}" if case.sent_over_payload else "",
                case.commit,
            ]
            for case in cases
        ],
        [f"- {each}" for each in about]
        + [
            "Each peer's own line, and each peer on a host of its own. A rival's time is that of the slowest"
            " rank, without a master, membership or encryption. Cases that a later commit changed were measured"
            " again, and only these.",
            f"![Share of T_LB's speed by line, congestion control and program](results/{PLOT.name})",
        ],
    )
