"""Pass 1: which stage each node belongs to, and what crosses the cuts."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from program_text import read_program
from programs import (
    DOUBLE,
    STATE,
    apply,
    captured,
    compiled,
    crossing,
    dense,
    mlp,
    run,
    sent,
    staged,
    two_layers,
    unchanged,
)

from dapple_tf.frontend.batch import declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis import slice_shapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.program import Boundary, LayerCall, Program
from graph_passes.ir.text import graph_text, stages_text
from graph_passes.passes.assign_stages import AssignStages


def assign(program: Program, *cuts: str) -> Program:
    return apply(program, AssignStages(cuts))


def only_boundary(program: Program) -> Boundary:
    (boundary,) = program.boundaries
    return boundary


def stage_of_op(program: Program, op: str) -> set[int | None]:
    """The stages of all nodes of an op; None for those without a stage."""
    return {program.node_stage.get(node.name) for node in program.graph.node if node.op == op}


# ---- structure


def test_a_flat_program_before_and_after(golden: Callable[[str, str], None]) -> None:
    before = two_layers()
    after = assign(before, "a")
    golden(
        "assign_stages.txt",
        f"before\n\n{graph_text(before.graph)}\nafter\n\n{graph_text(after.graph)}\n{stages_text(after)}",
    )


GRAPHS = {
    "branches": """
        x[?, 2], w[2, 2], l[2, 2], r[2, 2]
        a/made = MatMul(x, w)
        left/made = MatMul(a/made, l)
        right/made = MatMul(a/made, r)
        add/sum = AddV2(left/made, right/made)
        head/made = Tanh(add/sum)
        loss = L2Loss(head/made)
    """,
    "skip": """
        x[?, 2], u[2], v[2], w[2]
        a/made = Mul(x, u)
        b/made = Mul(a/made, v)
        c/made = Mul(b/made, w)
        d/sum = AddV2(a/made, c/made)
        loss = L2Loss(d/sum)
    """,
    "nested": """
        x[?, 2], u[2], v[2], w[2]
        stem/made = Mul(x, u)
        block/first/made = Mul(stem/made, v)
        block/second/made = Mul(block/first/made, w)
        head/made = Tanh(block/second/made)
        loss = L2Loss(head/made)
    """,
}


@pytest.mark.parametrize(
    ("graph", "cuts", "sent"),
    [
        # Both what is done and what the other branch needs; then only the branches' ends.
        ("branches", ["left"], [("a/made", 0, (1,)), ("left/made", 0, (1,))]),
        ("branches", ["right"], [("left/made", 0, (1,)), ("right/made", 0, (1,))]),
        ("branches", ["add"], [("add/sum", 0, (1,))]),
        # From its producer to each reader directly.
        ("skip", ["a", "b", "c"], [("a/made", 0, (1, 3)), ("b/made", 1, (2,)), ("c/made", 2, (3,))]),
        ("nested", ["block/first"], [("block/first/made", 0, (1,))]),
        ("nested", ["first"], [("block/first/made", 0, (1,))]),
        ("nested", ["block"], [("block/second/made", 0, (1,))]),
    ],
)
def test_tensors_cross_from_their_producer_to_each_stage_that_reads_them(
    graph: str, cuts: list[str], sent: list[tuple[str, int, tuple[int, ...]]]
) -> None:
    assert crossing(assign(read_program(GRAPHS[graph]), *cuts)) == sent


@functools.cache
def tied() -> Program:
    """The layer ``shared`` is called before and behind the layer ``middle``."""
    x = keras.Input((3,), name="x", dtype="float64")
    shared = dense("shared")
    y = shared(dense("middle")(shared(x)))
    return captured(compiled(x, dense("head", 1)(y)), np.zeros((4, 3)), np.zeros((4, 1)))


# ---- what belongs to no stage


def test_masks_and_what_depends_on_labels_alone_are_computed_in_each_stage_that_reads_them() -> None:
    program = read_program("""
        tokens int32[?], y[?, 2], table[4, 2], v[2, 2]
        a/mask = NotEqual(tokens, 0)
        a/rows = GatherV2(table, tokens, 0)
        b/made = MatMul(a/rows, v)
        c/mask = Cast(a/mask, DstT=float64)
        c/column = ExpandDims(c/mask, 1)
        c/masked = Mul(b/made, c/column)
        labels = Square(y)
        difference = Sub(c/masked, labels)
        loss = L2Loss(difference)
    """)
    assigned = assign(program, "a", "b")
    assert not {"a/mask", "labels"} & assigned.node_stage.keys()
    assert [str(boundary.ref) for boundary in assigned.boundaries] == ["a/rows", "b/made"]
    arguments = [{str(value.ref) for value in stage.arguments} for stage in staged(program, "a", "b").stages]
    assert ["tokens" in own for own in arguments] == [True, False, True]


def test_a_random_seed_is_read_where_numbers_are_drawn_and_does_not_cross_the_cut() -> None:
    """Dropout behind the first cut was refused: its seed, made before the first layer, counted as stage 0's."""
    x = keras.Input((2,), name="x", dtype="float64")
    drop = keras.layers.Dropout(0.5, name="drop", dtype="float64", seed=1)
    h = dense("b")(drop(dense("a")(x)))
    program = captured(compiled(x, dense("c", 1)(drop(h))), np.zeros((4, 2)), np.zeros((4, 1)))
    (seed,) = [name for name, v in program.variables.items() if v.kind is STATE]
    for cuts, readers in ((("a",), [1]), (("a", "b"), [1, 2]), (("drop#0",), [0, 1]), (("drop#1",), [0, 1])):
        assigned = assign(program, *cuts)
        assert [stage.index for stage in assigned.stages if seed in stage.reads] == readers
        assert [boundary.dtype for boundary in assigned.boundaries] == [DOUBLE] * len(cuts)
        assert [boundary.shape for boundary in assigned.boundaries] == [(None, 3)] * len(cuts)


