"""The samples that a script draws: leased ones, shares of them, and whether peers draw the same."""
