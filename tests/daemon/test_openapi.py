"""The API's description against real daemons: their routes, and the form of every answer."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import jsonschema
import openapi_spec_validator
import pytest
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

import holdfast
from holdfast.daemon.status_records import FellowRow, LinkRow, PeerStatus
from holdfast.daemon.web import http_server
from holdfast.daemon.web.api_description import api_description
from holdfast.daemon.web.app import make_app
from holdfast.daemon.web.prometheus import StatusCollector
from holdfast.membership.shared.event_kind import EventKind
from tests.background import background
from tests.daemon.loopback import a_master, a_peer
from tests.plain import peer_status

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT: dict[str, Any] = api_description()
GRAFANA = ROOT / "docker" / "grafana" / "holdfast.json"
SPEC = '[run]\nname = "described"\nrounds = 5\n'
WRONG_LINES = ("column=name", "column=loss&figure=accuracy", "column=loss,step")


class Daemon:
    """A daemon that runs in this process, on loopback."""

    def __init__(self, kind: str, state: Path, routes: list[Route]) -> None:
        control = json.loads((state / "control.json").read_text())
        self.kind = kind
        self.url: str = control["url"]
        self.authorised = {"authorization": f"Bearer {control['token']}"}
        self.routes = {
            (method, route.path.replace(":path", ""))
            for route in routes
            for method in (route.methods or set()) - {"HEAD"}
        }

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=120.0) as client:
            return await client.request(method, f"{self.url}{path}", **more)

    async def act(self, name: str, body: object) -> httpx.Response:
        return await self.ask("POST", f"/api/{name}", json=body, headers=self.authorised)


@asynccontextmanager
async def daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Daemon, Daemon]]:
    """Run a master, and a peer that has attached to it."""
    made: list[Any] = []

    def noted(**options: Any) -> Any:
        made.append(make_app(**options))
        return made[-1]

    monkeypatch.setattr(http_server, "make_app", noted)
    async with background() as nursery:
        master = a_master(tmp_path, SPEC)
        nursery.start_soon(master.run)
        await appears(tmp_path / "master" / "control.json")
        nursery.start_soon((await a_peer(master, tmp_path / "peer")).run)
        await appears(tmp_path / "peer" / "control.json")
        found = [
            Daemon(kind, tmp_path / kind, app.app.app.routes)
            for kind, app in zip(("master", "peer"), made, strict=True)
        ]
        await until_ready(found[1])
        yield found[0], found[1]


async def appears(path: Path) -> None:
    while not path.exists() or not path.read_text():
        await trio.sleep(0.02)


async def until_ready(daemon: Daemon) -> None:
    while (await daemon.ask("GET", "/readyz")).status_code != 200:
        await trio.sleep(0.05)


def operations(kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the operations described for this kind of daemon."""
    return {
        (method.upper(), path): operation
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
        if kind in operation["tags"]
    }


def check(operation: dict[str, Any], response: httpx.Response) -> None:
    """Check that the answer is described, and has the described form."""
    described = operation["responses"].get(str(response.status_code))
    assert described is not None, f"{response.url}: {response.status_code} {response.text}"
    if "content" not in described:
        return
    ((media_type, content),) = described["content"].items()
    assert response.headers["content-type"].split(";")[0] == media_type
    if media_type == "application/json":
        check_schema(content["schema"], response.json())


def check_schema(schema: dict[str, Any], value: object) -> None:
    jsonschema.Draft202012Validator({**DOCUMENT, **schema}).validate(value)


async def first_frames(daemon: Daemon, until: str) -> str:
    """Read the live stream up to a frame."""
    place = httpx.URL(daemon.url)
    assert place.port is not None
    stream = await trio.open_tcp_stream(place.host, place.port)
    text = ""
    async with stream:
        # Of version 1.0, so that the answer comes as it is, not in chunks.
        await stream.send_all(b"GET /api/live HTTP/1.0\r\nhost: localhost\r\n\r\n")
        async for part in stream:
            text += part.decode()
            if until in text:
                break
    head, _, body = text.partition("\r\n\r\n")
    assert "content-type: text/event-stream; charset=utf-8" in head
    return body


