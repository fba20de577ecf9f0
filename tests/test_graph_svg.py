"""Figures of task graphs, and their SVG."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from step_programs import Case, complete, names_for, plan

from dapple_tf.view.figure import SHOWN, Figure, figure
from dapple_tf.view.graph_svg import graph_svg
from dapple_tf.view.step_graph import task_graph
from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode
from dapple_tf.view.timeline import COLOURS, text_colour

SVG = "{http://www.w3.org/2000/svg}"
UNEVEN = Case("mlp", plan("mlp", 2, [[0, 1, 2], [3]], 4, 24, "dapple_a"))
CASES = [
    UNEVEN,
    Case("mlp", plan("mlp", 4, [[0], [1], [0], [1]], 4, 8, "interleaved")),
    Case("mlp", plan("mlp", 2, [[0], [0]], 3, 6, "fast_forward")),
]


def graph_of(case: Case) -> TaskGraph:
    return task_graph(complete(case), names_for(case.plan))


def node(label: str, kind: str, device: int | None, column: int) -> TaskNode:
    return TaskNode(label, label, kind, device, 0, 0, 0, column)


def data(source: int, target: int) -> TaskEdge:
    return TaskEdge(source, target, control=False, tensors=("x",), bytes=8.0)


def control(source: int, target: int) -> TaskEdge:
    return TaskEdge(source, target, control=True)


def pairs(graph: TaskGraph) -> list[tuple[str, str, bool]]:
    return [(graph.nodes[e.source].label, graph.nodes[e.target].label, e.control) for e in graph.edges]


def behind(graph: TaskGraph) -> set[tuple[str, str]]:
    """The pairs of nodes, by name, of which one comes after the other."""
    before: list[set[int]] = [set() for _ in graph.nodes]
    for index in sorted(range(len(graph.nodes)), key=lambda index: graph.nodes[index].column):
        for edge in graph.edges:
            if edge.target == index:
                before[index] |= before[edge.source] | {edge.source}
    return {(graph.nodes[a].name, graph.nodes[b].name) for b, earlier in enumerate(before) for a in earlier}


# ---- what is shown


def test_what_is_left_out_leads_on() -> None:
    nodes = (node("x", "other", None, 0), node("a", "F", 0, 1), node("m", "metrics", 0, 2), node("b", "B", 0, 3))
    graph = TaskGraph(nodes, (data(0, 1), data(1, 2), control(2, 3)), {0: "device 0"})
    shown = figure(graph)
    assert pairs(shown.graph) == [("a", "b", True)]
    assert shown.hidden == {"other": 1, "metrics": 1}


def test_control_edges_that_follow_from_others_are_left_out() -> None:
    nodes = tuple(node(label, "F", 0, column) for column, label in enumerate("abc"))
    edges = (control(0, 1), data(0, 1), control(1, 2), control(0, 2))
    shown = figure(TaskGraph(nodes, edges, {0: "device 0"}))
    assert pairs(shown.graph) == [("a", "b", False), ("b", "c", True)]


def test_what_is_kept_for_later_is_faint() -> None:
    nodes = (*(node(label, "F", 0, column) for column, label in enumerate("ab")), node("c", "B", 0, 2))
    shown = figure(TaskGraph(nodes, (data(0, 1), data(0, 2), data(1, 2)), {0: "device 0"}))
    assert [edge[:2] for index, edge in enumerate(shown.graph.edges) if index in shown.faint] == [(0, 2)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_figure_keeps_the_order_and_no_node_hides_another(case: Case) -> None:
    graph = graph_of(case)
    shown = figure(graph)
    kept = {each.name for each in graph.nodes if each.kind in SHOWN and each.device is not None}
    assert {each.name for each in shown.graph.nodes} == kept
    assert sum(shown.hidden.values()) == len(graph.nodes) - len(kept)
    assert behind(shown.graph) == {pair for pair in behind(graph) if kept.issuperset(pair)}
    check_places(shown)


def check_places(shown: Figure) -> None:
    """Nodes are in their lanes, one column after the other, and don't overlap; edges go right."""
    lanes = {lane.device: lane.box for lane in shown.lanes}
    for a, b in itertools.pairwise(lanes.values()):
        assert a.y - a.height / 2 > b.y + b.height / 2
    places = collections.defaultdict(set)
    for each, box in zip(shown.graph.nodes, shown.boxes, strict=True):
        lane = lanes[each.device]
        assert abs(box.y - lane.y) + box.height / 2 <= lane.height / 2
        assert abs(box.x - lane.x) + box.width / 2 <= lane.width / 2
        assert (box.x, box.y) not in places[each.device]
        places[each.device].add((box.x, box.y))
    columns = {each.column: box.x for each, box in zip(shown.graph.nodes, shown.boxes, strict=True)}
    assert [columns[column] for column in sorted(columns)] == sorted(set(columns.values()))
    for curve in shown.curves:
        assert curve[0][0] < curve[-1][0]
        assert all(0 <= x <= shown.width and 0 <= y <= shown.height for x, y in curve)


# ---- the picture


def test_the_picture_of_a_small_step(golden: Callable[[str, str], None]) -> None:
    nodes = (
        node("0F0", "F", 0, 0),
        node("split", "split", 0, 1),
        node("0B0", "B", 0, 2),
        node("0B1", "B", 1, 0),
        node("0F2", "F", 1, 2),
    )
    graph = TaskGraph(nodes, (data(0, 1), data(1, 4), control(3, 4), data(0, 2)), {0: "device 0: stage 0", 1: "b"})
    golden("figure.svg", graph_svg(graph, title="a step"))


def test_a_picture_has_all_nodes_edges_and_lanes() -> None:
    graph = graph_of(UNEVEN)
    shown = figure(graph)
    root = ElementTree.fromstring(graph_svg(graph, title="3 : 1 & more"))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("0F1") == 3
    assert "3 : 1 & more" in texts
    tips = [tip.text or "" for tip in root.iter(f"{SVG}title")]
    assert len(tips) == len(shown.lanes) + len(shown.graph.edges) + len(shown.graph.nodes)
    assert "device 3: stage 1" in tips
    assert any(": float" in tip for tip in tips)


def test_labels_can_be_read_on_their_colours() -> None:
    def brightness(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in COLOURS.values():
        light, dark = sorted((brightness(colour), brightness(text_colour(colour))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 3
