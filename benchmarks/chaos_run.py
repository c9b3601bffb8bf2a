"""One run under chaos: its processes, the hands that hurt them, and the eyes that look at them.

loop    look      every peer's status and the bits of its shared state; who is live
        undo      what has lasted long enough: restart, SIGCONT, heal
        inject    what is due by the schedule, to a peer that is well
settle  undo everything, wait until all are in sync, pause, wait for rest
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import Factory, define, frozen
from blake3 import blake3
from numpy.typing import NDArray

from benchmarks.chaos_checks import Entry, LiveTime, Parity, read_journal
from benchmarks.chaos_schedule import Fault, Kind
from benchmarks.grounds import Loopback, Switch
from benchmarks.lab_run import LabRun
from benchmarks.report import BenchError, say
from holdfast.daemon.cli.fleet import MASTER, Status
from holdfast.membership.master.state.journal import RunFounded
from holdfast.protocol.arena import Arena, arena_bytes
from holdfast.protocol.errors import HoldfastError, UserError
from holdfast.protocol.messages import FragmentSize

LOOK_S = 0.4  # between two looks; a round takes seconds
TOLD_S = 15.0  # between two lines of progress
START_S = 120.0  # for all to be in sync at the beginning: six times torch on two cores
RECOVER_S = 120.0  # for all to be in sync and at rest after the last fault
HOLDERS_MIN = 2  # in sync and well, beside whoever is hurt: memory is all there is yet
SAMPLE_EVERY = 5  # versions of which one is kept, for its loss

Values = NDArray[np.float32]


@frozen
class Undo:
    """What ends a fault."""

    due_s: float
    what: Callable[[], None]
    hurt: tuple[str, ...]


@define
class Seen:
    """What was seen of one run.

    Attributes:
      violations: of anything but parity: who ended by itself, what did not recover.
      samples: shared parameters by version, of which there are some.
      from_s, to_s: the span that is measured, by the wall clock.
    """

    parity: Parity = Factory(Parity)
    live: LiveTime = Factory(LiveTime)
    violations: list[str] = Factory(list)
    samples: dict[int, Values] = Factory(dict)
    faults: list[Fault] = Factory(list)
    late: int = 0  # faults that had to wait for their turn
    from_s: float = 0.0
    to_s: float = 0.0
    final_held: int = -1  # the newest version that anybody holds at rest
    entries: list[Entry] = Factory(list)


class ChaosRun:
    """A run whose processes are hurt by a schedule."""

    def __init__(
        self,
        run: LabRun,
        ground: Loopback | Switch,
        folder: Path,
        peers: int,
        faults: tuple[Fault, ...],
    ) -> None:
        self.run = run
        self.ground = ground
        self.names = [f"p{number}" for number in range(peers)]
        self.hosts = {name: number + 1 for number, name in enumerate(self.names)}
        self.seen = Seen()
        self._journal = folder / "master" / "journal.sqlite"
        self._faults = list(faults)
        self._undo: list[Undo] = []
        self._hurt: set[str] = set()  # cannot take part at the moment; "master" too
        self._down: set[str] = set()  # killed by us and not started again yet
        self._stopped: set[str] = set()  # daemons that answer nobody
        self._well: set[str] = set()  # in sync at the last look
        self._sizes: tuple[FragmentSize, ...] = ()
        self._bits: dict[int, tuple[str, str]] = {}  # digest of the shared values, by version
        self._told_s = 0.0
        self._trainers: dict[str, int] = {}  # process ids at the last look, by peer

    # ------------------------------------------------------------ the story

    def start(self, toml: str) -> None:
        """Master and peers, until all are in sync and the places are taken."""
        self.run.start_master(toml)
        for name in self.names:
            self.run.join_on(self.hosts[name], name, founder=name == self.names[0])

        def ready(status: Status) -> bool:
            return bool(
                sum(member["in_sync"] for member in status["members"]) == len(self.names)
                and status["places"]["taken"] == status["places"]["limit"]
                and status["committed"] >= 2
            )

        self.run.until(ready, "all peers are in sync and train", START_S)
        for entry in read_journal(self._journal):
            if isinstance(entry.record, RunFounded):
                self._sizes = entry.record.sizes

    def live_through(self, seconds: float) -> None:
        """Let so much time pass, with its faults."""
        began_s = time.monotonic()
        self.seen.from_s = time.time()
        while (passed_s := time.monotonic() - began_s) < seconds:
            self._look()
            self._undo_due(time.monotonic())
            self._inject_due(passed_s)
            self._tell(passed_s, seconds)
            time.sleep(LOOK_S)
        self._look()
        self.seen.to_s = time.time()

    def settle(self) -> None:
        """End all faults; everybody must come back, and all must hold the same."""
        self._undo_due(float("inf"))
        try:
            self._await(lambda s: self._all_in_sync(s), "all peers are in sync again")
            self.run.act("pause", {})
            status = self._await(lambda s: self._at_rest(s), "the paused run is at rest")
        except UserError as error:
            self.seen.violations.append(f"it did not recover: {error}")
            status = None
        self._look()
        self._look_at_end(status)

    # ------------------------------------------------------------ looking

    def _look(self) -> None:
        live, well = [], set()
        for name in self.names:
            self._notice_end(name)
            node = self.run.nodes[name]
            if name in self._down or name in self._stopped or node.address() is None:
                continue
            try:
                status = self.run.peer(name)
            except UserError:
                continue
            self._trainers[name] = status["command_pid"]
            self.seen.parity.saw(name, node.process.pid, status["heads"])
            if not status["in_sync"]:
                continue
            self._look_at_bits(name, status)
            if name not in self._hurt:
                well.add(name)
                if status["role"] == "contributor" and status["trainer_pid"]:
                    live.append(name)
        self._notice_end("master")
        self._well = well
        self.seen.live.saw(live, time.monotonic())

    def _notice_end(self, name: str) -> None:
        """Whoever ends without being killed by us has a bug; it is started again all the same."""
        code = self.run.nodes[name].process.poll()
        if code is None or name in self._down:
            return
        self.seen.violations.append(f"{name} ended by itself with exit status {code}")
        say(self.seen.violations[-1])
        self._start_again(name)

    def _look_at_bits(self, name: str, status: Status) -> None:
        """The shared values themselves must be equal, whatever the digests say."""
        if not self._sizes:
            return
        found = read_shared(self.run.nodes[name].process.pid, self._sizes)
        if found is None or found[0] != status["heads"][0]["version"]:
            return  # it has gone on since it said so
        version, values = found
        digest = blake3(values.tobytes()).hexdigest()
        known = self._bits.setdefault(version, (digest, name))
        if known[0] != digest:
            self.seen.parity.violations.append(
                f"the values of version {version} differ between {known[1]} and {name}"
            )
        if version % SAMPLE_EVERY == 0:
            self.seen.samples.setdefault(version, values)

    def _tell(self, passed_s: float, seconds: float) -> None:
        if time.monotonic() - self._told_s < TOLD_S:
            return
        self._told_s = time.monotonic()
        hurt = ", ".join(sorted(self._hurt)) or "nobody"
        version = max(self.seen.parity.newest.values(), default=0)
        say(
            f"{passed_s:5.0f} of {seconds:.0f} s: version {version}, {len(self._well)} in sync, "
            f"{len(self.seen.faults)} faults, hurt: {hurt}; "
            f"{len(self.seen.parity.violations) + len(self.seen.violations)} violations"
        )

    # ------------------------------------------------------------ hurting

    def _inject_due(self, passed_s: float) -> None:
        while self._faults and self._faults[0].at_s <= passed_s:
            action = self._action(self._faults[0])
            if action is None:
                self.seen.late += 1
                return  # nobody can be hurt that way now: it waits, and what follows with it
            fault = self._faults.pop(0)
            self.seen.faults.append(fault)
            action()

    def _action(self, fault: Fault) -> Callable[[], None] | None:
        """How to do it now, or None."""
        if fault.target is None:
            if "master" in self._hurt:
                return None
            return lambda: self._hurt_master(fault)
        name = self._target(fault)
        if name is None:
            return None
        return lambda: self._hurt_peer(fault, name)

    def _target(self, fault: Fault) -> str | None:
        """The peer that was drawn, or the next one that is well."""
        assert fault.target is not None
        for step in range(len(self.names)):
            name = self.names[(fault.target + step) % len(self.names)]
            if name not in self._well or name in self._hurt:
                continue
            if len(self._well - self._hurt - {name}) < HOLDERS_MIN:
                return None
            return name
        return None

    def _hurt_master(self, fault: Fault) -> None:
        say(f"{fault.kind.value} for {fault.lasts_s:.1f} s")
        if fault.kind is Kind.KILL_MASTER:
            self._down.add("master")
            self.run.kill("master")
            self._later(fault, lambda: self._start_again("master"), "master")
        else:
            master = self.run.nodes[MASTER]
            master.signal(signal.SIGSTOP)
            self._later(fault, lambda: master.signal(signal.SIGCONT), "master")

    def _hurt_peer(self, fault: Fault, name: str) -> None:
        other = None if fault.other is None else self.names[fault.other]
        if other == name:
            other = self.names[(self.names.index(name) + 1) % len(self.names)]
        shown = f" ({other or 'the master'})" if fault.kind.value.startswith("cut") else ""
        say(f"{fault.kind.value}: {name}{shown} for {fault.lasts_s:.1f} s")
        match fault.kind:
            case Kind.KILL_PEER:
                self._down.add(name)
                self.run.kill(name)
                self._later(fault, lambda: self._start_again(name), name)
            case Kind.KILL_TRAINER:
                self._signal_trainer(name, signal.SIGKILL)
            case Kind.STOP_PEER:
                self._stopped.add(name)
                self._signal_trainer(name, signal.SIGSTOP)
                self.run.nodes[name].signal(signal.SIGSTOP)
                self._later(fault, lambda: self._wake(name), name)
            case Kind.STOP_TRAINER:
                self._signal_trainer(name, signal.SIGSTOP)
                self._later(fault, lambda: self._signal_trainer(name, signal.SIGCONT), name)
            case _:
                self._cut(fault, name, other)

    def _cut(self, fault: Fault, name: str, other: str | None) -> None:
        ground = self.ground
        assert isinstance(ground, Switch)
        mine = self.hosts[name]
        theirs = [0 if other is None else self.hosts[other]]
        if fault.kind is Kind.CUT_ALL:
            theirs = [host for host in range(len(self.names) + 1) if host != mine]
        pairs = [(mine, host) for host in theirs]
        if fault.kind is not Kind.CUT_ONE_WAY:
            pairs += [(host, mine) for host in theirs]
        for source, target in pairs:
            ground.cut(source, target)

        def heal() -> None:
            for source, target in pairs:
                ground.heal(source, target)

        # Two peers that cannot reach each other can both still work: neither is excused.
        self._later(fault, heal, *([name] if 0 in theirs else []))

    def _later(self, fault: Fault, what: Callable[[], None], *hurt: str) -> None:
        self._hurt.update(hurt)
        self._undo.append(Undo(time.monotonic() + fault.lasts_s, what, hurt))

    def _undo_due(self, now_s: float) -> None:
        due = [undo for undo in self._undo if undo.due_s <= now_s]
        self._undo = [undo for undo in self._undo if undo.due_s > now_s]
        for undo in due:
            undo.what()
            self._hurt.difference_update(undo.hurt)

    def _wake(self, name: str) -> None:
        self._stopped.discard(name)
        self.run.nodes[name].signal(signal.SIGCONT)
        self._signal_trainer(name, signal.SIGCONT)

    def _signal_trainer(self, name: str, number: signal.Signals) -> None:
        if pid := self._trainers.get(name):
            with contextlib.suppress(ProcessLookupError):  # its daemon has ended it meanwhile
                os.killpg(pid, number)

    def _start_again(self, name: str) -> None:
        self._down.discard(name)
        if name == "master":
            self.run.restart_master()
        else:
            self.run.join_on(self.hosts[name], name)

    # ------------------------------------------------------------ the end

    def _await(self, condition: Callable[[Status], bool], what: str) -> Status:
        until_s = time.monotonic() + RECOVER_S
        story = "the master does not answer"
        while time.monotonic() < until_s:
            self._look()
            with contextlib.suppress(UserError):
                status = self.run.master()
                if condition(status):
                    return status
                waits = [f"{m['name']}: {m['why']}" for m in status["members"] if m["why"]]
                story = f"{status['state']}: {status['why_waiting']} ({'; '.join(waits)})"
            time.sleep(LOOK_S)
        raise BenchError(f"not within {RECOVER_S:g} s: {what}; {story}")

    def _all_in_sync(self, status: Status) -> bool:
        here = {member["name"] for member in status["members"] if member["in_sync"]}
        return here == set(self.names)

    def _at_rest(self, status: Status) -> bool:
        return not status["rounds"] and all(
            head["state"] == "held" and head["version"] == status["committed"]
            for member in status["members"]
            for head in member["heads"]
        )

    def _look_at_end(self, status: Status | None) -> None:
        self.seen.entries = read_journal(self._journal)
        if status is None:
            self.seen.final_held = max(self.seen.parity.newest.values(), default=-1)
            return
        roots: dict[str, str] = {}
        for member in status["members"]:
            for head in member["heads"]:
                roots[member["name"]] = head["root"]
                self.seen.final_held = max(self.seen.final_held, int(head["version"]))
        if len(set(roots.values())) > 1:
            self.seen.parity.violations.append(f"at rest the digests differ: {roots}")


def _not_now() -> None:
    raise HoldfastError("it is being written: look again later")


def read_shared(pid: int, sizes: tuple[FragmentSize, ...]) -> tuple[int, Values] | None:
    """Version and values of the shared arena of a daemon's first fragment; None: not now.

    The daemon's two arenas are files without a name that it has opened one after the other, the
    shared one first.
    """
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if "holdfast-arena" in os.readlink(entry.path):
                    found.append(int(entry.name))
    if len(found) < 2:  # a mapping holds a copy of its descriptor
        return None
    try:
        with open(f"/proc/{pid}/fd/{min(found)}", "rb") as file:
            memory = mmap.mmap(file.fileno(), arena_bytes(sizes), access=mmap.ACCESS_READ)
        arena = Arena(memoryview(memory), sizes)
        values = np.empty(sizes[0].value_count, np.float32)
        version = arena.read(0, lambda: np.copyto(values, arena.values(0)), _not_now)
    except (OSError, ValueError, HoldfastError):
        return None
    return version, values
