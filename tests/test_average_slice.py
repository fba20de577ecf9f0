"""Operators of steps with tasks are placed for an average micro-batch: what runs once in a step counts less."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
from op_graphs import Builder, topology

import dapple_tf as dapple
from dapple_tf.describe.plan import PlanError
from dapple_tf.operators import step_placer
from dapple_tf.operators.average_slice import MICRO_BATCHES, Kinds, kind_of, place_average_slice
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.flops import MATMUL
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.rooflines import Roofline
from dapple_tf.operators.step_placer import OwnOperators
from graph_passes.ir.graph import BRACKET_ATTR, PHASE_ATTR, GraphDef
from graph_passes.ir.node_kinds import NodeKind

SLOW = Roofline(flops=1e9, bandwidth=1e9, launch=0.0, compute={MATMUL: 1e-3})
"""Devices on which even small products take long, and all else next to nothing."""
_KINDS = {"Read": NodeKind.READ, "F": NodeKind.FORWARD, "B": NodeKind.BACKWARD, "Apply": NodeKind.APPLY}


def test_a_backward_waits_for_the_forward() -> None:
    """What of a backward needs nothing of the forward seemed to fill what a placement leaves idle in the forward."""
    graph = GraphDef()
    for name, kind, inputs in (
        ("in", None, ()),
        ("f0", NodeKind.FORWARD, ("in",)),
        ("f1", NodeKind.FORWARD, ("f0",)),
        ("entry", NodeKind.BACKWARD, ("in", "^f1")),
        ("b0", NodeKind.BACKWARD, ("entry",)),
        ("b1", NodeKind.BACKWARD, ("b0", "f0")),
    ):
        node = graph.node.add(name=name, op="Identity", input=inputs)
        if kind is not None:
            node.attr[PHASE_ATTR].s = kind.text.encode()
        if name == "entry":
            node.attr[BRACKET_ATTR].b = True
    placed = {node.name: list(node.input) for node in OwnOperators(graph, {}).placed.node}
    assert placed == {"in": [], "f0": ["in"], "f1": ["f0"], "b0": ["^f1"], "b1": ["b0", "f0"]}
    # Nothing waits so in a step of one slice, which has no tasks.
    bare = {node.name: list(node.input) for node in OwnOperators(graph, {}).bare.node}
    assert bare == {**placed, "b0": []}


def test_a_backward_that_begins_with_constants_waits_for_the_forward() -> None:
    """Only the constants waited, which no device runs: a loss's backward began whenever it liked."""
    graph = GraphDef()
    for name, op, kind, inputs in (
        ("scale", "Const", NodeKind.FORWARD, ()),
        ("f", "Mul", NodeKind.FORWARD, ("scale",)),
        ("one", "Const", NodeKind.BACKWARD, ()),
        ("b0", "Mul", NodeKind.BACKWARD, ("one", "scale")),
        ("b1", "Mul", NodeKind.BACKWARD, ("b0", "one")),
        ("entry", "NoOp", None, ()),
    ):
        node = graph.node.add(name=name, op=op, input=inputs)
        if kind is not None:
            node.attr[PHASE_ATTR].s = kind.text.encode()
        if name == "entry":
            node.attr[BRACKET_ATTR].b = True
    placed = {node.name: list(node.input) for node in OwnOperators(graph, {}).placed.node}
    assert placed == {"scale": [], "f": ["scale"], "one": [], "b0": ["one", "scale", "^f"], "b1": ["b0", "one"]}


def step(apply_seconds: float) -> tuple[OpGraph, Kinds]:
    """Two variables, each read by one of two parallel forwards and updated after its backward."""
    builder = Builder(2)
    begin = builder.add("F", 1e-4, 1e6)
    ends = []
    for number in range(2):
        variable = builder.add("Read", 1e-6, 8e6, group=f"variable{number}")
        builder.stored[f"variable{number}"] = 8e6
        middle = builder.add("F", 1e-3, 1e6, (begin, variable))
        gradient = builder.add("B", 2e-3, 8e6, (middle, variable))
        ends.append(builder.add("Apply", apply_seconds, 1e3, (gradient,), group=f"variable{number}"))
    builder.add("Apply", 1e-6, 0.0, ends)
    graph = builder.graph()
    return graph, {name: _KINDS[op] for name, op in zip(graph.names, graph.ops, strict=True)}


