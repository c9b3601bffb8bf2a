"""Host names of the HTTP server: its own are answered, names that a foreigner could give it are
not.
"""

from __future__ import annotations

import socket

import httpx
import pytest
from starlette.types import ASGIApp

from holdfast.daemon.web.app import HEADERS, make_app, read_route
from holdfast.daemon.web.host_names import MISDIRECTED, HostNames

HERE = "192.0.2.7"  # where the connection came in


def app(*named: str, bound: str = "127.0.0.1") -> ASGIApp:
    return make_app(
        token="t", actions={}, routes=[read_route("status", dict)], names=HostNames(bound, named)
    )


async def ask(app: ASGIApp, host: str, path: str = "/api/status") -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{HERE}:80") as client:
        return await client.get(path, headers={"host": host})


FOREIGN = (
    *("evil.example", "evil.example:29780", "127.0.0.1.evil.example", "localhost.evil.example"),
    "notlocalhost",
    "203.0.113.9",  # not where the connection came in
    "[2001:db8::9]:80",
    "0.0.0.0",  # it is bound to loopback
    *("", "two words", "localhost:port", "[::1", "localhost, evil.example", "a" * 10_000),
    "<script>",
)
PATHS = ("/", "/healthz", "/metrics", "/none")


@pytest.mark.parametrize(
    ("host", "path"),
    [(host, "/api/status") for host in FOREIGN] + [("evil.example", path) for path in PATHS],
)
async def test_a_foreign_name_is_refused_with_a_sentence(host: str, path: str) -> None:
    response = await ask(app(), host, path)
    assert response.status_code == MISDIRECTED
    assert set(response.json()) == {"error", "hint"}
    assert "--http-host" in response.json()["hint"]
    assert len(response.content) < 1_000
    assert all(response.headers[name] == value for name, value in HEADERS.items())


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:29780",
        "localhost.",
        "localhost:1",  # the end of a tunnel
        "run.localhost",
        "127.0.0.1",
        "127.9.9.9:8080",
        "[::1]",
        "[::1]:29780",
        HERE,
        f"{HERE}:29780",
        f"[::ffff:{HERE}]:29780",
        socket.gethostname(),
        f"{socket.gethostname().partition('.')[0]}.local:29780",
    ],
)
async def test_requests_for_own_names_are_answered(host: str) -> None:
    assert (await ask(app(), host)).status_code == 200


@pytest.mark.parametrize("host", ["train.example.org", "TRAIN.example.org:443", "203.0.113.9"])
async def test_the_operator_can_add_names(host: str) -> None:
    named = app("train.Example.org", "203.0.113.9")
    assert (await ask(named, host)).status_code == 200
    assert (await ask(named, f"other.{host}")).status_code == MISDIRECTED


@pytest.mark.parametrize(
    ("bound", "host"), [("0.0.0.0", "0.0.0.0:29780"), ("::", "[::]:29780"), ("box.lan", "box.lan")]
)
async def test_requests_for_the_bound_and_printed_address_are_answered(
    bound: str, host: str
) -> None:
    assert (await ask(app(bound=bound), host)).status_code == 200
