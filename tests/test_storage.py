"""Variables on devices: functions that read, load, save and accumulate them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from programs import FLOAT, HOST, INT32, PARAMETER, STATE, Machine, devices, run

from graph_passes.ir.graph import Builder
from graph_passes.ir.outline import call_node, placeholder
from graph_passes.ir.program import Variable
from graph_passes.ir.storage import accumulate_function, join_function, load_function, merge_library, read_function
from graph_passes.ir.tensorflow_bridge import empty_graph

V = Variable("v", FLOAT, (4,), PARAMETER)


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
    total = builder.append(call_node("total", read_function("read", [V]), [], device=HOST, control=["next"]))
    merge_library(builder.graph, [*functions, read_function("read", [V])])
    given = np.arange(4, dtype="f4")
    value, sum_of_both = run(builder.graph, [kept, total], {x: given})
    np.testing.assert_array_equal(value, -given)
    np.testing.assert_array_equal(sum_of_both, -2 * given)
