"""Copies of the state: which root a version has, and who fetches from whom."""
