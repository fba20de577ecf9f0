"""The OpGraph of a flat graph: operators, edges, groups and times; shapes behind loops, branches and lists; splits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from program_text import read_program

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.operators import build_op_graph as build_op_graph_module
from dapple_tf.operators.build_op_graph import OperatorSeconds, build_op_graph, operator_signatures
from dapple_tf.operators.op_costs import OperatorCosts, OperatorCostsError
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.rooflines import Roofline
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.analysis.operator_shapes import ShapeInference, operator_shapes
from graph_passes.analysis.split_rules import Split, SplitRule
from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr, dtypes_attr
from graph_passes.ir.outline import outline, placeholder
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.storage import handle, merge_library, read
from graph_passes.ir.tensorflow_bridge import Shape, empty_graph

_FLOAT = tf.float32.as_datatype_enum
_PLAIN = Roofline(flops=1e12, bandwidth=1e11, launch=1e-6, memory=1.0)
_COSTS = OperatorCosts({"GPU": _PLAIN, "CPU": _PLAIN})


def topology(*names: str) -> Topology:
    cluster = Cluster(tuple(Device(name, 0) for name in names or ("GPU:0", "GPU:1")), 1e10, None, 1e-6)
    return Topology.of(cluster)


def built(graph: GraphDef, **options: object) -> OpGraph:
    return build_op_graph(graph, topology(), _COSTS, **options)  # type: ignore[arg-type]


def by_name(graph: OpGraph, values: Any) -> dict[str, Any]:
    return dict(zip(graph.names, values, strict=True))


def shown(graph: OpGraph) -> str:
    """Operators with their groups, and what these store and where they are pinned; edges with outputs and bytes."""
    assert graph.tensor_outputs is not None
    lines = []
    for name, op, group in zip(graph.names, graph.ops, graph.groups, strict=True):
        lines.append(f"{name} = {op}, group {group}: {graph.stored_bytes[group]:g} bytes on {graph.pinned[group]}")
    for one, other, tensor, argument in graph.edges.tolist():
        made = "waits" if tensor < 0 else f"{graph.tensor_outputs[tensor]}, {graph.tensor_bytes[tensor]:g} bytes"
        lines.append(f"    {graph.names[one]} -> {graph.names[other]} {argument}: {made}")
    return "\n".join(lines)


SMALL = """
    x[8, 6]
    a = AddV2(x, 1.0)
    split = SplitV(a, [5, 1], 1, num_split=2)
    e = Mul(split, split:1)
    f = Neg(e) ^split ^e ^x
    g = NoOp() ^f ^a
