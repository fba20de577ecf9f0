"""Task graphs as Graphviz text, and as pictures if Graphviz is installed.

The text has positions for everything (``layout=nop2``), so that lanes are rows independent of Graphviz's own layout:
``dot -Tsvg graph.dot`` or ``dot -Tpng graph.dot`` draws it.
"""

from __future__ import annotations

import logging
import math
import pathlib
import shutil
import subprocess
import textwrap
from collections.abc import Mapping

from dapple_tf.common.units import bytes_text
from dapple_tf.errors import DappleError
from dapple_tf.view.colours import COLOURS, CONTROL, DATA, text_colour
from dapple_tf.view.figure import Box, Curve, Figure, LaneBox, figure
from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode, TensorText
from dapple_tf.view.timeline import TASKS

logger = logging.getLogger(__name__)

MOST_NODES = 400
MOST_EDGES = 2000
"""Maximum number of edges that `draw_graph` draws; nobody can read a larger picture."""

_FORMATS = {".svg": "svg", ".png": "png", ".pdf": "pdf"}
_TIMEOUT = 120.0
_ARROW = 6.0
_LEGEND = 34.0
_TITLE = 26.0
_FOOT = 16.0
_NODE_LETTERS = 13
_LABEL_LETTERS, _LABEL_LINES = 17, 4
_MOST_TENSORS = 12
_NAMES = {
    "F": "forward",
    "B": "backward",
    "Bx": "input gradient",
    "Bw": "weight gradient",
    "accumulate": "gradient accumulation",
    "all_reduce": "AllReduce",
    "apply": "Apply",
    "read": "reading variables",
    "other": "others",
}
_OTHERS = {"read": "that read variables", "split": "splits of batches", "other": "others"}
_FAINT = "#aab2ba"


class DrawingError(DappleError):
    """A picture can't be drawn; the text says why, and what to do instead."""


def dot_text(graph: TaskGraph, *, title: str = "") -> str:
    """Returns a task graph as Graphviz text: a lane for each device, data edges solid, control edges dotted red.

    Args:
        graph: the graph to draw.
        title: heading of the drawing.
    """
    shown = figure(graph)
    legend, legend_width = _legend(shown)
    top = shown.height + _LEGEND + (_TITLE if title else 0)
    lines = [
        "digraph step {",
        f'  graph [layout=nop2, outputorder=edgesfirst, bgcolor="#ffffff", fontname="Helvetica", '
        f'bb="0,{-_FOOT:g},{max(shown.width, legend_width):g},{top:g}"];',
        '  node [shape=box, style="filled,rounded", penwidth=0, fixedsize=true, margin=0, fontname="Helvetica"];',
        f'  edge [color="{DATA}", penwidth=0.9, arrowsize=0.5];',
    ]
    if title:
        lines.append(_text("title", title, 12, top - _TITLE / 2, 14))
    for number, lane in enumerate(shown.lanes):
        lines += _lane(number, lane, shown)
    for index, edge in enumerate(shown.graph.edges):
        lines.append(_edge(edge, shown.curves[index], faint=index in shown.faint))
    return "\n".join([*lines, *legend, "}"]) + "\n"


