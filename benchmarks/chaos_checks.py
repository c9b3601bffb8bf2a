"""What a run under chaos must not break, and what its work was worth.

Everything here is arithmetic on what was seen: heads that peers told, records of the journal,
seconds in which a contributor was live. ``chaos`` brings the observations.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
from attrs import Factory, define, frozen

from holdfast.membership.master.state import journal
from holdfast.membership.master.state.journal import (
    JournalRecord,
    RoundCommitted,
    RoundNumbered,
)
from holdfast.protocol import wire
from holdfast.protocol.messages import Commit

VERSIONS_HELD_MAX = 100_000  # heads that the parity check remembers; a chaos run has hundreds

Head = tuple[int, int]  # fragment, version


@define
class Parity:
    """Digests must be equal at equal versions, whoever tells them and when.

    Attributes:
      violations: sentences, one for each digest that differs from the first one told.
      rolled_back: sentences, one for each daemon that went back to an older version.
    """

    violations: list[str] = Factory(list)
    rolled_back: list[str] = Factory(list)
    heads_seen: int = 0
    newest: dict[int, int] = Factory(dict)  # by fragment: the highest version anybody held
    _roots: dict[Head, tuple[str, str]] = Factory(dict)  # root, and who told it first
    _held: dict[tuple[str, int, int], int] = Factory(dict)  # (name, process, fragment): version

    def saw(self, name: str, process: int, heads: Iterable[Mapping[str, Any]]) -> None:
        """A peer's daemon says what it holds.

        Args:
          process: its process id: another one has lost its memory and may be behind.
        """
        for head in heads:
            fragment, version, root = int(head["fragment"]), int(head["version"]), str(head["root"])
            if not root:
                continue
            self.heads_seen += 1
            self._compare(name, (fragment, version), root)
            before = self._held.get((name, process, fragment), -1)
            if version < before:
                self.rolled_back.append(
                    f"{name} went back from version {before} of fragment {fragment} to {version}"
                )
            self._held[name, process, fragment] = version
            self.newest[fragment] = max(version, self.newest.get(fragment, -1))

    def _compare(self, name: str, key: Head, root: str) -> None:
        if len(self._roots) >= VERSIONS_HELD_MAX:
            del self._roots[next(iter(self._roots))]
        known = self._roots.setdefault(key, (root, name))
        if known[0] != root:
            self.violations.append(
                f"version {key[1]} of fragment {key[0]} is {known[0][:12]} at {known[1]} and "
                f"{root[:12]} at {name}"
            )


# ---------------------------------------------------------------- the journal


@frozen
class Entry:
    """A record and when it was written, by the wall clock."""

    record: JournalRecord
    at_s: float


def read_journal(path: Path) -> list[Entry]:
    """All records of a journal, also of one whose master runs or was killed."""
    with contextlib.closing(sqlite3.connect(str(path), timeout=10.0)) as database:
        rows = database.execute("select kind, body, at_s from records order by id").fetchall()
    return [
        Entry(wire.from_plain(journal.RECORDS[kind], msgpack.unpackb(body)), float(at_s))
        for kind, body, at_s in rows
    ]


@frozen
class Ledger:
    """What a journal says about rounds.

    Attributes:
      aborted: rounds that were numbered and not committed.
      faults: sentences: a number used twice, a version skipped, a commit of no known round.
    """

    committed: int
    aborted: int
    faults: Sequence[str]


def check_journal(entries: Sequence[Entry]) -> Ledger:
    """Every round at most once, and every version after the one before it."""
    numbered: list[int] = []
    committed: list[int] = []
    versions: dict[int, int] = {}
    faults: list[str] = []
    for entry in entries:
        match entry.record:
            case RoundNumbered(round=number):
                if numbered and number <= numbered[-1]:
                    faults.append(f"round {number} was opened after round {numbered[-1]}")
                numbered.append(number)
            case RoundCommitted(commit=commit):
                if committed and commit.round <= committed[-1]:
                    faults.append(f"round {commit.round} commits after round {committed[-1]}")
                if commit.round not in numbered:
                    faults.append(f"round {commit.round} commits and was never opened")
                expected = versions.get(commit.fragment, 0)
                if commit.version != expected:
                    faults.append(
                        f"round {commit.round} commits on version {commit.version} of fragment "
                        f"{commit.fragment}, which is at {expected}"
                    )
                versions[commit.fragment] = commit.version + 1
                committed.append(commit.round)
    return Ledger(len(committed), len(numbered) - len(committed), tuple(faults))


# ---------------------------------------------------------------- goodput


def tokens_in(commit: Commit) -> float:
    """Tokens whose training is in a commit: a contributor counts by the share of chunks it is
    in.
    """
    if not commit.manifest:
        return float(sum(contributor.weight for contributor in commit.contributors))
    chunk_count = sum(run.chunk_count for run in commit.manifest)
    total = 0.0
    for place, contributor in enumerate(commit.contributors):
        present = sum(
            run.chunk_count
            for run in commit.manifest
            if int.from_bytes(run.contributors, "little") >> place & 1
        )
        total += contributor.weight * present / chunk_count
    return total


def committed_tokens(entries: Iterable[Entry], from_s: float, to_s: float) -> float:
    """Tokens that entered commits in this span of the wall clock."""
    return sum(
        tokens_in(entry.record.commit)
        for entry in entries
        if isinstance(entry.record, RoundCommitted) and from_s <= entry.at_s < to_s
    )


@define
class LiveTime:
    """Seconds in which contributors were live, added up over all of them.

    Live is who has a place, the state and a trainer, and is not hurt at the moment: neither killed
    nor stopped nor cut off by us. Time between two looks counts for whom it held at both.
    """

    contributor_s: float = 0.0
    _live: frozenset[str] = frozenset()
    _at_s: float | None = None

    def saw(self, live: Iterable[str], at_s: float) -> None:
        now = frozenset(live)
        if self._at_s is not None:
            self.contributor_s += (at_s - self._at_s) * len(now & self._live)
        self._live, self._at_s = now, at_s


def per_contributor_s(tokens: float, live: LiveTime) -> float:
    """Useful tokens per live contributor-second; 0 if nobody was ever live."""
    return tokens / live.contributor_s if live.contributor_s else 0.0
