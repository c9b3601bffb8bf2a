"""Whole runs in one process and in virtual time, with faults from a seed."""
