"""The tensors of a script, and what a peer keeps of them: arenas, copies, merges, checkpoints."""
