"""What measuring may take, and what its phases are likely to take: by a clock that is set by hand."""

from __future__ import annotations

import pytest

from dapple_tf.measuring.time_budget import PHASES, TimeBudget


def test_phases_that_are_over_tell_what_others_take() -> None:
    now = [100.0]
    budget = TimeBudget(20.0, clock=lambda: now[0])
    budget.begin("capture")
    now[0] += 2.0
    budget.begin("cut")
    assert budget.expected("operators") == pytest.approx(2.0 * PHASES["operators"])
    now[0] += 2.0
    budget.end()
    seconds = 4.0 / (1.0 + PHASES["cut"])
    assert budget.expected("operators", "layers") == pytest.approx(seconds * (PHASES["operators"] + PHASES["layers"]))
    assert (budget.spent, budget.left) == (4.0, 16.0)
    assert budget.allows("operators") and not budget.allows("operators", more=16.0)
    assert not budget.allows("layers")
    now[0] += 16.0
    assert not budget.allows("operators")


def test_without_end_there_is_time_for_all() -> None:
    budget = TimeBudget(None)
    budget.begin("capture")
    budget.end()
    assert budget.allows(*PHASES) and budget.left == float("inf")
