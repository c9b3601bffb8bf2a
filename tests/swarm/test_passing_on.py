"""Messages that members of a crowd get from each other: who gets them from whom, and what if a source fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import trio

from holdfast.daemon.master import crowd_messages
from holdfast.daemon.master.crowd_messages import (
    CROWD_MIN,
    FAN,
    ROOTS,
    SILENT_S,
    TRIED_MAX,
    CrowdMessages,
)
from holdfast.daemon.peer.announced_messages import (
    ASKED_MAX,
    ASKERS_MAX,
    FIRST_VIEW_S,
    KEPT_MAX,
    SOURCE_S,
    VIEWS_MAX,
    AnnouncedMessages,
)
from holdfast.protocol import wire
from holdfast.protocol.digests import body_digest
from holdfast.protocol.errors import PeerLostError
from holdfast.protocol.messages import (
    FirstView,
    Heartbeat,
    MemberInfo,
    Message,
    MessageAnnounced,
    MessageBody,
    MessageWanted,
    Role,
    View,
    ViewChange,
)
from holdfast.simulation.scenario import Scenario
from holdfast.simulation.scenario_run import run_scenario
from tests.swarm.test_swarm import a_swarm, settled


def some_members(count: int, *, reachable: bool = True) -> tuple[MemberInfo, ...]:
    place = ("10.0.0.7:29701",), Role.CONTRIBUTOR, True, reachable
    return tuple(MemberInfo(f"{each:032x}", f"n{each}", each, *place) for each in range(count))


def a_change(number: int = 2) -> ViewChange:
    """A change that is long enough to be announced."""
    return ViewChange(number, 1, some_members(8), (), 0)


# ---------------------------------------------------------------- the master


class Crowd:
    """Sends messages to members 0, 1, ... and remembers who had to ask whom."""

    def __init__(self, count: int = 1_000) -> None:
        self.count = count
        self.now_s = 0.0
        self.gone: set[str] = set()
        self.new: set[str] = set()
        self.apart: set[tuple[str, str]] = set()
        self.messages = CrowdMessages(
            lambda peer: None if peer in self.gone else int(peer, 16 if len(peer) == 32 else 10),
            lambda peer: peer not in self.new,
            lambda one, other: (one, other) not in self.apart,
            lambda: self.now_s,
        )

    def send(self, message: Message) -> dict[str, str | None]:
        """Return by member whom it is to ask; None: it got the message."""
        found: dict[str, str | None] = {}
        for each in range(self.count):
            told = self.messages.instead_of(message, str(each), self.count)
            if isinstance(told, MessageAnnounced):
                assert told.digest == body_digest(wire.encode(message))
                found[str(each)] = str(told.source)
            else:
                assert told is message
                found[str(each)] = None
        return found


def depth(sources: dict[str, str | None], peer: str) -> int:
    source = sources[peer]
    return 0 if source is None else 1 + depth(sources, source)


def test_a_crowd_is_a_tree_in_which_nobody_serves_many() -> None:
    sources = Crowd(10_000).send(a_change())
    assert sum(source is None for source in sources.values()) == ROOTS
    assert max(Counter(filter(None, sources.values())).values()) == FAN
    assert max(depth(sources, peer) for peer in sources) <= 3
    assert all(int(source) < int(peer) for peer, source in sources.items() if source)


@pytest.mark.parametrize(
    ("message", "count"),
    [(a_change(), CROWD_MIN - 1), (Heartbeat(1), 1_000), (ViewChange(2, 1, (), (), 0), 1_000)],
    ids=["few members", "another message", "a short one"],
)
def test_who_needs_no_help_passes_nothing_on(message: Message, count: int) -> None:
    assert set(Crowd(count).send(message).values()) == {None}


def test_a_member_without_links_gets_everything_and_serves_nobody() -> None:
    crowd = Crowd()
    crowd.gone = {"3", "500"}
    sources = crowd.send(a_change())
    assert sources["3"] is sources["500"] is None
    assert not {"3", "500"} & set(sources.values())


def test_a_source_must_have_a_link() -> None:
    crowd = Crowd()
    crowd.apart = {("40", str(source)) for source in range(40)}
    assert crowd.send(a_change())["40"] is None


def test_a_source_of_which_two_say_that_it_is_silent_serves_nobody_for_a_while() -> None:
    crowd = Crowd()
    change = a_change()
    sources = crowd.send(change)
    digest = body_digest(wire.encode(change))
    served = [peer for peer, source in sources.items() if source == "0"]
    assert crowd.messages.wanted(served[0], digest) == MessageBody(wire.encode(change))
    assert crowd.messages.wanted(served[0], digest) is None, "once is enough"
    assert crowd.messages.wanted("0", digest) is None, "it has got it from the master"
    assert "0" in crowd.send(a_change(3)).values(), "one alone may lie"
    crowd.messages.wanted(served[1], digest)
    assert "0" not in crowd.send(a_change(4)).values()
    crowd.now_s = SILENT_S + 1
    assert "0" in crowd.send(a_change(5)).values()


def test_newcomers_get_their_first_view_from_members_in_turn() -> None:
    crowd = Crowd()
    view = View(7, some_members(200), 0)
    crowd.new = {f"{each:032x}" for each in range(150, 200)}
    crowd.gone = {f"{3:032x}"}
    asked = Counter[str]()
    for peer in sorted(crowd.new):
        told = crowd.messages.instead_of(view, peer, 200)
        assert isinstance(told, MessageAnnounced)
        first = told.first_view
        assert told.digest == body_digest(wire.encode(view))
        assert first == FirstView(7, view.members[told.source], view.members[int(peer, 16)])
        assert first.source.peer not in crowd.new | crowd.gone
        asked[first.source.peer] += 1
    assert max(asked.values()) == 1
    body = wire.encode(view)
    assert crowd.messages.wanted(peer, body_digest(body)) == MessageBody(body)
    assert crowd.messages.wanted(peer, body_digest(body)) is None, "once is enough"


@pytest.mark.parametrize("why", ["few", "all new", "not reachable", "a relay"])
def test_a_newcomer_whom_no_member_can_serve_gets_its_view_from_the_master(why: str) -> None:
    crowd = Crowd()
    view = View(7, some_members(TRIED_MAX, reachable=why != "not reachable"), 0)
    newcomer = view.members[-1].peer
    if why == "all new":
        crowd.new = {member.peer for member in view.members}
    if why == "a relay":
        crowd.gone = {newcomer}
    count = CROWD_MIN - 1 if why == "few" else CROWD_MIN
    assert crowd.messages.instead_of(view, newcomer, count) is view


def test_a_message_that_is_long_over_is_not_kept() -> None:
    crowd = Crowd()
    change = a_change()
    crowd.send(change)
    for number in range(3, 3 + crowd_messages.KEPT_MAX):
        crowd.send(a_change(number))
    assert crowd.messages.wanted("20", body_digest(wire.encode(change))) is None


# ---------------------------------------------------------------- one member


class Links:
    """A hub whose links record what is sent."""

    def __init__(self, *, lost: bool = False) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.introduced: list[MemberInfo] = []
        self._lost = lost

    async def link(self, peer: str, _deadline_s: float) -> Any:
        if self._lost:
            raise PeerLostError(peer, "it is gone")
        links = self

        class Link:
            async def send(self, message: Message) -> None:
                links.sent.append((peer, message))

        return Link()

    def introduce(self, members: Sequence[MemberInfo]) -> None:
        self.introduced = list(members)


class Member:
    def __init__(self, nursery: trio.Nursery, links: Links) -> None:
        self.told: list[Message] = []
        self.came_count = 0
        self.messages = AnnouncedMessages(
            links,  # type: ignore[arg-type]
            start=nursery.start_soon,
            tell=self.told.append,
            came=self._came,
        )

    def _came(self) -> None:
        self.came_count += 1


BODY = wire.encode(a_change())
DIGEST = body_digest(BODY)
ANNOUNCED = MessageAnnounced(DIGEST, 0)


async def test_the_source_is_asked_and_then_the_master() -> None:
    links = Links()
    async with trio.open_nursery() as nursery:
        member = Member(nursery, links)
        member.messages.want(ANNOUNCED, "a")
        member.messages.want(ANNOUNCED, "a")
        await trio.sleep(SOURCE_S / 2)
        assert links.sent == [("a", MessageWanted(DIGEST))]
        assert member.told == []
        await trio.sleep(SOURCE_S)
        assert member.told == [MessageWanted(DIGEST)]
        member.messages.receive(MessageBody(BODY))
        assert (member.messages.body(DIGEST), member.came_count) == (BODY, 1)
        await trio.sleep(2 * SOURCE_S)
        assert len(member.told) == 1


@pytest.mark.parametrize("source", [None, "a"])
async def test_without_a_source_the_master_is_asked_at_once(source: str | None) -> None:
    async with trio.open_nursery() as nursery:
        member = Member(nursery, Links(lost=True))
        member.messages.want(ANNOUNCED, source)
        await trio.sleep(0.01)
        assert member.told == [MessageWanted(DIGEST)]


async def test_what_nobody_wants_is_dropped() -> None:
    async with trio.open_nursery() as nursery:
        member = Member(nursery, Links())
        member.messages.want(ANNOUNCED, "a")
        member.messages.receive(MessageBody(wire.encode(a_change(7))))
        member.messages.receive(MessageBody(b"anything"))
        assert (member.messages.body(DIGEST), member.came_count) == (None, 0)
        member.messages.forget()
        member.messages.receive(MessageBody(BODY))
        assert member.came_count == 0
        await trio.sleep(2 * SOURCE_S)
        assert member.told == [], "the session for which it was wanted is over"


@pytest.mark.parametrize("passed", [False, True])
async def test_others_are_served_at_once_or_when_it_comes(passed: bool) -> None:
    links = Links()
    async with trio.open_nursery() as nursery:
        member = Member(nursery, links)
        member.messages.asked("early", MessageWanted(DIGEST))
        await trio.sleep(0.01)
        assert links.sent == []
        if passed:
            member.messages.want(ANNOUNCED, None)
            member.messages.receive(MessageBody(BODY))
        else:
            member.messages.keep(a_change())
        member.messages.asked("late", MessageWanted(DIGEST))
        await trio.sleep(0.01)
        assert links.sent == [("early", MessageBody(BODY)), ("late", MessageBody(BODY))]


@pytest.mark.parametrize("early", [False, True], ids=["it has the view", "the view comes later"])
async def test_a_newcomer_is_sent_the_view_that_it_asks_for(early: bool) -> None:
    links, view = Links(), View(7, some_members(9), 0)
    body = wire.encode(view)
    wanted = MessageWanted(body_digest(body), 7)
    async with trio.open_nursery() as nursery:
        member = Member(nursery, links)
        if early:
            member.messages.asked("new", wanted)
        for number in range(1, 8):
            member.messages.note_view(View(number, view.members, 0))
        if not early:
            member.messages.asked("new", wanted)
        member.messages.asked("another", wanted)
        member.messages.asked("liar", MessageWanted(bytes(32), 7))
        await trio.sleep(0.01)
        assert Counter(links.sent) == Counter(
            [("new", MessageBody(body)), ("another", MessageBody(body))]
        )
        for number in range(8, 8 + 3 * VIEWS_MAX):
            member.messages.note_view(View(number, view.members, 0))
        assert len(member.messages._views) == VIEWS_MAX


async def test_a_newcomer_asks_for_its_first_view_longer() -> None:
    links, members = Links(), some_members(3)
    announced = MessageAnnounced(DIGEST, 0, FirstView(7, members[0], members[2]))
    async with trio.open_nursery() as nursery:
        member = Member(nursery, links)
        member.messages.want(announced, None)
        await trio.sleep(FIRST_VIEW_S - 0.1)
        assert links.introduced == [members[0], members[2]]
        assert links.sent == [(members[0].peer, MessageWanted(DIGEST, 7))]
        assert member.told == []
        await trio.sleep(0.2)
        assert member.told == [MessageWanted(DIGEST, 7)]
        member.messages.forget()


async def test_neither_questions_nor_messages_pile_up() -> None:
    links = Links()
    async with trio.open_nursery() as nursery:
        member = Member(nursery, links)
        for each in range(3 * ASKED_MAX):
            member.messages.asked("flood", MessageWanted(bytes([each]) * 32))
        for _ in range(3 * ASKERS_MAX):
            member.messages.asked("flood", MessageWanted(DIGEST))
        for number in range(2, 2 + 3 * KEPT_MAX):
            member.messages.keep(a_change(number))
        await trio.sleep(0.01)
        assert len(links.sent) <= ASKERS_MAX
        member.messages.asked("late", MessageWanted(DIGEST))
        await trio.sleep(0.01)
        assert ("late", MessageBody(BODY)) not in links.sent, "the oldest is forgotten"


# ---------------------------------------------------------------- whole runs


@pytest.fixture
def small_crowds(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let one member get each order and view, and each other one ask the one before; count what is sent."""
    for name, value in (("CROWD_MIN", 1), ("ROOTS", 1), ("FAN", 1), ("BODY_BYTES_MIN", 0)):
        monkeypatch.setattr(crowd_messages, name, value)
    sent: Counter[str] = Counter()
    instead_of = CrowdMessages.instead_of

    def counted(self: CrowdMessages, message: Message, peer: str, crowd: int) -> Message:
        told = instead_of(self, message, peer, crowd)
        sent[type(told).__name__] += 1
        if isinstance(told, MessageAnnounced) and told.first_view is not None:
            sent["FirstView"] += 1
        return told

    monkeypatch.setattr(CrowdMessages, "instead_of", counted)
    return sent