"""


def small_graph(more: str = "") -> GraphDef:
    return read_program(SMALL + more).graph


def test_operators_are_in_topological_order_whatever_the_order_of_nodes() -> None:
    graph = small_graph()
    backwards = GraphDef(node=reversed(graph.node), versions=graph.versions)
    assert built(backwards).names == built(graph).names


def test_times_are_by_kind_and_speed_of_devices() -> None:
    costs = OperatorCosts({"GPU": _PLAIN, "CPU": Roofline(flops=1e9, bandwidth=1e9, launch=1e-4, memory=0.5)})
    places = topology("GPU:0", "CPU:0", "GPU:1")
    graph = small_graph()
    plain = build_op_graph(graph, places, costs, speeds=(1.0, 1.0, 2.0))
    assert plain.launch_seconds.tolist() == [1e-6, 1e-4, 0.5e-6]
    assert plain.copy_seconds.tolist() == [2e-11, 4e-9, 1e-11]
    made = operator_signatures(graph, infer_shapes(graph, {}, {}))
    costs.add(made["e"], "GPU", 3.0)
    op_graph = build_op_graph(graph, places, costs, speeds=(1.0, 1.0, 2.0))
    row = by_name(op_graph, op_graph.seconds.tolist())
    assert row["e"] == [3.0, costs.seconds(made["e"], "CPU"), 1.5] and row["g"] == [0, 0, 0]
    with pytest.raises(PassError, match="one above 0 for each of the 3 devices"):
        build_op_graph(graph, places, costs, speeds=(1.0,))
    with pytest.raises(OperatorCostsError, match="kind 'TPU'"):
        build_op_graph(graph, topology("TPU:0"), costs)
    next(node for node in graph.node if node.name == "a").input.append("^e")
    with pytest.raises(PassError, match="cycle"):
        built(graph)


def test_an_unknown_dimension_counts_as_one(caplog: pytest.LogCaptureFixture) -> None:
    graph = read_program("x[?, 6]\na = Neg(x)\nb = Neg(a)").graph
    with caplog.at_level("DEBUG", "dapple_tf"):
        assert built(graph).tensor_bytes.tolist() == [48]
    assert "aren't known" in caplog.text and "x (Placeholder)" in caplog.text
    assert built(graph, shapes=infer_shapes(graph, {"x": (4, 6)}, {})).tensor_bytes.tolist() == [192]


# ---- groups


def variables_graph() -> Builder:
    builder = Builder(empty_graph())
    for name, shape in (("w", (4, 2)), ("m", (4, 2)), ("v", (3,))):
        builder.add(f"use_{name}", "Neg", [read(builder, name, _FLOAT, shape)], T=dtype_attr(_FLOAT))
    kind = {"dtype": dtype_attr(_FLOAT)}
    again = handle(builder, "w", _FLOAT, (4, 2))
    builder.add("assign_w", "AssignSubVariableOp", [again, Ref("use_w")], **kind)
    resource = dtype_attr(tf.resource.as_datatype_enum)
    passed = builder.add("passed", "Identity", [handle(builder, "v", _FLOAT, (3,))], T=resource)
    builder.add("assign_v", "AssignAddVariableOp", [passed, Ref("use_v")], **kind)
    return builder


def with_momentum() -> GraphDef:
    """An operator that touches two variables."""
    builder = variables_graph()
    inputs = [Ref("handle/w"), Ref("handle/m"), builder.const(0.1, _FLOAT), Ref("use_w"), builder.const(0.9, _FLOAT)]
    builder.add("momentum", "ResourceApplyMomentum", inputs, T=dtype_attr(_FLOAT))
    return builder.graph


def with_function() -> GraphDef:
    """A function that makes its own handles."""
    builder, body = variables_graph(), Builder(empty_graph())
    values = [read(body, "w", _FLOAT, (4, 2)), read(body, "inner", _FLOAT, (5,))]
    merge_library(builder.graph, [outline("reads", Graph(body.graph), [], values)])
    types = {"Tin": dtypes_attr([]), "Tout": dtypes_attr([_FLOAT, _FLOAT])}
    call = builder.add("call", "StatefulPartitionedCall", **types)
    builder.graph.node[-1].attr["f"].func.name = "reads"
    builder.add("after", "Neg", [call], T=dtype_attr(_FLOAT))
    return builder.graph


def lists_and_tables() -> GraphDef:
    """Makers and readers of lists, tables and fed handles."""
    builder = Builder(empty_graph())
    fed = builder.append(placeholder("fed", tf.resource.as_datatype_enum))
    for name in ("one", "two"):
        builder.add(f"read_{name}", "ReadVariableOp", [fed], dtype=dtype_attr(_FLOAT))
    kind = {"element_dtype": dtype_attr(_FLOAT)}
    made = builder.add("list", "EmptyTensorList", [builder.const([2], 3), builder.const(5, 3)], **kind)
    pushed = builder.add("push", "TensorListPushBack", [made, Ref("read_one")], **kind)
    builder.add("popped", "TensorListPopBack", [pushed, builder.const([2], 3)], **kind)
    for number in range(2):
        types = {"key_dtype": dtype_attr(tf.int64.as_datatype_enum), "value_dtype": dtype_attr(_FLOAT)}
        builder.add(f"table{number}", "HashTableV2", shared_name="numbers", **types)
    return builder.graph


def test_operators_edges_and_groups_of_what_must_stay_together(golden: Callable[[str, str], None]) -> None:
    """There are no constants and placeholders; what has no edge with a tensor's number waits."""
    graphs = {
        "edges": built(small_graph("h = Sub(a, a)")),
        "variables": built(variables_graph().graph, pinned={"w": 1, "v": 0, "elsewhere": 1}),
        "two variables of one operator": built(with_momentum()),
        "a function with handles of its own": built(with_function(), shapes={}),
        "lists, tables and fed handles": built(lists_and_tables(), shapes={}),
    }
    golden("op_graphs.txt", "".join(f"{title}\n\n{shown(graph)}\n\n" for title, graph in graphs.items()))


