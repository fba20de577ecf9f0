"""Timelines and task graphs as pages: one HTML file each, which needs no network and stays usable at 10,000 tasks.

A page is a template, a style sheet, scripts and data, all in one file (`assets/`). A content security policy lets it
run only these scripts and load nothing. Other pages (tools/what_if.py) are assembled like this::

    scripts = [*map(asset, TIMELINE_SCRIPTS), own_script]
    text = assemble("What if", scripts, timeline_data(timelines) | {"cases": ...})

Its own script runs last. It can use:

* ``dapple.data``: the data passed to `assemble`, read-only;
* ``dapple.controls``: an empty element above the drawing, for its own controls; hidden while it is empty;
* ``dapple.showTimelines(data)`` shows other timelines in place, in the form of `timeline_data`: zoom, filters
  and selection stay as far as possible. A zoom that shows everything will still do so;
* ``dappleLib.element(tag, attributes, ...children)`` makes elements whose texts stay texts, whatever they contain;
* ``dapple.lanes()``, ``dapple.bounds()``, ``dapple.select(name)`` and others: see `assets/timeline.js`.

A page that sends requests to a server on this machine needs ``assemble(..., connect=True)``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import json
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

from dapple_tf.view.task_graph import TaskGraph, TaskNode
from dapple_tf.view.timeline import COLOURS, CONTROL, DATA, Span, Timeline

_COMMON = ("common.js", "controls.js", "chart.js")
TIMELINE_SCRIPTS = (
    *_COMMON,
    "spans.js",
    "timeline_layout.js",
    "timeline_drawing.js",
    "timeline_panel.js",
    "timeline.js",
)
"""Assets that draw timelines, in loading order."""
GRAPH_SCRIPTS = (*_COMMON, "nodes.js", "graph_layout.js", "graph_drawing.js", "graph_panel.js", "graph.js")
"""Assets that draw a task graph, in loading order."""

_SPAN_DEFAULTS: Mapping[str, object] = Span("", 0.0, 0.0, None, 0)._asdict()


def timeline_page(timelines: Sequence[Timeline], *, title: str) -> str:
    """Returns a page that shows timelines one above another, on one axis where their units agree.

    Args:
        timelines: planned, simulated and measured timelines, or some of these.
        title: heading of the page.

    Returns:
        The text of an HTML file.

    Raises:
        ValueError: there are no timelines, or two have the same name.
    """
    return assemble(title, [asset(name) for name in TIMELINE_SCRIPTS], timeline_data(timelines))


def graph_page(graph: TaskGraph, *, title: str) -> str:
    """Returns a page of a task graph in the style of DAPPLE's figure 10: devices as lanes, control edges dotted red.

    Args:
        graph: nodes and edges of a step.
        title: heading of the page.

    Returns:
        The text of an HTML file.

    Raises:
        ValueError: an edge or a node refers to a node or device that doesn't exist.
    """
    return assemble(title, [asset(name) for name in GRAPH_SCRIPTS], graph_data(graph))


# ---- data


def timeline_data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Returns the argument of ``dapple.showTimelines``: ``{"timelines": [...]}``, ready for JSON.

    Spans are columns: ``spans["start"][i]`` is the start of span i. A column is left out if all values are
    the default of `Span`.

    Raises:
        ValueError: as `timeline_page`.
    """
    if not timelines:
        raise ValueError("there are no timelines to show; give at least one")
    names = [timeline.name for timeline in timelines]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{names.count(name)} of the {len(names)} timelines are called {name!r}; rename them")
    return {"timelines": [_timeline(timeline) for timeline in timelines]}


def _timeline(timeline: Timeline) -> dict[str, Any]:
    throughput = timeline.throughput
    return {
        "name": timeline.name,
        "unit": timeline.unit,
        "latency": timeline.latency,
        "samples": timeline.samples,
        "untraced": timeline.untraced,
        "waited": timeline.waited,
        "throughput": throughput if throughput is not None and math.isfinite(throughput) else None,
        "devices": [
            {
                "device": device,
                "label": label,
                "bubble": timeline.bubbles.get(device),
                "limit": _short_or_none(timeline.limits.get(device)),
                "peak": _short_or_none(timeline.peak_bytes.get(device)),
                "memory": [
                    [_short(time) for time, _ in timeline.memory.get(device, ())],
                    [_short(level) for _, level in timeline.memory.get(device, ())],
                ],
            }
            for device, label in timeline.devices.items()
        ],
        "spans": _columns(timeline.spans),
        "count": len(timeline.spans),
        "reduced_on": {str(number): list(devices) for number, devices in timeline.reduced_on.items()},
    }


