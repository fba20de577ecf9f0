"""What the executor does: the order of tasks, the memory of devices and of the process, the functions of graphs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import pipeline
from models_for_tests import classifier, samples, transform
from models_for_tests import plan as plan_of
from schedule_runs import vee
from workers import environment

import dapple_tf as dapple
from dapple_tf.execution import device_session
from dapple_tf.execution.device_session import DeviceSession
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.capture import Mode
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.variables import stored_values
from graph_passes.ir.program import Growth, Layout, Stage

layers = keras.layers


def chain(depth: int, width: int = 8, features: int = 8) -> keras.Model:
    inputs = keras.Input((features,))
    x = inputs
    for index in range(depth):
        x = layers.Dense(width, activation="gelu", name=f"dense_{index}")(x)
    model = keras.Model(inputs, layers.Dense(1, name="last")(x))
    model.compile("sgd", "mse")
    return model


def built(pipelined: dapple.PipelinedModel) -> tuple[Any, str, Any]:
    """What its training step is built of: (the build, prefix of names, the step)."""
    (build,) = [b for (mode, *_), b in pipelined._engine.builder.builds.items() if mode is Mode.TRAIN]
    (made,) = build.steps.values()
    return build, made.name, made.step


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


def test_schedules_and_recomputation_bound_the_memory_that_steps_need() -> None:
    """DAPPLE (PPoPP'21), figure 3(c): K micro-batches in flight, however many there are; GPipe keeps all."""
    x, y = np.zeros((512, 64), "float32"), np.zeros((512, 1), "float32")
    needed = {}
    for schedule, recompute in (("dapple_a", "none"), ("gpipe", "none"), ("gpipe", "boundary")):
        model = chain(8, width=256, features=64)
        pipelined = pipeline(model, ["dense_3"], (1, 1), 8, 512, schedule=schedule, recompute=recompute)
        pipelined.train_on_batch(x, y)
        needed[schedule, recompute] = min(sum(peaks(pipelined.trace_step(x, y)).values()) for _ in range(3))
        pipelined.close()
    every = needed["gpipe", "none"]
    assert needed["dapple_a", "none"] < 0.6 * every and needed["gpipe", "boundary"] < 0.6 * every, needed


def test_no_stage_function_is_made_twice() -> None:
    """Another epoch reuses the functions; a smaller last batch has its own, as its slices are of another size."""
    pipelined = pipeline(chain(4), ["dense_1"], (2, 1), 3, 12)
    x, y = np.zeros((30, 8)), np.zeros((30, 1))
    pipelined.fit(x, y, epochs=2, verbose=0)
    (built,) = [b for (mode, *_), b in pipelined._engine.builder.builds.items() if mode is Mode.TRAIN]
    libraries = [step.graph.library.function for step in built.steps.values()]
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
    model = chain(3)
    plan = dapple.Plan.manual([f"dense_{index}" for index in range(3)], [[d] for d in range(4)], 2, 8)
    pipelined = dapple.transform(model, dapple.Cluster.local(4, kind="cpu"), plan)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(8, 8)), generator.normal(size=(8, 1))
    loss = model.evaluate(x, y, verbose=0)
    assert pipelined.train_on_batch(x, y) == pytest.approx(loss, rel=1e-5)
    library = pipelined._engine.session.graph.as_graph_def().library.function
    names = [function.signature.name for function in library]
    # The first stage casts its input, and gives it no gradient; the last one has the loss.
    assert sum(name.endswith("_forward") for name in names) == 3
    assert sum(name.endswith("_backward") for name in names) == 3
    own = [f.signature.name for step in built(pipelined)[0].steps.values() for f in step.graph.library.function]
    assert sum(name.endswith("_forward") for name in own) == 4  # as dumps show it


