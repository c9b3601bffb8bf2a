"""The two commands of README on a bare machine, as root and as an ordinary user: ``make images``.

pytest does not collect this file. ``make test`` takes as long there as here, so it runs one file's
tests after all of its set-up; ``python -m tests.images.bare -- test`` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.images import bare, base

USERS = ("root", "person")
LONG_S = 1_800


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("arguments", [("demo",), ("test", "ARGS=tests/protocol/test_invite.py")])
@pytest.mark.timeout(LONG_S)
def test_make_does_all_the_set_up(user: str, arguments: tuple[str, ...]) -> None:
    assert not base.why_not(), base.why_not()
    status, transcript = bare.run(user, arguments)
    assert status == 0, base.log_tail(transcript)
