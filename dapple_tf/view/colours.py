"""One palette for all drawings: a kind has the same colour in graphs and in timelines."""

from __future__ import annotations

COLOURS = {
    "F": "#4a86c8",
    "B": "#58a55c",
    "Bx": "#33a09a",
    "Bw": "#a5c23f",
    "split": "#b3b8bd",
    "concat": "#8d959c",
    "relay": "#dcc779",
    "accumulate": "#f0963c",
    "all_reduce": "#8e63b5",
    "apply": "#b5523b",
    "send": "#c9a227",
    "read": "#cdd9e5",
    "metrics": "#9fc3e8",
    "other": "#e3e5e8",
}
"""Kind of a task node or of a span -> hex colour."""

CONTROL = "#d62728"
"""Hex colour of control edges."""

DATA = "#4d5359"
"""Hex colour of data edges."""

_DARK, _LIGHT = "#1f2328", "#ffffff"


def text_colour(background: str) -> str:
    """Returns dark or light, whichever reads better on a background (``#rrggbb``)."""
    red, green, blue = (int(background[start : start + 2], 16) for start in (1, 3, 5))
    return _DARK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else _LIGHT
