"""The daemon's two arenas, mapped by the trainer, with a replica of each fragment."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence, Set

from attrs import field, frozen

from ...protocol.arena import Arena, map_arena
from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import ArenaOpened
from .box_views import fragment_size
from .copier import CudaCopier
from .fragment_replica import FragmentReplica
from .tensors import SharedTensor


@frozen
class Arenas:
    """The arenas and fragments of ``ArenaOpened``, checked against the model.

    Attributes:
      spent: fragments that nothing needs in the posted arena any more.
    """

    replicas: tuple[FragmentReplica, ...]
    shared: Arena
    posted: Arena
    overlap_steps: int
    spent: set[int] = field(factory=set)

    @classmethod
    def open(
        cls,
        message: ArenaOpened,
        descriptors: Sequence[int],
        tensors: Sequence[SharedTensor],
        wait: Callable[[], None],
        writes: Collection[int] | None = None,
    ) -> Arenas:
        """Map both files, close their descriptors, and divide the tensors among the fragments.

        Args:
          wait: see ``FragmentReplica``.
          writes: the indices of the tensors that this process writes, if it is one of several.

        Raises:
          RemoteProtocolError: the daemon's message does not fit this model.
        """
        try:
            if len(descriptors) != 2:
                raise RemoteProtocolError("the daemon did not send the two files of its arenas")
            shared, posted = (map_arena(each, message.sizes) for each in descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        indices = sorted(index for fragment in message.fragments for index in fragment)
        if indices != list(range(len(tensors))):
            raise RemoteProtocolError("the daemon's fragments are not the tensors of this model")
        fragments = [[tensors[index] for index in fragment] for fragment in message.fragments]
        if tuple(map(fragment_size, fragments)) != tuple(message.sizes):
            raise RemoteProtocolError("the daemon's sizes of the fragments are not this model's")
        written = None if writes is None else [tensors[index] for index in writes]
        overlap, copier = message.overlap_steps > 0, CudaCopier()
        replicas = tuple(
            FragmentReplica(
                number,
                fragment,
                shared,
                posted,
                overlap,
                copier,
                wait,
                written,
            )
            for number, fragment in enumerate(fragments)
        )
        return cls(replicas, shared, posted, message.overlap_steps)

    @property
    def under_way(self) -> bool:
        """A copy between a GPU and the host is under way, or the host's work that belongs to it."""
        return any(replica.under_way for replica in self.replicas)

    @property
    def lost(self) -> bool:
        """A merge was given up: its fragment is being fetched, and ``Load`` must follow."""
        return any(replica.lost for replica in self.replicas)

    def release_spent(self, needed: Set[int]) -> None:
        """Give back memory of rounds that are over; the last one's daemon may still read."""
        for fragment in self.spent - needed:
            self.replicas[fragment].release()
        self.spent.clear()

    def advance(self, *, wait: bool) -> None:
        """Continue operations whose copy has finished; with ``wait``, finish all."""
        for replica in self.replicas:
            if wait:
                replica.finish()
            else:
                replica.advance()
