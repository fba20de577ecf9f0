from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
from browser import Page
from step_programs import Case, complete, names_for
from step_programs import plan as step_plan

from dapple_tf.view.page import graph_data, graph_page
from dapple_tf.view.step_graph import task_graph
from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode, TensorText

Show = Callable[..., Page]


@functools.cache
def example() -> TaskGraph:
    """A real step: two stages, the first on two devices, and four micro-batches."""
    case = Case("mlp", step_plan("mlp", 2, [[0, 1], [2]], 4, 32, "dapple_a"))
    return task_graph(complete(case), names_for(case.plan))


def page_of(graph: TaskGraph) -> str:
    return graph_page(graph, title="Task graph")


def counts(page: Page, value: str = "total") -> dict[int | None, int]:
    return {lane["device"]: lane[value] for lane in page.ask("lanes()")}


def expected(graph: TaskGraph, keep: Callable[[TaskNode], bool] = lambda node: True) -> dict[int | None, int]:
    devices: list[int | None] = list(graph.devices)
    hosts: list[int | None] = [None] if any(node.device is None for node in graph.nodes) else []
    return {device: sum(node.device == device and keep(node) for node in graph.nodes) for device in hosts + devices}


def bounds(page: Page) -> tuple[float, float]:
    limits = page.ask("bounds()")
    return limits["lo"], limits["hi"]


# ---- without a browser


def test_data_has_every_node_and_edge() -> None:
    graph = example()
    data = graph_data(graph)["graph"]
    for position, node in enumerate(graph.nodes):
        shown: dict[str, Any] = {name: column[position] for name, column in data["nodes"].items()}
        assert tuple(data["layers"][shown["layers"]]) == node.layers
        assert [tuple(row) for row in data["outputs"][shown["outputs"]]] == [tuple(row) for row in node.outputs]
        rest = {name: value for name, value in node._asdict().items() if name not in ("layers", "outputs")}
        assert {name: shown[name] for name in rest} == rest
    for position, edge in enumerate(graph.edges):
        shown = {name: column[position] for name, column in data["edges"].items()}
        assert tuple(data["tensors"][shown.pop("tensors")]) == edge.tensors
        assert shown == {"source": edge.source, "target": edge.target, "control": edge.control, "bytes": edge.bytes}


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ([TaskNode("a", "a", "F", 3, 0, 0, 0, 0)], [], "node a is on device 3, which isn't among 1"),
        ([TaskNode("a", "a", "F", 0, 0, 0, 0, 0)], [TaskEdge(0, 1, False)], "an edge 0 -> 1 ends at none of 1 nodes"),
    ],
)
def test_what_cannot_be_shown(nodes: list[TaskNode], edges: list[TaskEdge], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        page_of(TaskGraph(tuple(nodes), tuple(edges), {0: "device 0"}))


# ---- what is drawn


def test_the_page_draws_finds_filters_and_shows_the_same_again(
    show: Show, picture: Callable[[Page, str], None]
) -> None:
    graph = example()
    page = show(graph_page(graph, title="Task graph: two stages, the first on two devices, and four micro-batches"))
    page.ask("select('1B1')")
    assert "gradient(" in page.text("#details")
    picture(page, "graph_page.png")
    page.ask("fit()")
    page.settle()
    for value in ("total", "matching", "visible"):
        assert counts(page, value) == expected(graph)
    edges = page.ask("edges()")
    inner = [
        edge for edge in graph.edges if None not in (graph.nodes[edge.source].device, graph.nodes[edge.target].device)
    ]
    assert edges["total"] == len(graph.edges) > edges["matching"] == len(inner)
    assert edges["drawn"] == edges["inSight"]
    page.driver.find_elements("css selector", "#edge-kinds button")[2].click()  # the host's, which hid all others
    assert page.ask("edges().matching") == len(graph.edges)
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert f"{len(graph.nodes)} of {len(graph.nodes)} nodes" in page.text("#status")
    assert f"control edges{sum(edge.control for edge in graph.edges)}" in page.text("#summary")
    page.ask("setFilter('kind', ['concat'])")
    assert counts(page, "matching") == expected(graph, lambda node: node.kind == "concat")

    (number,) = (number for number, node in enumerate(graph.nodes) if node.label == "1F1")
    node, names = graph.nodes[number], [node.name for node in graph.nodes]
    inputs = [edge for edge in graph.edges if edge.target == number]
    page = show(page_of(graph))
    page.ask("fit()")
    places = page.run("return arguments[0].map((name) => dapple.positionOf(name))", names)
    assert len({(place["x"], place["y"]) for place in places}) == len(graph.nodes)
    assert all(places[edge.source]["x"] < places[edge.target]["x"] for edge in graph.edges)
    page.hover_at(page.ask(f"positionOf('{node.name}')"))
    assert node.layers[0] in page.text("#tip")
    page.click_at(page.ask(f"positionOf('{node.name}')"))
    chosen = page.ask("selected()")
    assert chosen["name"] == node.name
    assert chosen["inputs"] == [names[edge.source] for edge in inputs]
    assert chosen["outputs"] == [names[edge.target] for edge in graph.edges if edge.source == number]
    details = page.text("#details")
    for text in (*node.layers, node.outputs[1].name, "float64", "[8, 3]", graph.devices[2], "micro-batch1", "control"):
        assert text in details
    label = next(graph.nodes[edge.source].label for edge in inputs if graph.nodes[edge.source].kind == "concat")
    page.click_link(label)
    assert page.ask("selected().label") == label
    page.find("#search").send_keys("dense_2")
    assert page.text("#tools .hint") == f"1 of {sum('dense_2' in node.layers for node in graph.nodes)}"

    page.ask("setFilter('stage', [1])")
    page.ask("setFilter('device', [2, null])")
    page.driver.find_elements("css selector", "#edge-kinds button")[0].click()
    kept = [node.stage == 1 and node.device in (2, None) for node in graph.nodes]
    assert sum(counts(page, "matching").values()) == sum(kept)
    matching = sum(edge.control and kept[edge.source] and kept[edge.target] for edge in graph.edges)
    assert page.ask("edges().matching") == matching > 0
    page.ask("setBounds(3, 14)")
    page.ask("select('1B1')")
    questions = ("lanes()", "filters()", "bounds()", "selected()", "edges().matching")
    state = [page.ask(question) for question in questions]
    hash = page.driver.execute_async_script("setTimeout(() => arguments[0](location.hash.slice(1)), 400)")
    again = show(page_of(graph), hash)
    assert [again.ask(question) for question in questions] == state


# ---- hostile and large


def test_hostile_names_are_texts(show: Show) -> None:
    evil = "</script><img src=x onerror='document.title=\"broken\"'><!--<script>"
    tensor = TensorText(evil, evil, evil, 1.0)
    nodes = (
        TaskNode(evil, evil, evil, 0, 0, 0, 0, 0, (evil,), (tensor,)),
        TaskNode("__proto__", "constructor", "toString", None, None, None, None, 1),
    )
    page = show(graph_page(TaskGraph(nodes, (TaskEdge(0, 1, False, (evil,)),), {0: evil}), title=evil))
    page.settle()
    assert page.ask("select('constructor')") is True
    assert evil in page.text("#details")
    page.click_link(evil)
    page.hover_at(page.run("return dapple.positionOf(arguments[0])", evil))
    assert page.text("#details").count(evil) >= 5 and evil in page.text("#tip")
    assert page.driver.title.startswith("</script><img")
    assert page.run("return document.querySelectorAll('img, #details script').length") == 0
