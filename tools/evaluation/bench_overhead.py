"""Overhead of the framework: one stage on one device, one micro-batch, compared with plain Keras.

    python -m tools.evaluation.bench_overhead --rounds=30 --json=speed.json

The same model trains on the same batches with plain Keras and pipelined with nothing to pipeline, by ``train_on_batch``
and by ``fit``, without XLA and with it (``jit_compile`` of both). Both take turns; ratios are medians over rounds, with
quartiles, of the pipelined steps' time to plain Keras' in the same round. They include everything in a pipelined step
beyond the model's own work: checking and feeding batches, running the session, metrics and, by ``fit``, callbacks and
copying the values back at the end of the epoch, which is shared out among its steps.

The table also has the ratio of the processor time of all threads, which other programs disturb less.

Models: ``small`` (dense layers), ``middle`` (a GPT of 4 blocks) and ``large`` (a GPT of 8 blocks), whose steps take
some 5, 50 and 500 ms on two cores.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.models.gpt import gpt
from dapple_tf.progress import Progress
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, write_results
from dapple_tf.tools.evaluation.ratios import Quartiles, quartiles, ratios, take_turns

FLAGS = flags.FlagValues()
_MODELS = flags.DEFINE_list("models", ["small", "middle", "large"], "Models to train.", flag_values=FLAGS)
_METHODS = flags.DEFINE_list("methods", ["train_on_batch", "fit"], "Methods of training.", flag_values=FLAGS)
_JIT = flags.DEFINE_list(
    "jit_compile", ["false", "true"], "Values of jit_compile: false without XLA, true with it.", flag_values=FLAGS
)
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Rounds, with a turn of each.", lower_bound=2, flag_values=FLAGS)
_TURN = flags.DEFINE_float("turn_ms", 400.0, "Approximate milliseconds of a turn of train_on_batch.", flag_values=FLAGS)
_EPOCH = flags.DEFINE_integer(
    "epoch_steps", 30, "Steps of an epoch, which is a turn of `fit`.", lower_bound=1, flag_values=FLAGS
)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)

BOUND = 1.03
"""Maximum ratio of a step's time to plain Keras'."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A model to train.

    Attributes:
        make: function that returns the model, not compiled.
        batch: samples of a step.
        step_ms: approximate time of a step on two cores.
    """

    make: Callable[[], keras.Model]
    batch: int
    step_ms: float


def dense() -> keras.Model:
    """Returns dense layers: float32 [batch, 256] -> logits [batch, 10]."""
    hidden = [keras.layers.Dense(512, activation="relu", name=f"hidden_{i}") for i in range(4)]
    return keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(10, name="logits")])


TASKS = {
    "small": Task(dense, 64, 5),
    "middle": Task(functools.partial(gpt, sequence=64, depth=4, width=128, heads=4), 8, 50),
    "large": Task(functools.partial(gpt, sequence=64, depth=8, width=256, heads=4), 16, 500),
    "tiny": Task(functools.partial(gpt, sequence=8, depth=1, width=16, heads=2), 4, 5),
}
"""Models by name; "tiny" is for trying this program out."""


def compiled(task: Task, *, jit_compile: bool) -> keras.Model:
    """Returns the model with fresh, seeded weights."""
    keras.utils.set_random_seed(1)
    model = task.make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=jit_compile)
    return model


def data(model: keras.Model, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random inputs and labels for a classifier."""
    draw = np.random.default_rng(0)
    shape = (samples, *model.input_shape[1:])
    labels = draw.integers(0, model.output_shape[-1], (samples, *model.output_shape[1:-1])).astype("int32")
    if keras.backend.is_int_dtype(model.inputs[0].dtype):
        return draw.integers(0, 256, shape).astype("int32"), labels
    return draw.normal(size=shape).astype("float32"), labels


