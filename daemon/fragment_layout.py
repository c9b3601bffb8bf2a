"""The division of the trainer's tensors into the run's fragments, the same at master and peers."""

from __future__ import annotations

from ..diloco.fragments import Fragment, TensorShape, grouped, split
from ..membership.spec.spec import DilocoTable
from ..protocol.errors import UserError
from ..protocol.messages import FragmentSize, ModelLayout
from .process.exit_codes import ExitCode


def fragments_of(layout: ModelLayout, diloco: DilocoTable) -> tuple[Fragment, ...]:
    """Divide a layout as the spec says, equally at every peer; raise UserError if it cannot be."""
    tensors = [TensorShape(t.name, t.shape, t.kind) for t in layout.tensors]
    try:
        if diloco.groups:
            return grouped(tensors, diloco.groups)
        return split(tensors, diloco.fragments)
    except ValueError as error:
        key = "groups" if diloco.groups else "fragments"
        raise UserError(
            f"the model cannot be cut into {diloco.fragments} fragments: {error}",
            exit_code=ExitCode.CONFIG,
            hint=f"change `{key}` under [diloco] in run.toml",
        ) from error


def sizes_of(fragments: tuple[Fragment, ...]) -> tuple[FragmentSize, ...]:
    """Return the fragments' sizes as they stand in messages."""
    return tuple(FragmentSize(f.value_count, f.momentum_count, f.counter_count) for f in fragments)
