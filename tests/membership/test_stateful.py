"""The master against every fault that the model knows, in any order, at any moment."""

from __future__ import annotations

from hypothesis import settings

from tests.membership.machine import MasterMachine

TestMaster = MasterMachine.TestCase
TestMaster.settings = settings(max_examples=100, stateful_step_count=50)
