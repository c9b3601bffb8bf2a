"""``holdfast verify`` at the master: compare the digests of all peers' states in memory.

The master asks over the control streams, first for the root of each fragment. If a copy's root differs,
it asks for the block digests of that copy and of a correct one. Peers that move on to another version
between the two questions are asked again, a few times. No decision follows: the rounds, too, find and
repair a copy that differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping

import trio

from ...membership.master.state.context import Context
from ...membership.master.sync.digest_comparison import (
    DIGEST_BYTES,
    DifferingCopy,
    differences,
    differing_blocks,
    format_blocks,
)
from ...protocol.errors import UserError
from ...protocol.messages import (
    BlocksVerified,
    FragmentHead,
    Message,
    Verified,
    Verify,
    VerifyBlocks,
)
from ..web.app import Json

VERIFY_S = 600.0  # for all answers: half a terabyte of state at a gigabyte a second
LOOK_S = 1.0  # between two checks whether the missing peers are still attached
TRIES_MAX = 3  # rounds may go on between the questions about roots and about blocks

Roots = Mapping[str, tuple[FragmentHead, ...]]
Key = tuple[str, int]  # peer, fragment


class StateVerifier:
    """Verify the run's state, one verification at a time.

    Args:
      attached: returns whether a peer is connected.
      tell: sends a message to a peer, if it is attached.
    """

    def __init__(
        self,
        context: Context,
        attached: Callable[[str], bool],
        tell: Callable[[str, Message], None],
    ) -> None:
        self._context = context
        self._attached = attached
        self._tell = tell
        self._numbers = itertools.count(1)
        self._number = 0  # of the open question; answers to earlier ones are ignored
        self._turn = trio.Lock()
        self._roots: dict[str, tuple[FragmentHead, ...]] = {}
        self._blocks: dict[Key, bytes] = {}
        self._changed = trio.Event()

    def hear(self, peer: str, message: Verified | BlocksVerified) -> None:
        """Take a peer's answer."""
        if message.number != self._number:
            return
        if isinstance(message, Verified):
            self._roots[peer] = message.heads
        else:
            self._blocks[peer, message.fragment] = message.digests
        self._changed.set()

    async def run(self) -> Json:
        """Compare all attached members.

        Raises:
          UserError: another verification is under way, or there is nothing to compare.
        """
        if not self._context.history.founded:
            raise UserError(
                "the run has no state yet", hint="wait until the founder's trainer has supplied it"
            )
        if all(member.relay for member in self._context.roster):
            raise UserError(
                "no peer is connected, so there is no state to compare",
                hint="`holdfast status` says what the run waits for",
            )
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            raise UserError("a verification is running", hint="wait until it ends") from None
        try:
            return await self._run()
        finally:
            self._turn.release()

    async def _run(self) -> Json:
        names = {m.peer: m.name for m in self._context.roster.by_number() if not m.relay}
        for tried in range(1, TRIES_MAX + 1):
            roots = await self._ask_roots(names)
            found = differences(roots, self._context.history.root)
            blocks = await self._ask_blocks(found)
            moved_on = any(blocks[each] is None and each.against for each in found)
            if not moved_on or tried == TRIES_MAX:
                break
        peers = [self._peer_row(peer, name, roots, found) for peer, name in names.items()]
        return {
            "same": not found and bool(peers) and all(row["compared"] for row in peers),
            "peers": peers,
            "differences": [
                _row(
                    each,
                    names,
                    blocks[each],
                    len(self._blocks.get(_key(each), b"")) // DIGEST_BYTES,
                )
                for each in found
            ],
        }

    async def _ask_roots(self, peers: Collection[str]) -> Roots:
        self._roots.clear()
        self._number = next(self._numbers)
        for peer in peers:
            self._tell(peer, Verify(self._number))
        await self._wait(lambda: [peer for peer in peers if peer not in self._roots])
        return dict(self._roots)

    async def _ask_blocks(
        self, found: list[DifferingCopy]
    ) -> dict[DifferingCopy, list[int] | None]:
        """Return the blocks that differ, or None if that cannot be known."""
        self._blocks.clear()
        self._number = next(self._numbers)
        wanted: dict[Key, int] = {}
        for each in found:
            for peer in (each.peer, each.against):
                if peer and each.against:
                    wanted[peer, each.head.fragment] = each.head.version
        for (peer, fragment), version in wanted.items():
            self._tell(peer, VerifyBlocks(self._number, fragment, version))
        await self._wait(lambda: [key[0] for key in wanted if key not in self._blocks])
        return {
            each: differing_blocks(
                self._blocks.get(_key(each), b""),
                self._blocks.get((each.against, each.head.fragment), b""),
            )
            for each in found
        }

    async def _wait(self, missing: Callable[[], Collection[str]]) -> None:
        """Wait until all peers that are still attached have answered."""
        with trio.move_on_after(VERIFY_S):
            while any(self._attached(peer) for peer in missing()):
                self._changed = trio.Event()
                with trio.move_on_after(LOOK_S):
                    await self._changed.wait()

    def _peer_row(self, peer: str, name: str, roots: Roots, found: list[DifferingCopy]) -> Json:
        heads = roots.get(peer)
        count = len(self._context.history.versions)
        wrong = sum(each.peer == peer for each in found)
        if heads is None:
            text = "no answer"
        elif len(heads) < count:
            text = f"holds {len(heads)} of {count} fragments, is copying the others"
        elif wrong:
            text = f"{wrong} of {count} fragments differ"
        else:
            low, high = min(h.version for h in heads), max(h.version for h in heads)
            versions = f"version {low}" if low == high else f"versions {low} to {high}"
            text = f"same bytes, {count} fragments, {versions}"
        return {
            "peer": peer,
            "name": name,
            "compared": bool(heads) and len(heads or ()) == count,
            "text": text,
            "fragments": [
                {"fragment": h.fragment, "version": h.version, "root": h.root.hex()}
                for h in heads or ()
            ],
        }


def _key(difference: DifferingCopy) -> Key:
    return difference.peer, difference.head.fragment


def _row(
    each: DifferingCopy, names: Mapping[str, str], blocks: list[int] | None, block_count: int
) -> Json:
    against = names.get(each.against, "")
    if blocks is not None:
        plural = "s" * (len(blocks) != 1)
        text = f"block{plural} {format_blocks(blocks)} of {block_count}, compared with {against}"
    elif each.against:
        text = "blocks unknown, because rounds went on; run `holdfast pause`, then verify again"
    else:
        text = "blocks unknown, because no other peer holds that version"
    return {
        "peer": each.peer,
        "name": names.get(each.peer, ""),
        "fragment": each.head.fragment,
        "version": each.head.version,
        "root": each.head.root.hex(),
        "expected": each.expected.hex() or None,
        "against": each.against or None,
        "blocks": blocks,
        "text": text,
    }
