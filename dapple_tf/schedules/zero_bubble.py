"""Zero Bubble Pipeline Parallelism (Qi et al., ICLR'24): delays Bw by as many micro-batches as memory allows.

On position i of p (a group of stages counts as one), with unit times, K = warm-up and d = delay of Bw in micro-batches:

    policy    K                d = L - K          L, the most in flight     bubble (sections 2.1, 2.2)
    1F1B      p - i            -                  p (position 0)            (p - 1)(T_F + T_B + T_W)
    zb_h1     p - i            i                  p, as 1F1B's fullest      (p - 1)(T_F + T_B - T_W)
    zb_h2     2(p - i) - 1     2i                 2p - 1                    (p - 1)(T_F + T_B - 2 T_W)
    zb_v      a list schedule  -                  p, over both stages       see `zb_v`

The bubble is that of position 0, between its first and its last task; the other positions start later as well.
The order of a position is K forwards; then for each micro-batch j: Bx(j), Bw(j - d), F(j + K); then the remaining Bw.
L falls to what D (`holds`) or K (`warm_up`) allow, and with L = 1 the order is F Bx Bw for each micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dapple_tf.schedules import list_scheduling
from dapple_tf.schedules.policy import Placement, Planning, Policy
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleRequest
from graph_passes.ir.tasks import Phase

F, BX, BW = Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD


def in_flight_limits(request: ScheduleRequest, wanted: int) -> list[int]:
    """Returns L of each stage: ``wanted``, or less if K, D or M are lower; one number for a group."""
    limits = [min(request.limit(stage, wanted) for stage in group) for group in request.groups]
    return [limit for limit, group in zip(limits, request.groups, strict=True) for _ in group]


def h1_limits(request: ScheduleRequest) -> list[int]:
    """Returns L of each stage under zb_h1: p, as 1F1B's fullest."""
    return in_flight_limits(request, len(request.groups))


def h2_limits(request: ScheduleRequest) -> list[int]:
    """Returns L of each stage under zb_h2 and zero_bubble: 2p - 1."""
    return in_flight_limits(request, 2 * len(request.groups) - 1)


def handcrafted(request: ScheduleRequest, extra: int, limits: Sequence[int]) -> Orders:
    """Returns the closed form with a warm-up of ``min(p - i + extra, 2(p - i) - 1)``: 0 is zb_h1, p - 1 is zb_h2."""
    counts = _warm_up(request, extra, limits)
    orders: Orders = {}
    for group, count in zip(request.groups, counts, strict=True):
        jobs = _order(request.micro_batches, group, count, limits[group[0]] - count)
        orders |= {device: list(jobs) for device in request.devices[group[0]]}
    return orders


def zb_h1(request: ScheduleRequest) -> Orders:
    """Orders ZB-H1 (section 2.1): 1F1B's warm-up and 1F1B's peak memory, a third of its bubble."""
    return handcrafted(request, 0, h1_limits(request))


def zb_h2(request: ScheduleRequest) -> Orders:
    """Orders ZB-H2 (section 2.2): no bubble between a device's first and last task, at twice the activations."""
    return handcrafted(request, len(request.groups), h2_limits(request))


def zero_bubble(request: ScheduleRequest) -> Orders:
    """Returns the best of several warm-ups for the times and limits (section 3: automatic schedule); zb_v on a V.

    For each warm-up between zb_h1's and zb_h2's, the closed form and one whose Bw fill the gaps of a simulated run are
    compared by the time of the step, then by the longest time between a device's first and last task.
    """
    if request.is_vee:
        return zb_v(request)
    positions = len(request.groups)
    limits = h2_limits(request)
    runs = []
    tried = set()
    for extra in range(positions):
        counts = tuple(_warm_up(request, extra, limits))
        if counts in tried:
            continue
        tried.add(counts)
        runs.append(list_scheduling.replay(request, handcrafted(request, extra, limits)))
        queues: dict[int, list[list[Job]]] = {}
        for group, count in zip(request.groups, counts, strict=True):
            order = _order(request.micro_batches, group, count, 0)
            main = [job for job in order if job.phase is not BW]
            rest = [[job for job in order if job.phase is BW and job.stage == stage] for stage in reversed(group)]
            queues |= {device: [main, *rest] for device in request.devices[group[0]]}
        runs.append(list_scheduling.run(request, queues, list_scheduling.fill_gaps, limits=limits))
    return list_scheduling.best(runs).orders


def zb_v(request: ScheduleRequest) -> Orders:
    """Orders ZB-V ("Pipeline Parallelism with Controllable Memory", Qi et al.): stages i and 2p - 1 - i on one device.

    A device has at most p micro-batches' worth of activations: p times its number of stages, each one part of the
    model's. With `warm_up`, K of its stages are the limit instead. The result is the shorter of two list schedules;
    for equal times it has the ideal length of ``6 M + p - 1`` tasks.

    Raises:
        ScheduleError: the devices aren't a V.
    """
    request.check_vee()
    positions = len({request.devices[stage] for stage in range(request.stages)})
    room = {} if request.warm_up else {device: positions * len(own) for device, own in request.stages_of.items()}
    return list_scheduling.best(list_scheduling.free_runs(request, room)).orders


def _warm_up(request: ScheduleRequest, extra: int, limits: Sequence[int]) -> list[int]:
    positions = len(request.groups)
    wanted = [min(positions - i + extra, 2 * (positions - i) - 1) for i in range(positions)]
    counts = [min(count, limits[group[0]]) for count, group in zip(wanted, request.groups, strict=True)]
    return list(itertools.accumulate(counts, min))


def _order(micro_batches: int, stages: range, warm_up: int, delay: int) -> list[Job]:
    jobs = [Job(stage, F, micro_batch) for micro_batch in range(warm_up) for stage in stages]
    for micro_batch in range(micro_batches):
        jobs += [Job(stage, BX, micro_batch) for stage in reversed(stages)]
        if micro_batch >= delay:
            jobs += [Job(stage, BW, micro_batch - delay) for stage in reversed(stages)]
        if micro_batch + warm_up < micro_batches:
            jobs += [Job(stage, F, micro_batch + warm_up) for stage in stages]
    first = max(0, micro_batches - delay)
    return jobs + [Job(stage, BW, number) for number in range(first, micro_batches) for stage in reversed(stages)]


def _check_straight_or_vee(request: ScheduleRequest) -> None:
    if not request.is_vee:
        request.check_straight()


ZB_H1 = Policy(
    "zb_h1",
    zb_h1,
    "zero bubble within 1F1B's memory: Bw are put off",
    in_flight=h1_limits,
    check=ScheduleRequest.check_straight,
    splits=True,
    planning=Planning(rank=70),
)
ZB_H2 = Policy(
    "zb_h2",
    zb_h2,
    "zero bubble within twice 1F1B's memory: none between a device's first and last task",
    in_flight=h2_limits,
    check=ScheduleRequest.check_straight,
    splits=True,
    planning=Planning(rank=100),
)
ZB_V = Policy(
    "zb_v",
    zb_v,
    "zero bubble within 1F1B's memory, two stages on each device, there and back",
    check=ScheduleRequest.check_vee,
    splits=True,
    planning=Planning((Placement.VEE,), 75, by_seconds=True, list_runs=2),
)
ZERO_BUBBLE = Policy(
    "zero_bubble",
    zero_bubble,
    "the best of these for given times and limits",
    check=_check_straight_or_vee,
    splits=True,
    planning=Planning(rank=50, by_seconds=True, list_runs_per_stage=2),
)
