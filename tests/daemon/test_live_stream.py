"""The live stream in virtual time: its frames, its cost without listeners, and slow listeners."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from starlette.types import Message

from holdfast.daemon.web import live_stream as module
from holdfast.daemon.web.live_stream import HEARTBEAT_S, LOOK_S, SEND_S, LiveStream
from tests.background import background


class Source:
    """A daemon's status, and the count of its calls."""

    def __init__(self) -> None:
        self.value: object = 0
        self.asked_count = 0
        self.looked_count = 0
        self.live = LiveStream(self.status, self.stamp)

    def status(self) -> object:
        self.asked_count += 1
        return {"value": self.value}

    def stamp(self) -> object:
        self.looked_count += 1
        return self.value


class Browser:
    """A browser that has the page open."""

    def __init__(self, live: LiveStream, nursery: trio.Nursery) -> None:
        self.status = 0
        self.chunks: list[bytes] = []
        self.ended = trio.Event()
        self.reads = trio.Event()
        self.reads.set()
        self._gone = trio.Event()
        nursery.start_soon(self._run, live)

    async def _run(self, live: LiveStream) -> None:
        await live({"type": "http", "method": "GET"}, self._receive, self._send)
        self.ended.set()

    async def _receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.chunks.append(message.get("body", b""))

    def stop_reading(self) -> None:
        self.reads = trio.Event()

    def leave(self) -> None:
        self._gone.set()

    def heard(self, kind: str) -> list[Any]:
        """Return the data of all frames of this kind."""
        frames = b"".join(self.chunks).decode().split("\n\n")
        start = f"event: {kind}\ndata: "
        return [json.loads(frame.removeprefix(start)) for frame in frames if start in frame]


@asynccontextmanager
async def a_stream() -> AsyncIterator[tuple[Source, trio.Nursery]]:
    source = Source()
    async with background() as nursery:
        nursery.start_soon(source.live.run)
        yield source, nursery


async def test_a_listener_gets_the_status_at_once_and_changes_every_second() -> None:
    async with a_stream() as (source, nursery):
        browser = Browser(source.live, nursery)
        await trio.sleep(0.01)
        assert (browser.status, browser.heard("status")) == (200, [{"value": 0}])
        assert browser.chunks[0].startswith(b"retry: ")
        for value in range(1, 101):  # a change every 50 ms
            source.value = value
            await trio.sleep(0.05)
        heard = [each["value"] for each in browser.heard("status")]
        assert 4 <= len(heard) - 1 <= 6
        await trio.sleep(2 * LOOK_S)
        assert browser.heard("status")[-1] == {"value": 100}


async def test_a_frame_is_encoded_once_for_all_listeners() -> None:
    async with a_stream() as (source, nursery):
        browsers = [Browser(source.live, nursery) for _ in range(20)]
        await trio.sleep(0.01)
        source.value = 1
        source.live.publish("log", {"text": "hello"})
        await trio.sleep(3 * LOOK_S)
        assert source.asked_count == 2, "once as they came, once for the change"
        for browser in browsers:
            assert browser.heard("status") == [{"value": 0}, {"value": 1}]
            assert browser.heard("log") == [{"text": "hello"}]


async def test_a_new_listener_takes_no_news_away_from_others() -> None:
    async with a_stream() as (source, nursery):
        first = Browser(source.live, nursery)
        await trio.sleep(1.5 * LOOK_S)
        source.value = 1
        Browser(source.live, nursery)  # puts the status into words, for itself
        await trio.sleep(2 * LOOK_S)
        assert first.heard("status") == [{"value": 0}, {"value": 1}]


async def test_nothing_is_encoded_without_listeners() -> None:
    async with a_stream() as (source, nursery):
        source.live.publish("log", {"text": "nobody hears"})
        await trio.sleep(1_000)
        assert (source.looked_count, source.asked_count) == (0, 0)
        browser = Browser(source.live, nursery)
        await trio.sleep(1)
        browser.leave()
        await browser.ended.wait()
        looked_count = source.looked_count
        await trio.sleep(1_000)
        assert source.looked_count <= looked_count + 2
        assert not source.live._listeners
        assert browser.heard("log") == []


async def test_an_idle_stream_sends_heartbeats() -> None:
    async with a_stream() as (source, nursery):
        browser = Browser(source.live, nursery)
        await trio.sleep(10.5 * HEARTBEAT_S)
        assert source.asked_count == 1
        assert len(browser.chunks) == 11
        assert all(chunk.startswith(b":") for chunk in browser.chunks[1:])


async def test_a_slow_listener_gets_the_newest_status_and_delays_no_other() -> None:
    async with a_stream() as (source, nursery):
        slow, other = Browser(source.live, nursery), Browser(source.live, nursery)
        await trio.sleep(0.01)
        slow.stop_reading()
        for value in range(1, 11):
            source.value = value
            source.live.publish("log", {"number": value})
            await trio.sleep(2 * LOOK_S)
        assert [each["value"] for each in other.heard("status")] == list(range(11))
        slow.reads.set()
        await trio.sleep(1)
        statuses = [each["value"] for each in slow.heard("status")]
        assert statuses == [0, 10], "the newest of all that it missed"
        assert [each["number"] for each in slow.heard("log")] == list(range(1, 11))


@pytest.mark.fault(
    "a page stops reading",
    "its queue, the time a frame takes",
    "it is hung up on; nobody waits for it",
)
async def test_who_leaves_too_much_lying_is_hung_up_on() -> None:
    async with a_stream() as (source, nursery):
        slow, other = Browser(source.live, nursery), Browser(source.live, nursery)
        await trio.sleep(0.01)
        slow.stop_reading()
        for number in range(module.WAITING_MAX + 2):
            source.live.publish("log", {"number": number})
            await trio.sleep(0.001)
        await trio.sleep(1)
        slow.reads.set()
        await slow.ended.wait()
        assert not other.ended.is_set()
        assert len(other.heard("log")) == module.WAITING_MAX + 2


@pytest.mark.fault("a page stops reading")
async def test_who_takes_nothing_at_all_is_given_up() -> None:
    async with a_stream() as (source, nursery):
        gone = Browser(source.live, nursery)
        await trio.sleep(0.01)
        gone.stop_reading()
        await trio.sleep(HEARTBEAT_S + 3 * SEND_S)
        assert gone.ended.is_set()
        assert not source.live._listeners


async def test_listeners_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTENERS_MAX", 2)
    async with a_stream() as (source, nursery):
        first = [Browser(source.live, nursery) for _ in range(2)]
        await trio.sleep(0.01)
        third = Browser(source.live, nursery)
        await third.ended.wait()
        assert third.status == 503
        assert "connected" in json.loads(third.chunks[0])["error"]
        first[0].leave()
        await first[0].ended.wait()
        fourth = Browser(source.live, nursery)
        await trio.sleep(0.01)
        assert fourth.status == 200
