"""The rule by which one of two members dials the other.

The dialler need not be the sender. Where the rule does not work, or neither member can be dialled,
the master arranges a route (``messages.Route``).
"""

from __future__ import annotations

from .messages import MemberInfo, Role


def dialler(one: MemberInfo, other: MemberInfo) -> MemberInfo | None:
    """Return the member that dials the other, or None if neither can be dialled.

    If both can be dialled, the later joiner dials; else the member that cannot be dialled does.
    """
    if one.reachable and other.reachable:
        return max(one, other, key=lambda member: member.number)
    if not one.reachable and not other.reachable:
        return None
    return other if one.reachable else one


def are_linked(one: MemberInfo, other: MemberInfo) -> bool:
    """Return whether the two members have a link: a relay has none, as it is in no round."""
    return one.peer != other.peer and Role.RELAY not in (one.role, other.role)