@pytest.mark.fault(
    "any fault while members pass orders on", "a digest of the master's", "as without"
)
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_runs_survive_faults_when_members_pass_everything_on(
    first: int, small_crowds: Counter[str]
) -> None:
    for seed in range(first, first + 10):
        run_scenario(Scenario.of(seed))
    assert small_crowds["MessageAnnounced"] > small_crowds["BriefReduce"] > 0
    assert small_crowds["FirstView"] > 5


@pytest.mark.fault(
    "a member passes nothing on", "its time is over", "the master sends it; it serves nobody then"
)
async def test_a_member_that_passes_nothing_on_stops_nobody(
    small_crowds: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_swarm("abcd") as swarm:
        monkeypatch.setattr(swarm.peers["a"].service.announced, "asked", lambda *_: None)
        monkeypatch.setattr(swarm.peers["b"].service.announced, "asked", lambda *_: None)
        before = swarm.committed
        await settled(swarm, "abcd", more=8)
        assert small_crowds["MessageBody"] >= 2
        assert swarm.committed >= before + 8
        assert {sim.lives for sim in swarm.peers.values()} == {1}


@pytest.mark.fault("a member passes something else on", "the digest", "as if it passed nothing on")
async def test_nobody_can_pass_on_something_else(
    small_crowds: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_swarm("abcd") as swarm:
        forged = wire.encode(a_change())
        for name in "abcd":
            messages = swarm.peers[name].service.announced

            def lie(
                peer: str, _message: MessageWanted, messages: AnnouncedMessages = messages
            ) -> None:
                messages._start(messages._send, peer, forged)

            monkeypatch.setattr(messages, "asked", lie)
        await settled(swarm, "abcd", more=8)
        assert small_crowds["MessageBody"] >= 1
        assert {sim.lives for sim in swarm.peers.values()} == {1}
