"""What devices keep in a session: how the model's values come there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models_for_tests import assert_close, classifier, plan, samples, transform

from dapple_tf.execution.device_session import DeviceSession
from dapple_tf.variables import stored_values

X, Y, _ = samples(7)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The values that each run has fed, steps apart."""
    fed: list[dict[str, Any]] = []
    run = DeviceSession.run

    def noted(self: DeviceSession, fetches: Any, feed: Any = None, *others: Any) -> Any:
        fed.append({name: np.array(value) for name, value in (feed or {}).items()})
        return run(self, fetches, feed, *others)

    monkeypatch.setattr(DeviceSession, "run", noted)
    return fed


@pytest.mark.parametrize(
    ("limit", "numbers"),
    [(2**26, [3]), (220, [1, 2]), (100, [1, 1, 1])],
    ids=["all at once", "the last two of three stages", "a stage is more than the limit"],
)
def test_as_many_values_are_loaded_at_once_as_there_is_memory_for(
    loads: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, limit: int, numbers: list[int]
) -> None:
    """A run for each of 32 stages took half a second: TensorFlow prepares each from the whole graph."""
    monkeypatch.setattr(stored_values, "_BUCKET_BYTES", limit)
    model = classifier(optimizer="sgd")
    expected = model.predict_on_batch(X)
    pipelined = transform(model, plan(cuts=["first", "second"], devices=[[0], [1], [2]]))
    np.testing.assert_allclose(pipelined.predict_on_batch(X), expected, rtol=1e-5, atol=1e-6)
    assert [len(feed) for feed in loads] == numbers
    sizes = [sum(value.nbytes for value in feed.values()) for feed in loads]
    assert all(size <= limit for size, number in zip(sizes, numbers, strict=True) if number > 1)
    assert sum(sizes) >= 4 * model.count_params()
    assert_close(pipelined.test_on_batch(X, Y), model.test_on_batch(X, Y), 1e-5)
