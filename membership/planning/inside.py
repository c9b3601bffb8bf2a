"""Which layout inside a peer fits its GPUs, and what crosses the network between its hosts.

For transformers in mixed precision (bf16 by autocast or FSDP2's policy), AdamW with
``fused=True``, and attention that does not keep its scores
(``scaled_dot_product_attention``). With ``V`` parameters in ``L`` layers of width ``d``, and ``T``
tokens that a GPU takes at a time:

    states       18 V bytes: float32 weights, gradients and two moments, and weights in bf16.
                 A shard of n has 16 V/n, and in bf16, with their gradients, two whole layers
                 while layers are computed, and embeddings all the time.
    activations  (28 + 2 r) d T a layer, where a value of the residual stream has r bytes:
                 4 with autocast, 2 with FSDP2. These are the terms of Korthikanti et al. 2022,
                 "Reducing Activation Recomputation in Large Transformer Models", section 4.1,
                 without dropout. Recomputed: r d T a layer, and one layer in full.
    logits       12 bytes a token and word: bf16, float32, their softmax, and gradients
    in flight    a stage of a 1F1B pipeline holds the activations of as many micro-batches as
                 there are stages from it to the last one (Narayanan et al. 2021, 2.2)

Left out: fragmentation, which stages hold the embeddings, and what the script itself keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from attrs import field, frozen
from attrs.validators import ge, gt

STATE_BYTES = 16  # weights, gradients and two moments, in float32
LOW_BYTES = 2  # bf16
LAYER_TERMS = 28  # of the activations: all but the inputs of both norms
LOGIT_BYTES = 12
# Of layers, each in bf16 with its gradient: the one that is computed and the one that is fetched.
GATHERED_LAYERS = 2
CONTEXT_BYTES = 0.5e9  # CUDA's context and libraries, in each process
LAYER_VALUES = 12  # a transformer's layer has 12 d^2 parameters
ASPECT = 128  # width by layers, about, of published models from 1 to 100 billion parameters


@frozen
class Transformer:
    """The model, and the batch that a GPU takes at a time.

    Attributes:
      value_count: parameters; they are taken to lie in the layers alone.
      layers, width: ``L`` and ``d``.
      vocabulary: words, for the logits.
      tokens: ``T``, sequences times length.
    """

    value_count: float = field(validator=gt(0))
    layers: int = field(validator=ge(1))
    width: float = field(validator=gt(0))
    vocabulary: int = field(validator=ge(1))
    tokens: int = field(validator=ge(1))

    @classmethod
    def usual(cls, value_count: float, vocabulary: int, tokens: int) -> Transformer:
        """Return the model with ``12 L d^2`` parameters and about ``d = 128 L``."""
        layers = max(1, round((value_count / (LAYER_VALUES * ASPECT**2)) ** (1 / 3)))
        width = math.sqrt(value_count / (LAYER_VALUES * layers))
        return cls(value_count, layers, width, vocabulary, tokens)


@frozen
class GpuHost:
    """A host of the peer: ``count`` GPUs of ``gpu_bytes`` each."""

    count: int = field(validator=ge(1))
    gpu_bytes: float = field(validator=gt(0))


@frozen
class Fit:
    """A layout on the GPUs of a peer.

    Attributes:
      layout: its name.
      recomputed: whether activations are computed again in the backward pass.
      needed_bytes, gpu_bytes: of each GPU: what it would take, and what it has.
      host_shares: of each host: the share of the parameters that its GPUs hold.
      moved_bytes: of each host: what it sends to the other hosts for a micro-batch, and receives.
    """

    layout: str
    recomputed: bool
    needed_bytes: tuple[float, ...]
    gpu_bytes: tuple[float, ...]
    host_shares: tuple[float, ...]
    moved_bytes: tuple[float, ...]

    @property
    def tightest(self) -> int:
        """The GPU with the least left."""
        left = [has - needs for has, needs in zip(self.gpu_bytes, self.needed_bytes, strict=True)]
        return left.index(min(left))

    @property
    def left_bytes(self) -> float:
        """What the tightest GPU has left; below 0 the layout does not fit."""
        return self.gpu_bytes[self.tightest] - self.needed_bytes[self.tightest]


def gpu_bytes_needed(
    model: Transformer,
    layers: int,
    *,
    shards: int = 1,
    in_flight: int = 1,
    is_last: bool = True,
    recomputed: bool = False,
) -> float:
    """Return the most memory of a GPU that holds a shard of these layers, in bytes.

    Gradients count as held all the time, as from the second micro-batch of a step on.
    """
    stage_values = model.value_count * layers / model.layers
    residual_bytes = 4 if shards == 1 else LOW_BYTES
    states_bytes, gathered_bytes = STATE_BYTES * stage_values / shards, 0.0
    if shards == 1:
        states_bytes += LOW_BYTES * stage_values
    else:
        layer_values = LAYER_VALUES * model.width**2
        gathered_bytes = 2 * LOW_BYTES * min(GATHERED_LAYERS, layers) * layer_values
        states_bytes += 2 * LOW_BYTES * model.width * model.vocabulary * is_last
    hidden = model.width * model.tokens
    layer_bytes = (LAYER_TERMS + 2 * residual_bytes) * hidden
    kept_bytes = layers * in_flight * (residual_bytes * hidden if recomputed else layer_bytes)
    # The logits are gone when the layers have their turn.
    working_bytes = max(
        LOGIT_BYTES * model.vocabulary * model.tokens * is_last,
        gathered_bytes + layer_bytes * recomputed,
    )
    return states_bytes + kept_bytes + working_bytes + CONTEXT_BYTES


def judge(model: Transformer, hosts: Sequence[GpuHost]) -> list[Fit]:
    """Return all layouts, the simplest first, each without and with recomputation."""
    gpu_count, n = sum(host.count for host in hosts), len(hosts)
    values, hidden = model.value_count, model.width * model.tokens
    ring = (gpu_count - 1) / gpu_count
    # A stage sends activations on and gradients back, for each neighbour that is another host.
    neighbours = [(here > 0) + (here < n - 1) for here in range(n)]
    everything = list(range(gpu_count))
    # Of each layout: its stages, whether they are sharded, and the bytes that each host moves.
    layouts = {"plain": ([everything], False, [2 * ring * 4 * values] * n)}
    if gpu_count > 1:
        # Weights are gathered for the forward and the backward pass, gradients scattered.
        layouts["FSDP2"] = ([everything], True, [3 * ring * LOW_BYTES * values] * n)
    if 1 < gpu_count <= model.layers:
        moved = [4 * hidden * count for count in neighbours]
        layouts["pipeline"] = ([[gpu] for gpu in everything], False, moved)
    each = hosts[0].count
    if 1 < n <= model.layers and each > 1 and all(host.count == each for host in hosts):
        grouped = [everything[at * each : (at + 1) * each] for at in range(n)]
        moved = [each * LOW_BYTES * hidden * count for count in neighbours]
        layouts["pipeline of hosts, FSDP2 in each"] = (grouped, True, moved)
    return [
        _fit(model, hosts, name, *layout, recomputed=recomputed)
        for name, layout in layouts.items()
        for recomputed in (False, True)
    ]


def _fit(
    model: Transformer,
    hosts: Sequence[GpuHost],
    name: str,
    stages: Sequence[Sequence[int]],
    sharded: bool,
    moved: Sequence[float],
    *,
    recomputed: bool,
) -> Fit:
    owners = [at for at, host in enumerate(hosts) for _ in range(host.count)]
    gpu_bytes = [hosts[at].gpu_bytes for at in owners]

    def needed(stage: int, layers: int) -> float:
        return gpu_bytes_needed(
            model,
            layers,
            shards=len(stages[stage]) if sharded else 1,
            in_flight=len(stages) - stage,
            is_last=stage == len(stages) - 1,
            recomputed=recomputed,
        )

    dealt = deal_layers(
        model.layers, [min(gpu_bytes[gpu] for gpu in stage) for stage in stages], needed
    )
    copies = not sharded and len(stages) == 1  # every GPU holds all of the model
    shares, takes = [float(copies)] * len(hosts), [0.0] * len(owners)
    for at, stage in enumerate(stages):
        for gpu in stage:
            takes[gpu] = needed(at, dealt[at])
            if not copies:
                shares[owners[gpu]] += dealt[at] / model.layers / len(stage)
    return Fit(name, recomputed, tuple(takes), tuple(gpu_bytes), tuple(shares), tuple(moved))


def deal_layers(
    layers: int, room: Sequence[float], needed: Callable[[int, int], float]
) -> list[int]:
    """Return the layers of each stage, at least one, so that the fullest one is least full.

    Args:
      room: of each stage.
      needed: what a stage takes with a number of layers; grows with it.
    """
    dealt = [1] * len(room)
    fullness = [needed(at, 2) / room[at] for at in range(len(room))]  # with a layer more
    for _ in range(layers - len(room)):
        at = fullness.index(min(fullness))
        dealt[at] += 1
        fullness[at] = needed(at, dealt[at] + 1) / room[at]
    return dealt


def simplest(fits: Sequence[Fit]) -> Fit:
    """Return the first layout that fits, or the one that lacks least."""
    return next((fit for fit in fits if fit.left_bytes >= 0), max(fits, key=lambda f: f.left_bytes))
