"""The rules of a peer. Pure."""
