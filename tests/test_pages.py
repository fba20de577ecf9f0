"""Pages of timelines and of graphs: their data, and one walk through each in a browser."""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from browser import Page
from step_programs import Case, complete, names_for
from step_programs import plan as step_plan

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile_text import load_text
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.page import assemble, embedded, graph_data, graph_page, timeline_data, timeline_page
from dapple_tf.view.step_graph import task_graph
from dapple_tf.view.task_graph import TaskEdge, TaskGraph, TaskNode, TensorText
from dapple_tf.view.timeline import Lane, Span, Timeline

Show = Callable[..., Page]

CUTS = ("layer_11", "layer_23", "layer_35")


def cluster(gib: int) -> Cluster:
    """Two servers of two devices on Ethernet."""
    devices = tuple(Device(f"/job:worker/task:{i // 2}/device:GPU:{i % 2}", i // 2, gib << 30) for i in range(4))
    return Cluster(devices, intra_bandwidth=40e9, inter_bandwidth=3.125e9, inter_latency=20e-6, real=False)


@functools.cache
def bert(schedule: str) -> Timeline:
    """A step of BERT-48 on four devices, eight micro-batches."""
    profile = load_text("bert-48")
    plan = Plan.manual(CUTS, [[0], [1], [2], [3]], 8, 16, schedule)
    return simulate(plan, profile, cluster(2)).drawn(schedule)


@functools.cache
def replicated(name: str = "3:1") -> Timeline:
    """The same model in two stages, on three devices and one."""
    profile = load_text("bert-48")
    plan = Plan.manual([CUTS[1]], [[0, 1, 2], [3]], 4, 24)
    return simulate(plan, profile, cluster(4)).drawn(name)


def handmade(*spans: Span, name: str = "handmade", **fields: Any) -> Timeline:
    latency = max((span.end for span in spans), default=0.0)
    return Timeline(**{"name": name, "latency": latency, "spans": spans, "devices": {0: "first", 1: "second"}} | fields)


def page_of(*timelines: Timeline) -> str:
    return timeline_page(timelines, title="Steps")


def counts(page: Page, value: str = "total") -> dict[tuple[str, int, str], int]:
    return {(lane["timeline"], lane["device"], lane["row"]): lane[value] for lane in page.ask("lanes()")}


def expected(timelines: Sequence[Timeline], keep: Callable[[Lane, Span], bool] = lambda lane, span: True) -> Any:
    return {
        (timeline.name, lane.device, lane.row): sum(keep(lane, span) for span in spans)
        for timeline in timelines
        for lane, spans in timeline.lanes.items()
    }


def selected(page: Page) -> str | None:
    span = page.ask("selected()")
    return span and f"{span['timeline']}: {span['name']}"


def bounds(page: Page) -> tuple[float, float]:
    limits = page.ask("bounds('s')")
    return limits["lo"], limits["hi"]


# ---- without a browser


def test_data_has_every_span() -> None:
    timeline = replicated()
    (data,) = timeline_data([timeline])["timelines"]
    columns = data["spans"]
    defaults = Span("", 0.0, 0.0, None, 0)._asdict()
    for index, span in enumerate(timeline.spans):
        for name, value in span._asdict().items():
            shown = columns[name][index] if name in columns else defaults[name]
            assert shown == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
    assert data["count"] == len(timeline.spans)
    assert [device["bubble"] for device in data["devices"]] == [timeline.bubbles[d] for d in timeline.devices]
    assert "target" in columns and "cause" in columns
    assert json.loads(embedded(data)) == json.loads(json.dumps(data))


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "\u2028\u2029", "\ud800"])
def test_embedded_text_cannot_leave_its_tag(text: str) -> None:
    result = embedded({"name": text})
    assert result.isascii()
    assert not set("<>&") & set(result)
    assert json.loads(result) == {"name": text}


def test_page_has_all_in_one_file() -> None:
    text = page_of(bert("dapple_a"))
    assert html.escape("default-src 'none'") in text and "connect-src" not in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)
    assert "https:" not in text and "http:" not in text and "@import" not in text and "url(" not in text
    assert "innerHTML" not in text and "eval(" not in text and "insertAdjacent" not in text
    assert html.escape("connect-src 'self'") in assemble("x", [], {}, connect=True)


