"""Plans across all levels beside the best of each level alone: stages with replicas, data parallelism, operators.

    python -m tools.evaluation.combined                                     # computes and prints
    python -m tools.evaluation.combined --json=docs/results/combined.json   # and keeps the numbers
    python -m tools.evaluation.combined_report                              # combined.json -> combined.md beside it

All is simulated, by one profile of each model from the rooflines of a P100: whole stages by the planner's simulator,
operators by that of FD-DPS, relative to what it says of one device. Nothing is run; it takes half an hour.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from absl import flags

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import ZERO, LayerProfile
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.group_profiler import GroupProfiler
from dapple_tf.measuring.layers_by_operator import layers_by_operator, stage_operators
from dapple_tf.measuring.profiled_model import ProfiledModel
from dapple_tf.models import gpt
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.planning.plan_reasons import shape
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import find
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.combined_report import table

logger = logging.getLogger(__name__)

FLAGS = flags.FlagValues()

_JSON = flags.DEFINE_string("json", None, "File for the numbers, see bench_report.", flag_values=FLAGS)
_ONLY = flags.DEFINE_string("only", None, "Compute this model only.", flag_values=FLAGS)

_EFFORT = 0.1
"""Share of FD-DPS' usual search, which a real step gets."""

layers = keras.layers


def blocks() -> keras.Model:
    """Returns two blocks of four parallel branches of three wide dense layers, a dense layer before and after each."""
    x = inputs = keras.Input((1024,))
    for block in range(2):
        x = layers.Dense(2048, activation="relu", name=f"enter_{block}")(x)
        ends = []
        for branch in range(4):
            y = x
            for number in range(3):
                y = layers.Dense(2048, activation="relu", name=f"block_{block}_{branch}_{number}")(y)
            ends.append(y)
        x = layers.Add(name=f"join_{block}")(ends)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x), name="blocks")


def images_then_branches() -> keras.Model:
    """Returns convolutions on large images, with few parameters, and then four branches with nearly all parameters."""
    x = inputs = keras.Input((64, 64, 3))
    for number in range(6):
        x = layers.Conv2D(64, 3, padding="same", activation="relu", name=f"conv_{number}")(x)
    x = layers.GlobalAveragePooling2D(name="pooled")(x)
    x = layers.Dense(4096, activation="relu", name="enter")(x)
    ends = [
        layers.Dense(4096, activation="relu", name=f"branch_{branch}_1")(
            layers.Dense(4096, activation="relu", name=f"branch_{branch}_0")(x)
        )
        for branch in range(4)
    ]
    x = layers.Add(name="join")(ends)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x), name="images_then_branches")


def inception() -> keras.Model:
    """Returns three blocks of four parallel branches of convolutions."""
    x = inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(128, 3, padding="same", activation="relu", name="stem")(x)
    for block in range(3):
        ends = []
        for branch in range(4):
            y = layers.Conv2D(64, 1, activation="relu", name=f"block_{block}_{branch}_0")(x)
            for number in range(1, 3):
                y = layers.Conv2D(64, 3, padding="same", activation="relu", name=f"block_{block}_{branch}_{number}")(y)
            ends.append(y)
        x = layers.Concatenate(name=f"join_{block}")(ends)
    x = layers.GlobalAveragePooling2D(name="pooled")(x)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x), name="inception")


def chain() -> keras.Model:
    """Returns a chain of ten like convolutions."""
    x = inputs = keras.Input((32, 32, 3))
    for number in range(10):
        x = layers.Conv2D(128, 3, padding="same", activation="relu", name=f"conv_{number}")(x)
    x = layers.GlobalAveragePooling2D(name="pooled")(x)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x), name="chain")


def gpt_of_long_samples() -> keras.Model:
    """Returns a GPT of eight blocks of width 2,048, for samples of 512 tokens."""
    return gpt.build(gpt.GptConfig(vocabulary=1024, sequence=512, depth=8, width=2048, heads=16))


MODELS: Mapping[str, tuple[Callable[[], keras.Model], int]] = {
    "gpt": (gpt_of_long_samples, 2),
    "gpt, larger batch": (gpt_of_long_samples, 4),
    "blocks": (blocks, 32),
    "blocks, larger batch": (blocks, 128),
    "images_then_branches": (images_then_branches, 32),
    "inception": (inception, 32),
    "chain": (chain, 64),
}
"""Name -> function that returns the model, and samples of a step."""


