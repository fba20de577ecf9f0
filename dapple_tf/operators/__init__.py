"""Placing the single operators of a training step on devices: FD-DPS (Zeng et al., Mathematics 2022, 10, 4788)."""
