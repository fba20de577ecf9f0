"""Pass 1: which stage each node belongs to, and what crosses the cuts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from program_text import read_program
from programs import (
    DOUBLE,
    INT32,
    METRIC,
    STATE,
    apply,
    captured,
    compiled,
    copied,
    crossing,
    dense,
    in_float64,
    layers_by_stage,
    mlp,
    run,
    sent,
    staged,
    stateful_layers,
    two_layers,
)

from dapple_tf.frontend.batch import declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis import slice_shapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, Ref
from graph_passes.ir.outline import layer_of
from graph_passes.ir.program import Boundary, LayerCall, Program
from graph_passes.ir.text import graph_text, stages_text
from graph_passes.passes.assign_stages import AssignStages, find_call


def assign(program: Program, *cuts: str) -> Program:
    return apply(program, AssignStages(cuts))


def refused(program: Program, *cuts: str) -> str:
    """The text with which cuts are refused; the program stays as it is."""
    before = copied(program)
    with pytest.raises(PassError) as caught:
        AssignStages(cuts).run(program)
    assert program == before
    return str(caught.value)


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


@pytest.mark.slow
def test_without_cuts_all_nodes_are_in_one_stage_and_nothing_crosses() -> None:
    program = assign(mlp())
    assert layers_by_stage(program) == {0: ["dense_0", "dense_1", "dense_2"]}
    assert program.boundaries == ()
    assert [stage.index for stage in program.stages] == [0]


def test_a_chain_is_cut_behind_the_named_layers() -> None:
    program = assign(mlp(), "dense_0", "dense_1")
    assert layers_by_stage(program) == {0: ["dense_0"], 1: ["dense_1"], 2: ["dense_2"]}
    assert [(producer, consumers) for _, producer, consumers in crossing(program)] == [(0, (1,)), (1, (2,))]
    assert [stage.reads for stage in program.stages] == [
        tuple(f"dense_{index}/{part}" for part in ("kernel", "bias")) for index in range(3)
    ]


def test_the_loss_and_its_metrics_are_computed_behind_the_last_layer() -> None:
    program = assign(mlp(), "dense_0")
    assert program.roles.loss is not None
    assert program.node_stage[program.roles.loss.node] == 1
    updates = [v.update for v in program.roles.variables if v.kind is METRIC]
    assert [program.node_stage[ref.node] for ref in updates if ref is not None] == [1, 1]


def test_metric_values_belong_to_no_stage() -> None:
    program = assign(mlp())
    assert [name for name in program.variables if "metric" in name]
    assert all("metric" not in name for name in program.stages[0].reads)


@functools.cache
def branches() -> Program:
    x = keras.Input((2,), name="x", dtype="float64")
    a = dense("a")(x)
    added = keras.layers.Add(name="add", dtype="float64")([dense("left")(a), dense("right")(a)])
    return captured(compiled(x, dense("head", 1)(added)), np.zeros((4, 2)), np.zeros((4, 1)))


def test_a_cut_within_parallel_branches_sends_both_what_is_done_and_what_the_other_branch_needs() -> None:
    program = assign(branches(), "left")
    assert layers_by_stage(program) == {0: ["a", "left"], 1: ["right", "add", "head"]}
    sizes = [(boundary.shape, boundary.consumers) for boundary in program.boundaries]
    assert sizes == [((None, 3), (1,))] * 2


def test_a_cut_behind_both_branches_sends_their_ends_only() -> None:
    program = assign(branches(), "right")
    layers = [layer_of(Graph(program.graph), boundary.ref) for boundary in program.boundaries]
    assert layers == ["left", "right"]
    assert len(assign(branches(), "add").boundaries) == 1


@functools.cache
def skipping() -> Program:
    """a -> b -> c -> d, and what ``a`` makes is added to what ``d`` makes."""
    x = keras.Input((2,), name="x", dtype="float64")
    a = dense("a")(x)
    d = dense("d")(dense("c")(dense("b")(a)))
    added = keras.layers.Add(name="add", dtype="float64")([a, d])
    return captured(compiled(x, dense("head", 1)(added)), np.zeros((4, 2)), np.zeros((4, 1)))


def test_a_skip_over_several_stages_goes_from_its_producer_to_each_reader_directly() -> None:
    program = assign(skipping(), "a", "b", "c", "d")
    by_layer = {layer_of(Graph(program.graph), boundary.ref): boundary for boundary in program.boundaries}
    assert {layer: (each.producer, each.consumers) for layer, each in by_layer.items()} == {
        "a": (0, (1, 4)),
        "b": (1, (2,)),
        "c": (2, (3,)),
        "d": (3, (4,)),
    }


@functools.cache
def tied() -> Program:
    """The layer ``shared`` is called before and behind the layer ``middle``."""
    x = keras.Input((3,), name="x", dtype="float64")
    shared = dense("shared")
    y = shared(dense("middle")(shared(x)))
    return captured(compiled(x, dense("head", 1)(y)), np.zeros((4, 3)), np.zeros((4, 1)))


def test_a_tied_weight_is_read_in_each_stage_that_calls_its_layer() -> None:
    program = assign(tied(), "shared#0", "middle", "shared#1")
    assert layers_by_stage(program) == {0: ["shared"], 1: ["middle"], 2: ["shared"], 3: ["head"]}
    readers = [stage.index for stage in program.stages if "shared/kernel" in stage.reads]
    assert readers == [0, 2]


def test_a_nested_model_can_be_cut_inside_by_path_or_by_a_name_that_is_unique() -> None:
    x = keras.Input((2,), name="x", dtype="float64")
    inner = keras.Input((3,), dtype="float64")
    block = keras.Model(inner, dense("second")(dense("first")(inner)), name="block")
    program = captured(compiled(x, dense("head", 1)(block(dense("stem")(x)))), np.zeros((4, 2)), np.zeros((4, 1)))
    expected = {0: ["stem", "block/first"], 1: ["block/second", "head"]}
    assert layers_by_stage(assign(program, "block/first")) == expected
    assert layers_by_stage(assign(program, "first")) == expected
    assert layers_by_stage(assign(program, "block")) == {0: ["stem", "block/first", "block/second"], 1: ["head"]}


def test_the_stage_of_each_node_is_written_on_it() -> None:
    program = assign(mlp(), "dense_1")
    written = {node.name: node.attr["_dapple_stage"].i for node in program.graph.node if "_dapple_stage" in node.attr}
    assert written == program.node_stage


# ---- what belongs to no stage


@functools.cache
def masked() -> Program:
    """An embedding's mask, which the pooling layer behind a dense one reads."""
    x = keras.Input((4,), name="x", dtype="int32")
    h = keras.layers.Embedding(5, 2, mask_zero=True, name="embedding", dtype="float64")(x)
    h = keras.layers.TimeDistributed(dense("dense", 2), name="each", dtype="float64")(h)
    h = keras.layers.GlobalAveragePooling1D(name="pool", dtype="float64")(h)
    return captured(compiled(x, dense("head", 1)(h)), np.zeros((4, 4), "int32"), np.zeros((4, 1)))


