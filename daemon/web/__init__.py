"""What a daemon shows over HTTP: its page, a JSON API, a live stream, metrics; and the owner's actions."""
