"""What a step consists of on more and more devices: nodes, feeds, transfers, and the client's time.

    python -m tools.evaluation.bench_many_devices --json=many.json                 # ten minutes
    python -m tools.evaluation.bench_many_devices --ways=straight --devices=4,8

Logical devices of this process train a BERT that is so narrow that a step is what the framework and TensorFlow do for
its tasks. Two ways to use D devices:

* straight: D stages, and as many micro-batches, so that the bubble stays as it is;
* replicas: `STAGES` stages of D / `STAGES` replicas, and `MICRO_BATCHES` micro-batches.

Each configuration has a process of its own. What 256 and 1,024 devices need is extrapolated by `extrapolated`; nothing
of it was run.
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
from dapple_tf.models import bert
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_preparation import even_cuts
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, numbers, rows_apart, write_results
from graph_passes.ir.graph import Graph, Ref

FLAGS = flags.FlagValues()

WAYS = ("straight", "replicas")
STAGES, MICRO_BATCHES = 4, 16
"""Of the way with replicas."""
PER_SERVER = 8
"""Devices of a server, for the count of tensors that cross the network."""
_STEPS = 8

_DEVICES = flags.DEFINE_list("devices", ["4", "8", "16", "32", "64"], "Numbers of devices.", flag_values=FLAGS)
_WAYS = flags.DEFINE_list("ways", list(WAYS), "Ways to use them.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers to.", flag_values=FLAGS)
_CHILD = flags.DEFINE_bool("child", False, "Internal: this process measures one configuration.", flag_values=FLAGS)


def plan_of(way: str, devices: int) -> dapple.Plan:
    """Returns the plan of a way; one sample for each slice."""
    replicas = 1 if way == "straight" else devices // STAGES
    stages, count = devices // replicas, devices if way == "straight" else MICRO_BATCHES
    lists = [range(stage * replicas, (stage + 1) * replicas) for stage in range(stages)]
    return dapple.Plan.manual(even_cuts(stages, stages), lists, count, count * replicas, "dapple_a")


def measured(way: str, devices: int) -> dict[str, Any]:
    """Returns the record of a configuration: counts, seconds (``_s``), milliseconds (``_ms``) and MiB."""
    plan = plan_of(way, devices)
    config = bert.BertConfig(depth=plan.num_stages, width=8, heads=2, inner=8, vocabulary=16, sequence=4)
    model = bert.build(config)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    samples = plan.global_batch_size
    tokens, labels = np.random.default_rng(0).integers(0, 16, (2, samples, 4)).astype("int32")
    x = {"tokens": tokens, "segments": np.zeros_like(tokens), "present": np.ones_like(tokens)}
    started = time.perf_counter()
    pipelined = dapple.transform(model, dapple.Cluster.local(devices, kind="cpu"), plan)
    pipelined.train_on_batch(x, labels)
    first = time.perf_counter() - started
    for _ in range(2):
        pipelined.train_on_batch(x, labels)
    preparation = first - pipelined.last_step_seconds
    clocks = (time.perf_counter, time.thread_time, time.process_time)
    steps = []
    for _ in range(_STEPS):
        began = [clock() for clock in clocks]
        pipelined.train_on_batch(x, labels)
        steps.append([clock() - start for clock, start in zip(clocks, began, strict=True)])
    wall, client, processor = (1e3 * float(ms) for ms in np.median(steps, axis=0))
    return {
        "way": way,
        "devices": devices,
        "stages": plan.num_stages,
        "micro_batches": plan.micro_batches,
        "tasks": _tasks(plan),
        **_counts(pipelined),
        "preparation_s": preparation,
        "step_ms": wall,
        "client_ms": client,
        "step_core_ms": processor,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def _tasks(plan: dapple.Plan) -> int:
    """Returns the number of F and B of all slices."""
    return 2 * sum(map(len, plan.devices)) * plan.micro_batches


def _counts(pipelined: Any) -> dict[str, int]:
    """Returns what the one step that has run consists of."""
    whole, (request,) = pipelined.session_graph()
    names = [name.partition(":")[0] for name in keras.tree.flatten(dict(request.fetches))]
    graph = Graph(whole)
    run = graph.ancestors([Ref(name) for name in names])
    nodes = [node for node in graph if node.name in run]
    place = {node.name: _number(node.device) for node in nodes}
    sent: set[tuple[Ref, int, int]] = set()
    for node in nodes:
        here = place[node.name]
        for ref in graph.inputs(node.name):
            there = place.get(ref.node)
            if here is not None and there is not None and here != there:
                sent.add((ref, there, here))
    return {
        "nodes": len(nodes),
        "functions": len(whole.library.function),
        "feeds": len(request.feeds),
        "fetches": len(names),
        "transfers": len(sent),
        "between_servers": sum(there // PER_SERVER != here // PER_SERVER for _, there, here in sent),
    }


def _number(device: str) -> int | None:
    """Returns the number of a logical device; None without one."""
    number = device.rpartition(":")[2]
    return int(number) if number.isdecimal() else None


def records(ways: Sequence[str], devices: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields a record of each configuration, each from a process of its own."""
    for way in ways:
        for count in devices:
            options = (f"--ways={way}", f"--devices={count}")
            (record,) = rows_apart("tools.evaluation.bench_many_devices", "--child", *options)
            yield record


