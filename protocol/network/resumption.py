"""A conversation that outlives its connections: each side keeps what the other may not have got.

Both count the messages that came, heartbeats apart, and tell the count in every heartbeat. Over another
connection each says its count, and the other one goes on from there: nothing is lost, nothing comes twice.
"""

from __future__ import annotations

from collections import deque

from ..errors import RemoteProtocolError
from ..messages import Heartbeat, Message

KEPT_MAX = 4_096  # messages that the other side has not confirmed; more: it cannot be resumed


class Conversation:
    """One side of it.

    Attributes:
      received: messages that came.
      broken: more were sent than are kept without being confirmed; it cannot be resumed.
    """

    def __init__(self) -> None:
        self.received = 0
        self.broken = False
        self._kept: deque[Message] = deque()
        self._confirmed = 0  # of all that were sent: these are not kept any more

    def sends(self, message: Message) -> bool:
        """A message goes out, or would if there were a connection; False: it is ``broken``."""
        if not isinstance(message, Heartbeat):
            self.broken = self.broken or len(self._kept) >= KEPT_MAX
            if not self.broken:
                self._kept.append(message)
        return not self.broken

    def hears(self, message: Message) -> None:
        """A message came; raises RemoteProtocolError: it confirms what was never sent."""
        if isinstance(message, Heartbeat):
            self.confirm(message.received)
        else:
            self.received += 1

    def confirm(self, count: int) -> None:
        """The other side has so many; raises RemoteProtocolError: that cannot be."""
        if not self._confirmed <= count <= self._confirmed + len(self._kept):
            raise RemoteProtocolError(f"it has {count} messages of this session")
        for _ in range(count - self._confirmed):
            self._kept.popleft()
        self._confirmed = count

    def missing(self) -> tuple[Message, ...]:
        """What has to be sent again over a new connection."""
        return tuple(self._kept)
