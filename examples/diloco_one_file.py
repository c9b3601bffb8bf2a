"""The whole algorithm: what the peers of a run compute, here in one process, to the last bit.

    python examples/diloco_one_file.py streaming  # or sparse, or muon

A test trains these peers under real daemons and compares every committed version. Each of P
fragments, of n float32 values, has a round every H steps; tau steps are trained while it runs. Each
operation is rounded by itself in the order in which it stands here. Not here: lost peers (a mean is
of those that are left), late ones, far too long updates (``NORM_CLIP``), buffers, the end of a run.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

Array = np.ndarray
PRESETS = {  # H, P, tau, outer rate, outer momentum, codec of contributions, codec of means
    "streaming": (20, 5, 1, 0.7, 0.7, "nf4", "nf4"),  # arXiv 2501.18512
    "sparse": (10, 1, 0, 2.0, 0.0, "topk8", "int8"),  # arXiv 2508.15706
    "muon": (10, 1, 0, 1.0, 0.7, "fp32", "fp32"),  # arXiv 2505.23725
}
NF4 = "-1 -.6961928 -.52507305 -.3949175 -.28444138 -.18477343 -.091050036 0 .0795803 .1609302"
NF4 += " .2461123 .33791524 .44070983 .562617 .72295684 1"  # arXiv 2305.14314
LEVELS = np.array(NF4.split(), np.float32)
MIDDLES = (LEVELS[1:].astype(np.float64) + LEVELS[:-1]) / 2
TEXT, CONTEXT, WIDTH = np.fromfile(nn.functional.__file__, np.uint8), 8, 64


class Peer:
    """A machine: its model, its inner optimizers, its data, and what it remembers of rounds."""

    def __init__(self, number: int, preset: str) -> None:
        torch.manual_seed(0)  # all begin with the same weights
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "1234"))
        inlet, outlet = nn.EmbeddingBag(256, WIDTH), nn.Linear(WIDTH, 256)
        self.model = nn.Sequential(OrderedDict(inlet=inlet, layers=layers, outlet=outlet))
        matrices = [each for each in layers.parameters() if preset == "muon" and each.dim() == 2]
        others = [each for each in self.model.parameters() if all(each is not m for m in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others)]
        if matrices:
            self.optimizers += [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")]
        # Fragments: layers are dealt out over depth, the last one is all that is in no other.
        count = PRESETS[preset][1]
        self.fragments = [list(layers[part :: count - 1].parameters()) for part in range(count - 1)]
        inside = {id(each) for fragment in self.fragments for each in fragment}
        self.fragments += [[each for each in self.model.parameters() if id(each) not in inside]]
        self.counted = [0] * count  # ``tokens`` at the fragment's last round
        self.residual: list[Array | float] = [0.0] * count  # (n,): what its codec has left out
        self.number, self.batch, self.step, self.tokens = number, 8 + 3 * number, 0, 0

    def train(self, until: int) -> None:
        while self.step < until:
            chance = np.random.default_rng((self.number, self.step))
            starts = chance.integers(len(TEXT) - CONTEXT, size=(self.batch, 1))
            window = torch.from_numpy(TEXT[starts + np.arange(CONTEXT + 1)].astype(np.int64))
            loss = nn.functional.cross_entropy(self.model(window[:, :-1]), window[:, -1])
            self.model.zero_grad()
            torch.autograd.backward(loss)
            for optimizer in self.optimizers:
                optimizer.step()
            self.step, self.tokens, self.loss = self.step + 1, self.tokens + self.batch, loss.item()

    def read(self, fragment: int) -> Array:
        return np.concatenate([each.detach().numpy().ravel() for each in self.fragments[fragment]])

    @torch.no_grad()
    def write(self, fragment: int, values: Array) -> None:
        for each in self.fragments[fragment]:
            each.copy_(torch.from_numpy(values[: each.numel()]).view_as(each))
            values = values[each.numel() :]


def run(preset: str, peers: list[Peer], turns: int) -> Iterator[tuple[int, Array, Array]]:
    """Yield of each committed version its fragment, weights (n,) and outer momentum (n,)."""
    every, count, overlap, rate, decay, codec_up, codec_down = PRESETS[preset]
    shared = [peers[0].read(fragment) for fragment in range(count)]
    momentum = [np.zeros_like(weights) for weights in shared]
    for number in range(turns * count):
        fragment, due = number % count, (number + 1) * every // count  # one each H / P steps
        for peer in peers:
            peer.train(until=due)
        # Post: what each has moved since the last version, and what its codec has left out so far.
        local = [peer.read(fragment) for peer in peers]
        tokens = [peer.tokens - peer.counted[fragment] for peer in peers]
        shares = [np.float32(each / max(tokens)) for each in tokens]
        terms = []
        for peer, weights, share in zip(peers, local, shares, strict=True):
            update = peer.residual[fragment] + (shared[fragment] - weights)
            sent = transmitted(update, codec_up, len(peers))
            peer.residual[fragment], peer.counted[fragment] = update - sent, peer.tokens
            terms.append(sent * share)
        # Reduce: a chunk's owner, whoever it is, adds up in the order of members, divides, encodes.
        mean = sum(terms[1:], terms[0]) / sum(shares[1:], shares[0])
        mean = move = transmitted(mean, codec_down, len(peers))
        # Outer step, at every peer alike: Nesterov's momentum, or none.
        if decay:
            momentum[fragment] = momentum[fragment] * decay + mean
            move = momentum[fragment] * decay + mean
        shared[fragment] = shared[fragment] - move * rate
        yield fragment, shared[fragment], momentum[fragment]
        # Merge: all that was trained while the round ran stays, on top of the new weights.
        for peer, weights in zip(peers, local, strict=True):
            peer.train(until=due + overlap)
            peer.write(fragment, shared[fragment] - (weights - peer.read(fragment)))


def transmitted(values: Array, codec: str, peers: int) -> Array:
    """What (n,) values are after encoding, chunk by chunk, and decoding."""
    if codec == "fp32":
        return values
    if codec == "topk8":  # up to four chunks an owner; more, if large, on slow lines
        each = min(4, math.ceil(len(values) / peers / 4096))
        size = 256 * math.ceil(max(4096, len(values) / peers / each) / 256)
        return np.concatenate([topk8(values[i : i + size]) for i in range(0, len(values), size)])
    block, steps = (64, 1) if codec == "nf4" else (256, 127)  # chunks are of whole blocks
    blocks = np.pad(values, (0, -len(values) % block)).reshape(-1, block)
    largest = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float64)
    scale = (largest / steps).astype(np.float16)  # where this was rounded down, the next one:
    np.nextafter(scale, np.float16(np.inf), out=scale, where=scale * np.float64(steps) < largest)
    ratio = blocks / np.where(scale == 0, 1, scale).astype(np.float32)
    level = np.rint(ratio) + 0  # no -0
    if codec == "nf4":  # the nearest level; of two, the one closer to 0
        below, above = (np.searchsorted(MIDDLES, ratio, side) for side in ("left", "right"))
        level = LEVELS[np.where(ratio > 0, below, above)]
    return np.ravel(level * scale.astype(np.float32))[: len(values)]


def topk8(values: Array) -> Array:
    """Keep an eighth of a chunk's values, the largest, with the best two levels for their sizes."""
    size, decoded = np.abs(values), np.zeros_like(values)
    kept = np.argsort(-size, kind="stable")[: math.ceil(len(values) / 8)]  # of equals, the first
    kept = kept[size[kept] > 0]
    ordered = size[kept][::-1].astype(np.float64)
    sums, below = np.cumsum(ordered - ordered[0]), np.arange(1, len(kept))
    low, high, above = sums[:-1], sums[-1] - sums[:-1], below[::-1]
    best = (low**2 / below + high**2 / above).argmax()  # the least squared error
    means = low[best] / below[best], high[best] / above[best]
    level = ordered[0] + np.where(size[kept] > ordered[best], means[1], means[0])
    decoded[kept] = np.copysign(level, values[kept])
    return decoded


if __name__ == "__main__":
    crowd = [Peer(number, sys.argv[1]) for number in range(3)]
    for number, (fragment, _, _) in enumerate(run(sys.argv[1], crowd, turns=6)):
        print(f"round {number}, fragment {fragment}: losses", *(f"{p.loss:.3f}" for p in crowd))
