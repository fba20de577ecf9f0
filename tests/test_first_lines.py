"""First lines of docstrings name their subject: they have no "what is", "those of" and the like."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

from test_layers import ROOT

VAGUE = re.compile(r"\b(what|those)\b (is|it|of|that)", re.IGNORECASE)
FILES = [path for folder in ("dapple_tf", "graph_passes", "models", "tools") for path in (ROOT / folder).rglob("*.py")]


def first_lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring's first line, those of constants and fields included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip().partition("\n")[0]


def test_first_lines_name_their_subject() -> None:
    lines = ((path, number, line) for path in FILES for number, line in first_lines(path))
    vague = [f"{path.relative_to(ROOT)}:{number}: {line}" for path, number, line in lines if VAGUE.search(line)]
    assert not vague, "\n".join(vague)