def test_the_description_is_valid() -> None:
    openapi_spec_validator.validate(DOCUMENT)
    assert DOCUMENT["info"]["version"] == holdfast.__version__
    kinds = [kind.value for kind in EventKind]
    assert DOCUMENT["components"]["schemas"]["EventKind"]["enum"] == kinds


@pytest.mark.slow
@pytest.mark.real_time
async def test_daemons_answer_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with daemons(tmp_path, monkeypatch) as both:
        master, peer = both
        await master.act("invite", {})
        for daemon in both:
            described = operations(daemon.kind)
            assert daemon.routes == set(described), "what is served is described, and no more"
            for (method, path), operation in described.items():
                if path == "/api/live":
                    continue
                if method == "GET":
                    here = path.replace("{name}", "nothing")
                    first = await daemon.ask("GET", here)
                    check(operation, first)
                    more: dict[str, Any] = {}
                    if "security" in operation:
                        assert first.status_code == 401, path
                        more = {"headers": daemon.authorised}
                        check(operation, await daemon.ask("GET", here, **more))
                    if operation.get("parameters") and "/api/" in path:
                        nonsense = await daemon.ask("GET", f"{path}?nonsense=1", **more)
                        check(operation, nonsense)
                        assert nonsense.status_code == 400
                    continue
                response = await daemon.ask("POST", path, json={})
                assert response.status_code == 401, path
                check(operation, response)
                response = await daemon.act(path.removeprefix("/api/"), [])
                assert response.status_code == 400, path
                check(operation, response)
        for name, body, status in (
            ("invite", {"uses": 2}, 200),
            ("invite", {"uses": 0}, 422),
            ("withdraw", {"id": "nobody"}, 422),
            ("kick", {"peer": "nobody"}, 422),
            ("demote", {"peer": "nobody"}, 422),
            ("pause", {}, 200),
            ("resume", {}, 200),
            ("finish", {}, 422),
        ):
            response = await master.act(name, body)
            assert response.status_code == status, (name, response.text)
            check(operations("master")["POST", f"/api/{name}"], response)
        while (await master.ask("GET", "/api/member?peer=alder")).status_code != 200:
            await trio.sleep(0.05)  # until its first point is written
        for daemon, path, status in (
            *((peer, "/api/logs?lines=3", 200), (peer, "/api/logs?lines=0", 400)),
            *((master, f"/api/lines?{query}", 200) for query in ("column=loss", "figure=accuracy")),
            *((master, f"/api/lines?{query}", 400) for query in WRONG_LINES),
            *((master, "/api/member?peer=alder", 200), (master, "/api/member?peer=nobody", 404)),
            *((master, f"/api/events?kind={kinds}", 200) for kinds in ("join,route", "")),
            (master, "/api/events?kind=join,joined", 400),
        ):
            response = await daemon.ask("GET", path, headers=daemon.authorised)
            assert response.status_code == status, (path, response.text)
            check(operations(daemon.kind)["GET", path.partition("?")[0]], response)
        assert "no such kind: 'joined'; there are run, join," in response.json()["error"]
        now = await master.ask("GET", "/api/status?past=0")
        check_schema({"$ref": "#/components/schemas/MasterStatus"}, now.json())
        assert now.json()["members"][0]["software"] == holdfast.__version__
        check(operations("peer")["POST", "/api/retry"], await peer.act("retry", {}))
        response = await master.act("demote", {"peer": "alder", "back": True})
        check(operations("master")["POST", "/api/demote"], response)
        response = await master.act("kick", {"peer": "alder"})
        check(operations("master")["POST", "/api/kick"], response)


