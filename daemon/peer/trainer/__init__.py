"""The training command: its processes, and the socket that they speak through."""
