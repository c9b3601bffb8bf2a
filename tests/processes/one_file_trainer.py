"""``python one_file_trainer.py PRESET NUMBER``: a peer of ``diloco_one_file`` under a daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # a daemon starts this file

import holdfast
from examples.diloco_one_file import Peer

torch.set_num_threads(1)
peer = Peer(int(sys.argv[2]), sys.argv[1])
with holdfast.attach(peer.model, peer.optimizers[0]) as run:
    while not run.finished:
        if not run.contributing:  # a step that is dropped would stay in the second optimizer
            run.step(tokens=0)
            continue
        peer.step = run.global_step
        peer.train(until=peer.step + 1)
        run.step(loss=peer.loss, tokens=peer.batch)
