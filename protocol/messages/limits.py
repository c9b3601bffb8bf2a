"""Limits of what messages hold, and the versions of the protocol."""

from __future__ import annotations

import re

from ..text import TEXT_CHARS_MAX as TEXT_CHARS_MAX

VERSION_MIN = 14  # the oldest protocol version that is accepted
VERSION_MAX = 14  # the newest protocol version
PEER_ADDRESSES_MAX = 16  # addresses of one member or relay
MASTERS_MAX = 16  # addresses of a run's master: as many as an invite has room for
NAME_CHARS_MAX = 64  # in the name of a peer or of a figure, so that tables and logs stay readable
WORD_CHARS_MAX = 64  # in the name of a dtype, a codec, a phase or a metric
NORM_SUMS_BYTES = 12  # three float32 for each contributor and the result in ``Reduced.norm_sums``
SKETCH_BYTES = 8  # 64 signs for each contributor, behind them
MEMBERS_MAX = 512  # members of a run: each keeps a link to every other one
ROUNDS_HELD_MAX = 256  # undecided or unapplied rounds; a joiner that falls further behind refetches
KEPT_STATES_MAX = 16  # checkpoints that a peer reports, the newest ones
FRAGMENTS_MAX = 1_024  # fragments of a model
TENSORS_MAX = 65_536  # tensors of a model; mixture-of-experts models reach some ten thousand
DIMENSIONS_MAX = 16  # dimensions of a tensor
RANKS_MAX = 63  # processes of one peer's trainer; their slots fill a page, see ``arena``
HOSTS_MAX = 16  # hosts of one peer; more than its ranks need, and few enough to look at
LANES_OPEN_MAX = 64  # lanes of one link at once; far more than one path can use
CHUNK_UNITS_MAX = 64  # units in a chunk
OWNER_RUNS_MAX = 4_096  # runs of consecutive chunks with one owner, in a plan
PACKED_BYTES_MAX = 2**24  # of a packed view or order: as much as a frame has
BLOCKS_MAX = 65_536  # block digests in one index: 64 GiB of state a fragment at 1 MiB a block
CHECKED_ADDRESSES_MAX = 4  # addresses at which the master dials a newcomer back, in one check
JUNK_BYTES_MAX = 16_384  # in one message that times a newcomer's line
METRICS_MAX = 32  # named figures that a trainer reports beside its loss
LEASE_RANGES_MAX = 4_096  # ranges of leased positions in one message; a peer holds a few
SAMPLES_MAX = 2**40  # of a data set: so that positions of many epochs are numbers of a message
LEASED_MAX = 2**32  # positions that a peer asks for at once
SAMPLES_AHEAD = 64  # samples that are leased to a peer before its trainer's speed is known
ORDER_KEY_BYTES = 16  # of the order of a run's samples
CERTIFICATE_BYTES_MAX = 8_192
COUNT_MAX = 2**63 - 1
CHUNK_BITS_BYTES_MAX = 2**17  # one bit for each chunk of a fragment: a million chunks
AUDITS_MAX = 2**12  # chunks of one result that are checked; of a larger result fewer are drawn
NO_DIGEST = bytes(32)  # in ``Hello.undecided``: a reduction that is not finished at this peer
# A run id also names folders and stands in certificates: no separators, no leading dot.
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
