"""Time to the first step of image models in two stages, beside plain Keras' own.

    python -m tools.evaluation.bench_first_step --json=first_step.json                      # some minutes
    python -m tools.evaluation.bench_first_step --models=ResNet50 --rounds=1
    python -m tools.evaluation.bench_first_step --jit_compile --json=first_step.json        # a quarter of an hour

Models of keras.applications with random weights, on two logical devices of a process, cut near the middle; 8 samples in
4 micro-batches. The first step counts from the compiled model to the end of the first ``train_on_batch``, `transform`
included, less what a later step takes, which is computation. Each has its own process, and ways take turns. With XLA
each way runs a second time, with the programs that its first run left in a folder
(``TF_XLA_FLAGS=--tf_xla_persistent_cache_directory``).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, rows_apart, write_results

FLAGS = flags.FlagValues()

CUTS = {
    "MobileNetV2": "block_8_add",
    "ResNet50": "conv4_block1_out",
    "DenseNet121": "pool3_pool",
    "EfficientNetB0": "block4c_add",
}
"""Model of keras.applications -> the last layer of its first stage."""
NAME = "first_step"
"""Name of these results; with XLA it has an addition."""
_SIZE, _CLASSES, _SAMPLES, _MICRO_BATCHES = 96, 10, 8, 4

_MODELS = flags.DEFINE_list("models", list(CUTS), "Models of keras.applications.", flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Processes of each way.", 1, flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)
_JIT = flags.DEFINE_boolean("jit_compile", False, "With XLA, and once more with what it kept.", flag_values=FLAGS)
_WAY = flags.DEFINE_enum("way", None, ["keras", "ours"], "Internal: what this process runs.", flag_values=FLAGS)

_KEEPS = "--tf_xla_persistent_cache_directory="


def measured(name: str, way: str, *, jit_compile: bool) -> dict[str, Any]:
    """Builds a model and runs two steps; returns the seconds of the first, on the clock and of one core."""
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(weights=None, classes=_CLASSES, input_shape=(_SIZE, _SIZE, 3))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(), jit_compile=jit_compile)
    draw = np.random.default_rng(0)
    x = draw.random((_SAMPLES, _SIZE, _SIZE, 3)).astype("float32")
    y = draw.integers(0, _CLASSES, _SAMPLES)
    times = [(time.perf_counter(), time.process_time())]
    if way == "ours":
        plan = dapple.Plan.manual([CUTS[name]], [[0], [1]], _MICRO_BATCHES, _SAMPLES, jit_compile=jit_compile)
        model = dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), plan)
    for _ in range(2):
        model.train_on_batch(x, y)
        times.append((time.perf_counter(), time.process_time()))
    seconds, processor = ((first - began) - (second - first) for began, first, second in zip(*times, strict=True))
    return {"model": name, "way": way, "first_step_s": seconds, "first_step_processor_s": processor}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the medians of each model for people."""

    def median(name: str, way: str, key: str = "first_step_s", *, again: bool = False) -> float:
        own = [row for row in rows if (row["model"], row["way"], row.get("again", False)) == (name, way, again)]
        return statistics.median(row[key] for row in own)

    with_again = any(row.get("again") for row in rows)
    head = ("model", "plain Keras (s)", "ours (s)", "times as long", "of one core, times")
    cells: list[tuple[object, ...]] = [(*head, *(("Keras again (s)", "ours again (s)") if with_again else ()))]
    for name in dict.fromkeys(row["model"] for row in rows):
        theirs, ours = (median(name, way) for way in ("keras", "ours"))
        of_core = median(name, "ours", "first_step_processor_s") / median(name, "keras", "first_step_processor_s")
        again = [f"{median(name, way, again=True):.1f}" for way in ("keras", "ours")] if with_again else []
        cells.append((name, f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.2f}", f"{of_core:.2f}", *again))
    return markdown(cells)


def _rows(name: str, way: str, began: float) -> Iterator[dict[str, Any]]:
    """Yields the rows of one way's turn."""
    options = (f"--models={name}", f"--way={way}", f"--jit_compile={_JIT.value}")
    with tempfile.TemporaryDirectory() as folder:
        for again in (False, True) if _JIT.value else (False,):
            own = os.environ.get("TF_XLA_FLAGS", "")
            environment = {"TF_XLA_FLAGS": f"{own} {_KEEPS}{folder}"} if _JIT.value else {}
            for row in rows_apart("tools.evaluation.bench_first_step", *options, environment=environment):
                command.say(f"{name}, {way}{', again' * again}: {row['first_step_s']:.1f} s", began)
                yield row | {"again": again}


def main() -> None:
    """Measures what the flags say, and prints the table."""
    check_output(_JSON.value)
    unknown = [name for name in _MODELS.value if name not in CUTS]
    command.check(not unknown, f"--models: {', '.join(unknown)}; there are {', '.join(CUTS)}")
    if _WAY.value:
        row = measured(_MODELS.value[0], _WAY.value, jit_compile=_JIT.value)
        sys.stdout.write(json.dumps(row) + "\n")
        return
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for name in _MODELS.value:
        for _ in range(_ROUNDS.value):
            for way in ("keras", "ours"):
                rows += _rows(name, way, began)
        if _JSON.value:  # Measurements are kept even after an error.
            write_results(_JSON.value, f"{NAME} XLA" if _JIT.value else NAME, rows)
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
