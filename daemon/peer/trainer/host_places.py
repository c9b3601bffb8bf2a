"""Which hosts of a peer take part in its training command; nothing here sends or waits for bytes.

The command is started at all hosts, and ended at all of them when it ends at one. A command with
``{hosts}`` is started again with those that are left when a host goes, and when one comes after the
next round; any other one needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import trio
from attrs import define, field

from ....protocol.messages import (
    WORD_CHARS_MAX,
    FailureKind,
    HostEnded,
    HostHello,
    HostStart,
    HostStop,
    Message,
)
from ....protocol.text import plain
from ....protocol.wakeups import Pulse

HOST_PLACEHOLDER = "{host}"  # in a training command: the host's number; the head's is 0
HOSTS_PLACEHOLDER = "{hosts}"  # how many there are
HEAD_PLACEHOLDER = "{head}"  # the address of the head's machine
FEWER_S = 60.0  # after the first look, a command with ``{hosts}`` begins without those that miss
HINT = "on each other one run `holdfast host` with the string that was printed at the start"
REMIND_S = 60.0  # between two sentences about hosts that are missing
STOP_S = 20.0  # for a host to end its processes
FAREWELL_S = 120.0  # for its processes to end by themselves after the run's end


class PresentHost(Protocol):
    """A host whose link is up."""

    peer: str
    hello: HostHello
    versions: dict[int, int]

    def tell(self, message: Message) -> None: ...


@define(eq=False)
class HostPlaces:
    """See the top of this file.

    Args:
      wanted: hosts of the peer, the head included.
      minimum: the command is started only with so many.
      command: the training command.
      member: this peer's id.
      head: the address at which hosts reach the head's machine.
      tell: takes sentences for the operator.
      show: called when another number of hosts or of their GPUs is there.

    Attributes:
      used: further hosts that take part in the command now.
      started: tells the command's present start from all others; empty before the first.
      why_waiting: why the command waits for hosts; else empty.
      fail: ends the command here as a failure; set by the owner of the command.
    """

    wanted: int
    minimum: int
    command: Sequence[str]
    member: str
    head: str
    tell: Callable[[str], None]
    show: Callable[[], None]
    why_waiting: str = field(default="", init=False)
    fail: Callable[[FailureKind, str, float], None] = field(
        default=lambda _kind, _reason, _sick_s: None, init=False
    )
    started: str = field(default="", init=False)
    used: list[PresentHost] = field(factory=list, init=False)
    _present: list[PresentHost] = field(factory=list, init=False)
    _gpus_used: list[int] = field(factory=list, init=False)
    _running: set[str] = field(factory=set, init=False)  # whose command has not ended
    _settled: dict[str, int] = field(factory=dict, init=False)  # round after which it takes part
    _stopping: bool = field(default=False, init=False)
    _rounds: int = field(default=0, init=False)  # boundaries so far
    _why_gone: str = field(default="", init=False)
    _changed: Pulse = field(factory=Pulse, init=False)

    @property
    def _flexible(self) -> bool:
        return any(HOSTS_PLACEHOLDER in each for each in self.command)

    def __str__(self) -> str:
        return f"{1 + len(self._present)} of {self.wanted} hosts"

    def shown(self, healthy: int, all_: int) -> str:
        """Return what people read of the hosts and of all GPUs; given are those of the head."""
        hellos = [host.hello for host in self._present]
        healthy += sum(each.gpus_healthy for each in hellos)
        all_ += sum(each.gpus_all for each in hellos)
        gpus = f", {healthy} of {all_} GPUs" if all_ else ""
        names = f" (with {', '.join(each.name for each in hellos)})" if hellos else ""
        named = f"{self}{names}{gpus}"
        return named if len(named) <= WORD_CHARS_MAX else f"{self}{gpus}"

    # ------------------------------------------------------------ for the head

    def why_full(self, peer: str) -> str:
        """Return why this host is not taken; empty if it is."""
        if sum(host.peer != peer for host in self._present) < self.wanted - 1:
            return ""
        names = ", ".join(host.hello.name for host in self._present)
        return (
            f"this peer has its {self.wanted} hosts already (the head, {names}): stop one of them,"
            f" or start the head with --hosts {self.wanted + 1}"
        )

    def came(self, host: PresentHost) -> None:
        self._present.append(host)
        self._settled[host.peer] = self._rounds + 1
        self.tell(f"host {host.hello.name} is here: {self}")
        self.changed()

    def went(self, host: PresentHost, why: str) -> None:
        self._present.remove(host)
        self._running.discard(host.peer)
        self._why_gone = f"host {host.hello.name} is gone ({plain(why)})"
        self.tell(f"{self._why_gone}: {self}")
        self.changed()

    def changed(self) -> None:
        """Take note that something is new about the hosts."""
        self.show()
        self._changed.notify_all()

    def boundary(self) -> None:
        """Take note that a round has ended."""
        self._rounds += 1
        self._changed.notify_all()

    def ended(self, host: PresentHost, message: HostEnded) -> None:
        """Take note that the command has ended at a host."""
        if host.peer in self._running and message.start == self.started:
            self._running.discard(host.peer)
            if message.reason and not self._stopping:
                self.fail(message.kind, f"on host {host.hello.name}: {message.reason}", 0.0)
            self._changed.notify_all()

    # ------------------------------------------------------------ for the command

    async def enough(self) -> None:
        """Wait until the hosts are there that the command needs; they take part in its start."""
        began_s = told_s = trio.current_time()
        while True:
            waited_s = trio.current_time() - began_s
            waits_for_all = self._rounds == 0 and waited_s < FEWER_S
            enough = self.minimum if self._flexible and not waits_for_all else self.wanted
            if 1 + len(self._present) >= enough:
                break
            self.why_waiting = f"{self}"
            if trio.current_time() >= told_s:
                told_s += REMIND_S
                self.tell(f"{self}: {HINT}")
            with trio.move_on_after(min(told_s - trio.current_time(), FEWER_S)):
                await self._changed.wait()
        self.why_waiting = ""
        self.used = list(self._present)
        self._gpus_used = [host.hello.gpus_healthy for host in self.used]

    def filled(self, command: Sequence[str]) -> Sequence[str]:
        """Return the head's command with the places of hosts filled in."""
        return fill(command, 0, 1 + len(self.used), self.head)

    async def change(self) -> str:
        """Wait until the command has to be started again, with other hosts; return why."""
        while True:
            if any(host not in self._present for host in self.used):
                return f"{self._why_gone}: {self}"
            if [host.hello.gpus_healthy for host in self.used] != self._gpus_used:
                return "another number of GPUs is healthy at a host"
            new = [host for host in self._present if host not in self.used]
            if self._flexible and any(self._settled[host.peer] <= self._rounds for host in new):
                return f"host {new[0].hello.name} takes part: {self}"
            await self._changed.wait()

    def start(self, start: str) -> None:
        """Start the command at all other hosts."""
        count = 1 + len(self.used)
        self.started, self._stopping = start, False
        self._running = {host.peer for host in self.used if host in self._present}
        for number, host in enumerate(self.used, 1):
            host.versions.clear()
            host.tell(HostStart(number, count, self.head, self.member, start))

    async def stop(self, *, finished: bool) -> None:
        """End the command at all other hosts; if it is finished, wait for its own end there."""
        self._stopping = True
        for host in self._present:
            host.tell(HostStop(self.started, finished))
        with trio.move_on_after(FAREWELL_S if finished else STOP_S):
            while self._running:
                await self._changed.wait()


def fill(command: Sequence[str], host: int, hosts: int, head: str) -> list[str]:
    """Return a training command with the places of hosts filled in."""
    filled = []
    for each in command:
        word = each.replace(HOSTS_PLACEHOLDER, str(hosts)).replace(HOST_PLACEHOLDER, str(host))
        filled.append(word.replace(HEAD_PLACEHOLDER, head))
    return filled
