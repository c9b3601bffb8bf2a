"""Whatever a daemon answers, and whatever is logged, a terminal gets text: a property of every
sink.

Daemons refuse such texts today; a journal of an older version, or somebody else's daemon, may hold
them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner

from holdfast.checkpoint.checkpoint_store import FolderStore
from holdfast.daemon.cli import ask_commands, command_line, daemon_client, look_commands, run_client
from holdfast.daemon.cli.doctor_command import show_findings
from holdfast.daemon.cli.options import tell
from holdfast.daemon.doctor.findings import fault
from holdfast.daemon.process import logs, paths
from holdfast.daemon.process.paths import DaemonAddress
from holdfast.daemon.status_records import PendingRow
from holdfast.membership.shared.event_kind import EventKind
from holdfast.protocol.errors import EvictedError, RemoteProtocolError, UserError
from holdfast.protocol.text import unprintable
from tests.daemon.test_run_client import MARK, a_contribution, a_round
from tests.membership.table import A, B, Table
from tests.plain import master_status, peer_status
from tests.protocol.test_text import HOSTILE

MARKUP = {"a closing tag": "[/x]", "a tag": "[bold red]x", "an emoji": ":warning:"}
TEXTS = HOSTILE | MARKUP
# Every other one, and all together: a name between two of them stays a name.
ALL = " ".join(TEXTS.values())
KEPT = {
    "peer",
    "kind",
    "outcome",
    "role",
    "root",
    "state",
    "reach",
    "granted",
    "phase",
    "digest",
}  # what a command takes apart, or looks up


def spoilt(value: Any, text: str, key: str = "") -> Any:
    """The same with this text in every place for one, but for ids and for what commands look up."""
    if isinstance(value, str) and key not in KEPT:
        return text
    if isinstance(value, list):
        return [spoilt(each, text, key) for each in value]
    if isinstance(value, dict):
        return {name: spoilt(each, text, name) for name, each in value.items()}
    return value


def a_status(kind: str) -> dict[str, Any]:
    if kind == "peer":
        peer: dict[str, Any] = msgspec.to_builtins(peer_status(A, "x"))
        return {**peer, "notices": ["x", "x"], "limits": {"hours": "x"}}
    table = Table()
    table.start(A, B)
    status: dict[str, Any] = msgspec.to_builtins(master_status(table.master, table.now_s, "x"))
    row = {"peer": B, "host": "x", "waits_s": 1.0, "name": "x", "founder": True}
    route = {"peers": [A, B], "dials": None, "relay": None, "route": "x", "tried": ["x"]}
    return {
        **status,
        "why_waiting": "x",
        "pending": [{**row, "role": "spare"}],
        "routes": [{**route, "names": ["x", "x"], "works": False}],
        "departed": [{**status["members"][0], "name": "x", "why": "x"}],
    }


def answers(kind: str, text: str) -> dict[str, Any]:
    """Return a daemon's answer to each request."""
    recorded = {
        **a_round(1, 1e9),
        "outcome": "aborted",
        "marks": {A: {"name": "x", **MARK}},
        "contributors": [a_contribution(A)],
        "lost": {A: "x"},
        "open_s": 1.0,
        "reduce_s": 1.0,
        "why": "x",
        "repairs": 1,
        "reruns": 1,
    }
    event = {"id": 1, "at": 1e9, "kind": "join", "peer": A, "name": "x", "text": "x"}
    plain = {
        "status": a_status(kind),
        "rounds": {"rounds": [recorded]},
        "events": {"events": [event]},
        "approve": {"approved": True, "name": "x", "peer": A},
        "kick": {"peer": A, "name": "x"},
        "invites": {"invites": []},
    }
    spoiled: dict[str, Any] = spoilt(plain, text)
    return spoiled


COMMANDS: list[tuple[str, list[str]]] = [
    ("master", ["status"]),
    ("peer", ["status"]),
    ("master", ["peers"]),
    ("master", ["peers", "--gone"]),
    ("master", ["rounds"]),
    ("master", ["events"]),
    ("master", ["approve"]),
    ("master", ["approve", A]),
    ("master", ["kick", A]),
]


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A daemon that answers with the kind and text put into the list, or with an error's text."""
    who: list[Any] = ["master", ""]
    control = DaemonAddress("master", "http://127.0.0.1:1", "t", 1)

    def found(*_given: object) -> DaemonAddress:
        return DaemonAddress(who[0], control.url, control.token, control.pid)

    def replied(_client: object, url: str, **_given: object) -> httpx.Response:
        if who[0] == "error":
            return httpx.Response(422, json={"error": who[1], "hint": who[1]})
        return httpx.Response(200, json=answers(who[0], who[1])[url.rpartition("/")[2]])

    for module in (ask_commands, look_commands, daemon_client, paths):
        monkeypatch.setattr(module, "find_control", found)
    monkeypatch.setattr(httpx.Client, "get", replied)
    monkeypatch.setattr(httpx.Client, "post", replied)
    monkeypatch.setenv("COLUMNS", "10000")
    return who