def test_a_mask_of_the_inputs_is_computed_in_each_stage_that_reads_it() -> None:
    program = assign(masked(), "embedding", "each")
    assert stage_of_op(program, "NotEqual") == {None}
    assert all(boundary.dtype == DOUBLE for boundary in program.boundaries)
    built = staged(masked(), "embedding", "each")
    (x, _) = program.roles.inputs
    assert [x in {value.ref for value in stage.arguments} for stage in built.stages] == [True, False, True]


def test_what_depends_on_labels_alone_belongs_to_no_stage() -> None:
    program = assign(masked(), "embedding")
    (_, y) = program.roles.inputs
    graph = Graph(program.graph)
    direct = graph.consumers(y.node)
    alone = [name for name in direct if all(ref in (y,) for ref in graph.inputs(name))]
    assert {program.node_stage.get(name) for name in direct if name not in alone} <= {1}
    assert {program.node_stage.get(name) for name in alone} <= {None}
    assert direct


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


class Draws(keras.layers.Layer):
    """Draws integers for each sample."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        drawn = keras.random.randint((keras.ops.shape(x)[0], 4), 0, 100, seed=self.generator)
        return x + keras.ops.cast(drawn, x.dtype), drawn


def test_integers_that_are_drawn_for_each_sample_are_drawn_in_one_stage() -> None:
    """Each stage drew its own, which differ where stages have other slices: the mask of an autoencoder, say."""
    x = keras.Input((4,), name="x", dtype="float64")
    shifted, drawn = Draws(name="draw", dtype="float64")(x)
    added = keras.layers.Lambda(lambda pair: pair[0] - keras.ops.cast(pair[1], "float64"), name="back", dtype="float64")
    model = compiled(x, added([dense("a", 4)(shifted), drawn]))
    program = assign(captured(model, np.zeros((4, 4)), np.zeros((4, 4))), "a")
    (integers,) = (boundary for boundary in program.boundaries if boundary.dtype == INT32)
    assert (integers.shape, integers.producer, integers.consumers) == ((None, 4), 0, (1,))
    assert stage_of_op(program, "StatelessRandomUniformIntV2") == {0}


def test_integer_state_that_nothing_reads_but_its_own_update_is_stepped_in_the_last_stage() -> None:
    program = assign(stateful_layers(), "a")
    assert [stage.reads for stage in program.stages] == [("w", "average"), ("v", "count")]
    assert program.node_stage["average_update"] == 0
    assert "count_update" not in program.node_stage


@in_float64()
def test_a_regularizer_is_computed_in_the_stage_of_its_weight() -> None:
    x = keras.Input((2,), name="x")
    a = dense("a", kernel_regularizer=keras.regularizers.L2(0.5))(x)
    b = dense("b", 1, kernel_regularizer=keras.regularizers.L2(0.25))(a)
    program = assign(captured(compiled(x, b), np.zeros((4, 2)), np.zeros((4, 1))), "a")
    graph = Graph(program.graph)
    kernels = {v.name: v.value for v in program.roles.variables if v.value is not None and v.name.endswith("kernel")}
    for stage, name in enumerate(("a/kernel", "b/kernel")):
        readers = [graph.nodes[reader].op for reader in graph.consumers(kernels[name].node)]
        assert sorted(readers) == ["MatMul", "Square"]
        assert {program.node_stage[reader] for reader in graph.consumers(kernels[name].node)} == {stage}
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


@pytest.mark.parametrize("permutation", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_the_batch_axis_is_found_wherever_a_keras_layer_moves_it(permutation: tuple[int, ...]) -> None:
    class Move(keras.layers.Layer):
        def call(self, x: object) -> object:
            return keras.ops.transpose(x, permutation)

    class Back(keras.layers.Layer):
        def call(self, x: object) -> object:
            return keras.ops.transpose(x, np.argsort(permutation).tolist())

    x = keras.Input((3, 2), name="x", dtype="float64")
    moved = Move(name="move", dtype="float64")(dense("a", 4)(x))
    y = dense("head", 1)(Back(name="back", dtype="float64")(moved))
    program = assign(captured(compiled(x, y), np.zeros((5, 3, 2)), np.zeros((5, 3, 1))), "move")
    boundary = only_boundary(program)
    assert (boundary.batch_axis, boundary.rows_per_sample) == (permutation.index(0), 1)
    assert tuple(boundary.shape) == tuple((None, 3, 4)[axis] for axis in permutation)


def test_no_gradient_flows_through_what_no_parameter_has_made_or_what_stops_it() -> None:
    program = read_program("""
        x[?, 2], w[2]
        a/plain = Square(x)
        a/scaled = Mul(x, w)
        a/stopped = StopGradient(a/scaled)
        a/sign = Mul(x, w)
        b/sum = AddN(a/plain, a/stopped, a/sign)
        loss = L2Loss(b/sum)
    """)
    program = assign(program, "a")
    assert [(str(each.ref), each.differentiable) for each in program.boundaries] == [
        ("a/plain", False),
        ("a/stopped", False),
        ("a/sign", True),
    ]


def test_gradients_flow_through_complex_numbers() -> None:
    program = read_program("""
        x[?, 2], w[2]
        a/scaled = Mul(x, w)
        a/numbers = Complex(a/scaled, a/scaled, Tout=complex128)
        b/size = ComplexAbs(a/numbers, Tout=float64)
        loss = L2Loss(b/size)
    """)
    program = assign(program, "a")
    assert only_boundary(program).differentiable


@pytest.mark.parametrize("length", [4, None])
def test_the_batch_behind_a_loop_is_told_without_running_the_model(
    length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2 LSTMs of 2048 units and 32000 words, three runs on random parameters took 25 s and 1.4 GB."""
    monkeypatch.setattr(slice_shapes, "measure_shapes", lambda *_: pytest.fail("the model was run"))
    x = keras.Input((length,), name="x", dtype="int32")
    h = keras.layers.Embedding(5, 2, mask_zero=True, name="embedding", dtype="float64")(x)
    h = keras.layers.LSTM(3, return_sequences=True, name="first", dtype="float64")(h)
    h = keras.layers.LSTM(3, name="second", dtype="float64")(h)
    model = compiled(x, dense("head", 1)(h))
    spec = declared_spec(model)
    assert spec is not None
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    boundaries = assign(program, "first", "second").boundaries
    layouts = [(each.batch_axis, each.rows_per_sample, each.shape) for each in boundaries]
    assert layouts == [(0, 1, (None, length, 3)), (0, 1, (None, 3))]


