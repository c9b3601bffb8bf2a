"""``run.toml``: the settings that the run's operator decides, parsed and checked.

Every other timeout of the system is derived from ``membership.deadline_s``: the properties of
``RunSpec`` say how.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import attrs
from attrs import Factory, field, frozen

from ...protocol.messages import FRAGMENTS_MAX, LANES_OPEN_MAX, MEMBERS_MAX, SAMPLES_MAX
from .mistakes import Mistake, SpecError, check_length, check_tables, read_document
from .preset import PRESETS, with_preset

# Values of codec_up and codec_down; ``collectives`` has the same list and defines them.
FIXED_CODECS = ("fp32", "bf16", "int8", "nf4")
TOPK_CODECS = ("topk", "topk16", "topk8", "topk4")
CODECS = (*FIXED_CODECS, *TOPK_CODECS, *(f"{codec}+zstd" for codec in FIXED_CODECS))
AUTO = "auto"  # of an overlap; see ``DilocoTable.overlap_steps``
SYNC_EVERY = 100  # DiLoCo's own is 500; Streaming DiLoCo's are between 30 and 100
CHUNK_BYTES_MIN = 4_096
CHUNK_BYTES_MAX = 4 * 1024 * 1024  # half of what one frame may carry
STEPS_MAX = 10**9
# Steps of an automatic overlap. A result is merged as soon as it arrives, so a longer overlap would
# cost nothing in a run that keeps up. In a run that does not, results arrive this many steps late.
OVERLAP_AUTO_MAX = 10
SECONDS_MAX = 86_400.0
# After a gap the kernel retransmits within this time at the latest (see
# ``socket_options.retry_soon``).
RETRANSMIT_S = 1.0
SILENCE_SHARE_MAX = 0.75  # of the deadline
CHECKPOINT_S_MAX = 366 * 86_400.0
CHECKPOINTS_MAX = 10_000
EVERY, ASKED = "every", "asked"  # peers that write checkpoints
MEAN = "mean"  # of contributions
CLIPPED = "clipped"  # the robust rule
RADIUS_MAX = 1e6  # of its number
RADIUS_DIGITS_MAX = 12
LEASE_S_MIN = 1.0  # of a journal that masters share: a database may take a part of that to answer


def _whole(low: int, high: int) -> Any:
    def check(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not int:
            raise ValueError(f"{attribute.name} must be a whole number, got {value!r}")
        if not low <= value <= high:
            raise ValueError(f"{attribute.name} must be from {low} to {high}, got {value}")

    return check


def _number(low: float, high: float) -> Any:
    def check(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if type(value) not in (int, float):
            raise ValueError(f"{attribute.name} must be a number, got {value!r}")
        if not low <= value <= high:  # type: ignore[operator]  # nor NaN
            raise ValueError(f"{attribute.name} must be from {low:g} to {high:g}, got {value}")

    return check


def _truth(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if type(value) is not bool:
        raise ValueError(f"{attribute.name} must be true or false, got {value!r}")


def _one_of(*options: str) -> Any:
    def check(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in options:
            named = ", ".join(option for option in options if option)
            raise ValueError(f"{attribute.name} must be one of {named}; got {value!r}")

    return check


def _name(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= 64 or not value.isprintable():
        raise ValueError(f"{attribute.name} must be 1 to 64 printable characters, got {value!r}")


def has_password(url: str) -> bool:
    return bool(re.match(r"\w+://[^/@]*:[^/@]*@", url)) or "password=" in url


def _journal(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value == "":
        return
    if not isinstance(value, str) or not re.match(r"postgres(ql)?://\S+$", value):
        raise ValueError(f'{attribute.name} must be "" or "postgresql://...", got {value!r}')
    if has_password(value):
        raise ValueError(
            f"{attribute.name} must not contain the password, since all members see it: put it into"
            " ~/.pgpass or the variable PGPASSWORD"
        )


def _word(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9_-]{0,15}", value):
        raise ValueError(f"{attribute.name} must be up to 15 letters and digits, got {value!r}")


def _rule(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    kind, colon, amount = value.partition(":") if isinstance(value, str) else ("", "", "")
    if value == MEAN or (kind == CLIPPED and not colon):
        return
    try:
        short = len(amount) <= RADIUS_DIGITS_MAX
        if kind == CLIPPED and short and 0.0 < float(amount) < RADIUS_MAX:
            return
    except ValueError:
        pass
    raise ValueError(f'{attribute.name} must be "mean" or "clipped:R" with R over 0, got {value!r}')


def _trial(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"(shadow:[1-9][0-9]{0,5})?", value):
        raise ValueError(f'{attribute.name} must be "" or "shadow:R" with R over 0, got {value!r}')


def _as_tuples(value: Any) -> Any:
    """Convert TOML's lists to tuples, also nested ones; return any other value unchanged."""
    return tuple(_as_tuples(each) for each in value) if isinstance(value, list) else value


