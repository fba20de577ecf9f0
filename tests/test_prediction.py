"""What was expected of a step beside what was measured."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from profiles_for_tests import profile_of

import dapple_tf as dapple
from dapple_tf.describe.devices import Server
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tracing.prediction import Prediction


def test_first_steps_do_not_count_and_the_median_does() -> None:
    prediction = Prediction(0.1)
    assert prediction.measured is None and prediction.error is None
    assert str(prediction) == "step predicted 100 ms, not measured yet"
    for seconds in (9.0, 9.0, 9.0, 0.2, 0.125, 0.1):
        prediction.add(seconds)
    assert prediction.measured == 0.125
    assert prediction.error == pytest.approx(-0.2)
    assert str(prediction) == "step predicted 100 ms, measured 125 ms (-20.0%, median of 3 steps)"


@pytest.mark.parametrize(("measured", "level"), [(0.11, logging.INFO), (0.2, logging.WARNING)])
def test_the_comparison_is_logged_once(measured: float, level: int, caplog: pytest.LogCaptureFixture) -> None:
    prediction = Prediction(0.1)
    with caplog.at_level(logging.INFO):
        for _ in range(60):
            prediction.add(measured)
    (record,) = caplog.records
    assert record.levelno == level
    assert "step predicted 100 ms, measured" in record.getMessage()
    assert ("make a new plan" in record.getMessage()) == (level == logging.WARNING)


def test_the_profile_is_not_blamed_where_devices_share_cores(caplog: pytest.LogCaptureFixture) -> None:
    cluster = dataclasses.replace(dapple.Cluster.local(2, kind="cpu"), servers=(Server(capacity=1.5),))
    simulation = simulate(dapple.Plan.data_parallel(2, 4), profile_of((1, 2), (3, 6), (0.5, 1)), cluster)
    prediction = Prediction(simulation.latency, simulation=simulation)
    with caplog.at_level(logging.INFO):
        for _ in range(60):
            prediction.add(2 * simulation.latency)
    (record,) = caplog.records
    assert record.levelno == logging.INFO and "make a new plan" not in record.getMessage()
