"""Which address a machine tells others, where it has no way to the internet."""

import subprocess
import sys

from holdfast.daemon.hosts import dialable
from holdfast.protocol.addresses import Address
from tests.processes.harness import environment
from tests.processes.test_doctor import two_hosts

ANYWHERE = Address("0.0.0.0", 5)
GUESS = (
    "from holdfast.daemon.hosts import dialable; from holdfast.protocol.addresses import Address; "
    f"print(*dialable([Address('{ANYWHERE.host}', {ANYWHERE.port})], [], TOWARDS))"
)


def test_a_machine_in_a_local_network_names_its_address_there() -> None:
    def guess(begin: list[str], towards: str) -> str:
        code = GUESS.replace("TOWARDS", repr(towards))
        command = [*begin, sys.executable, "-c", code]
        return subprocess.check_output(command, text=True, env=environment()).strip()

    with two_hosts() as (home, away):
        assert guess(home, "10.99.0.2") == "10.99.0.1:5"
        assert guess(away, "10.99.0.1") == "10.99.0.2:5"
        assert guess(away, "10.99.0.2") == "10.99.0.2:5"  # the master is on this very machine
        assert guess(home, "train.example.org") == "127.0.0.1:5"  # nothing is known of it


def test_a_master_on_loopback_says_nothing_about_the_others() -> None:
    assert dialable([ANYWHERE], [], "127.0.0.1") == dialable([ANYWHERE], [])
