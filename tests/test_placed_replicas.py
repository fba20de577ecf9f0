"""Replicas that place their operators on groups of devices train as plain Keras does, with all that goes with them."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import keras
import numpy as np
import pytest
from equivalence import (
    TOLERANCE,
    assert_same_training,
    assert_same_variables,
    largest_difference,
    pair,
    use_float64,
)
from placements import placed_in_halves

import dapple_tf as dapple
from dapple_tf.describe.plan import Plan
from dapple_tf.operators import step_placer
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import Topology
from dapple_tf.tools.evaluation.random_placements import random_placement
from dapple_tf.tools.hosts import LocalWorkers
from graph_passes.ir.graph import Graph, GraphDef
from graph_passes.ir.tensorflow_bridge import constant_value

layers = keras.layers
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(8, 4)), rng.normal(size=(8, 2))
LINKS = {"intra_bandwidth": 1e10, "intra_latency": 1e-6}
"""Links that needn't be measured."""


def cluster_of(devices: int) -> dapple.Cluster:
    return dataclasses.replace(dapple.Cluster.local(devices, kind="cpu"), **LINKS)


def towers() -> keras.Model:
    """Two parallel branches, with slots."""
    features = keras.Input((4,))
    x = layers.Add()([layers.Dense(4, activation="tanh")(features), layers.Dense(4, name="second")(features)])
    model = keras.Model(features, layers.Dense(2, name="last")(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


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
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_float64()
    monkeypatch.setattr(step_placer, "fd_dps", random_placement(1))
    model, plain = pair(towers)
    plan = Plan.data_parallel(4, 8).with_placed_operators(2)
    pipelined = dapple.transform(model, cluster_of(4), plan, operator_costs=OperatorCosts())
    # The second replica has no sample of the third batch.
    assert_same_training(pipelined, plain, [(X[:size], Y[:size], None) for size in (8, 5, 1, 8)])
    assert largest_difference(pipelined.predict(X[:7], verbose=0), plain.predict(X[:7], verbose=0)) <= 1e-10
    # What cuts a reduced gradient had been taken for an all-reduce without a number, an error without a text.
    reduced = [span for span in pipelined.profile_step(X, Y).step.timeline.spans if span.kind == "all_reduce"]
    assert {span.device for span in reduced} == {0, 1, 2, 3}

    names = pipelined.cluster.device_names
    places = [(names[0], names[2]), (names[1], names[3])]
    held = [holding.devices for holding in pipelined._engine.builder.holdings()]
    assert set(held) == set(places), "variables are in one place, or not in like ones"
    (built,) = (built for built in pipelined._engine.builder.builds.values() if built.updates)
    for graph in built.graphs.values():
        groups = all_reduces(graph)
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


@pytest.mark.slow
def test_replicas_on_workers(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64()
    monkeypatch.setattr(step_placer, "fd_dps", random_placement(1))
    model, plain = pair(towers)
    plan = Plan.data_parallel([0, 2, 1, 3], 8, 2, carried_updates=1).with_placed_operators(2)
    known = {"inter_bandwidth": 1e10, "inter_latency": 1e-6, **LINKS}
    cluster = dataclasses.replace(dapple.Cluster.of_servers(workers.addresses), **known)
    pipelined = dapple.transform(model, cluster, plan, operator_costs=OperatorCosts())
    assert_same_training(pipelined, plain, [(X[:size], Y[:size], None) for size in (8, 5, 8)])
    pipelined.close()


@pytest.mark.slow
def test_stages_on_one_device_are_compiled_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_placer, "fd_dps", placed_in_halves)
    use_float64()
    model, plain = pair(towers)
    placed = Plan.manual(["second"], [[0, 1], [2, 3]], 2, 8, jit_compile=True).with_placed_operators([1, 2])
    pipelined = dapple.transform(model, cluster_of(4), placed, operator_costs=OperatorCosts())
    assert_same_training(pipelined, plain, [(X[:size], Y[:size], None) for size in (8, 5, 8)])
    graphs = [graph for built in pipelined._engine.builder.builds.values() for graph in built.graphs.values()]
    functions = {f.signature.name: f for graph in graphs for f in graph.library.function}
    compiled = {name for name, function in functions.items() if "_XlaMustCompile" in function.attr}
    assert any("stage1_of" in name for name in compiled)
    assert any("stage1_apply" in name for name in compiled)
    assert not any("stage0_" in name for name in compiled)
    assert set(pipelined.placement) == {0}
    pipelined.close()
    with pytest.raises(dapple.PlanError, match="every stage places its operators on several; leave jit_compile out"):
        dataclasses.replace(Plan.data_parallel(2, 8), jit_compile=True).with_placed_operators()


def test_a_placement_is_for_the_slowest_of_like_devices() -> None:
    servers = [{"devices": 2, "memory_bytes": 4 * 2**30}, {"devices": 2, "memory_bytes": 2**30, "intra_bandwidth": 5e9}]
    text = {"format": "dapple_tf.cluster/1", "servers": servers, "intra_bandwidth": 12e9, "intra_latency": 1e-5}
    cluster = dapple.Cluster.from_json(json.dumps(text))
    topology = Topology.of_groups(cluster, [[0, 1], [2, 3]])
    assert topology.names == cluster.device_names[:2]
    assert topology.bandwidth[0, 1] == 5e9 and topology.memory_bytes.tolist() == [2**30, 2**30]


def test_sums_over_replicas_inside_layers_are_refused() -> None:
    features = keras.Input((4,))
    x = layers.BatchNormalization(synchronized=True)(layers.Dense(4)(features))
    model = keras.Model(features, layers.Dense(2)(x))
    model.compile("sgd", "mse")
    plan = Plan.data_parallel(4, 8).with_placed_operators(2)
    pipelined = dapple.transform(model, cluster_of(4), plan, operator_costs=OperatorCosts())
    with pytest.raises(dapple.PlanError, match=r"layers with synchronized=True, .* give each stage one replica"):
        pipelined.train_on_batch(X, Y)
