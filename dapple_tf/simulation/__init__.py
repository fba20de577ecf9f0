"""What a plan costs, and its step simulated event by event."""
