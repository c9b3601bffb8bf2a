"""Copies of the state: votes on roots, and transfers from donors."""
