"""The example of the small Llama as its page starts it: one command, at toy size."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.test_docs import ROOT, blocks
from tests.processes.harness import environment

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ROUNDS = 9


def test_one_command_goes_from_a_tokenizer_to_a_text_that_the_exported_model_writes(
    tmp_path: Path,
) -> None:
    (line,) = [line for line in blocks(ROOT / "docs" / "llama.md", "sh") if "--peers" in line]
    _python, script, *options = line.split()
    options += ["--size", "toy", "--rounds", str(ROUNDS)]
    options += ["--folder", str(tmp_path), "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [sys.executable, script, *options],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    found = json.loads((tmp_path / "found.json").read_text())
    first, *_, last = [each["loss"] for each in found["curve"]]
    model = json.loads((tmp_path / "model" / "config.json").read_text())
    assert last < math.log(model["vocab_size"]) - 1.0, "less than a model that knows nothing"
    assert last < first
    assert found["text"].startswith("def main(")
    assert len(found["text"]) > len("def main(") + 8
    assert found["text"] in done.stdout
    assert re.search(r"^ +\d+  \d\.\d{3}  #+$", done.stdout, re.MULTILINE)
    assert "nf4" in (tmp_path / "run.toml").read_text()
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
