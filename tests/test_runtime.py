"""What the executor does: the order of tasks, the memory of devices, the size of graphs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import pipeline
from selection import thorough

import dapple_tf as dapple
from dapple_tf.frontend.capture import Mode
from graph_passes.ir.tasks import Task

layers = keras.layers


def chain(depth: int, width: int = 8, features: int = 8) -> keras.Model:
    inputs = keras.Input((features,))
    x = inputs
    for index in range(depth):
        x = layers.Dense(width, activation="gelu", name=f"dense_{index}")(x)
    model = keras.Model(inputs, layers.Dense(1, name="last")(x))
    model.compile("sgd", "mse")
    return model


def starts(pipelined: dapple.PipelinedModel, stats: Any) -> dict[str, list[Task]]:
    """Tasks of each device in the order in which a traced step started them."""
    engine = pipelined._engine
    (build,) = [b for (mode, *_), b in engine.builder.builds.items() if mode is Mode.TRAIN]
    ((prefix, step),) = build.steps.values()
    tasks = {f"{prefix}/{node}": task for task, node in step.entry.items()}
    started: dict[str, dict[Task, int]] = collections.defaultdict(dict)
    for device in stats.dev_stats:
        for node in device.node_stats:
            if node.node_name in tasks:
                started[device.device][tasks[node.node_name]] = node.all_start_nanos or 1000 * node.all_start_micros
    return {device: sorted(times, key=times.__getitem__) for device, times in started.items()}


@pytest.mark.parametrize(
    ("schedule", "devices", "options"),
    [
        # Whole backwards beside split ones, stages that share devices in parts.
        ("dapple_a", [[0, 1]] * 3, {"reverse_first_k": 2}),
        ("modulo", [[0, 1], [2], [1, 0]], {"task_seconds": [[1, 3, 1], [2, 1, 1], [1, 1, 2]]}),
        *(
            thorough((schedule, [[0, 1], [2], [3]], {}))
            for schedule in ("gpipe", "dapple_a", "zb_h1", "dapple_b", "fast_forward")
        ),
        thorough(("modulo", [[0], [1], [0]], {})),
        thorough(("interleaved", [[0], [1], [0], [1]], {})),
        thorough(("zb_v", [[0], [1], [1], [0]], {})),
    ],
)
def test_tasks_start_in_the_order_of_the_schedule_on_every_device(
    schedule: str, devices: list[list[int]], options: dict[str, Any]
) -> None:
    model = chain(5, width=64)
    cuts = ["dense_0", "dense_2", "dense_3"][: len(devices) - 1]
    plan = dapple.Plan.manual(cuts, devices, 4, 16, schedule, **options)
    pipelined = dapple.transform(model, dapple.Cluster.local(4, kind="cpu"), plan)
    x, y = np.zeros((16, 8)), np.zeros((16, 1))
    pipelined.train_on_batch(x, y)
    measured = starts(pipelined, pipelined.trace_step(x, y))
    engine = pipelined._engine
    (build,) = [b for (mode, *_), b in engine.builder.builds.items() if mode is Mode.TRAIN]
    ((_, step),) = build.steps.values()
    assert step.schedule is not None
    names = engine.cluster.device_names
    # What has nothing to compute (Bx of the first stage, say) is a NoOp, which TensorFlow may drop.
    computed = {
        Task(task.stage, phase, task.micro_batch, task.replica)
        for task in step.entry
        for phase, function in build.program.stages[task.stage].phases
        if function is not None
    }
    expected = {
        names[device]: [task for task in tasks if task in computed] for device, tasks in step.schedule.orders.items()
    }
    ran = {name: [task for task in tasks if task in computed] for name, tasks in measured.items()}
    assert ran == expected


def peaks(stats: Any) -> dict[str, int]:
    """Peak bytes of each device within one step, from its allocation records."""
    events: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for device in stats.dev_stats:
        for node in device.node_stats:
            for memory in node.memory:
                events[device.device] += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
    peak_bytes = {}
    for device, records in events.items():
        held = np.cumsum([size for _, size in sorted(records)])
        peak_bytes[device] = int(held.max())
    return peak_bytes


def peak_memory(schedule: str, micro_batches: int) -> dict[str, int]:
    """The peak of 16 micro-batches, the median of five measurements.

    How far a stage runs ahead within its bound is a matter of timing, and a step of 16 micro-batches has four times the
    chances to do so that one of four has: as many micro-batches are looked at, in several steps.
    """
    steps = 16 // micro_batches
    samples = 64
    model = chain(16, width=256, features=64)
    pipelined = pipeline(model, ["dense_7"], (1, 1), micro_batches, samples * micro_batches, schedule=schedule)
    x, y = np.zeros((samples * micro_batches, 64), "float32"), np.zeros((samples * micro_batches, 1), "float32")
    pipelined.train_on_batch(x, y)
    runs = [[peaks(pipelined.trace_step(x, y)) for _ in range(steps)] for _ in range(5)]
    pipelined.close()
    return {device: int(np.median([max(step[device] for step in run) for run in runs])) for device in runs[0][0]}


@pytest.mark.thorough
@pytest.mark.slow
def test_dapple_keeps_memory_flat_while_gpipe_grows_with_micro_batches() -> None:
    """DAPPLE (PPoPP'21), figure 3(c): K micro-batches in flight, however many there are."""
    few, many = peak_memory("dapple_a", 4), peak_memory("dapple_a", 16)
    all_at_once = peak_memory("gpipe", 16)
    assert len(few) == 2
    for device in few:
        assert many[device] <= 1.05 * few[device], (device, few, many)
        assert all_at_once[device] >= 2 * many[device], (device, all_at_once, many)


@pytest.mark.thorough
@pytest.mark.slow
def test_recomputation_lowers_peak_memory() -> None:
    model = {policy: chain(8, width=256, features=64) for policy in ("none", "boundary")}
    x, y = np.zeros((512, 64), "float32"), np.zeros((512, 1), "float32")
    peak_bytes = {}
    for policy, built in model.items():
        pipelined = pipeline(built, ["dense_3"], (1, 1), 8, 512, schedule="gpipe", recompute=policy)
        pipelined.train_on_batch(x, y)
        peak_bytes[policy] = min(sum(peaks(pipelined.trace_step(x, y)).values()) for _ in range(2))
        pipelined.close()
    assert peak_bytes["boundary"] < 0.6 * peak_bytes["none"], peak_bytes


@functools.cache
def top_level_nodes(depth: int, micro_batches: int) -> int:
    pipelined = pipeline(chain(depth), [f"dense_{depth // 2}"], (2, 1), micro_batches, 12)
    pipelined.train_on_batch(np.zeros((12, 8)), np.zeros((12, 1)))
    (prefix,) = [p for (mode, *_), b in pipelined._engine.builder.builds.items() for p, _ in b.steps.values()]
    graph = pipelined._engine.session.graph.as_graph_def()
    return sum(node.name.startswith(f"{prefix}/") for node in graph.node)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_step_grows_with_tasks_not_with_depth() -> None:
    shallow = top_level_nodes(2, 3)
    assert shallow == top_level_nodes(8, 3)
    assert shallow < top_level_nodes(2, 6) < 2.2 * shallow


@pytest.mark.slow
def test_no_stage_function_is_made_twice() -> None:
    """Another epoch reuses the functions; a smaller last batch has its own, as its slices are of another size."""
    pipelined = pipeline(chain(4), ["dense_1"], (2, 1), 3, 12)
    x, y = np.zeros((30, 8)), np.zeros((30, 1))
    pipelined.fit(x, y, epochs=2, verbose=0)
    (built,) = [b for (mode, *_), b in pipelined._engine.builder.builds.items() if mode is Mode.TRAIN]
    libraries = [graph.library.function for graph in built.graphs.values()]
    assert all(len({f.signature.name for f in library}) == len(library) for library in libraries)
    bodies: dict[str, set[bytes]] = collections.defaultdict(set)
    for function in itertools.chain.from_iterable(libraries):
        bodies[function.signature.name].add(function.SerializeToString(deterministic=True))
    assert all(len(own) == 1 for own in bodies.values()), "one name for different functions"
    names = list(bodies)
    stages = [name for name in names if name.endswith(("_forward", "_backward"))]
    sized = ("stage0_of2", "stage0", "stage1_of4", "stage1_of3")  # The last batch: 2 times 3, on 2 replicas and on one.
    assert sorted(stages) == sorted(f"train0_{own}_{phase}" for own in sized for phase in ("backward", "forward"))


def test_stages_of_equal_layers_are_one_function_for_tensorflow() -> None:
    """TensorFlow copied, searched and kept the functions of each of 32 equal stages."""
    model, plain = chain(5), chain(5)
    plain.set_weights(model.get_weights())
    cuts = [f"dense_{index}" for index in range(5)]
    pipelined = dapple.transform(
        model, dapple.Cluster.local(6, kind="cpu"), dapple.Plan.manual(cuts, [[d] for d in range(6)], 2, 8)
    )
    generator = np.random.default_rng(0)
    for _ in range(2):
        x, y = generator.normal(size=(8, 8)), generator.normal(size=(8, 1))
        assert pipelined.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=1e-5)
    for own, its in zip(pipelined.sync().get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, its, rtol=1e-5, atol=1e-6)
    library = pipelined._engine.session.graph.as_graph_def().library.function
    names = [function.signature.name for function in library]
    # The first stage casts its input, and gives it no gradient; the last one has the loss.
    assert sum(name.endswith("_forward") for name in names) == 3
    assert sum(name.endswith("_backward") for name in names) == 3
    (built,) = [b for (mode, *_), b in pipelined._engine.builder.builds.items() if mode is Mode.TRAIN]
    own = [f.signature.name for graph in built.graphs.values() for f in graph.library.function]
    assert sum(name.endswith("_forward") for name in own) == 6  # as dumps show it


