"""What recomputation costs in time and saves in memory: `none`, `min_cut` and `boundary`, in turns on one machine.

    python -m tools.evaluation.bench_recompute --json=docs/results/scale.json       # some ten minutes
    python -m tools.evaluation.bench_recompute --models=gpt --jit_compile=false --schedule=gpipe --micro_batches=8 \
        --ways=none,boundary,offload --json=docs/results/scale.json                 # beside what waits on the host

A GPT, a BERT and a ResNet are trained in two stages on two logical devices by dapple_a. The ways take turns;
ratios of time are medians over rounds, with quartiles, of a way's steps to those that keep every residual. Peaks are
those of the fuller device in allocation records of traced steps, on top of variables, slots and accumulators, which
stay between steps; what functions compiled with XLA allocate isn't in these records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.describe.plan import RECOMPUTE_MODES
from dapple_tf.models.bert import bert_small
from dapple_tf.models.gpt import gpt
from dapple_tf.models.resnet import resnet
from dapple_tf.schedules.schedules import POLICIES
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, write_results
from dapple_tf.tools.evaluation.ratios import quartiles, ratios, take_turns

FLAGS = flags.FlagValues()

WAYS = ("none", "min_cut", "boundary")
"""Modes of `Plan.recompute`, by default; the others are compared with the first."""
SCHEDULE = "dapple_a"
"""The policy, by default. Under it two stages have too few micro-batches in flight for anything to wait on the host."""

NAME = "recompute"
"""Name of the results by the default policy; others' end with the policy."""
_MB = 1e6


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        make: function that returns the model, not compiled.
        cut: last layer of the first stage.
        samples: of a micro-batch.
    """

    make: Callable[[], keras.Model]
    cut: str
    samples: int


CASES = {
    "gpt": Case(lambda: gpt(sequence=128, depth=4, width=256, heads=4), "block_1", 4),
    "bert": Case(lambda: bert_small(vocabulary=1024), "layer_1", 4),
    "resnet": Case(resnet, "block_3", 16),
    "tiny": Case(lambda: gpt(sequence=8, depth=2, width=16, heads=2), "block_0", 2),
}
"""Models by name; "tiny" is for trying this program out."""

_MODELS = flags.DEFINE_list("models", ["gpt", "bert", "resnet"], "Models to train.", flag_values=FLAGS)
_JIT = flags.DEFINE_list(
    "jit_compile", ["false", "true"], "Values of jit_compile: false without XLA, true with it.", flag_values=FLAGS
)
_WAYS = flags.DEFINE_list(
    "ways", [*WAYS], f"Modes of recomputation, first none: of {', '.join(RECOMPUTE_MODES)}.", flag_values=FLAGS
)
_SCHEDULE = flags.DEFINE_enum("schedule", SCHEDULE, [*POLICIES], "The policy of the schedule.", flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 4, "M.", 1, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Rounds, with a turn of each way.", 2, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 2, "Steps of a turn, and traced steps.", 1, flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)


def batch(model: keras.Model, samples: int) -> tuple[Any, np.ndarray]:
    """Returns random inputs and labels for a classifier of images, or of each token."""
    draw = np.random.default_rng(0)

    def leaf(tensor: Any) -> np.ndarray:
        shape = (samples, *tensor.shape[1:])
        if not keras.backend.is_int_dtype(tensor.dtype):
            return draw.normal(size=shape).astype("float32")
        return draw.integers(0, 2 if tensor.name in ("segments", "present") else 256, shape).astype("int32")

    labels = draw.integers(0, model.output_shape[-1], (samples, *model.output_shape[1:-1])).astype("int32")
    return keras.tree.map_structure(leaf, model.input), labels


def measure(
    name: str,
    *,
    jit_compile: bool,
    micro_batches: int,
    rounds: int,
    steps: int,
    ways: Sequence[str] = WAYS,
    schedule: str = SCHEDULE,
) -> dict[str, Any]:
    """Returns a record: times of a step, and peaks, of several ways, the first of which is none."""
    case = CASES[name]
    samples = case.samples * micro_batches
    cluster = dapple.Cluster.local(2 + ("offload" in ways), kind="cpu")  # a device in whose memory residuals wait
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with contextlib.ExitStack() as stack:
        trained = {}
        for way in ways:
            keras.utils.set_random_seed(1)
            model = case.make()
            model.compile(keras.optimizers.Adam(1e-4), loss)
            plan = dapple.Plan.straight(
                [case.cut], samples, micro_batches, schedule, recompute=way, jit_compile=jit_compile
            )
            trained[way] = stack.enter_context(contextlib.closing(dapple.transform(model, cluster, plan)))
        x, y = batch(model, samples)

        def turn(pipelined: Any) -> Callable[[], None]:
            def run() -> None:
                for _ in range(steps):
                    pipelined.train_on_batch(x, y)

            return run

        turns = {way: turn(pipelined) for way, pipelined in trained.items()}
        for run in (*turns.values(), *turns.values()):
            run()  # The first prepares; slots and accumulators exist after it.
        times = take_turns(turns, rounds)
        peaks = {
            way: statistics.median(
                max(pipelined.profile_step(x, y, warm_up=0, train=True).peak_bytes.values()) for _ in range(steps)
            )
            for way, pipelined in trained.items()
        }
    keras.backend.clear_session(free_memory=True)
    return {
        "model": name,
        "jit_compile": jit_compile,
        "samples": case.samples,
        "micro_batches": micro_batches,
        "rounds": rounds,
        "step_ms": 1e3 * quartiles(times["none"]).median / steps,
        "peak_mb": {way: peak / _MB for way, peak in peaks.items()},
        **{f"{way}_time": ratios(times[way], times["none"]) for way in ways[1:]},
    }


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the records as Markdown."""
    ways = [*records[0]["peak_mb"]]
    rows: list[tuple[object, ...]] = [
        (
            "model", "XLA", "none (ms)", *(f"{way}: time" for way in ways[1:]), *(f"{way}: peak (MB)" for way in ways),
            *(f"{way} saves" for way in ways[1:]),
        )
    ]  # fmt: skip
    for record in records:
        peaks, xla = record["peak_mb"], record["jit_compile"]
        saved = [1 - peaks[way] / peaks["none"] for way in ways[1:]]
        times = [_shown(record[f"{way}_time"]) for way in ways[1:]]
        rows.append(
            (
                record["model"], "yes" if xla else "no", f"{record['step_ms']:.4g}", *times,
                *("-" if xla else f"{peaks[way]:.1f}" for way in ways), *("-" if xla else f"{s:.0%}" for s in saved),
            )
        )  # fmt: skip
    return markdown(rows)


