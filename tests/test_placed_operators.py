"""Steps whose operators FD-DPS places train as plain Keras does, on several devices and on groups of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import TOLERANCE, assert_same_training, assert_same_variables, pair, use_float64

import dapple_tf as dapple
from dapple_tf.describe.plan import Plan
from dapple_tf.operators import step_placer
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpPlacement, Topology
from dapple_tf.operators.rooflines import Roofline
from dapple_tf.tools.evaluation.random_placements import random_placement
from graph_passes.ir.graph import Graph, GraphDef
from graph_passes.ir.tensorflow_bridge import constant_value

layers = keras.layers
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(8, 4)), rng.normal(size=(8, 2))
SLOW_CORES = OperatorCosts({"CPU": Roofline(flops=1e8, bandwidth=1e9, launch=1e-6)})
"""Devices on which splitting even small operators pays."""


def cluster_of(devices: int) -> dapple.Cluster:
    """Local devices whose links needn't be measured."""
    return dataclasses.replace(dapple.Cluster.local(devices, kind="cpu"), intra_bandwidth=1e10, intra_latency=1e-6)


@pytest.fixture
def averages(monkeypatch: pytest.MonkeyPatch) -> list[OpPlacement]:
    """Placements of average micro-batches."""
    made, average = list[OpPlacement](), step_placer.place_average_slice

    def place(*arguments: Any, **options: Any) -> OpPlacement:
        made.append(average(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(step_placer, "place_average_slice", place)
    return made


def towers(*norms: keras.layers.Layer, width: int = 4) -> keras.Model:
    """Two parallel branches, with slots."""
    features = keras.Input((4,))
    x = layers.Add()([layers.Dense(width, "tanh")(features), layers.Dense(width, name="second")(features)])
    for norm in norms:
        x = norm(x)
    model = keras.Model(features, layers.Dense(2, name="last")(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def test_operators_run_where_and_when_they_were_placed(averages: list[OpPlacement]) -> None:
    use_float64()
    model, plain = pair(lambda: towers(width=64))
    pipelined = dapple.transform(model, cluster_of(4), Plan.by_operators(4, 8), operator_costs=SLOW_CORES)
    assert_same_training(pipelined, plain, [(X, Y, None)])
    assert not averages
    placement, names = pipelined.placement[0], pipelined.cluster.device_names
    assert placement.splits and set(placement.devices.values()) == {0, 1, 2, 3}
    position = {name: number for number, name in enumerate(placement.order)}
    ran = []
    for device in pipelined.trace_step(X, Y).dev_stats:
        starts = [(node.all_start_nanos, node.node_name.partition("/")[2]) for node in device.node_stats]
        own = [name for _, name in sorted(starts) if name in position]
        assert all(names[placement.devices[name]] == device.device for name in own)
        assert all(position[one] < position[other] for one, other in itertools.pairwise(own))
        ran += own
    assert len(ran) > 0.8 * len(position)  # TensorFlow computes constants beforehand.
    pipelined.close()


def all_reduces(graph: GraphDef) -> set[tuple[int, frozenset[str]]]:
    """The key and the devices of each all-reduce's group."""
    view = Graph(graph)
    members: dict[tuple[int, int], set[str]] = {}
    for node in view:
        if node.op == "CollectiveReduceV2":
            key, instance = (int(constant_value(view.nodes[ref.node])) for ref in view.inputs(node.name)[2:4])
            members.setdefault((instance, key), set()).add(node.device)
    return {(key, frozenset(devices)) for (_, key), devices in members.items()}


def test_variables_and_all_reduces_are_in_like_places_of_the_replicas(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, averages: list[OpPlacement]
) -> None:
    """With replicas, a step of one micro-batch was placed as if it had one slice."""
    use_float64()
    monkeypatch.setattr(step_placer, "fd_dps", random_placement(1))
    model, plain = pair(towers)
    plan = Plan.data_parallel(4, 8).with_placed_operators(2)
    pipelined = dapple.transform(model, cluster_of(4), plan, operator_costs=OperatorCosts())
    # The second replica has no sample of the second batch.
    assert_same_training(pipelined, plain, [(X[:size], Y[:size], None) for size in (8, 1, 8)])
    assert averages
    # What cuts a reduced gradient had been taken for an all-reduce without a number, an error without a text.
    reduced = [span for span in pipelined.profile_step(X, Y).step.timeline.spans if span.kind == "all_reduce"]
    assert {span.device for span in reduced} == {0, 1, 2, 3}
    names = pipelined.cluster.device_names
    places = [(names[0], names[2]), (names[1], names[3])]
    held = [holding.devices for holding in pipelined._engine.builder.holdings]
    assert set(held) == set(places), "variables are in one place, or not in like ones"
    (built,) = (built for built in pipelined._engine.builder.builds.values() if built.updates)
    for step in built.steps.values():
        groups = all_reduces(step.graph)
        assert {devices for _, devices in groups} == set(map(frozenset, places))
        assert len({key for key, _ in groups}) == 2, "groups of different devices have one key"

    saved = pipelined.save_checkpoint(tmp_path)
    pipelined.close()
    other, _ = pair(towers, seed=4)
    whole = dapple.transform(other, cluster_of(2), Plan.data_parallel(2, 8))
    whole.restore_checkpoint(saved)
    whole.sync()
    assert_same_variables(other, plain, TOLERANCE["float64"])
    whole.close()


def test_a_placement_is_for_the_slowest_of_like_devices() -> None:
    servers = [{"devices": 2, "memory_bytes": 4 * 2**30}, {"devices": 2, "memory_bytes": 2**30, "intra_bandwidth": 5e9}]
    text = {"format": "dapple_tf.cluster/1", "servers": servers, "intra_bandwidth": 12e9, "intra_latency": 1e-5}
    cluster = dapple.Cluster.from_json(json.dumps(text))
    topology = Topology.of_groups(cluster, [[0, 1], [2, 3]])
    assert topology.names == cluster.device_names[:2]
    assert topology.bandwidth[0, 1] == 5e9 and topology.memory_bytes.tolist() == [2**30, 2**30]


def test_sums_over_replicas_inside_layers_and_compiled_stages_are_refused() -> None:
    plan = Plan.data_parallel(4, 8).with_placed_operators(2)
    model = towers(layers.BatchNormalization(synchronized=True))
    pipelined = dapple.transform(model, cluster_of(4), plan, operator_costs=OperatorCosts())
    with pytest.raises(dapple.PlanError, match=r"layers with synchronized=True, .* give each stage one replica"):
        pipelined.train_on_batch(X, Y)
    with pytest.raises(dapple.PlanError, match="no plan has operator_devices, several for each replica and jit_"):
        dataclasses.replace(Plan.data_parallel(2, 8), jit_compile=True).with_placed_operators()