def _columns(spans: Sequence[Span]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for position, (name, default) in enumerate(_SPAN_DEFAULTS.items()):
        values = [span[position] for span in spans]
        if any(value != default for value in values):
            columns[name] = [_short(value) if isinstance(value, float) else value for value in values]
    return columns


def graph_data(graph: TaskGraph) -> dict[str, Any]:
    """Returns the argument of ``dapple.showGraph``: ``{"graph": {...}}``, ready for JSON.

    Nodes and edges are columns, as spans are. Their lists of layers, results and tensors are positions in
    lists of such lists.

    Raises:
        ValueError: as `graph_page`.
    """
    for node in graph.nodes:
        if node.device is not None and node.device not in graph.devices:
            raise ValueError(f"node {node.name} is on device {node.device}, which isn't among {len(graph.devices)}")
    for edge in graph.edges:
        for end in (edge.source, edge.target):
            if not 0 <= end < len(graph.nodes):
                raise ValueError(f"an edge {edge.source} -> {edge.target} ends at none of {len(graph.nodes)} nodes")
    layers, outputs, tensors = _Table(), _Table(), _Table()
    nodes: dict[str, list[Any]] = {name: [node[position] for node in graph.nodes] for position, name in _NODE_COLUMNS}
    nodes["layers"] = [layers.add(node.layers) for node in graph.nodes]
    nodes["outputs"] = [outputs.add(node.outputs) for node in graph.nodes]
    return {
        "graph": {
            "devices": [{"device": device, "label": label} for device, label in graph.devices.items()],
            "nodes": nodes,
            "edges": {
                "source": [edge.source for edge in graph.edges],
                "target": [edge.target for edge in graph.edges],
                "control": [int(edge.control) for edge in graph.edges],
                "tensors": [tensors.add(edge.tensors) for edge in graph.edges],
                "bytes": [_short_or_none(edge.bytes) for edge in graph.edges],
            },
            "layers": layers.rows,
            "outputs": [
                [[*row[:3], None if row[3] is None else _short(row[3])] for row in rows] for rows in outputs.rows
            ],
            "tensors": tensors.rows,
        }
    }


_NODE_COLUMNS = tuple((i, name) for i, name in enumerate(TaskNode._fields) if name not in ("layers", "outputs"))


class _Table:
    """Lists shared by many nodes or edges, stored once."""

    def __init__(self) -> None:
        self.rows: list[Sequence[Any]] = []
        self._positions: dict[Sequence[Any], int] = {}

    def add(self, row: Sequence[Any]) -> int:
        """Returns the position of a row, which is added if it is new."""
        if row not in self._positions:
            self._positions[row] = len(self.rows)
            self.rows.append(row)
        return self._positions[row]


def _short_or_none(number: float | None) -> float | int | None:
    return None if number is None else _short(number)


def _short(number: float) -> float | int:
    """Returns a number to ten digits, more than a screen shows; whole numbers without a point."""
    rounded = float(f"{number:.10g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


# ---- pages


@functools.cache
def asset(name: str) -> str:
    """Returns the text of a file in `assets/`."""
    return importlib.resources.files("dapple_tf.view").joinpath("assets", name).read_text(encoding="utf-8")


def assemble(
    title: str, scripts: Sequence[str], data: Mapping[str, Any], *, connect: bool = False, style: str = ""
) -> str:
    """Assembles a page in one file.

    Args:
        title: heading of the page.
        scripts: JavaScript, run in this order.
        data: data for ``dapple.data``.
        connect: whether the page may send requests to the server that it came from.
        style: additional rules for the style sheet.

    Returns:
        The text of an HTML file.

    Raises:
        ValueError: a script contains an end tag of scripts, or a number of the data isn't finite.
    """
    for number, script in enumerate(scripts):
        for text in ("</script", "<!--"):
            if text in script.lower():
                raise ValueError(f"script {number} of the page has {text!r}, which ends its tag; write it in two parts")
    style = _palette() + asset("page.css") + style
    # The policy's hashes are of exactly the characters between the tags.
    policy = [
        "default-src 'none'",
        f"style-src {_source(style)}",
        "script-src " + (" ".join(map(_source, scripts)) or "'none'"),
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    policy += ["connect-src 'self'"] * connect
    return string.Template(asset("page.html")).substitute(
        title=html.escape(title),
        policy=html.escape("; ".join(policy)),
        style=style,
        data=embedded(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _palette() -> str:
    """Returns the palette as properties that precede the style sheet, which overrides some for dark screens."""
    colours = {f"kind-{kind}": colour for kind, colour in COLOURS.items()}
    colours |= {"data-edge": DATA, "control-edge": CONTROL}
    return ":root { " + " ".join(f"--{name}: {colour};" for name, colour in colours.items()) + " }\n"


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(data: object) -> str:
    """Returns JSON for a script tag: ASCII only, so no U+2028, and without a ``<`` that could end the tag.

    Raises:
        ValueError: a number isn't finite.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
