"""A run as its master has it before it serves: taken up from its journal, or a new one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, frozen

from ...membership.master.coordinator import Coordinator
from ...membership.master.state.context import LOT_BYTES
from ...membership.master.state.history import TERMS_SKIPPED
from ...membership.master.state.journal import (
    JournalRecord,
    RunCreated,
    SpecChanged,
    TermStarted,
)
from ...membership.spec.spec import RunSpec
from ...membership.spec.spec_changes import changed_settings
from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.trust.authority import Authority
from ..process.exit_codes import ExitCode
from ..process.paths import JOURNAL_FILE, PLACE_FILE, make_private
from ..spec_file import read_spec
from .journal.journal_base import Journal, JournalError
from .journal.journal_store import JournalStore

if TYPE_CHECKING:
    from .journal.shared_journal import HeldJournal


@define
class MasterOptions:
    """The options of a process that can lead a run."""

    spec_path: Path | None  # None: the spec in the journal
    state: Path
    listen: Sequence[Address]
    advertise: Sequence[Address]
    http: Address
    invite: bool = True
    takes_over: bool = False  # the journal is a backup: it may lack records
    also: Sequence[Address] = ()  # addresses of machines that may take over from this one
    http_names: Sequence[str] = ()  # for HTTP, besides this machine's own names


@frozen
class OpenedRun:
    """A run in a new term.

    Attributes:
      resumes: the journal had it before.
      changes: of the settings, since the last start.
    """

    store: Journal
    authority: Authority
    coordinator: Coordinator
    resumes: bool
    changes: list[str]


def open_run(options: MasterOptions, shared: HeldJournal | None) -> OpenedRun:
    """Continue the journal's run in a new term; begin a new run if there is no journal.

    Args:
      shared: a journal that other masters share; None: the one in the state directory.
    """
    if shared is None:
        _check_state(options)
    given = None if options.spec_path is None else read_spec(options.spec_path)
    make_private(options.state)
    store = JournalStore(options.state / JOURNAL_FILE) if shared is None else shared.journal
    records = store.records()
    # Another master may lead by now; this one can wait.
    append = partial(_append, store, records, can_wait=shared is not None)
    created = [record for record in records if isinstance(record, RunCreated)]
    if not created:
        assert given is not None
        run_id = secrets.token_hex(16)
        append(RunCreated(run_id, given.toml_text))
        recorded = given
    else:
        run_id = created[0].run_id
        texts = [r.spec_toml for r in records if isinstance(r, RunCreated | SpecChanged)]
        recorded = RunSpec.parse(texts[-1])
    spec = recorded if given is None else given
    changes = changed_settings(recorded, spec)
    if changes:
        check_same_run(options, recorded, spec)
        append(SpecChanged(spec.toml_text))
    behind = options.takes_over or store.cut is not None
    terms = [record.term for record in records if isinstance(record, TermStarted)]
    term = max([store.last_term, *terms]) + (TERMS_SKIPPED if behind else 1)
    if shared is None:
        authority = Authority.load_or_create(options.state / "authority", run_id)
    else:
        authority = shared.authority(run_id)
    append(TermStarted(term, authority.begin_term(term), behind))
    lot = secrets.token_bytes(LOT_BYTES)
    coordinator = Coordinator.restore(spec, run_id, records, term, lot)
    return OpenedRun(store, authority, coordinator, bool(created), changes)


def _check_state(options: MasterOptions) -> None:
    """Raise UserError without the journal or its authority's key, before any write."""
    exists = (options.state / JOURNAL_FILE).exists()
    place = options.state / PLACE_FILE
    if place.exists() and not exists:
        raise UserError(
            f"the journal of {options.state} is in {place.read_text().strip()}",
            exit_code=ExitCode.CONFIG,
            hint="start it with `holdfast standby RUN_TOML`",
        )
    if not exists and (options.takes_over or options.spec_path is None):
        raise UserError(
            f"there is no journal in {options.state}",
            exit_code=ExitCode.CONFIG,
            hint="copy the run's state there first: `holdfast backup DIR` at its master",
        )
    if exists and not (options.state / "authority" / "authority.key").exists():
        raise UserError(
            f"{options.state} has the journal, but not the key of the run's authority",
            exit_code=ExitCode.CONFIG,
            hint="copy the folder authority/ as well: `holdfast backup DIR` does",
        )


def _append(
    store: Journal, records: list[JournalRecord], record: JournalRecord, *, can_wait: bool
) -> None:
    try:
        store.append(record)
    except JournalError as error:
        if can_wait:
            raise
        raise UserError(
            f"the journal {store.place} cannot be written: {error}",
            hint=f"{store.remedy}, then start the master again",
        ) from error
    records.append(record)


def check_same_run(options: MasterOptions, before: RunSpec, now: RunSpec) -> None:
    if before.run.name != now.run.name:
        raise UserError(
            f"{options.state} has the run {before.run.name!r}, and"
            f" {options.spec_path} is of {now.run.name!r}",
            exit_code=ExitCode.CONFIG,
            hint="a new run needs its own --state DIR; to go on with that one, write "
            f"name = {json.dumps(before.run.name, ensure_ascii=False)} into the file",
        )
    for key in ("fragments", "groups"):
        recorded, given = getattr(before.diloco, key), getattr(now.diloco, key)
        if recorded != given:
            raise UserError(
                f"the run in {options.state} has {key} = {json.dumps(recorded)}, "
                f"{options.spec_path} says {json.dumps(given)}",
                exit_code=ExitCode.CONFIG,
                hint="a new run needs another name, or its own --state DIR",
            )
