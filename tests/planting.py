"""Bugs that tests plant in production code, to see that something notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


class Bugs(dict[str, Plant]):
    """By name, what plants each."""

    def named(self, name: str) -> Callable[[Plant], Plant]:
        """A decorator: the function plants the bug of this name."""

        def register(plant: Plant) -> Plant:
            self[name] = plant
            return plant

        return register
