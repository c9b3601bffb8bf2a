"""launch_ranks.py COUNT SCRIPT ...: run a script as several ranks, as torchrun does, on the loopback alone.

torchrun's rendezvous listens on all addresses of the machine; here the ranks meet in a file, whose URL is in the
environment and replaces "{meeting}" in the arguments. As with torchrun, all end when one has failed, and the
status is its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAUSE_S = 0.05


def main() -> int:
    count, command = int(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        command = [each.replace("{meeting}", meeting) for each in command]
        environment = {
            **os.environ,
            "WORLD_SIZE": str(count),
            "GLOO_SOCKET_IFNAME": "lo",
            "RANKS_MEET_AT": meeting,
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen([sys.executable, *command], env={**environment, "RANK": str(rank)})
            for rank in range(count)
        ]
        try:
            while True:
                statuses = [rank.poll() for rank in ranks]
                failed = [status for status in statuses if status]
                if failed:
                    return 1 if failed[0] < 0 else failed[0]
                if all(status == 0 for status in statuses):
                    return 0
                time.sleep(PAUSE_S)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


if __name__ == "__main__":
    sys.exit(main())
