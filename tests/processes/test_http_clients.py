"""A master with few descriptors, its HTTP side busy: the run's port answers, and nothing is left
behind.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import trio

from tests.processes.harness import environment
from tests.processes.http_clients import (
    CLIENTS,
    DESCRIPTORS,
    WATCHERS,
    Seen,
    a_master,
    descriptors_of,
    dial,
    measure,
)

EACH = 12  # connections of each client: more in all than there are descriptors
SILENT = 2 * DESCRIPTORS


def test_the_runs_port_answers_whatever_http_clients_do(tmp_path: Path) -> None:
    async def run() -> Seen:
        return await measure(tmp_path, each=EACH, descriptors=DESCRIPTORS)

    seen = trio.run(run)
    assert seen.opened.total() >= EACH * CLIENTS
    assert seen.answered > 0
    assert seen.failed == []
    assert seen.dials_s
    assert seen.watching == WATCHERS
    assert seen.left <= seen.before
    assert seen.most < DESCRIPTORS


def test_clients_that_stay_and_say_nothing_keep_out_neither_the_run_nor_its_owner(
    tmp_path: Path,
) -> None:
    seen = Seen()

    async def run() -> str:
        with a_master(tmp_path, DESCRIPTORS) as (pid, run_port, http):
            streams = [await trio.open_tcp_stream(http.host, http.port) for _ in range(SILENT)]
            command = [sys.executable, "-m", "holdfast", "status", "--json"]
            done = await trio.run_process(
                [*command, "--state", str(tmp_path / "state")],
                capture_stdout=True,
                env=environment(),
            )
            await dial(seen, run_port)
            seen.most = descriptors_of(pid)
            for stream in streams:
                await stream.aclose()
        return str(done.stdout.decode())

    assert json.loads(trio.run(run))["name"] == "clients"
    assert seen.failed == []
    assert seen.most < DESCRIPTORS // 2
