"""The master's state as others see it, and what must hold of it."""
