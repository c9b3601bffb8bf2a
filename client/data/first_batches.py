"""The digest of a trainer's first batches: peers that have the same one train on the same samples.

A batch is what the attached model is called with, so scripts report nothing. There is no digest of
a model that is compiled inside the attached one, nor of batches that are all equal (a dummy, a
whole data set).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..state.tensors import local_part

BATCH_COUNT = 8  # a script may call the model with a dummy before its first batches


class FirstBatches:
    """Watches a model's first batches; ``digest`` is empty until they have come."""

    def __init__(self, model: nn.Module) -> None:
        self.digest = b""
        self._digests: list[bytes] = []
        self._hook = model.register_forward_pre_hook(_look, with_kwargs=True)
        _watched[model] = self

    def take(self, batch: object) -> None:
        """Take a batch."""
        digest = hashlib.blake2b(digest_size=32)
        try:
            for leaf in tree_leaves(batch):
                if isinstance(leaf, torch.Tensor):
                    values = local_part(leaf.detach()).cpu().reshape(-1)
                    digest.update(values.contiguous().view(torch.uint8).numpy().data)
        except (RuntimeError, TypeError, ValueError):  # a kind of tensor without plain memory
            self._hook.remove()
            return
        self._digests.append(digest.digest())
        if len(self._digests) == BATCH_COUNT:
            self._hook.remove()
            if len(set(self._digests)) > 1:
                self.digest = hashlib.blake2b(b"".join(self._digests), digest_size=32).digest()


# Not in the hook, so that a model can be copied and pickled with it.
_watched: WeakKeyDictionary[nn.Module, FirstBatches] = WeakKeyDictionary()


def _look(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return
    if (watch := _watched.get(model)) is not None:
        watch.take((args, kwargs))
