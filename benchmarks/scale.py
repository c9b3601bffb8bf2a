"""Many light peers against one production master, in virtual time: what control costs.

    python -m benchmarks.scale --peers 100,1000 --json scale.json

A *light* peer says all that a peer says to its master (Hello, Founded, Ready, Reduced, Measured,
Applied, Synced, heartbeats, progress once a second), when a peer would say it, and moves no
tensors. All of them and the master's service are in this process, over ``MemoryNetwork``; waiting
costs no time. The master's processor time is that of its thread inside the coordinator, its
journal, and the encoding and decoding of messages: light peers pack and unpack theirs without the
production code, so none of theirs is in it. What is not in it is what TLS and the kernel would add
for each message.
"""

from __future__ import annotations

import functools
import gc
import random
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import msgspec
import trio
from attrs import Factory, asdict, define, frozen
from blake3 import blake3

from benchmarks.report import Measured, Table, bench_parser, listed, run_main, say, tell
from holdfast.daemon.master.journal.journal_base import GrantRow
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.master.master_service import MasterService
from holdfast.daemon.peer.line_report import links_reported
from holdfast.daemon.peer.peer_service import PROGRESS_S, progress_every_s
from holdfast.membership.master.coordinator import Coordinator
from holdfast.membership.master.state.journal import RunCreated, TermStarted
from holdfast.membership.master.status.status import describe
from holdfast.membership.spec.spec import RunSpec
from holdfast.protocol import messages as m
from holdfast.protocol import wire
from holdfast.protocol.addresses import Address
from holdfast.protocol.network.interface import Channel, Network
from holdfast.protocol.packed_orders import PACKED, Heard, OrderWriter
from holdfast.protocol.trust.authority import Party
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.virtual_time import run_virtually

COUNTS = (100, 200, 500)
ROUNDS = 3  # measured, after one that is not
VALUE_COUNT = 2**28  # 1 GiB of float32
TRAIN_S = 4.0  # from Open to Ready
REDUCE_S = 2.0
APPLY_S = 0.1
FETCH_S = 3.0
JITTER_S = 0.5  # of each of these
WEIGHTS = (6_000, 7_000)  # tokens of a contribution: machines differ
JOIN_EVERY_S = 0.05  # one peer after the other, as a crowd that was told to come
DELAY_S = 0.02  # one way
PORT = 29_700
MASTER_ID = "f" * 32
RUN_ID = "5" * 32

SPEC = """\
[run]
name = "scale"
[diloco]
sync_every = 100
"""

LAYOUT = m.ModelLayout((m.TensorSpec("weights", (VALUE_COUNT,), "float32", "parameter"),))
SIZE = m.FragmentSize(VALUE_COUNT, VALUE_COUNT, 0)
PARTS = ("decide", "decode", "encode", "journal")
_LENGTH = struct.Struct(">I")


