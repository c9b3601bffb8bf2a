"""The shared state: in memory, on its way between peers, and on disk."""
