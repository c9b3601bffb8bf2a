"""The master's journal: what it is, where it is kept, and how it is repaired."""
