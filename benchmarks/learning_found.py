"""The section of what the field found since: arms of ``learning`` that take hours, measured one by one.

make bench ARGS='--only found'           measure what is missing, then make the section
python -m benchmarks.learning_found      make it of what is kept, whatever seeds each arm has by now
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from benchmarks.learning import KEPT, SEEDS, jobs_of, measure_all, plot, summary, table
from benchmarks.learning_arms import FOUND, VALIDATION_WINDOWS, Outcome, Recipe
from benchmarks.report import RESULTS, new_record
from benchmarks.sections import Measured

NAME, TITLE = "found", "what the field found since"
PLOT = RESULTS / "found.png"


def found() -> Measured:
    """Which code found what is said; whoever changes the arithmetic empties the folder."""
    jobs = jobs_of(FOUND, SEEDS, Recipe(), VALIDATION_WINDOWS, KEPT)
    return _as_section(measure_all(jobs, 1, reuse=True))


def _as_section(outcomes: Sequence[Outcome]) -> Measured:
    figures = summary(outcomes)
    plot(figures, PLOT)
    return [table(figures, PLOT, "make bench ARGS='--only found'")], figures


def main() -> int:
    jobs = jobs_of(FOUND, SEEDS, Recipe(), VALIDATION_WINDOWS, KEPT)
    kept = [job for job in jobs if job.kept() is not None]
    tables, raw = _as_section(measure_all(kept, 1, reuse=True))
    new_record(NAME, TITLE, tables, raw, os.getloadavg()[0]).save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
