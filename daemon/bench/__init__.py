"""``holdfast bench``: measurements on real sockets, without a master."""