@define
class Meter:
    """The master's processor seconds and messages, since the last ``take``."""

    cpu_s: defaultdict[str, float] = Factory(lambda: defaultdict(float))
    sent_bytes: Counter[str] = Factory(Counter)
    sent_count: Counter[str] = Factory(Counter)
    received_bytes: float = 0
    received_count: float = 0

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its thread's processor time added to ``what``."""

        def call(*arguments: Any, **named: Any) -> Any:
            before_s = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.cpu_s[what] += time.thread_time() - before_s

        return call

    @contextmanager
    def on_the_wire(self) -> Iterator[None]:
        """Meter the master's encoding, sending and decoding; it alone uses ``wire`` here."""
        encode, decode = wire.encode, wire.decode_counted
        timed_encode, timed_decode = self.timed("encode", encode), self.timed("decode", decode)

        def metered_encode(message: Any) -> bytes:
            if isinstance(message, PACKED):  # a part of packing it
                return encode(message)
            body: bytes = timed_encode(message)
            name = type(message).__name__
            self.sent_bytes[name] += len(body) + _LENGTH.size
            self.sent_count[name] += 1
            return body

        def metered_decode(data: bytes, types: Any = None) -> Any:
            self.received_bytes += len(data) + _LENGTH.size
            self.received_count += 1
            return timed_decode(data, types)

        wire.encode, wire.decode_counted = metered_encode, metered_decode
        pack = OrderWriter.pack
        OrderWriter.pack = self.timed("encode", pack)  # type: ignore[method-assign]
        try:
            yield
        finally:
            wire.encode, wire.decode_counted = encode, decode
            OrderWriter.pack = pack  # type: ignore[method-assign]

    def watch(self, coordinator: Coordinator, store: JournalStore) -> None:
        """Meter what the master decides and records."""
        for name in ("attach", "receive", "settle", "detach", "tick", "next_deadline_s"):
            setattr(coordinator, name, self.timed("decide", getattr(coordinator, name)))
        store.append = self.timed("journal", store.append)  # type: ignore[method-assign]

    def take(self) -> dict[str, Any]:
        """What it has counted; counts anew."""
        found = {**asdict(self), "cpu_total_s": sum(self.cpu_s.values())}
        found["sent_bytes_total"] = sum(self.sent_bytes.values())
        found["sent_count_total"] = sum(self.sent_count.values())
        for counter in (self.cpu_s, self.sent_bytes, self.sent_count):
            counter.clear()
        self.received_bytes = self.received_count = 0
        return found


def peer_of(number: int) -> str:
    """The id of the light peer with this member number."""
    return f"{number:032x}"


def root_of(version: int) -> bytes:
    """The digest that every light peer has of a version."""
    return blake3(version.to_bytes(8, "big")).digest()


