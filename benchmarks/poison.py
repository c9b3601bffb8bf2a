"""The section about poisoned runs: rounds until a bad member is named, and what it cost until then.

    python -m benchmarks.poison --rounds 40 --clean 200 --json poison.json

Eight peers train a small model of the next byte on this repository's text. All of it is one
process; the sums and what owners measure, the clipping of norms, the caps, the outer step and the
rule that names members are the package's own. Peers draw from all texts (independent), or each from
a part of its own, sorted by folder and kind (by topic).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from attrs import asdict, evolve, frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.report import ROOT, Measured, Table, bench_parser, run_main, say, tell
from holdfast.collectives.arithmetic import ChunkLayout
from holdfast.collectives.combine import combine_chunk, radius_of
from holdfast.collectives.norm_report import NormSums
from holdfast.diloco.outer import outer_step
from holdfast.membership.master.rounds.norms import Report
from holdfast.membership.master.rounds.round import gate_norms
from holdfast.membership.master.rounds.round_scheduler import capped_by_invite
from holdfast.membership.master.rounds.update_history import UpdateHistory
from holdfast.protocol.messages import Contributor, FragmentSize, OwnerRun, Plan

PEERS = tuple(f"{place:x}" * 32 for place in range(8))
BAD = PEERS[-1]
ROUNDS, CLEAN_ROUNDS = 40, 200
SYNC_EVERY = 20
BATCH, CONTEXT, WIDTH, INNER_LR = 16, 8, 64, 2e-3
SHAPES = ((256, 16), (16 * CONTEXT, WIDTH), (1, WIDTH), (WIDTH, 256))
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
SHADOW, CAP = 20, 0.25
KINDS = ("flipped", "noise", "lazy", "copier", "four copies", "four flipped")
CHUNKS = 16

NOTES = (
    'Loss: of the clean run, else beyond it; with nothing done, with newcomers = "shadow:20" and'
    " whoever is named kicked, and with invite_share_max = 0.25. Half of the peers cannot be told"
    " from the other half: four flipped ones are named by nobody.",
)

Values = NDArray[np.float32]


@frozen
class Arm:
    """One run.

    Attributes:
      kind: what its bad members do; empty: there are none.
      topics: each peer has texts of its own.
      shadow, cap: the policies that hold. Bad members in the shadow are kicked once named.
    """

    kind: str
    topics: bool
    rounds: int
    shadow: bool = False
    cap: bool = False
    combine: str = "mean"
    seed: int = 0

    @property
    def bad(self) -> tuple[str, ...]:
        return {"": (), "four": PEERS[4:]}.get(self.kind.partition(" ")[0], (BAD,))


@frozen
class Found:
    """What a run came to; ``named``: by bad member, the round."""

    named: dict[str, int]
    wrongly: int
    loss: float
    exponent: float


@cache
def texts() -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Return the topics' texts, and parts of all of them that nobody trains on."""
    files = sorted(
        (path for kind in ("md", "py", "js", "css") for path in ROOT.glob(f"[a-z]*/**/*.{kind}")),
        key=lambda path: (path.suffix, path.parts),
    )
    files = [path for path in files if "build" not in path.parts]
    whole = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    topics = np.array_split(whole.astype(np.int64), len(PEERS))
    return [each[: -len(each) // 20] for each in topics], np.concatenate(
        [each[-len(each) // 20 :] for each in topics]
    )


def parts_of(parameters: Tensor) -> list[Tensor]:
    """Return the tensors of a model, for peers whose parameters are rows."""
    found, start = [], 0
    for shape in SHAPES:
        count = math.prod(shape)
        found.append(parameters[:, start : start + count].reshape(-1, *shape))
        start += count
    return found


def initial(seed: int) -> Values:
    random = np.random.default_rng(seed)
    parts = [random.standard_normal(shape) / math.sqrt(shape[0]) for shape in SHAPES]
    return np.concatenate([part.ravel() for part in parts]).astype(np.float32)


def loss_of(parameters: Tensor, windows: Tensor) -> Tensor:
    """Return each peer's loss; windows have shape ``(peers, batch, CONTEXT + 1)``."""
    embedding, into, bias, out = parts_of(parameters)
    rows = torch.arange(len(windows))[:, None, None]
    inputs = embedding[rows, windows[:, :, :-1]].flatten(2)
    logits = torch.bmm(nn.functional.gelu(torch.bmm(inputs, into) + bias), out)
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), windows[:, :, -1].flatten(), reduction="none"
    )
    means: Tensor = losses.reshape(logits.shape[:2]).mean(1)
    return means


class Trainers:
    """The trainers of all peers, with Adam of their own, in one batch."""

    def __init__(self, arm: Arm) -> None:
        topics = texts()[0]
        whole = np.concatenate(topics)
        self.texts = topics if arm.topics else [whole] * len(PEERS)
        self.random = np.random.default_rng(arm.seed)
        count = sum(map(math.prod, SHAPES))
        self.first, self.second = torch.zeros(2, len(PEERS), count)
        self.step = 0

    def train(self, shared: Values, steps: Sequence[int]) -> Values:
        """Return the peers' pseudo-gradients of so many steps each, as rows."""
        local = torch.from_numpy(np.tile(shared, (len(PEERS), 1))).requires_grad_()
        for number in range(SYNC_EVERY):
            self.step += 1
            windows = np.stack([self._batch(text) for text in self.texts])
            (slope,) = torch.autograd.grad(loss_of(local, torch.from_numpy(windows)).sum(), local)
            goes_on = torch.tensor([[float(number < each)] for each in steps])
            with torch.no_grad():
                self.first.lerp_(slope, 0.1)
                self.second.lerp_(slope * slope, 0.01)
                first = self.first / (1 - 0.9**self.step)
                second = self.second / (1 - 0.99**self.step)
                local -= goes_on * INNER_LR * first / (second.sqrt() + 1e-8)
        updates: Values = shared - local.detach().numpy()
        return updates

    def _batch(self, text: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = self.random.integers(0, len(text) - CONTEXT - 1, BATCH)
        windows: NDArray[np.int64] = text[starts[:, None] + np.arange(CONTEXT + 1)]
        return windows


def run(arm: Arm) -> Found:
    trainers, shared = Trainers(arm), initial(arm.seed)
    momentum = np.zeros_like(shared)
    history, named = UpdateHistory(), dict[str, int]()
    wrongly, noise = 0, np.random.default_rng((arm.seed, 99))
    layout, plan = layout_of(len(shared), arm.combine)
    for number in range(1, arm.rounds + 1):
        here = [p for p in PEERS if not (arm.shadow and p in named and p in arm.bad)]
        lazy = arm.bad if arm.kind == "lazy" else ()
        steps = [SYNC_EVERY // 5 if peer in lazy else SYNC_EVERY for peer in PEERS]
        trained = dict(zip(PEERS, trainers.train(shared, steps), strict=True))
        sent = {peer: trained[peer] for peer in here}
        if arm.kind != "lazy":
            sent |= {p: poisoned(arm.kind, p, trained, noise) for p in here if p in arm.bad}
        tokens = dict.fromkeys(here, SYNC_EVERY * BATCH)
        scales, _ = gate_norms(
            {peer: float(np.linalg.norm(each)) for peer, each in sent.items()}, tokens
        )
        weights = {peer: tokens[peer] for peer in scales}
        if arm.shadow and number <= SHADOW:
            weights |= {peer: 0 for peer in scales if peer in arm.bad}
        if arm.cap:
            invites = {peer: "bad" if peer in arm.bad else peer for peer in scales}
            weights = capped_by_invite(weights, invites, CAP)
        order = tuple(Contributor(peer, weights[peer], scales[peer]) for peer in scales)
        mean, reports = reduced(order, sent, layout, plan, momentum)
        history.note(reports, [PEERS[chunk % 8] for chunk in range(CHUNKS)], order, tokens)
        outer_step(shared, momentum, mean, OUTER_LR, OUTER_MOMENTUM, True)
        for peer in here:
            if peer not in named and history.suspicion(peer, lambda other: other[:1]):
                named[peer] = number
                wrongly += peer not in (*arm.bad, *(PEERS[:1] if arm.kind == "copier" else ()))
    return Found(named, wrongly, evaluated(shared), history.exponent)


def poisoned(
    kind: str, peer: str, trained: dict[str, Values], noise: np.random.Generator
) -> Values:
    """Return what a bad member sends in place of what it could have trained."""
    own = trained[peer]
    random = noise.standard_normal(len(own)).astype(np.float32)
    random *= np.linalg.norm(own) / np.linalg.norm(random)
    if kind.endswith("flipped"):
        return -own
    if kind == "noise":
        return random
    if kind == "copier":
        return trained[PEERS[0]] + np.float32(0.1) * random
    return trained[PEERS[4]] + np.float32(0.02) * random  # four copies


def layout_of(count: int, combine: str) -> tuple[ChunkLayout, Plan]:
    size = -(-count // CHUNKS)
    owners = tuple(OwnerRun(PEERS[chunk % 8], 1) for chunk in range(CHUNKS))
    plan = Plan(size, owners, "fp32", "fp32", combine=combine)
    return ChunkLayout.of(plan, FragmentSize(count, count, 0)), plan


def reduced(
    order: Sequence[Contributor],
    sent: dict[str, Values],
    layout: ChunkLayout,
    plan: Plan,
    momentum: Values,
) -> tuple[Values, dict[str, Report]]:
    """Return the round's result, and the owners' reports."""
    mean = np.empty_like(momentum)
    sums = {peer: NormSums(order) for peer in PEERS}
    for cut in layout.cuts:
        encoded = {each.peer: memoryview(sent[each.peer][cut.values].tobytes()) for each in order}
        norms = NormSums(order, momentum[cut.values])
        room = memoryview(bytearray(cut.down_bytes))
        combine_chunk(order, encoded, layout, radius_of(plan), mean[cut.values], room, norms.take)
        norms.take_result(mean[cut.values])
        sums[cut.owner].add(norms)
    return mean, {peer: (each.norm_sums(), each.momentum_square) for peer, each in sums.items()}


def evaluated(shared: Values) -> float:
    text = texts()[1]
    starts = np.random.default_rng(1).integers(0, len(text) - CONTEXT - 1, 20_000)
    windows = torch.from_numpy(text[starts[:, None] + np.arange(CONTEXT + 1)])
    return float(loss_of(torch.from_numpy(shared)[None], windows[None])[0])


def measure(rounds: int, clean: int, seeds: int) -> Measured:
    torch.set_num_threads(1)
    rows, figures = [], []
    for topics in (False, True):
        data = "by topic" if topics else "independent"
        long = [run(Arm("", topics, clean, seed=seed)) for seed in range(seeds)]
        base = run(Arm("", topics, rounds))
        wrongly = sum(each.wrongly for each in long)
        rows.append([data, "none", "", str(wrongly), f"{base.loss:.3f}", "", ""])
        say(" | ".join(rows[-1]))
        for kind in KINDS:
            arm = Arm(kind, topics, rounds)
            arms = [arm, evolve(arm, shadow=True)]
            if len(arm.bad) > 1:
                arms.append(evolve(arm, cap=True))
            found = list(map(run, arms))
            figures += [{**asdict(a), **asdict(f)} for a, f in zip(arms, found, strict=True)]
            rounds_to = [found[0].named.get(peer) for peer in arm.bad]
            text = ", ".join("never" if each is None else str(each) for each in rounds_to)
            costs = [f"{each.loss / base.loss - 1:+.1%}" for each in found] + [""]
            rows.append([data, kind, text, str(sum(each.wrongly for each in found)), *costs[:3]])
            say(" | ".join(rows[-1]))
        figures += [asdict(each) for each in (*long, base)]
    table = Table(
        f"Poisoned runs of {rounds} rounds, eight peers; the clean ones have {clean} rounds",
        ["python -m benchmarks.poison"],
        ["data", "bad", "named in round", "honest named", "loss", "shadow:20", "cap 0.25"],
        rows,
        NOTES,
    )
    return [table], figures


def poison() -> Measured:
    return measure(ROUNDS, CLEAN_ROUNDS, 1)


def main() -> int:
    parser = bench_parser("poison", __doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--clean", type=int, default=CLEAN_ROUNDS)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    return tell(measure(options.rounds, options.clean, options.seeds), options)


if __name__ == "__main__":
    sys.exit(run_main("poison", main))