def test_pins_that_cannot_be_are_refused() -> None:
    with pytest.raises(PassError, match="on device 2, but the devices are 0 to 1"):
        built(variables_graph().graph, pinned={"w": 2})
    with pytest.raises(PassError, match="'m' is on device 0 and 'w' on device 1, but an operator needs both"):
        built(with_momentum(), pinned={"w": 1, "m": 0})


def test_rules_of_splits_are_asked_with_shapes_and_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, tuple[object, ...]] = {}

    def rules(
        node: tf.compat.v1.NodeDef, inputs: object, outputs: object, constants: Mapping[int, np.ndarray]
    ) -> tuple[SplitRule, ...]:
        asked[node.name] = (inputs, outputs, {key: value.tolist() for key, value in constants.items()})
        return (SplitRule("batch", 8, (0,), (0,)),) if node.op == "Neg" else ()

    graph = small_graph()
    monkeypatch.setattr(build_op_graph_module, "split_rules", rules)
    op_graph = built(graph)
    assert op_graph.splits == {op_graph.names.index("f"): (SplitRule("batch", 8, (0,), (0,)),)}
    assert asked["split"] == ([(8, 6), (2,), ()], [(8, 5), (8, 1)], {1: [5, 1], 2: 1})
    assert asked["a"] == ([(8, 6), ()], [(8, 6)], {})
    next(node for node in graph.node if node.name == "f").attr["_class"].list.s.extend([b"loc:@a", b"loc:@not_there"])
    groups = by_name(built(graph), built(graph).groups)
    assert groups["a"] == groups["f"] and len(set(groups.values())) == len(groups) - 1
    assert built(graph).splits == {}  # It has to be where a is.


def test_convolutions_and_products_can_be_split_by_default_but_not_if_stateful() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [8, 6, 6, 3])
        y = tf.nn.conv2d(x, tf.random.uniform([3, 3, 3, 4]), 1, "SAME", name="conv")
        tf.matmul(tf.reshape(y, [8, -1]), tf.zeros([144, 10]), name="product")
    op_graph = built(graph.as_graph_def())
    dimensions = {op_graph.names[op]: {rule.dimension for rule in rules} for op, rules in op_graph.splits.items()}
    assert dimensions["conv"] == {"batch", "channel"}
    assert "batch" in dimensions["product"]
    assert not any("random" in name for name in dimensions)


# ---- loops, branches and calls


def loop_graph(limit: int | None) -> GraphDef:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [64, 64], name="x")
        stop = tf.compat.v1.placeholder(tf.int32, [], name="stop") if limit is None else limit
        body = lambda i, h: (i + 1, tf.tanh(h @ x))  # noqa: E731
        _, y = tf.while_loop(lambda i, h: i < stop, body, [0, x], maximum_iterations=limit, name="loop")
        tf.gradients(tf.reduce_sum(y), x, name="back")
        return graph.as_graph_def()


def test_a_loop_costs_its_body_as_often_as_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    graph = loop_graph(10)
    op_graph = built(graph)
    seconds = by_name(op_graph, op_graph.seconds[:, 0])
    product, tanh = 1e-6 + 2 * 64**3 / 1e12, 1e-6 + 2 * 4 * 64**2 / 1e11
    assert seconds["loop"] == pytest.approx(1e-6 + 10 * (product + tanh), rel=1e-3)
    assert next(value for name, value in seconds.items() if name.endswith("loop_grad")) > 10 * 2 * product
    assert {OperatorSeconds(graph, _COSTS, {}).rounds(node) for node in graph.node if "While" in node.op} == {10}
    with caplog.at_level("INFO", "dapple_tf"):
        unknown = built(loop_graph(None))
    assert by_name(unknown, unknown.seconds[:, 0])["loop"] < 0.2 * seconds["loop"]
    assert "number of rounds isn't known" in caplog.text
    costs = OperatorCosts({"GPU": _PLAIN})
    costs.add(operator_signatures(graph, infer_shapes(graph, {}, {}))["loop"], "GPU", 0.5)
    measured = build_op_graph(graph, topology(), costs)
    assert by_name(measured, measured.seconds.tolist())["loop"] == [0.5, 0.5]
    del graph.library.function[:]
    with pytest.raises(PassError, match="which its library lacks"):
        built(graph, shapes={})


