"""What each key of ``run.toml`` means, in Markdown, for whoever writes one.

For the reference in docs/ (links are from there) and for ``holdfast init``. Which values a key takes, and
what is checked, is in ``spec``; a test sees to it that both know the same keys.
"""

from __future__ import annotations

MEANINGS = {
    "run.name": "for people, and for the state directory",
    "run.rounds": (
        "the run is finished after so many commits, the last one of every fragment at the "
        "last step; 0: it has no end"
    ),
    "diloco.algorithm": (
        'what the settings are that the file leaves out: `"diloco"`, `"streaming"`, '
        '`"delayed"`, `"eager"`, `"allreduce"` or `"sparse"`, see '
        '[Algorithms](../choosing.md#algorithms). `""`: the defaults given here'
    ),
    "diloco.sync_every": "inner steps between two rounds of a fragment (H)",
    "diloco.fragments": (
        "parts of the model that are synchronised in turn, evenly spread over `sync_every` "
        "steps (P)"
    ),
    "diloco.pattern": (
        'how layers are dealt out to fragments: `"strided"`, one after the other like cards, '
        'or `"sequential"`, in runs; both balanced by bytes. Embeddings and whatever else is '
        "in no layer have a fragment of their own if they are heavy enough. Tied weights "
        "count once"
    ),
    "diloco.groups": (
        'or what each fragment is, as patterns of tensors\' names: `[["embed*"], ["h.0.*", '
        '"h.1.*"], ["h.2.*"]]`. Each tensor must be in exactly one group; `fragments` follows'
    ),
    "diloco.overlap": (
        "inner steps that a trainer goes on at most while its round runs, before it waits for "
        "the result; less than `sync_every`. A result is merged as soon as it is there. "
        '`"auto"`: until the next fragment\'s turn, that is `sync_every / fragments`, but 10 '
        "at most"
    ),
    "diloco.outer_lr": "the outer optimizer's rate",
    "diloco.outer_momentum": "its momentum; runs of only some tens of rounds want less (the demo has 0.7)",
    "diloco.nesterov": "with Nesterov's look-ahead",
    "diloco.merge": (
        'how a trainer takes over a result that came while it trained on: `"delta"` keeps all '
        'of its own steps since, `"lerp:A"` keeps a share A of its local weights'
    ),
    "diloco.pace": (
        '`"elastic"`: a round is when the fastest contributor comes to its step; the others '
        "give what they have trained by then, so a slow machine neither waits nor is waited "
        'for. `"lockstep"`: when all have come to it, for comparisons'
    ),
    "membership.contributors": "places for contributors; more are spares. 0: no limit",
    "membership.spares": (
        "members that are kept in sync beyond the places; more of them wait in line, without "
        "state, and move up when somebody goes. -1: no limit"
    ),
    "membership.min_members": "contributors without whom no round opens or commits",
    "membership.quorum": (
        "share of the contributors that must be ready to close a round; at least two of them, "
        "if there are two"
    ),
    "membership.grace_s": (
        "seconds at most that the others have to get ready once the quorum is; with overlap, "
        "no longer than nobody has to wait for. Who is late three times in a row becomes a "
        "spare for a while"
    ),
    "membership.deadline_s": "a member that is silent for so long is gone. All other timeouts follow from this one",
    "trainer.step_deadline_s": (
        "a trainer that takes longer for a step hangs, and is started again; the first step "
        "may take four times as long. Evaluations between steps count. 0: no deadline"
    ),
    "trainer.nan_steps": (
        "so many losses in a row that are not finite, and a trainer's weights are replaced by "
        "the run's; 0: never"
    ),
    "membership.rewind_s": (
        "seconds after which the run goes on from an older version when nobody here holds the "
        "newest, somebody holds that one, and `min_members` peers are here; at once, if all "
        "who were ever in the run have begun anew without it. 0: never"
    ),
    "membership.approve": (
        "every newcomer waits for `holdfast approve`, whatever its invite says; who was admitted before "
        "does not"
    ),
    "reduce.codec_up": (
        'contributions on the wire: `"fp32"`, `"bf16"`, `"int8"`, `"nf4"`, `"e2m1"`, '
        '`"e3m0"`, each also with zstd behind it (`"fp32+zstd"`, `"bf16+zstd"`, '
        '`"int8+zstd"`, `"nf4+zstd"`, `"e2m1+zstd"`, `"e3m0+zstd"`), or `"topk"`, `"topk16"`, '
        '`"topk8"`, `"topk4"` (the 64th, 16th, 8th or 4th part of the values); one for all '
        "fragments, or a list with one for each"
    ),
    "reduce.codec_down": "results on the wire, likewise",
    "reduce.error_feedback": "what a lossy `codec_up` left out of a contribution goes into the next one",
    "reduce.feedback_decay": "times this, from 0 to 1",
    "reduce.combine": (
        'how owners make a result of what contributors send: `"mean"`; `"trimmed:A"`, in each '
        'coordinate without the share A of the values at either end (`"trimmed"`: 0.25); or '
        '`"clipped:R"`, where who is farther from the centre than R times the median distance '
        'counts less (`"clipped"`: 1). The last two are for runs in which [some contributors may '
        "lie](../security.md#contributors-that-lie); then plans are stars, never trees"
    ),
    "reduce.audit": (
        "the probability with which a chunk of a result is [looked at](../security.md#owners-that-lie) "
        "by another contributor before it is committed: whether its owner added up what it was given. "
        "0: no result is, contributions are not signed, and owners are believed. Above 0 plans are "
        "stars, never trees"
    ),
    "reduce.chunk_bytes": "float32 bytes of a chunk, 4096 to 4194304; smaller fragments are cut finer",
    "reduce.lanes": "TCP connections for bulk bytes between two peers, to begin with",
    "reduce.lanes_max": "as many as are opened while they carry more; the same number as `lanes` fixes it",
    "reduce.congestion": (
        "TCP's congestion control for them, where the kernel has it; `\"\"`: the kernel's own "
        "choice"
    ),
    "checkpoint.peers": (
        'who writes [checkpoints](../checkpoints.md): `"every"` peer in sync, so many of '
        'those that have been members for longest, or `"asked"`, only who was given '
        "`--checkpoints`"
    ),
    "checkpoint.every_rounds": (
        "write after so many rounds; 0: not by rounds. What is still being written then is "
        "finished first"
    ),
    "checkpoint.every_s": "write when so many seconds have passed, after the next round; 0: not by time",
    "checkpoint.keep_count": "so many are kept",
    "checkpoint.keep_s": "and none that is older than this, but for the newest; 0: however old",
    "checkpoint.trainer": (
        "whether each trainer writes its optimizer's state and random numbers beside that, "
        "too (`trainer.safetensors` in its peer's state directory, for itself only)"
    ),
    "sync.donor_share": (
        "of what a peer can send: what it gives to copies of the state while its rounds send "
        "too; all of it while they do not"
    ),
}
