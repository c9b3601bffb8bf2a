"""From the trainer's tensors to the run's fragments: the one place that both sides agree on it."""

from __future__ import annotations

from ..diloco.fragments import Fragment, TensorShape, split
from ..protocol.errors import UserError
from ..protocol.messages import FragmentSize, Layout
from .exit_codes import ExitCode


def fragments_of(layout: Layout, fragment_count: int) -> tuple[Fragment, ...]:
    """Cut a layout into the spec's number of fragments; equal at every peer.

    Raises:
      UserError: the model has too few layers for that many fragments.
    """
    tensors = [TensorShape(t.name, t.shape, t.kind) for t in layout.tensors]
    try:
        return split(tensors, fragment_count)
    except ValueError as error:
        raise UserError(
            f"the model cannot be cut into {fragment_count} fragments: {error}",
            exit_code=ExitCode.CONFIG,
            hint="lower `fragments` under [diloco] in run.toml",
        ) from error


def sizes_of(fragments: tuple[Fragment, ...]) -> tuple[FragmentSize, ...]:
    return tuple(FragmentSize(f.value_count, f.momentum_count, f.counter_count) for f in fragments)