def test_the_shape_of_what_comes_out_of_a_loop_is_computed_from_the_stages_own_slice() -> None:
    class Restore(keras.layers.Layer):
        def call(self, flat: object, like: object) -> object:
            return keras.ops.reshape(flat, keras.ops.shape(like))

    x = keras.Input((4, 2), name="x", dtype="float64")
    out = keras.layers.LSTM(3, return_sequences=True, name="loop", dtype="float64")(x)
    h = dense("behind")(keras.layers.Reshape((12,), name="flat", dtype="float64")(out))
    h = Restore(name="restore", dtype="float64")(dense("wide", 12)(h), out)
    program = captured(compiled(x, dense("head", 1)(h)), np.zeros((5, 4, 2)), np.zeros((5, 4, 1)))
    boundaries = assign(program, "loop", "behind").boundaries
    assert [(each.producer, each.consumers) for each in boundaries] == [(0, (1,)), (1, (2,))]


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


def reads_shape_later(*, merged: bool = False, explicit: bool = True, length: int | None = 3) -> Program:
    """Stage 1 restores the shape that the tensor had before stage 0 flattened it."""
    h = "a/merged" if merged else "a/scaled"
    return read_program(f"""
        x[?, {length or "?"}], w[1], v[1]
        a/scaled = Mul(x, w)
        {"a/merged = Reshape(a/scaled, [-1])" if merged else ""}
        a/shape = Shape({h})
        a/flat = Reshape({h}, [-1])
        b/restored = Reshape(a/flat, a/shape)
        b/scaled = Mul(b/restored, v)
        loss = L2Loss(b/scaled)
    """)


