"""Tables for people to read."""

from __future__ import annotations

from collections.abc import Sequence


def ms_text(seconds: float) -> str:
    """Seconds as milliseconds with four digits: ``12.34``."""
    return f"{seconds * 1e3:.4g}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows as lines, the first one the header: the first ``left`` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        padded = (
            cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in enumerate(cells)
        )
        return "  ".join(padded).rstrip()

    return "\n".join(line(row) for row in rows)
