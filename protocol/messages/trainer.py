"""What a daemon and the ranks of its trainer tell each other, through a Unix socket."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, le, lt, max_len

from . import fields
from .limits import (
    DIMENSIONS_MAX,
    FRAGMENTS_MAX,
    LEASED_MAX,
    ORDER_KEY_BYTES,
    RANKS_MAX,
    SAMPLES_AHEAD,
    TENSORS_MAX,
)
from .parts import FailureKind, FragmentSize, LeaseRange, Message, ModelLayout


@frozen
class TensorBox:
    """The part of a tensor that a rank holds: ``shape`` elements from ``start`` on, in each
    dimension.
    """

    start: tuple[int, ...] = field(validator=fields.each(fields.count, DIMENSIONS_MAX))
    shape: tuple[int, ...] = field(validator=fields.each(fields.count, DIMENSIONS_MAX))


@frozen
class RankPart:
    """One process of a trainer, and what it holds of the model.

    Ranks with the same ``data_rank`` train on the same samples (tensor parallel, pipelines): their
    tokens count once. ``boxes``: one for each tensor of the layout; empty: the whole model. A box
    without elements says that the rank holds nothing of its tensor, whatever its dimensions.
    """

    rank: int = field(default=0, validator=and_(ge(0), lt(RANKS_MAX)))
    world_size: int = field(default=1, validator=and_(ge(1), le(RANKS_MAX)))
    data_rank: int = field(default=0, validator=and_(ge(0), lt(RANKS_MAX)))
    boxes: tuple[TensorBox, ...] = field(default=(), validator=max_len(TENSORS_MAX))


@frozen
class TrainerHello(Message):
    """Trainer: the first message, of each of its ranks.

    ``software`` and ``script``: the version of torch, and the script's digest; the ranks of a peer
    have the same ones.
    """

    version: int = field(validator=fields.count)
    pid: int = field(validator=fields.count)
    layout: ModelLayout
    part: RankPart = RankPart()
    software: str = field(default="", validator=fields.word)
    script: bytes = field(default=b"", validator=max_len(32))


@frozen
class DrawHello(Message):
    """Sampler: the first message on a connection that draws leased samples for one data rank.

    ``ahead``: so many are leased to this peer before the speed of its trainer is known.
    """

    version: int = field(validator=fields.count)
    data_rank: int = field(validator=and_(ge(0), lt(RANKS_MAX)))
    length: int = field(validator=fields.samples)  # of the data set
    ahead: int = field(default=SAMPLES_AHEAD, validator=and_(ge(1), le(LEASED_MAX)))


@frozen
class Draw(Message):
    """Sampler: the next samples, from the ``index``-th one of this data rank on, ``count`` at
    most.
    """

    index: int = field(validator=fields.count)
    count: int = field(validator=and_(ge(1), le(LEASED_MAX)))


@frozen
class Drawn(Message):
    """Daemon: the positions of those samples. The answer to ``DrawHello`` has the key of the
    order.
    """

    ranges: tuple[LeaseRange, ...] = field(validator=fields.leases)
    key: bytes = field(default=b"", validator=max_len(ORDER_KEY_BYTES))


@frozen
class RankWrites(Message):
    """Daemon to a rank, first: the indices of the tensors that it writes into the posted arena.

    Of ranks that hold the same part of a tensor one writes it.
    """

    tensors: tuple[int, ...] = field(validator=fields.each(fields.count, TENSORS_MAX))


@frozen
class RankOrders(Message):
    """Daemon to all ranks that wait at one step: so many messages follow. See ``RankGate``."""

    count: int = field(validator=fields.count)


@frozen
class RankPassOn(Message):
    """Daemon to a rank that waits for the word only: train on."""


@frozen
class RankWaits(Message):
    """Rank: it waits at this step; ``must``: it cannot train on without a message."""

    step: int = field(validator=fields.count)
    must: bool


@frozen
class RankTrainsOn(Message):
    """Rank: it has handled all messages that it was given, and trains on."""


@frozen
class ArenaOpened(Message):
    """Daemon: the shared and the posted arena; their two file descriptors come with this message.

    ``fragments``: for each fragment the indices of its tensors in the layout, in order.
    """

    fragments: tuple[tuple[int, ...], ...] = field(validator=max_len(FRAGMENTS_MAX))
    sizes: tuple[FragmentSize, ...] = field(validator=max_len(FRAGMENTS_MAX))
    overlap_steps: int = field(validator=fields.count)
    # The trainer sends ``Failing`` after this many losses in a row that are not finite; 0: never.
    nan_steps: int = field(default=0, validator=fields.count)
    # The path that ``KeepState`` writes to; empty: the trainer writes none.
    local_checkpoint: str = field(default="", validator=fields.text)


@frozen
class KeepState(Message):
    """Daemon: write the trainer's local state to disk (optimizer state, random number
    generators).
    """


@frozen
class PostInitial(Message):
    """Daemon: write the model's present tensors into the posted arena, as the run's initial
    weights.
    """


@frozen
class InitialPosted(Message):
    """Trainer: the answer to ``PostInitial``."""


@frozen
class Load(Message):
    """Daemon: replace the model's tensors by the shared state, drop local deltas.

    ``spoilt``: they are not finite, so that the inner optimizer's state is to be dropped, too.
    """

    step: int = field(validator=fields.count)  # the run's global step from now on
    # Not to be passed before the next ``RoundOpened``.
    step_limit: int = field(validator=fields.count)
    finished: bool
    spoilt: bool = False


@frozen
class SetRole(Message):
    """Daemon: train, or (not ``contributing``: as a spare) wait at the step boundary.

    One member of a view leads: it evaluates and saves for the run. ``total_steps`` is the step at
    which the last round is due; 0 if the run has no end.
    """

    contributing: bool
    why: str = field(validator=fields.text)
    leads: bool = False
    total_steps: int = field(default=0, validator=fields.count)


@frozen
class ExtendStepLimit(Message):
    """Daemon: the master is away. Do not wait for rounds; train on as far as ``step_limit``.

    The next ``RoundOpened``, ``Load`` or committed round ends this.
    """

    step_limit: int = field(validator=fields.count)


@frozen
class RoundOpened(Message):
    """Daemon: post the fragment's pseudo-gradient at the first step boundary at or after
    ``at_step``.

    After a ``Load`` the round is offered again, and posted again: ``Posted`` says for which offer.
    The same offer again, with an earlier step: the others wait.
    """

    round: int = field(validator=fields.count)
    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)
    at_step: int = field(validator=fields.count)
    step_limit: int = field(validator=fields.count)
    offer: int = field(default=0, validator=fields.count)


@frozen
class RankSamples:
    """Samples of one data rank's sampler, counted from the start of the trainer.

    ``lost``: trained before the last ``Load``, so they are in no tensor. ``trained``: all so far.
    """

    data_rank: int = field(validator=and_(ge(0), lt(RANKS_MAX)))
    lost: int = field(validator=fields.count)
    trained: int = field(validator=fields.count)


@frozen
class Posted(Message):
    """Trainer: the pseudo-gradient of the fragment is in the posted arena."""

    round: int = field(validator=fields.count)
    fragment: int = field(validator=fields.count)
    version: int = field(validator=fields.count)  # on which its local weights are based
    tokens: int = field(validator=fields.count)
    step: int = field(validator=fields.count)
    step_s: float = field(default=0.0, validator=fields.finite)  # of a recent step, without waiting
    # Of each data rank that draws leased samples; a trainer without a sampler has none.
    samples: tuple[RankSamples, ...] = field(default=(), validator=max_len(RANKS_MAX))
    first_batches: bytes = field(default=b"", validator=max_len(32))  # see ``Ready``
    offer: int = field(default=0, validator=fields.count)  # of ``RoundOpened``


@frozen
class RoundEnded(Message):
    """Daemon: a round's outcome; after a commit the shared arena holds ``version``."""

    round: int = field(validator=fields.count)
    fragment: int = field(validator=fields.count)
    committed: bool
    contributed: bool
    version: int = field(validator=fields.count)
    step: int = field(validator=fields.count)
    step_limit: int = field(validator=fields.count)


@frozen
class Metrics(Message):
    """Trainer: named figures for the dashboard."""

    step: int = field(validator=fields.count)
    values: dict[str, float] = field(validator=fields.metrics)


@frozen
class Failing(Message):
    """Trainer: it failed, for this reason. After ``NAN`` it waits for a ``Load``, else it ends."""

    kind: FailureKind
    reason: str = field(validator=fields.text)


@frozen
class Finished(Message):
    """Daemon: the run is over; ``run.finished`` becomes true at the next step boundary."""


@frozen
class Rejected(Message):
    """Daemon: this trainer cannot take part; it raises an error with this reason."""

    reason: str = field(validator=fields.text)
