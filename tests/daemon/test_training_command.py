"""A training command is looked at before anything is started."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

from holdfast.daemon.cli.run_commands import join
from holdfast.daemon.cli.training_command import check_command, script_of
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.protocol.errors import UserError


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py --epochs 3", "train.py"),
        ("/usr/bin/python3.11 -u train.py", "train.py"),
        ("python -W ignore -X dev -O a/train.py -m x", "a/train.py"),
        ("python -Wdefault::DeprecationWarning train.py", "train.py"),
        ("python -m train", None),
        ("python -um train", None),
        ("python -c pass", None),
        ("python -", None),
        ("python", None),
        ("torchrun train.py", None),
        ("bash train.sh", None),
    ],
)
def test_the_script_of_a_python_command(command: str, script: str | None) -> None:
    assert script_of(command.split()) == (None if script is None else Path(script))


def test_what_is_there_passes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    for command in ([], [sys.executable, str(script)], ["sh", "-c", "true"]):
        check_command(command)
    check_command([sys.executable, str(tmp_path / "package")])


def test_what_is_missing_is_named_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "src").mkdir()
    for command, text in (
        (["pyton", "train.py"], "there is no program 'pyton'"),
        (["./train.py"], "./train.py is not a program that can be run"),
        (["./no.sh"], "there is no program './no.sh'"),
        (["python3", "trian.py", "--epochs", "3"], "there is no script trian.py"),
        (["python3", "src"], "src is a folder without a __main__.py"),
    ):
        with pytest.raises(UserError, match=text.replace(".", r"\.")) as raised:
            check_command(command)
        assert raised.value.exit_code == ExitCode.TRAINER
        assert raised.value.hint
    assert str(tmp_path) in raised.value.hint, "where it was looked for"


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        ("INV python train.py --epochs 3", "join INVITE -- python train.py --epochs 3"),
        ("INV --hours 1-5 python a.py --lr 1", "join INVITE --hours 1-5 -- python a.py --lr 1"),
        ("INV python -u train.py", "join INVITE -- python -u train.py"),
        # This one is an option of join, too; it was meant for the script.
        ("INV python train.py --name x", "join INVITE -- python train.py --name x"),
    ],
)
def test_forgotten_dashes_are_recognised(arguments: str, suggested: str) -> None:
    with pytest.raises(UserError, match="`--` must stand before it") as raised:
        join.make_context("join", arguments.split())
    assert raised.value.hint == suggested
    assert raised.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        "INV -- python train.py --epochs 3",
        "INV --name a -- python train.py --name b",
        "--max-disk 3 INV --pause-on-battery -- python train.py",
        "INV python train.py",
        "INV -q",
    ],
)
def test_what_is_clear_is_taken(arguments: str) -> None:
    context = join.make_context("join", arguments.split())
    words = arguments.partition(" -- ")[2].split() or arguments.split()[1:]
    assert context.params["command"] == (() if words == ["-q"] else tuple(words))


@pytest.mark.parametrize("arguments", ["-- python train.py", "--name a -- python train.py --lr 1"])
def test_a_forgotten_invite_is_missed_and_no_program_taken_for_one(arguments: str) -> None:
    with pytest.raises(UserError, match="the invite is missing") as raised:
        join.make_context("join", arguments.split())
    assert raised.value.hint == f"join INVITE -- {arguments.partition('-- ')[2]}"
    with pytest.raises(UserError, match="that invite does not start with"):
        join.main(["python", "train.py"], standalone_mode=False)


def test_an_unknown_option_of_join_itself_is_still_named() -> None:
    with pytest.raises(click.NoSuchOption, match="--epochs"):
        join.make_context("join", ["INV", "--epochs", "3"])
