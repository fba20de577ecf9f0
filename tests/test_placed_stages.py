"""Worked cases of stages that place their operators, trained on four workers: they equal plain Keras.

A vocabulary's head that a stage of four devices splits, behind a stage of blocks (Out-Of-Order BackProp, section
8.4.2), and two models with branches, whose two stages have two devices each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from branching_models import BRANCHING, batch
from equivalence import assert_same_training, pair, use_float64

import dapple_tf as dapple
from dapple_tf.models.gpt import gpt
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.rooflines import Roofline
from dapple_tf.tools.hosts import LocalWorkers
from graph_passes.ir.tensorflow_bridge import NodeDef

VOCABULARY, LENGTH = 512, 4
SLOW_PRODUCTS = OperatorCosts({"CPU": Roofline(flops=1e8, bandwidth=1e9, launch=1e-6)})
"""Devices on which splitting even small operators pays."""
SLOW_STARTS = OperatorCosts({"CPU": Roofline(flops=1e13, bandwidth=1e13, launch=1e-3)})
"""Devices on which parts of an operator take as long as all of it, so that only branches are worth spreading."""


def vocabulary() -> keras.Model:
    model = gpt(vocabulary=VOCABULARY, sequence=LENGTH, depth=2, width=16, heads=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-2, epsilon=1e-3, global_clipnorm=0.5), loss)
    return model


def tokens(rng: np.random.Generator, samples: int) -> tuple[Any, Any]:
    x, y = rng.integers(0, VOCABULARY, (2, samples, LENGTH)).astype("int32")
    return x, y


def trained(
    workers: LocalWorkers,
    build: Callable[[], keras.Model],
    plan: dapple.Plan,
    batches: list[tuple[Any, Any]],
    costs: OperatorCosts,
) -> dapple.PipelinedModel:
    """Trains for a step of each batch, and compares everything with plain Keras."""
    use_float64()
    model, plain = pair(build)
    links = dict.fromkeys(("intra_bandwidth", "inter_bandwidth"), 1e10)
    links |= dict.fromkeys(("intra_latency", "inter_latency"), 1e-6)
    cluster = dataclasses.replace(dapple.Cluster.of_servers(workers.addresses), **links)
    pipelined = dapple.transform(model, cluster, plan, operator_costs=costs)
    assert_same_training(pipelined, plain, [(x, y, None) for x, y in batches])
    return pipelined


def placed_nodes(pipelined: dapple.PipelinedModel) -> Iterator[NodeDef]:
    """The operators of all training steps, as the session has them."""
    for built in pipelined._engine.builder.builds.values():
        if built.updates:
            for graph in built.graphs.values():
                yield from graph.node


@pytest.mark.thorough
@pytest.mark.slow
def test_a_vocabulary_is_split_over_a_group_behind_a_stage_of_blocks() -> None:
    groups = [[[0]], [[1, 3, 5, 7]]]
    plan = dapple.Plan.manual(["final_norm"], [[0], [1]], 2, 8, operator_devices=groups)
    rng = np.random.default_rng(0)
    with LocalWorkers(4, devices=2, echo=lambda *_: None) as workers:
        batches = [tokens(rng, samples) for samples in (8, 5, 8)]
        pipelined = trained(workers, vocabulary, plan, batches, SLOW_PRODUCTS)
        names = pipelined.cluster.device_names
        head = [node for node in placed_nodes(pipelined) if node.op == "MatMul" and "/logits" in node.name]
        for call in ("forward0", "backward0"):
            parts = {node.device for node in head if f"/{call}/" in node.name and "/part" in node.name}
            assert parts == {names[device] for device in (1, 3, 5, 7)}, call
        blocks = {node.device for node in placed_nodes(pipelined) if node.op == "MatMul" and "/block_" in node.name}
        assert blocks == {names[0]}
        assert {device.partition("/device:")[0] for device in names[1::2]} == {
            device.partition("/device:")[0] for device in names
        }, "the group has a device of each worker"
        assert pipelined.placement[1].splits and not pipelined.placement[0].splits
        pipelined.close()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut", "blocks", "micro_batches"),
    [("inception", "reduction", ("block_0", "block_1"), 2), ("nasnet", "cell_0", ("cell_0", "cell_1"), 1)],
)
def test_branches_are_spread_inside_of_both_stages(
    name: str, cut: str, blocks: tuple[str, str], micro_batches: int, workers: LocalWorkers
) -> None:
    """With one micro-batch, as BatchNormalization looks at the whole of it."""
    plan = dapple.Plan.manual([cut], [[0, 1], [2, 3]], micro_batches, 8).with_placed_operators()
    rng = np.random.default_rng(0)
    batches = [batch(rng, samples) for samples in (8, 5, 8)]
    pipelined = trained(workers, BRANCHING[name].build, plan, batches, SLOW_STARTS)
    names = pipelined.cluster.device_names
    for stage, block in enumerate(blocks):
        assert not pipelined.placement[stage].splits
        for kind in ("Conv2D", "Conv2DBackpropFilter"):
            own = {node.name: node.device for node in placed_nodes(pipelined) if node.op == kind and block in node.name}
            devices = {names[device] for device in plan.working_devices[stage]}
            assert set(own.values()) == devices, (kind, own)
    pipelined.close()
