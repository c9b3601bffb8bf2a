"""A link: everything between this node and one other member.

One control stream (messages, inside TLS) and some lanes (frames of bulk bytes; see ``lane_pool``).
The lanes have no static split: a frame goes to the lane that is idle first. The link is lost when
its control stream breaks or is silent for ``silence_s`` (both sides send a ``Heartbeat`` several
times in that span), when no lane has worked for a while, or when the other side breaks the
protocol. Then all streams are closed, ``lost`` is set, and all tasks that wait for it are told.

    run                    until the link is lost; closes all its streams
     ├── read_messages     control stream -> on_message
     ├── write_messages    message queue -> control stream
     ├── Acknowledger.run  tells the other side what came
     └── LanePool          its tasks: lanes, and how many of them there are

The hub calls ``watch`` at regular intervals; it measures silence, and how long nothing moves.

Nothing is ever sent from the caller's task: a caller that is cancelled in the middle of a frame
would tear the lane. A cancelled caller withdraws queued frames; those on their way are finished.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from ...protocol.connection_phases import LINK_GREETING
from ...protocol.errors import PeerLostError, RemoteProtocolError
from ...protocol.message_quota import LINK_ITEMS_PER_S, Quota
from ...protocol.messages import Heartbeat, LanesReceived, LanesWanted, Message
from ...protocol.network.stream import MessageStream
from ...protocol.wakeups import Loop
from .lane_pool import DialLane, LanePool, Task
from .link_parts import STALL_S, LinkRules, SharedByLanes, SharedByLinks
from .rates.line_rate import ROUND_TRIP_S_MIN
from .rates.rate_meter import Meter, MeteredStream
from .rates.send_priority import SendRank
from .send_queue import FrameSource, MessageQueue, SendQueue

# Calls of ``watch`` in the time after which a lane counts as stalled, or silence as loss.
WATCH_TICKS = 8
BEATS_PER_SILENCE = 4  # heartbeats in the time after which silence means loss

OnMessage = Callable[[str, Message], Awaitable[None]]


class _ControlWatch:
    """Watches a link's control stream, and sends its heartbeats.

    Attributes:
      silent_s: how long nothing has come over the link.
    """

    def __init__(self, stream: MeteredStream, queue: MessageQueue, silence_s: float) -> None:
        self.silent_s = 0.0
        self._stream = stream
        self._queue = queue
        self._silence_s = silence_s
        self._unbeaten_s = 0.0  # since the last heartbeat
        self._mute_s = 0.0  # how long no message could be sent, though one waits
        self._sent_bytes = 0  # at the last call of ``watch``

    def watch(self, elapsed_s: float) -> str:
        """Send a heartbeat when one is due; return why the link is lost, "" if it is not."""
        silence_s = self._silence_s
        self._unbeaten_s += elapsed_s
        if self._unbeaten_s > silence_s / BEATS_PER_SILENCE - elapsed_s / 2:
            self._unbeaten_s = 0.0
            self._queue.put_if_idle(Heartbeat())
        self.silent_s += elapsed_s
        if self.silent_s >= silence_s:
            return f"nothing was heard for {silence_s:g} s"
        before_bytes, self._sent_bytes = self._sent_bytes, self._stream.sent_bytes
        stuck = self._queue.busy and self._sent_bytes == before_bytes
        self._mute_s = self._mute_s + elapsed_s if stuck else 0.0
        return f"nothing could be sent for {STALL_S:g} s" if self._mute_s >= STALL_S else ""


class Link:
    """See the top of this file. Made by ``LinkHub``.

    Attributes:
      peer: the peer id of the other side.
      lost: set once the link is lost; ``reason`` then says why.
      finished: set once all its streams are closed.
      sent_meter: the meter of what its lanes send.
      lanes: its lanes.
    """

    def __init__(
        self,
        peer: str,
        stream: trio.abc.Stream,
        node: SharedByLinks,
        on_message: OnMessage,
        rules: LinkRules,
    ) -> None:
        self.peer = peer
        self.lost = trio.Event()
        self.finished = trio.Event()
        self.reason = ""
        self._stream = stream
        control = MeteredStream(stream)
        quota = Quota(trio.current_time(), LINK_ITEMS_PER_S)
        self.messages = MessageStream(control, LINK_GREETING, quota)
        self._message_queue = MessageQueue()
        self._control_watch = _ControlWatch(control, self._message_queue, rules.silence_s)
        self._on_message = on_message
        self._phase = rules.phase
        self._scope = trio.CancelScope()
        self._send_queue = SendQueue(node.send_priority, partial(node.send_backlog.set_left, peer))
        self.sent_meter = Meter(node.sent)
        shared = SharedByLanes(
            peer=peer,
            node=node,
            send_queue=self._send_queue,
            loop=Loop(),
            sent_meter=self.sent_meter,
            received_meter=Meter(node.received),
            note_received=self._note_received,
            lose_link=self.close,
        )
        self.lanes = LanePool(shared, rules, self.send)
        self._acknowledger = Acknowledger(self.lanes, shared.loop, self.send)

    # ------------------------------------------------------------ for all users

    async def send(self, message: Message) -> None:
        """Send on the control stream; return when the network took it.

        Raises:
          PeerLostError: the link is lost; the message may or may not have arrived.

        Cancellation: safe; the message is sent or not.
        """
        if not await self._message_queue.put(message):
            raise PeerLostError(self.peer, self.reason)

    async def send_from(
        self, source: FrameSource, rank: SendRank = SendRank.ROUND, age: int = 0
    ) -> None:
        """Send a source's frames, over any idle lane, in turn with sources of its rank and age.

        Frames leave in order, but need not arrive in order. Each arrives once, or the link is lost:
        what did not arrive on a lane that breaks is sent over other lanes.

        Returns when the network took the last one; see ``send_queue.Load`` for how long a frame's
        bytes must not change.

        Raises:
          PeerLostError: the link is lost; the last frames may or may not have arrived.

        Cancellation: safe; frames that are on their way are finished, no others are taken.
        """
        if not await self._send_queue.drain(source, rank, age):
            raise PeerLostError(self.peer, self.reason)

    def wake(self) -> None:
        """Ask the sources again for frames; from any thread."""
        self._send_queue.wake()

    def acknowledge_now(self) -> None:
        """Acknowledge without waiting for more: all that was expected has come."""
        self._acknowledger.send_now()

    def close(self, reason: str) -> None:
        """Give the link up; only the first reason is kept."""
        if self.lost.is_set():
            return
        self.reason = reason
        self.lost.set()
        self._message_queue.close()
        self._send_queue.close()
        self.lanes.close()
        self._scope.cancel()

    # ------------------------------------------------------------ its life

    async def run(self, dial: DialLane | None = None) -> None:
        """Carry messages and frames until the link is lost; then close all its streams.

        Args:
          dial: opens one more lane, at the side that dials; a failure that may pass is raised as
            OSError or as trio's errors of broken streams.
        """
        self.messages.phase = self._phase
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:

                    def start_task(task: Task) -> None:
                        nursery.start_soon(self._guard, task)

                    start_task(self._write_messages)
                    start_task(self._acknowledger.run)
                    self.lanes.start(start_task, dial)
                    await self._guard(self._read_messages)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close all streams at once, without goodbyes."""
        self.close("this node closed the link")
        if self.finished.is_set():
            return
        with trio.CancelScope(shield=True):  # forceful closing waits for no peer
            await trio.aclose_forcefully(self._stream)
            await self.lanes.aclose()
        self.finished.set()

    async def _guard(self, task: Task) -> None:
        """Run a task; close the link for a fault of the other side or of the network."""
        try:
            await task()
        except trio.EndOfChannel:
            self.close("the other side closed the link")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close(f"the connection broke ({error})")
        except (RemoteProtocolError, PeerLostError) as error:
            self.close(str(error))

    # ------------------------------------------------------------ messages

    async def _read_messages(self) -> None:
        while True:
            message = await self.messages.receive()
            self._control_watch.silent_s = 0.0
            if isinstance(message, LanesReceived):
                self.lanes.take_acknowledged(message)
                if self.lanes.has_new_count:
                    self._acknowledger.wake()
            elif isinstance(message, LanesWanted):
                self.lanes.set_wanted_there(message.count)
            elif not isinstance(message, Heartbeat):
                await self._on_message(self.peer, message)

    async def _write_messages(self) -> None:
        while True:
            job = await self._message_queue.take()
            await self.messages.send(job.message)
            self._message_queue.finish(job)

    def _note_received(self) -> None:
        """Take note that something came on a lane; from any thread."""
        self._control_watch.silent_s = 0.0
        self._acknowledger.note_received()

    # ------------------------------------------------------------ watching

    def watch(self, elapsed_s: float) -> None:
        """Send a heartbeat when one is due; give up what does not move, or is silent.

        Args:
          elapsed_s: time since the last call in which this process was awake. Only that counts:
            after the process was stopped, or the machine slept, what came is still to be read.
        """
        if reason := self._control_watch.watch(elapsed_s):
            self.close(reason)
        self.lanes.watch(elapsed_s)


