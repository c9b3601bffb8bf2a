"""The scripts of docs/frameworks as a user runs them: the real libraries in a real run, on a CPU.

In each a trainer is killed, and goes on where the run is, with samples that the run leases.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.packaging.test_docs import ROOT, blocks
from tests.processes.harness import (
    WAIT_S,
    Fleet,
    Status,
    contributing,
    environment,
    spec,
    spent_positions,
)
from tests.processes.test_recipes import PEERS, changed, equal, export, weights

pytestmark = pytest.mark.slow

PAGES = ROOT / "docs" / "frameworks"
SYNC_EVERY = 5
ROUNDS = 600  # as planned; each test ends its run earlier
STEP_S = 0.1  # or more, so that planned rounds outlast every wait for a trainer that was killed
PAUSE = f"__import__('time').sleep({STEP_S})"
LEARNING_RATE = 3e-3
WARMUP_STEPS = 5  # of the Transformers page
SCHEDULE_STEPS = 200  # short, so that a schedule that counts this process's steps shows
FOLDER = "f\"checkpoints-{__import__('os').environ['HOLDFAST_MEMBER'][:6]}\""  # one for each peer

# What a trainer finds when training begins, in the script of the Transformers page.
LOOK = """
from transformers import TrainerCallback

class Look(TrainerCallback):
    def on_step_begin(self, args, state, control, **parts):
        PAUSE

    def on_train_begin(self, args, state, control, model, optimizer, **parts):
        weight = sum(each.double().sum().item() for each in model.parameters())
        states = len(optimizer.state)
        print(f"began at step {state.global_step} with {weight} and {states} states", flush=True)

    def on_train_end(self, args, state, control, optimizer, **parts):
        print(f"rate {optimizer.param_groups[0]['lr']!r} at step {state.global_step}", flush=True)

"""

# TRL's trainer of chats and texts, whose loss is computed outside of the model.
FINE_TUNING = """
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import holdfast

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: index for index, letter in enumerate(["<pad>", "<end>", *alphabet])}
backend = Tokenizer(models.BPE(vocabulary, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<end>"
)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
)
member = holdfast.TransformersCallback()
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig("out", max_length=32, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, logging_steps=1, save_strategy="no", report_to="none",
        packing=True, bf16=False, use_cpu=True),
    train_dataset=Dataset.from_dict({"text": [f"line {n} of a text" * 3 for n in range(500)]}),
    processing_class=tokenizer,
    callbacks=[member],
)
trainer.train()
print(f"ended at step {trainer.state.global_step}", flush=True)
"""


assert ROUNDS * SYNC_EVERY * STEP_S > WAIT_S


def script_of(page: str) -> str:
    (script,) = blocks(PAGES / page, "python")
    return script


def leased(page: str, call: str, with_keyword: str) -> str:
    """Return a page's script, with samples that the run leases as the page says."""
    assert "leased=True" in (PAGES / page).read_text()
    return changed(script_of(page), call, with_keyword)


def start(fleet: Fleet, **scripts: str) -> None:
    """Start a master, and a peer for each script, by name."""
    fleet.start_master(spec(rounds=ROUNDS, sync_every=SYNC_EVERY, min_members=len(scripts)))
    for name, script in scripts.items():
        (fleet.folder / f"{name}.py").write_text(script)
        command = (sys.executable, f"{name}.py")
        fleet.join(name, founder=not fleet.invites, command=command)
    fleet.until(lambda s: s["committed"] > 1 and contributing(s, *scripts), "all train")


def kill_trainer(fleet: Fleet, name: str) -> None:
    """Kill a training process, and wait until it contributes again."""
    pid = fleet.peer(name)["command_pid"]
    os.killpg(pid, signal.SIGKILL)
    fleet.until(lambda s: fleet.peer(name)["command_pid"] not in (0, None, pid), "another trainer")
    attached = "the trainer has attached"
    fleet.until(lambda s: fleet.nodes[name].log.count(attached) > 1, "it has attached")
    fleet.until_committed(2)
    fleet.until(lambda s: contributing(s, name), "it trains again")


