"""The recorder of a run's metrics, rounds and events. It decides nothing.

    MasterService --events--.                    .--> MetricsStore  the curve, rounds, events
                             >-- look, every s --+
    Coordinator --state-----'                    '--> LiveStream    open pages

Once a second it checks whether the run has changed. If so, a thread writes the rounds that have
ended, the events, and a point of the run's curve and of each member's if one is due. Rounds that
the journal has and the history lacks are copied from the journal at the start, and after a failed
write.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import trio
from attrs import Factory, define

from ...membership.master.rounds.round import Round
from ...membership.master.state.master_effects import Event
from ...membership.master.status.headline import headline, is_waiting
from ...membership.master.status.round_rows import (
    journaled_round,
    recorded_round,
)
from ...membership.master.status.why_waiting import WaitReasons
from ...membership.shared.run_status import Headline, RecordedRound
from ...protocol.errors import HoldfastError
from ..curves import COLUMNS, EVERYBODY, MemberPoint, Point
from ..metrics_store import HISTORY_FILE, ROUNDS_MAX, MetricsStore, PastEvent
from ..sampling import Sampler, newest_means
from ..status_records import Ending
from ..web.json_answers import compact
from .master_service import MasterService

log = logging.getLogger("holdfast.master")

Json = dict[str, Any]

LOOK_S = 1.0
POINT_S = 2.0  # between two points of the curve
# At most, for a time in which nothing has changed: without them it would look like a gap.
FLAT_POINTS = 8
MEMBER_POINTS_PER_S = 20  # of all members together: with more than 40 they have fewer points each
FIGURE_MEMBERS_MAX = 64  # whose figures of run.log one sample stores; the means are of all
WARNINGS_MAX = 8  # of the files, between two looks
EVENTS_WAITING_MAX = 10_000  # while the disk is slow; then the oldest are dropped
FIGURES = [name for name in COLUMNS if name not in ("at", "members")]  # of a ``Headline``
NO_STEPS: Json = dict.fromkeys(("step", "loss", "tokens_per_s", "utilisation"))


class Stream(Protocol):
    """A receiver of new rows: see ``web.live_stream``."""

    def publish(self, kind: str, row: object) -> None: ...


@define
class PendingRows:
    """Rows that wait to be written into the history, oldest first."""

    points: list[Point] = Factory(list)
    rounds: list[tuple[int, bytes]] = Factory(list)
    events: deque[PastEvent] = Factory(lambda: deque(maxlen=EVENTS_WAITING_MAX))
    members: list[MemberPoint] = Factory(list)

    def __bool__(self) -> bool:
        return bool(self.points or self.rounds or self.events or self.members)


class RunFiles:
    """The files of a run's history, and the rows that they lack. All methods wait for the disk.

    Attributes:
      warnings: messages of the files, from any thread; they become events.
    """

    def __init__(self, service: MasterService, state: Path, began_at: float) -> None:
        self.warnings: deque[str] = deque(maxlen=WARNINGS_MAX)
        self.history = MetricsStore(state / HISTORY_FILE, self.warnings.append)
        self._lacks = False  # some rounds may be only in the journal
        self._journal = service.store
        self._run = service.coordinator.context.history
        self._began_at = began_at
        self._first_round = self._run.schedule.next_round
        # Reductions of the last master: they go on, or are aborted by this one.
        self._orders = {each.order.round for each in self._run.orders.values()}
        self.rebuild()

    def write(self, rows: PendingRows) -> None:
        """Write rows; those of a full disk are lost, but for the rounds, which the journal has."""
        if not self.history.write(rows.points, rows.rounds, rows.events, rows.members):
            self._lacks = True
        elif self._lacks:
            self.rebuild()

    def rebuild(self) -> None:
        """Copy the rounds that the history lacks from the journal.

        A master that was killed, or whose disk was full, has ended rounds without recording them
        here. The journal has only a part of each row.
        """
        known = self.history.round_numbers()
        try:
            found = self._journal.rounds(ROUNDS_MAX, known)
        except (OSError, ValueError, HoldfastError) as error:
            self.warnings.append(
                f"the history may lack rounds: the journal cannot be read: {error}"
            )
            return
        rows = [
            journaled_round(
                each.record,
                self._run.members.name_of,
                each.opened_at,
                each.committed_at or self._began_at,
            )
            for each in found
            if each.committed_at is not None or self._was_open(each.record.round)
        ]
        self._lacks = not self.history.write(rounds=[(row.round, compact(row)) for row in rows])

    def _was_open(self, number: int) -> bool:
        """Return whether a round without a commit ended with the last master."""
        return number < self._first_round and number not in self._orders

    def close(self) -> None:
        self.history.close()


class RunRecorder:
    """Record a master's run in the files of its state directory.

    Args:
      live: receives each new row.
      wall_clock: unix seconds; only shown and stored, no decision depends on it.
    """

    def __init__(
        self,
        service: MasterService,
        state: Path,
        *,
        live: Stream | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.files = RunFiles(service, state, wall_clock())
        self.history = self.files.history
        self.live = live
        self._service = service
        self._context = service.coordinator.context
        self._wall_clock = wall_clock
        self._seen_count = -1
        self._last_round: Round | None = None  # the last one recorded
        self._new = PendingRows()  # since the last write
        # The totals of this run's earlier masters, as far as they are known.
        self._before = self.history.last_point()
        self._last: Point | None = None  # this master's last point
        self._waits = True  # as of that point
        self.figures: dict[str, float] = {}  # of run.log: the newest means
        self._sampler = Sampler()
        self._sampled_at = -math.inf  # unix seconds of the members' last points
        self._ending: Ending | None = None  # once the run is finished
        self._next_id = self.history.last_event_id() + 1
        service.subscribe(self._record_event)

    # ------------------------------------------------------------ while the run goes on

    async def run(self) -> None:
        """Record changes until cancelled; ``look`` and ``close`` record the last ones."""
        while True:
            self.look()
            if self._new:
                await self._service.network.run_sync(self._take())
            await trio.sleep(LOOK_S)

    def close(self) -> None:
        """Write the pending rows and close the files, after ``look``; this waits for the disk."""
        self._take()()
        self.files.close()

    def look(self) -> None:
        while self.files.warnings:
            text = self.files.warnings.popleft()
            log.warning("%s", text)
            self._service.decide(partial(self._service.coordinator.note, text))
        count = self._context.change_count
        if count == self._seen_count:
            return
        self._take_rounds()
        now = self._wall_clock()
        if self._last is not None and now - self._last.at < POINT_S:
            # The count stays unseen: the next look records this change, perhaps the last for long.
            return
        self._seen_count = count
        self._take_point(now)
        every_s = max(POINT_S, len(self._context.roster) / MEMBER_POINTS_PER_S)
        if now - self._sampled_at >= every_s or self._context.history.finished:
            self._sampled_at = now
            self._take_members(now)

    def _take(self) -> Callable[[], None]:
        """Return the next write, for a thread; one runs at a time."""
        new, self._new = self._new, PendingRows()
        return partial(self.files.write, new)

    # ------------------------------------------------------------ events

    def _record_event(self, event: Event) -> None:
        context = self._context
        member = context.roster.get(event.peer) if event.peer else None
        known = member or (context.history.members.admitted.get(event.peer) if event.peer else None)
        past = PastEvent(
            self._next_id,
            self._at(event.at_s),
            event.kind.value,
            event.peer,
            known.name if known is not None else "",
            event.text,
        )
        self._next_id += 1
        self._new.events.append(past)
        if self.live is not None:
            self.live.publish("log", past)

    def _at(self, at_s: float) -> float:
        return self._wall_clock() - (self._service.now() - at_s)

    # ------------------------------------------------------------ rounds

    def _take_rounds(self) -> None:
        ended: list[Round] = []
        for round_ in reversed(self._service.coordinator.scheduler.round_table.past):
            if round_ is self._last_round:
                break
            ended.append(round_)
        for round_ in reversed(ended):
            self._last_round = round_
            row = self._row(round_)
            self._new.rounds.append((round_.number, compact(row)))
            if self.live is not None:
                self.live.publish("round", row)

    def _row(self, round_: Round) -> RecordedRound:
        return recorded_round(round_, self._at(round_.opened_s), self._at(round_.ended_s))

    # ------------------------------------------------------------ the curve

    def headline(self, figures: Headline) -> Headline:
        """Return this master's headline with the bytes of earlier masters added."""
        before = self._before
        if before is None:
            return figures
        return attrs.evolve(
            figures,
            sent_bytes=figures.sent_bytes + (before.sent_bytes or 0),
            saved_bytes=figures.saved_bytes + (before.saved_bytes or 0),
        )

    def _take_point(self, now: float) -> None:
        state, _why = WaitReasons(self._service.coordinator, self._service.now()).of_run()
        figures = self.headline(headline(self._service.coordinator, state))
        point = Point(
            at=now,
            members=len(self._context.roster),
            **{name: getattr(figures, name) for name in FIGURES},
        )
        self._waits = is_waiting(state)
        if self._waits:  # a gap in all curves: what was reported before is no loss of now
            point = attrs.evolve(point, step=None, loss=None, loss_min=None, loss_max=None)
        if self._last is not None:
            self._new.points += _flat(self._last, now)
        self._last = point
        self._new.points.append(point)
        if self.live is not None:
            self.live.publish("point", {name: getattr(point, name) for name in COLUMNS})

    def _take_members(self, now: float) -> None:
        reporting = [
            (member, member.progress)
            for member in self._context.roster.by_number()
            if member.progress is not None
        ]
        rows = [
            self._sampler.take(member.peer, member.name, now, member.number, progress)
            for member, progress in reporting
        ]
        training = {member.peer for member in self._service.coordinator.scheduler.contributors()}
        rows = [row if row.peer in training else attrs.evolve(row, loss=None) for row in rows]
        if self._waits:
            rows = [attrs.evolve(row, **NO_STEPS) for row in rows]
        if reporting:  # of a figure that contributors log, theirs is the mean
            steps = self._context.spec.diloco.sync_every
            theirs = [each for member, each in reporting if member.peer in training]
            others = [each for member, each in reporting if member.peer not in training]
            self.figures = newest_means(others, steps) | newest_means(theirs, steps)
        fresh = {name for row in rows for name in row.figures}
        means = {name: mean for name, mean in self.figures.items() if name in fresh}
        logging_members = [row.peer for row in rows if row.figures][:FIGURE_MEMBERS_MAX]
        rows = [
            row if row.peer in logging_members else attrs.evolve(row, figures={}) for row in rows
        ]
        if rows:
            step, loss = (None, None) if self._last is None else (self._last.step, self._last.loss)
            self._new.points[-1] = attrs.evolve(self._new.points[-1], figures=means)
            self._new.members += rows
            rows.insert(0, MemberPoint(EVERYBODY, "mean", now, step, loss, figures=means))
        if self.live is not None and rows:
            self.live.publish("sample", rows)

    # ------------------------------------------------------------ the end

    def ending(self) -> Ending | None:
        history = self._context.history
        if not history.finished:
            self._ending = None
            return None
        if self._ending is None or self._ending.finished_at is None:  # the record is being written
            opened_at, finished_at = self._service.store.run_times()
            first, last = self.history.losses()
            known = self._last is not None and self._last.loss is not None
            commits = history.commits.values()
            holders = {each.peer for commit in commits for each in commit.contributors}
            self._ending = Ending(
                finished_at=finished_at,
                duration_s=max(0.0, finished_at - opened_at)
                if finished_at is not None and opened_at is not None
                else None,
                loss_start=first,
                loss_end=self._last.loss if known and self._last is not None else last,
                # The contributors of the last commits hold the final weights.
                weights_at=tuple(sorted(map(history.members.name_of, holders))),
            )
        return self._ending


def _flat(last: Point, now: float) -> Iterable[Point]:
    """Return copies of the last point, from then until just before now."""
    idle_s = now - POINT_S - last.at
    count = min(FLAT_POINTS, int(idle_s / POINT_S))
    return [attrs.evolve(last, at=last.at + idle_s * part / count) for part in range(1, count + 1)]
