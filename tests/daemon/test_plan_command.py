"""``holdfast plan`` as users see it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.cli.plan_command import (
    COUNT,
    LATENCY,
    LINE,
    PAYLOAD_SHARE,
    STEP_TIME,
    NumberWithUnit,
)
from holdfast.daemon.exit_codes import ExitCode
from holdfast.membership.spec.spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
CASE = ("--params", "30M", "--step-time", "0.1", "--peers", "4", "--bandwidth", "50mbit")


def plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(commands, ["plan", *arguments])


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
    quantity: NumberWithUnit, text: str, amount: float
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
        ({"--quality": "best"}, "--quality"),
        ({"--fragments-max": "0"}, "--fragments-max"),
        ({"--latency": "1h"}, "--latency"),
    ],
)
def test_errors_name_the_option_and_an_example(change: dict[str, str], named: str) -> None:
    options = dict(zip(CASE[::2], CASE[1::2], strict=True)) | change
    told = plan(*(word for name, value in options.items() if value for word in (name, value)))
    assert told.exit_code == ExitCode.USAGE
    assert named in told.stderr


def test_both_ways_of_naming_the_line_are_one_too_many() -> None:
    told = plan(*CASE, "--upload", "20mbit", "--download", "300mbit")
    assert told.exit_code == ExitCode.USAGE
    alone = plan(*CASE[:-2], "--upload", "20mbit", "--download", "300mbit", "--json")
    line = json.loads(alone.stdout)["conditions"]["line"]
    assert line == {"up_bytes_per_s": 2.5e6, "down_bytes_per_s": 37.5e6}


def test_json_has_the_prediction_and_the_proposal(tmp_path: Path) -> None:
    run_toml = tmp_path / "run.toml"
    run_toml.write_text('[membership]\ncontributors = 8\n[reduce]\ncodec_up = "nf4"\n')
    told = plan(str(run_toml), *CASE[:4], "--bandwidth", "100mbit", "--quality", "frugal", "--json")
    document = json.loads(told.stdout)
    assert document["conditions"]["peers"] == 8
    given, proposed = document["given"], document["proposed"]
    assert (given["sync_every"], given["codec_up"], given["enough"]) == (100, "nf4", False)
    assert given["needed_bits_per_s"] is None, "there is no overlap: no line is fast enough"
    assert proposed["enough"]
    assert proposed["utilisation"] > 0.98 > given["utilisation"]
    assert document["why"]
    assert json.loads(plan(*CASE, "--json").stdout)["given"] is None


def test_a_run_toml_with_the_proposed_settings_is_confirmed(tmp_path: Path) -> None:
    first = plan(*CASE)
    assert first.exit_code == 0
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(first.stdout[first.stdout.index("[diloco]") :])
    assert RunSpec.parse(run_toml.read_text()).diloco.overlap_steps > 0
    again = plan(str(run_toml), *CASE)
    assert "run.toml already has these settings." in again.stdout
    assert "[diloco]" not in again.stdout


@pytest.mark.parametrize("quality", ["exact", "frugal"])
@pytest.mark.parametrize("line", ["100kbit", "100mbit", "100gbit"])
@pytest.mark.parametrize("latency", ["0", "300ms"])
def test_proposals_are_valid_settings(quality: str, line: str, latency: str) -> None:
    told = plan(*CASE[:-1], line, "--latency", latency, "--quality", quality)
    assert told.exit_code == 0
    diloco = RunSpec.parse(told.stdout[told.stdout.index("[diloco]") :]).diloco
    assert diloco.overlap_steps < diloco.sync_every
    assert diloco.fragments <= diloco.sync_every


def test_a_run_toml_that_is_missing_is_named() -> None:
    told = plan("nowhere.toml", *CASE)
    assert "cannot read nowhere.toml" in str(told.exception)


def test_the_documented_example_is_the_real_output(tmp_path: Path) -> None:
    example = re.search(r"<!-- plan: begin.*?-->\n```text\n\$ (.*?)\n(.*?)```", CHOOSING, re.DOTALL)
    assert example is not None
    before = CHOOSING[: example.start()]
    spec = re.findall(r"```toml\n(.*?)```", before, re.DOTALL)[-1]
    (tmp_path / "run.toml").write_text(spec)
    words = example.group(1).split()
    assert words[:3] == ["holdfast", "plan", "run.toml"]
    told = plan(str(tmp_path / "run.toml"), *words[3:])
    assert [line.rstrip() for line in told.stdout.splitlines()] == example.group(2).splitlines()


def test_headers_take_their_part_of_the_line_that_was_told() -> None:
    """The line is printed as it was told; rates of lines are 1 / 0.94 of those of tensor bytes."""
    document = json.loads(plan(*CASE, "--latency", "0", "--json").stdout)
    assert document["conditions"]["line"]["up_bytes_per_s"] == pytest.approx(50e6 / 8)
    found = document["proposed"]
    assert found["peak_bits_per_s"] <= 50e6 * (1 + 1e-9)
    payload_bits_per_s = 8 * found["round_bytes"] / found["transfer_s"]
    assert payload_bits_per_s == pytest.approx(PAYLOAD_SHARE * found["peak_bits_per_s"])
    assert payload_bits_per_s == pytest.approx(PAYLOAD_SHARE * 50e6, rel=0.02)
