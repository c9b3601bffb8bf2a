"""`holdfast checkpoint`: what is in checkpoints, and checkpoints as files of others."""
