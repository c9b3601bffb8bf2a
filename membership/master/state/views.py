"""Views as differences: what a member is told once it knows a view.

A view names everybody, and every join is a view to everybody; as whole views a thousand joins would
be gigabytes. The coordinator decides and the replica obeys whole views. Between them, on a
connection that has carried one whole view, each further one travels as its difference to the one
before: streams keep order, so both ends know which that is.
"""

from __future__ import annotations

from ....protocol.errors import RemoteProtocolError
from ....protocol.messages import View, ViewChange


class ViewWriter:
    """Differences for all of a master's connections; most of them need the same one.

    One that was made is kept until another is wanted, so that it is also encoded only once.
    """

    def __init__(self) -> None:
        self._made: tuple[View, View, ViewChange] | None = None

    def difference(self, before: View, after: View) -> ViewChange:
        """What makes ``after`` out of ``before``."""
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
    """The whole view after a change.

    Raises:
      RemoteProtocolError: it is a change of another view than the one that we know.
    """
    if before is None or before.number != change.base:
        known = "none" if before is None else f"view {before.number}"
        raise RemoteProtocolError(f"a change of view {change.base}, and we know {known}")
    members = {member.number: member for member in before.members}
    for number in change.gone:
        if members.pop(number, None) is None:
            raise RemoteProtocolError(f"member {number} is gone, and was not in the view")
    members.update((member.number, member) for member in change.changed)
    in_order = tuple(members[number] for number in sorted(members))
    return View(change.number, in_order, change.step)
