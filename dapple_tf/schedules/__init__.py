"""The order in which each device runs its tasks."""