@pytest.mark.parametrize(
    ("timelines", "message"),
    [
        ([], "there are no timelines to show"),
        ([handmade(), handmade()], "2 of the 2 timelines are called 'handmade'; rename them"),
    ],
)
def test_what_cannot_be_shown(timelines: list[Timeline], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        timeline_page(timelines, title="x")


def test_scripts_that_would_end_their_tag() -> None:
    with pytest.raises(ValueError, match=r"script 1 of the page has '</script'"):
        assemble("x", ["1", "'</SCRIPT>'"], {})


# ---- in a browser


def test_the_page_draws_filters_moves_finds_and_shows_the_same_again(
    show: Show, picture: Callable[[Page, str], None]
) -> None:
    timelines = [bert("dapple_a"), bert("zb_h1")]
    text = timeline_page(timelines, title="BERT-48 in four stages, eight micro-batches: dapple_a and zb_h1")
    page = show(text)
    for value in ("total", "matching", "visible"):
        assert counts(page, value) == expected(timelines)
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    for timeline in timelines:
        assert f"{timeline.latency * 1e3:.4g} ms" in page.text("#summary")
    assert page.ask("select('2B3', 'dapple_a')")
    picture(page, "timeline_page.png")

    page.press("\ue00c")  # Escape
    page.hover_at(page.ask("positionOf('2B3')"))
    assert page.text("#tip").startswith("2B3  (dapple_a)\n")
    page.click_at(page.ask("positionOf('2B3')"))
    span = timelines[0].spans[page.ask("selected()")["index"]]
    details = page.text("#details")
    assert f"duration{(span.end - span.start) * 1e3:.4g} ms" in details
    assert "stage2" in details and "micro-batch3" in details and "device 2" in details
    page.click("#cause button")
    assert page.ask("selected()")["index"] == span.cause
    page.find("#search").send_keys("2b3")
    assert page.ask("selected()")["name"] == "2B3"

    low, high = bounds(page)
    page.press("\ue00c", "+")
    zoomed = bounds(page)
    assert zoomed[1] - zoomed[0] == pytest.approx((high - low) / 1.5)
    page.press("0")
    place = page.ask("positionOf('2B3')")
    page.wheel(place, -300)
    page.settle()
    assert bounds(page)[1] - bounds(page)[0] < 0.6 * (high - low)
    page.drag(place, 80)
    page.settle()
    assert page.ask("positionOf('2B3')")["x"] == pytest.approx(place["x"] + 80, abs=2)

    page.ask("setFilter('stage', [1, 2])")
    page.ask("setFilter('kind', ['F', 'Bx'])")
    page.ask("setFilter('micro_batch', [0, 2, null])")

    def keep(lane: Lane, span: Span) -> bool:
        return span.stage in (1, 2) and span.kind in ("F", "Bx") and span.micro_batch in (0, 2, None)

    assert counts(page, "matching") == expected(timelines, keep)
    page.ask("setBounds(0.125, 0.5)")
    page.ask("select('2Bx2', 'zb_h1')")
    questions = ("lanes()", "filters()", "selected()", "bounds('s')")
    state = [page.ask(question) for question in questions]
    wait = "const done = arguments[0]; setTimeout(() => done(location.hash.slice(1)), 400)"
    again = show(text, page.driver.execute_async_script(wait))
    for question, before in zip(questions, state, strict=True):
        assert again.ask(question) == (pytest.approx(before) if question.startswith("bounds") else before)
    again.run("location.hash = 'stage=zzz&kind=&t.s=9~a&name=<b>&nth=-1&y=x&device=1-999999999'")
    again.driver.execute_async_script(wait)
    assert again.ask("filters().stage") is None and again.ask("filters().kind") == []


def test_hostile_names_are_texts(show: Show) -> None:
    evil = "</script><img src=x onerror='document.title=\"broken\"'>\u2028<!--<script>document.title='broken'</script>"
    spans = (Span(evil, 0.0, 1.0, 0, 0, 0), Span("constructor", 1.0, 2.0, 1, 0, 1, cause=0))
    page = show(timeline_page([handmade(*spans, name=evil, devices={0: evil, 1: "__proto__"})], title=evil))
    assert page.ask("select('0constructor1')")
    page.click("#cause button")
    page.hover_at(page.ask("positionOf(dapple.selected().name)"))
    assert page.driver.title.startswith("</script><img")
    assert page.text("h1") == evil
    assert evil in page.text("#tip") and evil in page.text("#details") and evil in page.text("#summary")
    assert page.run("return document.querySelectorAll('img, b, #details script').length") == 0


@functools.cache
def example() -> TaskGraph:
    """A real step: two stages, the first on two devices, and four micro-batches."""
    case = Case("mlp", step_plan("mlp", 2, [[0, 1], [2]], 4, 32, "dapple_a"))
    return task_graph(complete(case), names_for(case.plan))


def graph_page_of(graph: TaskGraph) -> str:
    return graph_page(graph, title="Task graph")


def nodes_by_device(page: Page, value: str = "total") -> dict[int | None, int]:
    return {lane["device"]: lane[value] for lane in page.ask("lanes()")}


def expected_nodes(graph: TaskGraph, keep: Callable[[TaskNode], bool] = lambda node: True) -> dict[int | None, int]:
    devices: list[int | None] = list(graph.devices)
    hosts: list[int | None] = [None] if any(node.device is None for node in graph.nodes) else []
    return {device: sum(node.device == device and keep(node) for node in graph.nodes) for device in hosts + devices}


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


# ---- what is drawn


def test_the_graph_page_draws_finds_filters_and_shows_the_same_again(show: Show) -> None:
    graph = example()
    page = show(graph_page(graph, title="Task graph: two stages, the first on two devices, and four micro-batches"))
    page.ask("select('1B1')")
    assert "gradient(" in page.text("#details")
    page.ask("fit()")
    page.settle()
    for value in ("total", "matching", "visible"):
        assert nodes_by_device(page, value) == expected_nodes(graph)
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
    assert nodes_by_device(page, "matching") == expected_nodes(graph, lambda node: node.kind == "concat")

    (number,) = (number for number, node in enumerate(graph.nodes) if node.label == "1F1")
    node, names = graph.nodes[number], [node.name for node in graph.nodes]
    inputs = [edge for edge in graph.edges if edge.target == number]
    page = show(graph_page_of(graph))
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
    assert sum(nodes_by_device(page, "matching").values()) == sum(kept)
    matching = sum(edge.control and kept[edge.source] and kept[edge.target] for edge in graph.edges)
    assert page.ask("edges().matching") == matching > 0
    page.ask("setBounds(3, 14)")
    page.ask("select('1B1')")
    questions = ("lanes()", "filters()", "bounds()", "selected()", "edges().matching")
    state = [page.ask(question) for question in questions]
    hash = page.driver.execute_async_script("setTimeout(() => arguments[0](location.hash.slice(1)), 400)")
    again = show(graph_page_of(graph), hash)
    assert [again.ask(question) for question in questions] == state


# ---- hostile and large


def test_hostile_names_of_nodes_are_texts(show: Show) -> None:
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
