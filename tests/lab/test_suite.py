"""The benchmarks' driver: sections by name, figures kept in files, the page made from them."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "benchmarks.run"]

if TYPE_CHECKING:
    from benchmarks import report
else:
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    report = sys.modules["report"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)

TABLE = report.Table(
    "How fast", ["holdfast bench this"], ["what", "seconds"], [["a|b", "1.5"]], ["As told."]
)
RECORD = report.Record("codecs", "sizes", "2026-01-02 03:04", "abc+", {"cores": "2"}, [TABLE], {})


def test_a_section_comes_back_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    path = RECORD.save()

    assert report.Record.load(path) == RECORD
    assert list(path.parent.iterdir()) == [path], "nothing half-written is left"


def test_a_page_says_when_where_and_how() -> None:
    page = report.render([RECORD, evolve(RECORD, section="loopback", machine={"cores": "16"})])

    assert "Machine 1: cores 2.\n" in page
    assert "Measured 2026-01-02 03:04 UTC, machine 1, commit `abc+`." in page
    assert "machine 2, commit" in page
    assert "| what | seconds |\n| --- | ---: |\n| a\\|b | 1.5 |" in page
    assert "holdfast bench this" in page
    assert "As told." in page


def test_the_page_in_the_repository_is_what_its_files_say() -> None:
    made = subprocess.run(
        [sys.executable, "-c", "from benchmarks.run import page; print(page(), end='')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == made


def test_an_unknown_section_is_refused_with_those_there_are() -> None:
    done = subprocess.run([*RUN, "--only", "speed"], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 1
    assert "no section speed; there are codecs, loopback, lossy" in done.stderr


@pytest.mark.slow
def test_a_stopped_benchmark_leaves_no_process() -> None:
    """The ranks are another process's children: it must be interrupted, not killed."""
    bench = subprocess.Popen(
        [*RUN, "--only", "caps"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until_s = time.monotonic() + 120
    while len(_session(bench.pid)) < 4 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert len(_session(bench.pid)) >= 4, "the driver, the command, two ranks"
    bench.send_signal(signal.SIGTERM)  # to the driver alone

    assert bench.wait(120) == 130
    assert _session(bench.pid) == []


def _session(pid: int) -> list[int]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
