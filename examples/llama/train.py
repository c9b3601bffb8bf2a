"""Train a small Llama of the Transformers library on Python's own sources, together with other
machines.

    holdfast join INVITE -- python examples/llama/train.py --folder FOLDER

``run.py`` beside it does all of it on one machine, from the tokenizer to a text that the model
writes. The lines for holdfast are marked with (*). Shapes in comments: B batch, T context.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import holdfast

HELD_OUT_SHARE = 0.05  # of the files, the last ones by name
PAD_TOKEN = "<|pad|>"  # the tokenizer needs one; no text has it

LEARNING_RATE = 4e-3
WARMUP_STEPS = 40
WEIGHT_DECAY = 0.1
GRADIENT_NORM_MAX = 1.0
VALIDATION_BATCHES = 8

# ``text_bytes``: of the training text, of which the tokenizer sees the beginning, and validation a
# tenth.
SIZES: dict[str, dict[str, int]] = {
    "toy": {
        "text_bytes": 400_000,
        "vocabulary": 384,
        "width": 32,
        "layers": 2,
        "heads": 2,
        "context": 32,
        "batch": 4,
    },
    "small": {
        "text_bytes": 6_000_000,
        "vocabulary": 1024,
        "width": 128,
        "layers": 4,
        "heads": 4,
        "context": 128,
        "batch": 8,
    },
}
SHARD_BYTES = 50_000  # some rounds long: one that is not finished is read again by another peer
PIECE_CHARS = 2_000  # every shard has pieces of all files, so that batches are alike
TOKENIZER_BYTES_MAX = 1_000_000  # enough for a vocabulary this small


# ---------------------------------------------------------------- data


def source_files() -> tuple[list[Path], list[Path]]:
    """Return the standard library's sources: (training, held out)."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test"} & set(path.relative_to(root).parts)
    )
    held_out_from = len(paths) - math.ceil(len(paths) * HELD_OUT_SHARE)
    return paths[:held_out_from], paths[held_out_from:]


def first_files(paths: Iterable[Path], bytes_max: int) -> list[Path]:
    """Return the first of these files, as many as hold at most so many bytes."""
    kept: list[Path] = []
    for path in paths:
        bytes_max -= path.stat().st_size
        if bytes_max < 0:
            break
        kept.append(path)
    return kept


def shards_of(paths: list[Path], bytes_max: int) -> list[list[str]]:
    """Deal pieces of the files out to shards of about ``SHARD_BYTES``, the same ones at every
    peer.
    """
    pieces = [
        text[start : start + PIECE_CHARS]
        for text in texts(first_files(paths, bytes_max))
        for start in range(0, len(text), PIECE_CHARS)
    ]
    count = max(1, bytes_max // SHARD_BYTES)
    return [pieces[index::count] for index in range(count)]


def texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        yield path.read_text(errors="replace")


def train_tokenizer(size: dict[str, int]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on a part of the text; every machine of a run needs the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size["vocabulary"],
        special_tokens=[PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    training, _ = source_files()
    some = first_files(training, min(size["text_bytes"], TOKENIZER_BYTES_MAX))
    tokenizer.train_from_iterator(texts(some), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD_TOKEN)


def windows_of(
    tokenizer: PreTrainedTokenizerFast, pieces: Iterable[str], context: int
) -> torch.Tensor:
    """Return windows of a text in pieces, (windows, T) int64."""
    encoded = tokenizer.backend_tokenizer.encode_batch(list(pieces))
    ids = torch.tensor([token for each in encoded for token in each.ids])
    return ids[: len(ids) // context * context].view(-1, context)


# ---------------------------------------------------------------- model


def make_model(size: dict[str, int]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["width"],
        intermediate_size=3 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"] // 2,
        max_position_embeddings=size["context"],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the layers' matrices and AdamW for the rest, as one optimizer with one state."""

    def __init__(self, model: LlamaForCausalLM, rate: float) -> None:
        matrices = [each for each in model.model.layers.parameters() if each.dim() == 2]
        own = {id(each) for each in matrices}
        others = [each for each in model.parameters() if id(each) not in own]
        self.parts: list[torch.optim.Optimizer] = [
            # Its updates get the size of AdamW's, so that one rate fits both.
            torch.optim.Muon(
                matrices, lr=rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = list(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [groups.pop(0) for _ in part.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()


def loss_of(model: LlamaForCausalLM, windows: torch.Tensor, device: str) -> torch.Tensor:
    """Return the mean loss in nats per token over windows (B, T)."""
    windows = windows.to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss: torch.Tensor = model(input_ids=windows, labels=windows).loss
    return loss


@torch.no_grad()
def validate(model: LlamaForCausalLM, held_out: torch.Tensor, batch: int, device: str) -> float:
    """Return the loss on windows spread evenly over the held-out text, the same ones everywhere."""
    model.eval()
    places = torch.linspace(0, len(held_out) - 1, VALIDATION_BATCHES * batch).long()
    losses = [loss_of(model, held_out[some], device).item() for some in torch.split(places, batch)]
    model.train()
    return sum(losses) / len(losses)


# ---------------------------------------------------------------- training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="with the tokenizer")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--validate-every", type=int, default=3, help="rounds")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # peers often share a machine; change it where yours has one alone
    torch.manual_seed(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.folder)
    training, rest = source_files()
    held_out_files = first_files(rest, size["text_bytes"] // 10)
    held_out = windows_of(tokenizer, texts(held_out_files), size["context"])
    model = make_model(size).to(device)
    optimizer = MuonAndAdamW(model, LEARNING_RATE)

    run = holdfast.attach(model, optimizer)  # (*) the model now holds the run's weights
    dealt = shards_of(training, size["text_bytes"])
    shards = run.shards(dealt)  # (*) each to one peer, once an epoch
    total = run.total_steps or 10_000

    def factor(_own_step: int) -> float:
        """Warm-up, then a cosine down to a tenth, by the run's step."""
        step = run.global_step  # (*)
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        done = min(1.0, (step - WARMUP_STEPS) / max(1, total - WARMUP_STEPS))
        return (0.55 + 0.45 * math.cos(math.pi * done)) * run.rate_scale  # (*)

    def batches() -> Iterator[torch.Tensor]:
        """Windows (B, T) of this peer's shards, without an end; the last ones of a shard may be
        fewer.
        """
        for shard in shards:
            windows = windows_of(tokenizer, shard, size["context"])
            order = torch.randperm(len(windows), generator=run.generator())
            yield from torch.split(windows[order], size["batch"])

    def report_validation() -> None:
        loss = validate(model, held_out, size["batch"], device)
        print(f"validation loss {loss:.4f} at step {run.global_step}", flush=True)
        run.log(validation_loss=loss, validation_step=run.global_step)  # (*)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    if run.is_leader:  # (*)
        report_validation()
    validated = run.round_count
    for windows in batches():
        if run.finished:  # (*)
            break
        loss = loss_of(model, windows, device)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        run.step(loss=loss.item(), tokens=windows.numel())  # (*)
        schedule.step()

        if run.round_count >= validated + arguments.validate_every and not run.finished:
            validated = run.round_count
            if run.is_leader:  # (*)
                report_validation()

    if run.is_leader:  # (*)
        report_validation()
    run.close()  # (*)


if __name__ == "__main__":
    main()
