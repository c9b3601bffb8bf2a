"""What differs between two specs, and another number of rounds."""

from __future__ import annotations

import pytest

from holdfast.membership.spec.spec import RunSpec
from holdfast.membership.spec.spec_changes import changed_settings, with_end
from holdfast.protocol.errors import UserError


def test_each_setting_that_differs_is_named_with_both_values() -> None:
    before = RunSpec.parse("[run]\nrounds = 20\n[membership]\ngrace_s = 5.0\n[diloco]\ngroups = []")
    after = RunSpec.parse("[run]\nrounds = 30\n[membership]\ngrace_s = 7\n[sync]\n# a comment\n")
    assert changed_settings(before, after) == [
        "run.rounds from 20 to 30",
        "membership.grace_s from 5 to 7",
    ]
    assert changed_settings(before, before) == []


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (
            '# mine\n[run]\nname = "a"   # rounds = 3\nrounds = 20  # then it ends\n[diloco]\n',
            '# mine\n[run]\nname = "a"   # rounds = 3\nrounds = 40  # then it ends\n[diloco]\n',
        ),
        ('[run]\nname = "a"\n', '[run]\nrounds = 40\nname = "a"\n'),
        ("[diloco]\nsync_every = 5\n", "[diloco]\nsync_every = 5\n\n[run]\nrounds = 40\n"),
        ("run.rounds = 2_0\n", "run.rounds = 40\n"),
        ("", "\n[run]\nrounds = 40\n"),
    ],
)
def test_only_the_number_of_rounds_changes_in_the_text(text: str, changed: str) -> None:
    spec = with_end(RunSpec.parse(text), rounds=40)
    assert spec.toml_text == changed
    assert spec.run.rounds == 40
    assert with_end(spec, rounds=0).run.rounds == 0


def test_both_ends_of_a_run_change_in_the_text() -> None:
    text = "[run]\nrounds = 20\n[data]\nseed = 1\n"
    spec = with_end(RunSpec.parse(text), rounds=0, epochs=7)
    assert spec.toml_text == "[run]\nrounds = 0\n[data]\nepochs = 7\nseed = 1\n"
    assert with_end(spec) is spec


@pytest.mark.parametrize("text", ["run = { rounds = 3 }\n", '"run" = { name = "a" }\n'])
def test_a_text_in_which_it_cannot_be_changed_is_refused(text: str) -> None:
    with pytest.raises(UserError) as raised:
        with_end(RunSpec.parse(text), rounds=40)
    assert raised.value.exit_code == 3