# ---------------------------------------------------------------- acknowledgements


# How long an acknowledgement waits for what comes meanwhile. The sender keeps what it sent in
# memory for this long and one trip, so it is less over a short path, which carries more. Over a
# long one five times as many took a fifth of a daemon's processor time.
ACKNOWLEDGE_S, LONG_PATH_ACKNOWLEDGE_S = 0.1, 0.5
PROGRESS_S = 0.25  # how often progress of frames under way is told: see ``LaneReceived.bytes``


class Acknowledger:
    """Tells the other side which frames have come. Made and owned by ``Link``.

    The sender keeps a frame in memory until it is acknowledged. So that not every frame costs a
    message, what comes within ``ACKNOWLEDGE_S`` is acknowledged together (over a long path, within
    ``LONG_PATH_ACKNOWLEDGE_S``); ``send_now`` cuts that short.

    Args:
      send: sends a message on the link's control stream.
    """

    def __init__(
        self, lane_pool: LanePool, loop: Loop, send: Callable[[Message], Awaitable[None]]
    ) -> None:
        self._lane_pool = lane_pool
        self._loop = loop
        self._send = send
        self._due = trio.Event()
        self._due_noted = False  # set from lanes' threads too; cleared before what came is read
        self._at_once = trio.Event()

    def note_received(self) -> None:
        """Acknowledge soon what came on a lane; from any thread."""
        if not self._due_noted:
            self._due_noted = True
            self._loop.soon(self.wake)

    def wake(self) -> None:
        """Tell the other side soon what it does not know yet. On the event loop."""
        self._due.set()

    def send_now(self) -> None:
        self._at_once.set()

    async def run(self) -> None:
        """Tell the other side what came, and how many lanes are wanted if it dials them."""
        while True:
            if self._lane_pool.receiving:  # a long frame
                with trio.move_on_after(PROGRESS_S):
                    await self._due.wait()
            else:
                await self._due.wait()
            is_long = ROUND_TRIP_S_MIN <= self._lane_pool.round_trip_s < math.inf
            with trio.move_on_after(LONG_PATH_ACKNOWLEDGE_S if is_long else ACKNOWLEDGE_S):
                await self._at_once.wait()
            self._at_once = trio.Event()
            self._due = trio.Event()
            self._due_noted = False
            if (received := self._lane_pool.take_received()) is not None:
                await self._send(received)
            if self._lane_pool.has_new_count:
                await self._send(LanesWanted(self._lane_pool.take_wanted()))
