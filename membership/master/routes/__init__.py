"""Routes between pairs of members, pairs that have failed, and probes of members' lines."""
