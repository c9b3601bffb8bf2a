"""``holdfast config plan`` as users see it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.cli.options import Parsed
from holdfast.daemon.cli.plan_command import (
    COUNT,
    LATENCY,
    LINE,
    PAYLOAD_SHARE,
    STEP_TIME,
)
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.planning.predict import PROGRAM_BYTES, memory_bytes
from holdfast.membership.spec.spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
LARGE_MODELS = (ROOT / "docs" / "large-models.md").read_text()
CASE = ("--params", "30M", "--step-time", "0.1", "--peers", "4", "--bandwidth", "50mbit")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text("[diloco]\nsync_every = 50\n")
    monkeypatch.chdir(tmp_path)


def plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(commands, ["config", "plan", *arguments])


@pytest.mark.parametrize(
    ("quantity", "text", "amount"),
    [
        (COUNT, "1e9", 1e9),
        (COUNT, "30M", 30e6),
        (COUNT, "1.3B", 1.3e9),
        (COUNT, "125m", 125e6),
        (COUNT, "7", 7.0),
        (STEP_TIME, "0.1", 0.1),
        (STEP_TIME, "100ms", 0.1),
        (STEP_TIME, "2 s", 2.0),
        (LATENCY, "0", 0.0),
        (LINE, "100mbit", 12.5e6),
        (LINE, "1Gbit/s", 125e6),
        (LINE, "100Mbps", 12.5e6),
        (LINE, "12.5MB/s", 12.5e6),
    ],
)
def test_amounts_are_read_with_their_units(
    quantity: Parsed[float], text: str, amount: float
) -> None:
    assert quantity.convert(text, None, None) == pytest.approx(amount)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"--params": "many"}, "'many' is not valid; examples: 1e9, 30M or 1.3B"),
        ({"--params": "0"}, "'0' is not between 1 and 1e+15 parameters"),
        ({"--params": "1e999"}, "is not between 1 and 1e+15 parameters"),
        ({"--params": "nan"}, "is not valid"),
        ({"--step-time": "0"}, "--step-time"),
        ({"--step-time": "-1"}, "--step-time"),
        ({"--bandwidth": "100"}, "examples: 100mbit, 1gbit or 12MB/s"),
        ({"--bandwidth": "100mb"}, "examples: 100mbit, 1gbit or 12MB/s"),
        ({"--bandwidth": "0mbit"}, "is not between 100 and 1e+12 B/s; examples: 100mbit"),
        ({"--bandwidth": ""}, "give also --bandwidth 100mbit (or --upload and --download)"),
        ({"--peers": "1"}, "--peers"),
        ({"--peers": ""}, "give also --peers 8"),
        (
            dict.fromkeys(("--params", "--step-time", "--peers"), ""),
            "give also --params 30M, --step-time 100ms, --peers 8",
        ),
        ({"--latency": "1h"}, "--latency"),
    ],
)
def test_errors_name_the_option_and_an_example(change: dict[str, str], named: str) -> None:
    options = dict(zip(CASE[::2], CASE[1::2], strict=True)) | change
    told = plan(
        "run.toml", *(word for name, value in options.items() if value for word in (name, value))
    )
    assert told.exit_code == ExitCode.USAGE
    assert named in told.stderr


def test_both_ways_of_naming_the_line_are_one_too_many() -> None:
    told = plan("run.toml", *CASE, "--upload", "20mbit", "--download", "300mbit")
    assert told.exit_code == ExitCode.USAGE
    alone = plan("run.toml", *CASE[:-2], "--upload", "20mbit", "--download", "300mbit", "--json")
    line = json.loads(alone.stdout)["conditions"]["line"]
    assert line == {"up_bytes_per_s": 2.5e6, "down_bytes_per_s": 37.5e6}


def test_run_tomls_stand_side_by_side(tmp_path: Path) -> None:
    streaming = tmp_path / "streaming.toml"
    streaming.write_text("[diloco]\nsync_every = 50\nfragments = 25\noverlap = 8\n")
    told = plan(str(tmp_path / "run.toml"), str(streaming), *CASE, "--json")
    one, other = json.loads(told.stdout)["predictions"]
    assert (one["sync_every"], one["fragments"], other["fragments"]) == (50, 1, 25)
    assert one["needed_bits_per_s"] is None, "there is no overlap: no line is fast enough"
    assert other["utilisation"] > one["utilisation"]


def test_peers_are_those_of_the_run_toml(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[membership]\ncontributors = 8\n")
    told = plan(str(tmp_path / "run.toml"), *CASE[:4], *CASE[6:], "--json")
    assert json.loads(told.stdout)["conditions"]["peers"] == 8


def test_a_run_toml_that_is_missing_is_named() -> None:
    told = plan("nowhere.toml", *CASE)
    assert "cannot read nowhere.toml" in str(told.exception)


def test_the_documented_example_is_the_real_output(tmp_path: Path) -> None:
    example = re.search(r"<!-- plan: begin.*?-->\n```text\n\$ (.*?)\n(.*?)```", CHOOSING, re.DOTALL)
    assert example is not None
    before = CHOOSING[: example.start()]
    specs = re.findall(r"```toml\n(.*?)```", before, re.DOTALL)[-2:]
    for name, spec in zip(("run.toml", "other.toml"), specs, strict=True):
        (tmp_path / name).write_text(spec)
    words = example.group(1).split()
    assert words[:4] == ["holdfast", "config", "plan", "run.toml"]
    told = plan(*words[3:])
    assert [line.rstrip() for line in told.stdout.splitlines()] == example.group(2).splitlines()


def test_headers_take_their_part_of_the_line_that_was_told() -> None:
    """The line is printed as it was told; rates of lines are 1 / 0.94 of those of tensor bytes."""
    Path("overlapped.toml").write_text("[diloco]\nfragments = 20\noverlap = 5\n")
    document = json.loads(plan("overlapped.toml", *CASE, "--latency", "0", "--json").stdout)
    assert document["conditions"]["line"]["up_bytes_per_s"] == pytest.approx(50e6 / 8)
    (found,) = document["predictions"]
    assert found["peak_bits_per_s"] <= 50e6 * (1 + 1e-9)
    payload_bits_per_s = 8 * found["round_bytes"] / found["transfer_s"]
    assert payload_bits_per_s == pytest.approx(PAYLOAD_SHARE * found["peak_bits_per_s"])
    assert payload_bits_per_s == pytest.approx(PAYLOAD_SHARE * 50e6, rel=0.02)


# ---------------------------------------------------------------- inside a peer


def test_the_documented_inside_is_the_real_output() -> None:
    example = re.search(
        r"<!-- inside: begin.*?-->\n```text\n\$ (.*?)\n(.*?)```", LARGE_MODELS, re.DOTALL
    )
    assert example is not None
    told = plan(*example.group(1).split()[3:])
    assert [line.rstrip() for line in told.stdout.splitlines()] == example.group(2).splitlines()


def test_hosts_are_read_as_people_write_them() -> None:
    for text, hosts in (("24", [(1, 24)]), ("2X24, 1 x 12", [(2, 24), (1, 12)])):
        told = json.loads(plan("--gpus", text, "--params", "1B", "--json").stdout)["hosts"]
        assert told == [{"count": count, "gpu_bytes": gb * 1e9} for count, gb in hosts]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--gpus many --params 7B", "'many' is not valid; examples: 24 (a GPU of 24 GB)"),
        ("--gpus 24,,12 --params 7B", "'24,,12' is not valid"),
        ("--gpus 0x24 --params 7B", "'0x24' is not valid; examples: 24"),
        ("--gpus 1.5x24 --params 7B", "'1.5x24' is not valid"),
        ("--gpus 64x80 --params 7B", "a peer has at most 63 GPUs"),
        ("--gpus 24", "give also --params 7B"),
        ("--gpus 24 --params 7B --step-time 1", "leave --step-time and --peers out"),
        ("--gpus 24 --params 7B --shape 4096x32", "--shape is layers x width: 32x4096"),
        ("--gpus 24 --params 7B --shape 32", "'32' is not valid; examples: 32x4096"),
        ("--gpus 24 --params 7B --batch 0x8", "'0x8' is not valid; examples: 1x2048"),
        ("--gpus 24 --params 7B --shape 32x4096,1x2", "'32x4096,1x2' is not valid"),
        ("--params 7B --batch 1x8", "--shape and --batch go with --gpus"),
    ],
)
def test_nonsense_about_gpus_is_answered_with_an_example(arguments: str, named: str) -> None:
    told = plan(*arguments.split())
    assert told.exit_code == ExitCode.USAGE
    assert named in told.stderr


def test_what_does_not_fit_is_told() -> None:
    told = " ".join(plan("--gpus", "2x24,1x12", "--params", "7B").stdout.split())
    assert "Nothing fits. Least is lacking with FSDP2, activations recomputed" in told
    assert "a smaller --batch or a smaller model" in told
    alone = " ".join(plan("--gpus", "8,8", "--params", "100M").stdout.split())
    assert "let each join as a peer of its own" in alone


def test_hosts_hold_their_boxes_and_the_head_all() -> None:
    copies = json.loads(plan("--gpus", "24,24", "--params", "1B", "--json").stdout)
    assert copies["chosen"]["layout"] == "plain"
    assert copies["memory_bytes"] == [memory_bytes(RunSpec(), 10**9), 3 * 4e9 + PROGRAM_BYTES]
    halves = json.loads(plan("--gpus", "24,24", "--params", "2B", "--json").stdout)
    assert halves["chosen"]["layout"] == "FSDP2"
    assert halves["memory_bytes"][1] == 3 * 4e9 + PROGRAM_BYTES


def test_json_has_all_layouts_and_the_run_toml_counts() -> None:
    Path("streaming.toml").write_text("[diloco]\nfragments = 25\noverlap = 2\n")
    arguments = ("--gpus", "2x24,1x12", "--params", "2B", "--batch", "2x512", "--json")
    whole = json.loads(plan(*arguments).stdout)
    assert len(whole["fits"]) == 6
    assert whole["chosen"] in whole["fits"]
    assert whole["model"]["tokens"] == 1_024
    parts = json.loads(plan("streaming.toml", *arguments).stdout)
    for one, other in zip(parts["memory_bytes"], whole["memory_bytes"], strict=True):
        assert one < other
    shaped = json.loads(plan(*arguments, "--shape", "10x4096x500").stdout)["model"]
    assert (shaped["layers"], shaped["width"], shaped["vocabulary"]) == (10, 4_096, 500)
