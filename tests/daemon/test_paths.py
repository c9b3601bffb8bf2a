"""State directories: who may read them, who holds them, and how commands find the daemon."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from holdfast.daemon.process import paths
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.daemon.process.paths import (
    CONTROL_FILE,
    IDENTITY_FILE,
    JOURNAL_FILE,
    SOCKET_FOLDER,
    DaemonAddress,
    check_source,
    data_home,
    find_control,
    locked,
    make_private,
    master_state,
    note_source,
    peer_state,
    published,
    socket_folder,
)
from holdfast.protocol.durable_files import write_private
from holdfast.protocol.errors import UserError
from tests import needs

FINGERPRINT = "5" * 64


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def control(kind: str = "master") -> DaemonAddress:
    return DaemonAddress(kind, "http://127.0.0.1:1", "secret", os.getpid())


# ---------------------------------------------------------------- folders and files


def test_a_killed_daemons_socket_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(paths, "SOCKET_PLACE_BYTES_MAX", len(str(tmp_path)))
    left, starting = tmp_path / f"{SOCKET_FOLDER}left", tmp_path / f"{SOCKET_FOLDER}starting"
    for folder in (left, starting):
        folder.mkdir(0o700)
    (left / "trainer.sock").touch()
    with socket_folder() as used:
        os.utime(used, (0, 0))
        os.utime(left, (0, 0))
        with socket_folder() as other:
            assert set(tmp_path.iterdir()) == {used, other, starting}
    assert list(tmp_path.iterdir()) == [starting]


@needs.needed(needs.root("only root gives folders to another user"))
def test_folders_of_another_user_in_a_shared_place_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    theirs, target = tmp_path / f"{SOCKET_FOLDER}theirs", tmp_path / "nologin"
    theirs.mkdir(0o700)
    (theirs / "lock").symlink_to(target)
    os.chown(theirs, 4711, 4711)
    os.utime(theirs, (0, 0))
    with socket_folder():
        assert theirs.exists()
    with pytest.raises(UserError, match="cannot use"), locked(theirs):
        pass
    tmp_path.chmod(0o1777)
    with pytest.raises(UserError, match="other users of this machine can write"), locked(theirs):
        pass
    assert not target.exists(), "what their link names is not made"


def test_a_sockets_path_fits_however_long_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    with socket_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "trainer.sock"))
        longest = paths.SOCKET_PLACE_BYTES_MAX - len(str(folder.parent))
        assert len(str(folder / "trainer.sock")) + longest <= 103, "macOS takes no more"
    monkeypatch.setattr(paths, "SHORT_PLACE", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no folder for temporary files"), socket_folder():
        pass


def test_the_data_home_follows_the_environment(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data_home() == home
    monkeypatch.delenv("HOLDFAST_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert data_home() == tmp_path / "xdg" / "holdfast"
    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_home() == tmp_path / ".local" / "share" / "holdfast"


@pytest.mark.parametrize("name", ["run", "my run", "a/b", "..", ".", "../x", "ünï", "/etc", "%2F"])
def test_a_run_has_a_folder_of_its_own_whatever_it_is_called(home: Path, name: str) -> None:
    folder = master_state(name)
    assert folder.resolve().parent == (home / "runs").resolve()
    assert folder != master_state("another")
    with published(make_private(folder), control()):
        assert find_control(None, "master") == control()


def test_a_run_of_another_authority_has_another_folder_whatever_its_id(home: Path) -> None:
    one, other = peer_state("a" * 32, "1" * 64), peer_state("a" * 32, "2" * 64)
    assert one != other
    assert {one.parent, other.parent} == {home / "peers"}


@pytest.mark.parametrize("bits", [0o777, 0o757, 0o1777])
def test_a_folder_that_others_can_write_into_is_not_taken(tmp_path: Path, bits: int) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(bits)
    with pytest.raises(UserError, match="other users of this machine can write") as raised:
        make_private(folder)
    assert "chmod 700" in raised.value.hint
    folder.chmod(0o755)
    assert make_private(folder) == folder


def test_only_the_owner_can_enter_or_read(tmp_path: Path) -> None:
    folder = make_private(tmp_path / "deep" / "state")
    assert mode(folder) == mode(folder.parent) == 0o700
    with locked(folder), published(folder, control()):
        assert {mode(each) for each in folder.iterdir()} == {0o600}
        assert sorted(each.name for each in folder.iterdir()) == ["control.json", "lock"]
    assert not (folder / CONTROL_FILE).exists()


def test_a_private_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, b"new")
    assert path.read_text() == "new"
    assert mode(path) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["a-file", "a-file/below"])
def test_a_place_that_cannot_be_a_folder_is_no_traceback(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(UserError, match="cannot use") as raised, locked(tmp_path / place):
        pass
    assert raised.value.exit_code == ExitCode.CONFIG
    assert "--state" in raised.value.hint


def test_a_folder_whose_lock_cannot_be_opened_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(UserError, match="cannot use"), locked(tmp_path):
        pass


# ---------------------------------------------------------------- one process a folder


def test_a_folder_has_one_holder_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(UserError, match="in use") as raised, locked(tmp_path):
            pass
        assert raised.value.exit_code == ExitCode.ADDRESS
        with locked(tmp_path / "another"):
            pass
    with locked(tmp_path):
        pass


# ---------------------------------------------------------------- finding a daemon


def test_the_only_daemon_is_found() -> None:
    with published(make_private(master_state("one")), control()):
        assert find_control(None, None) == control()
        assert find_control(None, "master") == control()
        with pytest.raises(UserError, match="no peer daemon runs here"):
            find_control(None, "peer")


def test_a_master_is_meant_before_its_peers() -> None:
    with (
        published(make_private(master_state("one")), control()),
        published(make_private(peer_state("a" * 32, FINGERPRINT)), control("peer")),
        published(make_private(peer_state("b" * 32, FINGERPRINT)), control("peer")),
    ):
        assert find_control(None, None).kind == "master"
        assert find_control(peer_state("a" * 32, FINGERPRINT), None).kind == "peer"
        with pytest.raises(UserError, match="several daemons") as raised:
            find_control(None, "peer")
        assert raised.value.exit_code == ExitCode.USAGE
        assert "--state" in raised.value.hint


def test_two_masters_are_not_guessed_between() -> None:
    with (
        published(make_private(master_state("one")), control()),
        published(make_private(master_state("two")), control()),
    ):
        with pytest.raises(UserError, match="several daemons"):
            find_control(None, None)
        assert find_control(master_state("two"), "master") == control()


def test_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no holdfast daemon runs here") as raised:
        find_control(None, None)
    assert raised.value.exit_code == ExitCode.UNREACHABLE
    with pytest.raises(UserError, match=str(tmp_path)):
        find_control(tmp_path, None)


def test_a_folder_without_its_daemon_says_what_it_is_and_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the state of a master or a peer") as raised:
        find_control(tmp_path, "master")
    assert raised.value.exit_code == ExitCode.UNREACHABLE
    (tmp_path / IDENTITY_FILE).touch()
    with pytest.raises(UserError, match=r"the peer in .* is not running") as raised:
        find_control(tmp_path, None)
    assert "holdfast join" in raised.value.hint
    with pytest.raises(
        UserError, match="the state of a peer, and this command is for a master"
    ) as it:
        find_control(tmp_path, "master")
    assert it.value.exit_code == ExitCode.USAGE
    (tmp_path / IDENTITY_FILE).rename(tmp_path / JOURNAL_FILE)
    with pytest.raises(UserError, match=r"the master in .* is not running") as raised:
        find_control(tmp_path, "master")
    assert raised.value.hint == f"start it: holdfast master --state {tmp_path}"


def test_a_runs_folder_remembers_its_run_toml(tmp_path: Path) -> None:
    state = make_private(tmp_path / "state")
    check_source(state, tmp_path / "a.toml")  # a new run
    note_source(state, tmp_path / "a.toml")
    check_source(state, tmp_path / "x" / ".." / "a.toml")
    with pytest.raises(
        UserError, match=r"was started with .*a\.toml, not with .*b\.toml"
    ) as raised:
        check_source(state, tmp_path / "b.toml")
    assert raised.value.exit_code == ExitCode.CONFIG
    (tmp_path / "link.toml").symlink_to(tmp_path / "a.toml")
    check_source(state, tmp_path / "link.toml")


NOWHERE = {"kind": "master", "url": "http://127.0.0.1:1", "token": "t"}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[]",
            "{}",
            json.dumps({"kind": "master"}),
            "\x00",
            '{"pid": "x"}',
            "[1, 2, 3, 4]",
        ),
        json.dumps({**NOWHERE, "pid": 2**31 - 1}),  # of no process
        json.dumps({**NOWHERE, "pid": "many"}),
    ],
)
def test_a_control_file_that_means_nothing_is_no_daemon(tmp_path: Path, text: str) -> None:
    (tmp_path / CONTROL_FILE).write_text(text)
    with pytest.raises(UserError, match="is not the state of"):
        find_control(tmp_path, None)
