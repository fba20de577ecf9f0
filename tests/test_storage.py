"""Variables on devices: functions that read, load, save and accumulate them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from programs import DOUBLE, FLOAT, HOST, INT32, PARAMETER, STATE, Machine, devices
from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.program import Variable
from graph_passes.ir.storage import (
    accumulate_function,
    assign,
    buckets,
    by_dtype,
    filled,
    flatten,
    join_function,
    load_function,
    merge_gradients,
    merge_library,
    read,
    read_function,
    save_function,
    unflatten,
)
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.ir.text import function_text

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


def test_variables_travel_as_one_vector_for_each_dtype() -> None:
    assert by_dtype(ALL) == {FLOAT: (W, V), DOUBLE: (PRECISE,), INT32: (COUNT,)}
    assert list(by_dtype(ALL)) == sorted([FLOAT, DOUBLE, INT32])
    load, save = load_function("load", ALL), save_function("save", ALL)
    assert [arg.type for arg in load.signature.input_arg] == list(by_dtype(ALL))
    assert [arg.type for arg in save.signature.output_arg] == list(by_dtype(ALL))


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


def test_one_function_serves_the_variables_of_whichever_device_runs_it() -> None:
    (places,) = devices(2)
    function = read_function("read", [W])
    with Machine(calls(*((f"read{i}", function, place) for i, place in enumerate(places))), devices=2) as machine:
        for index, place in enumerate(places):
            machine.load(place, [W], [value_of(W, 10 * index)])
        for index, value in enumerate(machine.run([Ref("read0"), Ref("read1")])):
            np.testing.assert_array_equal(value, value_of(W, 10 * index))


@pytest.mark.parametrize(
    ("shape", "count", "kept"),
    [((2, 3), 2, (3,)), ((2, 3), 4, (2,)), ((7,), 3, (3,)), ((41, 2), 2, (21, 2)), ((39, 2), 2, (39,))],
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


def test_functions_of_no_variables_have_no_arguments_and_no_results() -> None:
    assert function_text(load_function("load", [])) == "load() -> ()\n"
    assert function_text(save_function("save", [])) == "save() -> ()\n"
    assert function_text(read_function("read", [])) == "read() -> ()\n"


# ---- accumulation


@pytest.mark.parametrize(
    ("mode", "op", "arguments"),
    [("first", "AssignVariableOp", 2), ("next", "AssignAddVariableOp", 2), ("none", "AssignVariableOp", 0)],
)
def test_accumulation_overwrites_first_then_adds_and_without_samples_sets_zeros(
    mode: str, op: str, arguments: int
) -> None:
    function = accumulate_function("f", [W, V], mode)
    assert [each.op for each in function.node_def if each.op.startswith("Assign")] == [op, op]
    assert len(function.signature.input_arg) == arguments
    assert function.signature.is_stateful
    assert len(function.control_ret) == 2


def test_accumulators_hold_sums_of_what_came_since_the_first() -> None:
    modes = ("first", "next", "none")
    graph = calls(*((mode, accumulate_function(mode, [W, V], mode), HOST) for mode in modes))
    with Machine(graph) as machine:
        machine.load(HOST, [W, V], [value_of(W, 7), value_of(V, 7)])
        for mode, factor in (("first", 1), ("next", 2), ("next", 4), ("first", 8), ("next", 16)):
            given = {Ref(f"{mode}/x"): factor * value_of(W), Ref(f"{mode}/x_1"): factor * value_of(V)}
            machine.run([], given, after=[mode])
            expected = {1: 1, 2: 3, 4: 7, 8: 8, 16: 24}[factor]
            for variable, value in zip((W, V), machine.read(HOST, W, V), strict=True):
                np.testing.assert_array_equal(value, expected * value_of(variable))
        machine.run([], after=["none"])
        for variable, value in zip((W, V), machine.read(HOST, W, V), strict=True):
            np.testing.assert_array_equal(value, np.zeros(variable.shape))


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


# ---- vectors


def test_flatten_and_unflatten_undo_each_other() -> None:
    builder = Builder(empty_graph())
    places = [builder.append(placeholder(name, FLOAT)) for name in ("a", "b", "c")]
    shapes = [(2, 3), (), (4,)]
    flat = builder.concat("flat", [flatten(builder, place, FLOAT) for place in places], FLOAT, 0)
    parts = unflatten(builder, flat, FLOAT, shapes)
    values = [np.arange(6, dtype="f").reshape(2, 3), np.float32(7), np.arange(4, dtype="f")]
    with Machine(builder.graph) as machine:
        vector, *got = machine.run([flat, *parts], dict(zip(places, values, strict=True)))
    assert vector.shape == (11,)
    for value, part in zip(values, got, strict=True):
        np.testing.assert_array_equal(part, value)


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE, types_pb2.DT_HALF, INT32])
def test_zeros_have_shape_and_dtype(dtype: int) -> None:
    builder = Builder(empty_graph())
    tensors = [filled(builder, dtype, shape) for shape in ((2, 3), ())]
    with Machine(builder.graph) as machine:
        values = machine.run(tensors)
    assert [value.shape for value in values] == [(2, 3), ()]
    assert not any(value.any() for value in values)


def test_an_assignment_is_an_effect_of_a_function() -> None:
    builder = Builder(empty_graph())
    value = builder.append(placeholder("value", FLOAT))
    name = assign(builder, "v", value, FLOAT, (4,))
    before = read(builder, "v", FLOAT, (4,))
    assert (name, before) == ("assign/v", Ref("read/v"))
    function = outline("f", Graph(builder.graph), [value], [], effects=[name])
    assert [each.op for each in function.node_def] == ["VarHandleOp", "AssignVariableOp"]
    assert function.node_def[0].attr["shared_name"].s == b"v"


# ---- buckets


def sizes(all_buckets: list[tuple[Variable, ...]]) -> list[list[str]]:
    return [[variable.name for variable in bucket] for bucket in all_buckets]


def test_a_bucket_is_filled_up_to_its_limit_and_a_larger_variable_has_its_own() -> None:
    variables = [Variable(str(index), FLOAT, (size,), PARAMETER) for index, size in enumerate((2, 2, 1, 9, 1, 3))]
    assert sizes(buckets(variables, 16)) == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert sizes(buckets(variables, 1)) == [["0"], ["1"], ["2"], ["3"], ["4"], ["5"]]
    assert sizes(buckets(variables, 1 << 20)) == [["0", "1", "2", "3", "4", "5"]]
    assert buckets([], 16) == []


def test_a_bucket_has_one_dtype() -> None:
    assert sizes(buckets([W, V, PRECISE, COUNT], 1 << 20)) == [["w", "v"], ["precise"], ["count"]]


# ---- the library


def named(*names: str) -> list[FunctionDef]:
    functions = [FunctionDef() for _ in names]
    for function, name in zip(functions, names, strict=True):
        function.signature.name = name
    return functions


def test_functions_and_gradients_are_added_to_a_library_once_for_each_name() -> None:
    graph = empty_graph()
    merge_library(graph, named("f", "g", "f"))
    merge_library(graph, named("g", "h"))
    assert [function.signature.name for function in graph.library.function] == ["f", "g", "h"]
    merge_gradients(graph, {"f": "df"})
    merge_gradients(graph, {"f": "other", "g": "dg"})
    assert [(g.function_name, g.gradient_func) for g in graph.library.gradient] == [("f", "df"), ("g", "dg")]
