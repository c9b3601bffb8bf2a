"""Plans of reductions, the lines that they run over, and predictions of a run's cost. Pure."""
