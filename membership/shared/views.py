"""Views as differences, for members that know an earlier view.

A view names all members, and every join sends a view to all members; as whole views a thousand
joins would be gigabytes. The coordinator and the replica use whole views. Between them, after one
whole view on a connection, each further view is sent as its difference from the one before: streams
keep order, so both ends know which one that is.
"""

from __future__ import annotations

from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import View, ViewChange


class ViewWriter:
    """Makes the differences for all connections of a master.

    Most connections need the same one, so the last is kept; it is then encoded only once, too.
    """

    def __init__(self) -> None:
        self._made: tuple[View, View, ViewChange] | None = None

    def difference(self, before: View, after: View) -> ViewChange:
        made = self._made
        if made is None or made[0] is not before or made[1] is not after:
            made = self._made = (before, after, _difference(before, after))
        return made[2]


def _difference(before: View, after: View) -> ViewChange:
    known = {member.number: member for member in before.members}
    numbers = {member.number for member in after.members}
    return ViewChange(
        number=after.number,
        base=before.number,
        changed=tuple(m for m in after.members if known.get(m.number) != m),
        gone=tuple(number for number in known if number not in numbers),
        step=after.step,
    )


def changed_view(before: View | None, change: ViewChange) -> View:
    """Return the view after a change; raise RemoteProtocolError if it is based on another one."""
    if before is None or before.number != change.base:
        known = "none" if before is None else str(before.number)
        raise RemoteProtocolError(
            f"the change is based on view {change.base}, but the known view is {known}"
        )
    members = {member.number: member for member in before.members}
    for number in change.gone:
        if members.pop(number, None) is None:
            raise RemoteProtocolError(
                f"the change removes member {number}, which is not in the view"
            )
    members.update((member.number, member) for member in change.changed)
    in_order = tuple(members[number] for number in sorted(members))
    return View(change.number, in_order, change.step)