def test_a_branch_costs_its_slower_side() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [256, 256])
        which = tf.compat.v1.placeholder(tf.bool, [])
        tf.compat.v1.cond(which, lambda: x @ x @ x, lambda: x + 1.0, name="branch")
    op_graph = built(graph.as_graph_def())
    seconds = op_graph.seconds[op_graph.ops.index("StatelessIf"), 0]
    assert seconds == pytest.approx(1e-6 + 2 * (1e-6 + 2 * 256**3 / 1e12), rel=0.05)


# ---- shapes for a batch size that wasn't known when the graph was traced


def traced(function: Callable[..., object], *shapes: tuple[int | None, ...]) -> GraphDef:
    """The graph of a function of float32 tensors, called ``x0``, ``x1``, ..."""
    specs = [tf.TensorSpec(shape, tf.float32, name=f"x{number}") for number, shape in enumerate(shapes)]
    return tf.function(function).get_concrete_function(*specs).graph.as_graph_def()


def of_op(graph: GraphDef, shapes: dict[Ref, Shape | None], op: str) -> list[Shape | None]:
    return [shapes[Ref(node.name)] for node in graph.node if node.op == op]


def looped(x: tf.Tensor, body: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    invariants = [tf.TensorShape([]), tf.TensorShape([None, 8])]
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, body(h)), [0, x], shape_invariants=invariants)[1]


def kept(x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h @ tf.ones((8, 8))), [0, x])[1]


def branches(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    large = tf.reduce_sum(x) > 0
    doubled = tf.function(lambda x: x * 2.0)
    same = tf.cond(large, lambda: x + 1.0, lambda: doubled(x))
    return same, tf.cond(large, lambda: x, lambda: tf.concat([x, x], 0))


def longer_list(x: tf.Tensor) -> tf.Tensor:
    made = tf.TensorArray(tf.float32, tf.shape(x)[0], dynamic_size=True, element_shape=(8,))
    body = lambda i, a: (i + 1, a.write(i, x[0]))  # noqa: E731
    return tf.while_loop(lambda i, a: i < 2 * tf.shape(x)[0], body, [0, made])[1].stack()


def unequal_list(x: tf.Tensor) -> tf.Tensor:
    return tf.TensorArray(tf.float32, 2, infer_shape=False).write(0, x).write(1, tf.concat([x, x], 0)).read(0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (kept, [(32, 8)]),
        (lambda x: looped(x, lambda h: tf.concat([h, h], 0)), [(None, 8)]),
        (branches, [(32, 8), (None, 8)]),
        (longer_list, [(None, 8)]),
        (unequal_list, [(None, 8)]),
    ],
    ids=["kept by a loop", "grown by a loop", "branches and calls", "longer list", "unequal list"],
)
def test_shapes_behind_loops_branches_and_lists(function: Callable[..., Any], expected: list[Shape]) -> None:
    graph = traced(lambda x: tf.nest.map_structure(tf.nn.relu, function(x)), (None, 8))
    shapes = operator_shapes(graph, {"x0": (32, 8)})
    assert of_op(graph, shapes, "Relu") == expected
    assert set(shapes) == set(infer_shapes(graph, {"x0": (32, 8)}, {}))