def test_what_runs_once_counts_by_the_number_of_micro_batches() -> None:
    graph, kinds = step(4e-3)
    seen: list[OpGraph] = []

    def search(average: OpGraph, links: Topology, **options: object) -> OpPlacement:
        seen.append(average)
        return fd_dps(average, links)

    placement = place_average_slice(graph, topology(2), kinds, search=search)
    average, staying = seen
    assert np.array_equal(staying.seconds, average.seconds)
    once = np.array([op in ("Read", "Apply") for op in graph.ops])
    assert np.allclose(average.seconds[once], graph.seconds[once] / MICRO_BATCHES)
    assert np.array_equal(average.seconds[~once], graph.seconds[~once])
    assert np.allclose(average.tensor_bytes[once], graph.tensor_bytes[once] / MICRO_BATCHES)
    assert np.array_equal(average.tensor_bytes[~once], graph.tensor_bytes[~once])
    # It tells of a whole step, not of the average.
    assert placement.seconds >= 1e-4 + 1e-3 + 2e-3 + 4e-3


def test_a_placement_that_only_an_average_leaves_room_for_isnt_taken() -> None:
    graph, kinds = step(1e-3)
    alone = fd_dps(graph, topology(2, memory=np.inf))
    limit = 1.01 * max(alone.peak_bytes)
    calls: list[float] = []

    def search(given: OpGraph, links: Topology, **options: object) -> OpPlacement:
        calls.append(float(given.seconds.sum()))
        if len(calls) < 3:  # All on one device, which has room for the average only.
            return OpPlacement(dict.fromkeys(given.names, 0), given.names, {}, 1.0, (0.0, 0.0))
        return fd_dps(given, links)

    placement = place_average_slice(graph, topology(2, memory=limit), kinds, search=search)
    assert len(calls) == 3 and calls[2] == pytest.approx(float(graph.seconds.sum()))
    assert max(placement.peak_bytes) <= limit


def test_variables_stay_where_they_are_if_that_shortens_the_tasks() -> None:
    """Products were placed apart from their variables, which had to be sent before anything could run."""
    graph, kinds = step(1e-3)
    numbers = [op for op, kind in enumerate(graph.ops) if kind == "Read"]
    of_second = [graph.names[op] for op in np.flatnonzero(graph.groups == graph.groups[numbers[1]])]

    def search(average: OpGraph, links: Topology, **options: object) -> OpPlacement:
        if options.get("splits") == "none":
            return fd_dps(average, links)
        # The first product reads its variable from the other device.
        devices = dict.fromkeys(average.names, 0) | dict.fromkeys([*of_second, graph.names[numbers[0] + 1]], 1)
        return OpPlacement(devices, average.names, {}, 1.0, (0.0, 0.0))

    devices = place_average_slice(graph, topology(2), kinds, search=search).devices
    for op in numbers:
        assert devices[graph.names[op]] == devices[graph.names[op + 1]]


def test_variables_that_fit_no_device_together_are_placed_apart() -> None:
    """The search with readers on their variables' device failed, and with it that whose placement fits."""
    builder = Builder(2)
    variables = []
    for number in range(2):
        variables.append(builder.add("Read", 1e-6, 8e6, group=f"variable{number}"))
        builder.stored[f"variable{number}"] = 24e6
    middle = builder.add("F", 1e-3, 1e3, variables)
    gradient = builder.add("B", 1e-3, 8e6, (middle,))
    for number in range(2):
        builder.add("Apply", 1e-3, 1e3, (gradient,), group=f"variable{number}")
    graph = builder.graph()
    kinds = {name: _KINDS[op] for name, op in zip(graph.names, graph.ops, strict=True)}
    placement = place_average_slice(graph, topology(2, memory=45e6), kinds)
    assert placement.devices[graph.names[variables[0]]] != placement.devices[graph.names[variables[1]]]
    assert max(placement.peak_bytes) <= 45e6


