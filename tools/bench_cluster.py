"""Throughput of two workers on this machine, beside what its cores give at most.

    python -m tools.bench_cluster --rounds=12 --out=bench.json

Trains a GPT of 8 blocks (width 256, sequence 64) in several ways, which take turns, so that all meet the same ups and
downs of the machine's speed:

* copies: the whole model on each worker by itself, both at once, with the micro-batches of the pipeline: the ceiling.
* keras: the same with plain Keras, without micro-batches, in two processes.
* pipeline_<schedule>: two stages, one on each worker.
* data_parallel_<M>: a replica on each worker, with M micro-batches.
* mirrored: tf.distribute.MultiWorkerMirroredStrategy, in two processes.

Ratios are medians, with quartiles, of each round's throughput to that of the copies (or to that of "mirrored") in the
same round.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import dapple_tf as dapple
from models.gpt import gpt
from tools.hosts import LocalWorkers, end, free_ports, launch

_ROUNDS = flags.DEFINE_integer("rounds", 12, "rounds in which each way has its turn", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 2, "steps of a turn", lower_bound=1)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 16, "of a step", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "of a micro-batch", lower_bound=1)
_SCHEDULES = flags.DEFINE_list("schedules", ["dapple_a", "zb_h1"], "of the pipeline")
_PARALLEL = flags.DEFINE_list("parallel", ["1", "8"], "micro-batches of data parallelism, each tried")
_CUT = flags.DEFINE_string("cut", "block_3", "last layer of the first stage")
_BLOCKS = flags.DEFINE_integer("blocks", 8, "of the model", lower_bound=2)
_PIN = flags.DEFINE_bool("pin", False, "give each worker a core of its own")
_OUT = flags.DEFINE_string("out", None, "write the numbers to this JSON file, too")
_PEER = flags.DEFINE_string("peer", None, "internal: this is a process of plain Keras or of the strategy")

_WIDTH, _HEADS, _SEQUENCE = 256, 4, 64


def make_model(blocks: int) -> keras.Model:
    """The model, compiled."""
    keras.utils.set_random_seed(1)
    model = gpt(sequence=_SEQUENCE, depth=blocks, width=_WIDTH, heads=_HEADS)
    model.compile(keras.optimizers.Adam(1e-4), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def make_data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and labels."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 256, (samples, _SEQUENCE + 1)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


# ---- processes of their own


def be_peer(task: Mapping[str, Any]) -> None:
    """Trains by plain Keras or the strategy: for each line on stdin, so many steps; answers each with the seconds."""
    with contextlib.ExitStack() as stack:
        if task["mirrored"]:
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            stack.enter_context(strategy.scope())
        model = make_model(task["blocks"])
        data = tf.data.Dataset.from_tensors(make_data(task["batch"])).repeat()
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = data.with_options(options)
        batches = iter(strategy.experimental_distribute_dataset(data) if task["mirrored"] else data)
        if task["mirrored"]:  # Keras' own train function can't merge the workers' logs.
            step = tf.function(lambda: strategy.run(model.train_step, args=(next(batches),)))
        else:
            model.make_train_function()
            step = functools.partial(model.train_function, batches)
        for line in sys.stdin:
            started = time.perf_counter()
            for _ in range(int(line)):
                step()
            float(model.metrics[0].result())  # Waits for the last step.
            sys.stdout.write(f"{time.perf_counter() - started}\n")
            sys.stdout.flush()


class Peers:
    """Two processes of plain Keras or of the strategy."""

    def __init__(self, stack: contextlib.ExitStack, *, mirrored: bool, batch: int) -> None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        task = json.dumps({"mirrored": mirrored, "batch": batch, "blocks": _BLOCKS.value})
        self._processes = []
        for index in range(2):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(pathlib.Path.cwd())}
            if mirrored:
                environment["TF_CONFIG"] = json.dumps(config)
            command = [*_pinned(index), sys.executable, "-m", "tools.bench_cluster", f"--peer={task}"]
            pipe = subprocess.PIPE
            process = launch(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
            stack.callback(end, process)
            self._processes.append(process)

    def __call__(self, steps: int) -> float:
        """Seconds of so many steps of both."""
        started = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"a peer ended with code {process.wait()}")
        return time.perf_counter() - started


def _pinned(index: int) -> list[str]:
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[index % len(cores)])] if _PIN.value else []


# ---- the ways to train on the workers


def ways(cluster: dapple.Cluster, stack: contextlib.ExitStack) -> dict[str, tuple[float, Callable[[int], object]]]:
    """Each way's samples per step, and what runs so many steps."""
    micro_batches, batch = _MICRO_BATCHES.value, _MICRO_BATCHES.value * _SAMPLES.value
    threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))

    def trainer(plan: dapple.Plan) -> Callable[[int], None]:
        pipelined = dapple.transform(make_model(_BLOCKS.value), cluster, plan)
        stack.callback(pipelined.close)
        x, y = make_data(plan.global_batch_size)

        def run(steps: int) -> None:
            for _ in range(steps):
                pipelined.train_on_batch(x, y)

        return run

    copies = [trainer(dapple.Plan.data_parallel([worker], batch, micro_batches)) for worker in range(2)]

    def both(steps: int) -> None:
        for waiting in [threads.submit(copy, steps) for copy in copies]:
            waiting.result()

    found: dict[str, tuple[float, Callable[[int], object]]] = {"copies": (2 * batch, both)}
    found["keras"] = (2 * batch, Peers(stack, mirrored=False, batch=batch))
    for schedule in _SCHEDULES.value:
        plan = dapple.Plan.manual([_CUT.value], [[0], [1]], micro_batches, batch, schedule=schedule)
        found[f"pipeline_{schedule}"] = (batch, trainer(plan))
    for count in map(int, _PARALLEL.value):
        found[f"data_parallel_{count}"] = (batch, trainer(dapple.Plan.data_parallel(2, batch, count)))
    found["mirrored"] = (batch, Peers(stack, mirrored=True, batch=batch))
    return found


def measure(cluster: dapple.Cluster) -> dict[str, list[float]]:
    """Samples/s of each way in each round."""
    rates: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        turns = ways(cluster, stack)
        for name, (_, run) in turns.items():
            _say(f"warming up {name}")
            run(3)
        for number in range(_ROUNDS.value):
            for name, (samples, run) in turns.items():
                started = time.perf_counter()
                run(_STEPS.value)
                rates.setdefault(name, []).append(_STEPS.value * samples / (time.perf_counter() - started))
            _say(f"round {number + 1}: " + ", ".join(f"{name} {rates[name][-1]:.1f}" for name in turns))
    return rates


def table(rates: Mapping[str, list[float]]) -> str:
    """Medians, and ratios to the copies and to the strategy, as Markdown."""
    lines = ["| way | samples/s | of the copies | of mirrored |", "|---|---|---|---|"]
    for name, own in rates.items():
        cells = [f"{statistics.median(own):.1f}"]
        for base in ("copies", "mirrored"):
            low, middle, high = np.percentile(np.divide(own, rates[base]), (25, 50, 75))
            cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    if _PEER.value is not None:
        be_peer(json.loads(_PEER.value))
        return
    cores = sorted(os.sched_getaffinity(0))[:2] if _PIN.value else None
    with LocalWorkers(2, cores=cores, echo=lambda worker, line: None) as workers:
        rates = measure(dapple.Cluster.of_servers(workers.addresses))
    sys.stdout.write(table(rates) + "\n")
    if _OUT.value:
        pathlib.Path(_OUT.value).write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    app.run(main)