def finish(fleet: Fleet) -> tuple[Status, list[int]]:
    """End the run soon; return the master's status, and the step at which each script ended.

    They may differ by the steps that trainers took before they heard of the end.
    """
    fleet.act("resume", {"rounds": fleet.master()["committed"] + 4})
    peers = [name for name in fleet.nodes if name != "master"]
    fleet.check_exits(*peers)
    logs = [fleet.nodes[name].log for name in peers]
    steps = [int(step) for log in logs for step in re.findall(r"ended at step (\d+)", log)]
    assert len(steps) == len(peers)
    status = fleet.master()
    assert all(0 <= step - status["step"] <= SYNC_EVERY for step in steps), (steps, status["step"])
    return status, steps


def check_weights(fleet: Fleet, status: Status, samples: int, tokens: int = 1) -> None:
    """A contribution weighs its optimizer steps, each with the tokens of all micro-batches.

    Its samples were leased, and none of them is in the run's work a second time.

    Args:
      samples: of a step.
      tokens: of a sample.
    """
    found = weights(status)
    for each in found:
        for weight in each.values():
            assert weight % (samples * tokens) == 0
            assert 0 < weight <= 3 * SYNC_EVERY * samples * tokens
    assert len(found) == status["committed"]
    spent = spent_positions(fleet)
    assert set(spent.values()) == {1}
    assert len(spent) * tokens == sum(weight for each in found for weight in each.values())


@pytest.mark.parametrize("page", ["transformers.md", "lightning.md", "accelerate.md"])
def test_a_page_says_how_many_lines_holdfast_needs(page: str) -> None:
    numbers = {4: "four", 8: "eight"}
    marked = script_of(page).count("# (*)")
    assert f"The {numbers[marked]} lines with `(*)`" in (PAGES / page).read_text()


@pytest.mark.nightly
def test_the_trainer_of_transformers_goes_by_the_run(fleet: Fleet) -> None:
    script = leased("transformers.md", "TransformersCallback(", "TransformersCallback(leased=True")
    script = changed(script, '"checkpoints"', FOLDER)
    script = changed(
        script, "member = holdfast", LOOK.replace("PAUSE", PAUSE) + "member = holdfast"
    )
    script = changed(script, "callbacks=[member]", "callbacks=[member, Look()]")
    # One peer resumes from a checkpoint of another, standalone training.
    alone = {"HOLDFAST_STANDALONE": "1", "HOLDFAST_MEMBER": "before"}
    (fleet.folder / "alone.py").write_text(script)
    run_alone(fleet.folder, {**alone, "HOLDFAST_STANDALONE_STEPS": "12"})
    resumed = changed(
        script,
        "trainer.train()",
        'trainer.train(resume_from_checkpoint="checkpoints-before/checkpoint-10")',
    )
    start(fleet, alder=script, birch=resumed)
    kill_trainer(fleet, "birch")
    status, _ = finish(fleet)

    check_weights(fleet, status, 4 * 2, 32)  # batch, accumulation; context
    alder, birch = (fleet.nodes[name].log for name in PEERS)
    began = r"began at step (\d+) with (\S+) and (\d+) states"
    (first,) = re.findall(began, alder)
    second, third = re.findall(began, birch)
    assert first[:2] == second[:2]  # step and weights of the run, not the checkpoint's
    assert (first[2], int(second[2]) > 0, int(third[0]) > SYNC_EVERY) == ("0", True, True)
    total = ROUNDS * SYNC_EVERY
    for log in (alder, birch):
        (rate, step), *_ = re.findall(r"rate (\S+) at step (\d+)", log)
        done = (int(step) - WARMUP_STEPS) / (total - WARMUP_STEPS)
        expected = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * done))
        assert float(rate) == pytest.approx(expected, rel=2e-5)
    assert ("eval_loss" in alder) != ("eval_loss" in birch), "only the leader evaluates"
    folders = [each.name for each in fleet.folder.glob("checkpoints-*") if list(each.glob("c*"))]
    assert len(folders) == 2, "the leader's, and of the training before"
    saved = load_file(fleet.folder / "final" / "model.safetensors")
    assert equal(saved, export(fleet, "birch")), f"{status['step']}, {alder}, {birch}"
    assert {"eval_loss", "learning_rate", "grad_norm"} <= figures(status)