def test_the_shape_of_an_earlier_stages_tensor_is_computed_from_the_stages_own_slice() -> None:
    program = assign(reads_shape_later(), "a")
    assert [str(boundary.ref) for boundary in program.boundaries] == ["a/flat"]
    text = graph_text(program.graph)
    assert "a/shape = AddV2(a/shape/scaled, a/shape/fixed)\n" in text
    assert "a/shape/scaled = Mul(a/shape/rate, samples)\n" in text
    assert "a/shape/rate = Const() [1, 0]\n" in text
    assert "a/shape/fixed = Const() [0, 3]\n" in text
    assert stage_of_op(program, "Shape") == set()
    assert list(run(program.graph, [Ref("a/shape")], {Ref("samples"): 5})[0]) == [5, 3]


def test_several_rows_per_sample_are_counted_in_such_a_shape() -> None:
    program = assign(reads_shape_later(merged=True), "a")
    assert list(run(program.graph, [Ref("a/shape")], {Ref("samples"): 5})[0]) == [15]


def test_a_shape_whose_node_leaves_its_type_out_is_rewritten_too() -> None:
    program = assign(reads_shape_later(explicit=False), "a")
    assert [str(boundary.ref) for boundary in program.boundaries] == ["a/flat"]


def test_of_an_earlier_stages_shape_only_lengths_cross_that_the_model_leaves_open() -> None:
    """The batch's axis is of the slice of the stage that reads it; lengths are the same in all slices."""
    program = assign(reads_shape_later(length=None), "a")
    crossing = {str(each.ref): (each.batch_axis, each.shape) for each in program.boundaries}
    assert crossing == {"a/flat": (0, (None,)), "a/shape/lengths": (None, (2,))}
    text = graph_text(program.graph)
    assert "a/shape/lengths = Mul(a/shape/own, a/shape/of_lengths) in stage 0\n" in text
    assert "a/shape = AddV2(a/shape/sum, a/shape/lengths)\n" in text
    assert "a/shape" not in program.node_stage and program.node_stage["a/shape/own"] == 0
    feeds = {Ref("x"): np.ones((5, 4)), Ref("w"): np.ones(1), Ref("samples"): 3}
    assert list(run(program.graph, [Ref("a/shape")], feeds)[0]) == [3, 4]