@pytest.mark.parametrize(
    ("drawn", "shape", "whole"),
    [
        ("StatelessRandomUniformInt(a/shape, a/seed, 0, 9)", (None, 4), False),
        ("StatelessRandomUniformInt(a/shape, [1, 2], 0, 9)", (None, 4), False),
        ("RandomUniformInt(a/shape, 0, 9)", (None, 4), False),
        ("RandomUniformInt([4], 0, 9)", (4,), True),
    ],
    ids=["seeds of slices", "one seed", "stateful", "stateful for a slice"],
)
def test_integers_that_stages_would_draw_differently_are_drawn_in_one(
    drawn: str, shape: tuple[int | None, ...], whole: bool
) -> None:
    """Each stage drew its own: the mask of an autoencoder, say, or one shift for a batch, undone in a later stage."""
    program = read_program(f"""
        x[?, 4], w[4]
        a/shape = Shape(x)
        a/seed = Pack(number, 1)
        a/drawn = {drawn}
        a/scaled = Mul(x, w)
        b/cast = Cast(a/drawn, DstT=float64)
        b/sum = AddV2(a/scaled, b/cast)
        loss = L2Loss(b/sum)
    """)
    integers, _ = assign(program, "a").boundaries
    assert (str(integers.ref), integers.producer, integers.consumers) == ("a/drawn", 0, (1,))
    assert (integers.shape, integers.whole) == (shape, whole)


def test_a_regularizer_is_computed_in_the_stage_of_its_weight() -> None:
    program = read_program("""
        x[?, 2], w[2], v[2]
        a/scaled = Mul(x, w)
        b/scaled = Mul(a/scaled, v)
        penalty_w = L2Loss(w)
        penalty_v = L2Loss(v)
        error = L2Loss(b/scaled)
        loss = AddN(error, penalty_w, penalty_v)
    """)
    program = assign(program, "a")
    assert [program.node_stage[name] for name in ("penalty_w", "penalty_v", "loss")] == [0, 1, 1]
    activation, term = program.boundaries
    assert activation.batch_axis == 0
    assert (term.batch_axis, term.rows_per_sample, term.shape, term.differentiable) == (None, None, (), True)


# ---- the batch axis


@pytest.mark.parametrize(
    ("kind", "axis", "rows", "shape"),
    [
        ("rows", 0, 1, (None, 2)),
        ("time_major", 1, 1, (3, None)),
        ("merged", 0, 3, (None,)),
        ("merged_unknown", 0, None, (None,)),
        ("scalar", None, None, ()),
    ],
)
def test_the_batch_axis_and_its_rows_per_sample_are_found(
    kind: str, axis: int | None, rows: int | None, shape: tuple[int | None, ...]
) -> None:
    boundary = only_boundary(assign(sent(kind), "a"))
    assert (boundary.batch_axis, boundary.rows_per_sample, boundary.shape) == (axis, rows, shape)
    assert (boundary.producer, boundary.consumers, boundary.dtype, boundary.differentiable) == (0, (1,), DOUBLE, True)


