"""Pages of results: a template that a person writes, whose ``{name}`` marks take generated tables and numbers."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Mapping, Sequence

from dapple_tf.tools.evaluation.claims import SAME, UNTOLD, VERDICTS, Claim, counts

TEMPLATES = pathlib.Path(__file__).resolve().parent / "pages"

Cell = str | float | int | bool | None

_MARK = re.compile(r"\{([a-z][a-z0-9 _,.:/-]*)\}")


def fill(template: str, texts: Mapping[str, str]) -> str:
    """Returns a template with its marks replaced.

    >>> fill("{count} of {table:claims}", {"count": "3", "table:claims": "4"})
    '3 of 4'

    Raises:
        ValueError: a mark has no text, or a text has no mark.
    """
    marks = set(_MARK.findall(template))
    if marks != set(texts):
        raise ValueError(f"without a text: {sorted(marks - set(texts))}; without a mark: {sorted(set(texts) - marks)}")
    return _MARK.sub(lambda mark: texts[mark[1]], template)


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ["---"] * len(header), *([shown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown(cell: Cell) -> str:
    """Returns a cell as it stands in a table: numbers with three digits."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 20 else f"{cell:.2f}"
    return str(cell).replace("|", "\\|")


def counted(claims: Sequence[Claim], settings: Mapping[str, str]) -> str:
    """Returns the table of verdicts by setting.

    Args:
        claims: all claims.
        settings: setting -> its title.
    """
    rows: list[list[Cell]] = []
    for setting, title in settings.items():
        number = counts(claims, setting)
        rows.append([title, *(number[verdict] for verdict in VERDICTS), sum(number.values())])
    return table(["setting", *VERDICTS, "together"], rows)


def claimed(claims: Sequence[Claim], settings: Mapping[str, str]) -> str:
    """Returns the table of claims: ours in each setting with its verdict, and why it isn't the same in the first."""
    rows: list[list[Cell]] = []
    first = next(iter(settings))
    for claim in claims:
        cells: list[Cell] = []
        for setting in settings:
            verdict = claim.verdict(setting)
            text = claim.text(claim.ours.get(setting))
            cells.append(text if verdict is None else f"{text}: {verdict}" if text != verdict else text)
        verdict = claim.verdict(first)
        reason = ("" if claim.fitted else claim.untold) if verdict == UNTOLD else ""
        why = "" if verdict == SAME and not claim.fitted else "; ".join(text for text in (reason, claim.why) if text)
        rows.append([claim.name, claim.text(claim.paper), *cells, why])
    return table(["claim", "paper", *settings.values(), "why"], rows)


# ---- the picture

_WIDTH, _LEFT, _RIGHT, _LINE = 880, 430, 860, 16
_COLOURS = ("#0b62a4", "#d1772b", "#7a7a7a")
_LEAST, _MOST = 1 / 4, 4.0


def picture(claims: Sequence[Claim], settings: Mapping[str, str], title: str) -> str:
    """Returns an SVG of claims with numbers that can be told: a dot for ours over the paper's in each setting.

    What is beyond four times or a quarter stands at the edge.
    """
    told = [claim for claim in claims if {claim.verdict(setting) for setting in settings} - {UNTOLD, None}]
    shown_claims = [claim for claim in told if not isinstance(claim.paper, str) and _numbers(claim)]
    bottom = 60 + _LINE * len(shown_claims)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 40}" font-family="sans-serif" '
        f'font-size="11"><rect width="{_WIDTH}" height="{bottom + 40}" fill="white"/>',
        f'<text x="10" y="18" font-size="14">{title}</text>',
    ]
    for low, high, colour in ((0.75, 1.25, "#eeeeee"), (0.9, 1.1, "#d5e8d4")):
        lines.append(
            f'<rect x="{_at(low):.1f}" y="44" width="{_at(high) - _at(low):.1f}" height="{bottom - 44}" '
            f'fill="{colour}"/>'
        )
    for tick in (0.25, 0.5, 1.0, 2.0, 4.0):
        lines.append(f'<line x1="{_at(tick):.1f}" x2="{_at(tick):.1f}" y1="44" y2="{bottom}" stroke="#bbbbbb"/>')
        lines.append(f'<text x="{_at(tick):.1f}" y="{bottom + 14}" text-anchor="middle">{tick:g}</text>')
    lines.append(f'<text x="{_at(1):.1f}" y="{bottom + 30}" text-anchor="middle">ours / paper\'s</text>')
    for index, (setting, colour) in enumerate(zip(settings.values(), _COLOURS, strict=False)):
        lines.append(f'<circle cx="{16 + 270 * index}" cy="32" r="4" fill="{colour}"/>')
        lines.append(f'<text x="{24 + 270 * index}" y="36">{setting}</text>')
    for row, claim in enumerate(shown_claims):
        y = 56 + _LINE * row
        lines.append(f'<text x="10" y="{y + 4}">{_escaped(claim.name)} ({claim.text(claim.paper)})</text>')
        numbers = _numbers(claim)
        for setting, colour in reversed(list(zip(settings, _COLOURS, strict=False))):
            if setting in numbers:
                at = _at(numbers[setting] / claim.nearest(numbers[setting]))
                lines.append(f'<circle cx="{at:.1f}" cy="{y}" r="4" fill="{colour}" fill-opacity="0.85"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _numbers(claim: Claim) -> dict[str, float]:
    return {
        setting: value for setting, value in claim.ours.items() if isinstance(value, float | int) and value is not True
    }


def _at(ratio: float) -> float:
    inside = min(max(ratio, _LEAST), _MOST)
    return _LEFT + (_RIGHT - _LEFT) * math.log(inside / _LEAST) / math.log(_MOST / _LEAST)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
