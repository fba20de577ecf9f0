"""The task graph: what it shows is what the step's graph says, neither more nor less."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import keras
import numpy as np
import pytest
from programs import HOST, captured, compiled, dense, in_float64, layout, replicated, staged, two_stages, updated
from step_programs import Case, complete, names_for, of_model, plan

import dapple_tf as dapple
from dapple_tf.view.step_graph import task_graph
from dapple_tf.view.task_graph import TaskGraph, TaskNode, longest_paths
from graph_passes.ir.graph import Graph, control_inputs
from graph_passes.ir.program import Program
from graph_passes.ir.tasks import Phase, Task

TASKS = ("F", "B", "Bx", "Bw")
UNEVEN = Case("mlp", plan("mlp", 2, [[0, 1, 2], [3]], 4, 24, "dapple_a"))

CASES = [
    UNEVEN,
    Case("mlp", plan("mlp", 4, [[0], [1], [1], [0]], 4, 8, "zb_v")),
    Case("mlp", plan("mlp", 2, [[0], [0]], 3, 6, "fast_forward")),
    Case("tied", plan("tied", 4, [[0, 1], [2], [0, 1], [2]], 2, 8, "modulo", bucket_bytes=8)),
    Case("stateful", plan("stateful", 2, [[0, 1], [2]], 3, 7, "dapple_b")),
    Case("mlp", plan("mlp", 3, [[0, 1], [2], [3, 4]], 2, 8, "dapple_a", carried_updates=2), head=True),
    Case("mlp", plan("mlp", 2, [[0, 1, 2], [3]], 4, 24, "dapple_a"), samples=2),
    Case("predict", plan("predict", 3, [[0, 1], [2], [0]], 2, 8, "modulo")),
    Case("attention", plan("attention", 4, [[0], [1, 2], [3], [4, 5, 6]], 2, 7, "zb_h1")),
]


def drawn(case: Case) -> tuple[Program, TaskGraph]:
    program = complete(case)
    return program, task_graph(program, names_for(case.plan))


def reached(count: int, pairs: Iterable[tuple[int, int]], order: Iterable[int]) -> list[int]:
    """For each node the nodes before it, as bits; ``order`` has sources first."""
    before: dict[int, list[int]] = defaultdict(list)
    for source, target in pairs:
        before[target].append(source)
    ancestors = [0] * count
    for node in order:
        for source in before[node]:
            ancestors[node] |= ancestors[source] | 1 << source
    return ancestors


def members(graph: Graph, node: TaskNode) -> list[str]:
    """The nodes of a drawn node: of an all-reduce what packs, and what reduces that."""
    readers = graph.consumers(node.name) if node.kind == "all_reduce" else []
    return [node.name, *(name for name in readers if graph.nodes[name].op == "CollectiveReduceV2")]


def paths_in_graph(graph: Graph, drawing: TaskGraph, *, control: bool) -> set[tuple[int, int]]:
    """The pairs of drawn nodes between which the step's graph has a path."""
    numbers = graph.position
    pairs = [(numbers[ref.node], numbers[node.name]) for node in graph for ref in graph.inputs(node.name)]
    if control:
        pairs += [(numbers[waited], numbers[node.name]) for node in graph for waited in control_inputs(node)]
    before = reached(len(numbers), pairs, (numbers[name] for name in graph.topological()))
    places = [[numbers[name] for name in members(graph, node)] for node in drawing.nodes]
    bits = [sum(1 << place for place in own) for own in places]
    return {
        (source, target)
        for target, own in enumerate(places)
        for source, wanted in enumerate(bits)
        if source != target and any(before[place] & wanted for place in own)
    }


