"""What a peer says of itself and its master says of it, in equal words."""

from __future__ import annotations

from ...protocol.messages import CopyProgress, FragmentHead
from ...protocol.text import plural
from .run_status import CopyRow, DoneOfAll, HeadRow

MIB = 2**20
NO_STEP = "its trainer has taken no step"  # beginning of a daemon's text about a trainer that hangs


def copy_row(copy: CopyProgress) -> CopyRow:
    left_bytes = copy.all_bytes - copy.done_bytes
    return CopyRow(
        fragment=copy.fragment,
        version=copy.version,
        blocks=DoneOfAll(done=copy.done_blocks, all=copy.all_blocks),
        bytes=DoneOfAll(done=copy.done_bytes, all=copy.all_bytes),
        bytes_per_s=copy.bytes_per_s,
        left_s=left_bytes / copy.bytes_per_s if copy.bytes_per_s else None,
        donors=tuple(copy.donors),
        rounds_kept=copy.rounds_kept,
        text=format_copy(copy),
    )


def head_row(head: FragmentHead) -> HeadRow:
    return HeadRow(fragment=head.fragment, version=head.version, root=head.root.hex())


def format_copy(copy: CopyProgress) -> str:
    text = f"copying fragment {copy.fragment}: "
    text += f"{copy.done_bytes / MIB:.0f} of {copy.all_bytes / MIB:.0f} MiB"
    text += f" from {plural(len(copy.donors), 'donor')}"
    if copy.bytes_per_s:
        left_s = (copy.all_bytes - copy.done_bytes) / copy.bytes_per_s
        text += f", {format_rate(copy.bytes_per_s)}, {left_s:.0f} s left"
    if copy.rounds_kept:
        text += f"; {plural(copy.rounds_kept, 'round')} to replay"
    return text


def format_rate(bytes_per_s: float) -> str:
    mb = bytes_per_s / 1e6
    return f"{mb:.1f} MB/s" if mb >= 0.1 else f"{bytes_per_s / 1e3:.1f} kB/s"
