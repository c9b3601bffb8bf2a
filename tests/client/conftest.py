"""Torch on one thread: two threads would not change the results, only fight over the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
