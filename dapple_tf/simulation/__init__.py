"""The costs of a plan, and its step simulated event by event."""
