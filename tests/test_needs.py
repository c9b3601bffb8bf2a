"""What a machine lacks: skipped at a desk, a failure in CI, and told at the end in one sentence."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import needs
from tests.needs import Lack

ROOT = Path(__file__).resolve().parents[1]


def skipped(reason: str) -> pytest.TestReport:
    longrepr = ("test_x.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("test_x.py::test", ("", 0, ""), {}, "skipped", longrepr, "setup")


@pytest.mark.parametrize("ci", [False, True])
def test_a_package_is_missed_at_a_desk_only(monkeypatch: pytest.MonkeyPatch, ci: bool) -> None:
    monkeypatch.setenv("CI", "true" if ci else "")
    package = Lack("there is no nft", package=True)
    ends = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(ends, match="no nft"):
        needs.need(package)
    assert needs.needed(package).args == (not ci,)
    with pytest.raises(pytest.skip.Exception, match="only root"):
        needs.need(Lack("only root may do this"))
    needs.need(Lack())


def test_an_ordinary_user_is_told_of_rights_before_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert needs.namespaces(lambda: "no program") == Lack(
        "only root may make network namespaces", package=False
    )


def test_the_end_of_a_run_names_each_lack_once() -> None:
    mine = [skipped(needs.SKIPPED + reason) for reason in ("no nft", "no root", "no nft")]
    assert needs.told_skipped([skipped("not Linux")]) == ""
    assert needs.told_skipped([*mine, skipped("not Linux")]) == (
        "3 tests were skipped on this machine: no nft (2); no root (1)."
    )


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_what_cannot_be_installed_is_said_in_one_sentence(
    tmp_path: Path, ci: str, status: int
) -> None:
    """A path with nothing but what the script itself calls: no apt-get, no packages."""
    script = (ROOT / "tools" / "install-packages").read_text()
    alone = tmp_path / "install-packages"
    alone.write_text(script.replace("PATH=$PATH:/usr/sbin:/sbin", "PATH=" + str(tmp_path)))
    bash = "/bin/bash"
    done = subprocess.run(
        [bash, alone], env={"CI": ci}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    assert "apt-get" in line
    assert "nftables" in line