@pytest.mark.parametrize(
    ("lines", "differentiable"),
    [
        ("a/plain = Square(x)\nb/sum = AddN(a/plain, a/scaled)", {"a/plain": False, "a/scaled": True}),
        ("a/stopped = StopGradient(a/scaled)\nb/sum = Tanh(a/stopped)", {"a/stopped": False}),
        (
            "a/complex = Complex(a/scaled, a/scaled, Tout=complex128)\nb/sum = ComplexAbs(a/complex, Tout=float64)",
            {"a/complex": True},
        ),
    ],
)
def test_gradients_flow_through_what_parameters_have_made_unless_it_is_stopped(
    lines: str, differentiable: dict[str, bool]
) -> None:
    program = assign(read_program(f"x[?, 2], w[2]\na/scaled = Mul(x, w)\n{lines}\nloss = L2Loss(b/sum)"), "a")
    assert {str(each.ref): each.differentiable for each in program.boundaries} == differentiable


def test_the_batch_behind_a_loop_is_told_without_running_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2 LSTMs of 2048 units and 32000 words, three runs on random parameters took 25 s and 1.4 GB."""
    monkeypatch.setattr(slice_shapes, "measure_shapes", lambda *_: pytest.fail("the model was run"))
    x = keras.Input((None,), name="x", dtype="int32")
    h = keras.layers.Embedding(5, 2, mask_zero=True, name="embedding", dtype="float64")(x)
    h = keras.layers.LSTM(3, return_sequences=True, name="first", dtype="float64")(h)
    h = keras.layers.LSTM(3, name="second", dtype="float64")(h)
    model = compiled(x, dense("head", 1)(h))
    spec = declared_spec(model)
    assert spec is not None
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    boundaries = assign(program, "first", "second").boundaries
    layouts = [(each.batch_axis, each.rows_per_sample, each.shape) for each in boundaries]
    assert layouts == [(0, 1, (None, None, 3)), (0, 1, (None, 3))]


@pytest.mark.parametrize("width", [2, None])
def test_a_model_is_run_once_for_each_number_of_samples(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only values tell how many rows are positive: all are handed on; lengths aren't made up for another run."""
    program = read_program(f"""
        x[?, {width or "?"}], w[1]
        a/scaled = Mul(x, w)
        a/sum = Sum(a/scaled, [1])
        a/zero = ZerosLike(a/sum)
        a/positive = Greater(a/sum, a/zero)
        a/where = Where(a/positive)
        a/sent = Cast(a/where, DstT=float64)
        b/squared = Square(a/sent)
        loss = L2Loss(b/squared)
    """)
    sample_counts = []
    measure = slice_shapes.measure_shapes

    def counted(graph: GraphDef, inputs: dict[str, list[int]], *rest: Any) -> Any:
        sample_counts.append(inputs["x"][0])
        return measure(graph, inputs, *rest)

    monkeypatch.setattr(slice_shapes, "measure_shapes", counted)
    program = AssignStages(("a",)).run(program)
    boundary = only_boundary(program)
    assert (boundary.batch_axis, boundary.shape, boundary.whole) == (None, (None, 1), True)
    assert sample_counts == [7, 11]


# ---- shapes that are read far behind


def reads_shape_later(*, merged: bool = False, length: int | None = 3, layer: str = "a") -> Program:
    """Stage 1 restores the shape, which ``layer`` asks for, that the tensor had before stage 0 flattened it."""
    h = "a/merged" if merged else "a/scaled"
    return read_program(f"""
        x[?, {length or "?"}], w[1], v[1]
        a/scaled = Mul(x, w)
        {"a/merged = Reshape(a/scaled, [-1])" if merged else ""}
        a/flat = Reshape({h}, [-1])
        {layer}/shape = Shape({h})
        b/restored = Reshape(a/flat, {layer}/shape)
        b/scaled = Mul(b/restored, v)
        loss = L2Loss(b/scaled)
    """)


@pytest.mark.parametrize("layer", "ab")
@pytest.mark.parametrize(
    ("merged", "length", "sent", "shape"),
    [
        (False, 3, "", [3, 3]),
        (True, 3, "", [9]),
        # Lengths are the same in all slices; the batch's axis is of the slice of the stage that reads it.
        (False, None, "lengths", [3, 4]),
        (True, None, "rows", [12]),
    ],
)
def test_the_shape_of_an_earlier_stages_tensor_is_computed_from_the_stages_own_slice(
    layer: str, merged: bool, length: int | None, sent: str, shape: list[int]
) -> None:
    program = reads_shape_later(merged=merged, length=length, layer=layer)
    assert stage_of_op(assign(program), "Shape") == {0}, "one stage alone reads it"
    program = assign(program, "a")
    name, crossing = f"{layer}/shape", {str(boundary.ref) for boundary in program.boundaries}
    assert crossing == {"a/flat", *([f"{name}/{sent}"] if sent else [])}
    assert name not in program.node_stage and all(program.node_stage[each] == 0 for each in crossing)
    made = 3 if sent == "rows" else 5  # Rows per sample are those of the producer's slice.
    known = {Ref("samples"): 3, Ref("x"): np.ones((made, length or 4)), Ref("w"): np.ones(1)}
    assert list(run(program.graph, [Ref(name)], known)[0]) == shape


