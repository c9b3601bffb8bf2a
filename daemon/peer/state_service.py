"""The shared state in a peer's memory: created or restored, fetched from other peers and served to
them.

    donate    serves blocks of pinned versions, as long as the layout is the run's
    fetch     copies one version of a fragment from donors; one task per fragment

Outer steps change the state, too; the ``Reducer`` takes them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from itertools import islice

import trio
from attrs import define, evolve, field

from ...checkpoint import checkpoints
from ...checkpoint.blocks import FragmentArrays
from ...checkpoint.checkpoint_store import CheckpointStore, StoreError
from ...checkpoint.checkpoints import Checkpoint, CheckpointError, Manifest
from ...checkpoint.donor import Donor
from ...checkpoint.joiner import Joiner
from ...checkpoint.shared_state import SharedState
from ...checkpoint.state_transfer import FetchFailedError
from ...collectives.links.hub import LinkHub
from ...membership.shared.layout_difference import layout_difference
from ...protocol import messages as m
from ...protocol.arena import Arena
from ...protocol.errors import PeerLostError, RemoteProtocolError, StateMismatchError
from ..fragment_layout import fragments_of, sizes_of
from ..process.memory_check import check_room
from .line_report import measured
from .peer_config import PeerContext

log = logging.getLogger("holdfast.peer")


@define(eq=False, slots=False)
class StateService:
    """Owner of the shared state and of the arena in which the trainer posts.

    Attributes:
      layout: the run's; None until it is known.
      known_state, known_posted: the shared state and the posting arena; None without a layout.
      received_bytes: bytes of received blocks since the service began.
      restored: the checkpoint that this process started from; None if none was used.
      kept: up to ``KEPT_STATES_MAX`` checkpoints of the same state, the newest first; empty once in
        sync.
    """

    _peer: PeerContext
    _hub: LinkHub
    layout: m.ModelLayout | None = field(default=None, init=False)
    known_state: SharedState | None = field(default=None, init=False)
    known_posted: Arena | None = field(default=None, init=False)
    received_bytes: int = field(default=0, init=False)
    restored: Manifest | None = field(default=None, init=False)
    kept: list[Checkpoint] = field(factory=list, init=False)
    _donor: Donor | None = field(default=None, init=False)
    _donor_scope: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _joiner: Joiner | None = field(default=None, init=False)
    # True until this process is in sync, and from the beginning of a fetch until it is again.
    _copying: bool = field(default=True, init=False)
    _fetches: dict[int, trio.CancelScope] = field(factory=dict, init=False)
    # (version, progress) by fragment.
    _progress: dict[int, m.CopyProgress] = field(factory=dict, init=False)

    @property
    def state(self) -> SharedState:
        """Return the shared state; nothing that needs it begins before the layout is known."""
        assert self.known_state is not None
        return self.known_state

    @property
    def posted(self) -> Arena:
        """Return the posting arena; nothing that needs it begins before the layout is known."""
        assert self.known_posted is not None
        return self.known_posted

    def size(self, fragment: int) -> m.FragmentSize:
        return self.state.sizes[fragment]

    # ------------------------------------------------------------ layout and memory

    def use_layout(self, layout: m.ModelLayout) -> bool:
        """Allocate the shared state for the run's tensors and begin to serve it.

        Returns:
          False if that was done before.

        Raises:
          UserError: this machine has too little memory for it.
        """
        if self.layout == layout and self.known_state is not None and self._donor is not None:
            return False
        if self.known_state is None or self.layout != layout:
            self._allocate(layout, self._sizes(layout))
        self._donor_scope.cancel()
        self._donor_scope = trio.CancelScope()
        self._donor = Donor(self.state, self._hub, self._peer.network)
        self._joiner = Joiner(self.state, self._hub, self._peer.network, on_disk=self._on_disk)
        self._peer.start(self._donate, self._donor, self._donor_scope)
        return True

    def _sizes(self, layout: m.ModelLayout) -> tuple[m.FragmentSize, ...]:
        return sizes_of(fragments_of(layout, self._peer.spec.value.diloco))

    def _allocate(self, layout: m.ModelLayout, sizes: tuple[m.FragmentSize, ...]) -> None:
        check_room(sizes, self._peer.config.memory_bytes)
        shared, self.known_posted = self._peer.trainer.open_arenas(sizes)
        self.known_state = SharedState(
            sizes, shared, self._peer.config.run_id, self._peer.config.versions
        )
        self.layout = layout

    # ------------------------------------------------------------ checkpoints of earlier processes

    def restore(self, place: CheckpointStore, tell: Callable[[str], None] = log.warning) -> bool:
        """Load the newest checkpoint that is whole. Call it in a thread, before the service runs.

        Args:
          tell: takes a sentence about each damaged checkpoint.

        Returns:
          False if there is none.

        Raises:
          CheckpointError: the checkpoints belong to another run.
          StoreError: they cannot be read.
        """
        found = checkpoints.newest(place, self._check_run, tell)
        if not any(self._load(each, tell) for each in found):
            return False
        self.kept = list(islice(filter(self._same_run, found), m.KEPT_STATES_MAX))
        return True

    def _same_run(self, other: Checkpoint) -> bool:
        taken, manifest = self.restored, other.manifest
        assert taken is not None
        return (manifest.lineage, manifest.layout, manifest.sizes) == (
            taken.lineage,
            taken.layout,
            taken.sizes,
        )

    def _on_disk(self, head: m.FragmentHead) -> tuple[FragmentArrays, bytes] | None:
        """Return a version from a checkpoint on disk, for ``Joiner``; call it in a thread."""
        for each in self.kept:
            if each.manifest.fragment_heads()[head.fragment] == head:
                try:
                    return each.parts(head.fragment)
                except (CheckpointError, StoreError) as error:
                    log.warning("%s", error)
        return None

    def _check_run(self, manifest: Manifest) -> str:
        run_id = self._peer.config.run_id
        if manifest.run_id != run_id:
            raise CheckpointError(f"of run {manifest.run_id[:16]}, and this one is {run_id[:16]}")
        return ""

    def _load(self, found: Checkpoint, tell: Callable[[str], None]) -> bool:
        manifest = found.manifest
        self._allocate(manifest.layout, manifest.sizes)
        try:
            found.load(self.state)
        except CheckpointError as error:
            tell(str(error))
            self._forget()
            return False
        self.restored = manifest
        self._peer.replica.restored(
            bytes.fromhex(manifest.lineage),
            len(manifest.sizes),
            manifest.fragment_heads(),
            manifest.step,
            manifest.term,
            bytes.fromhex(manifest.nonce),
        )
        return True

    def check_restored(self, layout: m.ModelLayout | None, lineage: bytes) -> None:
        """Discard the restored state if the run, now known, is another one."""
        if self.known_state is None or self._donor is not None:
            return
        difference = self._difference(layout, lineage)
        if not difference:
            return
        text = f"the checkpoint that was loaded here is not the run's: {difference}"
        log.warning("%s", text)
        self._peer.report.notices.append(text)
        self._forget()
        self.restored = None
        self._peer.replica.restored(
            b"", 0, (), 0, self._peer.replica.term, self._peer.replica.nonce
        )

    def _difference(self, layout: m.ModelLayout | None, lineage: bytes) -> str:
        """Return how the restored state differs from the run's; empty if it does not."""
        assert self.layout is not None
        if layout is None:
            return "the run has no weights yet"
        if layout != self.layout:
            return f"its tensors differ: {layout_difference(layout, self.layout)}"
        sizes = self._sizes(layout)
        if self.state.sizes != sizes:
            return (
                f"it is cut into {len(self.state.sizes)} fragments in another way than the run's "
                f"{len(sizes)} (`fragments` or `groups` of run.toml)"
            )
        assert self.restored is not None
        ours = bytes.fromhex(self.restored.lineage)
        if lineage != ours:
            return (
                f"it began with other weights (lineage {ours.hex()[:12]}, not {lineage.hex()[:12]})"
            )
        return ""

    def _forget(self) -> None:
        self.kept = []
        self.layout = self.known_state = self.known_posted = None

    # ------------------------------------------------------------ beginning and end of a lineage

    def discard(self) -> m.ModelLayout | None:
        """Forget a state that is not the run's and return its layout."""
        log.warning("the state here belongs to another lineage than the run's: discarded")
        layout = self.layout
        self._forget()
        return layout

    async def take_initial(self) -> None:
        """Make the posted weights version 0 of the run."""
        state, posted = self.state, self.posted
        assert self.layout is not None
        layout = self.layout

        def work() -> None:
            for fragment in range(len(state.sizes)):
                state.load_initial(fragment, posted.values(fragment), posted.counters(fragment))
                posted.release(fragment)

        await self._peer.network.run_sync(work)
        heads = state.heads()
        lineage = state.lineage()
        self._peer.replica.founded(lineage, heads)
        self._peer.report.why = ""  # it waited for these weights
        self._peer.tell(m.WeightsSupplied(layout, state.sizes, heads, lineage))

    # ------------------------------------------------------------ serving other peers

    async def _donate(self, donor: Donor, scope: trio.CancelScope) -> None:
        with scope:
            await donor.run()

    def pin(self, order: m.Donate) -> None:
        if self.known_state is not None:
            self.known_state.fragments[order.head.fragment].pin(order.head.version, order.receiver)

    def unpin(self, order: m.Release) -> None:
        if self.known_state is not None:
            self.known_state.fragments[order.fragment].release(order.receiver, order.version)

    async def on_link_message(self, peer: str, message: m.Message) -> None:
        """Take a message of state transfer from a link's control stream.

        Raises:
          RemoteProtocolError: it does not belong there.
        """
        if isinstance(message, m.IndexRequest | m.BlocksRequest):
            if self._donor is not None:
                self._donor.receive(peer, message)
        elif isinstance(message, m.Index | m.BlocksRefused):
            if self._joiner is not None:
                self._joiner.receive(peer, message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} on a link")

    # ------------------------------------------------------------ fetching from other peers

    def fetch(self, order: m.SyncFragment) -> None:
        self._copying = True
        scope = self._fetches[order.head.fragment] = trio.CancelScope()
        self._peer.start(self._fetch, order, scope)

    def stop_fetch(self, fragment: int) -> None:
        scope = self._fetches.pop(fragment, None)
        if scope is not None:
            scope.cancel()
        self._progress.pop(fragment, None)

    def forget_kept(self) -> None:
        """Forget what fetches may find here: this peer is in sync, so nothing is missing."""
        if self._copying and self.known_state is not None:
            self._copying, self.kept = False, []
            self._peer.start(self._peer.network.run_sync, self.known_state.forget_kept)

    def copies(self) -> tuple[m.CopyProgress, ...]:
        committed = Counter(
            here.fragment for here in self._peer.replica.rounds.values() if here.commit is not None
        )
        return tuple(
            evolve(progress, rounds_kept=committed[fragment])
            for fragment, progress in sorted(self._progress.items())
        )

    async def _fetch(self, order: m.SyncFragment, scope: trio.CancelScope) -> None:
        assert self._joiner is not None
        joiner, head = self._joiner, order.head
        self._peer.report.phase = f"copying fragment {head.fragment}"
        received_bytes = 0  # counted so far

        def wanted() -> bool:
            return self._fetches.get(head.fragment) is scope  # else it was stopped, or replaced

        def note(progress: m.CopyProgress, received: int) -> None:
            nonlocal received_bytes
            if wanted():
                self._progress[head.fragment] = progress
            self.received_bytes += received - received_bytes
            received_bytes = received

        with scope:
            try:
                got = await joiner.fetch(order, note)
            except (PeerLostError, StateMismatchError) as error:
                if wanted():
                    self._ended(head)
                    bad = error.bad_donors if isinstance(error, FetchFailedError) else ()
                    self._peer.perform(self._peer.replica.fetch_failed(head, bad, str(error)))
                return
            if wanted():
                self._ended(head)
                self._peer.tell(measured(self._hub))  # the first rate that is known of these lines
                self._peer.perform(
                    self._peer.replica.fetched(head, got.received_bytes, got.bad_donors)
                )

    def _ended(self, head: m.FragmentHead) -> None:
        self._fetches.pop(head.fragment, None)
        self._progress.pop(head.fragment, None)
        if not self._fetches:
            self._peer.report.phase, self._peer.report.why = "in the run", ""
