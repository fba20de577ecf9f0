"""Training by the newer V schedules, by a policy of one's own and by a CSV file gives what plain Keras gives."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from equivalence import assert_same_training, pair, use_float64
from test_policy import RUN_AHEAD

import dapple_tf as dapple
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedule_csv import csv_policy, to_csv
from dapple_tf.schedules.schedules import make_schedule
from tests.schedule_runs import straight, vee

SAMPLES = 9


def dense() -> keras.Model:
    """Four dense layers."""
    hidden = [keras.layers.Dense(5, activation="tanh", name=f"hidden_{number}") for number in range(3)]
    model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(3, name="logits")], name="dense")
    model.compile(keras.optimizers.SGD(0.1, 0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def check(schedule: str | Policy, devices: list[list[int]], micro_batches: int) -> None:
    """Three steps, the second of which has a smaller batch with fewer micro-batches."""
    use_float64()
    own, plain = pair(dense)
    cuts = [f"hidden_{stage}" for stage in range(len(devices) - 1)]
    plan = dapple.Plan.manual(cuts, devices, micro_batches, SAMPLES, schedule)
    pipelined = dapple.transform(own, dapple.Cluster.local(1 + max(map(max, devices)), kind="cpu"), plan)
    draw = np.random.default_rng(0)
    sizes = (SAMPLES, SAMPLES // 2, SAMPLES)
    assert_same_training(pipelined, plain, [(draw.normal(size=(n, 4)), draw.integers(0, 3, n), None) for n in sizes])


@pytest.mark.parametrize("policy", ["v_min", "v_half", "dualpipe_v"])
def test_v_schedules_train_as_plain_keras(policy: str) -> None:
    check(policy, vee(2), 4)


def test_an_own_policy_trains_as_plain_keras() -> None:
    check(RUN_AHEAD, [[0, 1], [2]], 4)


def test_a_csv_file_trains_as_plain_keras(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(to_csv(make_schedule("zb_h1", straight(2), 4)))
    check(csv_policy(tmp_path / "mine.csv"), [[0, 1], [2]], 4)