def test_of_rows_that_depend_on_open_lengths_those_of_a_sample_cross() -> None:
    program = assign(reads_shape_later(merged=True, length=None), "a")
    assert [str(each.ref) for each in program.boundaries] == ["a/shape/rows", "a/flat"]
    assert "a/shape/rows = FloorDiv(a/shape/merged, samples) in stage 0\n" in graph_text(program.graph)
    stage_0 = {Ref("x"): np.ones((5, 4)), Ref("w"): np.ones(1), Ref("samples"): 5}
    assert list(run(program.graph, [Ref("a/shape")], stage_0)[0]) == [20]


def test_a_shape_that_only_its_own_stage_reads_stays() -> None:
    program = assign(reads_shape_later())
    assert stage_of_op(program, "Shape") == {0}


def test_a_keras_layer_may_use_the_batch_size_of_an_earlier_stages_tensor() -> None:
    class Merge(keras.layers.Layer):
        def call(self, x: object) -> object:
            self.shape = keras.ops.shape(x)
            return keras.ops.reshape(x, (-1, 2))

    class Restore(keras.layers.Layer):
        def call(self, x: object) -> object:
            return keras.ops.reshape(x, merge.shape)

    x = keras.Input((3, 2), name="x", dtype="float64")
    merge = Merge(name="merge", dtype="float64")
    merged = dense("merged", 2)(merge(dense("a", 2)(x)))
    y = dense("head", 1)(Restore(name="restore", dtype="float64")(merged))
    program = assign(captured(compiled(x, y), np.zeros((5, 3, 2)), np.zeros((5, 3, 1))), "merged")
    boundary = only_boundary(program)
    assert (boundary.batch_axis, boundary.rows_per_sample, boundary.shape) == (0, 3, (None, 2))


# ---- cuts that are refused


def test_an_unknown_layer_is_refused_with_close_names() -> None:
    assert refused(mlp(), "dense_9") == (
        "cut 'dense_9' names no layer of the model; did you mean one of 'dense_2', 'dense_1', 'dense_0'?"
    )


def test_an_unknown_layer_without_close_names_is_refused_with_those_there_are() -> None:
    assert refused(mlp(), "xyz") == (
        "cut 'xyz' names no layer of the model; its layers are 'dense_0', 'dense_1', 'dense_2'"
    )


def test_a_name_of_several_layers_is_refused_with_their_paths() -> None:
    calls = [LayerCall("encoder/dense", 0, 2), LayerCall("decoder/dense", 2, 4)]
    with pytest.raises(PassError) as caught:
        find_call("dense", calls)
    assert str(caught.value) == (
        "cut 'dense' could be any of the layers 'decoder/dense', 'encoder/dense'; give the path"
    )
    assert find_call("encoder/dense", calls) == calls[0]


def test_a_layer_that_is_called_twice_needs_the_number_of_the_call() -> None:
    assert refused(tied(), "shared") == (
        "cut 'shared' is ambiguous: the layer is called 2 times; write 'shared#0' to cut after its first call, up to "
        "'shared#1' for the last"
    )


