"""How a fragment is cut, who owns which chunks, and what a run costs on given lines. Pure."""
