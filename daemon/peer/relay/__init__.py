"""Relays: forward for pairs of peers that cannot connect directly."""
