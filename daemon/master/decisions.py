"""Types of what a part of the master hands to the coordinator: a decision, made at a time."""

from __future__ import annotations

from collections.abc import Callable

from ...membership.master.state.master_effects import Effect

Decision = Callable[[float], list[Effect]]  # with the clock of decisions; what follows from it
Decide = Callable[[Decision], None]  # has a decision made now and its effects carried out
