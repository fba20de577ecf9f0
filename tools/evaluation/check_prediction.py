"""Compares simulated step times with real training on this machine's devices.

    python -m tools.evaluation.check_prediction --models=mlp,conv,gpt --devices=2

Each model is profiled once; then several plans train in turns, so that all see the same changes of the machine's
speed. One of them has one stage on one device: it separates the drift between profiling and training
from the simulator's own error.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf import text_table
from dapple_tf.automatic import plan_model, slice_sizes
from dapple_tf.describe.plan_text import recompute_text
from dapple_tf.models.gpt import gpt
from dapple_tf.planning.plan_reasons import shape
from dapple_tf.progress import Progress
from dapple_tf.schedules.policy import Placement
from dapple_tf.schedules.schedules import POLICIES, policy_of
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import cells, check_output, write_results

FLAGS = flags.FlagValues()

_MODELS = flags.DEFINE_list("models", ["mlp", "conv", "gpt"], "Models to train: mlp, conv or gpt.", flag_values=FLAGS)
_DEVICES = flags.DEFINE_integer("devices", 2, "Local devices.", lower_bound=1, flag_values=FLAGS)
_SCHEDULES = flags.DEFINE_list("schedules", list(POLICIES), "Schedules of the pipelines.", flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 30, "Measured steps of each plan.", lower_bound=3, flag_values=FLAGS)
_CACHE = flags.DEFINE_bool("cache", False, "Reuse cached profiles.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)


def mlp() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Returns dense layers, with a large optimizer part, and a batch."""
    draw = np.random.default_rng(0)
    hidden = [keras.layers.Dense(1024, activation="relu", name=f"hidden_{i}") for i in range(6)]
    model = keras.Sequential([keras.Input((512,)), *hidden, keras.layers.Dense(10, name="logits")])
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, draw.normal(size=(256, 512)).astype("float32"), draw.integers(0, 10, 256)


def conv() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Returns convolutions, with large activations, and a batch."""
    draw = np.random.default_rng(0)
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for block, filters in enumerate((32, 64, 128)):
        for number in range(2):
            layers.append(
                keras.layers.Conv2D(filters, 3, padding="same", activation="relu", name=f"conv_{block}_{number}")
            )
        layers.append(keras.layers.MaxPooling2D(name=f"pool_{block}"))
    layers += [keras.layers.Flatten(), keras.layers.Dense(128, activation="relu", name="dense")]
    model = keras.Sequential([*layers, keras.layers.Dense(10, name="logits")])
    model.compile(keras.optimizers.SGD(1e-2, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, draw.normal(size=(32, 32, 32, 3)).astype("float32"), draw.integers(0, 10, 32)


def transformer() -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Returns a GPT of four blocks."""
    draw = np.random.default_rng(0)
    model = gpt(vocabulary=256, sequence=64, width=128, heads=4, depth=4)
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tokens = draw.integers(0, 256, (32, 65))
    return model, tokens[:, :-1].astype("int32"), tokens[:, 1:].astype("int32")


_TURN, _COUNTED = 4, 2
"""Number of steps of a plan in its turn, and of the last of them, which count: the first ones get their data back into
the caches, and after them the operating system still moves threads between cores."""
MAKERS = {"mlp": mlp, "conv": conv, "gpt": transformer}
"""Name of a model -> function that returns it with a batch."""


def plans_of(profile: dapple.Profile, chosen: dapple.Plan, devices: int) -> Iterator[dapple.Plan]:
    """Yields the reference, what the planner found, and plans of other shapes: pipelines under every policy."""
    batch = chosen.global_batch_size
    yield dapple.Plan.data_parallel(1, batch)
    yield chosen
    yield dapple.Plan.data_parallel(1, batch, 4)
    if devices == 1:
        return
    yield dapple.Plan.data_parallel(devices, batch, 2)
    for schedule in _SCHEDULES.value:
        if len(groups_of(schedule, devices)) <= len(profile.layers):
            yield pipeline(profile, batch, devices, schedule)
        else:
            command.say(f"{schedule} needs more stages on {devices} devices than {profile.model!r} has layers")
    for recompute in ("boundary", "min_cut"):
        yield pipeline(profile, batch, devices, "dapple_a", recompute=recompute)
    if devices > 2:
        yield dapple.Plan.manual(even_cuts(profile, 2), [[0, 1], [2]], 4, batch)


