"""The master's state as others see it."""
