"""State that all rules of the master share: history, roster, journal records, effects."""
