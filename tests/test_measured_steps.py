"""Steps of several plans, measured in turns, and the k that they are compared for."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from profiled import mlp

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.execution.device_session import DeviceSession
from dapple_tf.execution.engine import Engine
from dapple_tf.measuring import measured_steps
from dapple_tf.measuring.example_batch import ExampleBatch

CLUSTER = dapple.Cluster.local(2, kind="cpu")
PLAN = dapple.Plan.manual(["first", "second"], [[0, 1]] * 3, 1, 8)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[DeviceSession]:
    """Those that are open."""
    left: list[DeviceSession] = []
    opened, closed = DeviceSession.__init__, DeviceSession.close

    def opening(session: DeviceSession, *rest: Any) -> None:
        left.append(session)
        opened(session, *rest)

    def closing(session: DeviceSession) -> None:
        left.remove(session)
        closed(session)

    monkeypatch.setattr(DeviceSession, "__init__", opening)
    monkeypatch.setattr(DeviceSession, "close", closing)
    return left


def values(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def test_plans_take_turns_and_the_model_keeps_its_values() -> None:
    model = mlp()
    before = values(model)
    plans = [PLAN, dapple.Plan.data_parallel(2, 8)]
    seconds = measured_steps.measure_steps(model, CLUSTER, plans, ExampleBatch.of(model), rounds=2)
    assert len(seconds) == 2 and min(seconds) > 0
    for own, other in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(own, other)


def test_the_plan_that_really_is_the_fastest_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first counts as the fastest unless another gains 3 %; one without room beside it is left out."""
    plans = [dapple.Plan.data_parallel(2, 8, micro_batches=count) for count in (1, 2, 3, 4)]
    seconds = dict(zip(plans, (1.0, 0.98, None, 0.9), strict=True))
    asked = []

    def measured(
        model: Any, cluster: Any, pair: Any, example: Any, *, ran: set[dapple.Plan], **_: Any
    ) -> tuple[float, ...]:
        asked.append([plan.micro_batches for plan in pair])
        ran.add(pair[0])
        if seconds[pair[1]] is None:
            raise dapple.PlanError("device 0 has no room")
        return tuple(seconds[plan] for plan in pair)

    monkeypatch.setattr(measured_steps, "measure_steps", measured)
    model = mlp()
    with caplog.at_level(logging.INFO, measured_steps.__name__):
        assert measured_steps.fastest_plan(model, CLUSTER, plans, ExampleBatch.of(model)) is plans[3]
    assert asked == [[1, 2], [1, 3], [1, 4]]
    assert "can't be tried: device 0 has no room" in caplog.text and caplog.text.count("is taken") == 2
    assert measured_steps.fastest_plan(model, CLUSTER, plans[:3], ExampleBatch.of(model)) is plans[0]


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (dapple.PlanError("too little memory"), 0),
        (tf.errors.ResourceExhaustedError(None, None, "too little memory"), 1),
    ],
)
def test_a_plan_that_cannot_run_loses_and_the_devices_are_free_again(
    error: Exception, place: int, sessions: list[DeviceSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without memory ended `transform`; the first plan won where it couldn't run; the other's session stayed."""
    plans = [dapple.Plan.data_parallel(2, 8), dapple.Plan.data_parallel(1, 8)]
    run = Engine.run

    def failing(engine: Engine, *rest: Any, **options: Any) -> Any:
        if engine.plan == plans[place]:
            raise error
        return run(engine, *rest, **options)

    monkeypatch.setattr(Engine, "run", failing)
    model = mlp()
    before = values(model)
    assert measured_steps.fastest_plan(model, CLUSTER, plans, ExampleBatch.of(model)) is plans[1 - place]
    assert not sessions
    for own, other in zip(values(model), before, strict=True):
        np.testing.assert_array_equal(own, other)


def test_an_error_in_a_step_that_every_plan_would_have_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise tf.errors.InvalidArgumentError(None, None, "indices[0] = 9 is not in [0, 3)")

    monkeypatch.setattr(Engine, "run", failing)
    model, plans = mlp(), [dapple.Plan.data_parallel(2, 8), dapple.Plan.data_parallel(1, 8)]
    with pytest.raises(dapple.StepError, match=r"a train step failed: indices\[0\] = 9"):
        measured_steps.fastest_plan(model, CLUSTER, plans, ExampleBatch.of(model))


def test_k_is_the_one_that_is_fastest_beside_k_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is twice as slow at every other measurement; what counts is the ratio within one."""
    asked = []

    def measured(model: Any, cluster: Any, plans: Any, example: Any, **_: Any) -> tuple[float, ...]:
        asked.append([plan.reverse_first_k for plan in plans])
        slow = 1 + len(asked) % 2
        return tuple(slow * {0: 1.0, 1: 0.9, 2: 0.8}[plan.reverse_first_k] for plan in plans)

    monkeypatch.setattr(measured_steps, "measure_steps", measured)
    tuned = dapple.tune_reverse_first_k(mlp(), CLUSTER, PLAN)
    assert tuned.reverse_first_k == 2
    assert asked == [[0, 1], [0, 2]]


@pytest.mark.parametrize(
    ("megabytes", "tried"),
    [
        (500, [1, 2]),
        (40, [1]),
    ],
)
def test_only_ks_that_fit_in_memory_are_tried(
    monkeypatch: pytest.MonkeyPatch, megabytes: int, tried: list[int]
) -> None:
    """Algorithm 2, lines 1 and 2."""
    layers = [
        LayerProfile(
            name, Cost(1.0), Cost(2.0), None, Cost(0.0, 1e6), delayed_bytes=Cost(0.0, 9e6), parameter_bytes=10**6
        )
        for name in ("first", "second", "third")
    ]
    profile = Profile("model", "none", (1,), tuple(layers), (Tensor(0, (1,), Cost(1.0)), Tensor(1, (2,), Cost(1.0))))
    asked = []

    def measured(model: Any, cluster: Any, plans: Any, example: Any, **_: Any) -> tuple[float, ...]:
        asked.append(plans[1].reverse_first_k)
        return (1.0, 0.5)

    monkeypatch.setattr(measured_steps, "measure_steps", measured)
    local = dapple.Cluster.local(2, memory_bytes=megabytes * 10**6, kind="cpu")
    dapple.tune_reverse_first_k(mlp(), local, PLAN, profile=profile)
    assert asked == tried