def test_of_two_placements_the_one_that_fits_is_taken() -> None:
    """If the faster one had no room in a whole step, a search for a whole step replaced both."""
    graph, kinds = step(1e-3)
    apart = fd_dps(graph, topology(2), splits="none")
    assert set(apart.devices.values()) == {0, 1}
    searches: list[object] = []

    def search(average: OpGraph, links: Topology, **options: object) -> OpPlacement:
        searches.append(options.get("splits"))
        alone = OpPlacement(dict.fromkeys(average.names, 0), average.names, {}, 1.0, (0.0, 0.0))
        return alone if len(searches) == 1 else apart

    links = topology(2, latency=1.0, memory=1.1 * max(apart.peak_bytes))  # One device is faster, and has no room.
    placement = place_average_slice(graph, links, kinds, search=search)
    assert searches == [None, "none"] and placement.devices == apart.devices


def test_the_progress_of_both_searches_goes_from_0_to_1_once() -> None:
    graph, kinds = step(1e-3)
    shares: list[float] = []
    place_average_slice(graph, topology(2), kinds, progress=lambda text, share: shares.append(share))
    assert shares == sorted(shares) and shares[-1] <= 1.0 and min(shares) < 0.5 <= max(shares)


def test_what_fits_nowhere_is_an_error() -> None:
    graph, kinds = step(1e-3)
    with pytest.raises(PlanError):
        place_average_slice(graph, topology(2, memory=1e6), kinds)


def test_parts_have_the_purpose_of_their_operator() -> None:
    kinds = {"stage0/read/kernel": NodeKind.READ, "a": None}
    assert kind_of("stage0/read/kernel/split_0_1_2", kinds) is NodeKind.READ
    assert kind_of("a/part0", kinds) is None and kind_of("unknown/part0", kinds) is None


_ALONE = {"operator_devices": (((0, 1),),)}
_PLANS = {
    "one slice": (dapple.Plan.manual([], [[0]], 1, 4, **_ALONE), 0),
    "micro-batches": (dapple.Plan.manual([], [[0]], 2, 4, **_ALONE), 1),
    "replicas": (dapple.Plan.manual([], [[0, 2]], 1, 4, operator_devices=(((0, 1), (2, 3)),)), 1),
    "stages": (dapple.Plan.manual(["first"], [[0], [2]], 1, 4, operator_devices=(((0, 1),), ((2, 3),))), 2),
}
"""Plan, and the number of its stages that are placed for an average micro-batch."""


@pytest.mark.parametrize("case", _PLANS)
def test_steps_with_several_slices_are_placed_for_an_average_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With replicas, a step of one micro-batch was placed as if it had one slice."""
    plan, expected = _PLANS[case]
    averages: list[OpPlacement] = []

    def place(*arguments: Any, **options: Any) -> OpPlacement:
        averages.append(place_average_slice(*arguments, **options))
        return averages[-1]

    monkeypatch.setattr(step_placer, "place_average_slice", place)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, name="first")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2, name="second")(x))
    model.compile("sgd", "mse")
    devices = dataclasses.replace(dapple.Cluster.local(4, kind="cpu"), intra_bandwidth=1e9, intra_latency=1e-6)
    pipelined = dapple.transform(model, devices, plan, operator_costs=dapple.OperatorCosts({"CPU": SLOW}))
    pipelined.train_on_batch(np.ones((4, 4)), np.ones((4, 2)))
    assert len(averages) == expected
    pipelined.close()


def test_the_graph_isnt_changed() -> None:
    graph, kinds = step(1e-3)
    before = dataclasses.replace(graph, seconds=graph.seconds.copy(), tensor_bytes=graph.tensor_bytes.copy())
    place_average_slice(graph, topology(2), kinds)
    assert np.array_equal(graph.seconds, before.seconds) and np.array_equal(graph.tensor_bytes, before.tensor_bytes)
