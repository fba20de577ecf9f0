"""Numbers with units, tables and ranges, for people."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: ``1 stage``, ``2 micro-batches``, ``1,024 operators``."""
    ending = "" if number == 1 else "es" if noun.endswith(("tch", "sh", "ss", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def gib(size: float) -> str:
    """Formats bytes with four digits, for sentences and tables: ``1.254 GiB``, ``512 bytes``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} bytes"


def bytes_text(size: float) -> str:
    """Formats bytes with three digits, for drawings and columns: ``1.25 GiB``, ``512 B``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= 0.9995 * scale:
            digits = 0 if abs(size) >= 100 * scale else 1 if abs(size) >= 10 * scale else 2
            return f"{size / scale:.{digits}f} {unit}"
    return f"{size:.0f} B"


def ms_text(seconds: float) -> str:
    """Formats seconds as milliseconds with four digits, without the unit: ``12.34``."""
    return f"{seconds * 1e3:.4g}"


def link_text(bandwidth: float | None, latency: float | None) -> str:
    """Formats the speed of a link: ``3.125 GB/s, 30 us``.

    Args:
        bandwidth: bytes per second; None for unknown.
        latency: seconds; None for unknown.
    """
    rate = "bandwidth unknown" if bandwidth is None else f"{bandwidth / 1e9:.4g} GB/s"
    delay = "latency unknown" if latency is None else f"{latency * 1e6:.4g} us"
    return f"{rate}, {delay}"


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
