"""A machine whose clock is wrong by a day or more is told so, on its terminal and by its exit
status.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.daemon.master.run_master import Master
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.protocol.errors import WRONG_CLOCK_HINT, UserError
from holdfast.protocol.trust.authority import Authority, Party
from holdfast.protocol.trust.credentials import Credentials
from holdfast.protocol.trust.identity import Identity
from tests.background import background
from tests.daemon.loopback import a_master, a_peer

pytestmark = pytest.mark.real_time

SPEC = '[run]\nname = "clocks"\n'


@contextmanager
def a_master_whose_clock_is_ahead(tmp_path: Path, days: int) -> Iterator[Master]:
    """Its certificate says so; nothing else here looks at what time it is."""
    issue = Authority.issue

    def issued(self: Authority, request_pem: bytes, name: str, party: Party) -> bytes:
        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        return issue(self, request_pem, name, party, now=now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Authority, "issue", issued)
        master = a_master(tmp_path, SPEC)
    yield master
    master.store.close()


def leaves(group: BaseExceptionGroup[UserError]) -> list[UserError]:
    found: list[UserError] = []
    for each in group.exceptions:
        found += leaves(each) if isinstance(each, BaseExceptionGroup) else [each]
    return found


async def why_it_ended(master: Master, state: Path, patience_s: float) -> UserError:
    """Run a peer of this master, and return the error that ends it."""
    ended: list[UserError] = []
    async with background() as nursery:
        nursery.start_soon(master.run)
        peer = await a_peer(master, state, patience_s=patience_s)
        try:
            await peer.run()
        except* UserError as group:
            ended += leaves(group)
    (error,) = ended
    return error


@pytest.mark.fault(
    "a machine's clock is wrong by a day",
    "the certificates' times",
    "it is told so, on its terminal and by its exit status",
)
@pytest.mark.parametrize("days", [-3, 3])
async def test_a_newcomer_is_told_at_once(tmp_path: Path, days: int) -> None:
    with a_master_whose_clock_is_ahead(tmp_path, days) as master:
        error = await why_it_ended(master, tmp_path / "peer", 60.0)
    assert str(error).startswith("by this machine's clock it is ")
    assert (error.exit_code, error.hint) == (ExitCode.UNREACHABLE, WRONG_CLOCK_HINT)


@pytest.mark.fault("a machine's clock is wrong by a day")
@pytest.mark.parametrize("days", [-3, 3])
async def test_who_was_here_before_is_told_at_once_and_goes_on_trying(
    tmp_path: Path, days: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock may be set meanwhile: machines that boot learn the time from the network."""
    with a_master_whose_clock_is_ahead(tmp_path, days) as master:
        folder = tmp_path / "peer"
        folder.mkdir(mode=0o700)
        identity = Identity.load_or_create(folder / "identity.key")
        pem = master.opened.authority.issue(identity.request_pem("alder"), "alder", Party.PEER)
        Credentials(folder, identity, pem, master.opened.authority.certificate_pem)
        with caplog.at_level(logging.WARNING):
            error = await why_it_ended(master, folder, 0.5)
    (told,) = [r.getMessage() for r in caplog.records if "clock" in r.getMessage()]
    assert told.startswith("by this machine's clock it is ")
    assert told.endswith(WRONG_CLOCK_HINT)
    assert "certificate" in told
    assert (error.exit_code, error.hint) == (ExitCode.UNREACHABLE, WRONG_CLOCK_HINT)
    assert "by this machine's clock it is " in str(error)
