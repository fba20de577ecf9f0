from __future__ import annotations

import functools
import graphlib
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from browser import Page
from step_programs import Case, complete, names_for
from step_programs import plan as step_plan

from dapple_tf.describe.plan import Plan
from dapple_tf.view.page import graph_data, graph_page
from dapple_tf.view.step_graph import task_graph
from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode, TensorText
from graph_passes.ir.tasks import Phase, Schedule, Task

Show = Callable[..., Page]


@functools.cache
def example(schedule: str = "dapple_a", stages: int = 4, micro_batches: int = 4) -> TaskGraph:
    cuts = [f"block_{stage}" for stage in range(stages - 1)]
    plan = Plan.manual(cuts, [[stage] for stage in range(stages)], micro_batches, micro_batches, schedule)
    return graph_of(plan.order_tasks())


def graph_of(schedule: Schedule) -> TaskGraph:
    """A task graph such as a schedule without replicas has: a split, its tasks, accumulation and updates."""
    stages = 1 + max(task.stage for task in schedule.tasks)
    names = ["split_0", *map(str, schedule.tasks)]
    names += [f"{kind}_{stage}" for stage in range(stages) for kind in ("accumulate", "apply")]
    known = set(names)
    links: dict[tuple[str, str], bool] = {}

    def link(source: str, target: str, control: bool = False) -> None:
        if source in known and target in known and source != target:
            links.setdefault((source, target), control)

    for task in schedule.tasks:
        stage, number = task.stage, task.micro_batch
        if task.phase is Phase.FORWARD:
            link("split_0" if stage == 0 else f"{stage - 1}F{number}", str(task))
            link(str(task), f"{stage}B{number}")
            link(str(task), f"{stage}Bx{number}")
        if task.phase in (Phase.BACKWARD, Phase.INPUT_GRAD):
            link(f"{stage + 1}{task.phase.value}{number}", str(task))
            link(str(task), f"{stage}Bw{number}")
        if task.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD):
            link(str(task), f"accumulate_{stage}")
        link(f"accumulate_{stage}", f"apply_{stage}")
    for order in schedule.orders.values():
        for task, after in itertools.pairwise(order):
            link(str(task), str(after), control=True)
    columns = dict.fromkeys(names, 0)
    before: dict[str, set[str]] = {name: set() for name in names}
    for source, target in links:
        before[target].add(source)
    for name in graphlib.TopologicalSorter(before).static_order():
        columns[name] = max((columns[other] + 1 for other in before[name]), default=0)

    def node(name: str) -> TaskNode:
        head, _, number = name.partition("_")
        if number:
            stage = None if head == "split" else int(number)
            device = None if stage is None else schedule.device_of(Task(stage, Phase.FORWARD, 0))
            label = f"{head} {number}"
            return TaskNode(name, label, head, device, stage, None, None, columns[name], stands_for=12)
        task = Task.parse(name)
        layers = tuple(f"block_{2 * task.stage + i}/dense" for i in range(2))
        tensors = (TensorText(f"{layers[-1]}/Relu", "float32", "[8, 32]", 1024.0), TensorText("n", "int32", "", None))
        device = schedule.device_of(task)
        numbers = (device, task.stage, task.micro_batch, 0, columns[name])
        return TaskNode(name, name, task.phase.value, *numbers, layers, tensors)

    nodes = sorted(map(node, names), key=lambda one: (-1 if one.device is None else one.device, one.column))
    position = {one.name: index for index, one in enumerate(nodes)}
    edges = tuple(
        TaskEdge(position[source], position[target], control, *(() if control else ((f"{source}:0",), 1024.0)))
        for (source, target), control in links.items()
    )
    return TaskGraph(tuple(nodes), edges, {device: f"device {device}" for device in schedule.orders})


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
    graph = example("zb_h1")
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


def test_a_real_step(show: Show, picture: Callable[[Page, str], None]) -> None:
    case = Case("mlp", step_plan("mlp", 2, [[0, 1], [2]], 4, 32, "dapple_a"))
    graph = task_graph(complete(case), names_for(case.plan))
    page = show(graph_page(graph, title="Task graph: two stages, the first on two devices, and four micro-batches"))
    assert counts(page) == expected(graph)
    kinds = {node.kind for node in graph.nodes}
    assert kinds >= {"F", "B", "split", "concat", "accumulate", "all_reduce", "apply"}
    for kind in kinds:
        page.ask(f"setFilter('kind', ['{kind}'])")
        assert counts(page, "matching") == expected(graph, lambda node, kind=kind: node.kind == kind)  # type: ignore[misc]
    page.ask("setFilter('kind', null)")
    page.ask("select('1B1')")
    assert "gradient(" in page.text("#details")
    picture(page, "graph_page.png")


