"""Logs of peers, fetched by the production master from production peers."""

from __future__ import annotations

import pytest
import trio

from holdfast.daemon.log_ring import LogRing
from holdfast.daemon.master import log_requests as module
from holdfast.daemon.web.log_reading import LogQuery, NoLogError, PeerLog
from holdfast.protocol.messages import LogRequest, LogTail, Message, SentLine
from holdfast.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm


def keep_log(swarm: Swarm, name: str, *lines: str) -> None:
    swarm.peers[name].service.config.log = ring = LogRing(trio.current_time)
    ring.add("trainer", lines)


async def fetched(swarm: Swarm, peer: str, lines: int = 100) -> PeerLog:
    assert swarm.master is not None
    return await swarm.master.log_requests.fetch(LogQuery(peer, lines))


async def refused(swarm: Swarm, peer: str) -> tuple[int, str]:
    with pytest.raises(NoLogError) as raised:
        await fetched(swarm, peer)
    return raised.value.status, str(raised.value)


async def test_each_members_log_is_its_own() -> None:
    async with a_swarm("abc") as swarm:
        keep_log(swarm, "a", "one", "two")
        keep_log(swarm, "b", "three")
        found = await fetched(swarm, "a")
        assert (found.peer, [line.text for line in found.lines]) == ("a", ["one", "two"])
        assert {line.source for line in found.lines} == {"trainer"}
        assert [line.text for line in (await fetched(swarm, "a", 1)).lines] == ["two"]
        by_id = await fetched(swarm, swarm.peers["b"].peer[:12])
        assert [line.text for line in by_id.lines] == ["three"]
        assert await refused(swarm, "c") == (
            404,
            "c: its owner keeps its log private (`holdfast join --private-log`)",
        )
        status, text = await refused(swarm, "nobody")
        assert (status, text.startswith("no member is called 'nobody'")) == (404, True)
        assert (await refused(swarm, ""))[0] == 404


async def test_a_member_that_does_not_answer_is_waited_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REQUESTS_MAX", 2)
    async with a_swarm("abc") as swarm:
        assert swarm.master is not None
        requests = swarm.master.log_requests
        asked: list[tuple[str, Message]] = []
        monkeypatch.setattr(requests, "_tell", lambda peer, what: asked.append((peer, what)))
        answers: list[str] = []

        async def ask(peer: str) -> None:
            try:
                answers.append((await fetched(swarm, peer)).lines[0].text)
            except NoLogError as error:
                answers.append(f"{error.status} {error}")

        a, b = (swarm.peers[name].peer for name in "ab")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "b")
            while len(asked) < 2:
                await trio.sleep(0.01)
            assert await refused(swarm, "c") == (503, "2 logs are being fetched already")
            numbers = {peer: what.number for peer, what in asked if isinstance(what, LogRequest)}
            line = SentLine(1.0, True, "right")
            requests.hear(b, LogTail(numbers[a], (line,)))  # to the question of another
            requests.hear(a, LogTail(numbers[a] + 9, (line,)))  # to none
            requests.hear(a, LogTail(numbers[a], (line,)))
            requests.hear(a, LogTail(numbers[a], (line, line)))  # again
        assert answers == ["right", "503 b has not answered within 10 s"]