def test_lists_of_a_growing_tensor_have_common_dimensions_of_all_elements() -> None:
    """The gradient reads what each round has pushed: first 32 rows, then 64."""

    def gradient(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(w)
            y = looped(x, lambda h: tf.concat([h, h @ w], 0))
        return tape.gradient(y, w)

    graph = traced(gradient, (None, 8), (8, 8))
    elements = ShapeInference(graph.library).of(graph, {"x0": (32, 8)}).elements
    assert (32, 8) not in elements.values() and (None, 8) in elements.values()
    with pytest.raises(PassError, match="can't compute MatMul of tensors of shapes"):
        operator_shapes(graph, {"x0": (32, 7)})


def captured(function: Any, spec: tf.TensorSpec, variables: Sequence[tf.Variable]) -> GraphDef:
    """A traced graph with handles of its own where it captures variables."""
    graph = function.get_concrete_function(spec).graph
    definition = graph.as_graph_def()
    outside = {inside.op.name: outside for outside, inside in graph.captures if outside.dtype == tf.resource}
    for node in definition.node:
        if node.name in outside:
            variable = next(variable for variable in variables if variable.handle is outside[node.name])
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
            node.attr["shared_name"].s = node.name.encode()
    return definition


@pytest.mark.parametrize("length", [10, None])
def test_gradients_of_recurrent_layers_are_known_to_the_last_matrix_product(length: int | None) -> None:
    """The length of a list that a loop fills was lost, so that models had to be run to find it."""
    model = keras.Sequential([keras.Input((length, 6)), keras.layers.GRU(8, return_sequences=True)])
    variables = [variable.value for variable in model.trainable_variables]

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, variables)

    graph = captured(tf.function(step), tf.TensorSpec((None, length, 6), tf.float32, name="x0"), variables)
    shapes = operator_shapes(graph, {"x0": (32, 10, 6)})
    ops = {node.name: node.op for node in graph.node}
    # What is left are shapes of shapes, and gradients of states that nobody reads.
    assert {ops[ref.node] for ref, shape in shapes.items() if shape is None or None in shape} <= {
        *("BroadcastGradientArgs", "VariableShape", "StatelessWhile", "While", "Identity")
    }
    assert set(of_op(graph, shapes, "TensorListStack")) == {(10, 32, 8)}
    work = OperatorSeconds(graph, OperatorCosts(), shapes)
    loops = [node for node in graph.node if "While" in node.op]
    assert len(loops) == 2 and {work.rounds(node) for node in loops} == {length}


# ---- splits, which are compared with those of graphs where these are split

ROWS = SplitRule("batch", 6, (0,), (0,))
LAUNCH, COPY = 0.5, 0.125


def chain(*rules: SplitRule | None) -> OpGraph:
    """a -> b -> c -> ..., each taking 10.5 s on device 0 and 20.5 s on device 1; tensors of 24 bytes."""
    count = len(rules)
    return OpGraph(
        names=tuple("abcdefgh"[:count]),
        ops=("Op",) * count,
        seconds=np.tile([10.5, 20.5], (count, 1)),
        edges=np.array([(number, number + 1, number, 0) for number in range(count - 1)], np.int64),
        tensor_bytes=np.full(count - 1, 24.0),
        groups=np.arange(count),
        pinned=np.full(count, -1),
        stored_bytes=np.zeros(count),
        splits={number: (rule,) for number, rule in enumerate(rules) if rule is not None},
        launch_seconds=np.full(2, LAUNCH),
        copy_seconds=np.full(2, COPY),
    )


def test_parts_and_copies_take_their_times() -> None:
    """a, its split, four parts of b, their concatenation and c; names, edges and sizes: test_split_operators.py."""
    graph = chain(None, ROWS, None)
    split = apply_splits(graph, {"b": Split("batch", 4)})
    third, sixth, copied = 10 / 3 + LAUNCH, 10 / 6 + LAUNCH, LAUNCH + 24 * COPY
    np.testing.assert_allclose(split.seconds[:, 0], [10.5, copied, third, third, sixth, sixth, copied, 10.5])
    assert len(set(split.groups.tolist())) == 8
    assert apply_splits(graph, {}) is graph


@pytest.mark.parametrize(
    "changes, splits, text",
    [
        ({}, {"x": Split("batch", 2)}, "no operator 'x'"),
        ({}, {"b": Split("batch", 1)}, "into 1 parts"),
        ({"groups": np.array([0, 0])}, {"b": Split("batch", 2)}, "where 1 others are"),
        ({"pinned": np.array([-1, 1])}, {"b": Split("batch", 2)}, "on device 1"),
    ],
)
def test_impossible_splits_are_told(changes: dict[str, Any], splits: dict[str, Split], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        apply_splits(dataclasses.replace(chain(None, ROWS), **changes), splits)