def test_device_memory_limits_micro_batches_in_flight() -> None:
    """D of P_A and P_B: fewer micro-batches are warmed up if memory holds fewer; none, or fewer than K, is an error."""
    model = chain(4, width=64)
    plan = dapple.Plan.manual(["dense_2"], [[0], [1]], 8, 64, schedule="dapple_b")
    x, y = np.zeros((64, 8)), np.zeros((64, 1))

    def kept(memory: int, plan: dapple.Plan = plan) -> tuple[dapple.PipelinedModel, Any]:
        cluster = dapple.Cluster.local(2, memory_bytes=memory, kind="cpu")
        pipelined = dapple.transform(model, cluster, plan)
        pipelined.train_on_batch(x, y)
        return pipelined, built(pipelined)

    pipelined, (build, _, step) = kept(2**40)
    assert [str(task) for task in step.schedule.orders[0][:4]] == ["0F0", "0F1", "0F2", "0B0"]
    stage = build.program.stages[0]
    residual = stage.residual_bytes.at(8)
    fixed = pipelined._engine.builder.stored_bytes(build.program, pipelined._engine.cluster.device_names[0])
    _, (*_, step) = kept(fixed + 2 * residual)
    assert [str(task) for task in step.schedule.orders[0][:3]] == ["0F0", "0F1", "0B0"]
    for schedule in ("dapple_b", "modulo"):
        asked = dataclasses.replace(plan, schedule=schedule, warm_up=(3, 1))
        with pytest.raises(ScheduleError, match=r"warm_up of stage 0 is 3, but its devices hold [12] micro"):
            kept(fixed + 2 * residual, asked)
    with pytest.raises(dapple.DappleError, match=r"stage 0 needs .* use more stages"):
        kept(fixed + residual // 2)


# ---- micro-batches that fit


def program_of(*sizes: dict[str, Growth]) -> Any:
    """Stages that keep so many bytes."""
    return SimpleNamespace(stages=[Stage(index, (), **own) for index, own in enumerate(sizes)])


def test_the_runtime_counts_each_devices_own_slices() -> None:
    """12 samples of 10 bytes: 9 on a device of 200 bytes, 3 on one of 100."""
    program = program_of({"residual_bytes": Growth(10)})
    devices = [dapple.Device(f"/device:CPU:{index}", 0, memory) for index, memory in enumerate((200, 100))]
    cluster = dapple.Cluster(tuple(devices), real=False)
    for shares, held in (([[3, 1]], 2), ([[1, 1]], 1)):
        plan = dapple.Plan.data_parallel(2, 48, 4, shares=shares)
        layout = Layout([["a", "b"]], 48, 48, 4, shares=plan.options["shares"])
        assert StepPasses(plan, cluster).holds(program, layout, lambda device: 0) == (held,)


def test_the_runtime_counts_slices_of_any_of_a_devices_stages() -> None:
    """Five slices fit beside the variables, each of at most 200 bytes: two micro-batches of both stages."""
    program = program_of(*({"residual_bytes": Growth(size), "delayed_bytes": Growth(50)} for size in [200, 150] * 2))
    plan = dapple.Plan.manual([f"hidden_{stage}" for stage in range(3)], vee(2), 8, 8, "v_min")
    cluster = dapple.Cluster.local(2, memory_bytes=2000, kind="cpu")
    layout = Layout([["a"], ["b"], ["b"], ["a"]], 8, 8, 8)
    assert StepPasses(plan, cluster).holds(program, layout, lambda device: 1000) == (5,) * 4
    assert StepPasses(plan, cluster).holds(program, layout, lambda device: 1650) == (2,) * 4
    with pytest.raises(dapple.DappleError, match=r"stages \[0, 3\] together need 2,050 bytes"):
        StepPasses(plan, cluster).holds(program, layout, lambda device: 1700)


# ---- memory goes back to the kernel

FREED = """
import os
from dapple_tf.common.garbage import return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pieces = [bytes(2000) for _ in range(32_000)]  # 64 MB, too small for a mapping each, too large for Python's own pools
del pieces[:-1]  # the last one keeps the C library from giving back what is below it
before = resident()
return_freed_memory()
print(before - resident())
"""


def test_what_has_been_freed_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], env=environment(), capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32_000_000


def test_the_first_run_of_a_step_gives_back_what_building_it_has_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(device_session, "return_freed_memory", lambda: calls.append("returned"))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    pipelined = dapple.transform(model, dapple.Cluster.local(1), dapple.Plan.data_parallel(1, 2))
    for _ in range(2):
        pipelined.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))
    assert calls == ["returned"]


# ---- the model's values


def test_as_many_values_are_loaded_at_once_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run for each of 32 stages took half a second: TensorFlow prepares each from the whole graph."""
    loads: list[dict[str, Any]] = []
    run = DeviceSession.run

    def noted(self: DeviceSession, fetches: Any, feed: Any = None, *others: Any) -> Any:
        loads.append({name: np.array(value) for name, value in (feed or {}).items()})
        return run(self, fetches, feed, *others)

    monkeypatch.setattr(DeviceSession, "run", noted)
    monkeypatch.setattr(stored_values, "_BUCKET_BYTES", 220)
    x, _, _ = samples(7)
    model = classifier(optimizer="sgd")
    expected = model.predict_on_batch(x)
    pipelined = transform(model, plan_of(cuts=["first", "second"], devices=[[0], [1], [2]]))
    np.testing.assert_allclose(pipelined.predict_on_batch(x), expected, rtol=1e-5, atol=1e-6)
    assert [len(feed) for feed in loads] == [1, 2]
    assert sum(value.nbytes for feed in loads for value in feed.values()) >= 4 * model.count_params()
