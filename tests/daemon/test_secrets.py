"""Secrets appear in no log, status, repr, file or process title."""

from __future__ import annotations

import base64
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.collectives.links.dialling import handshake
from holdfast.collectives.links.dialling.handshake import LinkKeys
from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.cli.options import parse_invite_option
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.daemon.process.paths import DaemonAddress
from holdfast.daemon.web.json_answers import compact
from holdfast.protocol.messages import CheckRequest, EnrolRequest, LinkHello
from holdfast.protocol.network import lane
from tests.daemon.test_hostile import a_run
from tests.plain import describe

SECRET = "s3cret-" * 4


def spellings(secret: bytes) -> Iterator[bytes]:
    """Return the forms in which a secret could appear in a text."""
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    yield base64.b64encode(secret).rstrip(b"=")
    yield base64.urlsafe_b64encode(secret).rstrip(b"=")
    yield repr(secret).encode()[2:-1]


def test_spellings_find_what_they_are_for() -> None:
    secret = bytes(range(200, 232))
    for text in (secret.hex(), f"{secret!r}", base64.b64encode(secret).decode()):
        assert any(each in text.encode() for each in spellings(secret))


@pytest.mark.parametrize(
    "record",
    [
        EnrolRequest(SECRET, b"request", "name"),
        CheckRequest(SECRET, (), bytes(32)),
        LinkHello(1, 1, bytes(16), SECRET.encode()[:28] + b"cret"),
        LinkKeys(bytes(16), SECRET.encode(), SECRET.encode()),
        DaemonAddress("master", "http://here", SECRET, 1),
    ],
    ids=lambda record: type(record).__name__,
)
def test_what_holds_a_secret_does_not_show_it(record: object) -> None:
    assert "s3cret" not in repr(record)


@pytest.mark.real_time
async def test_keys_of_lanes_are_in_no_log_status_or_journal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[bytes] = []
    token_bytes, derive = secrets.token_bytes, lane.derive_lane_keys

    def draw(count: int) -> bytes:
        drawn.append(token_bytes(count))
        return drawn[-1]

    def derived(*arguments: object) -> tuple[bytes, bytes]:
        keys = derive(*arguments)  # type: ignore[arg-type]
        drawn.extend(keys)
        return keys

    monkeypatch.setattr(secrets, "token_bytes", draw)
    monkeypatch.setattr(handshake, "derive_lane_keys", derived)
    with caplog.at_level(logging.DEBUG):
        async with a_run(tmp_path) as run:
            await run.goes_on(3)
            told = compact(describe(run.master.coordinator, 0.0))
    secrets_drawn = [each for each in drawn if len(each) == 32]
    assert len(secrets_drawn) >= 4, "halves of a link's secret, and its lanes' keys"
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in secrets_drawn:
        for spelt in spellings(secret):
            assert spelt not in caplog.text.encode()
            assert spelt not in told
            assert not any(spelt in content for content in files)


ARGUMENT = "holdfast1.not-an-invite-but-as-secret-as-one"
SHOWN = """\
import sys
from pathlib import Path
from holdfast.daemon.cli.options import parse_invite_option
before = Path("/proc/self/cmdline").read_bytes()
given = sys.argv[2]
assert given.encode() in before
assert parse_invite_option(None, None, given) == given
assert parse_invite_option(None, None, "@" + sys.argv[3]) == "from a file"
print(Path("/proc/self/cmdline").read_bytes().replace(b"\\0", b" ").decode())
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="not Linux")
def test_an_invite_is_not_seen_among_the_arguments_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "invite").write_text("from a file\n")
    command = [sys.executable, "-c", SHOWN, "join", ARGUMENT, str(tmp_path / "invite"), "--", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    assert ARGUMENT[10:] not in done.stdout
    shown = done.stdout.strip()
    assert shown.endswith(f"join holdfast1.{'*' * (len(ARGUMENT) - 10)} {tmp_path}/invite -- x")


@pytest.mark.parametrize("name", ["join", "relay", "doctor"])
def test_every_command_that_takes_an_invite_hides_it_and_reads_it_from_a_file(
    name: str, tmp_path: Path
) -> None:
    (invite,) = [each for each in commands.commands[name].params if each.name == "invite"]
    assert invite.callback is parse_invite_option
    done = CliRunner().invoke(commands, [name, f"@{tmp_path}/none"])
    assert done.exit_code == ExitCode.USAGE
    assert "cannot be read" in done.output
