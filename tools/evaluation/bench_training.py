"""Benchmarks of training steps: overhead, the client's share, monitoring, recomputation, and a cluster of two workers.

As a program, it is a process of plain Keras or of tf.distribute that trains beside ours (`peers`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.tools.evaluation.bench import Case, Numbers, Settings, Turn, each
from dapple_tf.tools.evaluation.bench_models import MODELS, BenchModel, trainer
from dapple_tf.tools.evaluation.peers import Peers
from dapple_tf.tools.hosts import ROOT, LocalWorkers, free_ports
from graph_passes.ir.tensorflow_private import SESSION_RUN

Stack = contextlib.ExitStack


def trained(model: Any, described: BenchModel, batch: int, settings: Settings, callbacks: Any = ()) -> Turn:
    """Returns a turn of some steps of a model, plain or pipelined: milliseconds on the clock and of cores."""
    steps, fit = settings["steps"], settings["method"] == "fit"
    x, y = described.batch(batch * (steps if fit else 1))

    def turn() -> Numbers:
        began, processor = time.perf_counter(), time.process_time()
        if fit:
            model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0, callbacks=list(callbacks))
        for _ in range(0 if fit else steps):
            model.train_on_batch(x, y)
        seconds, busy = time.perf_counter() - began, time.process_time() - processor
        return {"step_ms": 1e3 * seconds / steps, "cores_ms": 1e3 * busy / steps}

    return turn


def _pipelined(stack: Stack, model: keras.Model, devices: int, plan: dapple.Plan) -> dapple.PipelinedModel:
    cluster = dapple.Cluster.local(devices, kind="cpu")
    return stack.enter_context(contextlib.closing(dapple.transform(model, cluster, plan)))


def overhead(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """One stage on one device, one micro-batch, beside plain Keras: a pipelined step without the model's work."""
    described, batch, jit = MODELS[settings["model"]], settings["batch"], settings["jit_compile"]
    plan = dapple.Plan.data_parallel(1, batch, 1, jit_compile=jit)
    ours = _pipelined(stack, described.make(jit_compile=jit), 1, plan)
    ways = {"keras": described.make(jit_compile=jit), "ours": ours}
    return {name: trained(model, described, batch, settings) for name, model in ways.items()}


