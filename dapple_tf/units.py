"""Numbers with units, for people."""

from __future__ import annotations


def gib(size: float) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} bytes"