class LightPeer:
    """The control side of one peer.

    Args:
      progress_s: from one report of progress to the next.
    """

    def __init__(
        self,
        name: str,
        peer: str,
        network: Network,
        chance: random.Random,
        progress_s: float = PROGRESS_S,
    ) -> None:
        self.name = name
        self.peer = peer
        self.network = network
        self.at, self.master = Address(name, PORT), Address("master", PORT)
        self.version = -1  # of the shared state that it would hold
        self._chance = chance
        self._stream: trio.abc.Stream | None = None
        self._lock = trio.StrictFIFOLock()
        self._tokens = 0
        self._progress_s = progress_s
        self._heard = Heard()

    async def run(self, heartbeat_s: float) -> None:
        """Take part until cancelled."""
        async with trio.open_nursery() as nursery:
            (self.at,) = await nursery.start(self.network.serve, [self.at], _ignore, None)
            channel = await self._dial()
            self._stream = channel.stream
            await self.say("Hello", wire.to_plain(self._hello()))
            nursery.start_soon(self._every, heartbeat_s, "Heartbeat", dict)
            nursery.start_soon(self._every, self._progress_s, "Progress", self._progress)
            await self._listen(nursery)

    async def _dial(self) -> Channel:
        return await self.network.dial(self.master, party=Party.MASTER)

    def _hello(self) -> m.Hello:
        return m.Hello(
            version_min=m.VERSION_MIN,
            version_max=m.VERSION_MAX,
            run_id=RUN_ID,
            name=self.name,
            addresses=(str(self.at),),
            incarnation=1,
            layout=LAYOUT,
            heads=(),
            lineage=b"",
            undecided=(),
        )

    def _progress(self) -> dict[str, Any]:
        self._tokens += 64
        return {
            "step": self._tokens // 64,
            "tokens": self._tokens,
            "tokens_per_s": 64.0,
            "loss": 2.5,
            "phase": "in the run",
            "bulk_sent_bytes": 0,
            "bulk_received_bytes": 0,
            "state_received_bytes": 0,
            "metrics": {},
        }

    async def _every(self, seconds: float, name: str, fields: Callable[[], dict[str, Any]]) -> None:
        await trio.sleep(self._chance.uniform(0, seconds))
        while True:
            await self.say(name, fields())
            await trio.sleep(seconds)

    async def say(self, name: str, fields: dict[str, Any]) -> None:
        """Send a message to the master."""
        body = msgpack.packb([name, fields])
        assert self._stream is not None
        async with self._lock:
            await self._stream.send_all(_LENGTH.pack(len(body)) + body)

    async def _listen(self, nursery: trio.Nursery) -> None:
        assert self._stream is not None
        buffer = bytearray()
        while True:
            data = await self._stream.receive_some(1 << 20)
            if not data:
                return
            buffer += data
            while len(buffer) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
                if len(buffer) < end:
                    break
                body = bytes(buffer[_LENGTH.size : end])
                del buffer[:end]
                self._hear(body, nursery)

    def _hear(self, body: bytes, nursery: trio.Nursery) -> None:
        name, fields = _name_of(body), None
        if name == "Packed":
            packed = msgpack.unpackb(body)[1]["data"]
            name, fields, self._heard = _unpacked(packed, self._heard)
        answer = getattr(self, f"_on_{name.lower()}", None)
        if answer is not None:
            nursery.start_soon(answer, msgpack.unpackb(body)[1] if fields is None else fields)

    async def _wait(self, seconds: float) -> None:
        await trio.sleep(seconds + self._chance.uniform(0, JITTER_S))

    # ------------------------------------------------------------ what the master says

    async def _on_supplyweights(self, _: dict[str, Any]) -> None:
        self.version = 0
        heads = [{"fragment": 0, "version": 0, "root": root_of(0)}]
        fields = {"layout": wire.to_plain(LAYOUT), "sizes": [wire.to_plain(SIZE)]}
        await self.say("WeightsSupplied", {**fields, "heads": heads, "lineage": root_of(0)})

    async def _on_syncfragment(self, message: dict[str, Any]) -> None:
        await self._wait(FETCH_S)
        self.version = max(self.version, message["head"]["version"])
        fields = {"head": self._head(), "received_bytes": 0, "bad_donors": []}
        await self.say("Synced", fields)

    async def _on_open(self, message: dict[str, Any]) -> None:
        await self._wait(TRAIN_S)
        weight = self._chance.randint(*WEIGHTS)
        fields = {"round": message["round"], "weight": weight, "norm": 1.0, "step": 0}
        await self.say("Ready", {**fields, "state_root": root_of(message["version"])})

    async def _on_reduce(self, message: dict[str, Any]) -> None:
        """Report a result, and what it carried if it contributes."""
        await self._wait(REDUCE_S)
        fields = {"round": message["round"], "attempt": message["attempt"]}
        digest = root_of(message["round"])
        await self.say("Reduced", {**fields, "digest": digest, "manifest": []})
        if any(each["peer"] == self.peer for each in message["contributors"]):
            owners = sorted({run["peer"] for run in message["plan"]["owners"]})
            await self.say("Measured", self._measured(owners))

    def _measured(self, owners: Sequence[str]) -> dict[str, Any]:
        """As if it had sent its share to every owner."""
        count = links_reported(len(owners))
        told = [each for each in owners[: count + 1] if each != self.peer][:count]
        links = [{"peer": p, "sent_bytes": 2**20, "sending_s": 0.01} for p in told]
        carried = 2**20 * len(links)
        fields = {"sent_bytes": carried, "sending_s": REDUCE_S, "received_bytes": carried}
        return {**fields, "receiving_s": REDUCE_S, "links": links}

    async def _on_commit(self, message: dict[str, Any]) -> None:
        await self._wait(APPLY_S)
        if self.version == message["version"]:
            self.version += 1
            await self.say("Applied", {"round": message["round"], "head": self._head()})

    def _head(self) -> dict[str, Any]:
        return {"fragment": 0, "version": self.version, "root": root_of(self.version)}


