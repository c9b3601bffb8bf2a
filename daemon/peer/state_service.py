"""The shared state in a peer's memory: its making, its transfer from and to others.

    donate    serves blocks of pinned versions to others, as long as the layout is the run's
    fetch     copies one version of a fragment from donors; one task per fragment

The state is changed by outer steps, too; those are the ``Reducer``'s.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice

import trio

from ...checkpoint import checkpoints
from ...checkpoint.blocks import FragmentArrays
from ...checkpoint.checkpoint_store import CheckpointStore, StoreError
from ...checkpoint.checkpoints import Checkpoint, CheckpointError, Manifest
from ...checkpoint.copy_progress import FetchProgress
from ...checkpoint.donor import Donor
from ...checkpoint.joiner import Joiner
from ...checkpoint.partial_copy import PartialCopies
from ...checkpoint.shared_state import SharedState
from ...checkpoint.state_transfer import FetchFailedError
from ...membership.master.state.roster import layout_difference
from ...protocol.arena import Arena
from ...protocol.errors import PeerLostError, RemoteProtocolError, StateMismatchError
from ...protocol.messages import (
    KEPT_STATES_MAX,
    BlocksRefused,
    BlocksRequest,
    BlocksVerified,
    CopyProgress,
    Donate,
    FragmentHead,
    FragmentSize,
    Index,
    IndexRequest,
    Message,
    ModelLayout,
    Release,
    SyncFragment,
    Verified,
    Verify,
    VerifyBlocks,
    WeightsSupplied,
)
from ..fragment_layout import fragments_of, sizes_of
from ..memory_check import check_room
from .peer_parts import PeerParts, cancel

log = logging.getLogger("holdfast.peer")


class StateService:
    """Owns the shared state and the arena in which the trainer posts.

    Attributes:
      layout: the run's; None until it is known.
      state, posted: there as soon as the layout is.
      received_bytes: of blocks, since the service began.
      saved_bytes: of those, that never travelled: blocks came compressed.
      restored: the checkpoint that we began with; None if there was none that we use.
      kept: older ones of the same state, the newest first; none once we were in sync.
    """

    def __init__(self, parts: PeerParts) -> None:
        self.layout: ModelLayout | None = None
        self.known_state: SharedState | None = None
        self.known_posted: Arena | None = None
        self.received_bytes = self.saved_bytes = 0
        self.restored: Manifest | None = None
        self.kept: list[Checkpoint] = []
        self._parts = parts
        self._donor: Donor | None = None
        self._donor_scope = trio.CancelScope()
        self._joiner: Joiner | None = None
        self._copying = True  # since we were in sync last, in this life or an earlier one
        self._fetches: dict[int, trio.CancelScope] = {}
        self._standings: dict[
            int, tuple[int, FetchProgress]
        ] = {}  # version and how far, by fragment

    @property
    def state(self) -> SharedState:
        """Nothing that needs it begins before the layout is known."""
        assert self.known_state is not None
        return self.known_state

    @property
    def posted(self) -> Arena:
        """As ``state``."""
        assert self.known_posted is not None
        return self.known_posted

    def size(self, fragment: int) -> FragmentSize:
        return self.state.sizes[fragment]

    # ------------------------------------------------------------ its making

    def use_layout(self, layout: ModelLayout) -> bool:
        """The run's tensors are known: make room for the shared state. False: it was there.

        Raises:
          UserError: this machine has not the memory for it.
        """
        if self.layout == layout and self.known_state is not None and self._donor is not None:
            return False
        parts = self._parts
        if self.known_state is None or self.layout != layout:
            self._make_room(layout, self._sizes(layout))
        self._donor_scope.cancel()
        self._donor_scope = trio.CancelScope()
        self._donor = Donor(self.state, parts.hub, parts.network)
        folder = parts.config.partial
        if self._joiner is not None and self._joiner.spool is not None:
            self._joiner.spool.close()
        spool = (
            None
            if folder is None
            else PartialCopies(folder, limit_bytes=parts.config.partial_bytes)
        )
        self._joiner = Joiner(
            self.state, parts.hub, parts.network, spool=spool, on_disk=self._on_disk
        )
        parts.start(self._donate, self._donor, self._donor_scope)
        return True

    def _sizes(self, layout: ModelLayout) -> tuple[FragmentSize, ...]:
        return sizes_of(fragments_of(layout, self._parts.spec.diloco))

    def _make_room(self, layout: ModelLayout, sizes: tuple[FragmentSize, ...]) -> None:
        check_room(sizes, self._parts.config.memory_bytes)
        shared, self.known_posted = self._parts.trainer.open_arenas(sizes)
        self.known_state = SharedState(sizes, shared, self._parts.config.run_id)
        self.layout = layout

    # ------------------------------------------------------------ kept from life to life

    def restore(self, place: CheckpointStore, tell: Callable[[str], None] = log.warning) -> bool:
        """Before the service runs, in a thread: take up the newest checkpoint that is whole.

        Args:
          tell: is told of those that are damaged.

        Raises:
          CheckpointError: the place is another run's.
          PlaceError: it cannot be read.
        """
        found = checkpoints.newest(place, self._fits, tell)
        if not any(self._take_up(each, tell) for each in found):
            return False
        self.kept = list(islice(filter(self._same_run, found), KEPT_STATES_MAX))
        return True

    def _same_run(self, other: Checkpoint) -> bool:
        taken, manifest = self.restored, other.manifest
        assert taken is not None
        return (manifest.lineage, manifest.layout, manifest.sizes) == (
            taken.lineage,
            taken.layout,
            taken.sizes,
        )

    def _on_disk(self, head: FragmentHead) -> tuple[FragmentArrays, bytes] | None:
        """See ``Joiner.on_disk``; blocks."""
        for each in self.kept:
            if each.manifest.fragment_heads()[head.fragment] == head:
                try:
                    return each.checked_parts(head.fragment)
                except (CheckpointError, StoreError) as error:
                    log.warning("%s", error)
        return None

    def _fits(self, manifest: Manifest) -> str:
        run_id = self._parts.config.run_id
        if manifest.run_id != run_id:
            raise CheckpointError(f"of run {manifest.run_id[:16]}, and this one is {run_id[:16]}")
        return ""

    def _take_up(self, found: Checkpoint, tell: Callable[[str], None]) -> bool:
        manifest = found.manifest
        self._make_room(manifest.layout, manifest.sizes)
        try:
            found.load(self.state)
        except CheckpointError as error:
            tell(str(error))
            self._forget()
            return False
        self.restored = manifest
        self._parts.replica.restored(
            bytes.fromhex(manifest.lineage),
            len(manifest.sizes),
            manifest.fragment_heads(),
            manifest.step,
            manifest.term,
            bytes.fromhex(manifest.nonce),
        )
        return True

    def check_restored(self, layout: ModelLayout | None, lineage: bytes) -> None:
        """The run is known: what was restored must be of it, or is forgotten before it is used."""
        if self.known_state is None or self._donor is not None:
            return
        replica = self._parts.replica
        difference = self._difference(layout, lineage)
        if not difference:
            return
        text = f"the checkpoint that was taken up here is not the run's: {difference}"
        log.warning("%s", text)
        self._parts.report.told.append(text)
        self._forget()
        self.restored = None
        replica.restored(b"", 0, (), 0, replica.term, replica.nonce)

    def _difference(self, layout: ModelLayout | None, lineage: bytes) -> str:
        """What tells the restored state from the run's; empty: nothing."""
        assert self.layout is not None
        if layout is None:
            return "the run has no weights yet"
        if layout != self.layout:
            return f"its tensors are others: {layout_difference(layout, self.layout)}"
        sizes = self._sizes(layout)
        if self.state.sizes != sizes:
            return (
                f"it is cut into {len(self.state.sizes)} fragments in another way than the run's "
                f"{len(sizes)} (`fragments`, `pattern` or `groups` of run.toml)"
            )
        ours = self._parts.replica.lineage
        if lineage != ours:
            return (
                f"it began with other weights (lineage {ours.hex()[:12]}, not {lineage.hex()[:12]})"
            )
        return ""

    def _forget(self) -> None:
        self.kept = []
        self.layout = self.known_state = self.known_posted = None

    # ------------------------------------------------------------ its end

    def discard(self) -> ModelLayout | None:
        """What we hold is no state of the run: forget it. Returns the layout that it had."""
        log.warning("our state belongs to another lineage than the run's: discarded")
        layout = self.layout
        self._forget()
        return layout

    async def take_initial(self) -> None:
        """What the trainer posted becomes version 0 of the run."""
        state, posted, parts = self.state, self.posted, self._parts
        assert self.layout is not None
        layout = self.layout

        def work() -> None:
            for fragment in range(len(state.sizes)):
                state.load_initial(fragment, posted.values(fragment), posted.counters(fragment))

        await parts.network.run_sync(work)
        heads = state.heads()
        lineage = state.lineage()
        parts.replica.founded(lineage, heads)
        parts.tell_master(WeightsSupplied(layout, state.sizes, heads, lineage))

    async def verify(self, order: Verify | VerifyBlocks) -> None:
        """Tell the master what the bytes in our memory come to, one fragment after the other."""
        state, run_sync = self.known_state, self._parts.network.run_sync
        heads: list[FragmentHead] = []
        if isinstance(order, Verify):
            for fragment in range(0 if state is None else len(state.sizes)):
                assert state is not None
                if (found := await run_sync(partial(state.digest_now, fragment))) is not None:
                    heads.append(found[0])
            self._parts.tell_master(Verified(order.number, tuple(heads)))
            return
        digests = b""
        if state is not None and order.fragment < len(state.sizes):
            found = await run_sync(partial(state.digest_now, order.fragment))
            if found is not None and found[0].version == order.version:
                digests = found[1]
        self._parts.tell_master(
            BlocksVerified(order.number, order.fragment, order.version, digests)
        )

    # ------------------------------------------------------------ giving it to others

    async def _donate(self, donor: Donor, scope: trio.CancelScope) -> None:
        with scope:
            await donor.run()

    def pin(self, order: Donate) -> None:
        if self.known_state is not None:
            self.known_state.pin(order.head.fragment, order.head.version, order.receiver)

    def unpin(self, order: Release) -> None:
        if self.known_state is not None:
            self.known_state.release(order.fragment, order.version, order.receiver)

    async def on_link_message(self, peer: str, message: Message) -> None:
        """A member says something on a link's control stream: both sides of state transfer."""
        if isinstance(message, IndexRequest | BlocksRequest):
            if self._donor is not None:
                self._donor.receive(peer, message)
        elif isinstance(message, Index | BlocksRefused):
            if self._joiner is not None:
                self._joiner.receive(peer, message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} on a link")

    # ------------------------------------------------------------ getting it from others

    def fetch(self, order: SyncFragment) -> None:
        self._copying = True
        scope = self._fetches[order.head.fragment] = trio.CancelScope()
        self._parts.start(self._fetch, order, scope)

    def stop_fetch(self, fragment: int) -> None:
        cancel(self._fetches, fragment)
        self._standings.pop(fragment, None)

    def note_whole(self) -> None:
        """We are in sync: what a copy has left on disk is of no use any more."""
        if self._copying and self._joiner is not None:
            self._copying, self.kept = False, []
            self._parts.start(self._joiner.whole)

    def copies(self) -> tuple[CopyProgress, ...]:
        """How far copies that run are."""
        kept = Counter(
            here.fragment for here in self._parts.replica.rounds.values() if here.commit is not None
        )
        return tuple(
            CopyProgress(
                fragment,
                version,
                standing.done_blocks,
                standing.all_blocks,
                standing.done_bytes,
                standing.all_bytes,
                standing.bytes_per_s,
                standing.donors,
                kept[fragment],
            )
            for fragment, (version, standing) in sorted(self._standings.items())
        )

    async def _fetch(self, order: SyncFragment, scope: trio.CancelScope) -> None:
        assert self._joiner is not None
        joiner, parts, head = self._joiner, self._parts, order.head
        parts.report.phase = f"copying fragment {head.fragment}"
        received_bytes = saved_bytes = 0  # as counted

        def wanted() -> bool:
            return self._fetches.get(head.fragment) is scope  # else it was stopped, or replaced

        def progress(standing: FetchProgress) -> None:
            nonlocal received_bytes, saved_bytes
            if wanted():
                self._standings[head.fragment] = head.version, standing
            self.received_bytes += standing.received_bytes - received_bytes
            self.saved_bytes += standing.saved_bytes - saved_bytes
            received_bytes, saved_bytes = standing.received_bytes, standing.saved_bytes

        with scope:
            try:
                got = await joiner.fetch(order, progress)
            except (PeerLostError, StateMismatchError) as error:
                if wanted():
                    self._ended(head)
                    bad = error.bad_donors if isinstance(error, FetchFailedError) else ()
                    parts.perform(parts.replica.fetch_failed(head, bad, str(error)))
                return
            if wanted():
                self._ended(head)
                parts.tell_measured()  # the line's first work
                parts.perform(parts.replica.fetched(head, got.received_bytes, got.bad_donors))

    def _ended(self, head: FragmentHead) -> None:
        self._fetches.pop(head.fragment, None)
        self._standings.pop(head.fragment, None)
        if not self._fetches:
            self._parts.report.phase, self._parts.report.why = "in the run", ""