def figures(status: Status) -> set[str]:
    """Return the names of the figures that the members have logged."""
    return {name for row in status["departed"] for name in row["metrics"]}


def run_alone(folder: Path, env: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "alone.py"],
        cwd=folder,
        env=environment(env),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_the_trainer_of_lightning_goes_by_the_run(fleet: Fleet) -> None:
    script = leased("lightning.md", "LightningCallback(", "LightningCallback(leased=True")
    script = changed(script, '"checkpoints"', FOLDER)
    script = changed(script, "STEPS = 2000", f"STEPS = {SCHEDULE_STEPS}")
    start_of_step = (
        "    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:\n"
    )
    script = changed(script, start_of_step, f"{start_of_step}        {PAUSE}\n")
    start(fleet, alder=script, birch=script)
    kill_trainer(fleet, "birch")
    status, steps = finish(fleet)

    check_weights(fleet, status, 8 * 2)  # batch, accumulation
    check_rates(fleet, steps)
    (leaders,) = fleet.folder.glob("checkpoints-*/")
    assert list(leaders.glob("*.ckpt"))
    saved = torch.load(fleet.folder / "final.ckpt", weights_only=True)
    assert saved["global_step"] in steps
    assert equal(saved["state_dict"], export(fleet, "birch"))
    assert "validation_loss" in figures(status)


@pytest.mark.nightly
def test_a_loop_of_accelerate_goes_by_the_run(fleet: Fleet) -> None:
    start_of_step = "        with accelerator.accumulate(model):"
    slow = changed(
        leased("accelerate.md", "schedule, loader)  # (*)", "schedule, loader, leased=True)"),
        start_of_step,
        f"        {PAUSE}\n{start_of_step}",
    )
    slow = changed(slow, "STEPS = 2000", f"STEPS = {SCHEDULE_STEPS}")
    start(fleet, alder=slow, birch=slow)
    kill_trainer(fleet, "birch")
    status, steps = finish(fleet)

    check_weights(fleet, status, 8 * 2)
    check_rates(fleet, steps)
    assert equal(load_file(fleet.folder / "final" / "model.safetensors"), export(fleet, "birch"))


def check_rates(fleet: Fleet, steps: list[int]) -> None:
    """The rate is that of the run's last step, also where the process began later."""
    rates = [
        float(rate)
        for name in PEERS
        for rate in re.findall(r"ended at step \d+, rate (\S+)", fleet.nodes[name].log)
    ]
    for rate, step in zip(rates, steps, strict=True):
        done = min(1.0, step / SCHEDULE_STEPS)
        expected = LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * done))
        assert rate == pytest.approx(expected, rel=1e-3)


def test_a_trainer_of_trl_takes_part_as_its_base_does(fleet: Fleet) -> None:
    fleet.start_master(spec(rounds=4, sync_every=SYNC_EVERY, min_members=1))
    (fleet.folder / "tune.py").write_text(FINE_TUNING)
    fleet.join("alder", founder=True, command=(sys.executable, "tune.py"))
    assert fleet.nodes["alder"].wait(WAIT_S) == 0

    assert "ended at step 20" in fleet.nodes["alder"].log
    status = fleet.master()
    assert len(weights(status)) == 4
    assert all(each["alder"] > SYNC_EVERY for each in weights(status))  # tokens, not samples
    (row,) = status["departed"]
    assert row["loss"] is not None
