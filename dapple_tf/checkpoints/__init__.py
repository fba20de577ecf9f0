"""Checkpoints that servers write and read themselves, and data whose position goes with them."""
