"""``run.toml``: what is accepted, and how a mistake is explained."""

from __future__ import annotations

import pytest

from holdfast.membership.spec.mistakes import SPEC_CHARS_MAX
from holdfast.membership.spec.spec import OVERLAP_AUTO_MAX, DilocoTable, RunSpec, RunTable
from holdfast.protocol.errors import UserError

FULL = """
[run]
name = "shakespeare"
rounds = 25

[diloco]
sync_every = 50
fragments = 2
overlap = 5
outer_lr = 0.4
outer_momentum = 0.8
nesterov = false

[membership]
contributors = 4
min_members = 2
quorum = 0.75
grace_s = 3
deadline_s = 20

[reduce]
codec_up = "int8"
codec_down = "int8"
chunk_bytes = 65536
"""


def test_every_key_is_read() -> None:
    spec = RunSpec.parse(FULL)
    assert (spec.run.name, spec.run.rounds) == ("shakespeare", 25)
    assert (spec.diloco.sync_every, spec.diloco.fragments, spec.diloco.overlap) == (50, 2, 5)
    assert (spec.diloco.outer_lr, spec.diloco.outer_momentum) == (0.4, 0.8)
    assert not spec.diloco.nesterov
    assert (spec.membership.contributors, spec.membership.min_members) == (4, 2)
    assert (spec.membership.quorum, spec.membership.grace_s) == (0.75, 3)
    assert (spec.reduce.codec_up, spec.reduce.chunk_bytes) == ("int8", 65536)
    assert RunSpec.parse(spec.toml_text) == spec


def test_an_empty_file_has_the_defaults() -> None:
    spec = RunSpec.parse("")
    assert spec == RunSpec()
    assert (spec.diloco.sync_every, spec.membership.min_members) == (100, 1)


def test_groups_are_the_fragments_and_each_may_have_its_codec() -> None:
    spec = RunSpec.parse(
        "[diloco]\ngroups = [['embed*'], ['h.0.*', 'h.1.*'], ['h.2.*']]\n"
        "[reduce]\ncodec_up = ['bf16', 'nf4', 'topk']\ncodec_down = 'int8'\n"
    )
    assert spec.diloco.groups == (("embed*",), ("h.0.*", "h.1.*"), ("h.2.*",))
    assert spec.diloco.fragments == 3
    codecs = [spec.reduce.codecs(fragment) for fragment in range(3)]
    assert codecs == [("bf16", "int8"), ("nf4", "int8"), ("topk", "int8")]
    assert hash(spec) == hash(RunSpec.parse(spec.toml_text))


