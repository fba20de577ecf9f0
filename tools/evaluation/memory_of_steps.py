"""Peak memory of real training steps, by allocation records, beside what the simulator expects: for every policy."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf import text_table
from dapple_tf.frontend.capture import Mode
from dapple_tf.models.gpt import gpt
from dapple_tf.models.resnet import resnet
from dapple_tf.progress import Progress
from graph_passes.ir.program import Program, Step
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import dtype_size
from graph_passes.passes.accumulate import accumulated_gradients

Arrays = tuple[np.ndarray, np.ndarray]


# ---- what is trained


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and how it is cut.

    Attributes:
        build: makes it, compiled.
        batch: makes as many samples.
        samples: of a global batch.
        cuts: number of stages -> where they end.
        micro_batches: M in pipelines.
        chunks: of data parallelism.
    """

    build: Callable[[], keras.Model]
    batch: Callable[[int], Arrays]
    samples: int
    cuts: Mapping[int, Sequence[str]]
    micro_batches: int = 8
    chunks: int = 4


def mlp() -> keras.Model:
    """Dense layers of equal size."""
    hidden = [keras.layers.Dense(512, activation="relu", name=f"dense_{i}") for i in range(16)]
    model = keras.Sequential([keras.Input((512,)), *hidden, keras.layers.Dense(10, name="logits")], name="mlp")
    model.compile(keras.optimizers.SGD(1e-2, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def transformer() -> keras.Model:
    """A GPT of four blocks."""
    model = gpt(vocabulary=256, sequence=64, width=128, heads=4, depth=4)
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def residual() -> keras.Model:
    """A ResNet of four groups of blocks."""
    model = resnet(image=32, width=16, blocks=(1, 2, 2, 1))
    model.compile(keras.optimizers.SGD(1e-2, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _vectors(samples: int) -> Arrays:
    draw = np.random.default_rng(0)
    return draw.normal(size=(samples, 512)).astype("float32"), draw.integers(0, 10, samples)


def _tokens(samples: int) -> Arrays:
    text = np.random.default_rng(0).integers(0, 256, (samples, 65)).astype("int32")
    return text[:, :-1], text[:, 1:]


def _images(samples: int) -> Arrays:
    draw = np.random.default_rng(0)
    return draw.normal(size=(samples, 32, 32, 3)).astype("float32"), draw.integers(0, 10, samples)


MODELS = {
    "mlp": Model(
        mlp,
        _vectors,
        4096,
        {3: ["dense_4", "dense_9"], 4: ["dense_3", "dense_7", "dense_11"]},
    ),
    "gpt": Model(
        transformer,
        _tokens,
        64,
        {3: ["block_0", "block_2"], 4: ["block_0", "block_1", "block_2"]},
    ),
    "resnet": Model(
        residual,
        _images,
        128,
        {
            3: ["block_0", "block_2"],
            4: ["block_0", "block_2", "block_4"],
            8: ["stem", "block_0", "block_1", "block_2", "block_3", "block_4", "pool"],
        },
        micro_batches=4,
        chunks=8,
    ),
}

STRAIGHT = [[0], [1], [2]]
PERIODIC = [[0], [1], [0], [1]]
VEE = [[0], [1], [1], [0]]
CHUNKS = [[0, 1]]
POLICIES: dict[str, tuple[str, list[list[int]], dict[str, Any]]] = {
    "gpipe": ("gpipe", STRAIGHT, {}),
    "dapple_a": ("dapple_a", STRAIGHT, {}),
    "dapple_b": ("dapple_b", STRAIGHT, {}),
    "fast_forward": ("fast_forward", STRAIGHT, {}),
    "fast_forward_a": ("fast_forward_a", STRAIGHT, {}),
    "fast_forward_b": ("fast_forward_b", STRAIGHT, {}),
    "zb_h1": ("zb_h1", STRAIGHT, {}),
    "zb_h2": ("zb_h2", STRAIGHT, {}),
    "zero_bubble": ("zero_bubble", STRAIGHT, {"warm_up": [3, 2, 1]}),
    "modulo": ("modulo", PERIODIC, {}),
    "interleaved": ("interleaved", PERIODIC, {}),
    "zb_v": ("zb_v", VEE, {}),
    "conventional": ("dapple_a", CHUNKS, {"wait_free": False}),
    "wait_free": ("dapple_a", CHUNKS, {}),
    "reverse_first_2": ("dapple_a", CHUNKS, {"reverse_first_k": 2}),
    "reverse_first_3": ("dapple_a", CHUNKS, {"reverse_first_k": 3}),
    "reverse_first_4": ("dapple_a", CHUNKS, {"reverse_first_k": 4}),
    "carried_updates": ("dapple_a", CHUNKS, {"reverse_first_k": 2, "carried_updates": 2}),
}
"""Name -> schedule, devices of each stage, further options. `CHUNKS` stands for data parallelism of one micro-batch."""


def plan_of(model: Model, policy: str) -> dapple.Plan:
    """The plan that trains a model by a policy."""
    schedule, devices, options = POLICIES[policy]
    micro_batches, samples = model.micro_batches, model.samples
    if devices == CHUNKS:  # as many samples at a time as in a pipeline
        devices, micro_batches, samples = CHUNKS * model.chunks, 1, 2 * samples // micro_batches
    return dapple.Plan.manual(model.cuts[len(devices)], devices, micro_batches, samples, schedule, **options)


# ---- measuring


def traced_step(pipelined: dapple.PipelinedModel) -> tuple[Program, str, Step]:
    """The stages of the last training step that was made, its name in the session's graph, and its nodes."""
    (build,) = [build for (mode, *_), build in pipelined._engine._builds.items() if mode is Mode.TRAIN]
    name, step = list(build.steps.values())[-1]
    return build.program, name, step


def replaced(program: Program, name: str, step: Step) -> dict[str, int]:
    """Node that sets accumulators anew -> bytes of their values from the step before, which it frees.

    They were allocated then, so that this step's records don't tell.
    """
    found = {}
    for stage in program.stages:
        phase, _ = stage.parameter_gradients
        sizes = [int(np.prod(v.shape)) * dtype_size(v.dtype) for _, v in accumulated_gradients(program, stage)]
        tasks = [task for task in step.entry if (task.stage, task.phase) == (stage.index, phase)]
        for replica in {task.replica for task in tasks} if sizes else ():
            first = min((task for task in tasks if task.replica == replica), key=_micro_batch)
            for node in set(step.exit[first]) - {step.entry[first]}:
                found[f"{name}/{node}"] = sum(sizes)
    return found


def _micro_batch(task: Task) -> int:
    return task.micro_batch


def peaks(pipelined: dapple.PipelinedModel, x: np.ndarray, y: np.ndarray) -> dict[int, int]:
    """Device -> the most bytes that it holds in a step."""
    engine = pipelined._engine
    stats = pipelined.trace_step(x, y)
    program, name, step = traced_step(pipelined)
    frees = replaced(program, name, step)
    found = {}
    for index, device in enumerate(engine.cluster.device_names):
        events = []
        for own in stats.dev_stats:
            for node in own.node_stats if own.device == device else ():
                events += [(r.alloc_micros, r.alloc_bytes) for memory in node.memory for r in memory.allocation_records]
                if node.node_name in frees:
                    events.append((node.all_start_micros + node.all_end_rel_micros, -frees[node.node_name]))
        held = np.cumsum([0, *(size for _, size in sorted(events))])
        found[index] = engine._stored_bytes(program, device) + int(held.max())
    return found


def measure(model: Model, policy: str, cluster: dapple.Cluster, steps: int) -> dict[int, list[int]]:
    """Device -> its peak in each of so many steps."""
    plan = plan_of(model, policy)
    keras.utils.set_random_seed(0)
    pipelined = dapple.transform(model.build(), cluster, plan)
    x, y = model.batch(plan.global_batch_size)
    for _ in range(3):
        pipelined.train_on_batch(x, y)
    runs = [peaks(pipelined, x, y) for _ in range(steps)]
    pipelined.close()
    used = sorted({device for devices in plan.devices for device in devices})
    return {device: [run[device] for run in runs] for device in used}


def check(name: str, policies: Sequence[str], steps: int, *, repeats: int, cache: bool) -> Iterator[dict[str, Any]]:
    """Profiles a model and trains it by each policy; yields a row for each device."""
    model = MODELS[name]
    slices = sorted({model.samples // model.micro_batches, max(1, model.samples // model.micro_batches // 2)})
    cluster = dapple.Cluster.local(3, kind="cpu")
    profile = dapple.profile(model.build(), slices, cluster=cluster, cache=cache, repeats=repeats)
    bar = Progress(f"training {name}", len(policies), shown=True)
    for policy in policies:
        plan = plan_of(model, policy)
        predicted = dapple.simulate(plan, profile, cluster).peak_bytes
        for device, found in measure(model, policy, cluster, steps).items():
            measured = statistics.median(found)
            yield {
                "model": name,
                "policy": policy,
                "device": device,
                "predicted": predicted[device],
                "measured": measured,
                "least": min(found),
                "most": max(found),
                "error": predicted[device] / measured - 1,
            }
        bar.step(policy)
    bar.close()


# ---- showing


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows for people."""
    cells = [("model", "policy", "device", "predicted MB", "measured MB", "least to most", "error")]
    for row in rows:
        cells.append(
            (
                row["model"],
                row["policy"],
                str(row["device"]),
                f"{row['predicted'] / 1e6:.2f}",
                f"{row['measured'] / 1e6:.2f}",
                f"{row['least'] / 1e6:.2f} to {row['most'] / 1e6:.2f}",
                f"{row['error']:+.1%}",
            )
        )
    return text_table.table(cells, left=2)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest error of each policy, and the peaks of delayed weight gradients beside conventional ones."""
    worst: dict[str, Mapping[str, Any]] = {}
    totals: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        policy = row["policy"]
        if policy not in worst or abs(row["error"]) > abs(worst[policy]["error"]):
            worst[policy] = row
        for kind in ("predicted", "measured"):
            known = totals[row["model"], policy].get(kind, 0.0)
            totals[row["model"], policy][kind] = max(known, row[kind])
    lines = ["largest error of each policy:"]
    for policy, row in worst.items():
        lines.append(f"  {policy}: {row['error']:+.1%} ({row['model']}, device {row['device']})")
    for (model, policy), found in totals.items():
        for other in ("conventional", "wait_free"):
            base = totals.get((model, other))
            if base and policy != other and POLICIES[policy][1] == CHUNKS:
                ratios = ", ".join(f"{kind} {found[kind] / base[kind]:.3f}" for kind in ("predicted", "measured"))
                lines.append(f"{model}: peak of {policy} / {other}: {ratios}")
    return "\n".join(lines)
