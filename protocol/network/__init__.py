"""Connections: the interface to the outside, TCP and TLS, lanes, framed streams, limits on strangers."""
