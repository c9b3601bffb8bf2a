"""Every error of a run.toml is named with its line, and nothing that a master accepts is an
error.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.spec.preset import PRESETS
from holdfast.membership.spec.spec import TABLES, RunSpec
from holdfast.membership.spec.spec_faults import find_faults

MANY = """\
[run]
nam = "x"
rounds = -3
[dilco]
[diloco]
sync_every = 5
 fragments = 9
[reduce]
codec_up = "jpeg"
lanes = 20
"lanes_max" = 3
[zzz]
"""


def test_all_errors_are_named_with_their_lines() -> None:
    errors, warnings = find_faults(MANY)
    assert warnings == []
    assert [(e.line, e.key, e.near) for e in errors] == [
        (2, "run.nam", "name"),
        (3, "run.rounds", ""),
        (4, "dilco", "diloco"),
        (9, "reduce.codec_up", ""),
        (12, "zzz", ""),
    ]
    assert "from 0 to" in errors[1].text
    errors, _ = find_faults(MANY.replace("jpeg", "int8"))
    assert [(e.line, e.key) for e in errors[3:5]] == [(7, "diloco.fragments"), (10, "reduce.lanes")]


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("[run]\nname = 'x'\n[run", 3, ""),
        ("\nrun = 3", 2, "run"),
        ("run.rounds = -1", 1, "run.rounds"),
        ("[diloco]\nfragments = 1\nalgorithm = 'diloco'", 3, "diloco.algorithm"),
        ("[diloco]\nmerge = 'delta'", 2, "diloco.merge"),
        ("[diloco]\nfragments = 3\ngroups = [['a'], ['b']]", 2, "diloco.fragments"),
        ("x" * 70_000, 0, ""),
        ("[run]\nrounds = " + "9" * 5_000, 2, ""),
        ("[membership]\ngrace_s = " + "9" * 400, 2, "membership.grace_s"),
    ],
)
def test_an_error_has_its_line(text: str, line: int, key: str) -> None:
    ((error,), _) = find_faults(text)
    assert (error.line, error.key) == (line, key)


VALUES = st.one_of(
    st.sampled_from(
        ["0", "1", "3", "-1", "20", "101", "0.5", "1.5", "true", "''", "'auto'", "'fp32'", "'topk'"]
        + ["'lockstep'", "[]", "['bf16', 'nf4']", "[['a'], ['b']]", "nan", "'every'"]
        + [f"'{name}'" for name in PRESETS]
    )
)
KEYS = st.one_of(
    *(
        st.tuples(st.just(name), st.sampled_from([*kind.__annotations__, "nonsense"]))
        for name, kind in TABLES.items()
    )
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_whatever_is_written_is_a_spec_or_has_errors(given: dict[tuple[str, str], str]) -> None:
    text = "\n".join(f"{table}.{key} = {value}" for (table, key), value in given.items())
    errors, _warnings = find_faults(text)
    if not errors:
        assert RunSpec.parse(RunSpec.parse(text).toml_text) == RunSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[run]\nrounds = 25", "diloco.outer_momentum"),
        ("[diloco]\nouter_lr = 0.0", "diloco.outer_lr"),
        ("[diloco]\nouter_lr = 1.5", "diloco.outer_lr"),
        ("[diloco]\nsync_every = 5", "diloco.sync_every"),
        ("[diloco]\npace = 'lockstep'", "diloco.pace"),
        ("[diloco]\nfragments = 4\noverlap = 50", "diloco.overlap"),
        ("[reduce]\ncodec_down = 'topk8'", "reduce.codec_down"),
        ("[reduce]\ncodec_down = 'int8+zstd'", "reduce.codec_down"),
        ("[reduce]\ncodec_up = 'nf4+zstd'\nfeedback_decay = 0", "reduce.feedback_decay"),
        ("[membership]\ncontributors = 2\n[reduce]\ncombine = 'clipped'", "reduce.combine"),
        ("[membership]\ncontributors = 2\n[reduce]\naudit = 0.1", "reduce.audit"),
        ("[sync]\ndonor_share = 0.0", "sync.donor_share"),
        ("[membership]\ndeadline_s = 1.0\ngrace_s = 0.5", "membership.deadline_s"),
        ("[membership]\ndeadline_s = 600.0", "membership.deadline_s"),
        ("[membership]\ngrace_s = 20.0", "membership.grace_s"),
        ("[membership]\nquorum = 0.3", "membership.quorum"),
        ("[membership]\nrewind_s = 0.0", "membership.rewind_s"),
        ("[trainer]\nstep_deadline_s = 0.0", "trainer.step_deadline_s"),
        ("[trainer]\nstep_deadline_s = 3.0", "trainer.step_deadline_s"),
        ("[checkpoint]\nevery_s = 0.0\nevery_rounds = 0", "checkpoint.every_s"),
        ("[checkpoint]\nkeep_s = 60.0", "checkpoint.keep_s"),
    ],
)
def test_a_doubtful_setting_has_a_warning(text: str, key: str) -> None:
    errors, (warning,) = find_faults(text)
    assert errors == []
    assert warning.key == key
    assert warning.line in (0, 2, 3, 4)


@pytest.mark.parametrize("preset", ["", *PRESETS])
def test_what_a_preset_sets_has_no_warning(preset: str) -> None:
    assert find_faults(f"[run]\npreset = '{preset}'") == ([], [])
