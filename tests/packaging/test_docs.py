"""The documentation: it builds, its reference is what the code says, and what it shows is accepted.

That what it shows also *runs* is in tests/processes/test_pages.py.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from rich.console import Console

from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.cli.demo import Demo
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.spec.spec import RunSpec
from tools import reference

ROOT = Path(__file__).resolve().parents[2]
MADE = reference.PAGES.keys() - {reference.FAULTS}  # by `make docs`; not in git
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - MADE)]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def blocks(page: Path, language: str) -> list[str]:
    """Fenced ones, also in lists."""
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def sample(page: str, words: str) -> str:
    """A page's sample of what is printed: the block with these words."""
    return next(block for block in blocks(ROOT / page, "text") if words in block)


def shape(line: str) -> str:
    """A printed line without what differs from run to run: ids, durations, other figures."""
    line = re.sub(r"\b[0-9A-Fa-f]{8}\b", "ID", line)
    line = re.sub(r"\d+ (?:s|min|h)\b( \d+ s)?", "TIME", line)
    return " ".join(re.sub(r"\d[\d.,:-]*", "0", line).split())


def untrue(shown: str, *printed: str) -> list[str]:
    """The lines of a sample that none of these outputs has."""
    real = {shape(line) for text in printed for line in text.splitlines()}
    return [line for line in shown.splitlines() if shape(line) not in {*real, ""}]


def typed(text: str) -> list[str]:
    """The ``holdfast`` commands of a block, as a shell would take them apart."""
    plain = [re.sub(r"\s+#.*", "", line) for line in text.splitlines()]
    found = [re.search(r"(?:^|&& |=\S+ )holdfast (?!<)(.*)", line) for line in plain]
    return [re.split(r" [|>] ", match[1])[0] for match in found if match]


ALL = [(page.name, line) for page in PAGES for block in blocks(page, "sh") for line in typed(block)]


def test_the_page_of_faults_is_what_the_tests_say() -> None:
    assert reference.FAULTS.read_text() == reference.faults(), "run `make reference`"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    reference.write_pages()
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    page = (tmp_path / "reference" / "python.html").read_text()
    assert "rate_scale" in page
    for name, text in (("messages", "TrainerAttached"), ("limits", "FRAME_BYTES_MAX")):
        assert text in (tmp_path / "reference" / f"{name}.html").read_text()
    assert "holdfast config plan" in (tmp_path / "reference" / "commands.html").read_text()
    outside = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?:[^"]+)"', page)
    assert outside == []
    # What search needs in a page that is opened from disk.
    assert "../javascripts/iframe-worker.js" in page
    assert (tmp_path / "search" / "search_index.js").exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
@pytest.mark.parametrize("spoiled", [False, True])
def test_systemd_takes_the_unit_of_the_lending_page(tmp_path: Path, spoiled: bool) -> None:
    (unit,) = blocks(ROOT / "docs" / "lending.md", "ini")
    unit = unit.replace("%h/holdfast/.venv/bin/holdfast", sys.executable)
    path = tmp_path / "holdfast.service"
    path.write_text(unit.replace("KillMode=mixed", "KillMode=often") if spoiled else unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--user", path],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    found = [line for line in done.stderr.splitlines() if "holdfast" in line]
    assert (found != []) == spoiled, done.stderr


def test_errors_that_need_an_operator_start_no_service_again() -> None:
    (unit,) = blocks(ROOT / "docs" / "lending.md", "ini")
    (listed,) = re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    final = {ExitCode(int(code)) for code in listed.split()}
    again = {ExitCode.FAILED, ExitCode.ADDRESS, ExitCode.UNREACHABLE}
    others = {ExitCode.OK, ExitCode.VIOLATION, ExitCode.UNFIT, ExitCode.INTERRUPTED}
    assert final | again | others == set(ExitCode)
    assert not final & again


def test_scripts_for_rented_machines_are_shell_and_pass_signals_on() -> None:
    page = ROOT / "docs" / "rented.md"
    master, peers = blocks(page, "bash")
    (sky,) = (yaml.safe_load(block) for block in blocks(page, "yaml"))
    for script in (master, peers, sky["setup"], sky["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert set(re.findall(r"HOLDFAST_\w+", script)) <= {"HOLDFAST_"}, "unknown ones are refused"
    assert "exec holdfast master " in master
    for script in (peers, sky["run"]):
        assert "exec holdfast join " in script, "signals must reach the peer itself"
    (before_s,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", peers, re.MULTILINE)
    assert int(before_s) >= 300, "what a drain takes at most"


def test_all_example_specs_are_valid() -> None:
    found = [block for page in PAGES for block in blocks(page, "toml")]
    assert len(found) > 2
    for block in found:
        RunSpec.parse(block)


def test_all_example_scripts_compile() -> None:
    found = [block for page in PAGES for block in blocks(page, "python")]
    assert len(found) >= 3
    for block in found:
        compile(block, "train.py", "exec")


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: path.name)
def test_samples_are_drawn_from_the_runs_generator(path: Path) -> None:
    """``run.seed`` alone gives a script that starts again the same samples again."""
    assert "run.seed" not in path.read_text()


def test_the_recording_is_small_and_has_no_script() -> None:
    picture = ROOT / "docs" / "pictures" / "kill.svg"
    names = {element.tag.rpartition("}")[2] for element in ElementTree.parse(picture).iter()}
    assert picture.stat().st_size <= 300_000
    assert names <= {"svg", "title", "style", "defs", "g", "rect", "text", "use"}
    assert "SIGKILL" in picture.read_text()
    assert "docs/pictures/kill.svg" in (ROOT / "README.md").read_text()


def test_the_demos_verdict_is_printed_as_readme_shows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {"loss_start": 5.362, "loss_end": 1.965, "rounds_committed": 24, "rounds_lost": 0}
    figures |= {"kill_to_commit_s": 1.75, "promotion_state_bytes": 0, "seconds": 79.0}
    sent = {"bytes_sent": 404.1e6, "bytes_data_parallel": 6363e6}
    equal = {"digests_equal": True, "digests": {}, "ok": True}
    demo: Any = SimpleNamespace(console=Console())
    Demo.show_verdict(demo, {**figures, **sent, **equal})
    assert capsys.readouterr().out == "\n" + sample("README.md", "verdict")


def test_a_command_named_in_a_sentence_is_one() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for name in re.findall(r"`holdfast ([a-z]+)", prose):
            # `holdfast lane` is what the protocol derives a key with.
            assert name in {*commands.commands, "lane"}, f"{page.name}: holdfast {name}"


def test_the_commands_of_a_block_are_found() -> None:
    block = (
        "holdfast status  # here\n# holdfast x\nA=1 holdfast join x -- python a\nls | grep holdfast"
    )
    assert typed(block) == ["status", "join x -- python a"]
    assert len(ALL) > 30


@pytest.mark.parametrize(("page", "line"), ALL)
def test_every_command_shown_is_one(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options exist and take these values; files are not looked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("")
    words = shlex.split(line)
    command: click.Command = commands
    while isinstance(command, click.Group):
        name, *words = words
        assert name in command.commands, f"{page}: holdfast {line}"
        command = command.commands[name]
    # Click keeps the first help option that it makes of a command.
    context = command.make_context(line, words, help_option_names=["-h", "--help"])
    context.close()
