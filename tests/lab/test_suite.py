"""The benchmarks' driver: sections by name, and their text in the page."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.run import chosen

ROOT = Path(__file__).resolve().parents[2]
TABLE = report.Table(
    "How fast", ["python -m benchmarks.this"], ["what", "seconds"], [["a|b", "1.5"]], ["As told."]
)
PAGE = "# Results\n\nOn this page.\n\n## kill: one dies\n\nOld.\n\n## lines: slow\n\nStays.\n"


def test_a_section_says_when_where_and_how_and_replaces_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text(PAGE)
    monkeypatch.setattr(report, "RESULTS_MD", page)
    monkeypatch.setattr(report, "BUILD", tmp_path / "build")
    report.keep_section("kill", "one dies", ([TABLE], {"s": 1.5}), 0.25)

    text = page.read_text()
    assert "Old." not in text
    assert text.endswith("\n\n## lines: slow\n\nStays.\n")
    assert "load average before: 0.2" in text
    assert f"cores {report.machine()['cores']}, " in text
    assert "| what | seconds |\n| --- | ---: |\n| a\\|b | 1.5 |" in text
    assert "python -m benchmarks.this" in text
    assert "As told." in text
    assert '"s": 1.5' in (tmp_path / "build" / "kill.json").read_text()


def test_a_new_section_comes_last() -> None:
    text = report.with_section(PAGE, "join", "## join: new\n\nText.")
    assert text == PAGE + "\n## join: new\n\nText.\n"


def test_an_unknown_section_is_refused_with_those_there_are() -> None:
    with pytest.raises(report.BenchError, match="no section speed; there are loopback, kill"):
        chosen("speed")


@pytest.mark.slow
def test_a_stopped_benchmark_leaves_no_process() -> None:
    """The ranks are another process's children: it must be interrupted, not killed."""
    bench = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.run", "--only", "loopback"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until_s = time.monotonic() + 120
    while len(_session(bench.pid)) < 3 and time.monotonic() < until_s:
        time.sleep(0.05)
    assert len(_session(bench.pid)) >= 3, "the driver, two ranks"
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
