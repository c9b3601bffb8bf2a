"""``run.toml``: its keys, its checks and its warnings."""
