"""Time of the planner by number of layers and devices.

    python -m tools.evaluation.bench_planner --json=planner.json
    python -m tools.evaluation.bench_planner --layers=12,48 --devices=2,16 --repeats=1

Plans BERTs of 12 to 200 layers, from the profile of BERT-48 that DAPPLE's authors published, for 2 to 64 V100s (up to
eight to a server). Only the planner is measured: seconds are those of one core, the least of several repeats
that take turns. If nothing fits the devices' memory, the time is that of finding this out.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

import dapple_tf as dapple
from dapple_tf.planning.planner import plan
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, numbers, write_results
from dapple_tf.tools.evaluation.paper_models import deep_bert, hardware

FLAGS = flags.FlagValues()

_LAYERS = flags.DEFINE_list("layers", ["12", "24", "48", "100", "200"], "Encoder layers.", flag_values=FLAGS)
_DEVICES = flags.DEFINE_list("devices", ["2", "4", "8", "16", "32", "64"], "Numbers of devices.", flag_values=FLAGS)
_BATCH = flags.DEFINE_integer("global_batch_size", 64, "Samples of a step.", 1, flag_values=FLAGS)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Number of times that each is planned.", 1, flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)

_SERVER = 8
"""Devices of a server."""
_GIGABITS = 25
"""Ethernet between servers, in Gbit/s."""


def cluster_of(devices: int) -> dapple.Cluster:
    """Returns ``devices`` V100s; more than eight must be a multiple of eight.

    Raises:
        PlanError: it isn't one.
    """
    if devices > _SERVER and devices % _SERVER:
        raise dapple.PlanError(f"{devices} devices don't fill servers of {_SERVER}; use a multiple of {_SERVER}")
    return hardware(-(-devices // _SERVER), min(devices, _SERVER), _GIGABITS)


def planned(layers: int, devices: int, global_batch_size: int) -> tuple[float, dapple.Plan | None]:
    """Returns the planner's seconds of one core, and the plan; None if nothing fits."""
    profile, cluster = deep_bert(layers), cluster_of(devices)
    start = time.process_time()
    try:
        best = plan(profile, cluster, global_batch_size, least_gain=0.0)
    except dapple.PlanError:
        best = None
    return time.process_time() - start, best


def records(
    layers: Sequence[int], devices: Sequence[int], repeats: int, global_batch_size: int
) -> Iterator[dict[str, Any]]:
    """Yields a record of each number of layers and devices, in ascending order, with its ratio to the first one."""
    pairs = [(depth, count) for depth in sorted(layers) for count in sorted(devices)]
    turns: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    plans: dict[tuple[int, int], dapple.Plan | None] = {}
    for number in range(repeats):
        for depth, count in pairs[:: 1 if number % 2 == 0 else -1]:
            seconds, plans[depth, count] = planned(depth, count, global_batch_size)
            turns[depth, count].append(seconds)
            command.say(f"round {number + 1}: {depth} layers, {count} devices: {seconds:.2f} s")
            sys.stderr.flush()
    base = min(turns[pairs[0]])
    for (depth, count), seconds_of in turns.items():
        best = plans[depth, count]
        yield {
            "layers": depth,
            "devices": count,
            "global_batch_size": global_batch_size,
            "planner_s": min(seconds_of),
            "of_first": min(seconds_of) / base,
            "replicas": None if best is None else list(best.replicas),
            "micro_batches": None if best is None else best.micro_batches,
            "recompute": None if best is None else best.recompute,
        }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns seconds by layers and devices, with ratios to the first of all; a star where nothing fits."""
    by_size = {(row["layers"], row["devices"]): row for row in rows}
    depths, counts = (list(dict.fromkeys(pair[axis] for pair in by_size)) for axis in (0, 1))
    cells: list[tuple[object, ...]] = [("layers", *(f"{count} devices" for count in counts))]
    for depth in depths:
        own = [by_size[depth, count] for count in counts]
        cells.append(
            (depth, *(f"{r['planner_s']:.2f} s ({r['of_first']:.1f})" + "*" * (not r["replicas"]) for r in own))
        )
    return markdown(cells)


def main() -> None:
    """Measures what the flags say, and prints the table."""
    layers, devices = numbers("layers", _LAYERS.value), numbers("devices", _DEVICES.value)
    check_output(_JSON.value)
    for count in devices:
        cluster_of(count)
    logging.getLogger("dapple_tf").setLevel(logging.ERROR)
    rows = list(records(layers, devices, _REPEATS.value, _BATCH.value))
    if _JSON.value:
        write_results(_JSON.value, "planner", rows)
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
