"""Notebook views of plans, simulations and measured steps: tables, and a timeline as a picture."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from dapple_tf.view.image import timelines_svg
from dapple_tf.view.text import timeline_text
from dapple_tf.view.timeline import Timeline

_LANES = "font-family:monospace;line-height:1.2;white-space:pre"
"""Style of timelines as text: nbconvert's page sets a proportional font, in which lanes don't line up."""

_TABLES = "<style>.dapple_tf :is(caption, td, th) {white-space: nowrap !important}</style>"
"""Style of tables: JupyterLab breaks cells into lines rather than scroll."""


class Table(NamedTuple):
    """A table to show.

    Attributes:
        caption: text above it; may be empty.
        rows: the first row is the header.
    """

    caption: str
    rows: Sequence[Sequence[str]]


def notebook_html(
    summary: str, tables: Sequence[Table], timelines: Sequence[Timeline], remarks: Sequence[str] = ()
) -> str:
    """Returns a fragment of HTML for ``_repr_html_``.

    Args:
        summary: a line above everything.
        tables: tables, one above another.
        timelines: drawn one above another on one axis, as an image, or as text if matplotlib isn't installed.
        remarks: lines between tables and picture.
    """
    parts = [f"<p>{html.escape(summary)}</p>", *map(_table, tables)]
    parts += [f"<p>{html.escape(remark)}</p>" for remark in remarks]
    return f'<div class="dapple_tf">{_TABLES}{"".join(parts)}{_picture(timelines) if timelines else ""}</div>'


def _table(table: Table) -> str:
    head, *body = table.rows
    caption = f"<caption>{html.escape(table.caption)}</caption>" if table.caption else ""
    rows = "".join(_row("td", row) for row in body)
    return f"<table>{caption}<thead>{_row('th', head)}</thead><tbody>{rows}</tbody></table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _picture(timelines: Sequence[Timeline]) -> str:
    try:
        return timelines_svg(timelines)
    except ModuleNotFoundError:  # matplotlib is an extra
        return f'<pre style="{_LANES}">{html.escape(timeline_text(timelines))}</pre>'