def monitoring(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """Short fits with `dapple.PipelineMonitor` and without, traced steps included."""
    described, batch = MODELS[settings["model"]], settings["batch"]
    plan = dapple.Plan.manual(described.cuts(2), [[0], [1]], 4, batch)
    pipelined = _pipelined(stack, described.make(), 2, plan)
    fit = functools.partial(trained, pipelined, described, batch, {**settings, "method": "fit"})
    return {"without": fit(), "with the monitor": fit([dapple.PipelineMonitor()])}


def recomputation(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """Two stages that keep all residuals, recompute cheap ones, or keep a stage's inputs only."""
    described, count = MODELS[settings["model"]], settings["micro_batches"]
    batch = count * settings["samples"]

    def way(recompute: str) -> Turn:
        plan = dapple.Plan.straight(
            described.cuts(2), batch, count, recompute=recompute, jit_compile=settings["jit_compile"]
        )
        pipelined = _pipelined(stack, described.make(), 2, plan)
        steps = trained(pipelined, described, batch, {**settings, "method": "train_on_batch"})

        def turn() -> Numbers:
            numbers = steps()
            traced = pipelined.profile_step(*described.batch(batch), warm_up=0, train=True)
            return {**numbers, "peak_mb": max(traced.peak_bytes.values()) / 1e6}

        return turn

    return {name: way(name) for name in ("none", "min_cut", "boundary")}


# ---- workers


def _workers(stack: Stack, count: int = 2) -> dapple.Cluster:
    workers = stack.enter_context(LocalWorkers(count, echo=lambda worker, line: None))
    return dapple.Cluster.of_servers(workers.addresses)


@contextlib.contextmanager
def _timed_session() -> Iterator[list[float]]:
    """Gives the seconds of each call of ``Session.run``'s C function."""
    run, inside = getattr(*SESSION_RUN), list[float]()

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return run(*arguments)
        finally:
            inside.append(time.perf_counter() - started)

    with mock.patch.object(*SESSION_RUN, timed):
        yield inside


def client(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """The client's part of a step on two workers: milliseconds outside of TensorFlow, and its processor time.

    TensorFlow's master is among its threads: it sends workers their parts of the step, and takes fetched values.
    """
    described, count = MODELS[settings["model"]], settings["micro_batches"]
    cluster, batch = _workers(stack), count * settings["samples"]
    plans = {
        "two stages": dapple.Plan.manual(described.cuts(2), [[0], [1]], count, batch),
        "data parallel": dapple.Plan.data_parallel(2, batch),
    }

    def way(plan: dapple.Plan) -> Turn:
        pipelined = dapple.transform(described.make(), cluster, plan)
        stack.callback(pipelined.close, sync=False)
        steps = trained(pipelined, described, batch, settings)

        def turn() -> Numbers:
            with _timed_session() as inside:
                numbers = steps()
            outside = numbers["step_ms"] - 1e3 * sum(inside) / settings["steps"]
            return {**numbers, "outside_ms": outside, "of_a_core": numbers["cores_ms"] / numbers["step_ms"]}

        return turn

    return {name: way(plan) for name, plan in plans.items()}


def cluster(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """Samples per second of two workers: two independent copies (the ceiling), pipelines, data parallelism, Keras'.

    ``mirrored`` is tf.distribute.MultiWorkerMirroredStrategy in two processes, ``keras`` plain Keras in two.
    """
    described, jit = MODELS[settings["model"]], settings["jit_compile"]
    count, batch = settings["micro_batches"], settings["micro_batches"] * settings["samples"]
    workers = _workers(stack)
    threads = stack.enter_context(concurrent.futures.ThreadPoolExecutor(2))
    parallel = functools.partial(dapple.Plan.data_parallel, jit_compile=jit)

    def training(plan: dapple.Plan, **options: Any) -> Callable[[int], float]:
        return trainer(stack, described.make(), described.batch(batch), workers, plan, **options)

    copies = [training(parallel([worker], batch, count)) for worker in range(2)]

    def both(steps: int) -> None:
        for waiting in [threads.submit(copy, steps) for copy in copies]:
            waiting.result()

    ways: dict[str, tuple[int, Callable[[int], object]]] = {"copies": (2 * batch, both)}
    for schedule in each(settings, "schedules"):
        plan = dapple.Plan.manual(described.cuts(2), [[0], [1]], count, batch, schedule=schedule, jit_compile=jit)
        ways[f"pipeline, {schedule}"] = batch, training(plan)
    ways["data parallel"] = batch, training(parallel(2, batch))
    compressing = [dapple.After("update", compress_gradients())]
    ways["data parallel, bfloat16 gradients"] = batch, training(parallel(2, batch), passes=compressing)
    if settings["peers"]:
        ways["keras"] = 2 * batch, _peers(stack, settings, batch, mirrored=False)
        ways["mirrored"] = batch, _peers(stack, settings, batch, mirrored=True)

    def turn(samples: int, run: Callable[[int], object]) -> Numbers:
        began = time.perf_counter()
        run(settings["steps"])
        return {"samples_per_s": samples * settings["steps"] / (time.perf_counter() - began)}

    return {name: functools.partial(turn, *way) for name, way in ways.items()}


def tables(stack: Stack, settings: Settings) -> dict[str, Turn]:
    """A wide & deep model that is mostly tables, data parallel on workers: whole, slots in shards, rows in shards.

    ``sent_mb`` are the bytes of the loopback device in a step.
    """
    count, rows, batch, steps = (settings[name] for name in ("workers", "rows", "batch", "steps"))
    workers, draw = _workers(stack, count), np.random.default_rng(0)
    x = [draw.integers(0, rows, (batch, 26), "int32"), draw.random((batch, 13), "float32")]
    y = draw.integers(0, 2, (batch, 1))

    def way(**shards: Any) -> Turn:
        pipelined = dapple.transform(_wide_and_deep(rows), workers, dapple.Plan.data_parallel(count, batch, **shards))
        stack.callback(pipelined.close, sync=False)

        def turn() -> Numbers:
            pipelined.train_on_batch(x, y)
            sent, began = _loopback_bytes(), time.perf_counter()
            for _ in range(steps):
                pipelined.train_on_batch(x, y)
            step_ms, sent = 1e3 * (time.perf_counter() - began) / steps, _loopback_bytes() - sent
            peaks = pipelined.profile_step(x, y, warm_up=0, train=True).peak_bytes
            return {"step_ms": step_ms, "sent_mb": sent / steps / 1e6, "peak_mb": max(peaks.values()) / 1e6}

        return turn

    return {"whole": way(), "slots in shards": way(optimizer_shards=True), "rows in shards": way(row_shards=True)}


def _wide_and_deep(rows: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    ids, numbers = keras.Input((26,), dtype="int32"), keras.Input((13,))
    wide, deep = (keras.layers.Flatten()(keras.layers.Embedding(rows, width)(ids)) for width in (1, 16))
    hidden = keras.layers.Concatenate()([deep, numbers])
    for units in (256, 128):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    model = keras.Model([ids, numbers], keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, wide])))
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def _loopback_bytes() -> int:
    text = pathlib.Path("/proc/net/dev").read_text(encoding="utf-8")
    return int(text.partition("lo:")[2].split()[8])


def compress_gradients() -> Any:
    """Returns the pass of the documents' example that sends gradients as bfloat16."""
    path = ROOT / "docs" / "examples" / "bfloat16_gradients.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = example  # Dataclasses look their module up.
    spec.loader.exec_module(example)
    return example.CompressGradients()


def _peers(stack: Stack, settings: Settings, batch: int, *, mirrored: bool) -> Peers:
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    task = {"mirrored": mirrored, "batch": batch, "model": settings["model"], "jit_compile": settings["jit_compile"]}
    line = [sys.executable, "-m", "tools.evaluation.bench_training", json.dumps(task)]
    configs = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}} for index in range(2)]
    return Peers(stack, [["env", f"TF_CONFIG={json.dumps(config)}", *line] if mirrored else line for config in configs])


