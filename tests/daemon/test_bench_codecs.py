"""``holdfast bench codecs``: every codec is measured, and the JSON is what the table shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.collectives.codecs.codecs import CODECS
from holdfast.daemon.bench import codec_bench
from holdfast.daemon.cli.command_line import commands


def test_every_codec_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_bench, "SAMPLE_COUNT", 1 << 16)
    monkeypatch.setattr(codec_bench, "CHUNK_COUNT", 1 << 14)
    monkeypatch.setattr(codec_bench, "MEASURE_S", 0.001)
    path = tmp_path / "codecs.json"
    outcome = CliRunner().invoke(commands, ["bench", "codecs", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    rows = {row["codec"]: row for row in json.loads(path.read_text())["codecs"]}
    assert list(rows) == list(CODECS)
    assert rows["fp32"]["noise_db"] == {"normal": None, "laplace": None, "student": None}
    assert rows["nf4"]["bits"] == 4.25
    assert rows["nf4"]["noise_db"]["normal"] == pytest.approx(20.7, abs=0.3)
    for name, row in rows.items():
        assert name in outcome.output
        assert row["encode_gb_s"] > 0
        assert row["decode_gb_s"] > 0
        assert 0 <= row["zstd_saving"] < 0.5
