"""A peer's checkpoints: when one is due, and writing it while rounds go on.

    applied --check()--> due? settled? --pin--> write, piece by piece, in threads --> prune

The state changes by rounds only, so the checkpointer checks after each applied round. It pins the
state of that instant: every fragment at the version that a commit led to. A commit during the
writing costs a copy of the fragment, as with any reader (see ``checkpoint.shared_state``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator

import trio
from attrs import define, field

from ...checkpoint import checkpoints
from ...checkpoint.checkpoint_store import CheckpointStore, StoreError
from ...checkpoint.checkpoints import Manifest
from ...checkpoint.shared_state import SharedState
from ...protocol.messages import KeepState
from .peer_config import PeerContext
from .state_service import StateService

log = logging.getLogger("holdfast.peer")

READER = "checkpoint"  # this reader's name in pins; peers' ids are hexadecimal
WRITER_CHARS = 8  # of this peer's id, in the name of a file that is not whole yet
TURN_BYTES = 8 * 2**20  # written at a time, between two returns to the event loop
REST = 10.0  # times as long as it took to write one passes before rounds make the next one due


@define(eq=False, slots=False)
class Checkpointer:
    """Writer of the shared state to a checkpoint store.

    Attributes:
      place: the checkpoint store; None: no checkpoints are written.
      newest: the manifest of the last checkpoint that this process wrote, or None.
      error: why the last checkpoint could not be written; empty if it was.
      writing: a checkpoint is being written.
      turn_bytes: bytes written at a time.
    """

    turn_bytes = TURN_BYTES

    _peer: PeerContext
    _state_service: StateService
    place: CheckpointStore | None
    _wall_clock: Callable[[], float] = field(default=time.time, kw_only=True)
    newest: Manifest | None = field(default=None, init=False)
    error: str = field(default="", init=False)
    writing: bool = field(default=False, init=False)
    _took_s: float = field(default=0.0, init=False)  # to write the last one
    # The last checkpoint, or the first check, as (rounds, time); the next one is counted from it.
    _since: tuple[int, float] | None = field(default=None, init=False)
    _branch: int | None = field(default=None, init=False)  # of the run's history at that time

    # ------------------------------------------------------------ while rounds go on

    def check(self) -> None:
        """Begin to write if a checkpoint is due. Called after each applied round and each view."""
        state, replica = self._state_service.known_state, self._peer.replica
        if state is None or self._peer.spec.known is None or self.writing:
            return
        heads = state.heads()
        if len(heads) < len(state.sizes):
            return  # a newcomer's rounds are not known before it has copied all fragments
        rounds, now_s = sum(head.version for head in heads), trio.current_time()
        if self._since is None:
            restored = self._state_service.restored
            self._since = rounds - 1, now_s
            self._branch = replica.branch if restored is None else restored.branch
        if not (self._due(rounds, now_s) and replica.settled):
            return
        if self.place is not None and self._writes() and not self._too_large(state):
            manifest = self._manifest(state)
            if manifest is None or not checkpoints.pin(state, manifest, READER):
                return  # the state is being changed: the next check comes soon
            self.writing = True
            self._peer.start(self._write, self.place, state, manifest)
        self._since, self._branch = (rounds, now_s), replica.branch
        if (
            self._peer.spec.value.checkpoint.trainer
            and replica.trainer.loaded
            and replica.trainer.training
        ):
            self._peer.trainer.tell(KeepState())

    def _writes(self) -> bool:
        peers = self._peer.spec.value.checkpoint.peers
        return self._peer.config.always_writes or self._peer.replica.keeps_checkpoints(peers)

    def _due(self, rounds: int, now_s: float) -> bool:
        """Return whether it is time for a checkpoint.

        That is at multiples of ``every_rounds``, so that peers write the same states, unless rounds
        are so short that a disk would always be written to; and after a rewind: the newest
        checkpoint must not hold a discarded state for long.
        """
        assert self._since is not None
        if self._branch != self._peer.replica.branch:
            return True
        table, (rounds_then, then_s) = self._peer.spec.value.checkpoint, self._since
        by_rounds = table.every_rounds and rounds // table.every_rounds != (
            rounds_then // table.every_rounds
        )
        rested = now_s >= then_s + REST * self._took_s
        return bool(by_rounds and rested) or bool(table.every_s and now_s >= then_s + table.every_s)

    def _too_large(self, state: SharedState) -> bool:
        """Return whether the disk quota has no room for a checkpoint; this is reported once."""
        disk_quota = self._peer.config.disk_quota
        if disk_quota is None or not (why := disk_quota.refuses(_size_bytes(state))):
            return False
        self._failed(StoreError(why))
        return True

    async def _write(self, place: CheckpointStore, state: SharedState, manifest: Manifest) -> None:
        network, writing = self._peer.network, self._begin(place, state, manifest)
        began_s = trio.current_time()
        try:
            try:
                if self._peer.config.disk_quota is not None:  # two at a time have to fit
                    await network.run_sync(lambda: self._prune(place))
                while await network.run_sync(lambda: _turn(writing, self.turn_bytes)):
                    await self._between_turns()
            finally:
                writing.close()
                state.release_receiver(READER)
                self.writing = False
            self._written(manifest)
            self._took_s = trio.current_time() - began_s
            await network.run_sync(lambda: self._prune(place))
        except StoreError as error:
            self._failed(error)
        else:
            self.check()  # another one may have become due meanwhile

    async def _between_turns(self) -> None:
        """Let other tasks run; the simulator sleeps here, for a disk that is slow."""

    def _begin(
        self, place: CheckpointStore, state: SharedState, manifest: Manifest
    ) -> Generator[int, None, None]:
        writer = self._peer.config.me[:WRITER_CHARS]
        return checkpoints.write(place, state, manifest, reader=READER, writer=writer)

    def _written(self, manifest: Manifest) -> None:
        self.newest, self.error = manifest, ""

    def _failed(self, error: StoreError) -> None:
        if str(error) != self.error:
            self._peer.report.notices.append(f"no checkpoint: {error}")
            log.warning("no checkpoint was written: %s", error)
        self.error = str(error)

    def _prune(self, place: CheckpointStore) -> None:
        table, disk_quota = self._peer.spec.value.checkpoint, self._peer.config.disk_quota
        keep_count, state = table.keep_count, self._state_service.known_state
        if disk_quota is not None and state is not None:
            keep_count = disk_quota.keep_count(keep_count, _size_bytes(state))
        checkpoints.prune(
            place,
            self._peer.config.run_id,
            keep_count=keep_count,
            keep_s=table.keep_s,
            now_s=self._wall_clock(),
        )

    # ------------------------------------------------------------ at the end

    def last(self) -> tuple[int, Generator[int, None, None]] | None:
        """Prepare the last checkpoint, after the service has ended.

        Returns:
          Its bytes and a generator that writes it: run that to its end in a thread, or close it; it
          raises StoreError. None if there is nothing to write, or it is written already.
        """
        place, state = self.place, self._state_service.known_state
        if place is None or state is None or not self._peer.replica.lineage:
            return None
        if self._too_large(state):
            return None
        manifest = self._manifest(state)
        known = self.newest or self._state_service.restored
        if manifest is None or (known is not None and known.same_state(manifest)):
            return None
        return _size_bytes(state), self._last(place, state, manifest)

    def _last(
        self, place: CheckpointStore, state: SharedState, manifest: Manifest
    ) -> Generator[int, None, None]:
        if self._peer.config.disk_quota is not None and self._peer.spec.known is not None:
            self._prune(place)
        yield from self._begin(place, state, manifest)
        self._written(manifest)
        if self._peer.spec.known is not None:
            self._prune(place)

    def _manifest(self, state: SharedState) -> Manifest | None:
        replica, layout = self._peer.replica, self._state_service.layout
        spec, restored = self._peer.spec.known, self._state_service.restored
        toml = spec.toml_text if spec is not None else restored.spec_toml if restored else ""
        if layout is None:
            return None
        return checkpoints.manifest_of(
            state,
            lineage=replica.lineage,
            term=replica.term,
            nonce=replica.nonce,
            branch=replica.branch,
            step=replica.trainer.run_step,
            layout=layout,
            spec_toml=toml,
            now_s=self._wall_clock(),
        )


def _size_bytes(state: SharedState) -> int:
    return sum(map(state.size_bytes, range(len(state.sizes))))


def _turn(writing: Generator[int, None, None], left_bytes: int) -> bool:
    """Write up to a number of bytes and return whether any are left."""
    while left_bytes > 0:
        size_bytes = next(writing, None)
        if size_bytes is None:
            return False
        left_bytes -= size_bytes
    return True
