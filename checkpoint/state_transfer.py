"""State transfer: a joiner fetches a fragment from several donors at once, block by checked block.

    joiner   > IndexRequest(head)               donor   < Index(head, digests) or BlocksRefused
             > BlocksRequest(transfer, blocks)          < one BLOCK frame per block or BlocksRefused

The root comes from the master, the index must hash to the root, and every block must hash to its
entry in the index: a donor can be slow or gone, but it cannot pass off other bytes. A donor that
sends other bytes is dropped and reported.

The two sides are ``joiner.Joiner`` and ``donor.Donor``; this file holds the results of a fetch.
Both take messages from the links by ``receive``, which never waits, so a link's control stream
never queues behind blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ..protocol.errors import StateMismatchError
from ..protocol.messages import FragmentHead


class FetchFailedError(StateMismatchError):
    """No donor is left for the fragment. Report it to the master, which may name other donors.

    Attributes:
      bad_donors: peer ids of donors that served wrong bytes.
      reasons: why each donor was dropped, by peer id.
    """

    def __init__(self, head: FragmentHead, bad: Sequence[str], reasons: dict[str, str]) -> None:
        details = "; ".join(f"{peer[:8]}: {why}" for peer, why in reasons.items()) or "no donors"
        super().__init__(f"could not fetch version {head.version} of {head.fragment}: {details}")
        self.bad_donors = tuple(bad)
        self.reasons = reasons


@frozen
class FetchReport:
    """The result of a fetch.

    Attributes:
      received_bytes: bytes of received blocks; 0 when all were here before.
      donors: peer ids of donors that served at least one block.
      bad_donors: peer ids of donors that served wrong bytes.
    """

    received_bytes: int
    donors: tuple[str, ...]
    bad_donors: tuple[str, ...]