@pytest.mark.parametrize("number", ["2", "first", ""])
def test_a_call_that_there_is_not_is_refused_with_the_numbers_there_are(number: str) -> None:
    assert refused(tied(), f"shared#{number}") == (
        f"cut 'shared#{number}' asks for call '{number}' of layer 'shared', which is called 2 times: use a number from "
        f"0 to 1"
    )


def test_a_layer_that_is_called_once_may_have_a_number_too() -> None:
    assert layers_by_stage(assign(tied(), "middle#0")) == layers_by_stage(assign(tied(), "middle"))


ORDER = (
    "name cuts in the order in which the model calls its layers, none behind its last layer, and give each stage a "
    "layer that computes something in inference, too (dropout doesn't)"
)


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        (
            ("dense_1", "dense_0"),
            f"cuts leave stage 1 of 3 without a layer: it starts after 'dense_1' and ends after 'dense_0'; {ORDER}",
        ),
        (
            ("dense_0", "dense_0"),
            f"cuts leave stage 1 of 3 without a layer: it starts after 'dense_0' and ends after 'dense_0'; {ORDER}",
        ),
        (
            ("dense_2",),
            "cuts leave stage 1 of 2 without a layer: it starts after 'dense_2' and ends at the model's output; "
            f"{ORDER}",
        ),
    ],
)
def test_a_stage_without_layers_is_refused_with_its_ends(cuts: tuple[str, ...], text: str) -> None:
    assert refused(mlp(), *cuts) == text


def test_a_first_stage_without_layers_is_refused() -> None:
    program = mlp()
    nothing = LayerCall("nothing", 0, 0)
    roles = dataclasses.replace(program.roles, calls=(nothing, *program.roles.calls))
    assert refused(program.replace(roles=roles), "nothing") == (
        f"cuts leave stage 0 of 2 without a layer: it starts at the model's input and ends after 'nothing'; {ORDER}"
    )


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


@pytest.mark.parametrize(
    ("kind", "tensor", "text"),
    [
        (
            "coupled",
            "a/sent",
            "has shape (?, ?) with the batch in axes [0, 1]: it couples samples; cut elsewhere",
        ),
        (
            "unknown_rank",
            "a/sent",
            "has no known rank; cut elsewhere",
        ),
        (
            "variant",
            "a/list",
            "is a variant (the inside of a loop, say) and can't be sent between devices; cut before or after that "
            "layer",
        ),
    ],
)
def test_a_cut_through_a_tensor_without_a_usable_batch_axis_is_refused(kind: str, tensor: str, text: str) -> None:
    assert refused(through(kind), "a") == f"tensor {tensor} of layer 'a', which crosses the cut after 'a', {text}"


@pytest.mark.parametrize(("kind", "shape"), [("unknown_axis", (1, None)), ("integer", ())])
def test_what_samples_decide_together_is_handed_on_whole(kind: str, shape: tuple[int | None, ...]) -> None:
    boundary = only_boundary(assign(through(kind), "a"))
    assert (boundary.batch_axis, boundary.shape, boundary.example_shape) == (None, shape, shape)
    assert boundary.own_lengths and boundary.whole


def test_a_program_for_prediction_is_cut_like_one_for_training() -> None:
    program = assign(mlp(mode=Mode.PREDICT), "dense_0")
    assert layers_by_stage(program) == {0: ["dense_0"], 1: ["dense_1", "dense_2"]}
    assert [program.node_stage[ref.node] for ref in program.roles.outputs] == [1]


def test_integers_that_no_sample_changes_may_cross_a_cut() -> None:
    program = read_program(
        """
        x[?, 2], w[2], table[2]
        a/scaled = Mul(x, w)
        a/twice = AddV2(table, table)
        a/whole = Cast(a/twice, DstT=int64)
        b/back = Cast(a/whole, DstT=float64)
        b/shifted = AddV2(a/scaled, b/back)
        loss = L2Loss(b/shifted)
    """,
        states={"table": None},
    )
    program = assign(program, "a")
    assert [(str(each.ref), each.batch_axis) for each in program.boundaries] == [("a/scaled", 0), ("a/whole", None)]
