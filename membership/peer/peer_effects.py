"""What a peer's rules want done: the effects of ``Replica``, as ``master_effects`` has the master's."""

from __future__ import annotations

from attrs import frozen

from ...protocol.messages import (
    Commit,
    Diagnose,
    Donate,
    Flush,
    Message,
    Reduce,
    Release,
    Repair,
    SyncFragment,
)


class Deed:
    """Base of what the service must do for the machine, in the order given."""

    __slots__ = ()


@frozen
class TellMaster(Deed):
    message: Message


@frozen
class TellTrainer(Deed):
    message: Message


@frozen
class ReloadTrainer(Deed):
    """Send ``Load``: the trainer takes the shared state as it is and drops its local delta."""

    step: int
    hold_step: int


@frozen
class StartReduction(Deed):
    order: Reduce
    contribute: bool


@frozen
class FlushReduction(Deed):
    """Shut the lost out of the round's reduction, then answer with ``Held``."""

    order: Flush


@frozen
class DiagnoseReduction(Deed):
    """Answer with a ``Diagnosis`` of the round's reduction."""

    order: Diagnose


@frozen
class RepairReduction(Deed):
    """Go on without the lost; report ``reduction_done`` when the result is (or still is) whole."""

    order: Repair


@frozen
class StopReduction(Deed):
    """Cancel the round's reduction, whatever its attempt."""

    round: int


@frozen
class ApplyRound(Deed):
    """Apply the held result of this attempt by the outer step; report ``applied``."""

    commit: Commit


@frozen
class DropRound(Deed):
    """Forget the round's inputs and results."""

    round: int


@frozen
class FetchFragment(Deed):
    order: SyncFragment


@frozen
class StopFetch(Deed):
    fragment: int


@frozen
class PinFragment(Deed):
    order: Donate


@frozen
class UnpinFragment(Deed):
    order: Release


@frozen
class DiscardState(Deed):
    """Our state belongs to no run we know: forget it."""
