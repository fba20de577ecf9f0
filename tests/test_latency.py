"""Formulas 1 to 3 and algorithm 1, against sums written out by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from dapple_tf.planning.latency import StageTime, pipeline_latency, pivot_stage


def test_one_stage_is_the_sum_of_its_micro_batches_and_its_reduction() -> None:
    phases = pipeline_latency([StageTime(1.0, 2.0, 5.0)], 4)
    assert phases == (1.0, 9.0, 7.0, 0)
    assert phases.latency == 4 * 3 + 5


def test_equal_stages_make_the_trapezoid_of_figure_4() -> None:
    # With S equal stages and no transfers a step lasts M + S - 1 rounds of F + B.
    for stages, micro_batches in itertools.product((1, 2, 4, 7), (1, 2, 8)):
        phases = pipeline_latency([StageTime(1.0, 2.0)] * stages, micro_batches)
        assert phases.pivot == stages - 1
        assert phases.latency == (micro_batches + stages - 1) * 3


def test_a_slow_early_stage_becomes_the_pivot() -> None:
    # (M - 1) (F + B) of stage 0 is 21, that of stage 2 is 9, and between them lie 3.
    stages = [StageTime(3.0, 4.0), StageTime(1.0, 2.0), StageTime(1.0, 2.0)]
    assert pivot_stage(stages, 4) == 0
    phases = pipeline_latency(stages, 4)
    assert (phases.warm_up, phases.steady, phases.ending) == (3.0, 21.0, 4.0)


def test_the_work_between_two_stages_counts_for_the_later_one() -> None:
    # Stage 0's steady phase is 3 * 3.5 = 10.5; stage 2's is 9 with 3 between, so that the pivot stays.
    assert pivot_stage([StageTime(1.5, 2.0), StageTime(1.0, 2.0), StageTime(1.0, 2.0)], 4) == 2
    # With 20 rounds it's 66.5 against 57 and 3.
    assert pivot_stage([StageTime(1.5, 2.0), StageTime(1.0, 2.0), StageTime(1.0, 2.0)], 20) == 0


def test_a_network_stage_can_be_the_pivot() -> None:
    stages = [StageTime(1.0, 1.0), StageTime(5.0, 5.0), StageTime(1.0, 1.0)]
    phases = pipeline_latency(stages, 3)
    assert phases.pivot == 1
    # T_w = 1 + 5, T_s = 2 * 10, T_e = 5 + 1 until the first stage has its gradient.
    assert phases.latency == 6 + 20 + 6


def test_all_reduce_of_a_stage_behind_the_pivot_hides_behind_the_backwards_before_it() -> None:
    stages = [StageTime(4.0, 4.0), StageTime(1.0, 1.0, 4.5)]
    phases = pipeline_latency(stages, 8)
    assert phases.pivot == 0
    assert phases.ending == max(4.0, 4.5 - (4.0 + 1.0))  # formula 2: minus B from Q to s


def test_an_all_reduce_that_is_too_long_to_hide_counts() -> None:
    stages = [StageTime(4.0, 4.0), StageTime(1.0, 1.0, 20.0)]
    assert pipeline_latency(stages, 8).ending == 20.0 - 5.0


@pytest.mark.parametrize("seed", range(50))
def test_the_formula_is_never_below_the_pivots_own_work(seed: int) -> None:
    draw = random.Random(seed)
    stages = [StageTime(draw.random(), draw.random(), draw.random()) for _ in range(draw.randrange(1, 9))]
    micro_batches = draw.randrange(1, 20)
    phases = pipeline_latency(stages, micro_batches)
    pivot = stages[phases.pivot]
    assert phases.latency >= micro_batches * (pivot.forward + pivot.backward) + pivot.all_reduce - 1e-9
    assert phases.latency == pytest.approx(phases.warm_up + phases.steady + phases.ending)
