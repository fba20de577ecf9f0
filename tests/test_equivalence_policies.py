"""Newer V schedules, a policy of one's own, a CSV file: training gives what plain Keras gives; emulation, memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import assert_same_training, pair, use_float64
from schedule_runs import straight, vee
from test_policy import RUN_AHEAD

import dapple_tf as dapple
from dapple_tf.execution.memory_limits import residuals_held
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedule_csv import csv_policy, to_csv
from dapple_tf.schedules.schedules import make_schedule
from dapple_tf.tools.evaluation.check_simulator import pipeline
from graph_passes.ir.program import Layout

SAMPLES = 9


def dense() -> keras.Model:
    """Four dense layers."""
    hidden = [keras.layers.Dense(5, activation="tanh", name=f"hidden_{number}") for number in range(3)]
    model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(3, name="logits")], name="dense")
    model.compile(keras.optimizers.SGD(0.1, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def check(schedule: str | Policy, devices: list[list[int]], micro_batches: int) -> None:
    """Two steps, the second of which has a smaller batch with fewer micro-batches."""
    use_float64()
    own, plain = pair(dense)
    cuts = [f"hidden_{stage}" for stage in range(len(devices) - 1)]
    plan = dapple.Plan.manual(cuts, devices, micro_batches, SAMPLES, schedule)
    pipelined = dapple.transform(own, dapple.Cluster.local(1 + max(map(max, devices)), kind="cpu"), plan)
    draw = np.random.default_rng(0)
    sizes = (SAMPLES, SAMPLES // 2)
    assert_same_training(pipelined, plain, [(draw.normal(size=(n, 4)), draw.integers(0, 3, n), None) for n in sizes])


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["v_min", "v_half", "dualpipe_v"])
def test_v_schedules_train_as_plain_keras(policy: str) -> None:
    check(policy, vee(2), 4)


def test_an_own_policy_trains_as_plain_keras() -> None:
    check(RUN_AHEAD, [[0, 1], [2]], 4)


def test_a_csv_file_trains_as_plain_keras(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(to_csv(make_schedule("zb_h1", straight(2), 4)))
    check(csv_policy(tmp_path / "mine.csv"), [[0, 1], [2]], 4)


def test_an_own_policy_is_emulated() -> None:
    plan, profile, cluster = pipeline(2, 3, RUN_AHEAD, [1], 0.0)
    step = dapple.emulate(plan, profile, cluster, steps=1)
    assert step.order.orders == plan.order_tasks().orders
    assert str(step.order).splitlines()[0] == "0: 0F0 0F1 0F2 0B0 0B1 0B2"


def test_the_runtime_counts_each_devices_own_slices() -> None:
    """12 samples of 10 bytes: 9 on a device of 200 bytes, 3 on one of 100."""
    sizes = {"residual_bytes": 10, "fixed_residual_bytes": 0, "delayed_bytes": 0, "fixed_delayed_bytes": 0}
    sizes |= {"offloaded_bytes": 0, "offloaded_late_bytes": 0}
    program: Any = SimpleNamespace(stages=[SimpleNamespace(index=0, **sizes)])
    devices = [dapple.Device(f"/device:CPU:{index}", 0, memory) for index, memory in enumerate((200, 100))]
    cluster = dapple.Cluster(tuple(devices), real=False)
    for shares, held in (([[3, 1]], 2), ([[1, 1]], 1)):
        plan = dapple.Plan.data_parallel(2, 48, 4, shares=shares)
        layout = Layout([["a", "b"]], 48, 48, 4, shares=plan.shares)
        assert residuals_held(plan, cluster, program, layout, lambda device: 0) == (held,)


@pytest.mark.parametrize(("policy", "held"), [("v_min", 5), ("zb_v", 2)])
def test_the_runtime_counts_slices_of_any_of_a_devices_stages(policy: str, held: int) -> None:
    """Five slices fit beside the variables, each of at most 200 bytes: two micro-batches of both stages."""
    sizes = {"fixed_residual_bytes": 0, "delayed_bytes": 50, "fixed_delayed_bytes": 0}
    sizes |= {"offloaded_bytes": 0, "offloaded_late_bytes": 0}
    program: Any = SimpleNamespace(
        stages=[SimpleNamespace(index=stage, residual_bytes=size, **sizes) for stage, size in enumerate([200, 150] * 2)]
    )
    plan = dapple.Plan.manual([f"hidden_{stage}" for stage in range(3)], vee(2), 8, 8, policy)
    cluster = dapple.Cluster.local(2, memory_bytes=2000, kind="cpu")
    layout = Layout([["a"], ["b"], ["b"], ["a"]], 8, 8, 8)
    assert residuals_held(plan, cluster, program, layout, lambda device: 1000) == (held,) * 4
    assert residuals_held(plan, cluster, program, layout, lambda device: 1650) == (2 if policy == "v_min" else 1,) * 4
    with pytest.raises(dapple.DappleError, match=r"stages \[0, 3\] together need 2,050 bytes"):
        residuals_held(plan, cluster, program, layout, lambda device: 1700)
