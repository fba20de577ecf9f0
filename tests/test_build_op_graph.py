"""The OpGraph of a flat graph: operators, edges, tensors, groups, splits and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import tensorflow as tf
from conftest import Within

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.operators.build_op_graph import build_op_graph, operator_signatures
from dapple_tf.operators.function_work import FunctionWork
from dapple_tf.operators.op_costs import OperatorCosts, OperatorCostsError
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.rooflines import Roofline
from graph_passes.analysis.split_rules import SplitRule
from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr, dtypes_attr, shape_attr
from graph_passes.ir.outline import outline, placeholder
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.storage import handle, merge_library, read
from graph_passes.ir.tensorflow_bridge import empty_graph

_FLOAT = tf.float32.as_datatype_enum
_PLAIN = Roofline(flops=1e12, bandwidth=1e11, launch=1e-6, memory=1.0)
_COSTS = OperatorCosts({"GPU": _PLAIN, "CPU": _PLAIN})


def topology(*names: str) -> Topology:
    cluster = Cluster(tuple(Device(name, 0) for name in names or ("GPU:0", "GPU:1")), 1e10, None, 1e-6)
    return Topology.of(cluster)


def built(graph: GraphDef, **options: object) -> OpGraph:
    return build_op_graph(graph, topology(), _COSTS, **options)  # type: ignore[arg-type]


def edges(graph: OpGraph) -> list[tuple[str, str, int, int]]:
    return [(graph.names[one], graph.names[other], tensor, argument) for one, other, tensor, argument in graph.edges]


def together(graph: OpGraph) -> list[set[str]]:
    """The groups of more than one operator."""
    groups: dict[int, set[str]] = {}
    for name, group in zip(graph.names, graph.groups, strict=True):
        groups.setdefault(int(group), set()).add(name)
    return [group for group in groups.values() if len(group) > 1]


def small_graph() -> Builder:
    """x, c -> a = x + c -> b, d = split(a) -> e = b * d; f waits for b."""
    builder = Builder(empty_graph())
    x = builder.add("x", "Placeholder", dtype=dtype_attr(_FLOAT), shape=shape_attr((8, 6)))
    kind = {"T": dtype_attr(_FLOAT)}
    a = builder.add("a", "AddV2", [x, builder.const(1.0, _FLOAT)], **kind)
    b, d = builder.split("split", a, _FLOAT, (5, 1), 1)
    e = builder.add("e", "Mul", [b, d], **kind)
    builder.add("f", "Neg", [e], control=["split", "e", "x"], **kind)
    builder.add("g", "NoOp", control=["f", "a"])
    return builder


def test_operators_are_in_topological_order_without_constants_and_placeholders() -> None:
    graph = small_graph().graph
    backwards = GraphDef(node=reversed(graph.node), versions=graph.versions)
    for given in (graph, backwards):
        op_graph = built(given)
        assert op_graph.names == ("a", "split", "e", "f", "g")
        assert op_graph.ops == ("AddV2", "SplitV", "Mul", "Neg", "NoOp")
        assert op_graph.count == 5


def test_edges_name_tensors_and_arguments() -> None:
    op_graph = built(small_graph().graph)
    assert edges(op_graph) == [
        ("a", "split", 0, 0),
        ("split", "e", 1, 0),
        ("split", "e", 2, 1),
        ("e", "f", 3, 0),
        ("split", "f", -1, -1),  # e and x are read, or no operator
        ("f", "g", -1, -1),
        ("a", "g", -1, -1),
    ]
    assert op_graph.tensor_bytes.tolist() == [4 * 48, 4 * 40, 4 * 8, 4 * 40]
    assert op_graph.edges.dtype == np.int64
    assert op_graph.tensor_outputs is not None and op_graph.tensor_outputs.tolist() == [0, 0, 1, 0]


def test_one_tensor_with_several_readers_is_there_once() -> None:
    builder = small_graph()
    builder.add("h", "Sub", [Ref("a"), Ref("a")], T=dtype_attr(_FLOAT))
    op_graph = built(builder.graph)
    assert [row[2:] for row in edges(op_graph) if row[0] == "a" and row[1] != "g"] == [(0, 0), (0, 0), (0, 1)]
    assert len(op_graph.tensor_bytes) == 4


def test_times_are_by_kind_and_speed_of_devices() -> None:
    costs = OperatorCosts({"GPU": _PLAIN, "CPU": Roofline(flops=1e9, bandwidth=1e9, launch=1e-4, memory=0.5)})
    places = topology("GPU:0", "CPU:0", "GPU:1")
    graph = small_graph().graph
    made = operator_signatures(graph, infer_shapes(graph, {}, {}))
    costs.add(made["e"], "GPU", 3.0)
    op_graph = build_op_graph(graph, places, costs, speeds=(1.0, 1.0, 2.0))
    row = dict(zip(op_graph.names, op_graph.seconds, strict=True))
    assert row["e"].tolist() == [3.0, costs.seconds(made["e"], "CPU"), 1.5]
    assert row["g"].tolist() == [0, 0, 0]
    plain = build_op_graph(graph, places, OperatorCosts(costs.rooflines), speeds=(1.0, 1.0, 2.0))
    assert plain.launch_seconds.tolist() == [1e-6, 1e-4, 0.5e-6]
    assert plain.copy_seconds.tolist() == [2e-11, 4e-9, 1e-11]
    with pytest.raises(PassError, match="one above 0 for each of the 3 devices"):
        build_op_graph(graph, places, costs, speeds=(1.0,))
    with pytest.raises(OperatorCostsError, match="kind 'TPU'"):
        build_op_graph(graph, topology("TPU:0"), costs)


def test_a_cycle_is_shown() -> None:
    builder = small_graph()
    builder.graph.node[[node.name for node in builder.graph.node].index("a")].input.append("^e")
    with pytest.raises(PassError, match=r"cycle: a -> e -> split -> a|cycle"):
        built(builder.graph)


# ---- shapes that aren't known


def test_an_unknown_dimension_counts_as_one_and_is_not_split(caplog: pytest.LogCaptureFixture) -> None:
    builder = Builder(empty_graph())
    x = builder.add("x", "Placeholder", dtype=dtype_attr(_FLOAT), shape=shape_attr((None, 6)))
    a = builder.add("a", "Neg", [x], T=dtype_attr(_FLOAT))
    builder.add("b", "Neg", [a], T=dtype_attr(_FLOAT))
    with caplog.at_level("DEBUG", "dapple_tf"):
        op_graph = built(builder.graph)
    assert op_graph.tensor_bytes.tolist() == [24]
    assert "aren't known" in caplog.text and "x (Placeholder)" in caplog.text
    known = built(builder.graph, shapes=infer_shapes(builder.graph, {"x": (4, 6)}, {}))
    assert known.tensor_bytes.tolist() == [96]


# ---- what has to be together


def variables_graph() -> Builder:
    builder = Builder(empty_graph())
    for name, shape in (("w", (4, 2)), ("m", (4, 2)), ("v", (3,))):
        value = read(builder, name, _FLOAT, shape)
        builder.add(f"use_{name}", "Neg", [value], T=dtype_attr(_FLOAT))
    kind = {"dtype": dtype_attr(_FLOAT)}
    again = handle(builder, "w", _FLOAT, (4, 2))
    builder.add("assign_w", "AssignSubVariableOp", [again, Ref("use_w")], **kind)
    passed = builder.add(
        "passed", "Identity", [handle(builder, "v", _FLOAT, (3,))], T=dtype_attr(tf.resource.as_datatype_enum)
    )
    builder.add("assign_v", "AssignAddVariableOp", [passed, Ref("use_v")], **kind)
    return builder


def test_all_that_touches_a_variable_is_one_group() -> None:
    op_graph = built(variables_graph().graph)
    assert together(op_graph) == [
        {"handle/w", "handle/w_1", "read/w", "assign_w"},
        {"handle/m", "read/m"},
        {"handle/v", "handle/v_1", "read/v", "passed", "assign_v"},
    ]
    stored = dict(zip(op_graph.names, op_graph.stored_bytes[op_graph.groups], strict=True))
    assert (stored["assign_w"], stored["read/m"], stored["handle/v"], stored["use_w"]) == (32, 32, 12, 0)
    assert op_graph.stored_bytes.sum() == 76
    assert (op_graph.pinned == -1).all()


def test_an_operator_that_touches_two_variables_joins_their_groups() -> None:
    builder = variables_graph()
    inputs = [Ref("handle/w"), Ref("handle/m"), builder.const(0.1, _FLOAT), Ref("use_w"), builder.const(0.9, _FLOAT)]
    builder.add("momentum", "ResourceApplyMomentum", inputs, T=dtype_attr(_FLOAT))
    op_graph = built(builder.graph)
    assert {"momentum", "handle/w", "handle/m", "read/m"} < together(op_graph)[0]
    assert op_graph.stored_bytes[op_graph.groups[op_graph.names.index("momentum")]] == 64
    with pytest.raises(PassError, match="'m' is on device 0 and 'w' on device 1, but an operator needs both"):
        built(builder.graph, pinned={"w": 1, "m": 0})


def test_variables_that_are_placed_stay() -> None:
    op_graph = built(variables_graph().graph, pinned={"w": 1, "v": 0, "elsewhere": 1})
    device = dict(zip(op_graph.names, op_graph.pinned[op_graph.groups], strict=True))
    assert (device["assign_w"], device["read/v"], device["read/m"], device["use_w"]) == (1, 0, -1, -1)
    with pytest.raises(PassError, match="on device 2, but the devices are 0 to 1"):
        built(variables_graph().graph, pinned={"w": 2})


def test_a_function_that_makes_its_own_handles_belongs_to_their_variables() -> None:
    builder = variables_graph()
    body = Builder(empty_graph())
    value = read(body, "w", _FLOAT, (4, 2))
    own = read(body, "inner", _FLOAT, (5,))
    merge_library(builder.graph, [outline("reads", Graph(body.graph), [], [value, own])])
    types = {"Tin": dtypes_attr([]), "Tout": dtypes_attr([_FLOAT, _FLOAT])}
    call = builder.add("call", "StatefulPartitionedCall", **types)
    builder.graph.node[-1].attr["f"].func.name = "reads"
    builder.add("after", "Neg", [call], T=dtype_attr(_FLOAT))
    op_graph = built(builder.graph, shapes={})
    assert {"call", "handle/w", "assign_w"} < together(op_graph)[0]
    assert "after" not in together(op_graph)[0]
    assert op_graph.stored_bytes[op_graph.groups[op_graph.names.index("call")]] == 32 + 20


def test_makers_and_readers_of_lists_tables_and_fed_handles_are_together() -> None:
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
    assert together(built(builder.graph, shapes={})) == [
        {"read_one", "read_two"},
        {"list", "push", "popped"},
        {"table0", "table1"},
    ]


def test_class_attributes_keep_nodes_together() -> None:
    builder = small_graph()
    for node in builder.graph.node:
        if node.name == "f":
            node.attr["_class"].list.s.extend([b"loc:@a", b"loc:@not_there"])
    assert together(built(builder.graph)) == [{"a", "f"}]


# ---- splits


def test_rules_are_asked_with_shapes_and_constants() -> None:
    asked: dict[str, tuple[object, ...]] = {}

    def rules(
        node: tf.compat.v1.NodeDef,
        inputs: Sequence[tuple[int | None, ...] | None],
        outputs: Sequence[tuple[int | None, ...] | None],
        constants: Mapping[int, np.ndarray],
    ) -> tuple[SplitRule, ...]:
        asked[node.name] = (inputs, outputs, {key: value.tolist() for key, value in constants.items()})
        return (SplitRule("batch", 8, (0,), (0,)),) if node.op == "Neg" else ()

    op_graph = built(small_graph().graph, rules=rules)
    assert op_graph.splits == {op_graph.names.index("f"): (SplitRule("batch", 8, (0,), (0,)),)}
    assert asked["split"] == ([(8, 6), (2,), ()], [(8, 5), (8, 1)], {1: [5, 1], 2: 1})
    assert asked["a"] == ([(8, 6), ()], [(8, 6)], {})
    kept = small_graph()
    kept.graph.node[[node.name for node in kept.graph.node].index("f")].attr["_class"].list.s.append(b"loc:@a")
    assert built(kept.graph, rules=rules).splits == {}  # it has to be where a is


def test_convolutions_and_products_can_be_split_by_default_but_not_what_is_stateful() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [8, 6, 6, 3])
        y = tf.nn.conv2d(x, tf.random.uniform([3, 3, 3, 4]), 1, "SAME", name="conv")
        tf.matmul(tf.reshape(y, [8, -1]), tf.zeros([144, 10]), name="product")
    op_graph = built(graph.as_graph_def())
    dimensions = {
        op_graph.names[number]: {rule.dimension for rule in rules} for number, rules in op_graph.splits.items()
    }
    assert dimensions["conv"] == {"batch", "channel"}
    assert "batch" in dimensions["product"]
    assert not any("random" in name for name in dimensions)
    assert built(graph.as_graph_def(), rules=None).splits == {}


# ---- loops, branches and calls


def loop_graph(limit: int | None = 10) -> GraphDef:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [64, 64], name="x")
        stop = tf.compat.v1.placeholder(tf.int32, [], name="stop") if limit is None else limit
        _, y = tf.while_loop(
            lambda i, h: i < stop, lambda i, h: (i + 1, tf.tanh(h @ x)), [0, x], maximum_iterations=limit, name="loop"
        )
        tf.gradients(tf.reduce_sum(y), x, name="back")
        return graph.as_graph_def()


def test_a_loop_costs_its_body_as_often_as_it_runs() -> None:
    op_graph = built(loop_graph())
    seconds = dict(zip(op_graph.names, op_graph.seconds[:, 0], strict=True))
    product, tanh = 1e-6 + 2 * 64**3 / 1e12, 1e-6 + 2 * 4 * 64**2 / 1e11
    assert seconds["loop"] == pytest.approx(1e-6 + 10 * (product + tanh), rel=1e-3)
    backward = next(value for name, value in seconds.items() if name.endswith("loop_grad"))
    assert backward > 10 * 2 * product
    graph = loop_graph()
    rounds = {node.name: FunctionWork(graph, _COSTS, {}).rounds(node) for node in graph.node if "While" in node.op}
    assert set(rounds.values()) == {10}


@pytest.mark.slow
def test_a_loop_of_unknown_length_counts_one_round(caplog: pytest.LogCaptureFixture) -> None:
    graph = loop_graph(limit=None)
    with caplog.at_level("INFO", "dapple_tf"):
        op_graph = built(graph)
    once = dict(zip(op_graph.names, op_graph.seconds[:, 0], strict=True))["loop"]
    ten = dict(zip(built(loop_graph()).names, built(loop_graph()).seconds[:, 0], strict=True))["loop"]
    assert once < 0.2 * ten
    assert "number of rounds isn't known" in caplog.text


def test_what_was_measured_of_a_loop_counts_first() -> None:
    graph = loop_graph()
    costs = OperatorCosts({"GPU": _PLAIN})
    costs.add(operator_signatures(graph, infer_shapes(graph, {}, {}))["loop"], "GPU", 0.5)
    op_graph = build_op_graph(graph, topology(), costs)
    assert op_graph.seconds[op_graph.names.index("loop")].tolist() == [0.5, 0.5]


def test_a_branch_costs_its_slower_side() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [256, 256])
        which = tf.compat.v1.placeholder(tf.bool, [])
        tf.compat.v1.cond(which, lambda: x @ x @ x, lambda: x + 1.0, name="branch")
    op_graph = built(graph.as_graph_def())
    seconds = op_graph.seconds[op_graph.ops.index("StatelessIf"), 0]
    assert seconds == pytest.approx(1e-6 + 2 * (1e-6 + 2 * 256**3 / 1e12), rel=0.05)


def test_a_function_that_the_library_lacks_is_named() -> None:
    graph = loop_graph()
    del graph.library.function[:]
    with pytest.raises(PassError, match="which its library lacks"):
        built(graph, shapes={})


@pytest.mark.thorough
@pytest.mark.slow
def test_tens_of_thousands_of_operators_take_seconds(within: Within) -> None:
    builder = Builder(empty_graph())
    kind = {"T": dtype_attr(_FLOAT)}
    tensor = builder.add("x", "Placeholder", dtype=dtype_attr(_FLOAT), shape=shape_attr((64, 64)))
    for number in range(20_000):
        side = builder.add(f"relu{number}", "Relu", [tensor], **kind)
        product = builder.add(f"product{number}", "MatMul", [tensor, side], **kind)
        tensor = builder.add(f"sum{number}", "AddV2", [product, side], **kind)
    shapes = {Ref(node.name): (64, 64) for node in builder.graph.node}
    with within(8):
        op_graph = built(builder.graph, shapes=shapes)
    assert op_graph.count == 60_000 and len(op_graph.edges) == 99_998