def _groups(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(group, tuple) for group in value):
        raise ValueError(f"{attribute.name} must be a list of lists of names, got {value!r}")
    if len(value) > FRAGMENTS_MAX:
        raise ValueError(f"{attribute.name} must be {FRAGMENTS_MAX} at most, got {len(value)}")
    for number, group in enumerate(value):
        if not group or not all(isinstance(name, str) and name for name in group):
            raise ValueError(f"group {number} of {attribute.name} must be names, got {group!r}")


def _codecs(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    for each in value if isinstance(value, tuple) else (value,):
        _one_of(*CODECS)(instance, attribute, each)


def _overlap(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if isinstance(value, str) and value != AUTO:
        raise ValueError(f'{attribute.name} must be "{AUTO}" or a whole number, got {value!r}')
    if value != AUTO:
        _whole(0, STEPS_MAX)(instance, attribute, value)


def _writers(_instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in (EVERY, ASKED) and not (type(value) is int and 1 <= value <= MEMBERS_MAX):
        raise ValueError(
            f'{attribute.name} must be "{EVERY}", "{ASKED}" or a number from 1 to {MEMBERS_MAX}; '
            f"got {value!r}"
        )


@frozen
class RunTable:
    """``[run]``"""

    name: str = field(default="run", validator=_name)
    rounds: int = field(default=0, validator=_whole(0, STEPS_MAX))  # commits wanted; 0: no end
    # Where the master keeps the run's journal; empty: in its state directory.
    journal: str = field(default="", validator=_journal)
    # Sets what the other tables leave out, see ``preset``. Empty: the keys' own defaults hold.
    preset: str = field(default="", validator=_one_of("", *PRESETS))


@frozen
class DilocoTable:
    """``[diloco]``"""

    sync_every: int = field(default=SYNC_EVERY, validator=_whole(1, STEPS_MAX))  # inner steps, H
    fragments: int = field(default=1, validator=_whole(1, FRAGMENTS_MAX))  # P
    # Patterns of tensors' names, for each fragment; empty: layers are strided over depth.
    groups: tuple[tuple[str, ...], ...] = field(default=(), converter=_as_tuples, validator=_groups)
    overlap: int | str = field(default=0, validator=_overlap)  # steps taken while a round runs
    outer_lr: float = field(default=0.7, validator=_number(0.0, 100.0))
    outer_momentum: float = field(default=0.9, validator=_number(0.0, 1.0))
    nesterov: bool = field(default=True, validator=_truth)
    # "elastic": a round begins when the fastest contributor reaches its step; the others post what
    # they have. "lockstep": it begins when all have reached its step; for comparisons.
    pace: str = field(default="elastic", validator=_one_of("elastic", "lockstep"))

    @property
    def overlap_steps(self) -> int:
        """The steps that a trainer takes at most before it waits for a round's result.

        ``auto`` is the number of steps until the next fragment's turn, ``OVERLAP_AUTO_MAX`` at
        most. A result is merged as soon as it arrives, so the length of a round need not be known.
        """
        if isinstance(self.overlap, int):
            return self.overlap
        steps = min(self.sync_every // self.fragments, OVERLAP_AUTO_MAX)
        return min(max(steps, 1), self.sync_every - 1)


@frozen
class MembershipTable:
    """``[membership]``"""

    contributors: int = field(default=0, validator=_whole(0, MEMBERS_MAX))  # places; 0: no limit
    min_members: int = field(default=1, validator=_whole(1, MEMBERS_MAX))  # to open a round
    # Members beyond the places that are kept in sync; further ones wait in line. -1: no limit.
    spares: int = field(default=-1, validator=_whole(-1, MEMBERS_MAX))
    quorum: float = field(default=0.6, validator=_number(0.0, 1.0))  # share that must be ready
    grace_s: float = field(default=5.0, validator=_number(0.0, SECONDS_MAX))  # after the quorum
    deadline_s: float = field(default=15.0, validator=_number(0.1, SECONDS_MAX))
    # Seconds after which the run goes on from an older version, when no member holds the newest
    # version any more; 0: never.
    rewind_s: float = field(default=300.0, validator=_number(0.0, SECONDS_MAX))
    # The operator approves every newcomer, with any invite.
    approve: bool = field(default=False, validator=_truth)
    # "shadow:R": the first R updates of a newcomer are measured and weigh nothing.
    newcomers: str = field(default="", validator=_trial)
    # All members of one invite together weigh at most this share of a mean.
    invite_share_max: float = field(default=1.0, validator=_number(0.01, 1.0))

    @property
    def trial_rounds(self) -> int:
        """The rounds of a newcomer's trial."""
        return int(self.newcomers.partition(":")[2] or 0)


@frozen
class ReduceTable:
    """``[reduce]``"""

    # One for all fragments, or one for each.
    codec_up: str | tuple[str, ...] = field(default="fp32", converter=_as_tuples, validator=_codecs)
    codec_down: str | tuple[str, ...] = field(
        default="fp32", converter=_as_tuples, validator=_codecs
    )
    # What a lossy codec_up left out of a contribution is added to the peer's next one, times the
    # decay.
    feedback_decay: float = field(default=1.0, validator=_number(0.0, 1.0))
    # The rule by which chunk owners combine contributions; see ``collectives.combine``.
    combine: str = field(default=MEAN, validator=_rule)
    # The probability with which another contributor adds a chunk of a result up again before the
    # commit. See ``audits``.
    audit: float = field(default=0.0, validator=_number(0.0, 1.0))
    # Of float32 values, before encoding, at most: the planner cuts finer for most lines.
    chunk_bytes: int = field(
        default=CHUNK_BYTES_MAX, validator=_whole(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX)
    )
    lanes: int = field(default=2, validator=_whole(1, LANES_OPEN_MAX))  # of a new link
    # While the line has room.
    lanes_max: int = field(default=32, validator=_whole(1, LANES_OPEN_MAX))
    # TCP's congestion control of lanes, where the kernel has it.
    congestion: str = field(default="bbr", validator=_word)

    def codecs(self, fragment: int) -> tuple[str, str]:
        """Return the codecs of contributions to a fragment's rounds, and of their results."""
        up, down = (
            each if isinstance(each, str) else each[fragment]
            for each in (self.codec_up, self.codec_down)
        )
        return up, down


@frozen
class TrainerTable:
    """``[trainer]``"""

    # A trainer that takes longer for a step hangs; the first step has more time. 0: no deadline.
    step_deadline_s: float = field(default=300.0, validator=_number(0.0, SECONDS_MAX))
    # Losses in a row that are not finite, after which its weights are replaced. 0: only an update
    # tells.
    nan_steps: int = field(default=10, validator=_whole(0, STEPS_MAX))


@frozen
class SyncTable:
    """``[sync]``"""

    # The least share of a peer's upload for copies of the state, while its rounds send too.
    donor_share: float = field(default=0.15, validator=_number(0.0, 1.0))


@frozen
class CheckpointTable:
    """``[checkpoint]``"""

    # The peers that write: every peer, this number of the oldest members, or only peers with
    # --checkpoints on their command line.
    peers: int | str = field(default=EVERY, validator=_writers)
    # What a power cut of all machines costs at most: whichever of the two comes first.
    every_rounds: int = field(default=10, validator=_whole(0, STEPS_MAX))  # 0: not by rounds
    # 0: not by time.
    every_s: float = field(default=120.0, validator=_number(0.0, CHECKPOINT_S_MAX))
    keep_count: int = field(default=2, validator=_whole(1, CHECKPOINTS_MAX))
    keep_s: float = field(default=0.0, validator=_number(0.0, CHECKPOINT_S_MAX))  # 0: for ever
    trainer: bool = field(default=False, validator=_truth)  # optimizer and random numbers, too


@frozen
class DataTable:
    """``[data]``"""

    # Which ``run.sampler`` shares out, each once an epoch. 0: as the first trainer says.
    samples: int = field(default=0, validator=_whole(0, SAMPLES_MAX))
    seed: int = field(default=0, validator=_whole(0, 2**63 - 1))  # of the order of the samples
    epochs: int = field(default=0, validator=_whole(0, STEPS_MAX))  # then the run ends; 0: no end


TABLES: dict[str, type] = {
    "run": RunTable,
    "diloco": DilocoTable,
    "membership": MembershipTable,
    "reduce": ReduceTable,
    "trainer": TrainerTable,
    "sync": SyncTable,
    "checkpoint": CheckpointTable,
    "data": DataTable,
}


def contradictions(
    diloco: DilocoTable, members: MembershipTable, reduce: ReduceTable
) -> Iterator[Mistake]:
    """Yield the settings that are valid each, but not together."""
    if diloco.groups and len(diloco.groups) != diloco.fragments:
        yield Mistake(
            ("diloco.fragments", "diloco.groups"),
            f"there are {len(diloco.groups)} groups, each of which is a fragment, and fragments "
            f"is {diloco.fragments}: leave fragments out",
        )
    if diloco.fragments > diloco.sync_every:
        yield Mistake(
            ("diloco.fragments", "diloco.sync_every"),
            f"fragments ({diloco.fragments}) must not exceed sync_every ({diloco.sync_every}):"
            " there would be several rounds per step",
        )
    if diloco.overlap_steps > diloco.sync_every:
        yield Mistake(
            ("diloco.overlap", "diloco.sync_every"),
            f"overlap ({diloco.overlap}) must not exceed sync_every ({diloco.sync_every})",
        )
    for key in ("codec_up", "codec_down"):
        codecs = getattr(reduce, key)
        if isinstance(codecs, tuple) and len(codecs) != diloco.fragments:
            yield Mistake(
                (f"reduce.{key}", "diloco.fragments"),
                f"{key} has {len(codecs)} codecs for {diloco.fragments} fragments: name one for "
                "each, or one for all",
            )
    if reduce.lanes > reduce.lanes_max:
        yield Mistake(
            ("reduce.lanes", "reduce.lanes_max"),
            f"lanes ({reduce.lanes}) must not exceed lanes_max ({reduce.lanes_max})",
        )
    if members.contributors and members.min_members > members.contributors:
        yield Mistake(
            ("membership.min_members", "membership.contributors"),
            f"min_members ({members.min_members}) must not exceed contributors "
            f"({members.contributors}): no round could ever open",
        )


@frozen
class RunSpec:
    """All settings of a run: of the file, of its preset, and defaults."""

    run: RunTable = Factory(RunTable)
    diloco: DilocoTable = Factory(DilocoTable)
    membership: MembershipTable = Factory(MembershipTable)
    reduce: ReduceTable = Factory(ReduceTable)
    trainer: TrainerTable = Factory(TrainerTable)
    sync: SyncTable = Factory(SyncTable)
    checkpoint: CheckpointTable = Factory(CheckpointTable)
    data: DataTable = Factory(DataTable)

    def __attrs_post_init__(self) -> None:
        for contradiction in contradictions(self.diloco, self.membership, self.reduce):
            raise ValueError(contradiction.text)

    @property
    def toml_text(self) -> str:
        """Every setting in one canonical form, as ``run.toml``, for journal, peers and checkpoints.

        With its values written out it is the same run for a holdfast with other defaults.
        """
        lines: list[str] = []
        for name, kind in TABLES.items():
            lines += ["", f"[{name}]"] if lines else [f"[{name}]"]
            table = getattr(self, name)
            for attribute in attrs.fields(kind):
                lines.append(f"{attribute.name} = {_toml(getattr(table, attribute.name))}")
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, toml_text: str) -> RunSpec:
        """Parse and check ``run.toml``; raise SpecError with all its mistakes."""
        document = with_preset(read_document(toml_text))
        tables, mistakes = check_tables(document, TABLES)
        if tables.keys() >= {"diloco", "membership", "reduce"}:
            preset = tables["run"].preset if "run" in tables else ""
            why = f' (preset = "{preset}" sets what the file leaves out)' if preset else ""
            found = contradictions(tables["diloco"], tables["membership"], tables["reduce"])
            mistakes += [attrs.evolve(each, text=each.text + why) for each in found]
        if mistakes:
            raise SpecError(mistakes)
        spec = cls(**tables)
        check_length(spec.toml_text)  # all of it may be longer than what was given
        return spec

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats: four may be lost before a member is taken for dead."""
        return self.membership.deadline_s / 5

    @property
    def journal_lease_s(self) -> float:
        """Seconds of silence after which a master that shares its journal is followed."""
        return max(self.membership.deadline_s / 3, LEASE_S_MIN)

    @property
    def link_deadline_s(self) -> float:
        """Seconds without a byte after which a peer calls another peer lost."""
        return self.membership.deadline_s / 2

    @property
    def link_silence_s(self) -> float:
        """Seconds without a byte after which a link is lost.

        A second more than the link's deadline: after a gap of that length a line has time to carry
        something again, and peers report a stalled link before the master has to ask.
        """
        return min(
            self.link_deadline_s + RETRANSMIT_S, SILENCE_SHARE_MAX * self.membership.deadline_s
        )

    @property
    def settle_s(self) -> float:
        """Seconds that the accused member's own connection has to break before it is removed."""
        return self.membership.deadline_s / 10


def _toml(value: object) -> str:
    """Format a value as TOML would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        # A basic string of TOML has the escapes of JSON, and needs one more.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
