"""Multi-region joint scheduling (Out-Of-Order BackProp, section 4.1): the algorithm, and both streams simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from dapple_tf.joint.joint_scheduling import (
    Ready,
    StreamTimes,
    check_regions,
    fit_memory,
    joint_schedule,
    peak_bytes,
    schedule_regions,
    stage_regions,
    two_streams,
)


def late() -> StreamTimes:
    """All Bw gain most at the backward's end."""
    return StreamTimes((1.0,) * 3, (1.0,) * 3, {}, {(2, 1): 1.0, (2, 0): 2.0, (1, 0): 1.5})


# ---- algorithm 1


def test_the_pseudo_code_followed_by_hand() -> None:
    speedups = {(3, 1): 1.2, (3, 2): 1.5, (3, 3): 1.1, (2, 2): 1.4, (2, 3): 1.3, (1, 3): 1.6}
    schedule = joint_schedule(
        [2.0, 3.0, 2.0, 4.0],
        lambda kernel, region: 2.0,
        lambda kernel, region: speedups[kernel, region],
        {3: Ready(1), 2: Ready(2), 1: Ready(3)},
    )
    # tmp = [-, (3, 1.2), (3, 1.5), (1, 1.6)]: dW1 in R4, now = 2 of 4
    # tmp = [-, (3, 1.2), (3, 1.5), (2, 1.3)]: dW3 in R3, now = 2 of 2, R3 is closed
    # tmp = [-, -, closed, (2, 1.3)]:          dW2 in R4
    assert schedule == ((), (), (3,), (1, 2))


@pytest.mark.parametrize(
    ("main", "sub", "speedup", "ready", "expected"),
    [
        pytest.param(
            [3.0, 3.0], 2.0, (2.0, 1.0), {k: Ready(0) for k in range(4)}, ((0, 1), (2, 3)), id="until it ends"
        ),
        pytest.param(
            *([1.0, 9.0], 1.0, (1.0, 1.0), {0: Ready(1), 1: Ready(0, 0.0), 2: Ready(0, 0.0)}, ((1,), (2, 0))),
            id="of equal speedups the earliest region, and in it the kernel that was ready first",
        ),
        pytest.param(
            *([1.0, 1.0], 5.0, (1.0, 2.0), {2: Ready(0), 1: Ready(1), 0: Ready(1, 1.0)}, ((), (2, 1, 0))),
            id="behind the last region",
        ),
        pytest.param([3.0], 1.0, (1.0,), {0: Ready(0, 2.0), 1: Ready(0, 1.0)}, ((1, 0),), id="idle until one is ready"),
    ],
)
def test_small_schedules(
    main: list[float],
    sub: float,
    speedup: tuple[float, ...],
    ready: dict[int, Ready],
    expected: tuple[tuple[int, ...], ...],
) -> None:
    assert joint_schedule(main, lambda k, i: sub, lambda k, i: speedup[i], ready) == expected


# ---- regions of stages


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: joint_schedule([], max, max, {}), "there are no regions"),
        (lambda: joint_schedule([1.0], max, max, {4: Ready(2)}), "kernel 4 becomes runnable in region 2, but regions"),
        (lambda: check_regions([(2,), (0,), (1,)], 3), r"region 1 is \[0\], where stage 1 should come next"),
        (lambda: check_regions([(2, 1)], 3), "regions end at stage 1; they run through all stages from 2 down to 0"),
        (lambda: check_regions([(2,), ()], 3), "region 1 has no stages"),
        (lambda: StreamTimes((1.0, 1.0), (1.0,)), "2 times of Bx and 1 of Bw"),
        (lambda: StreamTimes((1.0,), (1.0,), {(2, 0): 1.0}), r"stages \(2, 0\) are a pair, but there are 1 stages"),
        (lambda: schedule_regions(late(), stage_regions(3), 4), "prescheduled is 4; with 3 regions it must be 0 to 3"),
    ],
)
def test_impossible_regions_and_times_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_region_has_one_stage_or_several() -> None:
    assert stage_regions(3) == ((2,), (1,), (0,))
    check_regions([(2, 1), (0,)], 3)


