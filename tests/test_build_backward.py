"""Pass 3: the backward graph of each stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf
from program_text import read_program
from programs import GRADIENT, apply, embedding, show_changes, stateful_layers, two_layers

from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Program, Stage, ValueKind
from graph_passes.ir.tensorflow_bridge import add_gradients
from graph_passes.ir.text import stages_text
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward


def backward(program: Program, *cuts: str) -> Program:
    return apply(program, AssignStages(cuts), BuildForward(), BuildBackward())


def gradients_taken(stage: Stage) -> list[str]:
    return [str(value.ref) for value in stage.arguments if value.kind is GRADIENT]


def gradients_given(stage: Stage) -> list[str]:
    return [str(value.ref) for value in stage.results if value.kind is GRADIENT]


# ---- structure


def test_what_is_added_to_the_graph_of_each_stage(golden: Callable[[str, str], None]) -> None:
    before = apply(two_layers(), AssignStages(("a",)), BuildForward())
    after = apply(before, BuildBackward())
    text = ""
    for old, new in zip(before.stages, after.stages, strict=True):
        changes = show_changes(*(stages_text(before.replace(stages=(stage,))) for stage in (old, new)))
        text += f"stage {new.index}\n{changes}"
    golden("build_backward.txt", text)


STOPPED = """
    x[?, 2], w[2], u[2], t[2]
    a/scaled = Mul(x, w)
    a/shifted = AddV2(x, u)
    a/stopped = StopGradient(a/shifted)
    b/larger = Greater(a/scaled, t)
    b/chosen = SelectV2(b/larger, a/scaled, a/stopped)
    loss = L2Loss(b/chosen)
"""
UNREAD = """
    x[?, 2], w[2], v[2]
    a/scaled = Mul(x, w)
    b/sign = StopGradient(a/scaled)
    b/product = Mul(b/sign, v)
    loss = L2Loss(b/product)
"""
SKIPPING = """
    x[?, 2], w[2], v[2]
    a/scaled = Mul(x, w)
    b/tanh = Tanh(a/scaled)
    c/scaled = Mul(b/tanh, v)
    c/sum = AddV2(c/scaled, a/scaled)
    loss = L2Loss(c/sum)
"""
FIRST_WITHOUT = "x[?, 2], v[2]\na/tanh = Tanh(x)\nb/scaled = Mul(a/tanh, v)\nloss = L2Loss(b/scaled)"


@pytest.mark.parametrize(
    ("text", "taken", "given"),
    [
        pytest.param("", ["a/matmul", "loss"], ["w", "a/matmul v"], id="inputs, state and metrics have none"),
        pytest.param(STOPPED, ["a/scaled", "loss"], ["w", "a/scaled"], id="what is stopped or compared has none"),
        pytest.param(UNREAD, ["", "loss"], ["", "v"], id="its reader doesn't differentiate it"),
        pytest.param(
            SKIPPING,
            ["a/scaled", "b/tanh", "loss"],
            ["w", "a/scaled", "a/scaled b/tanh v"],
            id="all readers give one, stages without parameters pass it on",
        ),
        pytest.param(FIRST_WITHOUT, ["", "loss"], ["", "v"], id="a first stage without parameters"),
    ],
)
def test_gradients_are_taken_and_given_where_they_exist(text: str, taken: list[str], given: list[str]) -> None:
    program = read_program(text) if text else stateful_layers()
    stages = backward(program, *"ab"[: len(taken) - 1]).stages
    assert [" ".join(gradients_taken(stage)) for stage in stages] == taken
    assert [" ".join(sorted(gradients_given(stage))) for stage in stages] == given


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


def test_a_parameter_that_another_stage_uses_whole_has_whole_gradients_everywhere() -> None:
    first, last = backward(embedding(tied=True), "a").stages
    assert gradients_given(first) == ["table"]
    assert gradients_given(last) == ["a/rows", "table"]
    assert all(value.kind in (ValueKind.GRADIENT, ValueKind.FORWARD) for value in (*first.results, *last.results))


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
    extended, _ = add_gradients(flat.as_graph_def(), [(Ref(y.op.name), Ref(dy.op.name))], [Ref(x.op.name)])
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
