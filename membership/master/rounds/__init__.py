"""Rounds: when they open and close, the course of their reductions, audits, what a mean is made
of.
"""