def cluster_of(servers: int, devices: int, inside: float, between: float) -> dapple.Cluster:
    """Returns GPUs of 16 GB.

    Args:
        servers: number of servers.
        devices: number of GPUs of each.
        inside: bytes/s between two GPUs of a server.
        between: bytes/s of a server's network card.
    """
    described = ", ".join([f'{{"devices": {devices}, "memory_bytes": {15 * 10**9}}}'] * servers)
    return dapple.Cluster.from_json(
        f'{{"format": "dapple_tf.cluster/1", "servers": [{described}], "intra_bandwidth": {inside}, '
        f'"intra_latency": 5e-6, "inter_bandwidth": {between}, "inter_latency": 3e-5}}'
    )


CLUSTERS: Mapping[str, dapple.Cluster] = {
    "4 GPUs": cluster_of(1, 4, 40e9, 1.25e9),
    "2 x 2 GPUs, 10 Gbit/s between": cluster_of(2, 2, 40e9, 1.25e9),
    "2 x 4 GPUs, 25 Gbit/s between": cluster_of(2, 4, 40e9, 3.125e9),
}
"""Name -> the devices and links, all with the same ones inside servers; the largest server comes first."""


def estimated_profile(model: keras.Model, sizes: tuple[int, int], device: str, costs: OperatorCosts) -> dapple.Profile:
    """Returns a profile of a compiled model by rooflines: times of its operators on a kind of device, one by one.

    Args:
        model: the model.
        sizes: samples of the slices.
        device: name of the device.
        costs: the rooflines.
    """
    example, table = ExampleBatch.of(model), VariableTable(model)
    build(model, table, example.spec)
    captured = capture(model, table, Mode.TRAIN, example.spec)
    profiled = ProfiledModel(model, table, captured, example, sizes, dapple.Cluster.local(1, kind="cpu"), 0, 1)
    table.add_optimizer(model.optimizer)
    program = profiled.program
    operators = {samples: stage_operators(program, profiled.sample_shapes, samples) for samples in sizes}
    anything = dapple.Profile(model.name, device, sizes, (LayerProfile("any", ZERO, ZERO),), ())
    names, shapes = profiled.stages.names, profiled.sample_shapes
    return layers_by_operator(program, names, table, shapes, operators, None, anything, costs)


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Yields a record for each cluster: seconds of a model's step by the best plan of each kind."""
    make, batch = MODELS[name]
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    costs, sizes = OperatorCosts.p100(), (max(1, batch // 8), batch)
    first = next(iter(CLUSTERS.values()))
    alone = estimated_profile(model, sizes, first.device_names[0], costs)
    profiler = GroupProfiler(model, alone, first, costs, sizes, effort=_EFFORT)
    profile = profiler.pieces()
    on_server: dict[int, float] = {}  # number of a server's devices -> seconds: links inside servers are the same
    for cluster_name, cluster in CLUSTERS.items():
        server = cluster.devices_of(0)
        if len(server) not in on_server:
            on_server[len(server)] = profiler.whole_seconds(cluster, batch, server)
        everywhere = on_server[len(server)]
        if len(server) < cluster.num_devices:
            everywhere = profiler.whole_seconds(cluster, batch)
        plain = dapple.plan(alone, cluster, batch)
        combined = find(PlanRequest.of(profile, cluster, batch), profiler.searched)
        assert plain.report is not None and combined.report is not None
        yield {
            "model": name,
            "cluster": cluster_name,
            "batch": batch,
            "one_device_ms": None if plain.report.one_device is None else 1e3 * plain.report.one_device,
            "data_parallel_ms": None if plain.report.data_parallel is None else 1e3 * plain.report.data_parallel,
            "operators_ms": 1e3 * everywhere,
            "operators_on_a_server_ms": 1e3 * on_server[len(server)],
            "stages_ms": 1e3 * plain.report.latency,
            "stages": f"{shape(plain)}, {plain.schedule}",
            "combined_ms": 1e3 * combined.report.latency,
            "combined": f"{shape(combined)}, {combined.schedule}" if combined.spread_stages else None,
            "limited_by": combined.report.limited_by,
        }


def main() -> None:
    """Computes, prints and writes."""
    check_output(_JSON.value)
    names = list(MODELS) if _ONLY.value is None else [_ONLY.value]
    for name in names:
        command.check(name in MODELS, f"--only={name}: unknown; use one of {', '.join(MODELS)}")
    records: list[dict[str, Any]] = []
    for name in names:
        records += rows(name)
        if _JSON.value is not None:
            write_results(_JSON.value, "combined", records, kind="simulated")
    print(table(records))


if __name__ == "__main__":
    command.start(main, FLAGS)
