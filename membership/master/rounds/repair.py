"""A flush as data, and the plan of a repair: new owners for the chunks of lost ones.

Pure; ``repairer`` asks and sends.

A chunk whose result a survivor holds is spread from there, unchanged; if no survivor holds it, from
a listener that does. Any other chunk gets a new owner among the survivors, which adds up what the
contributors send again. Chunks are distributed evenly; of equals the member that joined first comes
first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from attrs import Factory, define

from ....protocol.messages import Assignment


@define
class FlushState:
    """The flush in progress, or the last one."""

    number: int = 0  # of the repair that it prepares
    began_s: float = math.inf  # infinity if none is in progress
    shut: set[str] = Factory(set)  # the lost that the others were told to shut out
    held: dict[str, bytes] = Factory(dict)  # by receiver: the chunks it holds, a bit each

    @property
    def in_progress(self) -> bool:
        return self.began_s < math.inf


def plan_repair(
    owners: Sequence[str],
    lost: Collection[str],
    survivors: Sequence[str],
    receivers: Sequence[str],
    held: Mapping[str, bytes],
    apart: Collection[str] = (),
) -> tuple[Assignment, ...]:
    """Assign every chunk of a lost owner to another member.

    Args:
      owners: by chunk.
      survivors: contributors that are left, in order; all of them are in ``held``.
      receivers: of the order; ``lacking`` refers to them.
      held: by peer, without the lost: a bit for each chunk whose result it holds. A receiver that
        has not answered counts as holding nothing.
      apart: members that lack a link to another one: chosen only if no other member can do it.
    """
    listeners = [peer for peer in receivers if peer in held and peer not in survivors]
    load = dict.fromkeys([*survivors, *listeners], 0)
    places = {peer: at for at, peer in enumerate(receivers)}
    chosen: list[tuple[int, tuple[str, bool, bytes]]] = []
    for chunk, owner in enumerate(owners):
        if owner not in lost:
            continue
        holders = [peer for peer in survivors if holds(held[peer], chunk)] or [
            peer for peer in listeners if holds(held[peer], chunk)
        ]
        successor = min(holders or survivors, key=lambda peer: (peer in apart, load[peer]))
        load[successor] += 1
        lacking = bytearray((len(receivers) + 7) // 8)
        if holders:
            for peer, at in places.items():
                if not holds(held.get(peer, b""), chunk):
                    lacking[at // 8] |= 1 << at % 8
        chosen.append((chunk, (successor, not holders, bytes(lacking))))
    runs = itertools.groupby(enumerate(chosen), key=lambda e: (e[1][0] - e[0], e[1][1]))
    assignments = []
    for (_offset, (successor, from_scratch, lacks)), run in runs:
        chunks = [chunk for _at, (chunk, _what) in run]
        assignments.append(Assignment(chunks[0], len(chunks), successor, from_scratch, lacks))
    return tuple(assignments)


def holds(bits: bytes, chunk: int) -> bool:
    return chunk // 8 < len(bits) and bool(bits[chunk // 8] >> chunk % 8 & 1)
