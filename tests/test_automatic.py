"""``transform`` without a plan: profile, links and shared cores are measured, a plan is found, training goes on."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from profiled import mlp
from profiles_for_tests import profile_of

import dapple_tf as dapple
from dapple_tf.execution.step_builder import with_compiler
from dapple_tf.measuring import measured_steps

PROFILE = profile_of((1, 2), (3, 6), (0.5, 1))
LINKED = dataclasses.replace(dapple.Cluster.local(2, kind="cpu"), intra_bandwidth=1e12, intra_latency=0.0)
"""Two devices whose links need no measurement."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAPPLE_CACHE", str(tmp_path))


def data(samples: int = 16) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(samples, 4)).astype("float32"), draw.integers(0, 3, samples)


def test_a_model_is_planned_and_trained_and_keeps_its_values_until_then() -> None:
    model = mlp()
    before = [np.array(value) for value in model.get_weights()]
    pipelined = dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), global_batch_size=8)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert pipelined.plan.report is not None
    assert pipelined.profile is not None
    assert pipelined.cluster.intra_bandwidth is not None
    assert 1 <= pipelined.cluster.capacity(0) <= 2
    x, y = data(48)
    assert pipelined.prediction is not None
    assert pipelined.prediction.predicted == pytest.approx(pipelined.plan.report.latency)
    pipelined.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert pipelined.prediction.measured is not None
    assert len(pipelined.prediction.steps) == 3  # of six, the first three don't count


def test_plans_are_tried_and_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    before = [np.array(value) for value in model.get_weights()]
    tried: list[dapple.Plan] = []
    really = measured_steps.measure_steps

    def measured(
        model: keras.Model, cluster: dapple.Cluster, plans: Sequence[dapple.Plan], *rest: Any, **options: Any
    ) -> tuple[float, ...]:
        tried.extend(plans)
        seconds = really(model, cluster, plans, *rest, **options, rounds=1)
        assert min(seconds) > 0
        return tuple(0.5 if plan.num_stages == 1 and plan.replicas == (2,) else 1.0 for plan in plans)

    monkeypatch.setattr(measured_steps, "measure_steps", measured)
    pipelined = dapple.transform(model, LINKED, global_batch_size=8, profile=PROFILE, by_trial=True, schedule="gpipe")
    assert len(tried) >= 2 and all(plan.schedule == "gpipe" or plan.num_stages == 1 for plan in tried)
    assert pipelined.plan.replicas == (2,)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    x, y = data(16)
    pipelined.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert pipelined.prediction is not None


def test_a_length_that_is_chosen_for_measuring_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trials chose it anew, and warned of it again."""
    inputs = keras.Input((None,), dtype="int32")
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(9, 4)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2)(pooled))
    model.compile("sgd", "mse")
    monkeypatch.setattr(measured_steps, "measure_steps", lambda model, cluster, plans, *_, **__: [1.0] * len(plans))
    pipelined = dapple.transform(model, LINKED, global_batch_size=8, by_trial=True, profile_seconds=1e-6)
    assert caplog.text.count("leaves lengths open; its profile takes them for") == 1
    assert pipelined.profile is not None and pipelined.profile.estimated
    pipelined.close()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, dapple.PlanError, "neither a plan nor a global_batch_size"),
        ({"plan": dapple.Plan.data_parallel(1, 8), "global_batch_size": 4}, dapple.PlanError, "4 and a plan for 8"),
        (
            {"plan": dapple.Plan.data_parallel(1, 8), "by_trial": True},
            TypeError,
            "got a plan, so that there are no plans",
        ),
        ({"global_batch_size": 8, "placement": "fd_dps", "by_trial": True}, TypeError, "places all operators by"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        dapple.transform(mlp(), dapple.Cluster.local(1, kind="cpu"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"micro_batches": 99}, dapple.PlanError, "8 samples can't be cut into 99 micro-batches"),
        ({"recompte": "none"}, TypeError, "recompte"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    arguments: dict[str, object], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dapple_tf.automatic.measure_links", None)
    monkeypatch.setattr("dapple_tf.automatic.profile", None)
    with pytest.raises(error, match=text):
        dapple.transform(mlp(), dapple.Cluster.local(2, kind="cpu"), **({"global_batch_size": 8} | arguments))


def test_clusters_of_several_types_of_devices_are_refused() -> None:
    names = ("/job:worker/replica:0/task:0/device:GPU:0", "/job:worker/replica:0/task:1/device:CPU:0")
    cluster = dapple.Cluster(tuple(dapple.Device(name, server) for server, name in enumerate(names)), real=False)
    with pytest.raises(dapple.PlanError, match="devices of several types, CPU and GPU, but a profile describes one"):
        dapple.plan(PROFILE, cluster, 8)


@pytest.mark.parametrize("kind, supported, asked, compiled", [
    ("GPU", True, None, True), ("GPU", False, None, False), ("GPU", True, False, False), ("CPU", True, None, None)
])  # fmt: skip
def test_stages_on_gpus_are_compiled_as_by_keras(
    kind: str, supported: bool, asked: bool | None, compiled: bool | None
) -> None:
    cluster = dapple.Cluster((dapple.Device(f"/job:worker/replica:0/task:0/device:{kind}:0", 0),))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.layers[-1].supports_jit = supported
    plan = with_compiler(dapple.Plan.data_parallel(1, 8, jit_compile=asked), model, cluster)
    assert plan.jit_compile == compiled