def test_a_regions_speedup_is_the_mean_over_its_stages_by_their_times() -> None:
    times = StreamTimes((1.0, 3.0, 1.0), (1.0, 1.0, 2.0), {(2, 1): 4.0}, {(2, 1): 1.2, (2, 0): 2.0})
    assert times.region_speedup(2, (1, 0)) == pytest.approx((3 * 1.2 + 2.0) / 4)
    assert times.sub_seconds(2, (1, 0)) == pytest.approx((3 * 4.0 + 2.0) / 4)  # by itself where it wasn't measured
    without_weights = StreamTimes((0.0, 1.0, 1.0), (1.0, 0.0, 1.0))
    assert schedule_regions(without_weights, stage_regions(3)) == ((), (2,), (0,))
    one_region = schedule_regions(StreamTimes((1.0,) * 3, (0.5,) * 3), [(2, 1, 0)])
    assert one_region == ((2, 1, 0),), "also in the region of its own stage, once that has run"


# ---- the memory rule


def test_regions_are_prescheduled_until_the_schedule_fits() -> None:
    times, regions = late(), stage_regions(3)
    schedule, early = (schedule_regions(times, regions, prescheduled) for prescheduled in (0, 2))
    assert (schedule, early) == (((), (), (2, 1, 0)), ((), (2,), (1, 0)))
    # Bx2: 20 + 10 + 10; Bx1: 20 + 10, and 20 for Bw2; Bx0: 20, and 20 for each of Bw2 and Bw1
    assert peak_bytes(times, regions, schedule, [10] * 3, [20] * 3) == 60
    assert peak_bytes(times, regions, early, [10] * 3, [20] * 3) == 50
    fits = [fit_memory(times, regions, [10] * 3, [20] * 3, limit) for limit in (None, 60, 55, 50, 40)]
    # The last resort doesn't fit either.
    assert [(fit.prescheduled, fit.peak) for fit in fits] == [(0, 60), (0, 60), (2, 50), (2, 50), (3, 50)]


@pytest.mark.parametrize("seed", range(8))
def test_less_memory_never_means_fewer_prescheduled_regions(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randrange(1, 8)
    pairs = [(k, r) for k in range(stages) for r in range(k)]
    times = StreamTimes(
        tuple(draw.uniform(0, 2) for _ in range(stages)),
        tuple(draw.choice([0.0, draw.uniform(0.1, 2)]) for _ in range(stages)),
        {pair: draw.uniform(0.1, 3) for pair in pairs},
        {pair: draw.uniform(0.8, 2) for pair in pairs},
    )
    order = list(stage_regions(stages))
    cuts = sorted(draw.sample(range(1, stages), draw.randrange(stages)))
    regions = [sum(order[start:stop], ()) for start, stop in itertools.pairwise([0, *cuts, stages])]
    residual, delayed = ([draw.randrange(1, 100) for _ in range(stages)] for _ in range(2))
    before = 0
    for limit in (1000, 500, 300, 200, 100, 50, 0):
        fit = fit_memory(times, regions, residual, delayed, limit)
        assert fit.prescheduled >= before
        assert fit.peak <= limit or fit.prescheduled == len(regions)
        assert fit.peak >= sum(residual)
        kernels = [kernel for kernels in fit.schedule for kernel in kernels]
        assert sorted(kernels) == [stage for stage in range(stages) if times.weight_grad[stage]]
        spans = two_streams(times, regions, fit.schedule).spans
        ends = {span.stage: span.end for span in spans if span.kind == "Bx"}
        subs = [span for span in spans if span.kind == "Bw"]
        assert [span.stage for span in subs] == kernels
        assert all(span.start >= ends[span.stage] for span in subs)
        assert all(second.start >= first.end for first, second in itertools.pairwise(subs))
        before = fit.prescheduled


def test_both_streams_worked_out() -> None:
    times = StreamTimes((1.0, 1.0, 1.0), (0.5, 0.5, 0.5))
    step = two_streams(times, [(2, 1, 0)], ((2, 1, 0),))
    drawn = [(span.kind, span.stage, span.start, span.end) for span in step.spans]
    assert drawn[:3] == [("Bx", 2, 0.0, 1.0), ("Bx", 1, 1.0, 2.0), ("Bx", 0, 2.0, 3.0)]
    assert drawn[3:] == [("Bw", 2, 1.0, 1.5), ("Bw", 1, 2.0, 2.5), ("Bw", 0, 3.0, 3.5)]
    assert step.latency == 3.5
