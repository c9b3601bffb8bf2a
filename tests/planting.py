"""Bugs that tests plant in production code, to see that something notices.

The seed that shows a bug is recorded beside it and tried first: that takes a fraction of a
second where a search may take a minute. The bug is searched for only when what is recorded shows it
no longer, since the code that it runs through has changed. The test passes then, too, and the run
ends with a line that says what to record. ``SEARCH=1`` searches whatever is recorded, as `make
soak` does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
from attrs import evolve

from holdfast.membership.master.rounds.audits import Auditing
from holdfast.membership.master.routes.routes import Routes

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
Note = Callable[[str, object], None]  # pytest's ``record_property``

TO_RECORD = "to record"  # the property of a test's report


class Bugs(dict[str, Plant]):
    """By name, what plants each.

    Attributes:
      seeds: by name, the seed that is known to show it.
      shown_by: by name, what else a run that shows it needs.
    """

    def __init__(self, plants: Mapping[str, Plant] = MappingProxyType({})) -> None:
        super().__init__(plants)
        self.seeds: dict[str, int] = {}
        self.shown_by: dict[str, tuple[Any, ...]] = {}

    def named(
        self, name: str, *shown_by: object, seed: int | None = None
    ) -> Callable[[Plant], Plant]:
        """A decorator: the function plants the bug of this name, which this seed shows."""

        def register(plant: Plant) -> Plant:
            self[name] = plant
            self.shown_by[name] = shown_by
            if seed is not None:
                self.seeds[name] = seed
            return plant

        return register

    def is_found(
        self,
        name: str,
        patch: Patch,
        note: Note,
        shows: Callable[[int], object],
        seeds: Iterable[int],
    ) -> bool:
        """Plant a bug; return whether a seed shows it (see ``what_shows``)."""
        self[name](patch)
        return what_shows(self.seeds.get(name), shows, seeds, note) is not None

    def are_listed(self, text: str | None) -> bool:
        """Return whether a docstring tells all of them and no others, each from column 4 on."""
        told = re.findall(r"^    (?=\S)(.*)", text or "", re.MULTILINE)
        return len(told) == len(self) and all(
            any(each.startswith(f"{name} ") for each in told) for name in self
        )


def what_shows(
    recorded: int | None,
    shows: Callable[[int], object],
    seeds: Iterable[int],
    note: Note,
) -> int | None:
    """Return a seed that shows the planted bug: the recorded one, else one of ``seeds``, else
    None.
    """
    searching = os.environ.get("SEARCH", "") not in ("", "0")
    if recorded is not None and not searching and shows(recorded):
        return recorded
    found = next((seed for seed in seeds if shows(seed)), None)
    if found is not None and not searching:
        note(TO_RECORD, f"{found} instead of {recorded}")
    return found


def told_to_record(reports: Iterable[object]) -> list[str]:
    """The lines for the end of a run."""
    return [
        f"{report.nodeid}: record {told}"
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, told in report.user_properties
        if name == TO_RECORD
    ]


Make = Callable[[Any], object]  # of a function: what lacks its rule


def always(value: object) -> Make:
    return lambda _real: lambda *_: value


def take_out(patch: Patch, function: tuple[Any, str, Make]) -> None:
    """Put what lacks a rule in a function's place; of a module, also where it was imported.

    Args:
      function: its owner, its name, and what makes one without the rule of it.
    """
    owner, name, make = function
    real = vars(owner)[name]
    lacking, holders = make(real), [owner]
    if isinstance(owner, ModuleType) and callable(real):
        holders += [each for each in sys.modules.values() if vars(each).get(name) is real]
    for holder in holders:
        patch.setattr(holder, name, lacking)


def spares_first(patch: Patch) -> None:
    """Plant it: whoever reaches nobody costs all spares the results."""
    original = Routes.together

    def together(self: Routes, adding: Any, receivers: Any) -> tuple[list[str], list[str]]:
        adding, left = original(self, adding, receivers)
        return adding, left if len(left) == len(receivers) else adding

    patch.setattr(Routes, "together", together)


def one_word(patch: Patch) -> None:
    """Plant it: the word of one checker removes an owner."""
    patch.setattr(Auditing, "_is_common", lambda *_: True)


def silence_is_guilt(patch: Patch) -> None:
    """Plant it: a chunk that cannot be checked counts as wrong."""
    audited = Auditing.audited

    def harsh(self: Auditing, member: Any, message: Any) -> None:
        findings = tuple(evolve(each, differs=True) for each in message.findings)
        audited(self, member, evolve(message, findings=findings))

    patch.setattr(Auditing, "audited", harsh)


def owns_again(patch: Patch) -> None:
    """Plant it: the suspects of a contradiction own chunks when the round is run again."""
    contradicted = Auditing._contradicted

    def forgetful(self: Auditing, round_: Any, *word: Any) -> str:
        why = contradicted(self, round_, *word)
        round_.distrust.barred.clear()
        return why

    patch.setattr(Auditing, "_contradicted", forgetful)
