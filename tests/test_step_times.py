"""How long steps take, by a callback."""

from __future__ import annotations

import pytest

from dapple_tf.tools import step_times
from dapple_tf.tools.step_times import StepSummary, StepTimes


def test_the_time_between_two_ends_counts_but_not_between_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 2.5, 10.0, 10.25])
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: next(clock))
    times = StepTimes()
    times.on_epoch_begin(0)
    for batch in range(3):
        times.on_train_batch_end(batch)
    times.on_epoch_begin(1)
    for batch in range(2):
        times.on_train_batch_end(batch)
    assert times.seconds == [0.5, 1.0, 0.25]


def test_summary() -> None:
    summary = StepSummary.of([0.4, 0.1, 0.2, 0.3, 0.5])
    assert summary == StepSummary(5, pytest.approx(0.3), pytest.approx(0.2), pytest.approx(0.4), 0.1)
    assert summary.record(6) == {
        "steps": 5,
        "step_ms": pytest.approx(300),
        "lower_quartile_ms": pytest.approx(200),
        "upper_quartile_ms": pytest.approx(400),
        "fastest_ms": pytest.approx(100),
        "samples_per_second": pytest.approx(20),
    }