def paths_in_drawing(drawing: TaskGraph, *, control: bool) -> set[tuple[int, int]]:
    pairs = [(edge.source, edge.target) for edge in drawing.edges if control or not edge.control]
    order = sorted(range(len(drawing.nodes)), key=lambda index: drawing.nodes[index].column)
    before = reached(len(drawing.nodes), pairs, order)
    return {
        (source, target) for target, bits in enumerate(before) for source in range(len(before)) if bits >> source & 1
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_drawing_says_what_the_graph_says(case: Case) -> None:
    check(*drawn(case))


def test_losses_optimizers_and_their_scales_are_drawn() -> None:
    x = keras.Input((3, 2))
    a = keras.layers.Dense(3, name="a")(keras.layers.Masking()(x))
    model = keras.Model(x, keras.layers.Dense(1, name="c")(keras.layers.Dense(3, name="b")(a)))
    inner = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    cluster = dapple.Cluster.local(5, kind="cpu")
    program = of_model(model, dapple.Plan.manual(["a", "b"], [[0, 1], [2], [3, 4]], 3, 12, "zb_h1"), cluster)
    drawing = task_graph(program, cluster.device_names)
    check(program, drawing)
    labels = Counter(node.label for node in of_kind(drawing, "other"))
    assert (labels["loss scale"], labels["totals"], labels["normalizers"]) == (2, 2, 1)
    assert labels["statistics"] == len({node.stage for node in of_kind(drawing, "apply")})


def check(program: Program, drawing: TaskGraph) -> None:
    """All that holds of every drawing."""
    graph = Graph(program.graph)
    check_tasks(program, drawing)
    assert sum(node.stands_for for node in drawing.nodes) == len(program.graph.node)
    assert all(drawing.nodes[edge.source].column < drawing.nodes[edge.target].column for edge in drawing.edges)
    assert len({edge[:3] for edge in drawing.edges}) == len(drawing.edges)
    assert paths_in_drawing(drawing, control=True) == paths_in_graph(graph, drawing, control=True)
    assert paths_in_drawing(drawing, control=False) == paths_in_graph(graph, drawing, control=False)


def check_tasks(program: Program, drawing: TaskGraph) -> None:
    """Each task once, on its device, in the device's order; nodes stand lane by lane."""
    assert program.step is not None and program.step.schedule is not None
    schedule = program.step.schedule
    by_device: dict[int, list[Task]] = defaultdict(list)
    for node in drawing.nodes:
        if node.kind in TASKS:
            assert node.device is not None and node.stage is not None
            assert node.micro_batch is not None and node.replica is not None
            task = Task(node.stage, Phase(node.kind), node.micro_batch, node.replica)
            assert node.label == str(task)
            assert node.name == program.step.entry[task]
            by_device[node.device].append(task)
    assert {device: tuple(tasks) for device, tasks in by_device.items()} == {
        device: tasks for device, tasks in schedule.orders.items() if tasks
    }
    lanes = [None, *drawing.devices]
    places = [(lanes.index(node.device), node.column) for node in drawing.nodes]
    assert places == sorted(places)


# ---- what nodes are


def of_kind(drawing: TaskGraph, kind: str) -> list[TaskNode]:
    return [node for node in drawing.nodes if node.kind == kind]


def test_a_pipeline_of_three_and_one(golden: Callable[[str, str], None]) -> None:
    _, drawing = drawn(Case("stateful", plan("stateful", 2, [[0, 1, 2], [3]], 2, 7, "dapple_a")))
    lines = [f"{device}: {label}" for device, label in drawing.devices.items()]
    for node in drawing.nodes:
        results = ", ".join(f"{text.name} {text.dtype}{text.shape}" for text in node.outputs[:4])
        lane = "host" if node.device is None else node.device
        lines.append(
            f"{lane} {node.column:2} {node.label} ({node.kind}), {node.stands_for} nodes [{', '.join(node.layers)}] "
            f"{results}{' ...' if len(node.outputs) > 4 else ''}".rstrip()
        )
    for edge in drawing.edges:
        ends = f"{drawing.nodes[edge.source].name} -> {drawing.nodes[edge.target].name}"
        size = "" if edge.bytes is None else f" ({edge.bytes:g} bytes)"
        lines.append(f"{ends}{', control' if edge.control else ': ' + ', '.join(edge.tensors) + size}")
    golden("task_graph.txt", "\n".join(lines) + "\n")


def test_an_all_reduce_is_one_node_on_each_device_whatever_its_buckets() -> None:
    case = Case("mlp", plan("mlp", 2, [[0, 1], [2, 3]], 2, 8, "dapple_a", bucket_bytes=8))
    program, drawing = drawn(case)
    reduced = of_kind(drawing, "all_reduce")
    labels = [(node.device, node.label) for node in reduced]
    assert sorted(labels) == [(0, "AllReduce 0"), (1, "AllReduce 0"), (2, "AllReduce 1"), (3, "AllReduce 1")]
    ops = Counter(node.op for node in program.graph.node)
    assert ops["CollectiveReduceV2"] > 8
    assert sum(len(node.outputs) for node in reduced) == ops["CollectiveReduceV2"]
    trained = 3 * (2 + 1)  # dense_0: 2 x 3 weights and 3 biases
    assert sum(text.bytes or 0 for text in reduced[0].outputs) == 8 * trained


def test_what_several_stages_share_is_reduced_and_applied_together() -> None:
    _, drawing = drawn(Case("tied", plan("tied", 3, [[0, 1], [2], [3, 4]], 2, 8, "dapple_a")))
    for kind, label in (("all_reduce", "AllReduce 0+1+2"), ("apply", "Apply 0+1+2")):
        assert [(node.device, node.label) for node in of_kind(drawing, kind)] == [(d, label) for d in range(5)]


# ---- what can't be drawn


def test_only_complete_steps_are_drawn() -> None:
    with pytest.raises(ValueError, match="has no step yet: draw it after its last pass"):
        task_graph(two_stages(), [HOST])
    with pytest.raises(ValueError, match=r"waits for \d+ tensors"):
        task_graph(replicated(two_stages(), layout([1, 1], 2)), [HOST])


def test_longest_paths() -> None:
    assert longest_paths(4, [(0, 1), (1, 2), (0, 2), (3, 2)]) == [0, 1, 2, 0]
    with pytest.raises(ValueError, match="2 of 3 tasks wait for each other in a circle"):
        longest_paths(3, [(0, 1), (1, 2), (2, 1)])


@in_float64()
def test_what_comes_out_of_a_loop_has_a_size_where_it_crosses_a_cut() -> None:
    """The shapes within a stage say no more than ``[?, 3]`` of it."""
    x = keras.Input((2, 1), name="x")
    h = keras.layers.Rescaling(2.0)(keras.layers.LSTM(3, name="loop", dtype="float64")(x))
    program = captured(compiled(x, dense("last")(h)), np.zeros((4, 2, 1)), np.zeros((4, 3)))
    own = layout((1, 1), 4, 2)
    graph = task_graph(updated(staged(program, "loop"), own), [name for names in own.devices for name in names])
    labels = {(graph.nodes[edge.source].label, graph.nodes[edge.target].label): edge.bytes for edge in graph.edges}
    assert labels["0F0", "1F0"] == labels["1B0", "0B0"] == 2 * 3 * 8.0
