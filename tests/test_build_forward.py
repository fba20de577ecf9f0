"""Pass 2: the forward graph of each stage."""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
from program_text import read_program
from programs import (
    apply,
    attention,
    captured,
    compiled,
    copied,
    dense,
    meanings,
    mlp,
    node,
    run,
    stateful_layers,
    tied_layers,
    two_layers,
)

from dapple_tf.frontend.capture import Mode
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.program import Program, Stage
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import stages_text
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_forward import BuildForward, extract


def forward(program: Program, *cuts: str, want_outputs: bool = False) -> Program:
    return apply(program, AssignStages(cuts), BuildForward(want_outputs))


def arguments(stage: Stage) -> list[str]:
    return meanings(stage.arguments)


def results(stage: Stage) -> list[str]:
    return meanings(stage.results)


# ---- structure


def test_the_graph_of_each_stage(golden: Callable[[str, str], None]) -> None:
    program = forward(stateful_layers(), "a")
    golden("build_forward.txt", stages_text(program))


def test_each_stage_gets_what_it_reads_and_gives_what_others_read() -> None:
    first, second = forward(two_layers(), "a").stages
    assert (arguments(first), results(first)) == (["x", "w"], ["a/tanh"])
    assert (arguments(second), results(second)) == (["a/tanh", "v"], ["loss"])


def test_the_flat_graph_is_kept_for_those_who_speak_of_its_tensors() -> None:
    before = apply(two_layers(), AssignStages(("a",)))
    after = apply(before, BuildForward())
    assert after.flat == before.graph == after.graph
    assert before.flat_graph == after.replace(graph=empty_graph()).flat_graph == before.graph
    assert (after.roles, after.boundaries) == (before.roles, before.boundaries)


def test_a_stage_has_the_nodes_that_its_results_need_and_a_placeholder_for_each_argument() -> None:
    for stage in forward(attention(), "norm", "residual").stages:
        assert stage.graph is not None
        graph = Graph(stage.graph)
        needed = graph.ancestors([*stage.results.values(), *stage.metric_results.values()], control=False)
        assert set(graph.nodes) == needed
        placeholders = {each.name for each in stage.graph.node if each.op == "Placeholder"}
        assert placeholders == {ref.node for ref in stage.arguments.values()}
        assert len(stage.graph.node) > len(placeholders) > 0


def test_a_boundary_placeholder_has_the_boundarys_dtype_and_shape() -> None:
    program = forward(two_layers(), "a")
    assert program.stages[1].graph is not None
    place = node(program.stages[1].graph, "a/tanh/argument")
    assert place.attr["dtype"].type == program.boundaries[0].dtype
    assert [dim.size for dim in place.attr["shape"].shape.dim] == [-1, 3]


def test_a_weight_of_several_stages_is_an_argument_of_each() -> None:
    program = forward(tied_layers(3), "layer_0", "layer_1")
    assert [arguments(stage) for stage in program.stages] == [
        ["x", "w"],
        ["layer_0/tanh", "w"],
        ["layer_1/tanh", "w"],
    ]


def test_nodes_of_no_stage_are_copied_to_each_that_needs_them() -> None:
    x = keras.Input((4,), name="x", dtype="int32")
    h = keras.layers.Embedding(5, 2, mask_zero=True, name="embedding", dtype="float64")(x)
    h = dense("dense", 2)(h)
    h = keras.layers.GlobalAveragePooling1D(name="pool", dtype="float64")(h)
    program = captured(compiled(x, dense("head", 1)(h)), np.zeros((4, 4), "int32"), np.zeros((4, 1)))
    program = forward(program, "embedding")
    graphs = [stage.graph for stage in program.stages]
    masks = [[each.name for each in graph.node if each.op == "NotEqual"] for graph in graphs if graph is not None]
    assert masks[1] and set(masks[0]) <= set(masks[1])


def test_state_updates_are_results_and_metrics_are_kept_apart() -> None:
    first, second = forward(stateful_layers(), "a").stages
    assert results(first) == ["a/matmul", "average_update"]
    assert results(second) == ["loss", "count_update"]
    assert (meanings(first.metric_results), meanings(second.metric_results)) == ([], ["total_update"])


