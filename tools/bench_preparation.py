"""Seconds until the first step has run, against devices and micro-batches: BERT-48 at reduced width.

    python -m tools.bench_preparation --json=preparation.json                      # a quarter of an hour when quiet
    python -m tools.bench_preparation --devices=2,8 --micro_batches=8 --layers=12

Devices are varied first, with M = --fixed_micro_batches, then micro-batches on the most devices. Each configuration has
a process of its own, `tools.prepare_step`, one at a time: its preparation counts from `transform` to the end of the
first step, less what a later step takes. Seconds of one core are compared, since other programs' use of the machine
changes these least; those on the clock are in the JSON file as well.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.bench_memory import numbers
from dapple_tf.tools.bench_report import check_output, markdown, write_results

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
_OPTIMIZER = flags.DEFINE_string("optimizer", "sgd", "The optimizer.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "Write the numbers to this JSON file, too.", flag_values=FLAGS)

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
"""What the table shows as one -> parts as `tools.prepare_step` names them."""


def configurations(devices: Sequence[int], micro_batches: Sequence[int], fixed: int) -> list[tuple[int, int]]:
    """(Devices, M) of each process, without repeats."""
    varied = [(count, fixed) for count in devices]
    return list(dict.fromkeys([*varied, *((max(devices), m) for m in micro_batches)]))


def prepared(devices: int, micro_batches: int, options: Mapping[str, object]) -> dict[str, Any]:
    """What preparing a step takes, in a process of its own.

    Raises:
        RuntimeError: it failed; what it wrote has gone to standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "numbers.json"
        given = {**options, "devices": devices, "micro_batches": micro_batches, "steps": 1, "out": out}
        line = [sys.executable, "-m", "tools.prepare_step", *(f"--{name}={value}" for name, value in given.items())]
        code = subprocess.run(line, stdout=subprocess.DEVNULL, check=False).returncode
        if code:
            raise RuntimeError(f"preparing {micro_batches} micro-batches on {devices} devices ended with code {code}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def records(pairs: Sequence[tuple[int, int]], options: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """A record of each configuration, with its ratio to the first one."""
    first: dict[str, Any] | None = None
    for devices, micro_batches in pairs:
        found = prepared(devices, micro_batches, options)
        record = {
            **options,
            "devices": devices,
            "micro_batches": micro_batches,
            "parts_s": found["parts"],
            "preparation_s": sum(found["parts"].values()),
            "preparation_processor_s": found["processor_seconds"],
            "step_s": found["step_seconds"],
            "model_s": found["model_seconds"],
            "peak_mib": found["peak_bytes"] / 2**20,
        }
        first = first or record
        record["of_first"] = record["preparation_processor_s"] / first["preparation_processor_s"]
        yield record


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The records for people."""
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
    began, rows = time.monotonic(), []
    for row in records(configurations(devices, counts, _FIXED.value), options):
        rows.append(row)
        passed, taken = time.monotonic() - began, row["preparation_processor_s"]
        sys.stderr.write(
            f"[{passed:.0f} s] {row['devices']} devices, M = {row['micro_batches']}: {taken:.1f} s of one core\n"
        )
        if _JSON.value:  # What has been measured is kept, whatever comes.
            write_results(_JSON.value, "preparation", rows)
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
