"""Variables on devices: functions that read, load, save and accumulate them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from programs import DOUBLE, FLOAT, HOST, INT32, PARAMETER, STATE, Machine, devices

from graph_passes.ir.graph import Builder, GraphDef, Ref
from graph_passes.ir.outline import FunctionDef, call_node, placeholder
from graph_passes.ir.program import Variable
from graph_passes.ir.storage import (
    accumulate_function,
    by_dtype,
    join_function,
    load_function,
    merge_library,
    read_function,
    save_function,
)
from graph_passes.ir.tensorflow_bridge import empty_graph

W = Variable("w", FLOAT, (2, 3), PARAMETER)
COUNT = Variable("count", INT32, (), STATE)
V = Variable("v", FLOAT, (4,), PARAMETER)
PRECISE = Variable("precise", DOUBLE, (1, 1), STATE)
ALL = (W, COUNT, V, PRECISE)


def value_of(variable: Variable, offset: float = 0) -> np.ndarray:
    """A value that tells variables and elements apart."""
    dtype = {FLOAT: "f4", DOUBLE: "f8", INT32: "i4"}[variable.dtype]
    start = 100 * ALL.index(variable) + offset
    return np.arange(start, start + np.prod(variable.shape, dtype=int)).reshape(variable.shape).astype(dtype)


def calls(*functions: tuple[str, FunctionDef, str]) -> GraphDef:
    """A graph with a call of each (name, function, device); arguments are placeholders ``name/x``, ``name/x_1``, ..."""
    builder = Builder(empty_graph())
    for name, function, device in functions:
        arguments = function.signature.input_arg
        inputs = [builder.append(placeholder(builder.names.fresh(f"{name}/x"), arg.type)) for arg in arguments]
        builder.append(call_node(name, function, inputs, device=device))
    merge_library(builder.graph, [function for _, function, _ in functions])
    return builder.graph


def test_values_that_are_loaded_are_read_and_saved_again() -> None:
    graph = calls(
        ("load", load_function("load", ALL), HOST),
        ("read", read_function("read", ALL), HOST),
        ("save", save_function("save", ALL), HOST),
    )
    groups = by_dtype(ALL).values()
    vectors = [np.concatenate([value_of(variable).ravel() for variable in group]) for group in groups]
    with Machine(graph) as machine:
        machine.run(
            [], dict(zip([Ref("load/x"), Ref("load/x_1"), Ref("load/x_2")], vectors, strict=True)), after=["load"]
        )
        for variable, value in zip(ALL, machine.run([Ref("read", index) for index in range(4)]), strict=True):
            np.testing.assert_array_equal(value, value_of(variable))
        for vector, value in zip(vectors, machine.run([Ref("save", index) for index in range(3)]), strict=True):
            np.testing.assert_array_equal(value, vector)


@pytest.mark.parametrize(
    ("shape", "count", "kept"),
    [((7,), 3, (3,)), ((41, 2), 2, (21, 2)), ((39, 2), 2, (39,))],
)
def test_each_device_keeps_its_shard_of_a_value_and_all_of_them_are_the_value_again(
    shape: tuple[int, ...], count: int, kept: tuple[int, ...]
) -> None:
    """Shards are rows where each has twenty at least, otherwise vectors; the last ones end with zeros."""
    whole = Variable("slot", FLOAT, shape, STATE)
    variable = dataclasses.replace(whole, shards=count)
    assert variable.storage_shape == kept
    value = np.arange(1, 1 + np.prod(shape)).reshape(shape).astype("f4")
    (places,) = devices(count)
    builder = Builder(empty_graph())
    functions = load_function("load", [variable]), read_function("read", [variable]), join_function("join", [variable])
    vector = builder.append(placeholder("vector", FLOAT))
    shards = []
    for number, place in enumerate(places):
        inputs = [vector, builder.const(number, INT32, device=place)]
        builder.append(call_node(f"load{number}", functions[0], inputs, device=place))
        shards.append(builder.append(call_node(f"read{number}", functions[1], [], device=place)))
    joined = builder.append(call_node("joined", functions[2], shards, device=HOST))
    merge_library(builder.graph, functions)
    with Machine(builder.graph, devices=count) as machine:
        machine.run([], {vector: value.ravel()}, after=[f"load{number}" for number in range(count)])
        own = machine.run(shards)
        np.testing.assert_array_equal(machine.run([joined])[0], value)
    assert {shard.shape for shard in own} == {kept}
    elements = np.concatenate([shard.ravel() for shard in own])
    np.testing.assert_array_equal(elements[: value.size], value.ravel())
    assert not np.any(elements[value.size :])


# ---- accumulation


def test_what_was_given_to_an_accumulator_does_not_change_when_it_grows() -> None:
    """The first value and the accumulator may share memory; adding to it must not."""
    builder = Builder(empty_graph())
    x = builder.append(placeholder("x", FLOAT))
    kept = builder.add("kept", "Neg", [x], T=builder.graph.node[0].attr["dtype"])
    functions = [accumulate_function(mode, [V], mode) for mode in ("first", "next")]
    first = builder.append(call_node("first", functions[0], [kept], device=HOST))
    builder.append(call_node("next", functions[1], [kept], device=HOST, control=[first.node]))
    merge_library(builder.graph, functions)
    with Machine(builder.graph) as machine:
        (value,) = machine.run([kept], {x: value_of(V)}, after=["next"])
        np.testing.assert_array_equal(value, -value_of(V))
        np.testing.assert_array_equal(machine.read(HOST, V)[0], -2 * value_of(V))
