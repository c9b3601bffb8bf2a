"""The HTTP server: authorization, invalid requests, and its socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.daemon.web import connections
from holdfast.daemon.web.app import BODY_BYTES_MAX, HEADERS, Json, make_app, read_route
from holdfast.daemon.web.connections import Connections
from holdfast.daemon.web.http_server import bind_http
from holdfast.daemon.web.page_files import PAGES, PageFiles
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError
from tests.background import background

TOKEN = "the-token"
LARGE_BYTES = 20_000_000  # more than the kernel holds
PADDING_BYTES = BODY_BYTES_MAX - len(b'{"a": ""}')
AUTHORISED = {"authorization": f"Bearer {TOKEN}"}


class Things:
    """An application with one read and two actions, and a list of the actions done."""

    def __init__(self, pages: PageFiles = PAGES) -> None:
        self.done: list[Json] = []
        self.app = make_app(
            token=TOKEN,
            routes=[read_route("status", lambda: {"state": "training", "loss": None})],
            actions={"note": self.note, "refuse": self.refuse},
            pages=pages,
        )

    async def note(self, body: Json) -> Json:
        self.done.append(body)
        return {"noted": body}

    async def refuse(self, _body: Json) -> Json:
        raise UserError("no such member", exit_code=ExitCode.USAGE, hint="look at the list")

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, **more)


@pytest.mark.parametrize(
    ("client", "told"),
    [
        *(("127.0.0.1", True), ("127.8.8.8", True), ("::1", True)),
        *(("10.0.0.7", False), ("2001:db8::1", False), ("testclient", False)),
    ],
)
async def test_only_clients_on_this_machine_learn_where_the_token_is(
    client: str, told: bool, tmp_path: Path
) -> None:
    file = tmp_path / "control.json"
    app = make_app(token=TOKEN, actions={}, token_file=file)
    transport = httpx.ASGITransport(app=app, client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asker:
        answer = await asker.get("/api/token-file")
    assert answer.json() == {"path": str(file) if told else None}
    assert TOKEN not in answer.text


async def test_reading_needs_no_token() -> None:
    things = Things()
    response = await things.ask("GET", "/api/status")
    assert (response.status_code, response.json()) == (200, {"state": "training", "loss": None})
    assert (await things.ask("GET", "/healthz")).json() == {"ok": True}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": TOKEN},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"bearer {TOKEN}"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": "Bearer \xe9".encode("latin-1")},
        {"cookie": f"token={TOKEN}"},
    ],
)
async def test_an_action_without_the_token_is_refused_and_not_done(headers: Any) -> None:
    things = Things()
    response = await things.ask("POST", "/api/note", json={"a": 1}, headers=headers)
    assert response.status_code == 401
    assert "token" in response.json()["error"]
    assert TOKEN not in response.text
    assert things.done == []


async def test_an_action_with_the_token_is_done_once() -> None:
    things = Things()
    response = await things.ask("POST", "/api/note", json={"a": 1}, headers=AUTHORISED)
    assert (response.status_code, response.json()) == (200, {"noted": {"a": 1}})
    await things.ask("POST", "/api/note", headers=AUTHORISED)
    assert things.done == [{"a": 1}, {}], "no body is an empty one"


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"1", b'"x"', b"null", b"\xff\xfe", b"{'a': 1}", b"[" * 60_000]
)
async def test_a_body_that_is_no_json_object_is_refused(content: bytes) -> None:
    things = Things()
    response = await things.ask("POST", "/api/note", content=content, headers=AUTHORISED)
    assert response.status_code == 400
    assert "JSON object" in response.json()["error"]
    assert things.done == []


async def test_a_user_error_comes_back_with_hint_and_exit_code() -> None:
    response = await Things().ask("POST", "/api/refuse", json={}, headers=AUTHORISED)
    assert response.status_code == 422
    assert response.json() == {
        "error": "no such member",
        "hint": "look at the list",
        "exit_code": 2,
    }


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/nonsense", 404),
        ("GET", "/api/", 404),
        ("GET", "/../../etc/passwd", 404),
        ("POST", "/api/status", 405),
        ("GET", "/api/note", 405),
        ("DELETE", "/api/note", 405),
    ],
)
async def test_other_paths_and_methods(method: str, path: str, status: int) -> None:
    things = Things()
    assert (await things.ask(method, path, headers=AUTHORISED)).status_code == status
    assert things.done == []


# ---------------------------------------------------------------- a real socket


@pytest.mark.real_time
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_it_serves_at_the_url_it_gives(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 1_000.0)
    listener, url = bind_http(Address(host, 0))
    things = Things()
    async with background() as nursery:
        nursery.start_soon(Connections(things.app).serve, listener)
        async with httpx.AsyncClient() as client:
            response = await client.get(f"{url}/api/status")
            assert response.json()["state"] == "training"
            # The limit of a body, exactly.
            fits = json.dumps({"a": ""}).encode().replace(b'""', b'"%s"' % (b"x" * PADDING_BYTES))
            assert len(fits) == BODY_BYTES_MAX
            response = await client.post(f"{url}/api/note", content=fits, headers=AUTHORISED)
            assert response.status_code == 200
            over = fits + b" "
            response = await client.post(f"{url}/api/note", content=over, headers=AUTHORISED)
            assert response.status_code == 413
            assert len(things.done) == 1
            for token, status in ((TOKEN, b"413"), ("another", b"401")):
                assert (await _send_first(url, token)).split()[1] == status
    with pytest.raises(OSError, match="refused"), socket.create_connection(_place(url)):
        pass


async def _send_first(url: str, token: str) -> bytes:
    """Return the answer to a client that reads nothing before it has sent a large body."""
    head = f"POST /api/note HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
    async with await trio.open_tcp_stream(*_place(url)) as stream:
        await stream.send_all(f"{head}content-length: {LARGE_BYTES}\r\n\r\n".encode())
        await stream.send_all(bytes(LARGE_BYTES))
        return bytes(await stream.receive_some())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_names_the_option(host: str) -> None:
    listener, url = bind_http(Address(host, 0))
    with listener:
        address = Address(host, _place(url)[1])
        with pytest.raises(UserError, match="already in use") as raised:
            bind_http(address)
        assert str(address) in str(raised.value)
        assert raised.value.exit_code == ExitCode.ADDRESS
        assert "--http" in raised.value.hint


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_no_traceback(host: str) -> None:
    with pytest.raises(UserError, match=host) as raised:
        bind_http(Address(host, 0))
    assert raised.value.exit_code == ExitCode.ADDRESS


def _place(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return parsed.host, parsed.port


# ---------------------------------------------------------------- the page


async def test_the_page_and_its_files_are_served_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "static").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "static" / "index.html").write_text("<title>a page</title>")
    (tmp_path / "static" / "app.js").write_text("let x = 1;\n" * 200)
    things = Things(pages=PageFiles(tmp_path / "static"))
    page = await things.ask("GET", "/")
    assert (page.status_code, page.text) == (200, "<title>a page</title>")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    script = await things.ask("GET", "/static/app.js")
    assert script.text == "let x = 1;\n" * 200
    assert script.headers["content-encoding"] == "gzip"
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    plain = await things.ask("GET", "/static/app.js", headers={"accept-encoding": "identity"})
    assert plain.text == script.text
    assert "content-encoding" not in plain.headers
    for path in (
        "/static/",
        "/static/none.js",
        "/static/../secret.txt",
        "/static/%2e%2e/secret.txt",
    ):
        assert (await things.ask("GET", path)).status_code == 404, path


async def test_a_file_in_the_browsers_cache_is_not_sent_again() -> None:
    things = Things()
    first = await things.ask("GET", "/")
    again = await things.ask("GET", "/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await things.ask("GET", "/", headers={"if-none-match": '"something else"'})
    assert other.content == first.content


@pytest.mark.parametrize("path", ["/", "/api/status", "/healthz", "/nothing", "/static/nothing"])
async def test_every_answer_forbids_what_is_not_ours(path: str) -> None:
    headers = (await Things().ask("GET", path)).headers
    assert all(headers[name] == value for name, value in HEADERS.items())
    assert "'unsafe-inline'" not in headers["content-security-policy"]
    assert headers["cache-control"] == ("no-cache" if path == "/" else "no-store")