def draw_graph(graph: TaskGraph, path: str | pathlib.Path, *, title: str = "") -> None:
    """Draws a task graph with Graphviz's ``dot``.

    Args:
        graph: the graph to draw.
        path: file to write: ``.svg``, ``.png`` or ``.pdf``.
        title: heading of the drawing.

    Raises:
        DrawingError: the graph is too large for a picture, Graphviz isn't installed or fails, or the suffix is another.
    """
    target = pathlib.Path(path)
    if target.suffix not in _FORMATS:
        raise DrawingError(f"{target} isn't drawn: use a name that ends with {', '.join(_FORMATS)}")
    shown = figure(graph).graph
    if len(shown.nodes) > MOST_NODES or len(shown.edges) > MOST_EDGES:
        raise DrawingError(
            f"a picture of {len(shown.nodes):,} nodes and {len(shown.edges):,} edges isn't drawn (up to {MOST_NODES} "
            f"and {MOST_EDGES} are): open graph.html instead, where one can zoom and filter"
        )
    program = shutil.which("dot")
    if program is None:
        raise DrawingError(
            f"{target.name} isn't drawn, as there is no Graphviz here: install it (the program `dot`), then run "
            f"dot -T{_FORMATS[target.suffix]} on graph.dot; or open graph.html"
        )
    text = dot_text(graph, title=title)
    command = [program, f"-T{_FORMATS[target.suffix]}", "-o", str(target)]
    try:
        done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise DrawingError(f"{target.name} isn't drawn: Graphviz took more than {_TIMEOUT:g} s") from error
    if done.returncode:
        raise DrawingError(f"{target.name} isn't drawn: Graphviz failed: {done.stderr.strip()[:500]}")
    if done.stderr.strip():
        logger.debug("Graphviz: %s", done.stderr.strip())


def _lane(number: int, lane: LaneBox, shown: Figure) -> list[str]:
    box = lane.box
    left, low, right, high = (
        box.x - box.width / 2,
        box.y - box.height / 2,
        box.x + box.width / 2,
        box.y + box.height / 2,
    )
    lines = [
        f"  subgraph cluster_{number} {{",
        f'    graph [label="", bb="{left:g},{low:g},{right:g},{high:g}", style="filled,rounded", fillcolor="#f3f5f7", '
        f'color="#d8dee4", tooltip={_quoted(lane.label)}];',
        "  " + _text(f"lane {number}", _wrapped(lane.label), left + 8, box.y, 9),
    ]
    for index, node in enumerate(shown.graph.nodes):
        if node.device == lane.device:
            lines.append("  " + _node(index, node, shown.boxes[index], shown))
    return [*lines, "  }"]


def _node(index: int, node: TaskNode, box: Box, shown: Figure) -> str:
    colour = COLOURS[node.kind]
    label = node.label if node.kind not in TASKS else f"{node.stage}{node.kind}{node.micro_batch}"
    if len(label) > _NODE_LETTERS:
        label = f"{label[: _NODE_LETTERS - 2]}.."
    size = min(12.0 if node.kind in TASKS else 8.0, 1.75 * box.width / max(1, len(label)))
    attrs = {
        "label": _quoted(label),
        "pos": f'"{box.x:g},{box.y:g}"',
        "width": f"{box.width / 72:.4g}",
        "height": f"{box.height / 72:.4g}",
        "fillcolor": f'"{colour}"',
        "fontcolor": f'"{text_colour(colour)}"',
        "fontsize": f"{size:.3g}",
        "tooltip": _quoted(node_text(node, shown.graph.devices)),
    }
    return f"  n{index} [{', '.join(f'{key}={value}' for key, value in attrs.items())}];"


def _edge(edge: TaskEdge, curve: Curve, *, faint: bool) -> str:
    start, first, second, end = curve
    # The curve ends where the arrow's head begins.
    length = math.hypot(end[0] - second[0], end[1] - second[1]) or 1.0
    back = (end[0] - _ARROW * (end[0] - second[0]) / length, end[1] - _ARROW * (end[1] - second[1]) / length)
    points = " ".join(f"{x:g},{y:g}" for x, y in (start, first, second, back))
    attrs = [f'pos="e,{end[0]:g},{end[1]:g} {points}"']
    if edge.control:
        attrs.append(f'style=dotted, color="{CONTROL}", penwidth=1.4, tooltip="only orders"')
    else:
        carried = ", ".join(edge.tensors[:_MOST_TENSORS]) + (
            "" if edge.bytes is None else f": {bytes_text(edge.bytes)}"
        )
        attrs.append(f"tooltip={_quoted(carried)}")
        if faint:
            attrs.append(f'color="{_FAINT}", penwidth=0.7')
    return f"  n{edge.source} -> n{edge.target} [{', '.join(attrs)}];"


