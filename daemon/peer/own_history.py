"""A peer's own curves, for its page: in memory, as long as its daemon runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import trio

from ...protocol.messages import Progress
from ...protocol.network.interface import Network
from ..metrics_store import MetricsStore
from ..sampling import Sampler
from ..web.live_stream import LiveStream

SAMPLE_S = 2.0  # between two points


class OwnHistory:
    """The recorder of a peer's points: loss, speed, utilisation, bytes and figures of ``run.log``.

    They are thinned as a member's at the master are, so they take little memory however long it
    runs.

    Args:
      progress: returns the trainer's progress.
      wall_clock: unix seconds.
    """

    def __init__(
        self,
        peer: str,
        name: str,
        progress: Callable[[], Progress],
        live: LiveStream,
        network: Network,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = MetricsStore(":memory:")
        self._peer = peer
        self._name = name
        self._progress = progress
        self._live = live
        self._network = network
        self._wall_clock = wall_clock
        self._sampler = Sampler()

    async def run(self) -> None:
        """Take a point every ``SAMPLE_S``, if there is progress."""
        last: Progress | None = None
        while True:
            progress = self._progress()
            if progress != last:
                last = progress
                row = self._sampler.take(self._peer, self._name, self._wall_clock(), 0, progress)
                self._live.publish("sample", [row])
                await self._network.run_sync(partial(self.store.write, members=[row]))
            await trio.sleep(SAMPLE_S)
