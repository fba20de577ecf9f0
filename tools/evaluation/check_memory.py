"""Compares the simulator's memory with that of devices in real training, for every schedule policy.

    python -m tools.evaluation.check_memory --models=mlp,gpt,resnet --steps=9 --json=memory.json

Each model is profiled once and trained by each policy on logical CPU devices. The measured peak of a device is that of
the allocation records of a traced step, on top of what stays between steps: variables, the optimizer's slots and
gradient accumulators. It is the median of several steps.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf import text_table
from dapple_tf.models.gpt import gpt
from dapple_tf.models.resnet import resnet
from dapple_tf.progress import Progress
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import cells, check_output, write_results

FLAGS = flags.FlagValues()

_MODELS = flags.DEFINE_list(
    "models", ["mlp", "gpt", "resnet"], "Models to train: mlp, gpt or resnet.", flag_values=FLAGS
)
_POLICIES = flags.DEFINE_list("policies", [], "Policies to train with; none for all.", flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 9, "Traced steps of each policy.", lower_bound=1, flag_values=FLAGS)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Measurements of each time.", lower_bound=1, flag_values=FLAGS)
_CACHE = flags.DEFINE_bool("cache", False, "Reuse cached profiles.", flag_values=FLAGS)
_TOLERANCE = flags.DEFINE_float("tolerance", 0.1, "Largest error that passes.", lower_bound=0.0, flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)


Arrays = tuple[np.ndarray, np.ndarray]


# ---- what is trained


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its cuts.

    Attributes:
        build: function that returns the compiled model.
        batch: function that returns a batch of a number of samples.
        samples: samples of a global batch.
        cuts: number of stages -> their last layers.
        pieces: layer within the first of two stages after which its last backward is cut, where plans ask for pieces.
        micro_batches: M in pipelines.
        chunks: chunks of data parallelism.
    """

    build: Callable[[], keras.Model]
    batch: Callable[[int], Arrays]
    samples: int
    cuts: Mapping[int, Sequence[str]]
    pieces: str = ""
    micro_batches: int = 8
    chunks: int = 4