@functools.lru_cache(maxsize=16)  # all get the same bytes, and would each unpack them
def _unpacked(data: bytes, heard: Heard) -> tuple[str, dict[str, Any], Heard]:
    """Return a packed message's name and fields, and what was heard after it."""
    body = heard.unpacked(data)
    name, fields = msgpack.unpackb(body)
    return name, fields, heard.then(wire.MESSAGES[name], body)


def _name_of(body: bytes) -> str:
    """Return a message's name: [name, fields] is an array of two, then a string shorter than 32."""
    return body[2 : 2 + (body[1] & 0x1F)].decode() if body else ""


async def _ignore(_: Channel) -> None:
    """The master dials back only to see whether it can."""


@frozen
class Scale:
    """What a run of so many peers cost.

    Attributes:
      join: metered from the first Hello until all were in sync.
      round: metered over ``ROUNDS`` rounds, divided by them.
      commit_s: from the order to reduce to the commit, virtual; ``REDUCE_S`` of it are the peers'.
      one_join: metered while one more peer came, rounds going on; and how long it took.
      status_s: processor time of one status, as a dashboard asks for.
    """

    peers: int
    join: dict[str, Any]
    join_s: float
    round: dict[str, Any]
    commit_s: float
    one_join: dict[str, Any]
    status_s: float
    took_s: float


def measure(peers: int) -> Scale:
    """One run of so many light peers.

    Garbage is not collected meanwhile: most of what that looks through are the light peers'
    objects.
    """
    gc.disable()
    try:
        return run_virtually(lambda: _measured(peers), seed=1)
    finally:
        gc.enable()
        gc.collect()


async def _measured(peers: int) -> Scale:
    began_s = time.monotonic()
    meter, chance = Meter(), random.Random(peers)
    world = MemoryWorld(chance, delay_s=DELAY_S, jitter_s=0.0, bytes_per_s=1e9)
    store = JournalStore(":memory:", now=lambda: 0.0)
    records = [RunCreated(RUN_ID, SPEC), TermStarted(1)]
    for record in records:
        store.append(record)
    coordinator = Coordinator.restore(RunSpec.parse(SPEC), RUN_ID, records, 1)
    meter.watch(coordinator, store)
    network = world.host("master", MASTER_ID, Party.MASTER)
    master = MasterService(coordinator, store, network, [Address("master", PORT)])
    heartbeat_s = coordinator.context.spec.heartbeat_s
    history = coordinator.context.history

    async with trio.open_nursery() as nursery:
        with meter.on_the_wire():
            await nursery.start(master.run)

            def join(number: int) -> None:
                name, peer = f"n{number}", peer_of(number + 1)
                store.admit(peer, GrantRow(m.Role.CONTRIBUTOR, number == 0, name))
                host, lot = world.host(name, peer), random.Random(number)
                light = LightPeer(name, peer, host, lot, progress_every_s(peers))
                nursery.start_soon(light.run, heartbeat_s)

            async def until(condition: Callable[[], bool]) -> None:
                while not condition():
                    await trio.sleep(0.05)

            def in_sync() -> int:
                return sum(member.in_sync for member in coordinator.context.roster)

            master.decide(coordinator.pause)  # nobody waits for rounds while the crowd comes
            joining_s = trio.current_time()
            for number in range(peers):
                join(number)
                await trio.sleep(JOIN_EVERY_S)
            await until(lambda: in_sync() == peers)
            join_s = trio.current_time() - joining_s
            joined = meter.take()
            say(
                f"  all have joined: {joined['cpu_total_s']:.1f} s,"
                f" {_mb(joined['sent_bytes_total'])}"
            )
            master.decide(coordinator.resume)
            await until(lambda: history.commit_count >= 1)
            meter.take()
            await until(lambda: history.commit_count >= 1 + ROUNDS)
            rounds = meter.take()
            mean_s, mean_bytes = rounds["cpu_total_s"] / ROUNDS, rounds["sent_bytes_total"] / ROUNDS
            say(f"  a round takes the master {mean_s:.2f} s and {_mb(mean_bytes)} sent")
            past = list(coordinator.scheduler.round_table.past)[-ROUNDS:]
            assert all(len(each.running().contributors) == peers for each in past)
            await trio.sleep(TRAIN_S / 2)  # in the quiet of the next round
            meter.take()
            join(peers)
            await until(lambda: in_sync() == peers + 1)
            one = meter.take()
            before_s = time.thread_time()
            msgspec.json.encode(describe(coordinator, trio.current_time()))
            status_s = time.thread_time() - before_s
            nursery.cancel_scope.cancel()
    return Scale(
        peers=peers,
        join=joined,
        join_s=join_s,
        round=_divided(rounds, ROUNDS),
        commit_s=max(each.ended_s - each.closed_s for each in past),
        one_join=one,
        status_s=status_s,
        took_s=time.monotonic() - began_s,
    )


