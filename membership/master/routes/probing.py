"""Probes of members' lines, before a round has measured them: the master's rules.

Rounds measure lines by themselves, but only as fast as their plan loads them, and the first plan
knows nothing. So each member in sync whose rate is unknown sends random bytes once, while the lines
are idle:

- one probe at a time in the whole run, so that no two share a line;
- no probe while a reduction or a transfer of state runs; an order to reduce ends a probe at its peers;
- one probe per member and membership, also if it fails: rounds measure the line later;
- to the member that is known to receive fastest, so that the sender's line is the limit.

A probe's cost is bounded by ``PROBE_BYTES_MAX`` and ``PROBE_S_MAX`` per member. No round waits for
a probe: a run that opens its first round at once plans it with what is known by then.
"""

from __future__ import annotations

import math

from attrs import frozen

from ....protocol.messages import PROBE_BYTES_MAX, PROBE_S_MAX, Probe, Probed
from ...planning.bandwidth import Bandwidths
from ..state.context import Context
from ..state.roster import Member
from .routes import Routes

ANSWER_S = 3 * PROBE_S_MAX  # the receiver answers within twice the time that a probe may take


@frozen
class _Running:
    """A probe whose report has not arrived; it is given up at ``until_s``."""

    number: int
    sender: str
    receiver: str
    until_s: float


class Probing:
    """The master's probes; their results go into ``bandwidths``."""

    def __init__(self, context: Context, bandwidths: Bandwidths, routes: Routes) -> None:
        self._context = context
        self._bandwidths = bandwidths
        self._routes = routes
        self._running: _Running | None = None
        self._last_number = 0
        # Numbers of members that were probed; a new membership has a new number.
        self._done: set[int] = set()

    # ------------------------------------------------------------ facts

    def probed(self, member: Member, message: Probed) -> None:
        """Take a probe's report; a report that comes too late is not reliable."""
        running = self._running
        if running is None or (message.number, member.peer, message.sender) != (
            running.number,
            running.receiver,
            running.sender,
        ):
            return
        self._running = None
        self._bandwidths.probed(message)

    def removed(self, member: Member) -> None:
        self._done.discard(member.number)
        if self._running and member.peer in (self._running.sender, self._running.receiver):
            self._running = None

    # ------------------------------------------------------------ decisions

    def advance(self, *, lines_busy: bool) -> bool:
        """Start the next probe if it is time for one. Return whether anything changed.

        Args:
          lines_busy: a reduction or a transfer of state runs.
        """
        if self._running is not None:
            if self._context.now_s < self._running.until_s:
                return False
            self._running = None
            return True
        if lines_busy:
            return False
        ready = [member for member in self._context.roster.by_number() if member.in_sync]
        sender = next((member for member in ready if self._unknown(member)), None)
        if sender is None:
            return False
        receiver = self._receiver(ready, sender)
        if receiver is None:
            return False
        self._done.add(sender.number)
        self._last_number += 1
        until_s = self._context.now_s + ANSWER_S
        self._running = _Running(self._last_number, sender.peer, receiver.peer, until_s)
        self._context.send(
            receiver.peer, Probe(self._last_number, sender.peer, PROBE_BYTES_MAX, PROBE_S_MAX)
        )
        return True

    def next_deadline_s(self) -> float:
        """Return when ``advance`` has something to do if nothing else happens."""
        return self._running.until_s if self._running is not None else math.inf

    def _unknown(self, member: Member) -> bool:
        return member.number not in self._done and self._bandwidths.known(member.peer) is None

    def _receiver(self, ready: list[Member], sender: Member) -> Member | None:
        """Return the connected member that receives fastest; of equals and unknown ones the first."""
        others = [
            member
            for member in ready
            if member is not sender and self._routes.connected(member.peer, sender.peer)
        ]

        def down(member: Member) -> float:
            known = self._bandwidths.known(member.peer)
            return known.down_bytes_per_s if known is not None else 0.0

        return max(others, key=down, default=None)
