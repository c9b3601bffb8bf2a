"""The hook in the training loop; ``hook`` and ``tensors`` are the only modules that import torch."""