def mlp() -> keras.Model:
    """Returns dense layers of equal size."""
    hidden = [keras.layers.Dense(512, activation="relu", name=f"dense_{i}") for i in range(16)]
    model = keras.Sequential([keras.Input((512,)), *hidden, keras.layers.Dense(10, name="logits")], name="mlp")
    model.compile(keras.optimizers.SGD(1e-2, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def skips() -> keras.Model:
    """Returns dense layers of equal size, all of which read the first one's results as well."""
    inputs = keras.Input((512,))
    first = last = keras.layers.Dense(512, activation="relu", name="dense_0")(inputs)
    for i in range(1, 12):
        last = keras.layers.Add(name=f"add_{i}")(
            [keras.layers.Dense(512, activation="relu", name=f"dense_{i}")(last), first]
        )
    model = keras.Model(inputs, keras.layers.Dense(10, name="logits")(last), name="skips")
    model.compile(keras.optimizers.SGD(1e-2, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def transformer() -> keras.Model:
    """Returns a GPT of four blocks."""
    model = gpt(vocabulary=256, sequence=64, width=128, heads=4, depth=4)
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def residual() -> keras.Model:
    """Returns a ResNet of four groups of blocks."""
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
        {2: ["dense_7"], 3: ["dense_4", "dense_9"], 4: ["dense_3", "dense_7", "dense_11"]},
        "dense_3",
    ),
    "skips": Model(
        skips,
        _vectors,
        4096,
        {2: ["add_5"], 3: ["add_3", "add_7"], 4: ["add_2", "add_5", "add_8"]},
        "add_2",
    ),
    "gpt": Model(
        transformer,
        _tokens,
        64,
        {2: ["block_1"], 3: ["block_0", "block_2"], 4: ["block_0", "block_1", "block_2"]},
        "block_0",
    ),
    "resnet": Model(
        residual,
        _images,
        128,
        {
            2: ["block_2"],
            3: ["block_0", "block_2"],
            4: ["block_0", "block_2", "block_4"],
            8: ["stem", "block_0", "block_1", "block_2", "block_3", "block_4", "pool"],
        },
        "block_0",
        micro_batches=4,
        chunks=8,
    ),
}

STRAIGHT = [[0], [1], [2]]
PERIODIC = [[0], [1], [0], [1]]
VEE = [[0], [1], [1], [0]]
REPLICAS = [[0, 1], [2]]
CHUNKS = [[0, 1]]
PIECES = "pieces"
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
    "v_min": ("v_min", VEE, {}),
    "v_half": ("v_half", VEE, {}),
    "dualpipe_v": ("dualpipe_v", VEE, {}),
    "conventional": ("dapple_a", CHUNKS, {"wait_free": False}),
    "wait_free": ("dapple_a", CHUNKS, {}),
    "reverse_first_2": ("dapple_a", CHUNKS, {"reverse_first_k": 2}),
    "reverse_first_3": ("dapple_a", CHUNKS, {"reverse_first_k": 3}),
    "reverse_first_4": ("dapple_a", CHUNKS, {"reverse_first_k": 4}),
    "pieces": ("dapple_a", REPLICAS, {"backward_cuts": PIECES}),
    "shares": ("dapple_a", REPLICAS, {"shares": ((3, 1), (1,))}),
    "recompute": ("dapple_a", STRAIGHT, {"recompute": "boundary"}),
    "relays": ("dapple_a", STRAIGHT, {"relays": (1,)}),
    "relays_zb_h1": ("zb_h1", STRAIGHT, {"relays": (1,)}),
    "carried_updates": ("dapple_a", CHUNKS, {"reverse_first_k": 2, "carried_updates": 2}),
}
"""Name -> schedule, devices of each stage, further options. `CHUNKS` stands for data parallelism of one micro-batch."""


def plan_of(model: Model, policy: str) -> dapple.Plan:
    """Returns the plan that trains a model by a policy."""
    schedule, devices, options = POLICIES[policy]
    micro_batches, samples = model.micro_batches, model.samples
    if devices == CHUNKS:  # as many samples at a time as in a pipeline
        devices, micro_batches, samples = CHUNKS * model.chunks, 1, 2 * samples // micro_batches
    if options.get("backward_cuts") == PIECES:
        options = {**options, "backward_cuts": (model.pieces,)}
    return dapple.Plan.manual(model.cuts[len(devices)], devices, micro_batches, samples, schedule, **options)


# ---- measuring


def measure(
    model: keras.Model, x: np.ndarray, y: np.ndarray, plan: dapple.Plan, cluster: dapple.Cluster, steps: int
) -> dict[int, list[float]]:
    """Returns device -> its peak in each of ``steps`` steps on a batch, in bytes."""
    pipelined = dapple.transform(model, cluster, plan)
    for _ in range(3):  # Slots and accumulators exist after the first step.
        pipelined.train_on_batch(x, y)
    runs = [pipelined.profile_step(x, y, warm_up=0, train=True).peak_bytes for _ in range(steps)]
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
        keras.utils.set_random_seed(0)
        x, y = model.batch(plan.global_batch_size)
        for device, peaks in measure(model.build(), x, y, plan, cluster, steps).items():
            measured = statistics.median(peaks)
            yield {
                "model": name,
                "policy": policy,
                "device": device,
                "predicted": predicted[device],
                "measured": measured,
                "least": min(peaks),
                "most": max(peaks),
                "error": predicted[device] / measured - 1,
            }
        bar.step(policy)
    bar.close()


# ---- showing


COLUMNS = {
    "model": "{model}", "policy": "{policy}", "device": "{device}", "predicted MB": "{predicted:.2f}",
    "measured MB": "{measured:.2f}", "least to most": "{least:.2f} to {most:.2f}", "error": "{error:+.1%}",
}  # fmt: skip
"""Columns of the table; bytes are shown in MB."""


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the rows for people."""
    sizes = ("predicted", "measured", "least", "most")
    return text_table.table(cells(({**row, **{s: row[s] / 1e6 for s in sizes}} for row in rows), COLUMNS), left=2)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the largest error of each policy, and the peaks of delayed weight gradients beside conventional ones."""
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
    for (model, policy), peaks in totals.items():
        for other in ("conventional", "wait_free"):
            base = totals.get((model, other))
            if base and policy != other and POLICIES[policy][1] == CHUNKS:
                ratios = ", ".join(f"{kind} {peaks[kind] / base[kind]:.3f}" for kind in ("predicted", "measured"))
                lines.append(f"{model}: peak of {policy} / {other}: {ratios}")
    return "\n".join(lines)


def main() -> None:
    """Runs the comparison; ends with 1 if an error is above the tolerance."""
    command.check_choices(_MODELS, MODELS)
    command.check_choices(_POLICIES, POLICIES, empty=True)
    check_output(_JSON.value)
    rows: list[dict[str, Any]] = []
    for name in _MODELS.value:
        policies = _POLICIES.value or list(POLICIES)
        for row in check(name, policies, _STEPS.value, repeats=_REPEATS.value, cache=_CACHE.value):
            rows.append(row)
            if _JSON.value:  # Measurements are kept even after an error.
                write_results(_JSON.value, "memory", rows)
        sys.stdout.write(table(row for row in rows if row["model"] == name) + "\n")
    sys.stdout.write(summary(rows) + "\n")
    largest = max(abs(row["error"]) for row in rows)
    sys.stdout.write(f"largest error {largest:.1%}, tolerance {_TOLERANCE.value:.0%}\n")
    if largest > _TOLERANCE.value:
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
