"""Orders that name members by number: what every member must hear of a round is short.

``Reduce`` and ``Commit`` name contributors, receivers and owners by their ids, which makes 150 and
65 bytes for each member, to each member. On a connection both sides know the same view, and the
same last ``Reduce`` of a fragment. So a ``BriefReduce`` names members by their numbers in that
view, as runs and differences, and a ``BriefCommit`` has the contributors of that ``Reduce``: some 5
bytes, and none. Master and peer use whole orders everywhere else; they are made brief just before
they are sent, and whole just after they came.

    runs       pairs of a gap and a length, of ascending numbers; a gap is counted from the end of
               the run before
    weights    differences from the one before, zigzag
    owners     pairs of the difference to the owner before, zigzag, and a count of chunks

All are unsigned LEB128 integers. An order that does not fit (a member that is not in the view,
numbers that do not ascend) is sent as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from attrs import evolve

from ...protocol import messages as m
from ...protocol.errors import RemoteProtocolError

KEPT_MAX = 8  # orders that are kept for other members

Order = TypeVar("Order", bound=m.Message)
Known = TypeVar("Known", bound=m.Message)


class OrderWriter:
    """Makes orders brief, for all connections of a master; the last ones are kept."""

    def __init__(self) -> None:
        # What was made brief, and with which view or order; None: it does not fit.
        self._made: list[tuple[m.Message, m.Message, m.Message | None]] = []

    def brief(
        self, message: m.Message, view: m.View | None, orders: dict[int, m.Reduce]
    ) -> m.Message:
        """Return what to send in place of a message.

        ``view`` and ``orders`` (by fragment) are what was sent last on the connection; a further
        ``Reduce`` is noted there.
        """
        if isinstance(message, m.Reduce):
            orders[message.fragment] = message
            return self._kept(message, view, _brief_reduce)
        if isinstance(message, m.Commit):
            return self._kept(message, orders.get(message.fragment), _brief_commit)
        return message

    def _kept(
        self, message: Order, known: Known | None, make: Callable[[Order, Known], m.Message | None]
    ) -> m.Message:
        """Return what ``make`` makes of the message and of what is known, or else the message."""
        if known is None:
            return message
        for given, beside, made in self._made:
            if given is message and beside is known:
                return made or message
        made = make(message, known)
        self._made = [*self._made[1 - KEPT_MAX :], (message, known, made)]
        return made or message


class OrderReader:
    """Makes the orders of one session whole."""

    def __init__(self) -> None:
        self._orders: dict[int, m.Reduce] = {}

    def whole(self, message: m.Message, view: m.View | None) -> m.Message:
        """Return the message that a brief one stands for; any other one as it is.

        Args:
          view: the last one of the session.

        Raises:
          RemoteProtocolError: it refers to what did not come.
        """
        if isinstance(message, m.BriefReduce):
            message = _whole_reduce(message, view)
        if isinstance(message, m.Reduce):
            self._orders[message.fragment] = message
        elif isinstance(message, m.BriefCommit):
            return _whole_commit(message, self._orders.get(message.fragment))
        return message


# ---------------------------------------------------------------- Reduce


def _brief_reduce(order: m.Reduce, view: m.View) -> m.BriefReduce | None:
    number_of = {member.peer: member.number for member in view.members}
    try:
        contributors = [number_of[each.peer] for each in order.contributors]
        receivers = [number_of[peer] for peer in order.receivers]
        owners = [number_of[run.peer] for run in order.plan.owners]
    except KeyError:
        return None
    if not (_ascend(contributors) and _ascend(receivers)):
        return None
    scales = tuple(each.scale for each in order.contributors)
    return m.BriefReduce(
        round=order.round,
        attempt=order.attempt,
        fragment=order.fragment,
        version=order.version,
        view=order.view,
        base=view.number,
        contributors=_packed(_runs(contributors)),
        weights=_packed(_differences([each.weight for each in order.contributors])),
        scales=() if all(scale == 1.0 for scale in scales) else scales,
        receivers=_packed(_runs(receivers)),
        owners=_packed(
            part
            for difference, run in zip(_differences(owners), order.plan.owners, strict=True)
            for part in (difference, run.chunk_count, run.chunk_units)
        ),
        plan=evolve(order.plan, owners=()),
    )


def _whole_reduce(order: m.BriefReduce, view: m.View | None) -> m.Reduce:
    if view is None or view.number != order.base:
        known = "none" if view is None else str(view.number)
        raise RemoteProtocolError(
            f"the order names members of view {order.base}, but the known view is {known}"
        )
    peer_of = {member.number: member.peer for member in view.members}
    contributors = _peers(peer_of, _numbers_of_runs(order.contributors))
    weights = sum_differences(read_numbers(order.weights, m.MEMBERS_MAX))
    scales = order.scales or (1.0,) * len(contributors)
    parts = read_numbers(order.owners, 3 * m.OWNER_RUNS_MAX)
    owners = _peers(peer_of, sum_differences(parts[::3]))
    if len(weights) != len(contributors) or len(scales) != len(contributors) or len(parts) % 3:
        raise RemoteProtocolError("the order's contributors, weights and scales differ in number")
    return m.Reduce(
        round=order.round,
        attempt=order.attempt,
        fragment=order.fragment,
        version=order.version,
        view=order.view,
        contributors=tuple(map(m.Contributor, contributors, weights, scales)),
        receivers=tuple(_peers(peer_of, _numbers_of_runs(order.receivers))),
        plan=evolve(order.plan, owners=tuple(map(m.OwnerRun, owners, parts[1::3], parts[2::3]))),
    )


def _peers(peer_of: Mapping[int, str], numbers: Iterable[int]) -> list[str]:
    try:
        return [peer_of[number] for number in numbers]
    except KeyError as error:
        raise RemoteProtocolError(
            f"the order names member {error}, who is not in the view"
        ) from None


# ---------------------------------------------------------------- Commit


def _brief_commit(commit: m.Commit, order: m.Reduce) -> m.BriefCommit | None:
    if order.round != commit.round or order.contributors != commit.contributors:
        return None
    return m.BriefCommit(
        round=commit.round,
        attempt=commit.attempt,
        fragment=commit.fragment,
        version=commit.version,
        at_step=commit.at_step,
        digest=commit.digest,
        manifest=commit.manifest,
    )


def _whole_commit(commit: m.BriefCommit, order: m.Reduce | None) -> m.Commit:
    if order is None or order.round != commit.round:
        raise RemoteProtocolError(
            f"the commit of round {commit.round} has no contributors, and no such order came"
        )
    return m.Commit(
        round=commit.round,
        attempt=commit.attempt,
        fragment=commit.fragment,
        version=commit.version,
        at_step=commit.at_step,
        contributors=order.contributors,
        digest=commit.digest,
        manifest=commit.manifest,
    )


# ---------------------------------------------------------------- numbers


def _ascend(numbers: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise(numbers))


def _runs(numbers: Sequence[int]) -> Iterator[int]:
    """Yield a gap and a length for each run of consecutive numbers."""
    end, start = 0, 0
    for index, number in enumerate(numbers):
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            yield numbers[start] - end
            yield index + 1 - start
            end, start = number + 1, index + 1


def _numbers_of_runs(data: bytes) -> list[int]:
    parts = read_numbers(data, 2 * m.MEMBERS_MAX)
    if len(parts) % 2 or sum(parts[1::2]) > m.MEMBERS_MAX:
        raise RemoteProtocolError("the order names too many members, or half a run of them")
    numbers: list[int] = []
    end = 0
    for gap, length in zip(parts[::2], parts[1::2], strict=True):
        numbers += range(end + gap, end + gap + length)
        end += gap + length
    return numbers


def _differences(numbers: Iterable[int]) -> Iterator[int]:
    before = 0
    for number in numbers:
        difference = number - before
        yield 2 * difference if difference >= 0 else -2 * difference - 1
        before = number


def sum_differences(differences: Iterable[int]) -> list[int]:
    """Return the numbers of which these are the zigzag differences."""
    numbers, number = [], 0
    for each in differences:
        number += each // 2 if each % 2 == 0 else -(each // 2) - 1
        numbers.append(number)
    return numbers


def _packed(numbers: Iterable[int]) -> bytes:
    data = bytearray()
    for number in numbers:
        while number > 0x7F:
            data.append(number & 0x7F | 0x80)
            number >>= 7
        data.append(number)
    return bytes(data)


def read_numbers(data: bytes, count_max: int) -> list[int]:
    """Read LEB128 integers; each fits a difference of two counts."""
    numbers: list[int] = []
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
        elif number > 2 * m.COUNT_MAX + 1:
            raise RemoteProtocolError("a number in the order is too large")
    if shift or len(numbers) > count_max or max(numbers, default=0) > 2 * m.COUNT_MAX + 1:
        raise RemoteProtocolError("the order's numbers are cut off, too many or too large")
    return numbers
