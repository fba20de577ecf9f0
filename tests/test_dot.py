"""Figures of task graphs, and Graphviz's text for them."""

from __future__ import annotations

import collections
import itertools
import pathlib
import shutil
from collections.abc import Callable

import pytest
from step_programs import Case, complete, names_for, plan

from dapple_tf.view.colours import COLOURS, text_colour
from dapple_tf.view.dot import MOST_EDGES, MOST_NODES, DrawingError, dot_text, draw_graph
from dapple_tf.view.figure import SHOWN, Figure, figure
from dapple_tf.view.step_graph import task_graph
from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode

UNEVEN = Case("mlp", plan("mlp", 2, [[0, 1, 2], [3]], 4, 24, "dapple_a"))
CASES = [
    UNEVEN,
    Case("mlp", plan("mlp", 4, [[0], [1], [0], [1]], 4, 8, "interleaved")),
    Case("mlp", plan("mlp", 2, [[0], [0]], 3, 6, "fast_forward")),
]

needs_graphviz = pytest.mark.skipif(
    shutil.which("dot") is None, reason="needs Graphviz: dot isn't installed (Debian: apt-get install graphviz)"
)


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


# ---- the text


def test_the_text_of_a_small_step(golden: Callable[[str, str], None]) -> None:
    nodes = (
        node("0F0", "F", 0, 0),
        node("split", "split", 0, 1),
        node("0B0", "B", 0, 2),
        node("0B1", "B", 1, 0),
        node("0F2", "F", 1, 2),
    )
    graph = TaskGraph(nodes, (data(0, 1), data(1, 4), control(3, 4), data(0, 2)), {0: "device 0: stage 0", 1: "b"})
    golden("figure.dot", dot_text(graph, title="a step"))


# ---- pictures


@needs_graphviz
def test_a_picture_is_drawn(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "graph.svg"
    draw_graph(graph_of(UNEVEN), path, title="3 : 1")
    text = path.read_text()
    assert text.count(">0F1<") == 3
    assert "device 3: stage 1" in text


def many(count: int) -> TaskGraph:
    nodes = tuple(node(str(index), "F", 0, index) for index in range(count))
    return TaskGraph(nodes, tuple(control(index, index + 1) for index in range(count - 1)), {0: "device 0"})


def test_large_graphs_are_not_drawn(tmp_path: pathlib.Path) -> None:
    assert MOST_EDGES > MOST_NODES
    with pytest.raises(DrawingError, match=r"of 401 nodes and 400 edges isn't drawn \(up to 400 and 2000 are\): open"):
        draw_graph(many(MOST_NODES + 1), tmp_path / "graph.svg")
    assert not list(tmp_path.iterdir())


def test_without_graphviz_there_is_a_hint(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DrawingError, match=r"no Graphviz here: install it \(the program `dot`\), then run dot -Tsvg"):
        draw_graph(many(2), tmp_path / "graph.svg")


def test_a_failing_graphviz_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\necho no luck >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(DrawingError, match=r"graph\.svg isn't drawn: Graphviz failed: no luck"):
        draw_graph(many(2), tmp_path / "graph.svg")


def test_labels_can_be_read_on_their_colours() -> None:
    def brightness(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in COLOURS.values():
        light, dark = sorted((brightness(colour), brightness(text_colour(colour))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 3
