"""Warnings: settings of a ``run.toml`` that are allowed but probably not intended.

Each is based on a figure in the reference's table, or on a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator

from .spec import FIXED_CODECS, MEAN, TOPK_CODECS, RunSpec

ROUNDS_FEW = 50  # at a momentum of 0.9 a run of fewer rounds overshoots: 3.6 % worse over 25
MOMENTUM_HIGH = 0.8
STEPS_FEW = 10  # between rounds: fewer send about as much as averaging gradients would
DEADLINE_SHORT_S = 2.0  # a lost packet or a busy machine takes this long
DEADLINE_LONG_S = 120.0  # a round with a dead member waits this long
STEP_DEADLINE_SHORT_S = 10.0  # the first step has four times this; one that compiles takes longer
OUTVOTED_MIN = 3  # contributors among whom a robust rule can leave out one
CHECKED_MIN = 3  # contributors among whom a wrong sum can be told from a wrong check
COARSE_CODECS = (*TOPK_CODECS, "nf4")


SpecWarning = tuple[str, str]  # key, text


def spec_warnings(spec: RunSpec) -> Iterator[SpecWarning]:
    yield from _algorithm_warnings(spec)
    yield from _codec_warnings(spec)
    yield from _time_warnings(spec)
    yield from _checkpoint_warnings(spec)


def _algorithm_warnings(spec: RunSpec) -> Iterator[SpecWarning]:
    diloco, rounds = spec.diloco, spec.run.rounds
    if 0 < rounds < ROUNDS_FEW and diloco.outer_momentum > MOMENTUM_HIGH:
        yield (
            "diloco.outer_momentum",
            f"{diloco.outer_momentum:g} overshoots in a run of only {rounds} rounds; 0.7 is better",
        )
    if diloco.outer_lr == 0:
        yield ("diloco.outer_lr", "0: the run would learn nothing")
    elif diloco.outer_lr > 1 and diloco.outer_momentum > 0:
        yield ("diloco.outer_lr", f"{diloco.outer_lr:g} goes beyond what was learnt")
    if spec.run.preset != "allreduce":
        if diloco.sync_every < STEPS_FEW:
            yield (
                "diloco.sync_every",
                f"rounds every {diloco.sync_every} steps send about what data parallel training "
                "would; 30 to 500 are usual",
            )
        if diloco.pace == "lockstep":
            yield ("diloco.pace", "all trainers wait for the slowest machine at every round")
    turn = diloco.sync_every // diloco.fragments
    if isinstance(diloco.overlap, int) and turn < diloco.overlap:
        yield (
            "diloco.overlap",
            f"{diloco.overlap} steps are longer than from one fragment's round to the next "
            f'({turn}): trainers go on from old weights; "auto" stays below',
        )


def _codec_warnings(spec: RunSpec) -> Iterator[SpecWarning]:
    reduce = spec.reduce
    up, down = (
        {codec.partition("+")[0] for codec in ((each,) if isinstance(each, str) else each)}
        for each in (reduce.codec_up, reduce.codec_down)
    )
    if down & set(TOPK_CODECS):
        yield (
            "reduce.codec_down",
            "topk drops most of a mean of several peers, and no peer sends it again; "
            "int8+zstd loses a third to a half of a percent",
        )
    elif up == {"fp32"} and down - set(FIXED_CODECS[:2]):
        yield ("reduce.codec_down", "results are coarser than what they are made of")
    if up & set(COARSE_CODECS) and reduce.feedback_decay == 0:
        yield ("reduce.feedback_decay", "0: what this coarse codec leaves out is lost")
    if reduce.combine != MEAN and 0 < spec.membership.contributors < OUTVOTED_MIN:
        yield (
            "reduce.combine",
            (
                f"{reduce.combine}: of {spec.membership.contributors} contributors none can be"
                " outvoted"
            ),
        )
    if reduce.audit and 0 < spec.membership.contributors < CHECKED_MIN:
        yield (
            "reduce.audit",
            (
                f"{spec.membership.contributors} contributors: a check needs a third member, which"
                " can tell which of the two is wrong"
            ),
        )
    if spec.sync.donor_share == 0:
        yield ("sync.donor_share", "0: no peer gets a copy of the state while rounds go on")


def _time_warnings(spec: RunSpec) -> Iterator[SpecWarning]:
    members, trainer = spec.membership, spec.trainer
    if members.deadline_s < DEADLINE_SHORT_S:
        yield (
            "membership.deadline_s",
            f"{members.deadline_s:g} s: over the internet, live members are taken for dead",
        )
    if members.deadline_s > DEADLINE_LONG_S:
        yield (
            "membership.deadline_s",
            f"the run waits {members.deadline_s:g} s for each dead member",
        )
    if members.grace_s > members.deadline_s:
        yield (
            "membership.grace_s",
            (
                f"{members.grace_s:g} s for stragglers is more than deadline_s"
                f" ({members.deadline_s:g} s)"
            ),
        )
    if members.quorum < 0.5:
        yield ("membership.quorum", f"{members.quorum:g}: less than half of the peers make a round")
    if members.rewind_s == 0:
        yield (
            "membership.rewind_s",
            "0: a run whose newest state is lost waits for ever instead of going back",
        )
    if trainer.step_deadline_s == 0:
        yield ("trainer.step_deadline_s", "0: a trainer that hangs is never started again")
    elif trainer.step_deadline_s < STEP_DEADLINE_SHORT_S:
        yield (
            "trainer.step_deadline_s",
            (
                f"{trainer.step_deadline_s:g} s: an evaluation, or a first step that compiles, is"
                " ended"
            ),
        )


def _checkpoint_warnings(spec: RunSpec) -> Iterator[SpecWarning]:
    kept = spec.checkpoint
    if not kept.every_rounds and not kept.every_s:
        yield (
            "checkpoint.every_s",
            "no checkpoints while rounds go on: if all peers are killed at once, the run is lost",
        )
    if kept.keep_s and kept.every_s and kept.keep_s < kept.every_s:
        yield ("checkpoint.keep_s", "shorter than from one checkpoint to the next: one is kept")
