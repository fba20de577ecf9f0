"""What was expected of a step beside what was measured."""

from __future__ import annotations

import logging

import pytest

from dapple_tf.tracing.prediction import Prediction


def test_first_steps_do_not_count_and_the_median_does() -> None:
    prediction = Prediction(0.1)
    assert prediction.measured is None
    assert prediction.error is None
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