def _shown(value: Any) -> str:
    """Returns quartiles, as an object or as JSON data, as a text."""
    low, median, high = value.values() if isinstance(value, Mapping) else dataclasses.astuple(value)
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Measures what the flags say, and prints the table."""
    for flag, known in ((_MODELS, CASES), (_JIT, ("false", "true"))):
        command.check_choices(flag, known)
    command.check_choices(_WAYS, RECOMPUTE_MODES)
    several = _WAYS.value[0] == "none" and len(_WAYS.value) > 1
    command.check(several, f"--ways={','.join(_WAYS.value)}: give none first, with which others are compared")
    check_output(_JSON.value)
    began, records = time.monotonic(), []
    for name in _MODELS.value:
        for jit in _JIT.value:
            options = {"micro_batches": _MICRO_BATCHES.value, "rounds": _ROUNDS.value, "steps": _STEPS.value}
            ways, schedule = _WAYS.value, _SCHEDULE.value
            record = measure(name, jit_compile=jit == "true", ways=ways, schedule=schedule, **options)
            records.append(record)
            took = record[f"{ways[1]}_time"]
            command.say(f"{name}{', XLA' * (jit == 'true')}: {ways[1]} takes {took} of the time", began)
            if _JSON.value:  # Measurements are kept even after an error.
                write_results(_JSON.value, NAME if schedule == SCHEDULE else f"{NAME} {schedule}", records)
    sys.stdout.write(table(records) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
