"""Limits of one answer of a daemon's HTTP API, for the server and its clients."""

ROUNDS_ANSWER_MAX = 200  # a request for more is refused
EVENTS_ANSWER_MAX = 1_000