@pytest.mark.real_time
async def test_the_live_stream_carries_the_status_and_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemons(tmp_path, monkeypatch) as (master, peer):
        heard: dict[str, str] = {}

        async def listen(daemon: Daemon, until: str) -> None:
            heard[daemon.kind] = await first_frames(daemon, until)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen, master, '"text":"paused"')
            nursery.start_soon(listen, peer, "event: status\ndata: {")
            await trio.sleep(0.3)
            await master.act("pause", {})
        kinds = {
            "status": "MasterStatus",
            "log": "PastEvent",
            "point": "Point",
            "sample": "MemberPoint",
        }
        frames = [frame.split("\n") for frame in heard["master"].split("\n\n") if "data" in frame]
        said = [(frame[0].removeprefix("event: "), frame[1]) for frame in frames]
        assert said[0][0] == "status"
        assert ("log", True) in {(kind, '"paused"' in data) for kind, data in said}
        for kind, data in said[:-1]:
            value = json.loads(data.removeprefix("data: "))
            for each in value if kind == "sample" else [value]:
                check_schema({"$ref": f"#/components/schemas/{kinds[kind]}"}, each)


@pytest.mark.real_time
async def test_metrics_are_valid_and_the_grafana_panels_use_existing_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemons(tmp_path, monkeypatch) as both:
        texts = [(await daemon.ask("GET", "/metrics")).text for daemon in both]
    found: dict[str, set[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.setdefault(name, set()).update(*(sample.labels for sample in family.samples))
            assert family.documentation
    assert found["holdfast_member_step"] >= {"run", "peer", "name"}
    assert found["holdfast_peer_step"] >= {"run", "peer", "name"}
    assert found["holdfast_figure"] == set(), "nothing was logged"
    assert "holdfast_info" in found
    asked = metrics_asked_for(json.loads(GRAFANA.read_text()))
    assert len(asked) > 10
    assert asked <= set(found)


def families_of(status: PeerStatus) -> dict[str, Metric]:
    """Return what Prometheus reads of a status, by name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(lambda: status))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {each.name: each for each in families}


def test_what_tcp_sent_again_is_a_counter_of_the_peer_and_of_each_link() -> None:
    def link(peer: str, **changes: Any) -> LinkRow:
        row = LinkRow(
            peer=peer,
            lanes=3,
            congestion=("bbr",),
            round_trip_s=0.25,
            sent_bytes=1_000,
            retransmitted_bytes=40,
        )
        return attrs.evolve(row, **changes)

    told = attrs.evolve(
        peer_status("a" * 32, "alder"),
        bulk_retransmitted_bytes=90,
        links=(link("b" * 32), link("c" * 32, round_trip_s=None, retransmitted_bytes=None)),
        members=(FellowRow(peer="b" * 32, name="birch", role="contributor"),),
    )
    found = families_of(told)
    again = found["holdfast_peer_retransmitted_bytes"]
    assert again.type == "counter"
    assert [sample.value for sample in again.samples] == [90]
    links = {
        name.removeprefix("holdfast_peer_link_"): {
            sample.labels["to_name"]: sample.value for sample in family.samples
        }
        for name, family in found.items()
        if name.startswith("holdfast_peer_link_")
    }
    assert links == {
        "lanes": {"birch": 3, "": 3},
        "round_trip_seconds": {"birch": 0.25},
        "sent_bytes": {"birch": 1_000, "": 1_000},
        "retransmitted_bytes": {"birch": 40},
    }
    assert found["holdfast_peer_link_retransmitted_bytes"].samples[0].labels["to"] == "b" * 32


def test_figures_of_run_log_are_one_family() -> None:
    """Names are the script's own, so they are labels: a metric's name could not hold them."""
    status = peer_status("a" * 32, "alder")
    figures = {"eval/accuracy": 0.5, 'a "quoted" name': 2.0}
    told = attrs.evolve(status, metrics=figures)
    found = families_of(told)["holdfast_figure"]
    assert {sample.labels["figure"]: sample.value for sample in found.samples} == figures
    for sample in found.samples:
        assert (sample.labels["member"], sample.labels["peer"]) == ("alder", "a" * 32)


def metrics_asked_for(value: object) -> set[str]:
    """Return the metric names in all queries of a Grafana dashboard."""
    if isinstance(value, list):
        return set().union(*map(metrics_asked_for, value))
    if not isinstance(value, dict):
        return set()
    names = set().union(*map(metrics_asked_for, value.values()))
    for key in ("expr", "query", "definition"):
        if isinstance(value.get(key), str):
            names |= set(re.findall(r"\b(?:holdfast|process)_[a-z_]+", value[key]))
    return names
