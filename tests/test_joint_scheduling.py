"""Multi-region joint scheduling (Out-Of-Order BackProp, section 4.1): the algorithm, and both streams simulated."""

from __future__ import annotations

import itertools
import random

import pytest

from dapple_tf.joint.joint_scheduling import (
    Ready,
    StreamTimes,
    check_regions,
    fit_memory,
    joint_schedule,
    peak_bytes,
    schedule_regions,
    similar_regions,
    stage_regions,
    two_streams,
)

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


def test_a_region_takes_kernels_until_its_time_is_over() -> None:
    ready = {kernel: Ready(0) for kernel in range(4)}
    schedule = joint_schedule([3.0, 3.0], lambda k, i: 2.0, lambda k, i: 2.0 - i, ready)
    assert schedule == ((0, 1), (2, 3))


def test_of_equal_speedups_the_earliest_region_wins_and_in_it_the_kernel_that_was_ready_first() -> None:
    ready = {0: Ready(1), 1: Ready(0, 0.0), 2: Ready(0, 0.0)}
    assert joint_schedule([1.0, 9.0], lambda k, i: 1.0, lambda k, i: 1.0, ready) == ((1,), (2, 0))


def test_what_finds_no_room_runs_behind_the_last_region_as_it_became_ready() -> None:
    ready = {2: Ready(0), 1: Ready(1), 0: Ready(1, 1.0)}
    assert joint_schedule([1.0, 1.0], lambda k, i: 5.0, lambda k, i: 1.0 + (i == 1), ready) == ((), (2, 1, 0))


def test_the_sub_stream_idles_until_a_kernel_is_ready_within_a_region() -> None:
    assert joint_schedule([3.0], lambda k, i: 1.0, lambda k, i: 1.0, {0: Ready(0, 2.0), 1: Ready(0, 1.0)}) == ((1, 0),)


def test_regions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="there are no regions"):
        joint_schedule([], lambda k, i: 1.0, lambda k, i: 1.0, {})
    with pytest.raises(ValueError, match="kernel 4 becomes runnable in region 2, but regions are 0 to 1"):
        joint_schedule([1.0, 1.0], lambda k, i: 1.0, lambda k, i: 1.0, {4: Ready(2)})


