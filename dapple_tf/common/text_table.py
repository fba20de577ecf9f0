"""Tables for people to read."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Formats rows as lines, the first one the header.

    Args:
        rows: rows of equal length.
        left: number of leading columns that are aligned left, the others right; None aligns all left.

    >>> print(table([("stage", "ms"), ("0", "7")], left=1))
    stage  ms
    0       7
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    most = len(widths) if left is None else left

    def line(row: Sequence[str]) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        padded = (cell.ljust(width) if column < most else cell.rjust(width) for column, (cell, width) in cells)
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, rows))


def ranges(numbers: Sequence[int]) -> str:
    """Abbreviates numbers: ``0-7 9``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = (f"{part[0]}-{part[-1]}" if len(part) > 2 else " ".join(map(str, part)) for part in parts)
    return " ".join(texts)
