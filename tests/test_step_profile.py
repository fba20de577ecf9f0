"""`profile_step`: it changes nothing, and says where a step's time goes, beside what was expected."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
from models_for_tests import classifier, layers, plan, samples, transform, values
from profiles_for_tests import MS, measured_as, profile_of

import dapple_tf as dapple
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tracing.step_profile import StepProfile, slowdown
from dapple_tf.view.timeline import LAUNCHES
from graph_passes.ir.tasks import Phase

CLUSTER = dapple.Cluster.local(3, kind="cpu")
PROFILE = profile_of((1, 2), (3, 6), (0.5, 1))


def dropping() -> keras.Model:
    """With random seeds and moving averages, which steps change."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, activation="tanh", name="first"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.4, name="drop"),
            layers.Dense(3, name="logits"),
        ],
        name="dropping",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def state(pipelined: dapple.PipelinedModel) -> list[np.ndarray]:
    return [*values(pipelined.sync()), *(variable.numpy() for variable in pipelined.model.metrics_variables)]


def test_nothing_has_changed_afterwards() -> None:
    pipelined = transform(dropping())
    x, y, weights = samples(7)
    for _ in range(2):
        pipelined.train_on_batch(x, y)
    before = state(pipelined)
    profile = pipelined.profile_step(x, y, weights)
    assert len(profile.step.tasks) == 12
    for own, other in zip(before, state(pipelined), strict=True):
        np.testing.assert_array_equal(own, other)
    assert pipelined._runtime.elastic.steps == 2


def test_a_model_that_is_on_devices_only_must_be_trained_or_synced() -> None:
    with dapple.deferred_init():
        model = classifier()
    pipelined = transform(model)
    x, y, _ = samples(7)
    with pytest.raises(dapple.DappleError, match="call sync\\(\\) first if they fit, or give train=True"):
        pipelined.profile_step(x, y)
    assert pipelined.profile_step(x, y, train=True).measured.samples == 7
    assert pipelined._runtime.elastic.steps == 6, (
        "two to warm up, one before, one to prepare tracing, one traced, one after"
    )
    with pytest.raises(ValueError, match="warm_up is -1"):
        pipelined.profile_step(x, y, warm_up=-1)


def test_planned_and_simulated_stand_beside_it_where_they_are_known() -> None:
    x, y, _ = samples(7)
    pipelined = transform(classifier(), profile=PROFILE)
    profile = pipelined.profile_step(x, y)
    assert [step.name for step in profile.timelines] == ["planned", "simulated", "measured"]
    assert [step.devices for step in profile.timelines] == [profile.measured.devices] * 3
    assert profile.simulation is pipelined.prediction.simulation
    assert {(phase.stage, phase.phase) for phase in profile.phases} == {
        (stage, phase) for stage in (0, 1) for phase in (Phase.FORWARD, Phase.BACKWARD)
    }
    assert all(phase.predicted is not None and phase.error is not None for phase in profile.phases)
    short = pipelined.profile_step(x[:5], y[:5])
    assert [step.name for step in short.timelines] == ["measured"]
    assert short.measured.samples == 5
    assert pipelined.prediction.steps == []  # The step isn't one of training.


def hand_made(factors: dict[int, float], **changes: object) -> StepProfile:
    own = plan(devices=[[0, 1], [2]])
    simulation = simulate(own, PROFILE, CLUSTER)
    made = StepProfile(measured_as(simulation, factors, host=1 * MS), own, simulation)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_a_host_that_was_held_up_in_the_traced_step() -> None:
    """The machine was busy just then: devices' times were taken for 100 times too long, and bubbles were 99%."""
    step = hand_made({}).step
    parts = step.parts[0]
    working = parts.total - 2 * MS
    late = {device: dataclasses.replace(own, before=own.before + working) for device, own in step.parts.items()}
    untraced = working + 2 * MS
    factor = slowdown(dataclasses.replace(step, parts=late), untraced)
    assert factor == pytest.approx((2 * working + 1 * MS) / untraced)


def test_tracing_is_taken_out_of_tasks() -> None:
    step = hand_made({}).step
    parts = step.parts[0]
    working = parts.total - 2 * MS
    assert slowdown(step, working / 2 + 1 * MS) == pytest.approx(2.0)
    assert hand_made({}, untraced_seconds=2 * parts.total).tracing == 1.0  # The traced step was faster by chance.
    profile = hand_made({}, untraced_seconds=working / 2 + 1 * MS)
    assert profile.tracing == pytest.approx(2.0)
    assert profile.phases[0].error == pytest.approx(1.0)


def test_the_report(golden: Callable[[str, str], None]) -> None:
    texts = [
        str(hand_made({1: 1.25}, untraced_seconds=75 * MS)),
        str(dataclasses.replace(hand_made({}), simulation=None)),
    ]
    golden("step_profile.txt", "\n\n".join(texts) + "\n")


def test_launches_are_called_that_and_have_no_bubbles(tmp_path: pathlib.Path) -> None:
    step = hand_made({1: 1.25}).step
    launches = dataclasses.replace(step, timeline=dataclasses.replace(step.timeline, name=LAUNCHES, memory={}))
    profile = hand_made({}, step=launches, untraced_seconds=75 * MS)
    assert profile.bubbles == profile.phases == () and profile.tracing == 1.0
    profile.save(tmp_path)
    simulated, _, drawn = (tmp_path / "timeline.txt").read_text().partition("launches: ")
    lanes = drawn.partition("░")[0]
    assert "bubble" in simulated and lanes and "bubble" not in lanes and "%" not in lanes
    text = str(profile)
    assert "milliseconds of launching on each device:" in text and "stages:" not in text and "tasks" not in text
    data = (tmp_path / "timeline.html").read_text()
    assert data.count('"bubble":null') == 3 and "stages" not in profile._repr_html_()


def test_saved_files_show_all_timelines(tmp_path: pathlib.Path) -> None:
    profile = hand_made({1: 1.25})
    profile.save(tmp_path / "new" / "profile")
    path = tmp_path / "new" / "profile"
    files = {"profile.txt", "timeline.txt", "timeline.svg", "timeline.png", "timeline.html", "trace.json"}
    assert {file.name for file in path.iterdir()} == files
    assert (path / "profile.txt").read_text() == f"{profile}\n"
    for name in ("timeline.txt", "timeline.html"):
        text = (path / name).read_text()
        assert "simulated" in text and "measured" in text
    assert json.loads((path / "trace.json").read_text())["traceEvents"]
