"""Random plans that mix all levels train as plain Keras does: some of those of `zoo --plans`."""

from __future__ import annotations

import collections

import pytest
from equivalence import use_float64

from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.tools.evaluation.random_plans import FEATURES, OPTIMIZERS, compare_plan, draw_plan

PLANS = range(10)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("seed", PLANS)
def test_random_mixed_plans_train_as_plain_keras(seed: int) -> None:
    use_float64()
    about, comparison = compare_plan(seed)
    assert comparison.verdict == "equal", f"{about}: {comparison}"


def test_plans_mix_everything() -> None:
    """Each feature often, and each with most others, but for those that plans refuse together."""
    drawn = [draw_plan(seed) for seed in range(100)]
    used = [{name for name, has in FEATURES.items() if has(each.plan)} for each in drawn]
    counts = collections.Counter(name for own in used for name in own)
    rare = {name for name in FEATURES if counts[name] < 10}
    assert rare <= {"weight_devices"} and counts["weight_devices"] > 2
    for name in FEATURES:
        together = set().union(*(own for own in used if name in own))
        assert len(together) >= len(FEATURES) / 2, name
    assert {str(each.plan.schedule) for each in drawn} == {policy.name for policy in BUILT_IN}
    assert len({each.optimizer for each in drawn}) >= len(OPTIMIZERS) - 1, "some are refused by most plans"


def test_a_seed_gives_the_same_plan_again() -> None:
    assert str(draw_plan(5)) == str(draw_plan(5))
