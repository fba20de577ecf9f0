"""Checkpoints that servers write and read themselves, and training data whose position is saved with them."""
