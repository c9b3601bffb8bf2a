"""Presets: what they set, what overrides them, and that the run keeps their values and not their
name alone.
"""

from __future__ import annotations

import attrs
import pytest

from holdfast.membership.spec import preset as module
from holdfast.membership.spec.mistakes import SPEC_CHARS_MAX
from holdfast.membership.spec.preset import PRESETS, format_preset, preset_settings
from holdfast.membership.spec.spec import TABLES, RunSpec
from holdfast.membership.spec.spec_changes import changed_settings, with_end
from holdfast.membership.spec.spec_faults import find_faults
from holdfast.protocol.errors import UserError


def named(preset: str, more: str = "") -> str:
    return f'[run]\npreset = "{preset}"\n{more}'


def value(spec: RunSpec, place: str) -> object:
    table, key = place.split(".")
    return getattr(getattr(spec, table), key)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_alone_is_valid_and_sets_what_it_says(preset: str) -> None:
    text = named(preset)
    spec = RunSpec.parse(text)
    assert find_faults(text)[0] == []
    for place, expected in PRESETS[preset].items():
        assert value(spec, place) == expected
    every = {f"{t}.{a.name}" for t, kind in TABLES.items() for a in attrs.fields(kind)}
    others = every - {"run.preset", *PRESETS[preset]}
    assert all(value(spec, place) == value(RunSpec(), place) for place in others)


def test_a_key_of_the_file_overrides_the_presets() -> None:
    text = named("streaming", "[diloco] # mine\nsync_every = 50\n[reduce]\ncodec_up = 'int8'\n")
    spec = RunSpec.parse(text)
    assert (spec.diloco.sync_every, spec.diloco.fragments) == (50, 5)
    assert (spec.reduce.codec_up, spec.reduce.codec_down) == ("int8", "nf4")


def test_groups_say_how_many_fragments_there_are() -> None:
    spec = RunSpec.parse(named("streaming", "[diloco]\ngroups = [['a'], ['b']]\n"))
    assert spec.diloco.fragments == 2


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_run_keeps_does_not_depend_on_the_table(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal, a peer and a checkpoint may be read by a holdfast whose presets have other
    values.
    """
    spec = RunSpec.parse(named(preset, "[diloco]\nnesterov = false\n"))
    assert RunSpec.parse(spec.toml_text) == spec
    other = {name: {"diloco.outer_lr": 0.1} for name in PRESETS}
    monkeypatch.setattr(module, "PRESETS", other)
    assert RunSpec.parse(spec.toml_text) == spec
    assert RunSpec.parse(named(preset)).diloco.outer_lr == 0.1


def test_a_change_of_the_presets_is_a_change_of_settings() -> None:
    before = RunSpec.parse(named("diloco"))
    after = RunSpec.parse(named("muon"))
    assert changed_settings(before, after) == [
        'run.preset from "diloco" to "muon"',
        "diloco.sync_every from 20 to 10",
        "diloco.outer_lr from 0.7 to 1",
    ]
    more = with_end(after, rounds=99)
    assert (more.run.rounds, more.diloco) == (99, after.diloco)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (named("muno"), 2, "preset must be one of diloco, delayed, streaming, sparse, muon"),
        ("[run]\npreset = 3", 2, "preset must be one of"),
        (named("streaming", "[diloco]\nsync_every = 3"), 4, "fragments (5) must not exceed"),
        (named("delayed", "[diloco]\nsync_every = 5"), 4, "overlap (20) must not exceed"),
        (named("muon", "[checkpoint]\n'a' = '''\n[diloco]\n'''"), 4, "unknown key"),
        (named("muon") + "#" * SPEC_CHARS_MAX, 0, "longer than"),
        (
            named("muon", f"[diloco]\ngroups = [['{'x' * (SPEC_CHARS_MAX - 60)}']]"),
            0,
            "longer than",
        ),
    ],
)
def test_a_mistake_is_named(text: str, line: int, words: str) -> None:
    (error,), _ = find_faults(text)
    assert (error.line, words in error.text) == (line, True), error
    with pytest.raises(UserError, match=r"run\.toml"):
        RunSpec.parse(text)


def test_the_preset_is_named_where_it_is_half_of_a_contradiction() -> None:
    with pytest.raises(UserError, match=r'preset = "streaming" sets what the file leaves out'):
        RunSpec.parse(named("streaming", "[diloco]\nsync_every = 3"))


def test_a_line_says_what_a_preset_sets() -> None:
    document = {"run": {"preset": "muon"}, "diloco": {"sync_every": 5}}
    assert format_preset(document) == ('preset "muon" sets outer_lr = 1.0, outer_momentum = 0.7')
    assert format_preset({}) == ""
    assert preset_settings({"run": 3}) == {}


@pytest.mark.parametrize(
    "text",
    [
        "diloco.sync_every = 9\nrun.preset = 'muon'\n",
        "diloco = { sync_every = 9 }\n" + named("muon"),
        named("muon", "[diloco]\n# sync_every = 7\n'sync_every' = 9\n"),
    ],
)
def test_a_preset_is_filled_in_however_the_file_is_written(text: str) -> None:
    diloco = RunSpec.parse(text).diloco
    assert (diloco.sync_every, diloco.outer_lr) == (9, 1.0)
