"""Keys, certificates and invites."""
