"""Whose line is measured before a round has done so: rules of the master's probes.

Rounds measure lines by themselves, but only as fast as their plan loads them, and the first plan
knows nothing. So whoever is in sync and whose rate is unknown sends some junk once, while the lines
have nothing better to do:

- one probe at a time in the whole run, so that no two share a line;
- none while a reduction or a transfer of state runs; an order to reduce ends one at its peers;
- each member once in its membership, whatever comes of it: a line that cannot be measured so will
  be by the rounds;
- to the member that is known to receive fastest, so that the sender's line is what limits it.

What a probe costs is bounded by ``PROBE_BYTES_MAX`` and ``PROBE_S_MAX`` a member. No round waits for
one: a run that opens its first round at once plans it with what is known by then.
"""

from __future__ import annotations

import math

from attrs import frozen

from ....protocol.messages import PROBE_BYTES_MAX, PROBE_S_MAX, Probe, Probed
from ...planning.bandwidth import Bandwidths
from ..state.context import Context
from ..state.roster import Member
from .routes import Routes

ANSWER_S = 3 * PROBE_S_MAX  # the receiver answers within twice the time that the junk may take


@frozen
class _Running:
    """A probe whose report has not come yet."""

    number: int
    sender: str
    receiver: str
    until_s: float  # then it is given up


class Probing:
    """The master's probes; its facts go into ``bandwidths``."""

    def __init__(self, context: Context, bandwidths: Bandwidths, routes: Routes) -> None:
        self._context = context
        self._bandwidths = bandwidths
        self._routes = routes
        self._running: _Running | None = None
        self._last_number = 0
        # Members whose turn has been, by number: a new membership is a new turn.
        self._done: set[int] = set()

    # ------------------------------------------------------------ facts

    def probed(self, member: Member, message: Probed) -> None:
        """A report; one that nobody waits for any more says nothing reliable."""
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

    # ------------------------------------------------------------ what follows

    def advance(self, *, lines_busy: bool) -> bool:
        """Start the next probe if it is time for one. True if anything changed.

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
        """When ``advance`` has something to do if nothing else happens."""
        return self._running.until_s if self._running is not None else math.inf

    def _unknown(self, member: Member) -> bool:
        return member.number not in self._done and self._bandwidths.known(member.peer) is None

    def _receiver(self, ready: list[Member], sender: Member) -> Member | None:
        """Of all others the fastest one; of equals, and of the unknown, the first."""
        others = [
            member
            for member in ready
            if member is not sender and self._routes.connected(member.peer, sender.peer)
        ]

        def down(member: Member) -> float:
            known = self._bandwidths.known(member.peer)
            return known.down_bytes_per_s if known is not None else 0.0

        return max(others, key=down, default=None)
