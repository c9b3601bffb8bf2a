"""How fast a node sends: what its line carries, how it is shared, and how bytes are held back."""
