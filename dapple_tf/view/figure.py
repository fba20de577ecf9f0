"""Layout of a task graph's figure: lanes as rows, time to the right.

It follows figure 10 of the DAPPLE paper. Positions are in points, from the lower left corner.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode, longest_paths
from dapple_tf.view.timeline import TASKS

SHOWN = (*TASKS, "split", "concat", "relay", "accumulate", "all_reduce", "apply")
"""Kinds of nodes in a figure; it leaves out reading variables, metrics and the host's part unless asked for."""

_STEP = 54.0
"""Width of a column."""
_ROW = 34.0
_SMALL_ROW = 24.0
"""Heights of the row of tasks and of those below it."""
_LABEL = 92.0
"""Width of the lanes' labels, on the left."""
_PADDING = 8.0
_ARC = 7.0
"""Headroom for each arc that another one spans, for at most `_MOST_ARCS`."""
_MOST_ARCS = 5
_GAP = 12.0
_MARGIN = 12.0


class Box(NamedTuple):
    """A rectangle: its centre, width and height."""

    x: float
    y: float
    width: float
    height: float


class LaneBox(NamedTuple):
    """A lane: its device (None for the host), its label, and the rectangle around it."""

    device: int | None
    label: str
    box: Box


Curve = tuple[tuple[float, float], ...]
"""Start, two control points and end of a Bezier curve."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure to draw.

    Attributes:
        graph: the nodes and edges that are shown.
        boxes: rectangle of each node.
        curves: curve of each edge.
        faint: positions of the data edges whose order other data give, too: those of tensors kept for later.
        lanes: lanes from top to bottom.
        width: width of the figure.
        height: height of the figure.
        hidden: kind of omitted nodes -> number.
    """

    graph: TaskGraph
    boxes: tuple[Box, ...]
    curves: tuple[Curve, ...]
    faint: frozenset[int]
    lanes: tuple[LaneBox, ...]
    width: float
    height: float
    hidden: Mapping[str, int]


def figure(graph: TaskGraph) -> Figure:
    """Lays a task graph out.

    It leaves out control edges that follow from others, and nodes other than tasks and those that connect,
    accumulate, reduce and apply. Paths through an omitted node become edges.
    """
    kept = [index for index, node in enumerate(graph.nodes) if _is_shown(node)]
    shown = _without_implied(_contracted(graph, kept))
    hidden: dict[str, int] = defaultdict(int)
    for index in set(range(len(graph.nodes))) - set(kept):
        hidden[graph.nodes[index].kind] += 1
    return _Layout(shown).figure(dict(hidden))


def _is_shown(node: TaskNode) -> bool:
    return node.kind in SHOWN and node.device is not None


def _contracted(graph: TaskGraph, kept: Sequence[int]) -> TaskGraph:
    """Returns the graph of the kept nodes, with edges for the paths through others and recounted columns."""
    positions = {index: position for position, index in enumerate(kept)}
    followers: dict[int, list[TaskEdge]] = defaultdict(list)
    for edge in graph.edges:
        followers[edge.source].append(edge)
    direct: dict[tuple[int, int, bool], TaskEdge] = {}
    for edge in graph.edges:
        if edge.source not in positions:
            continue
        pending, seen = [(edge.target, edge.control)], set()
        while pending:
            place, control = pending.pop()
            if place in positions:
                key = positions[edge.source], positions[place], control
                whole = edge._replace(source=key[0], target=key[1], control=control)
                direct[key] = whole if edge.target in positions else direct.get(key, whole)
            elif (place, control) not in seen:
                seen.add((place, control))
                pending += [(following.target, control or following.control) for following in followers[place]]
    edges = tuple(direct[key] for key in sorted(direct))
    columns = longest_paths(len(kept), [(edge.source, edge.target) for edge in edges])
    nodes = tuple(graph.nodes[index]._replace(column=columns[position]) for index, position in positions.items())
    return TaskGraph(nodes, edges, graph.devices)


def _without_implied(graph: TaskGraph) -> TaskGraph:
    """Returns the graph without control edges that other edges imply."""
    behind: list[int] = [0] * len(graph.nodes)  # for each node, the set of the nodes before it, as bits
    arriving: dict[int, list[TaskEdge]] = defaultdict(list)
    for edge in graph.edges:
        arriving[edge.target].append(edge)
    implied = set()
    for index in sorted(range(len(graph.nodes)), key=lambda index: graph.nodes[index].column):
        data = {edge.source for edge in arriving[index] if not edge.control}
        longer = 0
        for edge in arriving[index]:
            longer |= behind[edge.source]
        implied |= {e for e in arriving[index] if e.control and (e.source in data or longer >> e.source & 1)}
        behind[index] = longer
        for edge in arriving[index]:
            behind[index] |= 1 << edge.source
    return dataclasses.replace(graph, edges=tuple(edge for edge in graph.edges if edge not in implied))


def _roundabout(graph: TaskGraph) -> frozenset[int]:
    """Returns the data edges with a longer path of data beside them: mostly what a forward keeps for its backward."""
    behind: list[int] = [0] * len(graph.nodes)
    arriving: dict[int, list[int]] = defaultdict(list)
    for number, edge in enumerate(graph.edges):
        if not edge.control:
            arriving[edge.target].append(number)
    bypassed = set()
    for index in sorted(range(len(graph.nodes)), key=lambda index: graph.nodes[index].column):
        sources = [graph.edges[number].source for number in arriving[index]]
        before = 0
        for source in sources:
            before |= behind[source]
        bypassed |= {number for number in arriving[index] if before >> graph.edges[number].source & 1}
        behind[index] = before
        for source in sources:
            behind[index] |= 1 << source
    return frozenset(bypassed)


