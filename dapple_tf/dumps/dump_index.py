"""The first page of a dump: a description of all files, with sizes and numbers of nodes."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2328; margin: 2em auto; max-width: 70em; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 1.6em; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .25em .8em .25em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e3e5e8; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
pre { background: #f3f5f7; padding: .8em; overflow-x: auto; font-size: 12px; }
img { max-width: 100%; border: 1px solid #e3e5e8; }
p.note { color: #57606a; }
"""


class Entry(NamedTuple):
    """A file, or a note in its place.

    Attributes:
        name: its path in the dump; empty for a note alone.
        what: its description, or why it is missing.
        bytes: its size in bytes.
        nodes: number of nodes at a graph's top level.
        functions: number of functions in its library.
    """

    name: str
    what: str
    bytes: int = 0
    nodes: int | None = None
    functions: int | None = None


class Section(NamedTuple):
    """Files that belong together.

    Attributes:
        title: heading of the section.
        entries: entries in reading order.
        picture: path of a picture to show; empty for none.
    """

    title: str
    entries: Sequence[Entry]
    picture: str = ""


def index_page(title: str, text: str, sections: Sequence[Section]) -> str:
    """Returns the HTML page.

    Args:
        title: heading of the page.
        text: preformatted text below it: the plan.
        sections: the files.
    """
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_escaped(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{_escaped(title)}</h1>",
        f"<pre>{_escaped(text)}</pre>",
    ]
    for section in sections:
        parts.append(f"<h2>{_escaped(section.title)}</h2>")
        if section.picture:
            source = html.escape(section.picture, quote=True)
            parts.append(f'<p><a href="{source}"><img src="{source}" alt="task graph"></a></p>')
        parts.append("<table><tr><th>file</th><th>what it is</th><th>size</th><th>nodes</th><th>functions</th></tr>")
        parts += [_row(entry) for entry in section.entries if entry.name]
        parts.append("</table>")
        parts += [f'<p class="note">{_escaped(entry.what)}</p>' for entry in section.entries if not entry.name]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _row(entry: Entry) -> str:
    name = html.escape(entry.name, quote=True)
    numbers = (f"{entry.bytes:,}", *("" if count is None else f"{count:,}" for count in (entry.nodes, entry.functions)))
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return f'<tr><td><a href="{name}">{name}</a></td><td>{_escaped(entry.what)}</td>{cells}</tr>'


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)
