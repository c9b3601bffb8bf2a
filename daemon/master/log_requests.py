"""``holdfast logs PEER`` at the master: the lines are fetched from the peer when they are asked for.

The master keeps none of them. A peer whose owner keeps its log private refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import trio

from ...membership.master.state.context import Context
from ...protocol.errors import UserError
from ...protocol.messages import LogRequest, LogTail, Message, SentLine
from ..log_ring import LogLine
from ..web.log_reading import LogQuery, NoLogError, PeerLog
from .admission import find_peer

ANSWER_S = 10.0  # for a peer's answer
REQUESTS_MAX = 16  # under way at once, of all peers

NOT_FOUND, UNAVAILABLE = 404, 503


class LogRequests:
    """Requests for peers' logs, and their answers.

    Args:
      tell: sends a message to a peer, if it is attached.
    """

    def __init__(self, context: Context, tell: Callable[[str, Message], None]) -> None:
        self._context = context
        self._tell = tell
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[str, int], trio.MemorySendChannel[LogTail]] = {}

    def hear(self, peer: str, message: LogTail) -> None:
        """Take a peer's answer; ignore it if it was not asked for."""
        waiting = self._waiting.pop((peer, message.number), None)
        if waiting is not None:
            waiting.send_nowait(message)

    async def fetch(self, query: LogQuery) -> PeerLog:
        """Return lines of a member's log; raises NoLogError."""
        names = {each.peer: each.name for each in self._context.roster if not each.relay}
        peer = _find(query.peer, names)
        name = names[peer]
        if len(self._waiting) >= REQUESTS_MAX:
            raise NoLogError(f"{REQUESTS_MAX} logs are being fetched already", UNAVAILABLE)
        key = peer, next(self._numbers)
        send, receive = trio.open_memory_channel[LogTail](1)
        self._waiting[key] = send
        try:
            self._tell(peer, LogRequest(key[1], query.lines, query.after))
            with trio.fail_after(ANSWER_S):
                told = await receive.receive()
        except trio.TooSlowError:
            why = f"{name} has not answered within {ANSWER_S:.0f} s"
            raise NoLogError(why, UNAVAILABLE) from None
        finally:
            self._waiting.pop(key, None)
        if told.refusal:
            raise NoLogError(f"{name}: {told.refusal}", NOT_FOUND)
        return PeerLog(name, tuple(map(_line, told.lines)))


def _find(wanted: str, names: Mapping[str, str]) -> str:
    if not wanted:
        raise NoLogError("name a member: a master has no log of its own", NOT_FOUND)
    try:
        return find_peer(wanted, names, "member", "`holdfast peers` lists them")
    except UserError as error:
        raise NoLogError(f"{error}; {error.hint}", NOT_FOUND) from error


def _line(sent: SentLine) -> LogLine:
    return LogLine(sent.at, "trainer" if sent.trainer else "daemon", sent.text)