def test_other_timeouts_follow_from_the_deadline() -> None:
    spec = RunSpec.parse("[membership]\ndeadline_s = 10.0\n")
    assert (spec.heartbeat_s, spec.link_deadline_s, spec.settle_s) == (2.0, 5.0, 1.0)
    assert spec.link_silence_s == 6.0
    assert RunSpec.parse("[membership]\ndeadline_s = 1.0\n").link_silence_s == 0.75


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[diloco]\nsync_evry = 3", "did you mean 'sync_every'"),
        ("[memberships]\n", "did you mean 'membership'"),
        ("[run]\nzzz = 1", "known: name, rounds"),
        ("run = 3", "run: must be a table"),
        ("[run", "run.toml: "),
        ("[diloco]\nsync_every = '3'", "sync_every: must be a whole number, got '3'"),
        ("[diloco]\nsync_every = true", "whole number, got True"),
        ("[checkpoint]\npeers = 'master'", '"every", "asked" or a number from 1 to'),
        ("[checkpoint]\npeers = 0", "a number from 1 to"),
        ("[checkpoint]\npeers = true", "a number from 1 to"),
        ("[checkpoint]\nkeep_count = 0", "from 1 to"),
        ("[checkpoint]\nevery = 3", "checkpoint.every: unknown key"),
        ("[diloco]\nsync_every = 0", "from 1 to"),
        ("[diloco]\nnesterov = 1", "true or false"),
        ("[diloco]\nouter_lr = nan", "from 0 to 100"),
        ("[diloco]\nouter_lr = -0.1", "from 0 to 100"),
        ("[diloco]\nouter_lr = true", "must be a number"),
        ("[diloco]\nfragments = 200", "must not exceed sync_every"),
        ("[diloco]\noverlap = 101", "must not exceed sync_every"),
        ("[diloco]\npattern = 'sequential'", "name their tensors in groups"),
        ("[reduce]\nerror_feedback = false", "feedback_decay = 0.0 is none of it"),
        ("[diloco]\ngroups = 'h.*'", "groups: must be a list of lists of names"),
        ("[diloco]\ngroups = ['h.*']", "groups: must be a list of lists of names"),
        ("[diloco]\ngroups = [['h.*'], []]", "group 1 of groups must be names"),
        ("[diloco]\ngroups = [['h.*', 3]]", "group 0 of groups must be names"),
        ("[diloco]\nfragments = 3\ngroups = [['a'], ['b']]", "leave fragments out"),
        ("[diloco]\nalgorithm = 'muon'", 'it is gone: write preset = "muon" under [run]'),
        ("[diloco]\nalgorithm = 'eager'", 'it is gone: write preset = "NAME" under [run]'),
        ("[diloco]\nmerge = 'lerp:0.5'", "delta is the one way, leave it out"),
        ("[diloco]\noverlap = 'always'", 'must be "auto" or a whole number'),
        ("[diloco]\noverlap = true", "must be a whole number, got True"),
        ("[reduce]\ncodec_up = ['bf16', 'nf4']", "codec_up: has 2 codecs for 1 fragments"),
        ("[diloco]\nfragments = 2\n[reduce]\ncodec_down = []", "codec_down: has 0 codecs for 2"),
        ("[diloco]\nfragments = 2\n[reduce]\ncodec_up = ['bf16', 'int4']", "got 'int4'"),
        ("[diloco]\nfragments = 2\n[reduce]\ncodec_up = ['bf16', 4]", "got 4"),
        ("[membership]\nquorum = 1.5", "from 0 to 1"),
        ("[membership]\ndeadline_s = 0", "from 0.1"),
        ("[membership]\ncontributors = 2\nmin_members = 3", "no round could ever open"),
        ("[reduce]\ncodec_up = 'int4'", "one of fp32, bf16, int8"),
        ("[reduce]\nchunk_bytes = 1", "from 4096"),
        ('[reduce]\ncombine = "median"', 'must be "mean" or "clipped:R"'),
        ('[reduce]\ncombine = "trimmed"', 'must be "mean" or "clipped:R"'),
        ('[reduce]\ncombine = "clipped:nan"', "R over 0"),
        ("[reduce]\nlanes = 0", "from 1 to 64"),
        ("[reduce]\nlanes = 4\nlanes_max = 2", "must not exceed lanes_max"),
        ('[reduce]\ncongestion = "B B R"', "letters and digits"),
        ('[run]\nname = ""', "1 to 64"),
        ("#" * (SPEC_CHARS_MAX + 1), "longer than"),
    ],
)
def test_a_mistake_is_explained(toml: str, words: str) -> None:
    with pytest.raises(UserError, match=r"run\.toml") as caught:
        RunSpec.parse(toml)
    assert words in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("sync_every", "fragments", "steps"),
    [(100, 1, OVERLAP_AUTO_MAX), (100, 5, 10), (20, 5, 4), (20, 20, 1), (7, 2, 3), (2, 1, 1)],
)
def test_an_automatic_overlap_lasts_until_the_next_turn(
    sync_every: int, fragments: int, steps: int
) -> None:
    table = f"sync_every = {sync_every}\nfragments = {fragments}\noverlap = 'auto'"
    assert RunSpec.parse(f"[diloco]\n{table}").diloco.overlap_steps == steps


@pytest.mark.parametrize("name", ["plain", 'it\'s "quoted"', "back\\slash", "ünïcödé 🙂"])
def test_the_canonical_text_is_the_spec_whatever_its_strings(name: str) -> None:
    groups = ((name, "\x7f\t\n"), ("h.*",))
    spec = RunSpec(RunTable(name=name), DilocoTable(groups=groups, fragments=2))
    assert RunSpec.parse(spec.toml_text) == spec
    assert RunSpec.parse(spec.toml_text).toml_text == spec.toml_text