def test_lanes_have_the_nodes_of_the_graph(show: Show) -> None:
    graph = example()
    page = show(page_of(graph))
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
    summary = page.text("#summary")
    assert f"control edges{sum(edge.control for edge in graph.edges)}" in summary


def test_no_two_nodes_lie_on_each_other(show: Show) -> None:
    graph = example("zb_h1")
    page = show(page_of(graph))
    page.ask("fit()")
    places = page.run("return arguments[0].map((name) => dapple.positionOf(name))", [node.name for node in graph.nodes])
    assert len({(place["x"], place["y"]) for place in places}) == len(graph.nodes)
    for edge in graph.edges:
        assert places[edge.source]["x"] < places[edge.target]["x"]


def test_data_edges_are_solid_and_control_edges_dotted_red(show: Show) -> None:
    ends = [TaskNode("a", "0F0", "F", 0, 0, 0, 0, 0), TaskNode("b", "1F0", "F", 0, 1, 0, 0, 1)]
    shares = []
    for control in (False, True):
        page = show(page_of(TaskGraph(tuple(ends), (TaskEdge(0, 1, control),), {0: "device 0"})))
        page.settle()
        place, other = page.ask("positionOf('a')"), page.ask("positionOf('b')")
        pixels = page.pixels(place["x"] + 80, place["y"] - 1, int(other["x"] - place["x"]) - 180, 7)
        width = len(pixels) // 7
        line = [min(pixels[i + row * width] for row in range(7)) for i in range(width)]
        background = max(pixels)
        drawn = [colour for colour in line if colour != background]
        shares.append(len(drawn) / width)
        assert (max(colour[0] - colour[2] for colour in drawn) > 30) == control
    assert shares[0] == 1.0
    assert 0.2 < shares[1] < 0.9


# ---- filters and details


@pytest.mark.slow
def test_a_node_is_found_and_a_link_shows_the_same_again(show: Show) -> None:
    graph = example()
    page = show(page_of(graph))
    page.hover_at(page.ask("positionOf('1F1')"))
    assert "block_3/dense" in page.text("#tip")
    page.click_at(page.ask("positionOf('1F1')"))
    chosen = page.ask("selected()")
    names = [node.name for node in graph.nodes]
    number = names.index("1F1")
    assert chosen["name"] == "1F1"
    assert chosen["inputs"] == [names[edge.source] for edge in graph.edges if edge.target == number]
    assert chosen["outputs"] == [names[edge.target] for edge in graph.edges if edge.source == number]
    details = page.text("#details")
    for text in ("block_2/dense", "block_3/dense/Relu", "float32", "[8, 32]", "1 KiB", "device 1", "micro-batch1"):
        assert text in details
    assert "0F1 0F1:0; 1 KiB" in details and "1F0 control" in details
    page.click_link("0F1")
    assert page.ask("selected().name") == "0F1"
    page.find("#search").send_keys("block_5/")
    assert page.text("#tools .hint") == f"1 of {sum('block_5/dense' in node.layers for node in graph.nodes)}"

    page.ask("setFilter('stage', [1, 2])")
    page.ask("setFilter('device', [1, 2, null])")
    page.driver.find_elements("css selector", "#edge-kinds button")[0].click()
    kept = [node.stage in (1, 2) and node.device in (1, 2, None) for node in graph.nodes]
    assert sum(counts(page, "matching").values()) == sum(kept)
    matching = sum(edge.control and kept[edge.source] and kept[edge.target] for edge in graph.edges)
    assert page.ask("edges().matching") == matching
    page.ask("setBounds(3, 14)")
    page.ask("select('2B1')")
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


@pytest.mark.thorough
@pytest.mark.slow
def test_ten_thousand_nodes(show: Show) -> None:
    graph = example(stages=16, micro_batches=312)
    assert len(graph.nodes) > 10_000
    page = show(page_of(graph))
    page.ask("fit()")
    page.settle()
    assert counts(page, "visible") == expected(graph)
    edge_counts = page.ask("edges()")
    assert 0 < edge_counts["drawn"] <= 2500 < edge_counts["inSight"]
    assert "zoom in or filter for all" in page.text("#status")
    assert page.run("return document.querySelectorAll('*').length") < 2500  # Nodes aren't elements.