def _legend(shown: Figure) -> tuple[list[str], float]:
    """Returns the legend of colours, edges and omitted nodes, and its width."""
    kinds = [kind for kind in COLOURS if any(node.kind == kind for node in shown.graph.nodes)]
    y = shown.height + _LEGEND / 2 - 6
    x = 18.0
    lines = []
    for kind in kinds:
        text = _NAMES.get(kind, kind)
        lines.append(
            f'  "legend {kind}" [label="", tooltip={_quoted(text)}, pos="{x:g},{y:g}", width=0.14, height=0.14, '
            f'fillcolor="{COLOURS[kind]}"];'
        )
        lines.append(_text(f"legend text {kind}", text, x + 9, y, 9))
        x += 30 + 5.2 * len(text)
    for name, style in (("data", f'color="{DATA}"'), ("control", f'style=dotted, color="{CONTROL}", penwidth=1.4')):
        ends = [f"legend {name} {end}" for end in ("start", "end")]
        lines += [
            f'  {_quoted(end)} [label="", style=invis, pos="{place:g},{y:g}", width=0.01, height=0.01];'
            for end, place in zip(ends, (x - 5, x + 19), strict=True)
        ]
        points = f"e,{x + 19:g},{y:g} {x - 5:g},{y:g} {x + 3:g},{y:g} {x + 8:g},{y:g} {x + 13:g},{y:g}"
        lines.append(f'  {_quoted(ends[0])} -> {_quoted(ends[1])} [pos="{points}", {style}];')
        lines.append(_text(f"legend text {name}", name, x + 23, y, 9))
        x += 44 + 5.2 * len(name)
    if shown.hidden:
        left_out = ", ".join(f"{count} {_OTHERS.get(kind, kind)}" for kind, count in sorted(shown.hidden.items()))
        lines.append(_text("legend hidden", f"not shown: {left_out}", 12, -_FOOT / 2, 8))
    return lines, x


def _wrapped(label: str) -> str:
    """Returns a lane's label in a few short lines; its tooltip has the whole label."""
    head, colon, rest = label.partition(": ")
    lines = [head + colon.strip(), *textwrap.wrap(rest, _LABEL_LETTERS)]
    return "\n".join(lines if len(lines) <= _LABEL_LINES else [*lines[: _LABEL_LINES - 1], "..."])


def _text(name: str, text: str, x: float, y: float, size: float) -> str:
    """Returns a text whose left end is at x."""
    lines = text.split("\n")
    width = 0.7 * size * max(map(len, lines)) + 10
    label = "".join(f"{_escaped(line)}\\l" for line in lines)
    return (
        f'  {_quoted(name)} [label="{label}", shape=plaintext, style="", pos="{x + width / 2:g},{y:g}", '
        f"width={width / 72:.4g}, height={len(lines) * size / 60:.3g}, fontsize={size:g}, "
        f'fontcolor="#24292f", tooltip=" "];'
    )


def node_text(node: TaskNode, devices: Mapping[int, str]) -> str:
    """Returns a node's description, line by line."""
    where = "host" if node.device is None else devices[node.device]
    lines = [f"{node.label} on {where}", node.name]
    if node.layers:
        lines.append("layers: " + ", ".join(node.layers))
    lines += map(_tensor, node.outputs[:_MOST_TENSORS])
    if len(node.outputs) > _MOST_TENSORS:
        lines.append(f"and {len(node.outputs) - _MOST_TENSORS} more results")
    return "\n".join(lines)


def _tensor(tensor: TensorText) -> str:
    size = "" if tensor.bytes is None else f", {bytes_text(tensor.bytes)}"
    return f"{tensor.name}: {tensor.dtype}{tensor.shape}{size}"


def _quoted(text: str) -> str:
    """Returns a string in Graphviz's syntax."""
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
