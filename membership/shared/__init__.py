"""What the rules of the master and of a peer both need."""
