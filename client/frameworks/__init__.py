"""Adapters for training frameworks; each imports its framework, and only its users import it."""
