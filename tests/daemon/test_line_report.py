"""Which links a member reports to the master."""

from __future__ import annotations

import pytest

from holdfast.collectives.links.rates.rate_meter import Reading
from holdfast.daemon.peer.line_report import (
    LINKS_OF_ALL,
    LINKS_REPORTED_MAX,
    heaviest,
    links_reported,
)
from holdfast.protocol.messages import MEMBERS_MAX


def test_the_links_that_carried_most_are_reported() -> None:
    sent_to = {f"{each:032x}": Reading(each * 7 % 200, 1.0) for each in range(1, 200)}
    told = heaviest(sent_to, 200)
    assert len(told) == links_reported(200)
    carried = [reading.carried_bytes for _, reading in told]
    assert (
        carried
        == sorted((each.carried_bytes for each in sent_to.values()), reverse=True)[: len(told)]
    )


@pytest.mark.parametrize("members", [1, 2, 64, 100, 128, 500, MEMBERS_MAX])
def test_what_all_members_report_is_bounded(members: int) -> None:
    told = links_reported(members)
    assert 1 <= told <= LINKS_REPORTED_MAX
    assert told * members <= LINKS_OF_ALL