def plain_lines(text: str) -> list[str]:
    lines = text.split("\n")
    assert [fault for fault in map(unprintable, lines) if fault] == []
    return lines


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("kind", "command"), COMMANDS, ids=[f"{' '.join(c)[:20]} at a {k}" for k, c in COMMANDS]
)
def test_no_command_prints_what_a_terminal_obeys(
    daemon: list[Any], kind: str, command: list[str], as_json: bool
) -> None:
    daemon[:] = [kind, "fine"]
    words = [*command, *(["--json"] if as_json else [])]
    fine = CliRunner().invoke(command_line.commands, words)
    assert fine.exception is None or isinstance(fine.exception, SystemExit), fine.exception
    for name, text in [*TEXTS.items(), ("all", ALL)]:
        daemon[1] = text
        done = CliRunner().invoke(command_line.commands, words)
        assert done.exit_code == fine.exit_code, name
        lines = plain_lines(done.output)
        assert len(lines) == len(fine.output.split("\n")), f"{name}: no line is made by a name"
        if not as_json and command == ["status"]:
            assert text not in MARKUP.values() or text in done.output, "markup is a name"


def test_what_a_daemon_says_of_an_error_is_plain(
    daemon: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon[:] = ["error", ALL]
    monkeypatch.setattr("sys.argv", ["holdfast", "kick", A])
    with pytest.raises(SystemExit):
        command_line.main()
    said = capsys.readouterr().err
    assert len(plain_lines(said)) == 3, "a line, a hint, and the end"
    assert r"\x1b]52" in said


def test_who_waits_is_told_by_id_and_host_first() -> None:
    poser = "bbbbbbbb at 10.0.0.1 asks to join as founder"
    row = PendingRow(
        peer=A, host="203.0.113.7", role="spare", founder=False, waits_s=3.0, name=poser
    )
    said = run_client.format_pending(row)
    assert said.startswith(f"{A[:8]} at 203.0.113.7 asks to join as spare")
    assert said.endswith(f"it calls itself '{poser}'")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_nothing_printed_at_a_daemons_start_or_by_doctor_is_more_than_text(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(f"the master says: {text}")
    show_findings([fault("port", f"it says {text}", f"do {text}")])
    told = plain_lines(capsys.readouterr().out)
    assert len(told) == 6


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_no_untrusted_text_begins_a_line_of_a_log(form: str, text: str) -> None:
    formatter = logs.JsonLines() if form == "json" else logs.TextLines(logs.TEXT_FORMAT)
    try:
        raise ValueError(f"it said {text}")
    except ValueError as error:
        found = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("x", logging.INFO, "", 1, "peer %s", (text,), None)
    line = formatter.format(record)
    assert len(plain_lines(line)) == 1
    traced = formatter.format(logging.LogRecord("x", logging.ERROR, "", 1, "broke", (), found))
    plain_lines(traced)


def test_events_of_the_master_are_plain_whatever_they_quote() -> None:
    table = Table()
    table.start(A, B)
    table.master.note(ALL, table.now_s, kind=EventKind.RUN, peer=None)
    assert not unprintable(table.master.context.events[-1].text)
    table.master.kick(B, ALL, table.now_s)
    assert not any(unprintable(event.text) for event in table.master.context.events)


def test_names_of_checkpoints_and_errors_of_places_are_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FolderStore(tmp_path)
    for text in HOSTILE.values():
        if "\x00" not in text:
            (tmp_path / f"1-000000001-000001-{text.replace('/', '')}.safetensors").write_bytes(b"")
    done = CliRunner().invoke(
        command_line.commands, ["checkpoint", "list", "--checkpoints", str(place)]
    )
    plain_lines(done.output)
    for error in (EvictedError("full", ALL), RemoteProtocolError(ALL), UserError("x", hint=ALL)):
        assert not unprintable(str(error))
        assert not unprintable(getattr(error, "reason", ""))
