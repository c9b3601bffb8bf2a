"""The lease of a journal that several masters share, as records."""

from __future__ import annotations

from attrs import frozen


@frozen
class Lease:
    """The right to write to the journal; ``fence`` grows with every lease that was taken."""

    holder: str
    fence: int


@frozen
class MasterRow:
    """A master process that has looked at the journal lately.

    Attributes:
      addresses: where it serves, or would serve, peers.
      page: the URL of its page.
      active: it holds the lease.
      left_s: of its lease, if it is active; below 0 if that is over.
    """

    holder: str
    addresses: tuple[str, ...]
    page: str
    active: bool
    left_s: float
