"""Throughput of two workers on this machine, beside the maximum of its cores.

    python -m tools.evaluation.bench_cluster --rounds=12 --json=speed.json

Trains a GPT of 8 blocks (width 256, sequence 64), or another model, in several ways, which take turns, so that all see
the same changes of the machine's speed:

* copies: the whole model on each worker alone, both at once, with the micro-batches of the pipeline: the maximum.
* keras: the same with plain Keras, without micro-batches, in two processes.
* keras_alone: plain Keras in one process, with nothing beside it: a single device.
* pipeline_<schedule>: two stages, one on each worker.
* data_parallel_<M>: a replica on each worker, with M micro-batches.
* compressed_<M>: the same with gradients reduced as bfloat16, by the pass of docs/examples/bfloat16_gradients.py.
* mirrored: tf.distribute.MultiWorkerMirroredStrategy, in two processes.

Ratios are medians, with quartiles, of each round's throughput to that of the copies (or to that of "mirrored") in the
same round. With ``--pin`` each worker, and each process of plain Keras or of the strategy, has a core of its own, so
a waiting device isn't compensated by the other one's use of both cores.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import flags

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_models import MODELS, BenchModel, Trainer
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, write_results
from dapple_tf.tools.evaluation.peers import Peers, pinned
from dapple_tf.tools.evaluation.ratios import quartiles, ratios, take_turns
from dapple_tf.tools.hosts import ROOT, LocalWorkers, free_ports

WAYS = ("copies", "keras", "keras_alone", "pipeline", "data_parallel", "compressed", "mirrored")

FLAGS = flags.FlagValues()
_ROUNDS = flags.DEFINE_integer(
    "rounds", 12, "Rounds, in each of which each way has its turn.", lower_bound=2, flag_values=FLAGS
)
_STEPS = flags.DEFINE_integer("steps", 1, "Steps of a turn.", lower_bound=1, flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 16, "Micro-batches of a step.", lower_bound=1, flag_values=FLAGS)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Samples of a micro-batch.", lower_bound=1, flag_values=FLAGS)
_SCHEDULES = flags.DEFINE_list(
    "schedules", ["gpipe", "dapple_a", "dapple_b", "zb_h1", "zb_h2"], "Schedules of the pipeline.", flag_values=FLAGS
)
_PARALLEL = flags.DEFINE_list(
    "parallel", ["1", "8"], "Numbers of micro-batches to try in data parallelism.", flag_values=FLAGS
)
_MODEL = flags.DEFINE_enum("model", "gpt", list(MODELS), "Model to train; a GPT has the next sizes.", flag_values=FLAGS)
_BLOCKS = flags.DEFINE_integer("blocks", 8, "Blocks of the model.", lower_bound=2, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer("width", 256, "Width of the model; a multiple of 4.", lower_bound=4, flag_values=FLAGS)
_SEQUENCE = flags.DEFINE_integer("sequence", 64, "Tokens of a sample.", lower_bound=1, flag_values=FLAGS)
_JIT = flags.DEFINE_bool("jit_compile", False, "Compile all ways with XLA.", flag_values=FLAGS)
_WAYS = flags.DEFINE_list("ways", list(WAYS), "Ways to try; the copies always are.", flag_values=FLAGS)
_PIN = flags.DEFINE_bool("pin", False, "Give each worker its own core.", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "File to write the numbers to.", flag_values=FLAGS)
_PEER = flags.DEFINE_string(
    "peer", None, "Internal: this is a process of plain Keras or of the strategy.", flag_values=FLAGS
)


def bench_model() -> BenchModel:
    """Returns the model that the flags say."""
    if _MODEL.value != "gpt":
        return MODELS[_MODEL.value]
    sizes = {"depth": _BLOCKS.value, "width": _WIDTH.value, "sequence": _SEQUENCE.value}
    return BenchModel("gpt", {**MODELS["gpt"].size, **sizes})


# ---- processes of their own


def be_peer(task: Mapping[str, Any]) -> None:
    """Trains with plain Keras or the strategy: see `tools.evaluation.peers`. Answers with the loss."""
    with contextlib.ExitStack() as stack:
        if task["mirrored"]:
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            stack.enter_context(strategy.scope())
        described = BenchModel(task["family"], task["size"])
        model = described.make(jit_compile=task["jit_compile"])
        data = tf.data.Dataset.from_tensors(described.batch(task["batch"])).repeat()
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = data.with_options(options)
        batches = iter(strategy.experimental_distribute_dataset(data) if task["mirrored"] else data)
        if task["mirrored"]:  # Keras' own train function can't merge the workers' logs.
            train = compiled_step(model) if task["jit_compile"] else model.train_step
            step = tf.function(lambda: strategy.run(train, args=(next(batches),)))
        else:
            model.make_train_function()
            step = functools.partial(model.train_function, batches)
        for line in sys.stdin:
            for _ in range(int(line)):
                step()
            # Fetching the loss waits for the last step.
            sys.stdout.write(f"{float(model.metrics[0].result())}\n")
            sys.stdout.flush()


def compiled_step(model: keras.Model) -> Callable[[Any], None]:
    """Returns a train step whose gradients XLA computes: it can't convert the strategy's all-reduce, in the update."""

    @tf.function(jit_compile=True)
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    def step(batch: Any) -> None:
        loss, own = gradients(*batch)
        model.optimizer.apply_gradients(zip(own, model.trainable_variables, strict=True))
        model.metrics[0].update_state(loss)

    return step


def peers(stack: contextlib.ExitStack, batch: int, *, count: int = 2, mirrored: bool = False) -> Peers:
    """Starts processes of plain Keras or of the strategy."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    model = {"family": bench_model().family, "size": bench_model().size}
    task = json.dumps({"mirrored": mirrored, "batch": batch, **model, "jit_compile": _JIT.value})
    commands, environments = [], []
    for index in range(count):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environments.append({"TF_CONFIG": json.dumps(config)} if mirrored else {})
        own = [sys.executable, "-m", "tools.evaluation.bench_cluster", f"--peer={task}"]
        commands.append([*(pinned(index) if _PIN.value else []), *own])
    return Peers(stack, commands, environments=environments)


