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

from attrs import evolve, field, frozen
from attrs.validators import ge, gt

from ...protocol.messages import RANKS_MAX
from ..spec.spec import RunSpec
from .plan import wire_bytes_per_value
from .predict import further_host_bytes, memory_bytes

STATE_BYTES = 16  # weights, gradients and two moments, in float32
LOW_BYTES = 2  # bf16
LAYER_TERMS = 28  # of the activations: all but the inputs of both norms
LOGIT_BYTES = 12
# Of layers, each in bf16 with its gradient: the one that is computed and the one that is fetched.
GATHERED_LAYERS = 2
CONTEXT_BYTES = 0.5e9  # CUDA's context and libraries, in each process
LAYER_VALUES = 12  # a transformer's layer has 12 d^2 parameters
ASPECT = 128  # width by layers, about, of published models from 1 to 100 billion parameters
# Of an RTX 4090 in training: 36 % of its 165 TFLOP/s in bf16.
GPU_FLOPS = 60e12
TOKENS_PER_PARAMETER = 20  # of compute-optimal training (Hoffmann et al. 2022)
SMALLER_STEPS = 30  # of bisection
STAGES_MIN = 2  # of a pipeline


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

    def with_values(self, value_count: float) -> Transformer:
        width = self.width * math.sqrt(value_count / self.value_count)
        return evolve(self, value_count=value_count, width=width)


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
      tightest: the GPU with the least left.
      left_bytes: what it has left; below 0 the layout does not fit.
    """

    layout: str
    recomputed: bool
    needed_bytes: tuple[float, ...]
    gpu_bytes: tuple[float, ...]
    host_shares: tuple[float, ...]
    moved_bytes: tuple[float, ...]
    tightest: int
    left_bytes: float


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
    fits = []

    def add(layout: str, stages: list[list[int]], moved: list[float], *, sharded: bool) -> None:
        for recomputed in (False, True):
            fit = _fit(model, hosts, stages, layout, moved, sharded=sharded, recomputed=recomputed)
            fits.append(fit)

    everything = list(range(gpu_count))
    add("plain", [everything], [2 * ring * 4 * values] * n, sharded=False)
    if gpu_count > 1:
        # Weights are gathered for the forward and the backward pass, gradients scattered.
        add("FSDP2", [everything], [3 * ring * LOW_BYTES * values] * n, sharded=True)
    if 1 < gpu_count <= model.layers:
        add(
            "pipeline",
            [[g] for g in everything],
            [4 * hidden * b for b in neighbours],
            sharded=False,
        )
    each = hosts[0].count
    if 1 < n <= model.layers and each > 1 and all(host.count == each for host in hosts):
        grouped = [everything[i * each : (i + 1) * each] for i in range(n)]
        moved = [each * LOW_BYTES * hidden * b for b in neighbours]
        add("pipeline of hosts, FSDP2 in each", grouped, moved, sharded=True)
    return fits


def _fit(
    model: Transformer,
    hosts: Sequence[GpuHost],
    stages: Sequence[Sequence[int]],
    layout: str,
    moved: Sequence[float],
    *,
    sharded: bool,
    recomputed: bool,
) -> Fit:
    owners = [at for at, host in enumerate(hosts) for _ in range(host.count)]
    gpu_bytes = tuple(hosts[at].gpu_bytes for at in owners)

    def needed(stage: int, layers: int) -> float:
        return gpu_bytes_needed(
            model,
            layers,
            shards=len(stages[stage]) if sharded else 1,
            in_flight=len(stages) - stage,
            is_last=stage == len(stages) - 1,
            recomputed=recomputed,
        )

    room = [min(gpu_bytes[gpu] for gpu in stage) for stage in stages]
    dealt = deal_layers(model.layers, room, needed)
    stage_of = {gpu: at for at, stage in enumerate(stages) for gpu in stage}
    shares = [0.0] * len(hosts)
    for gpu, owner in enumerate(owners):
        stage = stages[stage_of[gpu]]
        part = dealt[stage_of[gpu]] / model.layers
        shares[owner] = shares[owner] + part / len(stage) if sharded or len(stages) > 1 else part
    takes = tuple(needed(stage_of[gpu], dealt[stage_of[gpu]]) for gpu in range(len(owners)))
    left_bytes, tightest = min(
        (has - needs, gpu) for gpu, (has, needs) in enumerate(zip(gpu_bytes, takes, strict=True))
    )
    return Fit(
        layout, recomputed, takes, gpu_bytes, tuple(shares), tuple(moved), tightest, left_bytes
    )


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


@frozen
class Advice:
    """What fits a peer, and what it costs.

    Attributes:
      fits: all layouts, the simplest first.
      chosen: the simplest that fits, or the one that lacks least.
      alone: whether each host could hold the model alone, in a layout of its own.
      largest_values, largest_tokens: parameters of the largest model of as many layers, and tokens
        of the largest batch, that would fit; ``None``: nothing is lacking, or none would.
      hosts_lacking: how many more hosts like the largest one would make it fit; ``None``: none
        are lacking, or more GPUs than a peer may have.
      memory_bytes: of each host: the most that daemon and hook take of its memory. The first host
        is the head.
      round_bytes: of each host: what goes to the head in a round, and comes back; at the head
        their sum.
      upload_bits_per_s: the upload with which a stage never waits, were these GPUs the stages of
        a pipeline across the internet, in bf16 and in nf4.
      stage_busy: the share of its time in which a stage would compute on the given upload.
      line_bits_per_s: this upload.
      optimal_s: the time of compute-optimal training on these GPUs.
    """

    model: Transformer
    hosts: tuple[GpuHost, ...]
    fits: tuple[Fit, ...]
    chosen: Fit
    alone: bool
    largest_values: float | None
    largest_tokens: int | None
    hosts_lacking: int | None
    memory_bytes: tuple[float, ...]
    round_bytes: tuple[float, ...]
    upload_bits_per_s: tuple[float, float]
    stage_busy: tuple[float, float]
    line_bits_per_s: float
    optimal_s: float


def advise(
    model: Transformer, hosts: Sequence[GpuHost], spec: RunSpec, upload_bytes_per_s: float
) -> Advice:
    fits = judge(model, hosts)
    chosen = simplest(fits)
    largest_values = largest_tokens = more = None
    if chosen.left_bytes < 0:
        largest_values = largest_that_fits(
            model.value_count, lambda count: fits_somehow(model.with_values(count), hosts)
        )
        tokens = largest_that_fits(
            model.tokens, lambda count: fits_somehow(evolve(model, tokens=math.ceil(count)), hosts)
        )
        largest_tokens = None if tokens is None else int(tokens) or None
        more = hosts_lacking(model, hosts)
    values, gpu_count = round(model.value_count), sum(host.count for host in hosts)
    further = [further_host_bytes(spec, values, share) for share in chosen.host_shares[1:]]
    boxes = [4 * values * share / spec.diloco.fragments for share in chosen.host_shares[1:]]
    uploads = [
        stage_upload_bytes_per_s(model, max(STAGES_MIN, gpu_count), bytes_per_value=each)
        for each in (LOW_BYTES, wire_bytes_per_value("nf4"))
    ]
    return Advice(
        model,
        tuple(hosts),
        tuple(fits),
        chosen,
        alone=all(fits_somehow(model, [host]) for host in hosts),
        largest_values=largest_values,
        largest_tokens=largest_tokens,
        hosts_lacking=more,
        memory_bytes=(memory_bytes(spec, values), *further),
        round_bytes=(sum(boxes), *boxes),
        upload_bits_per_s=(8 * uploads[0], 8 * uploads[1]),
        stage_busy=(
            min(1.0, upload_bytes_per_s / uploads[0]),
            min(1.0, upload_bytes_per_s / uploads[1]),
        ),
        line_bits_per_s=8 * upload_bytes_per_s,
        optimal_s=optimal_s(model, gpu_count),
    )


def simplest(fits: Sequence[Fit]) -> Fit:
    """Return the first layout that fits, or the one that lacks least."""
    return next((fit for fit in fits if fit.left_bytes >= 0), max(fits, key=lambda f: f.left_bytes))


def fits_somehow(model: Transformer, hosts: Sequence[GpuHost]) -> bool:
    if STATE_BYTES * model.value_count > sum(host.count * host.gpu_bytes for host in hosts):
        return False
    return simplest(judge(model, hosts)).left_bytes >= 0


def largest_that_fits(highest: float, fits: Callable[[float], bool]) -> float | None:
    """Return the largest number up to ``highest`` with which a model fits; ``None``: hardly any."""
    low, high = 0.0, highest
    for _ in range(SMALLER_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low or None


def largest_host(hosts: Sequence[GpuHost]) -> GpuHost:
    return max(hosts, key=lambda host: host.count * host.gpu_bytes)


def hosts_lacking(model: Transformer, hosts: Sequence[GpuHost]) -> int | None:
    """Return how many more hosts like the largest one make the model fit; ``None``: no number."""
    largest = largest_host(hosts)
    gpus_left = RANKS_MAX - sum(host.count for host in hosts)
    for more in range(1, gpus_left // largest.count + 1):
        if fits_somehow(model, [*hosts, *[largest] * more]):
            return more
    return None


def stage_upload_bytes_per_s(
    model: Transformer,
    stages: int,
    *,
    flops: float = GPU_FLOPS,
    bytes_per_value: float = LOW_BYTES,
) -> float:
    """Return the upload with which a stage never waits for its line: ``d b S F/(4 P)``.

    For a token a stage of ``P/S`` parameters computes ``8 P/S`` operations, with recomputation,
    and sends ``2 d`` values of ``b`` bytes: activations on, gradients back.
    """
    return model.width * bytes_per_value * stages * flops / (4 * model.value_count)


def optimal_s(model: Transformer, gpu_count: int, flops: float = GPU_FLOPS) -> float:
    """Return the time of compute-optimal training: 6 operations a token and parameter."""
    tokens = TOKENS_PER_PARAMETER * model.value_count
    return 6 * model.value_count * tokens / (gpu_count * flops)
