"""Effects of ``Replica``, a peer's rules; ``master_effects`` has the master's."""

from __future__ import annotations

from attrs import frozen

from ...protocol import messages as m


class PeerEffect:
    """Base of the effects that the service carries out, in the order given."""

    __slots__ = ()


@frozen
class TellMaster(PeerEffect):
    message: m.Message


@frozen
class TellTrainer(PeerEffect):
    message: m.Message


@frozen
class ReloadTrainer(PeerEffect):
    """Send ``Load``: the trainer takes the shared state and drops its local delta."""

    step: int
    step_limit: int
    spoilt: bool = False


@frozen
class StartReduction(PeerEffect):
    order: m.Reduce
    contribute: bool


@frozen
class FlushReduction(PeerEffect):
    """Exclude the lost peers from the round's reduction, then answer with ``Held``."""

    order: m.Flush


@frozen
class RepairReduction(PeerEffect):
    """Go on without the lost peers; report ``reduction_done`` once the result is complete."""

    order: m.Repair


@frozen
class StopReduction(PeerEffect):
    """Cancel the round's reduction in any attempt."""

    round: int


@frozen
class ApplyRound(PeerEffect):
    """Apply the held result of this attempt by the outer step; report ``applied``."""

    commit: m.Commit


@frozen
class StoreResult(PeerEffect):
    """Store the held result until the copy of the round's fragment is complete."""

    round: int


@frozen
class DropRound(PeerEffect):
    """Forget the round's inputs and results."""

    round: int


@frozen
class FetchFragment(PeerEffect):
    order: m.SyncFragment


@frozen
class StopFetch(PeerEffect):
    fragment: int


@frozen
class DiscardState(PeerEffect):
    """Discard this peer's state: it belongs to another run."""
