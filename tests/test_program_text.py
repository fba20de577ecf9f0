"""Programs as text, and what passes do to small ones: the golden files that no other test writes."""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping

import pytest
from program_text import read_program
from programs import (
    FLOAT,
    HOST,
    INT32,
    apply,
    connected,
    layout,
    run,
    schedule_of,
    sent,
    show_changes,
    staged,
    stateful_layers,
    step_of,
    two_layers,
    two_stages,
    updated,
)
from step_programs import device_names

from dapple_tf.execution.step_passes import PASSES
from graph_passes.analysis.operator_shapes import operator_shapes
from graph_passes.analysis.split_rules import Split
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr
from graph_passes.ir.outline import call_node, outline, placeholder
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.storage import merge_library
from graph_passes.ir.tensorflow_bridge import Shape, empty_graph
from graph_passes.ir.text import functions_text, graph_text, library_text, program_text, readable, stages_text
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.flatten import Flatten
from graph_passes.passes.fold_shapes import FoldShapes
from graph_passes.passes.join import Join
from graph_passes.passes.place_data import PlaceData
from graph_passes.passes.place_operators import PlaceOperators
from graph_passes.passes.scale_losses import scale_losses
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.share_values import ShareValues
from graph_passes.passes.split_operators import SplitOperators

SAMPLES = 4
Golden = Callable[[str, str], None]


def fed(program: Program) -> dict[str, tuple[int, ...]]:
    return {ref.node: (SAMPLES, 2) for ref in step_of(program).feeds.values()}


def shapes(program: Program) -> Mapping[Ref, Shape | None]:
    return operator_shapes(program.graph, fed(program))


@functools.cache
def complete() -> Program:
    """A step on one device."""
    return updated(staged(two_layers()), layout([1], SAMPLES), accumulated=False)


@functools.cache
def flat() -> Program:
    return apply(complete(), Flatten())


@functools.cache
def folded() -> Program:
    return apply(flat(), FoldShapes(fed(flat())))


@functools.cache
def shared() -> Program:
    return apply(folded(), ShareValues(shapes(folded())))


@functools.cache
def split() -> Program:
    return apply(shared(), SplitOperators({"stage0/replica0/forward0/a/tanh": Split("batch", 2)}, shapes(shared())))


def changes(before: Program, after: Program) -> str:
    return show_changes(graph_text(before.graph), graph_text(after.graph))


def test_what_the_order_of_tasks_adds(golden: Golden) -> None:
    cut = layout([1, 1], 3, 3)
    before = apply(connected(two_stages(), cut), Accumulate())
    names = tuple(itertools.chain.from_iterable(cut.devices))
    golden("schedule.txt", changes(before, apply(before, OrderTasks(schedule_of(cut), names))))


def test_batches_that_workers_have(golden: Golden) -> None:
    before = complete()
    assert before.step is not None
    devices = itertools.chain.from_iterable(before.step.layout.devices)
    hosts = {device: f"/worker{number}" for number, device in enumerate(devices)}
    golden("place_data.txt", changes(before, apply(before, PlaceData(hosts, "batches"))))


def test_joined_steps(golden: Golden) -> None:
    """Of one stage, and of two on one device, with state and metrics: nothing is accumulated."""
    two = updated(staged(stateful_layers(), "a"), Layout(layout([1], SAMPLES).devices * 2, 4, 4, 1), accumulated=False)
    texts = []
    for before in (complete(), two):
        after = apply(before, Join())
        known = [function.signature.name for function in before.graph.library.function]
        step = step_of(after)
        roles = f"loss {step.loss}, train {step.train}, metrics {[*map(str, step.metric_results.get('total', ()))]}"
        assert not step.entry and step.dissolved == frozenset(range(len(before.stages)))
        texts.append(f"{graph_text(after.graph)}\n{library_text(after, *known)}\n{roles}\n")
    golden("join.txt", "\n".join(texts))


def test_what_follows_from_shapes(golden: Golden) -> None:
    golden("fold_shapes.txt", changes(flat(), folded()))


def test_what_is_computed_once(golden: Golden) -> None:
    golden("share_values.txt", changes(folded(), shared()))


def test_an_operator_in_two_parts(golden: Golden) -> None:
    golden("split_operators.txt", changes(shared(), split()))


def test_operators_on_two_devices(golden: Golden) -> None:
    view = Graph(split().graph)
    names = [name for name in view.topological() if view.nodes[name].op not in ("Placeholder", "Const", "NoOp")]
    where = {name: device_names(2)["part1" in name] for name in names}
    golden("place_operators.txt", changes(split(), apply(split(), PlaceOperators(where, tuple(names)))))


def test_a_sum_over_a_slice_is_divided_by_its_weight(golden: Golden) -> None:
    before = read_program("""
        x[?, 2], w[2, 3]
        a/matmul = MatMul(x, w)
        square = Square(a/matmul)
        sum = Sum(square, [0, 1])
        loss = Mul(weight, sum)
    """)
    golden("scale_losses.txt", changes(before, scale_losses(before)))


def test_every_pass_has_a_golden_file() -> None:
    files = [path.stem for path in (pathlib.Path(__file__).parent / "golden").glob("*.txt")]
    assert not [own.name for own in PASSES if not any(name.startswith(own.name) for name in files)]


def test_a_program_is_printed_as_far_as_it_has_come() -> None:
    stages = two_stages()
    assert program_text(two_layers()) == graph_text(two_layers().graph)
    assert program_text(stages) == f"{stages_text(stages)}\n{functions_text(stages)}"
    assert program_text(complete()) == f"{graph_text(complete().graph)}\n{library_text(complete())}"


@pytest.mark.parametrize("program", [two_layers(), stateful_layers(), sent("time_major")])
def test_what_is_printed_reads_back(program: Program) -> None:
    assert graph_text(read_program(graph_text(program.graph)).graph) == graph_text(program.graph)


# ---- for readers that know less of functions


def two_results() -> GraphDef:
    """A graph that calls a function whose results, float and integer, come from one node."""
    body = empty_graph()
    inner = Builder(body)
    x = inner.append(placeholder("x", FLOAT))
    top = inner.add("top", "TopKV2", [x, inner.const(2, INT32)], T=dtype_attr(FLOAT), sorted=True)
    doubled = inner.add("doubled", "Add", [top, top], T=dtype_attr(FLOAT))
    function = outline("top_two", Graph(body), [x], [top, Ref(top.node, 1), doubled])
    graph = empty_graph()
    outer = Builder(graph)
    argument = outer.append(placeholder("x", FLOAT))
    outer.append(call_node("call", function, [argument], device=HOST))
    merge_library(graph, [function])
    return graph


def test_results_of_several_dtypes_get_nodes_of_their_own() -> None:
    graph = two_results()
    before = graph.SerializeToString(deterministic=True)
    made = readable(graph)
    assert graph.SerializeToString(deterministic=True) == before
    (function,) = made.library.function
    assert [function.ret[f"y{index}"] for index in range(3)] == [
        "top/result:output:0",
        "top/result_1:output:0",
        "doubled:z:0",
    ]
    assert list(made.node) == list(graph.node)
    feeds, fetches = {Ref("x"): [3.0, 1.0, 7.0]}, [Ref("call", index) for index in range(3)]
    ours, theirs = (run(each, fetches, feeds) for each in (made, graph))
    assert [result.tolist() for result in ours] == [result.tolist() for result in theirs] == [[7, 3], [2, 0], [14, 6]]


def test_other_graphs_are_written_as_they_are() -> None:
    assert readable(two_layers().graph) is two_layers().graph