# ---- the ways to train on the workers


def ways(cluster: dapple.Cluster, stack: contextlib.ExitStack) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Returns each way's samples per step, and a function that runs a number of steps."""
    micro_batches, batch = _MICRO_BATCHES.value, _MICRO_BATCHES.value * _SAMPLES.value
    model = bench_model()
    threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))

    def trainer(plan: dapple.Plan, **options: Any) -> Trainer:
        return Trainer(stack, model.make(), model.batch(batch), cluster, plan, **options)

    parallel = functools.partial(dapple.Plan.data_parallel, jit_compile=_JIT.value)
    copies = [trainer(parallel([worker], batch, micro_batches)) for worker in range(2)]

    def both(steps: int) -> None:
        for waiting in [threads.submit(copy, steps) for copy in copies]:
            waiting.result()

    turns: dict[str, tuple[int, Callable[[int], object]]] = {"copies": (2 * batch, both)}
    if "keras" in _WAYS.value:
        turns["keras"] = (2 * batch, peers(stack, batch))
    if "keras_alone" in _WAYS.value:
        turns["keras_alone"] = (batch, peers(stack, batch, count=1))
    for schedule in _SCHEDULES.value if "pipeline" in _WAYS.value else ():
        stages = [[0], [1]]
        plan = dapple.Plan.manual(
            model.cuts(2), stages, micro_batches, batch, schedule=schedule, jit_compile=_JIT.value
        )
        turns[f"pipeline_{schedule}"] = (batch, trainer(plan))
    for count in map(int, _PARALLEL.value if "data_parallel" in _WAYS.value else ()):
        turns[f"data_parallel_{count}"] = (batch, trainer(parallel(2, batch, count)))
    for count in map(int, _PARALLEL.value if "compressed" in _WAYS.value else ()):
        passes = [dapple.After("update", compress_gradients())]
        turns[f"compressed_{count}"] = (batch, trainer(parallel(2, batch, count), passes=passes))
    if "mirrored" in _WAYS.value:
        turns["mirrored"] = (batch, peers(stack, batch, mirrored=True))
    return turns


def compress_gradients() -> Any:
    """Returns the pass of the documents' example that sends gradients as bfloat16."""
    path = ROOT / "docs" / "examples" / "bfloat16_gradients.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = example  # Dataclasses look their module up.
    spec.loader.exec_module(example)
    return example.CompressGradients()


def measure(cluster: dapple.Cluster) -> dict[str, list[float]]:
    """Returns the samples/s of each way in each round."""
    with contextlib.ExitStack() as stack:
        turns = ways(cluster, stack)
        for name, (_, run) in turns.items():
            command.say(f"warming up {name}")
            run(3)
        calls = {name: functools.partial(run, _STEPS.value) for name, (_, run) in turns.items()}
        times = take_turns(calls, _ROUNDS.value, lambda number, name: command.say(f"round {number + 1}: {name}"))
    return {
        name: [_STEPS.value * turns[name][0] / seconds for seconds in way_times] for name, way_times in times.items()
    }


def records_of(rates: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Returns a record for each way: its throughput, and that as a fraction of the copies' and of the strategy's."""
    bases = {"of_copies": "copies", "of_mirrored": "mirrored"}
    settings = {
        "model": _MODEL.value,
        "micro_batches": _MICRO_BATCHES.value,
        "samples_of_micro_batch": _SAMPLES.value,
        "rounds": _ROUNDS.value,
        "jit_compile": _JIT.value,
        "pinned": _PIN.value,
    }
    return [
        {
            "way": name,
            **settings,
            "samples_per_s": quartiles(own),
            **{key: ratios(own, rates[base]) for key, base in bases.items() if base in rates},
        }
        for name, own in rates.items()
    ]


def table(records: list[dict[str, Any]]) -> str:
    """Returns medians, and ratios to the copies and to the strategy, as Markdown."""
    rows: list[tuple[object, ...]] = [("way", "samples/s", "of the copies", "of mirrored")]
    for record in records:
        rate = f"{record['samples_per_s'].median:.1f}"
        rows.append((record["way"], rate, record["of_copies"], record.get("of_mirrored", "")))
    return markdown(rows)


def main() -> None:
    """Measures, prints the table and writes the file."""
    if _PEER.value is not None:
        be_peer(json.loads(_PEER.value))
        return
    check_output(_JSON.value)
    command.check_choices(_WAYS, WAYS, empty=True)
    command.check(_WIDTH.value % 4 == 0, f"--width={_WIDTH.value} isn't a multiple of the 4 heads")
    counts = all(count.isdecimal() and int(count) > 0 for count in _PARALLEL.value)
    command.check(counts, f"--parallel={','.join(_PARALLEL.value)}: numbers of micro-batches are 1 or more")
    cores = sorted(os.sched_getaffinity(0))[:2] if _PIN.value else None
    with LocalWorkers(2, cores=cores, echo=lambda worker, line: None) as workers:
        records = records_of(measure(dapple.Cluster.of_servers(workers.addresses)))
    sys.stdout.write(table(records) + "\n")
    if _JSON.value:
        name = f"cluster{f' {_MODEL.value}' * (_MODEL.value != 'gpt')}{' XLA' * _JIT.value}"
        write_results(_JSON.value, name, records)


if __name__ == "__main__":
    command.start(main, FLAGS)
