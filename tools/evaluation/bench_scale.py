"""Benchmarks of preparation: planning, rewriting full-size models, and first steps."""

from __future__ import annotations

import contextlib
import functools
import itertools
import resource
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.execution.step_builder import planned_step
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.models import bert
from dapple_tf.models.registry import find_model
from dapple_tf.tools.evaluation.bench import Case, Numbers, Settings, Turn, each
from dapple_tf.tools.evaluation.bench_models import MODELS
from dapple_tf.tools.evaluation.paper_models import deep_bert, hardware
from dapple_tf.tools.shapes import cuts_by_parameters, devices_of

SERVER = 8
"""Devices of a server."""
_GIGABITS = 25
"""Ethernet between servers, in Gbit/s."""


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """Returns a result, and its seconds of a core."""
    began = time.process_time()
    made = make()
    return made, time.process_time() - began


# ---- planning


def cluster_of(devices: int) -> dapple.Cluster:
    """Returns ``devices`` V100s; more than eight must be a multiple of eight.

    Raises:
        PlanError: it isn't one.
    """
    if devices > SERVER and devices % SERVER:
        raise dapple.PlanError(f"{devices} devices don't fill servers of {SERVER}; use a multiple of {SERVER}")
    return hardware(-(-devices // SERVER), min(devices, SERVER), _GIGABITS)


def planner(stack: contextlib.ExitStack, settings: Settings) -> dict[str, Turn]:
    """Seconds of a core that planning BERTs of some depths takes, from the profile of DAPPLE's authors."""

    def turn(layers: int, devices: int) -> Numbers:
        profile, described = deep_bert(layers), cluster_of(devices)
        make = functools.partial(dapple.plan, profile, described, settings["global_batch_size"], least_gain=0.0)
        return {"core_s": _timed(make)[1]}

    sizes = itertools.product(map(int, each(settings, "layers")), map(int, each(settings, "devices")))
    return {f"{size[0]} layers, {size[1]} devices": functools.partial(turn, *size) for size in sizes}


def rewriting(stack: contextlib.ExitStack, settings: Settings) -> dict[str, Turn]:
    """Full-size models, without values, rewritten into a training step of equal stages; devices are a description."""
    stages, replicas = settings["stages"], settings["replicas"]

    def turn(name: str) -> Numbers:
        with dapple.deferred_init():
            model, built = _timed(find_model(name).build)
            shape = (replicas,) * stages
            cuts, cutting = _timed(lambda: cuts_by_parameters(model, shape))
            plan = dapple.Plan.manual(cuts, devices_of(shape), stages, stages * replicas)
            spec = ExampleBatch.of(model).spec
            step, passes = _timed(lambda: planned_step(model, plan, cluster_of(stages * replicas), spec))
        functions = step.graph.library.function
        return {
            "build_core_s": built,
            "cuts_core_s": cutting,
            "passes_core_s": passes,
            "nodes": len(step.graph.node),
            "function_nodes": sum(len(function.node_def) for function in functions),
            "graph_mib": step.graph.ByteSize() / 2**20,
            "peak_mib": _peak_mib(),
        }

    return {name: functools.partial(turn, name) for name in each(settings, "models")}


# ---- the first step


def _first_step(make: Callable[[], Any], x: Any, y: np.ndarray) -> Numbers:
    """Returns the seconds of a first step, less the second's computation, on the clock and of a core."""
    times = [(time.perf_counter(), time.process_time())]
    trained = make()
    for _ in range(2):
        trained.train_on_batch(x, y)
        times.append((time.perf_counter(), time.process_time()))
    clock, core = ((first - began) - (second - first) for began, first, second in zip(*times, strict=True))
    return {"first_step_s": clock, "core_s": core, "peak_mib": _peak_mib()}


def preparation(stack: contextlib.ExitStack, settings: Settings) -> dict[str, Turn]:
    """`transform` to the end of the first step of a BERT with a stage on each logical device."""
    layers, count = settings["layers"], settings["micro_batches"]

    def turn(devices: int) -> Numbers:
        ends = [round(layers * (stage + 1) / devices) for stage in range(devices - 1)]
        plan = dapple.Plan.straight([f"layer_{max(0, end - 1)}" for end in ends], count, count)
        sizes = {name: settings[name] for name in ("width", "heads", "vocabulary", "sequence")}
        model = bert.build(bert.BertConfig(depth=layers, inner=4 * settings["width"], **sizes))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        drawn = np.random.default_rng(0).integers(0, sizes["vocabulary"], (2, count, sizes["sequence"]), "int32")
        x = {"tokens": drawn[0], "segments": np.zeros_like(drawn[0]), "present": np.ones_like(drawn[0])}
        cluster = dapple.Cluster.local(devices, kind="cpu")
        return _first_step(lambda: dapple.transform(model, cluster, plan), x, drawn[1])

    return {f"{devices} devices": functools.partial(turn, devices) for devices in map(int, each(settings, "devices"))}


def first_step(stack: contextlib.ExitStack, settings: Settings) -> dict[str, Turn]:
    """The first step of a model in two stages on logical devices, beside plain Keras'."""
    described, jit, samples = MODELS[settings["model"]], settings["jit_compile"], 8

    def turn(ours: bool) -> Numbers:
        model, (x, y) = described.make(jit_compile=jit), described.batch(samples)
        plan = described.pipeline(2, 4, samples, "dapple_a", jit_compile=jit)
        cluster = dapple.Cluster.local(2, kind="cpu")
        return _first_step(lambda: dapple.transform(model, cluster, plan) if ours else model, x, y)

    return {"keras": functools.partial(turn, False), "ours": functools.partial(turn, True)}


_FULL_SIZE = "gpt:medium,bert:12,bert:24,bert:48,xlnet:36,gnmt:16,vgg:19,resnet:50,resnet:200,densenet:121,nasnet:large"

CASES = {
    "planner": Case(
        "seconds of a core for planning a BERT",
        planner,
        {"layers": "12,24,48,100,200", "devices": "2,4,8,16,32,64", "global_batch_size": 64},
        rounds=3,
    ),
    "rewriting": Case(
        "full-size models rewritten without being run",
        rewriting,
        {"models": _FULL_SIZE + ",amoebanet:36", "stages": 16, "replicas": 1},
        rounds=1,
        apart=True,
    ),
    "preparation": Case(
        "transform and first step of a BERT by devices",
        preparation,
        {"devices": "2,4,8,16,32", "micro_batches": 8, "layers": 48, "width": 64, "heads": 4}
        | {"vocabulary": 1024, "sequence": 16},
        rounds=3,
        apart=True,
    ),
    "first_step": Case(
        "the first step of a model beside plain Keras'",
        first_step,
        {"model": "resnet", "jit_compile": False},
        rounds=3,
        apart=True,
    ),
}
