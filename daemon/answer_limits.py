"""How much one answer of a daemon's HTTP API holds: for those who answer, and those who ask."""

ROUNDS_ANSWER_MAX = 200  # at a time; a daemon refuses to give more
EVENTS_ANSWER_MAX = 1_000
