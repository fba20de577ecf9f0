"""What is asked of TensorFlow itself: op definitions, gradients and shapes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from programs import BOOL, DOUBLE, FLOAT, INT32, INT64, run

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, GraphDef, Ref, dtype_attr, dtypes_attr, make_node
from graph_passes.ir.tensorflow_bridge import (
    add_gradients,
    evaluate,
    function_body_name,
    measure_shapes,
    op_def,
    output_dtypes,
    output_number,
)

DOUBLES = {"T": dtype_attr(DOUBLE)}


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (
            lambda: op_def("NoSuchOp"),
            "TensorFlow knows no op 'NoSuchOp'; load the library that defines it before the transform",
        ),
        (lambda: function_body_name(make_node("n", "TopKV2", attrs=DOUBLES), 2), "node 'n' (TopKV2) has no output 2"),
        (
            lambda: output_number(make_node("n", "TopKV2", attrs=DOUBLES), "product", 0),
            "node 'n' (TopKV2) has no output 'product'",
        ),
    ],
)
def test_what_tensorflow_does_not_know_is_refused(ask: Callable[[], object], text: str) -> None:
    with pytest.raises(PassError) as caught:
        ask()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("op", "attrs", "dtypes", "last"),
    [
        ("NoOp", {}, [], ""),
        ("MatMul", {"T": dtype_attr(DOUBLE)}, [DOUBLE], "n:product:0"),
        ("Equal", {"T": dtype_attr(DOUBLE)}, [BOOL], "n:z:0"),
        ("Split", {"T": dtype_attr(FLOAT), "num_split": 3}, [FLOAT] * 3, "n:output:2"),
        ("IdentityN", {"T": dtypes_attr([FLOAT, INT32])}, [FLOAT, INT32], "n:output:1"),
        ("Unique", {"T": dtype_attr(FLOAT), "out_idx": dtype_attr(INT64)}, [FLOAT, INT64], "n:idx:0"),
        ("TopKV2", {"T": dtype_attr(FLOAT)}, [FLOAT, INT32], "n:indices:0"),
    ],
)
def test_each_output_has_a_dtype_and_a_name_in_function_bodies(
    op: str, attrs: dict[str, object], dtypes: list[int], last: str
) -> None:
    node = make_node("n", op, attrs=attrs)
    assert output_dtypes(node) == dtypes
    assert not dtypes or function_body_name(node, len(dtypes) - 1) == last
    for number in range(len(dtypes)):
        _, argument, index = function_body_name(node, number).split(":")
        assert output_number(node, argument, int(index)) == number


# ---- gradients


# ---- shapes


def test_a_loop_is_differentiated_again_in_another_stage() -> None:
    """Its functions once got the names of those before, which TensorFlow refuses unless nobody keeps these any more."""
    with tf.Graph().as_default() as scope:
        x = tf.compat.v1.placeholder(tf.float32, (3,), name="x")
        double = tf.multiply(x, 2.0, name="double")
        y = tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, tf.sin(v) * v), (0, double))[1]
        tf.identity(y, name="y")
        tf.compat.v1.placeholder(tf.float32, (3,), name="dy")
        graph = scope.as_graph_def()
    later = GraphDef()
    later.CopyFrom(graph)
    del later.node[:]
    later.node.extend(
        [graph.node[-1], *graph.node[:-1]]
    )  # Other numbers for the same nodes, as another cut gives them.
    gc.collect()
    gc.disable()
    try:
        results = [add_gradients(part, [(Ref("y"), Ref("dy"))], [Ref("x")]) for part in (graph, later)]
    finally:
        gc.enable()
    values = []
    for extended, (gradient,) in results:
        assert gradient is not None
        feed = {Ref("x"): np.array([0.1, 0.2, 0.3], np.float32), Ref("dy"): np.ones(3, np.float32)}
        values.append(run(extended, [gradient.dense], feed)[0])
    np.testing.assert_array_equal(*values)


def test_what_is_computed_here_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    class Session(tf.compat.v1.Session):
        def __init__(self, *, config: tf.compat.v1.ConfigProto, **options: Any) -> None:
            counts.append(dict(config.device_count))
            super().__init__(config=config, **options)

    monkeypatch.setattr(tf.compat.v1, "Session", Session)
    builder = Builder(GraphDef())
    one = builder.const([1, 1], INT32)
    assert list(evaluate(builder.graph, [one])[one]) == [1, 1]
    assert measure_shapes(builder.graph, {}, {}, [one]) == {one: (2,)}
    assert counts == [{"GPU": 0}] * 2