def turn(trained: Any, method: str, batch: int, steps: int) -> Callable[[], object]:
    """Returns a function that trains a model, plain or pipelined, for ``steps`` steps."""
    x, y = data(getattr(trained, "model", trained), batch * steps)
    if method == "fit":
        return lambda: trained.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
    batches = [(x[start : start + batch], y[start : start + batch]) for start in range(0, len(x), batch)]

    def run() -> None:
        for inputs, labels in batches:
            trained.train_on_batch(inputs, labels)

    return run


def measure(
    name: str, method: str, *, jit_compile: bool, rounds: int, turn_ms: float, epoch_steps: int
) -> dict[str, Any]:
    """Returns a record: plain Keras' time of a step, ours, and their ratio."""
    task = TASKS[name]
    steps = epoch_steps if method == "fit" else max(2, round(turn_ms / task.step_ms))
    plain = compiled(task, jit_compile=jit_compile)
    plan = dapple.Plan.data_parallel(1, task.batch, 1, jit_compile=jit_compile)
    pipelined = dapple.transform(compiled(task, jit_compile=jit_compile), dapple.Cluster.local(1, kind="cpu"), plan)
    try:
        ways = {"keras": turn(plain, method, task.batch, steps), "ours": turn(pipelined, method, task.batch, steps)}
        for run in (*ways.values(), *ways.values()):
            run()  # The first run makes the graphs, and the second is the first without that.
        cores: dict[str, list[float]] = {way: [] for way in ways}

        def counted(way: str) -> None:
            started = time.process_time()
            ways[way]()
            cores[way].append(time.process_time() - started)

        times = take_turns({way: functools.partial(counted, way) for way in ways}, rounds)
    finally:
        pipelined.close()
    ratio = ratios(times["ours"], times["keras"])
    milliseconds = {way: 1e3 * quartiles(way_times).median / steps for way, way_times in times.items()}
    return {
        "model": name,
        "parameters": plain.count_params(),
        "batch": task.batch,
        "method": method,
        "jit_compile": jit_compile,
        "steps_of_a_turn": steps,
        "rounds": rounds,
        "keras_ms": milliseconds["keras"],
        "ours_ms": milliseconds["ours"],
        "ratio": ratio,
        "cpu_ratio": ratios(cores["ours"], cores["keras"]),
        "within_bound": ratio.median <= BOUND,
    }


def table(records: list[dict[str, Any]]) -> str:
    """Returns the records as Markdown."""
    rows: list[tuple[object, ...]] = [
        ("model", "by", "XLA", "plain Keras (ms)", "ours (ms)", f"ratio (<= {BOUND})", "of processor time")
    ]
    for record in records:
        ratio = record["ratio"]
        assert isinstance(ratio, Quartiles)
        times = f"{record['keras_ms']:.4g}", f"{record['ours_ms']:.4g}"
        xla = "yes" if record["jit_compile"] else "no"
        rows.append((record["model"], record["method"], xla, *times, ratio, record["cpu_ratio"]))
    return markdown(rows)


def main() -> None:
    """Measures, prints the table and writes the file."""
    for flag, known in ((_MODELS, TASKS), (_METHODS, ("train_on_batch", "fit")), (_JIT, ("false", "true"))):
        command.check_choices(flag, known)
    check_output(_JSON.value)
    cases = [(model, method, jit) for model in _MODELS.value for jit in _JIT.value for method in _METHODS.value]
    bar = Progress("overhead", len(cases), shown=True)
    records = []
    for model, method, jit in cases:
        options = {"rounds": _ROUNDS.value, "turn_ms": _TURN.value, "epoch_steps": _EPOCH.value}
        record = measure(model, method, jit_compile=jit == "true", **options)
        records.append(record)
        if _JSON.value:  # Each time: the largest models take a while.
            write_results(_JSON.value, "overhead", records)
        bar.step(f"{model} {method}{' XLA' * (jit == 'true')}: {record['ratio']}")
    bar.close()
    sys.stdout.write(table(records) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