@pytest.mark.parametrize("seed", range(30))
def test_every_kernel_runs_once_never_before_it_is_ready_and_the_greedy_choice_is_kept(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(1, 7)
    main = [draw.uniform(0.0, 3.0) for _ in range(count)]
    ready = {kernel: Ready(draw.randrange(count), draw.choice([0.0, 0.5])) for kernel in range(draw.randrange(9))}
    sub = {(k, i): draw.uniform(0.2, 3.0) for k in ready for i in range(count)}
    gain = {(k, i): draw.uniform(0.5, 2.0) for k in ready for i in range(count)}
    schedule = joint_schedule(main, lambda k, i: sub[k, i], lambda k, i: gain[k, i], ready)
    assert sorted(kernel for kernels in schedule for kernel in kernels) == sorted(ready)
    for region, kernels in enumerate(schedule):
        assert all(ready[kernel].region <= region for kernel in kernels)
    # Each choice is that with the highest speedup of all that could be made.
    left, now, taken = set(ready), [0.0] * count, [0] * count
    while True:
        choices = {
            (k, i): gain[k, i]
            for k in left
            for i in range(count)
            if (now[i] < main[i] or (now[i] == 0.0 and not taken[i])) and ready[k] <= Ready(i, now[i])
        }
        if not choices:
            later = sorted(ready[k] for k in left if ready[k].offset > now[ready[k].region])
            later = [when for when in later if when.offset < main[when.region] and now[when.region] < main[when.region]]
            if not later:
                break
            now[later[0].region] = later[0].offset
            continue
        (kernel, region) = max(choices, key=lambda pair: choices[pair])
        assert schedule[region][taken[region]] == kernel
        taken[region] += 1
        left.remove(kernel)
        now[region] += sub[kernel, region]
    assert list(schedule[-1][taken[-1] :]) == sorted(left, key=lambda kernel: ready[kernel])


# ---- regions of stages


def test_stages_of_similar_compute_are_one_region() -> None:
    assert stage_regions(3) == ((2,), (1,), (0,))
    assert similar_regions([1.0, 1.1, 5.0, 4.0, 4.2]) == ((4, 3, 2), (1, 0))
    assert similar_regions([1.0, 1.1, 5.0, 4.0, 4.2], 0.0) == stage_regions(5)
    with pytest.raises(ValueError, match="tolerance is -1; it must be at least 0"):
        similar_regions([1.0], -1)


def test_regions_are_runs_of_all_stages() -> None:
    check_regions([(2, 1), (0,)], 3)
    with pytest.raises(ValueError, match=r"region 1 is \[0\], where stage 1 should come next"):
        check_regions([(2,), (0,), (1,)], 3)
    with pytest.raises(ValueError, match="regions end at stage 1; they run through all stages from 2 down to 0"):
        check_regions([(2, 1)], 3)
    with pytest.raises(ValueError, match="region 1 has no stages"):
        check_regions([(2,), ()], 3)


def test_times_say_what_does_not_fit_together() -> None:
    with pytest.raises(ValueError, match="2 times of Bx and 1 of Bw"):
        StreamTimes((1.0, 1.0), (1.0,))
    with pytest.raises(ValueError, match=r"stages \(2, 0\) are a pair, but there are 2 stages"):
        StreamTimes((1.0, 1.0), (1.0, 1.0), {(2, 0): 1.0})


def test_a_regions_speedup_is_the_mean_over_its_stages_by_their_times() -> None:
    times = StreamTimes((1.0, 3.0, 1.0), (1.0, 1.0, 2.0), {(2, 1): 4.0}, {(2, 1): 1.2, (2, 0): 2.0})
    assert times.region_speedup(2, (1, 0)) == pytest.approx((3 * 1.2 + 2.0) / 4)
    assert times.sub_seconds(2, (1, 0)) == pytest.approx((3 * 4.0 + 2.0) / 4)  # by itself where it wasn't measured


def test_stages_without_weights_have_no_kernel() -> None:
    times = StreamTimes((0.0, 1.0, 1.0), (1.0, 0.0, 1.0))
    assert schedule_regions(times, stage_regions(3)) == ((), (2,), (0,))


def test_a_kernel_may_run_in_the_region_of_its_own_stage_once_that_has_run() -> None:
    times = StreamTimes((1.0, 1.0, 1.0), (0.5, 0.5, 0.5))
    schedule = schedule_regions(times, [(2, 1, 0)])
    assert schedule == ((2, 1, 0),)
    drawn = [(span.kind, span.stage, span.start, span.end) for span in two_streams(times, [(2, 1, 0)], schedule).spans]
    assert drawn[:3] == [("Bx", 2, 0.0, 1.0), ("Bx", 1, 1.0, 2.0), ("Bx", 0, 2.0, 3.0)]
    assert drawn[3:] == [("Bw", 2, 1.0, 1.5), ("Bw", 1, 2.0, 2.5), ("Bw", 0, 3.0, 3.5)]


# ---- the memory rule


def late() -> StreamTimes:
    """All Bw gain most at the backward's end."""
    return StreamTimes((1.0,) * 3, (1.0,) * 3, {}, {(2, 1): 1.0, (2, 0): 2.0, (1, 0): 1.5})


def test_bytes_of_a_schedule_worked_out() -> None:
    times, regions = late(), stage_regions(3)
    schedule = schedule_regions(times, regions)
    assert schedule == ((), (), (2, 1, 0))
    # Bx2: 20 + 10 + 10; Bx1: 20 + 10, and 20 for Bw2; Bx0: 20, and 20 for each of Bw2 and Bw1
    assert peak_bytes(times, regions, schedule, [10] * 3, [20] * 3) == 60
    early = schedule_regions(times, regions, 2)
    assert early == ((), (2,), (1, 0))
    assert peak_bytes(times, regions, early, [10] * 3, [20] * 3) == 50


def test_regions_are_prescheduled_until_the_schedule_fits() -> None:
    times, regions = late(), stage_regions(3)

    def fitted(limit: float | None) -> tuple[int, float]:
        fit = fit_memory(times, regions, [10] * 3, [20] * 3, limit)
        return fit.prescheduled, fit.peak

    assert fitted(None) == fitted(60) == (0, 60)
    assert fitted(55) == fitted(50) == (2, 50)
    assert fitted(40) == (3, 50)  # the last resort, which doesn't fit either
    with pytest.raises(ValueError, match="prescheduled is 4; with 3 regions it must be 0 to 3"):
        schedule_regions(times, regions, 4)


@pytest.mark.parametrize("seed", range(20))
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
    regions = draw.choice([stage_regions(stages), similar_regions(times.input_grad)])
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
