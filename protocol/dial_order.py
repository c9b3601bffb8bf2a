"""Who of two members dials the other, as far as the view tells.

Who dials has nothing to do with who sends what. Where this does not work, or there is nobody who could
dial, the master arranges a route (``messages.Route``).
"""

from __future__ import annotations

from .messages import MemberInfo, Role


def dialler(one: MemberInfo, other: MemberInfo) -> MemberInfo | None:
    """Of two that can be dialled the later joiner; else the one that cannot; None: neither can."""
    if one.reachable and other.reachable:
        return max(one, other, key=lambda member: member.number)
    if not one.reachable and not other.reachable:
        return None
    return other if one.reachable else one


def are_linked(one: MemberInfo, other: MemberInfo) -> bool:
    """Whether the two have a link at all: a relay holds no state and takes part in no round."""
    return one.peer != other.peer and Role.RELAY not in (one.role, other.role)
