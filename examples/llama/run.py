"""Train the small Llama on this machine from nothing to a text that it writes, with one command.

    python examples/llama/run.py

    tokenizer    trained on Python's own sources; nothing is downloaded
    master       of the run in run.toml: streaming DiLoCo, 4 bits a value
    peers        two daemons, each with train.py as its training command
    export       `holdfast export` makes a plain file of a peer's last checkpoint
    model        loaded back with ``from_pretrained``, it goes on with a line of code

Everything stays in one folder and on loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from train import SIZES, make_model, train_tokenizer  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
INVITE = re.compile(r"holdfast1\.\S+")
VALIDATION = re.compile(r"validation loss ([\d.]+) at step (\d+)")
NAMES = ("alder", "birch", "cedar", "rowan", "aspen", "maple", "hazel", "larch")
POLL_S = 2.0
START_S = 120.0  # for a master to print its invite
EXIT_S = 60.0  # for peers to write their last checkpoint
PROMPT = "def main("
NEW_TOKENS = 120
BAR_CHARS = 40  # of the longest bar of the curve
LOOPBACK = ("--listen=127.0.0.1:0", "--http=127.0.0.1:0")


def holdfast(*arguments: str) -> str:
    """Run a command of holdfast that ends, and return what it prints."""
    command = [sys.executable, "-m", "holdfast", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"holdfast {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


class LlamaRun:
    """The processes of the run, each with a log in the folder."""

    def __init__(self, folder: Path, size: str, rounds: int | None) -> None:
        self.folder = folder
        self.size = size
        self.rounds = rounds
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def spawn(self, name: str, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "holdfast", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def start_master(self) -> str:
        """Start the master, and return the invite that it prints."""
        text = (HERE / "run.toml").read_text()
        if self.rounds is not None:
            text = re.sub(r"^rounds = \d+", f"rounds = {self.rounds}", text, flags=re.MULTILINE)
        (self.folder / "run.toml").write_text(text)
        state = f"--state={self.folder / 'master'}"
        self.spawn("master", "master", str(self.folder / "run.toml"), state, *LOOPBACK)
        until_s = time.monotonic() + START_S
        while (found := INVITE.search((self.folder / "master.log").read_text())) is None:
            self.check()
            if time.monotonic() > until_s:
                raise SystemExit(f"the master gave no invite; see {self.folder}/master.log")
            time.sleep(0.1)
        return found[0]

    def start_peer(self, name: str, invite: str) -> None:
        script = [sys.executable, str(HERE / "train.py")]
        options = ["--folder", str(self.folder / "model"), "--size", self.size]
        state = f"--state={self.folder / name}"
        self.spawn(name, "join", invite, "--name", name, state, *LOOPBACK, "--", *script, *options)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            holdfast("status", "--json", f"--state={self.folder / 'master'}")
        )
        return answer

    def check(self) -> None:
        for name, process in self.processes.items():
            if (process.poll() or 0) > 0:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                raise SystemExit(f"{name} ended with {process.returncode}:\n{log[-2000:]}")

    def follow(self) -> None:
        """Print the run's progress until it is finished."""
        shown = -1
        while True:
            self.check()
            status = self.status()
            if status["committed"] != shown:
                shown = status["committed"]
                losses = [each["loss"] for each in status["members"] if each["loss"] is not None]
                mean = f"{sum(losses) / len(losses):.3f}" if losses else "-"
                print(f"step {status['step']:5d}  rounds {shown:4d}  loss {mean}", flush=True)
            if status["state"] == "finished":
                return
            time.sleep(POLL_S)

    def await_peers(self) -> None:
        for name, process in self.processes.items():
            if name != "master":
                process.wait(EXIT_S)

    def curve(self) -> list[dict[str, float]]:
        """Return the validation losses that the peers have printed, by step."""
        logs = [path.read_text(errors="replace") for path in self.folder.glob("*.log")]
        found = {int(step): float(loss) for log in logs for loss, step in VALIDATION.findall(log)}
        return [{"step": step, "loss": loss} for step, loss in sorted(found.items())]

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def draw_curve(curve: list[dict[str, float]]) -> str:
    """Return a table of the validation losses, with a bar for each."""
    highest = max(each["loss"] for each in curve)
    lines = [" step  validation loss"]
    for each in curve:
        bar = "#" * round(BAR_CHARS * each["loss"] / highest)
        lines.append(f"{each['step']:5.0f}  {each['loss']:.3f}  {bar}")
    return "\n".join(lines)


def write_text(folder: Path) -> str:
    """Load the exported model as any other, and let it go on with a line of code."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(2)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    room = model.config.max_position_embeddings - prompt.shape[1]
    ids = model.generate(
        prompt, max_new_tokens=min(NEW_TOKENS, room), do_sample=True, temperature=0.7, top_k=20
    )
    text: str = tokenizer.decode(ids[0])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, choices=range(2, len(NAMES) + 1), default=2)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, help="by default those of run.toml")
    parser.add_argument("--folder", type=Path, help="for all files; by default a new one")
    parser.add_argument("--prepare", action="store_true", help="make the folder and stop")
    parser.add_argument("--json", type=Path, help="a file for the curve and the text")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="holdfast-llama-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"all files are in {folder}")

    model = folder / "model"
    train_tokenizer(SIZES[arguments.size]).save_pretrained(model)
    plain = make_model(SIZES[arguments.size])
    plain.config.save_pretrained(model)
    count = sum(each.numel() for each in plain.parameters())
    print(f"a Llama of {count / 1e6:.2f} million parameters, {arguments.peers} peers", flush=True)

    if arguments.prepare:
        return
    run = LlamaRun(folder, arguments.size, arguments.rounds)
    try:
        invite = run.start_master()
        for name in NAMES[: arguments.peers]:
            run.start_peer(name, invite)
        run.follow()
        run.await_peers()
    finally:
        run.stop()
    holdfast("export", str(model / "model.safetensors"), f"--state={folder / NAMES[0]}")
    text, curve = write_text(model), run.curve()
    print(draw_curve(curve))
    print(f"\nwhat the exported model writes after {PROMPT!r}:\n\n{text}\n")
    print(f"took {time.monotonic() - began_s:.0f} s; the model is in {model}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"curve": curve, "text": text}, indent=1) + "\n")


if __name__ == "__main__":
    main()
