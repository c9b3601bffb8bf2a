"""What differs between two specs, and another number of rounds."""

from __future__ import annotations

from holdfast.membership.spec.spec import RunSpec
from holdfast.membership.spec.spec_changes import changed_settings, with_end


def test_each_setting_that_differs_is_named_with_both_values() -> None:
    before = RunSpec.parse("[run]\nrounds = 20\n[membership]\ngrace_s = 5.0\n[diloco]\ngroups = []")
    after = RunSpec.parse("[run]\nrounds = 30\n[membership]\ngrace_s = 7\n[sync]\n# a comment\n")
    assert changed_settings(before, after) == [
        "run.rounds from 20 to 30",
        "membership.grace_s from 5 to 7",
    ]
    assert changed_settings(before, before) == []


def test_only_the_ends_of_a_run_change() -> None:
    spec = RunSpec.parse("[run]\nname = 'a'\nrounds = 20\n[data]\nseed = 1\n")
    longer = with_end(spec, rounds=40)
    assert changed_settings(spec, longer) == ["run.rounds from 20 to 40"]
    both = with_end(spec, rounds=0, epochs=7)
    assert changed_settings(spec, both) == ["run.rounds from 20 to 0", "data.epochs from 0 to 7"]
    assert RunSpec.parse(both.toml_text) == both
    assert with_end(spec) == spec
