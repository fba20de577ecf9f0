"""Pass 3: the backward graph of each stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from program_text import read_program
from programs import (
    DOUBLE,
    GRADIENT,
    apply,
    attention,
    captured,
    compiled,
    copied,
    dense,
    embedding,
    meanings,
    mlp,
    node,
    run,
    sent,
    show_changes,
    stateful_layers,
    tied_layers,
    two_layers,
)

from graph_passes.ir.graph import Builder, Ref, dtype_attr
from graph_passes.ir.program import Program, Stage, Value, ValueKind
from graph_passes.ir.tensorflow_bridge import add_gradients
from graph_passes.ir.text import stages_text
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward


def forward(program: Program, *cuts: str) -> Program:
    return apply(program, AssignStages(cuts), BuildForward())


def backward(program: Program, *cuts: str) -> Program:
    return apply(forward(program, *cuts), BuildBackward())


def gradients_taken(stage: Stage) -> list[str]:
    return [str(value.ref) for value in stage.arguments if value.kind is GRADIENT]


def gradients_given(stage: Stage) -> list[str]:
    return [str(value.ref) for value in stage.results if value.kind is GRADIENT]


def whole_gradients(program: Program, known: dict[Ref, Any]) -> dict[str, Any]:
    """Gradients of the whole flat program, by TensorFlow."""
    assert program.roles.loss is not None
    parameters = {
        v.name: v.value for v in program.roles.variables if v.kind.value == "parameter" and v.value is not None
    }
    graph = copied(program).graph
    seed = Builder(graph).add("seed", "Placeholder", dtype=dtype_attr(DOUBLE))
    extended, gradients = add_gradients(graph, [(program.roles.loss, seed)], list(parameters.values()))
    fetched = {name: each.dense for name, each in zip(parameters, gradients, strict=True) if each is not None}
    values = run(extended, list(fetched.values()), {**known, seed: 1.0})
    return dict(zip(fetched, values, strict=True))


def pipelined_gradients(program: Program, known: dict[Ref, Any]) -> dict[str, Any]:
    """Gradients of all parameters, stage by stage forwards and then backwards, summed over stages."""
    names = {v.value: v.name for v in program.roles.variables if v.value is not None}
    total: dict[str, Any] = {}
    values: dict[Value, Any] = {Value(ref): value for ref, value in known.items()}
    for stage in program.stages:
        assert stage.graph is not None
        wanted = {value: ref for value, ref in stage.results.items() if value.kind.value == "forward"}
        feeds = {place: values[value] for value, place in stage.arguments.items() if value in values}
        values |= dict(zip(wanted, run(stage.graph, list(wanted.values()), feeds), strict=True))
    assert program.roles.loss is not None
    values[Value(program.roles.loss, GRADIENT)] = 1.0
    for stage in reversed(program.stages):
        assert stage.graph is not None
        wanted = {value: ref for value, ref in stage.results.items() if value.kind is GRADIENT}
        feeds = {place: values[value] for value, place in stage.arguments.items()}
        for value, result in zip(wanted, run(stage.graph, list(wanted.values()), feeds), strict=True):
            if value.ref in names:
                total[names[value.ref]] = total.get(names[value.ref], 0.0) + result
            else:
                values[value] = values.get(value, 0.0) + result
    return total


def random_values(program: Program, *shapes: tuple[int, ...]) -> dict[Ref, Any]:
    """Values of all arguments of a flat program."""
    rng = np.random.default_rng(0)
    known: dict[Ref, Any] = dict(zip(program.roles.inputs, (rng.normal(size=shape) for shape in shapes), strict=True))
    known |= {v.value: rng.normal(size=v.shape) for v in program.roles.variables if v.value is not None}
    samples = len(next(iter(known.values())))
    return known | {program.roles.slice.weight: 0.5, program.roles.slice.samples: samples}


# ---- structure


def test_what_is_added_to_the_graph_of_each_stage(golden: Callable[[str, str], None]) -> None:
    before = forward(two_layers(), "a")
    after = apply(before, BuildBackward())
    text = ""
    for old, new in zip(before.stages, after.stages, strict=True):
        changes = show_changes(*(stages_text(before.replace(stages=(stage,))) for stage in (old, new)))
        text += f"stage {new.index}\n{changes}"
    golden("build_backward.txt", text)


def test_each_stage_takes_gradients_of_what_it_gives_and_gives_gradients_of_what_it_takes() -> None:
    program = backward(mlp(3), "dense_0", "dense_1")
    first, second = (str(boundary.ref) for boundary in program.boundaries)
    assert [gradients_taken(stage) for stage in program.stages] == [[first], [second], [str(program.roles.loss)]]
    parameters = [str(v.value) for v in program.roles.variables if v.kind.value == "parameter"]
    assert [gradients_given(stage) for stage in program.stages] == [
        parameters[:2],
        [first, *parameters[2:4]],
        [second, *parameters[4:]],
    ]


def test_a_gradient_has_the_dtype_of_its_tensor_and_its_placeholder_the_shape() -> None:
    program = backward(sent("time_major"), "a")
    stage = program.stages[0]
    assert stage.graph is not None
    place = node(stage.graph, stage.arguments[Value(Ref("a/sent"), GRADIENT)].node)
    assert (place.op, place.attr["dtype"].type) == ("Placeholder", DOUBLE)
    assert [dim.size for dim in place.attr["shape"].shape.dim] == [3, -1]


def test_what_was_there_stays() -> None:
    before = forward(attention(), "norm", "residual")
    after = apply(before, BuildBackward())
    for old, new in zip(before.stages, after.stages, strict=True):
        assert old.graph is not None and new.graph is not None
        nodes = {each.name: each for each in new.graph.node}
        for each in old.graph.node:
            assert (nodes[each.name].op, list(nodes[each.name].input)) == (each.op, list(each.input))
        assert {key: new.arguments[key] for key in old.arguments} == old.arguments
        assert {key: new.results[key] for key in old.results} == old.results
        assert new.metric_results == old.metric_results


def test_inputs_of_the_batch_state_and_metrics_have_no_gradient() -> None:
    program = backward(stateful_layers(), "a")
    assert [gradients_given(stage) for stage in program.stages] == [["w"], ["a/matmul", "v"]]
    assert [gradients_taken(stage) for stage in program.stages] == [["a/matmul"], ["loss"]]


@functools.cache
def unused_and_stopped() -> Program:
    """``u`` is read but behind a StopGradient; ``t`` is only compared with; ``w`` counts."""
    return read_program("""
        x[?, 2], w[2], u[2], t[2]
        a/scaled = Mul(x, w)
        a/shifted = AddV2(x, u)
        a/stopped = StopGradient(a/shifted)
        b/larger = Greater(a/scaled, t)
        b/chosen = SelectV2(b/larger, a/scaled, a/stopped)
        loss = L2Loss(b/chosen)
    """)


def test_parameters_without_a_gradient_are_absent() -> None:
    program = backward(unused_and_stopped(), "a")
    assert [gradients_given(stage) for stage in program.stages] == [["w"], ["a/scaled"]]
    assert [stage.reads for stage in program.stages] == [("w", "u"), ("t",)]


def test_a_gradient_arrives_only_where_a_later_stage_computes_one() -> None:
    program = backward(unused_and_stopped(), "a")
    assert [str(boundary.ref) for boundary in program.boundaries] == ["a/scaled", "a/stopped"]
    assert gradients_taken(program.stages[0]) == ["a/scaled"]


def test_a_differentiable_tensor_whose_reader_does_not_differentiate_it_has_no_gradient_either() -> None:
    program = read_program("""
        x[?, 2], w[2], v[2]
        a/scaled = Mul(x, w)
        b/sign = StopGradient(a/scaled)
        b/product = Mul(b/sign, v)
        loss = L2Loss(b/product)
    """)
    program = backward(program, "a")
    assert program.boundaries[0].differentiable
    assert [gradients_taken(stage) for stage in program.stages] == [[], ["loss"]]
    assert [gradients_given(stage) for stage in program.stages] == [[], ["v"]]


def test_a_tensor_that_skips_stages_takes_the_gradient_of_all_its_readers() -> None:
    x = keras.Input((2,), name="x", dtype="float64")
    a = dense("a")(x)
    y = keras.layers.Add(name="add", dtype="float64")([a, dense("c")(dense("b")(a))])
    program = captured(compiled(x, y), np.zeros((4, 2)), np.zeros((4, 3)))
    program = backward(program, "a", "b")
    skipped = str(program.boundaries[0].ref)
    assert program.boundaries[0].consumers == (1, 2)
    assert gradients_taken(program.stages[0]) == [skipped]
    assert [skipped in gradients_given(stage) for stage in program.stages[1:]] == [True, True]


def test_a_stage_without_parameters_passes_gradients_on() -> None:
    program = read_program("""
        x[?, 2], w[2], v[2]
        a/scaled = Mul(x, w)
        b/tanh = Tanh(a/scaled)
        c/scaled = Mul(b/tanh, v)
        loss = L2Loss(c/scaled)
    """)
    program = backward(program, "a", "b")
    assert [gradients_given(stage) for stage in program.stages] == [["w"], ["a/scaled"], ["b/tanh", "v"]]


def test_a_first_stage_without_parameters_takes_and_gives_no_gradient() -> None:
    program = read_program("x[?, 2], v[2]\na/tanh = Tanh(x)\nb/scaled = Mul(a/tanh, v)\nloss = L2Loss(b/scaled)")
    first, last = backward(program, "a").stages
    assert (gradients_taken(first), gradients_given(first)) == ([], [])
    assert (gradients_taken(last), gradients_given(last)) == (["loss"], ["v"])


# ---- rows of embeddings


def test_a_parameter_that_is_only_gathered_from_keeps_its_gradient_as_rows() -> None:
    first, last = backward(embedding(tied=False), "a").stages
    kinds = [value.kind for value in first.results if value.ref == Ref("table")]
    assert kinds == [ValueKind.SLICE_VALUES, ValueKind.SLICE_INDICES]
    assert gradients_given(last) == ["a/rows", "v"]


def rows_of(looked_up: str) -> tuple[Stage, list[ValueKind]]:
    first, *_ = backward(embedding(tied=False, looked_up=looked_up), "a").stages
    return first, [value.kind for value in first.results if value.ref == Ref("table")]


def test_rows_of_constants_are_the_same_in_all_slices_and_results_of_their_own() -> None:
    shared = [ValueKind.SHARED_VALUES, ValueKind.SHARED_INDICES]
    assert rows_of("constants")[1] == shared
    stage, kinds = rows_of("both")
    assert kinds == [ValueKind.SLICE_VALUES, ValueKind.SLICE_INDICES, *shared]
    assert not stage.undecided_rows
    assert stage.graph is not None
    tokens, table, v = np.array([2, 0]), np.arange(8.0).reshape(4, 2), np.ones((2, 4))
    known = {Ref("tokens"): tokens, Ref("table"): table, Ref("v"): v}
    places = [stage.results[Value(Ref("table"), kind)] for kind in kinds]
    given = {ref: np.ones((1, 2)) for value, ref in stage.arguments.items() if value.kind is GRADIENT}
    given |= {stage.arguments[Value(ref)]: value for ref, value in known.items() if Value(ref) in stage.arguments}
    _, own, _, shared_indices = run(stage.graph, places, given)
    assert list(own) == [2, 0]
    assert list(shared_indices) == [1, 1, 3]


def test_a_parameter_that_another_stage_uses_whole_has_whole_gradients_everywhere() -> None:
    first, last = backward(embedding(tied=True), "a").stages
    assert gradients_given(first) == ["table"]
    assert gradients_given(last) == ["a/rows", "table"]
    assert all(value.kind in (ValueKind.GRADIENT, ValueKind.FORWARD) for value in (*first.results, *last.results))


# ---- numbers


def test_a_weight_that_is_used_twice_in_a_stage_has_one_gradient_the_sum_of_both() -> None:
    program = backward(tied_layers(2))
    assert meanings(program.stages[0].results) == ["loss", str(Value(Ref("w"), GRADIENT))]
    known = random_values(tied_layers(2), (5, 2))
    x, w = known[Ref("x")], known[Ref("w")]
    h = np.tanh(x @ w)
    y = np.tanh(h @ w)
    dy = y * (1 - y**2)
    dh = dy @ w.T * (1 - h**2)
    both = x.T @ dh, h.T @ dy
    (gradient,) = pipelined_gradients(program, known).values()
    np.testing.assert_allclose(gradient, both[0] + both[1], rtol=1e-13)
    assert all(np.abs(part).min() > 0 for part in both)


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(), ("norm",), ("embed", "residual"), ("norm", "attention", "wide")])
def test_stage_by_stage_gradients_are_those_of_the_whole(cuts: tuple[str, ...]) -> None:
    known = random_values(attention(), (4, 3, 2), (4, 3, 1))
    expected = whole_gradients(attention(), known)
    got = pipelined_gradients(backward(attention(), *cuts), known)
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-11, atol=1e-12, err_msg=name)
    assert sum(np.abs(gradient).max() > 1e-6 for gradient in got.values()) >= len(got) - 1  # a key's bias has none


@pytest.mark.parametrize("kind", ["time_major", "merged", "scalar"])
def test_gradients_flow_through_tensors_of_every_layout(kind: str) -> None:
    known = random_values(sent(kind), (4, 3))
    expected = whole_gradients(sent(kind), known)
    got = pipelined_gradients(backward(sent(kind), "a"), known)
    assert set(got) == {"w", "v"}
    for name, gradient in got.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-13)
        assert np.abs(gradient).min() > 0


def test_gradients_are_added_in_the_order_in_which_a_tape_adds_them() -> None:
    """What stops gradients made others wait for it, so that sums had another order, and XLA repeated them."""

    def normalized(x: tf.Tensor) -> tf.Tensor:
        mean = tf.reduce_mean(x, -1, keepdims=True)
        spread = tf.reduce_mean(tf.math.squared_difference(x, tf.stop_gradient(mean)), -1, keepdims=True)
        scale = tf.math.rsqrt(spread + 1e-3)
        return tf.tanh(x * scale - mean * scale)

    def sums(graph: tf.Graph) -> list[list[str]]:
        ops = {op.name: op for op in graph.get_operations()}
        return [[i.op.type for i in op.inputs] for op in ops.values() if op.type == "AddN" and len(op.inputs) > 2]

    with tf.Graph().as_default() as taped:
        x = tf.compat.v1.placeholder(tf.float64, (4, 3), name="x")
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = normalized(x)
        tape.gradient(y, x)
    with tf.Graph().as_default() as flat:
        x = tf.compat.v1.placeholder(tf.float64, (4, 3), name="x")
        y = normalized(x)
        dy = tf.compat.v1.placeholder(tf.float64, (4, 3), name="dy")
    extended, (gradient,) = add_gradients(flat.as_graph_def(), [(Ref(y.op.name), Ref(dy.op.name))], [Ref(x.op.name)])
    assert gradient is not None
    with tf.Graph().as_default() as imported:
        tf.graph_util.import_graph_def(extended, name="")
    assert len(sums(taped)) == 1 and sums(imported) == sums(taped)
    # What stopped gradients reads what it read.
    before, after = (
        [list(each.input) for each in graph.node if each.op == "StopGradient"]
        for graph in (flat.as_graph_def(), extended)
    )
    assert before == after and len(after) == 1
    assert not [n.name for n in extended.node if n.op == "Placeholder" and n.name not in ("x", "dy")]
    value, given = np.random.default_rng(0).normal(size=(2, 4, 3))
    (computed,) = run(extended, [gradient.dense], {Ref("x"): value, Ref("dy"): given})
    with tf.GradientTape() as tape:
        tensor = tf.constant(value)
        tape.watch(tensor)
        y = normalized(tensor)
    np.testing.assert_allclose(computed, tape.gradient(y, tensor, given), rtol=1e-13)


def test_a_tied_weights_gradients_of_several_stages_add_up_to_that_of_the_whole() -> None:
    known = random_values(tied_layers(3), (5, 2))
    expected = whole_gradients(tied_layers(3), known)
    program = backward(tied_layers(3), "layer_0", "layer_1")
    assert ["w" in gradients_given(stage) for stage in program.stages] == [True] * 3
    np.testing.assert_allclose(pipelined_gradients(program, known)["w"], expected["w"], rtol=1e-12)


def test_the_same_order_of_nodes_comes_out_every_time() -> None:
    first, again = (backward(attention(), "norm") for _ in range(2))
    assert stages_text(first) == stages_text(again)
