"""Pictures of task graphs: SVG with a lane for each device, after figure 10 of the DAPPLE paper."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from xml.etree import ElementTree

from dapple_tf.common.text import bytes_text
from dapple_tf.view.figure import Box, Curve, Figure, LaneBox, figure
from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode, TensorText
from dapple_tf.view.timeline import COLOURS, CONTROL, DATA, TASKS, text_colour

_XMLNS = "http://www.w3.org/2000/svg"
Attributes = Mapping[str, str | float]
"""Attributes of an element; underscores stand for hyphens."""

# All lengths are points.
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
_INK, _FAINT = "#24292f", "#aab2ba"
_EDGES: Mapping[str, Attributes] = {
    "data": {"stroke": DATA, "stroke_width": 0.9},
    "kept": {"stroke": _FAINT, "stroke_width": 0.7},
    "control": {"stroke": CONTROL, "stroke_width": 1.4, "stroke_dasharray": "1,4"},
}
_HEAD: Attributes = {
    **{"refX": 9, "refY": 3, "markerWidth": 9, "markerHeight": 6},
    **{"orient": "auto", "markerUnits": "userSpaceOnUse"},
}
"""Head of an arrow."""


def graph_svg(graph: TaskGraph, *, title: str = "") -> str:
    """Draws a task graph as SVG: data edges solid, control edges dotted red, descriptions in tooltips.

    Args:
        graph: the graph to draw.
        title: heading of the drawing.
    """
    return _Picture(figure(graph), title).text()


class _Picture:
    """An SVG document.

    Args:
        shown: the laid-out graph, whose y axis points up from the lower left corner.
        title: heading above it.
    """

    def __init__(self, shown: Figure, title: str) -> None:
        self.shown = shown
        self.top = shown.height + _LEGEND + (_TITLE if title else 0)
        self.root = ElementTree.Element("svg", {"xmlns": _XMLNS, "font-family": "Helvetica, sans-serif"})
        for name, style in _EDGES.items():
            head = self.add("marker", {"id": name, **_HEAD})
            self.add("path", {"d": "M2,0.5 L9,3 L2,5.5 z", "fill": style["stroke"]}, parent=head)
        self.add("rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
        for lane in shown.lanes:
            self.lane(lane)
        for index, edge in enumerate(shown.graph.edges):
            kind = "control" if edge.control else "kept" if index in shown.faint else "data"
            self.edge(kind, shown.curves[index], _carried(edge))
        for node, box in zip(shown.graph.nodes, shown.boxes, strict=True):
            self.node(node, box)
        if title:
            self.label(title, 12, self.top - _TITLE / 2, 14)
        width, height = max(shown.width, self.legend()), self.top + _FOOT
        for name, value in {"width": width, "height": height, "viewBox": f"0 0 {width:g} {height:g}"}.items():
            self.root.set(name, value if isinstance(value, str) else f"{value:g}")

    def text(self) -> str:
        """Returns the document."""
        ElementTree.indent(self.root)
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"

    def add(
        self,
        tag: str,
        attrs: Attributes,
        *,
        text: str = "",
        tip: str = "",
        parent: ElementTree.Element | None = None,
    ) -> ElementTree.Element:
        """Adds an element with a text and a tooltip."""
        values = {
            name.replace("_", "-"): value if isinstance(value, str) else f"{value:g}" for name, value in attrs.items()
        }
        element = ElementTree.SubElement(self.root if parent is None else parent, tag, values)
        element.text = text
        if tip:
            ElementTree.SubElement(element, "title").text = tip
        return element

    def box(self, box: Box, tip: str, **attrs: str | float) -> None:
        """Adds a rectangle with round corners."""
        x, y = box.x - box.width / 2, self.top - box.y - box.height / 2
        self.add("rect", {"x": x, "y": y, "width": box.width, "height": box.height, "rx": 4, **attrs}, tip=tip)

    def label(self, text: str, x: float, y: float, size: float, **attrs: str | float) -> None:
        """Adds a line of text, centred at the height y."""
        place = {"x": x, "y": self.top - y, "font_size": size}
        self.add("text", {**place, "fill": _INK, "dominant_baseline": "central", **attrs}, text=text)

    def lane(self, lane: LaneBox) -> None:
        """Adds a device's lane with its label, whose whole text is in the tooltip."""
        self.box(lane.box, lane.label, fill="#f3f5f7", stroke="#d8dee4")
        lines = _wrapped(lane.label)
        for number, line in enumerate(lines):
            place = lane.box.y + 11 * ((len(lines) - 1) / 2 - number)
            self.label(line, lane.box.x - lane.box.width / 2 + 8, place, 9)

    def node(self, node: TaskNode, box: Box) -> None:
        """Adds a node."""
        colour = COLOURS[node.kind]
        label = node.label if node.kind not in TASKS else f"{node.stage}{node.kind}{node.micro_batch}"
        if len(label) > _NODE_LETTERS:
            label = f"{label[: _NODE_LETTERS - 2]}.."
        size = min(12.0 if node.kind in TASKS else 8.0, 1.75 * box.width / max(1, len(label)))
        self.box(box, _described(node, self.shown.graph.devices), fill=colour)
        self.label(label, box.x, box.y, size, fill=text_colour(colour), text_anchor="middle", pointer_events="none")

    def edge(self, kind: str, curve: Curve, tip: str) -> None:
        """Adds an arrow."""
        start, *others = (f"{x:g},{self.top - y:g}" for x, y in curve)
        path = f"M{start} C{' '.join(others)}"
        self.add("path", {"d": path, "fill": "none", "marker_end": f"url(#{kind})", **_EDGES[kind]}, tip=tip)

    def legend(self) -> float:
        """Adds the legend of colours, edges and omitted nodes; returns its width."""
        y, x = self.shown.height + _LEGEND / 2 - 6, 18.0
        kinds = {node.kind for node in self.shown.graph.nodes}
        for kind in (kind for kind in COLOURS if kind in kinds):
            text = _NAMES.get(kind, kind)
            self.box(Box(x, y, 10, 10), "", fill=COLOURS[kind])
            self.label(text, x + 9, y, 9)
            x += 30 + 5.2 * len(text)
        for kind in ("data", "control"):
            self.edge(kind, ((x - 5, y), (x, y), (x + 10, y), (x + 19, y)), "")
            self.label(kind, x + 25, y, 9)
            x += 44 + 5.2 * len(kind)
        if hidden := self.shown.hidden:
            left_out = ", ".join(f"{count} {_OTHERS.get(kind, kind)}" for kind, count in sorted(hidden.items()))
            self.label(f"not shown: {left_out}", 12, -_FOOT / 2, 8)
        return x


def _wrapped(label: str) -> list[str]:
    """Returns a lane's label in a few short lines."""
    head, colon, rest = label.partition(": ")
    lines = [head + colon.strip(), *textwrap.wrap(rest, _LABEL_LETTERS)]
    return lines if len(lines) <= _LABEL_LINES else [*lines[: _LABEL_LINES - 1], "..."]


def _carried(edge: TaskEdge) -> str:
    """Returns an edge's description: its tensors and their bytes."""
    if edge.control:
        return "only orders"
    return ", ".join(edge.tensors[:_MOST_TENSORS]) + ("" if edge.bytes is None else f": {bytes_text(edge.bytes)}")


def _described(node: TaskNode, devices: Mapping[int, str]) -> str:
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
