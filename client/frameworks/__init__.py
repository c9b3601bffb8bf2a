"""Adapters for training frameworks; each imports its framework, and nothing imports it unless
used.
"""
