"""The report to the master on the load of this peer's lines."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...collectives.links.hub import LinkHub
from ...collectives.links.rates.rate_meter import Reading
from ...protocol.messages import LinkLoad, Measured

LINKS_REPORTED_MAX = 64  # links in a report; those that carried most
# About, in the reports of all members: what the master reads does not grow with their square.
LINKS_OF_ALL = 8_192


def measured(hub: LinkHub) -> Measured:
    """Return what the lines carried since the last report, and for how long they were busy."""
    seen = hub.take_measurements()
    return Measured(
        sent_bytes=seen.sent.carried_bytes,
        sending_s=seen.sent.busy_s,
        received_bytes=seen.received.carried_bytes,
        receiving_s=seen.received.busy_s,
        links=tuple(
            LinkLoad(peer, reading.carried_bytes, reading.busy_s, _round_trip_s(hub, peer))
            for peer, reading in heaviest(seen.sent_to, len(hub.links) + 1)
        ),
        best_bytes_per_s=seen.best_bytes_per_s,
    )


def _round_trip_s(hub: LinkHub, peer: str) -> float:
    """Return the shortest round trip to a member, or 0.0 if no lane has seen one."""
    link = hub.links.get(peer)
    shortest_s = math.inf if link is None else link.lanes.round_trip_s
    return shortest_s if shortest_s < math.inf else 0.0


def heaviest(sent_to: Mapping[str, Reading], members: int) -> list[tuple[str, Reading]]:
    """Return the links that carried most, as many as a run of so many members reports."""
    links = sorted(sent_to.items(), key=lambda each: -each[1].carried_bytes)
    return links[: links_reported(members)]


def links_reported(members: int) -> int:
    return min(LINKS_REPORTED_MAX, LINKS_OF_ALL // members)