# ---- cuts that are refused


def through(kind: str) -> Program:
    """A program whose layer ``a`` makes a tensor that can't be cut into slices."""
    made, read = {
        "coupled": ("a/sent = MatMul(a/scaled, a/scaled, transpose_b=True)", "a/sent"),
        "unknown_axis": (  # as many as the data have
            """a/flat = Reshape(a/scaled, [-1])
            a/round = Round(a/flat)
            a/unique = Unique(a/round)
            a/sent = ExpandDims(a/unique, 0)""",
            "a/sent",
        ),
        "integer": (
            """a/sum = Sum(a/scaled, [0, 1])
            a/size = Cast(a/sum, DstT=int32)
            b/back = Cast(a/size, DstT=float64)""",
            "b/back",
        ),
        "unknown_rank": ("a/dims = Unique(dims)\na/sent = Reshape(a/scaled, a/dims)", "a/sent"),
        "variant": (
            """a/list = TensorListFromTensor(a/scaled, [2])
            b/stack = TensorListStack(a/list, [2], element_dtype=float64)""",
            "b/stack",
        ),
    }[kind]
    text = f"x[?, {'?' if kind == 'unknown_axis' else '2'}], w[1], v[1], dims int32[2]\na/scaled = Mul(x, w)\n{made}"
    return read_program(f"{text}\nb/scaled = Mul({read}, v)\nloss = L2Loss(b/scaled)", states={"dims": None})


def nothing() -> Program:
    """A model whose first layer has no nodes."""
    roles = mlp().roles
    return mlp().replace(roles=dataclasses.replace(roles, calls=(LayerCall("nothing", 0, 0), *roles.calls)))


CROSSES = "of layer 'a', which crosses the cut after 'a',"


@pytest.mark.parametrize(
    ("program", "cuts", "text"),
    [
        (
            mlp,
            "dense_9",
            "cut 'dense_9' names no layer of the model; did you mean one of 'dense_2', 'dense_1', 'dense_0'",
        ),
        (
            mlp,
            "dense_1 dense_0",
            "stage 1 of 3 without a layer: it starts after 'dense_1' and ends after 'dense_0'; name",
        ),
        (
            mlp,
            "dense_2",
            "stage 1 of 2 without a layer: it starts after 'dense_2' and ends at the model's output; name",
        ),
        (
            nothing,
            "nothing",
            "stage 0 of 2 without a layer: it starts at the model's input and ends after 'nothing'; name",
        ),
        (
            tied,
            "shared",
            "is called 2 times; write 'shared#0' to cut after its first call, up to 'shared#1' for the last",
        ),
        (tied, "shared#2", "asks for call '2' of layer 'shared', which is called 2 times: use a number from 0 to 1"),
        (tied, "shared#first", "asks for call 'first' of layer 'shared', which is called 2 times"),
        (
            lambda: through("coupled"),
            "a",
            f"a/sent {CROSSES} has shape (?, ?) with the batch in axes [0, 1]: it couples samples; cut elsewhere",
        ),
        (lambda: through("unknown_rank"), "a", f"a/sent {CROSSES} has no known rank; cut elsewhere"),
        (
            lambda: through("variant"),
            "a",
            f"a/list {CROSSES} is a variant (the inside of a loop, say) and can't be sent",
        ),
    ],
)
def test_a_wrong_cut_is_refused_with_the_fix(program: Callable[[], Program], cuts: str, text: str) -> None:
    with unchanged(made := program()), pytest.raises(PassError, match=re.escape(text)):
        AssignStages(tuple(cuts.split())).run(made)


@pytest.mark.parametrize(("kind", "shape"), [("unknown_axis", (1, None)), ("integer", ())])
def test_what_samples_decide_together_is_handed_on_whole(kind: str, shape: tuple[int | None, ...]) -> None:
    boundary = only_boundary(assign(through(kind), "a"))
    assert (boundary.batch_axis, boundary.shape, boundary.example_shape) == (None, shape, shape)
    assert boundary.own_lengths and boundary.whole
