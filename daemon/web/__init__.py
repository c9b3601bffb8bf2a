"""HTTP of a daemon: the page, a JSON API, a live stream, metrics, and the operator's actions."""
