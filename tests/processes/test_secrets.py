"""A whole run, as loud as it can be; then everything that it has put anywhere is searched for
secrets.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from holdfast.protocol.trust.identity import load_private_key
from holdfast.protocol.trust.invite import Invite
from tests.daemon.test_secrets import spellings
from tests.processes.harness import WAIT_S, Fleet, spec

READS = ("", "api/status", "api/invites", "api/rounds", "api/events", "api/history", "metrics")
PRIVATE = ("authority.key", "identity.key", "control.json")


def arguments_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def secrets_of(folder: Path, invites: Iterator[str]) -> dict[str, bytes]:
    """By what they are."""
    found = {f"token of {n}": Invite.decode(text).token.encode() for n, text in enumerate(invites)}
    for path in folder.rglob("*.key"):
        key = load_private_key(path)
        found[f"{path}"] = key.private_bytes_raw()
        found[f"{path} as it stands"] = path.read_bytes().splitlines()[1]
    return found


@pytest.mark.new_interpreter  # its arguments are its own
def test_no_secret_is_anywhere_that_others_look(fleet: Fleet) -> None:
    fleet.start_master(spec(min_members=2), more=["--invite"])
    for name in ("alder", "birch"):
        fleet.join(name, founder=name == "alder")
    status = fleet.until(lambda s: s["committed"] >= 3, "three rounds")
    waiting = str(fleet.act("invite", {"approve": True})["invite"])
    printed = next(w for w in fleet.nodes["master"].log.split() if w.startswith("holdfast1."))
    found = secrets_of(fleet.folder, iter([*fleet.invites.values(), waiting]))
    nodes = {name: node.control() for name, node in fleet.nodes.items()}
    found |= {f"control token of {name}": each.token.encode() for name, each in nodes.items()}
    assert len(found) >= 3 + 2 * 4 + 3, "tokens, keys of authority, master and peers, controls"
    texts = {f"{name}'s log": node.log.encode() for name, node in fleet.nodes.items()}
    for name, control in nodes.items():
        for read in READS:
            texts[f"{name}: {read}"] = httpx.get(f"{control.url}/{read}", timeout=WAIT_S).content
        texts[f"{name}'s arguments"] = arguments_of(control.pid)
    for name in ("alder", "birch"):
        texts[f"{name}'s trainer's"] = arguments_of(fleet.peer(name)["command_pid"])
    for path in fleet.folder.rglob("*"):
        if path.is_file() and path.name not in PRIVATE:
            texts[str(path)] = path.read_bytes()
    assert "journal.sqlite" in " ".join(texts)
    for what, secret in found.items():
        for spelt in spellings(secret):
            told = [where for where, text in texts.items() if spelt in text]
            assert not told, f"{what} is in {', '.join(told)}"
    # With --invite the master prints one, for the terminal that it was started at; nothing else
    # does.
    token = Invite.decode(printed).token.encode()
    assert [where for where, text in texts.items() if token in text] == []
    assert [where for where, text in texts.items() if printed.encode() in text] == [
        "master's log",
        str(fleet.folder / "master.log"),
    ]
    for path in fleet.folder.rglob("*"):
        if path.name in PRIVATE:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    for name in nodes:
        assert stat.S_IMODE((fleet.folder / name).stat().st_mode) == 0o700
    assert status["members"]
