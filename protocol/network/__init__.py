"""The network interface, TCP and TLS connections, lanes, message streams, limits on strangers."""
