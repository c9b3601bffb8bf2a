"""``holdfast doctor``: what would keep this machine from taking part, before any copy."""