_GROWS = ("nodes", "functions", "transfers", "between_servers", "preparation_s", "step_core_ms", "client_ms")


def extrapolated(rows: Sequence[Mapping[str, Any]], devices: int) -> dict[str, Any]:
    """Returns what more devices would need, for the records of one way.

    Counts and times are taken to be a + b * devices + c * tasks, fitted by least squares to relative errors, with none
    of the three below 0.

    Args:
        rows: records of one way, of at least three numbers of devices.
        devices: how many.
    """
    plan = plan_of(rows[0]["way"], devices)
    tasks = _tasks(plan)
    record: dict[str, Any] = {"way": rows[0]["way"], "devices": devices, "stages": plan.num_stages, "tasks": tasks}
    for name in _GROWS:
        some = [row for row in rows if row[name]]  # Within a server nothing goes between servers.
        known = np.array([float(row[name]) for row in some])
        terms = np.array([[1.0, row["devices"], row["tasks"]] for row in some])
        fitted = _non_negative(terms / known[:, None], np.ones(len(some))) if some else np.zeros(3)
        record[name] = float(np.dot(fitted, [1.0, devices, tasks]))
    return record


def _non_negative(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the least-squares solution without negative numbers; tries all sets of three terms that may be used."""
    best: tuple[float, np.ndarray] | None = None
    for used in range(1, 2 ** terms.shape[1]):
        chosen = [index for index in range(terms.shape[1]) if used >> index & 1]
        part = np.linalg.lstsq(terms[:, chosen], values, rcond=None)[0]
        if (part < 0).any():
            continue
        solution = np.zeros(terms.shape[1])
        solution[chosen] = part
        error = float(np.square(terms @ solution - values).sum())
        if best is None or error < best[0] - 1e-12:
            best = error, solution
    assert best is not None, "all terms and values are positive"
    return best[1]


def table(rows: Sequence[Mapping[str, Any]], more: Sequence[int] = (256, 1024)) -> str:
    """Returns the records for people, with what more devices would need in italics."""
    head = (
        *("way", "devices", "M", "tasks", "nodes", "functions", "feeds", "fetches", "transfers", "between servers"),
        *("preparation (s)", "step (ms)", "of all cores (ms)", "of the client's thread (ms)", "us of a core a task"),
    )
    cells: list[tuple[object, ...]] = [head]
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        for row in own:
            counts = (f"{row[name]:,}" for name in ("tasks", "nodes", "functions", "feeds", "fetches", "transfers"))
            cells.append(
                (
                    *(way, row["devices"], row["micro_batches"], *counts, f"{row['between_servers']:,}"),
                    *(f"{row['preparation_s']:.1f}", f"{row['step_ms']:.1f}", f"{row['step_core_ms']:.1f}"),
                    *(f"{row['client_ms']:.1f}", f"{1e3 * row['step_core_ms'] / row['tasks']:.0f}"),
                )
            )
        for devices in more if len(own) >= 3 else ():
            guess = extrapolated(own, devices)
            each = 1e3 * guess["step_core_ms"] / guess["tasks"]
            numbers_of = {name: f"*{guess[name]:,.0f}*" for name in (*_GROWS, "tasks")}
            counts = (numbers_of[name] for name in ("tasks", "nodes", "functions"))
            cells.append(
                (
                    *(way, f"*{devices:,}*", "", *counts, "", "", numbers_of["transfers"]),
                    *(numbers_of["between_servers"], numbers_of["preparation_s"], "", numbers_of["step_core_ms"]),
                    *(numbers_of["client_ms"], f"*{each:.0f}*"),
                )
            )
    return markdown(cells)


def main() -> None:
    """Measures what the flags say, and prints the table."""
    command.check_choices(_WAYS, WAYS)
    devices = numbers("devices", _DEVICES.value)
    check_output(_JSON.value)
    command.check(
        all(count % STAGES == 0 for count in devices),
        f"--devices: give multiples of {STAGES}, the stages with replicas",
    )
    if _CHILD.value:
        sys.stdout.write(json.dumps(measured(_WAYS.value[0], devices[0])) + "\n")
        return
    began, rows = time.monotonic(), []
    for row in records(_WAYS.value, devices):
        rows.append(row)
        command.say(f"{row['way']}, {row['devices']} devices: {row['nodes']:,} nodes", began)
        if _JSON.value:
            write_results(_JSON.value, "many_devices", rows)
    sys.stdout.write(table(rows) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
