"""The comparison of trials: a table, a picture, and which settings to take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from attrs import frozen

from ...membership.master.rounds.round_scheduler import ROUNDS_IN_FLIGHT_MAX
from ...membership.planning.bandwidth import Bandwidth
from ...membership.planning.predict import Conditions, predict
from .plan_command import PAYLOAD_SHARE
from .plan_table import count, part, rate, seconds, size
from .run_tables import add, format_loss, plain_console, plain_table
from .trial import FIGURES, LOSS, Curve, Outcome

MEANS = 16  # of all points of a curve, side by side
HIDDEN_SHARE = 0.25  # of a curve's steps, the first ones: their losses would flatten all others
WIDTH, HEIGHT, MARGIN = 440, 320, 48  # of a panel, in pixels
LEGEND = 18  # pixels of one of its lines
COLOURS = ("#444444", "#0b6e5f", "#3b4cc0", "#b40426", "#dd8452", "#8172b3", "#937860")


@frozen
class Row:
    """A trial beside the script alone.

    Attributes:
      value: what is compared, smaller is better; None: it was not logged.
      against: the share by which it is above the script alone's.
      round_s: computed for the lines, from a round's post to its merge.
      utilisation: the share of its time in which a trainer steps then.
      time_s: until all tokens are trained, on a machine for each replica.
      curve: of the training loss, smoothed; of what is compared if no loss was reported.
    """

    outcome: Outcome
    value: float | None
    against: float | None
    round_s: float
    utilisation: float
    time_s: float
    curve: Curve

    @property
    def label(self) -> str:
        return self.outcome.trial.label

    def loss_at(self, time_s: float) -> float:
        """Return the curve's value after so long, on a machine for each replica."""
        steps = self.outcome.trial.steps * time_s / self.time_s
        return [math.inf, *(value for step, value in self.curve if step <= steps)][-1]


@frozen
class Comparison:
    """All trials, first the script alone; ``figure`` is what is compared."""

    rows: Sequence[Row]
    figure: str
    bytes_per_s: float  # of each machine's line, both ways
    latency_s: float  # of a round trip

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], bytes_per_s: float, latency_s: float) -> Comparison:
        figure = next((name for name in FIGURES if all(each.end(name) for each in outcomes)), LOSS)
        line = Bandwidth(PAYLOAD_SHARE * bytes_per_s, PAYLOAD_SHARE * bytes_per_s)
        step_s, reference = outcomes[0].step_s, outcomes[0].end(figure)
        rows = []
        for each in outcomes:
            peers, value = each.trial.peers, each.end(figure)
            delay_s = latency_s / 2 if peers > 1 else 0.0
            at = Conditions(each.value_count, step_s, peers, line, delay_s, ROUNDS_IN_FLIGHT_MAX)
            found = predict(each.trial.spec, at)
            against = value / reference - 1 if value is not None and reference else None
            time_s = step_s * each.trial.steps / found.utilisation
            curve = _smoothed(each.curves.get(LOSS) or each.curves.get(figure, ()))
            rows.append(Row(each, value, against, found.round_s, found.utilisation, time_s, curve))
        return cls(rows, figure, bytes_per_s, latency_s)

    def best(self) -> Row | None:
        """Return the row of replicas with the least loss when the first of them has ended."""
        known = [row for row in self.rows[1:] if row.curve]
        first_s = min((row.time_s for row in known), default=0.0)
        return min(known, key=lambda row: row.loss_at(first_s), default=None)


def _smoothed(curve: Curve) -> Curve:
    """Return the running means of a curve."""
    width = max(1, len(curve) // MEANS)
    values = [value for _step, value in curve]
    means = [fmean(values[max(0, end - width) : end]) for end in range(1, len(curve) + 1)]
    return [(step, mean) for (step, _value), mean in zip(curve, means, strict=True)]


def show(found: Comparison) -> None:
    """Print the table, and which settings to take."""
    console = plain_console()
    headings = ("against alone", "sent a round", "a round takes", "busy", "time")
    table = plain_table("", found.figure, *headings)
    for row in found.rows:
        alone = row.outcome.trial.peers == 1
        add(
            table,
            row.label,
            format_loss(row.value),
            "" if alone or row.against is None else f"{row.against:+.1%}",
            "" if alone else size(row.outcome.round_bytes),
            "" if alone else seconds(row.round_s),
            part(row.utilisation),
            seconds(row.time_s),
        )
    console.print(table)
    console.print(
        f"All trained {count(found.rows[0].outcome.tokens)} tokens. Rounds and times are computed:"
        f" a machine for each replica, lines of {rate(8 * found.bytes_per_s)} and round trips of"
        f" {seconds(found.latency_s)}."
    )
    best = found.best()
    if best is None:
        console.print("the script reports no loss: call run.step(loss=...)")
    elif len(found.rows) > 2:
        console.print(f"take: {best.label}")


# ---------------------------------------------------------------- picture


def draw(found: Comparison, path: Path) -> None:
    """Write an SVG of the training losses: by tokens, and by computed time."""
    height = HEIGHT + LEGEND * (len(found.rows) + 1)
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#444444">',
        '<rect width="100%" height="100%" fill="white"/>',
        *_panel(found, 0, [row.outcome.tokens for row in found.rows], count, "tokens"),
        *_panel(found, WIDTH, [row.time_s for row in found.rows], seconds, "computed"),
    ]
    for place, row in enumerate(found.rows):
        y, colour = HEIGHT + LEGEND * place, COLOURS[place % len(COLOURS)]
        elements += [
            f'<path d="M{MARGIN},{y}h18" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{MARGIN + 26}" y="{y + 4}">{escape(row.label)}</text>',
        ]
    path.write_text("\n".join([*elements, "</svg>", ""]))


def _panel(
    found: Comparison, left: int, ends: Sequence[float], form: Callable[[float], str], unit: str
) -> Iterator[str]:
    """Yield a panel's elements; ``ends`` is where on its axis the last step of each row is."""
    steps = [max(1, row.outcome.trial.steps) for row in found.rows]
    shown = [
        value
        for row, last in zip(found.rows, steps, strict=True)
        for step, value in row.curve
        if step >= HIDDEN_SHARE * last
    ]
    low, high = min(shown, default=0.0), max(shown, default=1.0)
    x, wide, tall = left + MARGIN, WIDTH - 3 * MARGIN // 2, HEIGHT - 2 * MARGIN
    right, bottom = x + wide, MARGIN + tall
    yield f'<text x="{x}" y="{MARGIN - 16}" font-weight="bold">training loss</text>'
    yield f'<text x="{right}" y="{bottom + 18}" text-anchor="end">{form(max(ends))} {unit}</text>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y, text = bottom - share * tall, f"{low + share * (high - low):.3g}"
        yield f'<path d="M{x},{y}h{wide}" stroke="#dddddd"/>'
        yield f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{text}</text>'
    yield f'<svg x="{x}" y="{MARGIN}" width="{wide}" height="{tall}">'  # nothing is drawn beside it
    for place, row in enumerate(found.rows):
        across = wide * ends[place] / (max(ends) or 1.0) / steps[place]
        up = tall / ((high - low) or 1.0)
        points = " ".join(f"{across * at:.1f},{up * (high - value):.1f}" for at, value in row.curve)
        colour = COLOURS[place % len(COLOURS)]
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    yield "</svg>"