@pytest.mark.slow
def test_device_memory_limits_micro_batches_in_flight() -> None:
    """D of P_A and P_B: fewer micro-batches are warmed up when memory holds fewer; none is an error."""
    model = chain(4, width=64)
    plan = dapple.Plan.manual(["dense_2"], [[0], [1]], 8, 64, schedule="dapple_b")
    x, y = np.zeros((64, 8)), np.zeros((64, 1))

    def kept(memory: int) -> tuple[dapple.PipelinedModel, Any]:
        cluster = dapple.Cluster.local(2, memory_bytes=memory, kind="cpu")
        pipelined = dapple.transform(model, cluster, plan)
        pipelined.train_on_batch(x, y)
        ((_, build),) = [item for item in pipelined._engine.builder.builds.items() if item[0][0] is Mode.TRAIN]
        ((_, step),) = build.steps.values()
        return pipelined, (build, step)

    pipelined, (build, step) = kept(2**40)
    assert [str(task) for task in step.schedule.orders[0][:4]] == ["0F0", "0F1", "0F2", "0B0"]
    stage = build.program.stages[0]
    residual = stage.residual_bytes * 8 + stage.fixed_residual_bytes
    fixed = pipelined._engine.builder.stored_bytes(build.program, pipelined._engine.cluster.device_names[0])
    _, (_, step) = kept(fixed + 2 * residual)
    assert [str(task) for task in step.schedule.orders[0][:3]] == ["0F0", "0F1", "0B0"]
    with pytest.raises(dapple.DappleError, match=r"stage 0 needs .* use more stages"):
        kept(fixed + residual // 2)


def test_a_description_of_a_cluster_cannot_train(tmp_path: Any) -> None:
    cluster = dataclasses.replace(dapple.Cluster.local(2, kind="cpu"), real=False)
    with pytest.raises(dapple.DappleError, match="description without real devices"):
        dapple.transform(chain(2), cluster, dapple.Plan.manual(["dense_0"], [[0], [1]], 1, 4))
