"""A peer's checkpoints: when one is due, and the writing of it while rounds go on.

    applied --look()--> due? settled? --pin--> write, piece by piece, in threads --> prune

The state changes by rounds only, so after each applied one is the time to look. What is pinned is
what the run was at that instant: all fragments at the versions that a commit led to. A commit that
overtakes the writing costs a copy of the fragment, as with any reader (see ``checkpoint.state``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator

import trio

from ...checkpoint import checkpoints
from ...checkpoint.checkpoint_store import CheckpointStore, StoreError
from ...checkpoint.checkpoints import Manifest
from ...checkpoint.shared_state import SharedState
from ...protocol.messages import CheckpointTold, KeepState
from ...protocol.text import plain
from .peer_parts import PeerParts
from .state_service import StateService

log = logging.getLogger("holdfast.peer")

READER = "checkpoint"  # to the state; peers' ids are hexadecimal
WRITER_CHARS = 8  # of our id, in the name of a file that is not whole yet
TURN_BYTES = 8 * 2**20  # written at a time; then the loop sees whether we still should


class Checkpointer:
    """Writes the shared state to a place.

    Attributes:
      place: None: nowhere.
      newest: the manifest of the last one that was written; None: none in this life.
      error: why the last one could not be written; empty: it was.
      writing: one is being written.
      turn_bytes: what is written at a time.
    """

    turn_bytes = TURN_BYTES

    def __init__(
        self,
        parts: PeerParts,
        state_service: StateService,
        place: CheckpointStore | None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.place = place
        self.newest: Manifest | None = None
        self.error = ""
        self.writing = False
        self._parts = parts
        self._state_service = state_service
        self._wall_clock = wall_clock
        # Since when, by rounds and by our clock, the next one is counted: from our first look on.
        self._since: tuple[int, float] | None = None
        self._branch: int | None = None  # of the run's history, when we looked or wrote last
        self._wanted: int | None = None  # the run's owner wants one: the number of the order

    # ------------------------------------------------------------ while rounds go on

    def look(self) -> None:
        """A round was applied, or the view is another: begin to write if it is time."""
        parts, state = self._parts, self._state_service.known_state
        if state is None or parts.known_spec is None or self.writing:
            return
        rounds = sum(head.version for head in state.heads())
        now_s = trio.current_time()
        if self._since is None:
            restored = self._state_service.restored
            self._since = rounds - 1, now_s
            self._branch = parts.replica.branch if restored is None else restored.branch
        wanted = self._wanted
        if not ((wanted is not None or self._due(rounds, now_s)) and parts.replica.settled):
            return
        if wanted is not None and (why := self._why_not()):
            self._wanted = None
            self._answer(wanted, reason=why)
            return
        if self.place is not None and self._ours() and not self._too_large(state):
            manifest = self._manifest(state)
            if manifest is None or not checkpoints.pin(state, manifest, READER):
                return  # being changed: the next look comes soon
            self.writing = True
            self._wanted = None
            parts.start(self._write, self.place, state, manifest, wanted)
        self._since, self._branch = (rounds, now_s), parts.replica.branch
        if (
            parts.spec.checkpoint.trainer
            and parts.replica.trainer.loaded
            and parts.replica.trainer.training
        ):
            parts.trainer.tell(KeepState())

    def write_now(self, number: int) -> None:
        """The run's owner wants one of the newest state that some commit led to."""
        why = self._why_not()
        self._parts.tell_master(CheckpointTold(number, not why, reason=plain(why)))
        if not why:
            self._wanted = number
            self.look()

    def _why_not(self) -> str:
        """Why we write none, whoever asks; empty: we do."""
        state = self._state_service.known_state
        if self.place is None:
            return "it keeps no checkpoints"
        if state is None or self._parts.known_spec is None or not self._parts.replica.valid:
            return "it does not hold the state yet"
        if not self._ours():
            return "by the run's spec others write them"
        return self.error if self._too_large(state) else ""

    def _answer(self, number: int, *, name: str = "", reason: str = "") -> None:
        told = CheckpointTold(number, False, name, plain(reason))
        self._parts.tell_master(told)

    def _ours(self) -> bool:
        parts = self._parts
        return parts.config.asked or parts.replica.keeps_checkpoints(parts.spec.checkpoint.peers)

    def _due(self, rounds: int, now_s: float) -> bool:
        """Every so many rounds, at multiples of that: peers write the same states. And whenever the
        run has gone back: what it has given up must not be the newest for long."""
        assert self._since is not None
        if self._branch != self._parts.replica.branch:
            return True
        table, (rounds_then, then_s) = self._parts.spec.checkpoint, self._since
        by_rounds = table.every_rounds and rounds // table.every_rounds != (
            rounds_then // table.every_rounds
        )
        return bool(by_rounds) or bool(table.every_s and now_s >= then_s + table.every_s)

    def _too_large(self, state: SharedState) -> bool:
        """Whether this machine's owner gives no room for it; said once."""
        disk_quota = self._parts.config.disk_quota
        if disk_quota is None or not (why := disk_quota.refuses(_size_bytes(state))):
            return False
        self._failed(StoreError(why))
        return True

    async def _write(
        self, place: CheckpointStore, state: SharedState, manifest: Manifest, number: int | None
    ) -> None:
        network, writing = self._parts.network, self._begin(place, state, manifest)
        try:
            try:
                if self._parts.config.disk_quota is not None:  # two at a time have to fit
                    await network.run_sync(lambda: self._prune(place))
                while await network.run_sync(lambda: _turn(writing, self.turn_bytes)):
                    await self._between_turns()
            finally:
                writing.close()
                state.release_receiver(READER)
                self.writing = False
            self._written(manifest)
            if number is not None:
                self._answer(number, name=manifest.name)
            await network.run_sync(lambda: self._prune(place))
        except StoreError as error:
            self._failed(error)
            for waiting in (number, self._wanted):
                if waiting is not None:
                    self._answer(waiting, reason=self.error)
            self._wanted = None
        else:
            self.look()  # more may have become due meanwhile

    async def _between_turns(self) -> None:
        """What else there is to do goes on; the simulator's disk takes its time here."""

    def _begin(
        self, place: CheckpointStore, state: SharedState, manifest: Manifest
    ) -> Generator[int, None, None]:
        writer = self._parts.config.me[:WRITER_CHARS]
        return checkpoints.write(place, state, manifest, reader=READER, writer=writer)

    def _written(self, manifest: Manifest) -> None:
        self.newest, self.error = manifest, ""

    def _failed(self, error: StoreError) -> None:
        if str(error) != self.error:
            self._parts.report.told.append(f"no checkpoint: {error}")
            log.warning("no checkpoint was written: %s", error)
        self.error = str(error)

    def _prune(self, place: CheckpointStore) -> None:
        table, disk_quota = self._parts.spec.checkpoint, self._parts.config.disk_quota
        keep_count, state = table.keep_count, self._state_service.known_state
        if disk_quota is not None and state is not None:
            keep_count = disk_quota.keep_count(keep_count, _size_bytes(state))
        checkpoints.prune(
            place,
            self._parts.config.run_id,
            keep_count=keep_count,
            keep_s=table.keep_s,
            now_s=self._wall_clock(),
        )

    # ------------------------------------------------------------ at the end

    def last(self) -> tuple[int, Generator[int, None, None]] | None:
        """After the service: what is to be written of what we hold now, and how many bytes that is.
        None: nothing, or it is there already.

        The generator is to be run to its end in a thread, or closed; it raises PlaceError.
        """
        place, state = self.place, self._state_service.known_state
        if place is None or state is None or not self._parts.replica.lineage:
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
        if self._parts.config.disk_quota is not None and self._parts.known_spec is not None:
            self._prune(place)
        yield from self._begin(place, state, manifest)
        self._written(manifest)
        if self._parts.known_spec is not None:
            self._prune(place)

    def _manifest(self, state: SharedState) -> Manifest | None:
        parts, layout = self._parts, self._state_service.layout
        replica, spec, restored = parts.replica, parts.known_spec, self._state_service.restored
        toml = spec.toml_text if spec is not None else restored.spec_toml if restored else ""
        if layout is None:
            return None
        return checkpoints.manifest_of(
            state,
            lineage=replica.lineage,
            term=replica.term,
            nonce=replica.nonce,
            branch=replica.branch,
            step=replica.step,
            layout=layout,
            spec_toml=toml,
            now_s=self._wall_clock(),
        )


def _size_bytes(state: SharedState) -> int:
    return sum(map(state.size_bytes, range(len(state.sizes))))


def _turn(writing: Generator[int, None, None], left_bytes: int) -> bool:
    """Write some; False: all of it is written."""
    while left_bytes > 0:
        size_bytes = next(writing, None)
        if size_bytes is None:
            return False
        left_bytes -= size_bytes
    return True
