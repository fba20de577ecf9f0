"""Typed access to a GraphDef: references, the index, names, the builder and substitution."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import DOUBLE, FLOAT, INT32, INT64, node, run
from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import (
    COUNTABLE_DTYPES,
    Builder,
    Graph,
    GraphDef,
    Names,
    Ref,
    dtype_attr,
    make_const,
    shape_attr,
    substitute,
)
from graph_passes.ir.kernels import kernel_of, knows_gpus
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import graph_text

names = st.from_regex(r"[A-Za-z0-9.][A-Za-z0-9_.\\/-]{0,8}", fullmatch=True)


def chain(*edges: str) -> GraphDef:
    """``b a ^c`` is a node ``b`` that reads ``a`` and waits for ``c``."""
    graph = empty_graph()
    for edge in edges:
        name, *inputs = edge.split()
        graph.node.add(name=name, op="NoOp", input=inputs)
    return graph


# ---- references


@settings(derandomize=True, deadline=None)
@given(name=names, index=st.integers(0, 20))
def test_every_reference_prints_as_a_text_that_parses_back(name: str, index: int) -> None:
    assert Ref.parse(str(Ref(name, index))) == Ref(name, index)
    assert str(Ref(name)) == name and Ref.parse(f"{name}:0") == Ref(name)


def test_a_control_edge_is_no_tensor() -> None:
    with pytest.raises(ValueError, match=r"^'\^a' is a control edge, not a tensor$"):
        Ref.parse("^a")


# ---- the index


def test_consumers_are_listed_once_each_in_graph_order() -> None:
    graph = Graph(chain("a", "c a a:1 ^b", "b a", "d c ^a"))
    assert graph.consumers("a") == ["c", "b"]
    assert graph.consumers("b") == []
    assert graph.inputs("c") == [Ref("a"), Ref("a", 1)]
    assert [each.name for each in graph] == ["a", "c", "b", "d"]
    assert "a" in graph and "e" not in graph


def test_ancestors_stop_at_given_tensors_and_count_control_edges_only_when_asked() -> None:
    graph = Graph(chain("x", "a x", "b a", "c b:1 ^e", "e", "y c b"))
    assert graph.ancestors([Ref("y")]) == {"y", "c", "b", "a", "x", "e"}
    assert graph.ancestors([Ref("y")], control=False) == {"y", "c", "b", "a", "x"}
    assert graph.ancestors([Ref("y")], [Ref("b"), Ref("b", 1)], control=False) == {"y", "c"}
    assert graph.ancestors([Ref("y")], [Ref("b", 1)], control=False) == {"y", "c", "b", "a", "x"}
    assert graph.ancestors([Ref("b")], [Ref("b")]) == set()


@pytest.mark.parametrize(
    ("edges", "shown"),
    [
        (("a c", "b a", "c b ^d", "d"), "a -> c -> b -> a"),
        (("a ^b", "b a", "z b"), "a -> b -> a"),
        (("a a",), "a -> a"),
    ],
)
def test_a_cycle_is_shown_each_node_before_the_one_that_it_waits_for(edges: tuple[str, ...], shown: str) -> None:
    with pytest.raises(PassError) as caught:
        Graph(chain(*edges)).topological()
    assert str(caught.value) == f"the graph has a cycle: {shown}"


# ---- names, attributes and the builder


def test_names_are_fresh_readable_and_deterministic() -> None:
    names = Names(["a", "a_1"])
    made = [names.fresh(wanted) for wanted in ("a", "b", "b", "a", "b_1", "b")]
    assert made == ["a_2", "b", "b_1", "a_3", "b_1_1", "b_2"]


def test_the_builder_takes_names_that_the_graph_already_has_into_account() -> None:
    builder = Builder(chain("a"))
    assert [builder.add("a", "NoOp"), builder.add("a", "NoOp")] == [Ref("a_1"), Ref("a_2")]
    assert graph_text(builder.graph) == "a = NoOp()\na_1 = NoOp()\na_2 = NoOp()\n"


def test_equal_constants_are_made_once_for_each_dtype_and_device() -> None:
    builder = Builder(empty_graph())
    same = [builder.const(2, INT32), builder.const(2, INT32)]
    others = [builder.const(2, INT64), builder.const(2, INT32, device="/cpu:0"), builder.const([2], INT32)]
    assert len(set(same)) == 1
    assert len({*same, *others}) == 4


def test_a_constant_has_its_value_in_every_dtype_that_gradients_have() -> None:
    builder = Builder(empty_graph())
    dtypes = [FLOAT, DOUBLE, types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, INT32, INT64]
    made = [builder.const(3, dtype) for dtype in dtypes]
    builder.graph.node.append(make_const("none", [], INT32))
    *scalars, empty = run(builder.graph, [*made, Ref("none")])
    assert [(float(value), value.shape) for value in scalars] == [(3.0, ())] * len(dtypes)
    assert [value.dtype for value in scalars] == [tf.dtypes.as_dtype(dtype).as_numpy_dtype for dtype in dtypes]
    assert empty.shape == (0,)


def test_split_and_concat_of_one_part_and_the_sum_of_one_tensor_add_no_node() -> None:
    builder = Builder(empty_graph())
    x = builder.const(1, FLOAT)
    assert builder.split("s", x, FLOAT, [5], 0) == [x]
    assert builder.concat("c", [x], FLOAT, 0) == x
    assert builder.add_n("a", [x], FLOAT) == x
    assert len(builder.graph.node) == 1


@pytest.mark.parametrize(
    ("dtype", "axis", "rows"), [("float32", 0, 1), ("float32", 1, 2), ("int64", 1, 1), ("bool", 0, 2)]
)
def test_split_and_concat_undo_each_other(dtype: str, axis: int, rows: int) -> None:
    builder, kind = Builder(empty_graph()), tf.dtypes.as_dtype(dtype).as_datatype_enum
    x = builder.add("x", "Placeholder", dtype=dtype_attr(kind), shape=shape_attr([3 * rows, 3 * rows]))

    def scaled(sizes: Ref) -> Ref:
        return builder.add("sizes", "Mul", [sizes, builder.const(rows, INT32)], T=dtype_attr(INT32))

    parts = builder.split("split", x, kind, [1, 0, 2], axis, device="/cpu:0", scaled=scaled)
    joined = builder.concat("join", parts, kind, axis, device="/cpu:0")
    value = np.arange(9 * rows**2).reshape(3 * rows, 3 * rows) % 2 == 0 if dtype == "bool" else np.arange(9 * rows**2)
    value = value.reshape(3 * rows, 3 * rows).astype(dtype)
    *given, whole = run(builder.graph, [*parts, joined], {x: value})
    assert [part.shape[axis] for part in given] == [rows, 0, 2 * rows]
    np.testing.assert_array_equal(whole, value)
    ops = [each.op for each in builder.graph.node if each.device == "/cpu:0" and each.op != "Const"]
    assert ops == ["SplitV" if dtype == "float32" else "StridedSlice"] * (1 if dtype == "float32" else 3) + ["ConcatV2"]


@pytest.mark.skipif(not knows_gpus(), reason="this TensorFlow has no kernels for GPUs")
def test_whatever_is_split_has_a_kernel_for_gpus() -> None:
    for dtype in (*COUNTABLE_DTYPES, *(tf.dtypes.as_dtype(name).as_datatype_enum for name in _INTEGERS.split())):
        builder = Builder(empty_graph())
        builder.split("split", Ref("x"), dtype, [1, 2], 0)
        assert all(kernel_of(each, "GPU") for each in builder.graph.node), dtype


_INTEGERS = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64"


# ---- substitution


def test_substitution_binds_readers_of_placeholders_and_removes_these() -> None:
    graph = chain("p", "q", "a p q:0 ^b", "b q", "c a:1 p")
    graph.library.function.add().signature.name = "f"
    graph.versions.producer = 7
    substitute(graph, {"p": Ref("b", 1), "q": Ref("z")})
    assert graph_text(graph) == "a = NoOp(b:1, z) ^b\nb = NoOp(z)\nc = NoOp(a:1, b:1)\n"
    assert graph.library.function[0].signature.name == "f"
    assert graph.versions.producer == 7
    assert [each.name for each in graph.node] == ["a", "b", "c"]
    assert node(graph, "a").op == "NoOp"
