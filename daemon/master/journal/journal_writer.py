"""The writer of the master's journal: it tries again while the disk is full or the database away.

While a record is being written, no effect behind it leaves this process. The clock of decisions
stands still meanwhile, because members cannot be late with an answer to a message that was not
sent.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from ....membership.master.state.journal import JournalRecord
from ....protocol.errors import UserError
from .journal_base import FencedError, JournalAwayError, JournalBrokenError

log = logging.getLogger("holdfast.master")

WRITE_RETRY_S = 0.5  # after the first failure to write a record; doubling
WRITE_RETRY_S_MAX = 10.0  # the longest that a run stands still after space was freed
WRITE_SLOW_S = 2.0  # a record that takes longer is named as what the run waits for
WRITE_USUAL_S = 1.0  # a write within this does not stop the clock: deadlines have room for it


class JournalWriter:
    """Write records one at a time, each until it is on disk.

    Args:
      note: makes a sentence an event of the run.
      caught_up: called when the clock of decisions runs again.
      superseded: set when another master is obeyed; nothing is written after that.
    """

    def __init__(
        self,
        append: Callable[[JournalRecord], Awaitable[None]],
        note: Callable[[str], None],
        caught_up: Callable[[], None],
        superseded: trio.Event,
        remedy: str,
    ) -> None:
        self._append = append
        self._note = note
        self._caught_up = caught_up
        self._superseded = superseded
        self._remedy = remedy
        self.fault = ""  # why the record cannot be written; empty while writing works
        self._since_s: float | None = None  # when the current write began
        self._past_waited_s = 0.0  # the waits for all earlier records

    @property
    def waited_s(self) -> float:
        """The total time that decisions have waited for the journal."""
        since_s = self._since_s
        late_s = 0.0 if since_s is None else trio.current_time() - since_s - WRITE_USUAL_S
        return self._past_waited_s + max(0.0, late_s)

    @property
    def stops_clock(self) -> bool:
        """True while a write takes so long that the clock of decisions stands still."""
        return self._since_s is not None and trio.current_time() - self._since_s >= WRITE_USUAL_S

    def why_stuck(self) -> str:
        """Return why no decision leaves this process, or an empty string."""
        if self.fault:
            return (
                f"the journal cannot be written: {self.fault}; peers train on, nothing is "
                f"committed; {self._remedy} and the run goes on"
            )
        if self._since_s is not None:
            taken_s = trio.current_time() - self._since_s
            if taken_s > WRITE_SLOW_S:
                return f"the journal is slow: a record takes {taken_s:.0f} s so far"
        return ""

    async def write(self, record: JournalRecord) -> None:
        """Return when the record is on disk, or another master leads; raise UserError if broken."""
        wait_s = WRITE_RETRY_S
        self._since_s = trio.current_time()
        while not self._superseded.is_set():
            try:
                await self._append(record)
                break
            except JournalAwayError as error:
                if not self.fault:
                    self.fault = str(error)
                    log.error("%s", self.why_stuck())
                    self._note(self.why_stuck())
                self.fault = str(error)
            except FencedError:
                break  # the service stands down
            except JournalBrokenError as error:
                # Waiting does not help. A restart cuts off what is damaged.
                raise UserError(
                    f"the journal cannot be written: {error}",
                    hint=(
                        "start the master again: it checks and repairs the journal; peers wait"
                        " for it"
                    ),
                ) from error
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, WRITE_RETRY_S_MAX)
        stood_still = self.stops_clock
        self._past_waited_s, self._since_s = self.waited_s, None
        if stood_still:
            self._caught_up()
        if self.fault:
            self.fault = ""
            self._note("the journal can be written again")
