"""The master against every fault that the model knows, in any order, at any moment."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.membership.machine import MasterMachine

# The search takes seconds. What it finds is made small for up to five minutes; a timeout in the middle
# of that would be one more failure to hypothesis, and hide the one that was found.
pytestmark = pytest.mark.timeout(900)

TestMaster = MasterMachine.TestCase
TestMaster.settings = settings(max_examples=100, stateful_step_count=50)
