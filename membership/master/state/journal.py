"""The journal's records: what is lasting changes only through them (see ``history``)."""

from __future__ import annotations

import attrs
from attrs import frozen

from ....protocol import messages as m


class JournalRecord:
    """Base of all records."""

    __slots__ = ()


@frozen
class RunCreated(JournalRecord):
    """The first record of a run; written by the daemon."""

    run_id: str
    spec_toml: str


@frozen
class TermStarted(JournalRecord):
    """A master process took over; written by the daemon, before any peer may attach."""

    term: int
    # Random; distinguishes masters that began the same term from copies of one journal.
    nonce: bytes = b""
    # The journal may lack its last records, because it was cut or is a copy. Until a round is
    # opened, members may have newer versions than the journal (see ``succession``).
    behind: bool = False


@frozen
class SpecChanged(JournalRecord):
    """The operator gave the run another run.toml, or another number of rounds or epochs.

    A run that was finished goes on if the new spec has more of them than are committed.
    """

    spec_toml: str


@frozen
class MastersKnown(JournalRecord):
    """Addresses of the run's masters: this one's, and those of standby machines."""

    addresses: tuple[str, ...]


@frozen
class VersionAdopted(JournalRecord):
    """The run takes over a version that contributors hold and whose commit the journal has lost."""

    head: m.FragmentHead
    step: int


@frozen
class RunRewound(JournalRecord):
    """The run goes back to older versions: all members that held newer ones are gone."""

    heads: tuple[m.FragmentHead, ...]  # one for each fragment, the state after an earlier commit


@frozen
class PeerAdmitted(JournalRecord):
    """A daemon process got a member number."""

    peer: str
    name: str
    number: int
    incarnation: int


@frozen
class PlaceTaken(JournalRecord):
    """The peer became a contributor."""

    peer: str


@frozen
class PlaceVacated(JournalRecord):
    """A contributor gave up its place, which is a vacancy until another peer takes it."""

    peer: str


@frozen
class RunFounded(JournalRecord):
    """The run has its first weights."""

    layout: m.ModelLayout
    sizes: tuple[m.FragmentSize, ...]
    lineage: bytes
    heads: tuple[m.FragmentHead, ...]


@frozen
class RoundNumbered(JournalRecord):
    """A round was opened. Its number is not used again, even if it is aborted."""

    round: int
    fragment: int = 0
    version: int = 0
    at_step: int = 0
    sync_every: int = 0  # of the schedule that it follows, as is ``moved``
    moved: int = 0


@frozen
class RoundOrdered(JournalRecord):
    """A reduction was ordered; the next master may go on with it (see ``adoption``)."""

    order: m.Reduce
    at_step: int
    ready: tuple[m.Ready, ...]  # what the contributors had posted, in the order's order


@frozen
class RoundCommitted(JournalRecord):
    """The result of a round is part of the run."""

    commit: m.Commit
    # Leased positions whose samples are in it, and were in no committed round before.
    spent: tuple[m.LeaseRange, ...] = ()


@frozen
class DataKnown(JournalRecord):
    """The first sampler told the length of the run's data set."""

    length: int


@frozen
class LeasesReserved(JournalRecord):
    """Positions below this one may have been leased; written for many leases at once."""

    stop: int


@frozen
class RootKnown(JournalRecord):
    """The members agree on the root of a version."""

    head: m.FragmentHead


@frozen
class PeerRevoked(JournalRecord):
    """The operator, or what checkers found, removed a peer for good, and vacated its place."""

    peer: str
    reason: str


@frozen
class PeerDemoted(JournalRecord):
    """The operator made a peer a spare that takes no place, or (``back``) undid that."""

    peer: str
    back: bool


@frozen
class RunPaused(JournalRecord):
    """The operator paused or resumed the opening of rounds."""

    paused: bool


@frozen
class RunFinished(JournalRecord):
    """All rounds are committed, ``round`` as the last one."""

    round: int


RECORDS: dict[str, type[JournalRecord]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, JournalRecord) and kind is not JournalRecord
}
"""All kinds of records, by the names under which the journal stores them."""

for _record in RECORDS.values():
    attrs.resolve_types(_record)  # type: ignore[type-var]  # attrs classes all, their base is not