def pipeline(
    profile: dapple.Profile, batch: int, devices: int, schedule: str, *, recompute: str = "none"
) -> dapple.Plan:
    """Returns a pipeline over devices, with as many stages on each as the policy needs."""
    groups = groups_of(schedule, devices)
    return dapple.Plan.manual(even_cuts(profile, len(groups)), groups, 4, batch, schedule, recompute=recompute)


def groups_of(schedule: str, devices: int) -> Sequence[Sequence[int]]:
    """Returns the device of each stage of a pipeline, in a list of its own."""
    placements = policy_of(schedule).planning.placements
    placement = placements[-1]  # modulo also takes one stage on each device, where it is fast_forward
    groups = placement.stages([(device,) for device in range(devices)], 1 if placement is Placement.STRAIGHT else 2)
    assert groups is not None
    return groups


def even_cuts(profile: dapple.Profile, stages: int) -> list[str]:
    """Returns the layers after which each stage's share of the time has passed."""
    samples = profile.batch_sizes[-1]
    times = np.cumsum([layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers])
    ends = [-1]
    for stage in range(1, stages):
        first, stop = ends[-1] + 1, len(times) - (stages - stage)
        ends.append(first + int(np.argmin(np.abs(times[first:stop] - times[-1] * stage / stages))))
    return [profile.layers[end].name for end in ends[1:]]


def check(name: str) -> list[dict[str, Any]]:
    """Profiles and trains one model; returns a row for each plan."""
    model, x, y = MAKERS[name]()
    batch = len(x)
    cluster = dapple.Cluster.local(_DEVICES.value, kind="cpu")
    sizes = slice_sizes(batch, _DEVICES.value)
    profiled = dapple.profile(model, sizes, cluster=cluster, cache=_CACHE.value)
    planned = plan_model(model, cluster, batch, profiled=profiled)
    chosen, profile, cluster = planned.plan, planned.profile, planned.cluster
    plans = list(dict.fromkeys(plans_of(profile, chosen, _DEVICES.value)))
    trainers = [dapple.transform(model, cluster, plan, profile=profile) for plan in plans]
    turns = -(-_STEPS.value // _COUNTED)
    steps: list[list[float]] = [[] for _ in trainers]
    bar = Progress(f"training {name}", turns + 1, shown=True)
    for turn in range(turns + 1):  # in the first one steps are prepared
        for trainer, own in zip(trainers, steps, strict=True):
            for number in range(_TURN):
                trainer.train_on_batch(x, y)
                if turn and number >= _TURN - _COUNTED:
                    own.append(trainer.last_step_seconds)
        bar.step(f"{len(trainers)} plans in turns")
    bar.close()
    rows = []
    predictions = [prediction for trainer in trainers if (prediction := trainer.prediction) is not None]
    drift = statistics.median(steps[0]) / predictions[0].predicted
    for plan, prediction, own in zip(plans, predictions, steps, strict=True):
        measured = statistics.median(own)
        rows.append(
            {
                "model": name,
                "plan": shape(plan) + (f", {plan.schedule}" if plan.num_stages > 1 else ""),
                "recompute": recompute_text(plan),
                "planned": plan == chosen,
                "capacity": cluster.capacity(0),
                "predicted_ms": prediction.predicted * 1e3,
                "measured_ms": measured * 1e3,
                "error": prediction.predicted / measured - 1,
                "error_without_drift": prediction.predicted * drift / measured - 1,
            }
        )
    return rows


COLUMNS = {
    "model": "{model}", "plan": "{plan}", "recompute": "{recompute}", "capacity": "{capacity:.2f}",
    "predicted ms": "{predicted_ms:.2f}", "measured ms": "{measured_ms:.2f}", "error": "{error:+.1%}",
    "error without drift": "{error_without_drift:+.1%}",
}  # fmt: skip
"""Columns of the table."""


def main() -> None:
    """Runs the comparison."""
    command.check_choices(_MODELS, MAKERS)
    command.check_choices(_SCHEDULES, POLICIES, empty=True)
    check_output(_JSON.value)
    rows = [row for name in _MODELS.value for row in check(name)]
    shown = [row | {"plan": row["plan"] + " (the planner's)" * row["planned"]} for row in rows]
    sys.stdout.write(text_table.table(cells(shown, COLUMNS), left=3) + "\n")
    if _JSON.value:
        write_results(_JSON.value, "prediction", rows)


if __name__ == "__main__":
    command.start(main, FLAGS)
