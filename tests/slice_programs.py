"""Captured programs of functions of a slice, without Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Program, Roles, Slice, Variable, VariableKind


def program_of(function: Callable[[Any, Any], Any]) -> Program:
    """A function of 5 features ``x`` of each sample and a variable ``w`` of 5; the result is called ``result``."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 5], name="x")
        w = tf.compat.v1.placeholder(tf.float32, [5], name="w")
        scalars = [
            tf.compat.v1.placeholder(dtype, [], name=name)
            for name, dtype in Slice.__annotations__.items()
            for dtype in [tf.float64 if name == "weight" else tf.int32]
        ]
        tf.identity(function(x, w), name="result")
    variable = Variable("w", tf.float32.as_datatype_enum, (5,), VariableKind.PARAMETER, Ref("w"))
    roles = Roles((Ref("x"),), (variable,), Slice(*(Ref(scalar.op.name) for scalar in scalars)))
    return Program(graph.as_graph_def(), roles)


def scalar(name: str) -> Any:
    """One of the slice's scalars, inside such a function."""
    return tf.compat.v1.get_default_graph().get_tensor_by_name(f"{name}:0")