@functools.cache
def two_outputs() -> Program:
    """Stage 0 and stage 1 make an output each, and one output is an input."""
    return read_program(
        """
        x[?, 2], w[2, 2], v[2, 2]
        a/matmul = MatMul(x, w)
        a/early = Tanh(a/matmul)
        b/late = MatMul(a/matmul, v)
    """,
        outputs=("b/late", "a/early", "x"),
    )


def test_outputs_are_results_of_the_stage_that_makes_them_when_they_are_wanted() -> None:
    program = forward(two_outputs(), "a", want_outputs=True)
    assert [results(stage) for stage in program.stages] == [["a/matmul", "a/early"], ["b/late", "x"]]
    assert program.stages[1].results[next(value for value in program.stages[1].results if str(value) == "x")] == Ref(
        "x"
    )


def test_outputs_that_are_not_wanted_are_no_results() -> None:
    assert [results(stage) for stage in forward(two_outputs(), "a").stages] == [["a/matmul"], []]
    assert [results(stage) for stage in forward(mlp(mode=Mode.TEST), "dense_0").stages][1] != []


def test_control_edges_stay_behind() -> None:
    (stage,) = forward(
        read_program("""
        x[?, 2], w[2, 2]
        a/check = NoOp()
        a/h = MatMul(x, w) ^a/check
        loss = L2Loss(a/h)
    """)
    ).stages
    assert stage.graph is not None
    assert list(node(stage.graph, "a/h").input) == ["x", "w"]
    assert "a/check" not in {each.name for each in stage.graph.node}


def test_colocation_with_nodes_that_the_stage_may_not_have_stays_behind() -> None:
    program = apply(two_layers(), AssignStages(("a",)))
    program = copied(program)
    node(program, "b/matmul").attr["_class"].list.s.append(b"loc:@a/matmul")
    for stage in apply(program, BuildForward()).stages:
        assert stage.graph is not None
        assert all("_class" not in each.attr for each in stage.graph.node)


# ---- extraction


def test_an_argument_that_is_no_placeholder_is_replaced_by_one_under_a_fresh_name() -> None:
    graph = Graph(two_layers().graph)
    extracted, placed = extract(graph, [Ref("loss")], [Ref("a/tanh"), Ref("v"), Ref("x")], {Ref("a/tanh"): (None, 3)})
    assert placed == {Ref("a/tanh"): Ref("a/tanh/argument"), Ref("v"): Ref("v")}
    assert [each.name for each in extracted.node] == ["a/tanh/argument", "v", "b/matmul", "loss"]


def test_a_placeholder_without_a_role_is_refused() -> None:
    with pytest.raises(PassError) as caught:
        extract(Graph(two_layers().graph), [Ref("loss")], [Ref("x"), Ref("v")], {})
    assert str(caught.value) == "placeholder 'w' of the captured graph has no role"


# ---- numbers


@pytest.mark.parametrize("cuts", [("norm",), ("embed", "residual"), ("wide",)])
def test_stages_one_after_another_compute_what_the_whole_computes(cuts: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    whole = attention()
    program = forward(whole, *cuts)
    assert whole.roles.loss is not None
    x, y = (rng.normal(size=size) for size in ((4, 3, 2), (4, 3, 1)))
    scalars = {whole.roles.slice.weight: 0.25, whole.roles.slice.samples: 4}
    known = dict(zip(whole.roles.inputs, (x, y), strict=True)) | scalars
    known |= {v.value: rng.normal(size=v.shape) for v in whole.roles.variables if v.value is not None}
    (expected,) = run(whole.graph, [whole.roles.loss], known)
    for stage in program.stages:
        assert stage.graph is not None
        feeds = {place: known[value.ref] for value, place in stage.arguments.items()}
        got = run(stage.graph, list(stage.results.values()), feeds)
        known |= {value.ref: result for value, result in zip(stage.results, got, strict=True)}
    np.testing.assert_allclose(known[whole.roles.loss], expected, rtol=1e-14)
    assert expected > 0
