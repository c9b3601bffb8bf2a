"""The meaning of each key of ``run.toml``, in Markdown.

For the reference in docs/ (links are relative to it) and for ``holdfast init``. ``spec`` has the
keys' allowed values and checks; a test ensures that both have the same keys.
"""

from __future__ import annotations

MEANINGS = {
    "run.name": "name of the run, for people and for the state directory",
    "run.rounds": (
        "number of commits after which the run is finished; the last one of every fragment is "
        "at the last step. 0: no end"
    ),
    "run.journal": (
        '`"postgresql://USER@HOST/DATABASE"`: the journal is kept there, and several masters can'
        " lead the run in turn, see [When the master's machine is lost](../lost-master.md). No"
        ' password: all members see this file. `""`: the state directory of the one master'
    ),
    "run.preset": (
        'measured settings that the file may override key by key: `"diloco"`, `"delayed"`, '
        '`"streaming"`, `"sparse"`, `"muon"`, `"muon-streaming"` or `"allreduce"`, see '
        '[Presets](../choosing.md#presets). `""`: none'
    ),
    "diloco.sync_every": "inner steps between two rounds of a fragment (H)",
    "diloco.fragments": (
        "parts of the model that are synchronised in turn, evenly spread over `sync_every` "
        "steps (P). Layers are dealt out in turn, balanced by bytes. Embeddings and other tensors "
        "that are in no layer have a fragment of their own if they are large enough. Tied weights "
        "count once"
    ),
    "diloco.groups": (
        "the tensors of each fragment, as patterns of their names: "
        '`[["embed*"], ["h.0.*", "h.1.*"], ["h.2.*"]]`. Each tensor must be in exactly one '
        "group; `fragments` is the number of groups"
    ),
    "diloco.overlap": (
        "inner steps that a trainer takes at most while its round runs, before it waits for "
        "the result; `sync_every` at most. A result is merged as soon as it arrives. "
        '`"auto"`: until the next fragment\'s turn, that is `sync_every / fragments`, but 10 '
        "at most"
    ),
    "diloco.outer_lr": "learning rate of the outer optimizer",
    "diloco.outer_momentum": (
        "momentum of the outer optimizer; runs of a few tens of rounds need less (the demo has 0.7)"
    ),
    "diloco.nesterov": "Nesterov momentum",
    "diloco.pace": (
        '`"elastic"`: a round begins when the fastest contributor reaches its step; the others '
        "post what they have trained by then, so no machine waits for a slower one. "
        '`"lockstep"`: it begins when all have reached it, for comparisons'
    ),
    "membership.contributors": "places for contributors; further members are spares. 0: no limit",
    "membership.spares": (
        "members beyond the places that are kept in sync; further ones wait in line, without "
        "state, and move up when a member leaves. -1: no limit"
    ),
    "membership.min_members": "minimum of contributors to open and to commit a round",
    "membership.quorum": (
        "share of the contributors that must be ready to close a round; at least two of them, "
        "if there are two"
    ),
    "membership.grace_s": (
        "seconds that the other contributors have at most to get ready after the quorum; with "
        "overlap, only as long as no trainer has to wait. A contributor that is late three "
        "times in a row becomes a spare for a while"
    ),
    "membership.deadline_s": (
        "seconds after which a silent member is removed. All other timeouts follow from this one"
    ),
    "data.samples": (
        "samples of the data set that [`run.sampler`](../data.md) shares out; a trainer "
        "with another number is refused. 0: as the first trainer says"
    ),
    "data.seed": "seed of the order of the samples, which differs in each epoch",
    "data.epochs": (
        "number of epochs after which the run is finished, if `run.rounds` has not ended it before."
        " 0: no end"
    ),
    "trainer.step_deadline_s": (
        "a trainer that takes longer for a step hangs, and is started again; the first step "
        "may take four times as long. Evaluations between steps count. 0: no deadline"
    ),
    "trainer.nan_steps": (
        "number of losses in a row that are not finite, after which a trainer's weights are "
        "replaced by the run's; 0: only an update that is not finite has them replaced"
    ),
    "membership.rewind_s": (
        "seconds after which the run goes on from an older version when no connected peer holds "
        "the newest one, some peer holds the older one, and `min_members` peers are connected; "
        "at once, if all peers that were ever in the run have returned without the newest one. "
        "0: never"
    ),
    "membership.approve": (
        "every newcomer waits for `holdfast approve`, with any invite; a peer that was "
        "admitted before does not"
    ),
    "reduce.codec_up": (
        'codec of contributions: `"fp32"`, `"bf16"`, `"int8"`, `"nf4"`, each also with zstd '
        '(`"fp32+zstd"`, `"bf16+zstd"`, `"int8+zstd"`, `"nf4+zstd"`), or `"topk"`, `"topk16"`, '
        '`"topk8"`, `"topk4"` (the 64th, 16th, 8th or 4th part of the values); one for all '
        "fragments, or a list with one for each"
    ),
    "reduce.codec_down": "codec of results, likewise",
    "reduce.feedback_decay": (
        "what a lossy `codec_up` left out of a contribution is added to the next one, times this "
        "factor from 0 to 1. 0: it is lost"
    ),
    "reduce.combine": (
        'how chunk owners combine contributions: `"mean"`, or `"clipped:R"`, where a contribution '
        "that is farther from the centre than R times the median distance counts less "
        '(`"clipped"`: 1). The latter is for runs in which [some contributors may '
        "lie](../security.md#contributors-that-lie)"
    ),
    "reduce.audit": (
        "probability with which another contributor adds a chunk of a result up again before it is "
        "committed ([a spot check](../security.md#owners-that-lie)). 0: owners are trusted"
    ),
    "reduce.chunk_bytes": (
        "float32 bytes of a chunk at most, 4096 to 4194304; cut finer for small fragments and all"
        " but the fastest lines"
    ),
    "reduce.lanes": "initial number of TCP connections for bulk bytes between two peers",
    "reduce.lanes_max": (
        "limit of that number; connections are added while the line has room. Equal to `lanes`:"
        " fixed"
    ),
    "reduce.congestion": (
        'TCP congestion control of these connections, where the kernel has it; `""`: the kernel\'s'
        " default. `bbr` is used over round trips of 0.5 ms and more; over shorter ones it would"
        " only cost processor time, and `cubic` or `reno` takes its place"
    ),
    "checkpoint.peers": (
        'peers that write [checkpoints](../checkpoints.md): `"every"` peer in sync, a number: '
        'this many of the oldest members, or `"asked"`: only peers with `--checkpoints`. A peer '
        "with `--checkpoints` always writes"
    ),
    "checkpoint.every_rounds": (
        "write after this number of rounds, or after `every_s` if that is sooner; 0: not by rounds."
        " Where rounds are short, ten times as long as writing the last one took passes first"
    ),
    "checkpoint.every_s": "write at the first round after this number of seconds; 0: not by time",
    "checkpoint.keep_count": "number of checkpoints to keep",
    "checkpoint.keep_s": (
        "age in seconds after which a checkpoint is removed, except for the newest one; 0: no limit"
    ),
    "checkpoint.trainer": (
        "each trainer also writes its optimizer's state and random numbers "
        "(`trainer.safetensors` in its peer's state directory, for itself only)"
    ),
    "sync.donor_share": (
        "least share of a peer's upload for copies of the state while its rounds send too; more if "
        "they leave more, and all of it while they do not send"
    ),
}
