"""Messages of the master that other members pass on (see ``daemon/master/crowd_messages.py``).

A member asks the announced source, and the master if that does not send the message within ``SOURCE_S``. It serves
others in turn: at once if it has the message, else as soon as it has. A newcomer asks for its first view: every member
that has the same view makes the same message of it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import trio
from attrs import Factory, define

from ...collectives.links.hub import LinkHub
from ...protocol import wire
from ...protocol.digests import body_digest
from ...protocol.errors import PeerLostError
from ...protocol.messages import (
    BriefReduce,
    Message,
    MessageAnnounced,
    MessageBody,
    MessageWanted,
    View,
    ViewChange,
)

SOURCE_S = 1.0  # for the source to send a message, its own waiting included
FIRST_VIEW_S = 4.0  # the same for a newcomer, which must link to its source first
KEPT_MAX = 16  # messages that can be passed on
VIEWS_MAX = 8  # views that newcomers can be sent
# Digests that others asked for before the message came here, and members that asked for one.
ASKED_MAX = 16
ASKERS_MAX = 64

PASSED_ON = (BriefReduce, ViewChange)  # as the master sent them
ANNOUNCED = (*PASSED_ON, View)


@define
class Askers:
    """Members that asked for a message before it came here.

    Attributes:
      view: the message is this whole view; 0: it is none.
    """

    view: int
    peers: list[str] = Factory(list)


class AnnouncedMessages:
    """One peer's part in passing messages on.

    Args:
      start: starts a task.
      tell: sends a message to the master.
      came: called when a wanted message is here.
    """

    def __init__(
        self,
        hub: LinkHub,
        *,
        start: Callable[..., None],
        tell: Callable[[Message], None],
        came: Callable[[], None],
    ) -> None:
        self._hub = hub
        self._start = start
        self._tell = tell
        self._came = came
        self._whole: deque[Message] = deque(maxlen=KEPT_MAX)  # from the master, not encoded yet
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()  # by digest
        self._views: OrderedDict[int, View] = OrderedDict()  # by number, those not encoded yet
        self._wanted: dict[bytes, trio.Event] = {}
        self._asked: OrderedDict[bytes, Askers] = OrderedDict()

    # ------------------------------------------------------------ what this peer hears

    def keep(self, message: Message) -> None:
        """Take note of a message that came from the master itself; others may ask for it."""
        if isinstance(message, PASSED_ON):
            self._whole.append(message)
            if self._asked:
                self._encode_all()

    def note_view(self, view: View) -> None:
        """Take note of a whole view; newcomers may ask for it."""
        self._views[view.number] = view
        if any(askers.view == view.number for askers in self._asked.values()):
            self._encode_view(view.number)
        while len(self._views) > VIEWS_MAX:
            self._views.popitem(last=False)

    def want(self, message: MessageAnnounced, source: str | None) -> None:
        """Get an announced message.

        Args:
          source: the member that has it; None: this peer does not know that one.
        """
        first, view, wait_s = message.first_view, 0, SOURCE_S
        if first is not None:
            self._hub.introduce((first.source, first.you))
            source, view, wait_s = first.source.peer, first.number, FIRST_VIEW_S
        if message.digest not in self._wanted and self.body(message.digest) is None:
            here = self._wanted[message.digest] = trio.Event()
            self._start(self._get, MessageWanted(message.digest, view), source, here, wait_s)

    def body(self, digest: bytes) -> bytes | None:
        """Return an announced message's encoding; None if it has not come yet."""
        if digest not in self._bodies and self._whole:
            self._encode_all()
        return self._bodies.get(digest)

    def forget(self) -> None:
        """Want nothing more: the session is over."""
        self._wanted.clear()

    async def _get(
        self, wanted: MessageWanted, source: str | None, here: trio.Event, wait_s: float
    ) -> None:
        with trio.move_on_after(wait_s):
            if source is not None and await self._ask(source, wanted, wait_s):
                await here.wait()
        if self._wanted.get(wanted.digest) is here:
            self._tell(wanted)

    async def _ask(self, source: str, wanted: MessageWanted, wait_s: float) -> bool:
        try:
            link = await self._hub.link(source, wait_s)
            await link.send(wanted)
        except PeerLostError:
            return False
        return True

    def receive(self, message: MessageBody) -> None:
        """Take a message that a member or the master sends; one that is not wanted is dropped."""
        digest = body_digest(message.body)
        here = self._wanted.pop(digest, None)
        if here is None:
            return
        self._keep_body(digest, message.body)
        here.set()
        self._came()

    # ------------------------------------------------------------ what others ask

    def asked(self, peer: str, message: MessageWanted) -> None:
        """Send a message to a member, now or when it is here."""
        if message.view:
            self._encode_view(message.view)
        body = self.body(message.digest)
        if body is not None:
            self._start(self._send, peer, body)
            return
        askers = self._asked.setdefault(message.digest, Askers(message.view))
        if len(askers.peers) < ASKERS_MAX:
            askers.peers.append(peer)
        while len(self._asked) > ASKED_MAX:
            self._asked.popitem(last=False)

    async def _send(self, peer: str, body: bytes) -> None:
        try:
            await (await self._hub.link(peer, SOURCE_S)).send(MessageBody(body))
        except PeerLostError:
            return  # it asks the master

    def _encode_all(self) -> None:
        while self._whole:
            body = wire.encode(self._whole.popleft())
            self._keep_body(body_digest(body), body)

    def _encode_view(self, number: int) -> None:
        if (view := self._views.pop(number, None)) is not None:
            body = wire.encode(view)
            self._keep_body(body_digest(body), body)

    def _keep_body(self, digest: bytes, body: bytes) -> None:
        self._bodies[digest] = body
        while len(self._bodies) > KEPT_MAX:
            self._bodies.popitem(last=False)
        for peer in self._asked.pop(digest, Askers(0)).peers:
            self._start(self._send, peer, body)
