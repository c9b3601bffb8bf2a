"""Keys, certificates, invites and signed statements."""
