"""Messages that many members get: some get them from the master, and all others from each other.

An order or a change of the view is the same for all members, and grows with their number. So a master with
a crowd of members sends such a message to ``ROOTS`` of them. Each further one hears its digest, and the number of a
member to ask for it, which has ``FAN`` to serve: a tree, some three levels deep for ten thousand.

    master -> member   MessageAnnounced(digest, source)
    member -> source   MessageWanted(digest)
    source -> member   MessageBody
    member -> master   MessageWanted(digest)       the source did not send it in time: the master does

A newcomer's first view comes from a member that has had one before, in the same way: with the digest the newcomer
hears that member's entry in the view and its own, so that it can dial. Every member that got the same changes has the
same whole view, and makes the same message of it.

The digest comes from the master, so nobody can send anything else in its place. A source of which two members say that it
sent nothing gets nobody to serve for a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from attrs import define, field

from ...protocol import wire
from ...protocol.digests import body_digest
from ...protocol.messages import (
    ANNOUNCED_BYTES_MAX,
    BriefReduce,
    FirstView,
    MemberInfo,
    Message,
    MessageAnnounced,
    MessageBody,
    View,
    ViewChange,
)

CROWD_MIN = (
    64  # members; fewer get everything from the master, which concludes from each message by itself
)
ROOTS = 16  # members that get a message from the master
FAN = 16  # members that a source serves
BODY_BYTES_MIN = 256  # a shorter message costs little more than its digest
KEPT_MAX = 32  # messages that the master can still send by itself
TRIED_MAX = 16  # members that are considered as the source of a first view
SILENT_REPORTS_MIN = 2  # members that must say that a source sent nothing; a single one may lie
SILENT_S = 300.0  # a silent source serves nobody for so long


@define(eq=False)
class CrowdMessage:
    """A message that is being sent to the members one after the other.

    Attributes:
      body: empty: it is too short or too long to be announced.
      sources: members that have it or will have it, and may serve others; in the order of serving.
      served: how many were told a source.
      source_of: by member, whom it was told to ask.
    """

    message: Message
    body: bytes
    digest: bytes
    root_count: int = 0
    sources: list[str] = field(factory=list)
    served: int = 0
    source_of: dict[str, str] = field(factory=dict)


class CrowdMessages:
    """Decides who gets a message from the master.

    Args:
      number_of: returns a member's number; None if it passes nothing on.
      has_view: returns whether a member has been sent a view.
      linked: returns whether two members have a link.
      now: the clock of ``SILENT_S``.
    """

    def __init__(
        self,
        number_of: Callable[[str], int | None],
        has_view: Callable[[str], bool],
        linked: Callable[[str, str], bool],
        now: Callable[[], float],
    ) -> None:
        self._number_of = number_of
        self._has_view = has_view
        self._linked = linked
        self._now = now
        self._kept: deque[CrowdMessage] = deque(maxlen=KEPT_MAX)
        self._turn = 0  # of members as sources of first views
        self._reports: dict[
            str, dict[str, float]
        ] = {}  # by source: who said that it was silent, and when

    def instead_of(self, message: Message, peer: str, crowd: int) -> Message:
        """Return what to send to a member: the message, or who has it.

        Args:
          crowd: the number of members with a session.
        """
        if crowd < CROWD_MIN or not isinstance(message, BriefReduce | ViewChange | View):
            return message
        sent = self._sent(message)
        if not sent.body or (number := self._number_of(peer)) is None:
            return message
        if isinstance(message, View):
            return self._first_view(sent, message, peer)
        if (source := self._source(sent, peer)) is None:
            sent.root_count += 1
            self._add_source(sent, peer)
            return message
        sent.served += 1
        sent.source_of[peer] = source
        number = self._number_of(source)
        assert number is not None
        self._add_source(sent, peer)
        return MessageAnnounced(sent.digest, number)

    def wanted(self, peer: str, digest: bytes) -> MessageBody | None:
        """Return a message whose source has not sent it to this member.

        None: it is not kept any more, or was not announced to this member, or it has had it already.
        """
        for sent in self._kept:
            if sent.digest == digest and (source := sent.source_of.pop(peer, None)) is not None:
                self._reports.setdefault(source, {})[peer] = self._now()
                return MessageBody(sent.body)
        return None

    def _sent(self, message: Message) -> CrowdMessage:
        for sent in self._kept:
            if sent.message is message:
                return sent
        body = wire.encode(message)
        if not BODY_BYTES_MIN <= len(body) <= ANNOUNCED_BYTES_MAX:
            body = b""
        sent = CrowdMessage(message, body, body_digest(body))
        self._kept.append(sent)
        return sent

    def _first_view(self, sent: CrowdMessage, view: View, peer: str) -> Message:
        """Return what to send in place of a whole view."""
        you = next((member for member in view.members if member.peer == peer), None)
        source = None if you is None else self._view_source(sent, view, peer)
        if you is None or source is None:
            return view
        sent.source_of[peer] = source.peer
        return MessageAnnounced(sent.digest, source.number, FirstView(view.number, source, you))

    def _view_source(self, sent: CrowdMessage, view: View, peer: str) -> MemberInfo | None:
        """Return a member of which the newcomer can get the view: each in turn, so that nobody serves many."""
        for _ in range(TRIED_MAX):
            self._turn = (self._turn + 1) % len(view.members)
            source = view.members[self._turn]
            if (
                source.peer != peer
                and source.peer not in sent.source_of  # it is a newcomer, too
                and source.reachable
                and self._number_of(source.peer) is not None
                and self._has_view(source.peer)
                and not self._is_silent(source.peer)
            ):
                return source
        return None

    def _source(self, sent: CrowdMessage, peer: str) -> str | None:
        """Return who is to serve a member; None if the master is."""
        if sent.root_count < ROOTS:
            return None
        turn = sent.served // FAN
        for source in sent.sources[turn : turn + FAN]:
            if self._number_of(source) is not None and self._linked(peer, source):
                return source
        return None

    def _add_source(self, sent: CrowdMessage, peer: str) -> None:
        if not self._is_silent(peer):
            sent.sources.append(peer)

    def _is_silent(self, peer: str) -> bool:
        since_s = self._now() - SILENT_S
        reports = self._reports.get(peer, {})
        return sum(at_s >= since_s for at_s in reports.values()) >= SILENT_REPORTS_MIN
