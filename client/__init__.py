"""The hook in the training loop: the only package of holdfast that imports torch."""