def be_peer(task: Mapping[str, Any]) -> None:
    """Trains with plain Keras or the strategy: see `peers`. Answers with the loss."""
    with contextlib.ExitStack() as stack:
        if task["mirrored"]:
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            stack.enter_context(strategy.scope())
        described = MODELS[task["model"]]
        model = described.make(jit_compile=task["jit_compile"])
        data = tf.data.Dataset.from_tensors(described.batch(task["batch"])).repeat()
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = data.with_options(options)
        if task["mirrored"]:  # Keras' own train function can't merge the workers' logs.
            batches = iter(strategy.experimental_distribute_dataset(data))
            train = compiled_step(model) if task["jit_compile"] else model.train_step
            step = tf.function(lambda: strategy.run(train, args=(next(batches),)))
        else:
            model.make_train_function()
            step = functools.partial(model.train_function, iter(data))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
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


_STEPS = {"model": "gpt", "batch": 16, "steps": 10, "method": "train_on_batch"}
_PARTS = {"model": "gpt", "samples": 8, "micro_batches": 16, "steps": 1, "jit_compile": False}

CASES = {
    "overhead": Case("one stage beside plain Keras", overhead, _STEPS | {"jit_compile": False}, rounds=30),
    "monitoring": Case("fits with the monitor", monitoring, {"model": "gpt", "batch": 32, "steps": 5}, rounds=40),
    "recompute": Case("what recomputation costs and saves", recomputation, _PARTS | {"micro_batches": 4, "steps": 2}),
    "client": Case("what the client adds on workers", client, _STEPS | {"steps": 40, "samples": 2, "micro_batches": 8}),
    "cluster": Case(
        "throughput of two workers",
        cluster,
        _PARTS | {"schedules": "gpipe,dapple_a,dapple_b,zb_h1,zb_h2", "peers": True},
        rounds=12,
    ),
    "tables": Case(
        "tables of embeddings in shards", tables, {"workers": 2, "rows": 1_000_000, "batch": 512, "steps": 3}, rounds=5
    ),
}

if __name__ == "__main__":
    be_peer(json.loads(sys.argv[1]))
