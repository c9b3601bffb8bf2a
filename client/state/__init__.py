"""The tensors of a training script, and what a peer keeps of them: arenas, copies, merges,
checkpoints.
"""
