"""Time to prepare a step by number of devices and micro-batches: a BERT in even stages.

    python -m tools.evaluation.bench_preparation --json=preparation.json                      # a quarter of an hour
    python -m tools.evaluation.bench_preparation --devices=2,8 --micro_batches=8 --layers=12
    python -m tools.evaluation.bench_preparation --devices=32 --fixed_micro_batches=32 --micro_batches=32 --hidden=1024

Devices are varied first, with M = --fixed_micro_batches, then micro-batches on the most devices. Each configuration has
its own process, one at a time; a single configuration also gets a table of its parts. Preparation counts from
`transform` to the end of the first step, less the time of a later step, which is computation. Seconds of one core are
compared, since other programs disturb these least; wall-clock seconds are in the JSON file, too.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf import text_table
from dapple_tf.models import bert
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, numbers, rows_apart, write_results

FLAGS = flags.FlagValues()

_DEVICES = flags.DEFINE_list("devices", ["2", "4", "8", "16", "32"], "Numbers of devices.", flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_list(
    "micro_batches", ["2", "8", "32"], "Values of M on the most devices.", flag_values=FLAGS
)
_FIXED = flags.DEFINE_integer("fixed_micro_batches", 8, "M where devices are varied.", 1, flag_values=FLAGS)
_REPLICAS = flags.DEFINE_integer("replicas", 1, "Devices of each stage.", 1, flag_values=FLAGS)
_LAYERS = flags.DEFINE_integer("layers", 48, "Encoder layers.", 1, flag_values=FLAGS)
_HIDDEN = flags.DEFINE_integer("hidden", 64, "Width of the model.", 1, flag_values=FLAGS)
_HEADS = flags.DEFINE_integer("heads", 4, "Attention heads.", 1, flag_values=FLAGS)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 1024, "Tokens in the vocabulary.", 1, flag_values=FLAGS)
_SEQUENCE = flags.DEFINE_integer("sequence", 16, "Tokens per sample.", 1, flag_values=FLAGS)
_SCHEDULE = flags.DEFINE_string("schedule", "dapple_a", "Name of the schedule.", flag_values=FLAGS)
_OPTIMIZER = flags.DEFINE_string("optimizer", "sgd", "Name of the optimizer.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)
_CHILD = flags.DEFINE_bool("child", False, "Internal: this process prepares one step.", flag_values=FLAGS)

PARTS = {
    "capture": ("transform: checks of model and cuts", "build losses and metrics", "capture", "capture optimizer"),
    "passes": (
        "assign_stages", "build_forward", "build_backward", "partition", "replicate", "split_concat", "accumulate",
        "schedule", "update",
    ),
    "import": ("import",),
    "variables": ("load variables",),
    "first run": ("first run in TensorFlow",),
}  # fmt: skip
"""Row of the table -> the parts of the preparation that it joins."""


def configurations(devices: Sequence[int], micro_batches: Sequence[int], fixed: int) -> list[tuple[int, int]]:
    """Returns (devices, M) of each process, without repeats."""
    varied = [(count, fixed) for count in devices]
    return list(dict.fromkeys([*varied, *((max(devices), m) for m in micro_batches)]))


def even_cuts(layers: int, stages: int) -> list[str]:
    """Returns encoder layers to cut after, so that as many stages as possible are alike."""
    ends = [round(layers * (stage + 1) / stages) for stage in range(stages - 1)]
    return [f"layer_{max(0, end - 1)}" for end in ends]


def measured(devices: int, micro_batches: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Builds a model, prepares a step and runs it; returns the record without its ratio."""
    layers, hidden, heads, replicas = (options[name] for name in ("layers", "hidden", "heads", "replicas"))
    vocabulary, sequence = options["vocabulary"], options["sequence"]
    stages = devices // replicas
    lists = [range(stage * replicas, (stage + 1) * replicas) for stage in range(stages)]
    samples = micro_batches * replicas
    plan = dapple.Plan.manual(even_cuts(layers, stages), lists, micro_batches, samples, options["schedule"])
    config = bert.BertConfig(
        depth=layers, width=hidden, heads=heads, inner=4 * hidden, vocabulary=vocabulary, sequence=sequence
    )
    start = time.perf_counter()
    model = bert.build(config)
    model.compile(options["optimizer"], keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model_seconds = time.perf_counter() - start
    tokens, labels = np.random.default_rng(0).integers(0, vocabulary, (2, samples, sequence)).astype("int32")
    segments = np.tile((np.arange(sequence) >= sequence // 2).astype("int32"), (samples, 1))
    x = {"tokens": tokens, "segments": segments, "present": np.ones_like(tokens)}

    start, processor = time.perf_counter(), time.process_time()
    pipelined = dapple.transform(model, dapple.Cluster.local(devices, kind="cpu"), plan)
    transformed = time.perf_counter()
    pipelined.train_on_batch(x, labels)
    ready, processor_ready = time.perf_counter(), time.process_time()
    passes = pipelined.preparation_seconds
    pipelined.train_on_batch(x, labels)
    step_seconds = time.perf_counter() - ready
    rest = ready - transformed - sum(passes.values()) - step_seconds
    parts = {
        "transform: checks of model and cuts": transformed - start,
        **passes,
        "first run in TensorFlow": rest,
    }
    return {
        **options,
        "devices": devices,
        "micro_batches": micro_batches,
        "parts_s": parts,
        "preparation_s": sum(parts.values()),
        "preparation_processor_s": processor_ready - processor - (time.process_time() - processor_ready),
        "step_s": step_seconds,
        "model_s": model_seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def apart(devices: int, micro_batches: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of `measured` in a separate process.

    Raises:
        RuntimeError: the process failed; its output has gone to standard error.
    """
    given = {**options, "devices": devices, "fixed_micro_batches": micro_batches, "micro_batches": micro_batches}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    (record,) = rows_apart("tools.evaluation.bench_preparation", "--child", *arguments)
    return record


def records(pairs: Sequence[tuple[int, int]], options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a record of each configuration, with its ratio to the first one."""
    first: dict[str, Any] | None = None
    for devices, micro_batches in pairs:
        record = (measured if len(pairs) == 1 else apart)(devices, micro_batches, options)
        first = first or record
        record["of_first"] = record["preparation_processor_s"] / first["preparation_processor_s"]
        yield record


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the records for people."""
    head = ("devices", "M", *(f"{name} (s)" for name in PARTS), "preparation (s)", "of one core (s)", "of the first")
    cells: list[tuple[object, ...]] = [(*head, "peak memory (MiB)")]
    for row in rows:
        parts = row["parts_s"]
        known = {name for names in PARTS.values() for name in names}
        assert parts.keys() <= known, f"parts without a column: {parts.keys() - known}"
        cells.append(
            (
                row["devices"],
                row["micro_batches"],
                *(f"{sum(parts.get(name, 0.0) for name in names):.1f}" for names in PARTS.values()),
                f"{row['preparation_s']:.1f}",
                f"{row['preparation_processor_s']:.1f}",
                f"{row['of_first']:.2f}",
                f"{row['peak_mib']:.0f}",
            )
        )
    return markdown(cells)


def parts_table(record: Mapping[str, Any]) -> str:
    """Returns the parts of one preparation, in the order of time, and what isn't part of it."""
    seconds = {
        **record["parts_s"],
        "preparation": record["preparation_s"],
        "a step's computation": record["step_s"],
        "(building the model before that)": record["model_s"],
    }
    return text_table.table([("part", "seconds"), *((name, f"{value:.2f}") for name, value in seconds.items())], left=1)


def main() -> None:
    """Measures what the flags say, and prints the table."""
    devices, counts = numbers("devices", _DEVICES.value), numbers("micro_batches", _MICRO_BATCHES.value)
    check_output(_JSON.value)
    for count in devices:
        stages, left = divmod(count, _REPLICAS.value)
        command.check(
            not left and 1 <= stages <= _LAYERS.value,
            f"--devices: {count} devices don't make stages of {_REPLICAS.value} replicas with {_LAYERS.value} layers",
        )
    options = {
        flag.name: flag.value
        for flag in (_REPLICAS, _LAYERS, _HIDDEN, _HEADS, _VOCABULARY, _SEQUENCE, _SCHEDULE, _OPTIMIZER)
    }
    if _CHILD.value:
        (record,) = records([(devices[0], counts[0])], options)
        sys.stdout.write(json.dumps(record) + "\n")
        return
    began, rows = time.monotonic(), []
    for row in records(configurations(devices, counts, _FIXED.value), options):
        rows.append(row)
        taken = row["preparation_processor_s"]
        command.say(f"{row['devices']} devices, M = {row['micro_batches']}: {taken:.1f} s of one core", began)
        if _JSON.value:  # Measurements are kept even after an error.
            write_results(_JSON.value, "preparation", rows)
    if len(rows) == 1:
        sys.stdout.write(parts_table(rows[0]) + "\n\n")
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
