"""Sessions that outlive their connections: each side keeps the messages that may not have arrived.

Both sides count the messages received, without heartbeats, and send the count in every heartbeat.
Over a new connection each side sends its count, and the other continues from there: no message is
lost, and none comes twice.
"""

from __future__ import annotations

from collections import deque

from ..errors import RemoteProtocolError
from ..messages import Heartbeat, Message

KEPT_MAX = 4_096  # unconfirmed messages; with more the session cannot be resumed


class Conversation:
    """One side of a session.

    Attributes:
      received: messages received, without heartbeats.
      broken: over ``KEPT_MAX`` messages were unconfirmed; the session cannot be resumed.
    """

    def __init__(self) -> None:
        self.received = 0
        self.broken = False
        self._kept: deque[Message] = deque()
        self._confirmed = 0  # messages sent and confirmed, which are not kept any more

    def sends(self, message: Message) -> bool:
        """Record a message that is sent, or waits for a connection; return False if ``broken``."""
        if not isinstance(message, Heartbeat):
            self.broken = self.broken or len(self._kept) >= KEPT_MAX
            if not self.broken:
                self._kept.append(message)
        return not self.broken

    def hears(self, message: Message) -> None:
        """Record a received message; raises RemoteProtocolError for an impossible count in it."""
        if isinstance(message, Heartbeat):
            self.confirm(message.received)
        else:
            self.received += 1

    def confirm(self, count: int) -> None:
        """Drop the messages that the other side has; RemoteProtocolError for a wrong count."""
        if not self._confirmed <= count <= self._confirmed + len(self._kept):
            raise RemoteProtocolError(f"it confirms {count} messages of this session")
        for _ in range(count - self._confirmed):
            self._kept.popleft()
        self._confirmed = count

    def missing(self) -> tuple[Message, ...]:
        """Return the messages to send again over a new connection."""
        return tuple(self._kept)
