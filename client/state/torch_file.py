"""``python -m holdfast.client.state.torch_file IN OUT``: exported weights in torch's own format.

``holdfast export --format torch`` runs this, because its own process never imports torch. A tied
tensor is one tensor under all of its names, as in the model's state dict.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors import safe_open

from ...protocol.durable_files import TIES_KEY, put_in_place


def convert(source: Path, target: Path) -> None:
    """Write the state dict of a safetensors file by ``torch.save``, whole or not at all."""
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    with safe_open(source, framework="pt") as file:
        ties: dict[str, list[str]] = json.loads((file.metadata() or {}).get(TIES_KEY, "{}"))
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_tensor(name)
            # It shares its address with another tensor: torch cannot save that.
            if not tensor.numel():
                tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            state.update((each, tensor) for each in (name, *ties.get(name, ())))
    scratch = source.with_name("model.pt")
    torch.save(state, scratch)
    put_in_place(scratch, target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
