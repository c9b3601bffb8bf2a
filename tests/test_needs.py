"""What a machine lacks: skipped at a desk, a failure in CI, and told at the end in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.needs import Lack

ROOT = Path(__file__).resolve().parents[1]


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


def test_tests_that_need_no_database_start_without_its_driver() -> None:
    code = "import sys; sys.modules['psycopg'] = None; import tests.needs"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