class _Layout:
    """Positions of the nodes and edges of a graph."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.taken: set[tuple[int | None, int, int]] = set()  # (device, column, row)
        self.rows = self._rows()
        self.lanes: list[int | None] = [device for device in (None, *graph.devices) if device in self._used()]
        self.small_rows = {
            device: max(row for node, row in zip(graph.nodes, self.rows, strict=True) if node.device == device)
            for device in self.lanes
        }
        self.levels = self._arc_levels()
        self.headroom = {
            device: _ARC * max((level for level, lane in self.levels.values() if lane == device), default=0)
            for device in self.lanes
        }

    def figure(self, hidden: Mapping[str, int]) -> Figure:
        columns = max((node.column for node in self.graph.nodes), default=0) + 1
        width = 2 * _MARGIN + _LABEL + columns * _STEP
        top = sum(self._lane_height(device) + _GAP for device in self.lanes) + _MARGIN - _GAP + _MARGIN
        height, lanes, mains = top, [], {}
        top -= _MARGIN
        for device in self.lanes:
            own = self._lane_height(device)
            label = "host" if device is None else self.graph.devices[device]
            lanes.append(LaneBox(device, label, Box(width / 2, top - own / 2, width - _MARGIN, own)))
            mains[device] = top - _PADDING - self.headroom[device] - _ROW / 2
            top -= own + _GAP
        placed = zip(self.graph.nodes, self.rows, strict=True)
        boxes = [self._box(node, row, mains[node.device]) for node, row in placed]
        curves = [self._curve(index, edge, boxes) for index, edge in enumerate(self.graph.edges)]
        faint = _roundabout(self.graph)
        return Figure(self.graph, tuple(boxes), tuple(curves), faint, tuple(lanes), width, height, hidden)

    def _used(self) -> set[int | None]:
        return {node.device for node in self.graph.nodes}

    def _lane_height(self, device: int | None) -> float:
        return 2 * _PADDING + self.headroom[device] + _ROW + self.small_rows[device] * _SMALL_ROW

    def _rows(self) -> list[int]:
        """Returns each node's row in its lane: 0 for computation, others below, without overlap."""
        order = {kind: place for place, kind in enumerate((*TASKS, "accumulate", "apply", "all_reduce"))}
        rows = [0] * len(self.graph.nodes)
        for index in sorted(range(len(rows)), key=lambda index: order.get(self.graph.nodes[index].kind, len(order))):
            node = self.graph.nodes[index]
            row = 0 if node.kind in order else 1
            while (node.device, node.column, row) in self.taken:
                row += 1
            self.taken.add((node.device, node.column, row))
            rows[index] = row
        return rows

    def _box(self, node: TaskNode, row: int, main: float) -> Box:
        x = _MARGIN + _LABEL + (node.column + 0.5) * _STEP
        y = main if row == 0 else main - _ROW / 2 - (row - 0.5) * _SMALL_ROW
        return Box(x, y, 42.0, 22.0) if row == 0 else Box(x, y, 42.0, 14.0)

    def _arc_levels(self) -> dict[int, tuple[int, int | None]]:
        """Returns edge -> (height of its arc, its lane), for edges that run along a row, over other nodes."""
        arcs: dict[int, tuple[int, int | None]] = {}
        spans: dict[int | None, list[tuple[int, int, int]]] = defaultdict(list)
        for index, edge in enumerate(self.graph.edges):
            a, b = self.graph.nodes[edge.source], self.graph.nodes[edge.target]
            along = a.device == b.device and self.rows[edge.source] == self.rows[edge.target] == 0
            if along and self._blocked(a, b):
                spans[a.device].append((b.column - a.column, index, a.column))
        for device, items in spans.items():
            reach: dict[int, int] = {}  # column -> the highest arc over it so far
            for length, index, start in sorted(items):
                covered = range(start, start + length)
                level = min(_MOST_ARCS, 1 + max(reach.get(column, 0) for column in covered))
                reach |= dict.fromkeys(covered, level)
                arcs[index] = (level, device)
        return arcs

    def _blocked(self, a: TaskNode, b: TaskNode) -> bool:
        """Returns whether a straight line would cross another node."""
        between = range(a.column + 1, b.column)
        return any((a.device, column, 0) in self.taken for column in between)

    def _curve(self, index: int, edge: TaskEdge, boxes: Sequence[Box]) -> Curve:
        a, b = boxes[edge.source], boxes[edge.target]
        if index in self.levels:
            level, _ = self.levels[index]
            high = a.y + a.height / 2 + level * _ARC * 4 / 3
            start, end = (a.x + 8, a.y + a.height / 2), (b.x - 8, b.y + b.height / 2)
            reach = min(_STEP / 2, (end[0] - start[0]) / 3)
            return start, (start[0] + reach, high), (end[0] - reach, high), end
        start, end = (a.x + a.width / 2, a.y), (b.x - b.width / 2, b.y)
        bend = max(8.0, min((end[0] - start[0]) / 2, _STEP))
        return start, (start[0] + bend, start[1]), (end[0] - bend, end[1]), end