def scale(counts: tuple[int, ...] = COUNTS) -> Measured:
    """The section of RESULTS.md."""
    found = []
    for peers in counts:
        say(f"{peers} light peers")
        found.append(measure(peers))
        say(f"  took {found[-1].took_s:.0f} s; {found[-1].round['cpu_total_s']:.2f} s a round")
    table = Table(
        "What a master of many members does and says; light peers in virtual time",
        ["python -m benchmarks.scale"],
        [
            "peers",
            "a round: master's CPU, s",
            "of which",
            "messages sent, received",
            "bytes sent, received",
            "order to commit, s",
            "one more joins: CPU, s",
            "bytes sent",
            "all join: CPU, s",
            "bytes sent",
            "a status, s",
        ],
        [_row(each) for each in found],
        [
            (
                "CPU is the master's thread in its rules, journal, encoding and decoding; TLS and"
                f" the kernel are not in it. A round trains {TRAIN_S:g} s, reduces {REDUCE_S:g} s"
                f" and applies {APPLY_S:g} s, each up to {JITTER_S:g} s longer; one way takes"
                f" {DELAY_S * 1e3:g} ms. The plan has some 4,200 chunks (1 GiB of float32). Bytes"
                " are of whole messages before TLS. While all join, each newcomer gets a whole"
                " view, and everybody hears of each batch of newcomers: these bytes grow with the"
                " square of the members."
            ),
        ],
    )
    return [table], {"runs": [asdict(each) for each in found]}


def _row(each: Scale) -> list[str]:
    per_round, one = each.round, each.one_join
    return [
        f"{each.peers:,}",
        f"{per_round['cpu_total_s']:.2f}",
        ", ".join(f"{what} {per_round['cpu_s'].get(what, 0):.2f}" for what in PARTS),
        f"{per_round['sent_count_total']:,.0f}, {per_round['received_count']:,.0f}",
        f"{_mb(per_round['sent_bytes_total'])}, {_mb(per_round['received_bytes'])}",
        f"{each.commit_s:.2f}",
        f"{one['cpu_total_s']:.2f}",
        _mb(one["sent_bytes_total"]),
        f"{each.join['cpu_total_s']:.1f}",
        _mb(each.join["sent_bytes_total"]),
        f"{each.status_s:.2f}",
    ]


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def _divided(found: dict[str, Any], by: int) -> dict[str, Any]:
    return {
        key: {k: v / by for k, v in value.items()} if isinstance(value, dict) else value / by
        for key, value in found.items()
    }


def main() -> int:
    parser = bench_parser("scale", __doc__)
    parser.add_argument("--peers", default=",".join(map(str, COUNTS)), metavar="N[,...]")
    options = parser.parse_args()
    counts = tuple(int(text) for text in listed(options.peers))
    if not all(2 <= count < m.MEMBERS_MAX for count in counts):
        parser.error(f"from 2 to {m.MEMBERS_MAX - 1} peers: one more joins in the end")
    return tell(scale(counts), options)


if __name__ == "__main__":
    sys.exit(run_main("scale", main))
