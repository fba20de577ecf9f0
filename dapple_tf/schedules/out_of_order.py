"""Out-of-order backprop (EuroSys'22): weight gradients (Bw) are computed when no other task is waited for.

* Gradient fast-forwarding (section 5.2.1): Bx before Bw, so that the next device can continue the backward.
* Modulo allocation (section 5.2.1): layer l on device l mod n, scheduled as a list by the critical path.
* Reverse first-k (section 5.1, algorithm 2): the Bw of the first k stages last, that of stage 0 first, so that the
  gradients that the next step needs first are reduced while the others are computed.
* A sub-stream (section 4.1): Bw on devices of their own, in the order in which they become ready.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from dapple_tf.schedules import list_scheduling, priorities
from dapple_tf.schedules.one_forward_one_backward import (
    Wanted,
    all_micro_batches,
    limited,
    p_a,
    p_b,
    sequence,
    warm_up,
)
from dapple_tf.schedules.policy import Placement, Planning, Policy
from dapple_tf.schedules.schedule_request import Active, Job, Orders, ScheduleRequest
from graph_passes.ir.tasks import Phase, Task


def in_flight_limits(request: ScheduleRequest, wanted: Wanted, delayed: bool) -> list[int]:
    """Returns the most micro-batches that each stage has in flight under gpipe, dapple_*, and fast_forward*.

    A stage whose Bw is delayed may have what the fullest stage wants, if K and D allow it; any other stage has its K,
    and none has less than the forwards that it begins with.

    Args:
        request: what is asked for.
        wanted: K of each group.
        delayed: whether all Bw are delayed, rather than those on other devices only.

    Raises:
        ScheduleError: as `one_forward_one_backward.warm_up`.
    """
    fullest = max(wanted(len(request.groups), request.micro_batches))
    limits = [request.limit(stage, fullest) for stage in range(request.stages)]
    if not delayed:
        for group, count in zip(request.groups, warm_up(request, wanted), strict=True):
            for stage in group:
                limits[stage] = max(limits[stage], count) if stage in request.offloaded else count
    return limits


def fast_forward(request: ScheduleRequest, wanted: Wanted, delayed: bool) -> Orders:
    """Orders gpipe, dapple_* and fast_forward*: forwards and backwards by K, Bw in the gaps.

    Under fast_forward* every stage is split and its Bw runs when its device would idle, or when no further micro-batch
    may be in flight. Under the others this holds only for Bw that run on another device than their Bx; stages below
    ``reverse_first_k`` are split too, with Bw right after Bx.

    Args:
        request: what is asked for.
        wanted: K of each group.
        delayed: as in `in_flight_limits`.

    Raises:
        ScheduleError: as `in_flight_limits`.
    """
    stages = range(request.stages)
    if delayed:
        counts = limited(request, wanted(len(request.groups), request.micro_batches))
        split, delayed_anywhere = set(stages), set(stages)
    else:
        counts = warm_up(request, wanted)
        split = {stage for stage in stages if stage < request.reverse_first_k or stage in request.offloaded}
        delayed_anywhere = set(request.offloaded)
    queues: dict[int, list[list[Job]]] = {}
    for group, count in zip(request.groups, counts, strict=True):
        for replica, device in enumerate(request.devices[group[0]]):
            late = {
                stage
                for stage in delayed_anywhere.intersection(group)
                if delayed or request.weight_devices[stage][replica] != device
            }
            queues.setdefault(device, []).insert(0, sequence(request.micro_batches, group, count, split, late))
            for stage in late:
                bw = [Job(stage, Phase.WEIGHT_GRAD, micro_batch) for micro_batch in range(request.micro_batches)]
                queues.setdefault(request.weight_devices[stage][replica], []).append(bw)
    if not delayed_anywhere:
        return {device: jobs for device, (jobs,) in queues.items()}
    limits = in_flight_limits(request, wanted, delayed)
    return list_scheduling.run(request, queues, priorities.fill_gaps, limits=limits).orders


def _check(request: ScheduleRequest, wanted: Wanted, delayed: bool) -> None:
    request.check_straight()
    in_flight_limits(request, wanted, delayed)


def _waits_for_room(request: ScheduleRequest, active: Active | None, wanted: Wanted, delayed: bool) -> dict[Task, Task]:
    """Returns the forwards that wait until a Bw on another device has made room."""
    if not request.offloaded:
        return {}
    limits = in_flight_limits(request, wanted, delayed)
    waits = {}
    for stage in request.offloaded:
        for replica, device in enumerate(request.devices[stage]):
            if device != request.weight_devices[stage][replica]:
                all_numbers = range(request.micro_batches)
                numbers = [number for number in all_numbers if active is None or active(stage, number, replica)]
                for number, earlier in zip(numbers[limits[stage] :], numbers, strict=False):
                    waiting = Task(stage, Phase.FORWARD, number, replica)
                    waits[waiting] = Task(stage, Phase.WEIGHT_GRAD, earlier, replica)
    return waits


def _by_warm_up(name: str, wanted: Wanted, summary: str, rank: int, *, delayed: bool = False) -> Policy:
    """Returns a policy of forwards and backwards in turn, behind K forwards."""
    return Policy(
        name,
        functools.partial(fast_forward, wanted=wanted, delayed=delayed),
        summary,
        in_flight=functools.partial(in_flight_limits, wanted=wanted, delayed=delayed),
        check=functools.partial(_check, wanted=wanted, delayed=delayed),
        waits=functools.partial(_waits_for_room, wanted=wanted, delayed=delayed),
        splits=delayed,
        offloads=True,
        needs_all=wanted is all_micro_batches and not delayed,
        planning=Planning(rank=rank, by_seconds=delayed, list_runs=int(delayed), formula=not delayed),
    )


GPIPE = _by_warm_up("gpipe", all_micro_batches, "all forwards, then all backwards (GPipe)", 10)
DAPPLE_A = _by_warm_up("dapple_a", p_a, "1F1B: stage i of S begins with S - i forwards (DAPPLE's P_A)", 20)
DAPPLE_B = _by_warm_up("dapple_b", p_b, "1F1B behind 2 (S - i) - 1 forwards (DAPPLE's P_B)", 30)
FAST_FORWARD = _by_warm_up("fast_forward", all_micro_batches, "gpipe with Bw in the gaps", 40, delayed=True)
FAST_FORWARD_A = _by_warm_up("fast_forward_a", p_a, "dapple_a with Bw in the gaps", 60, delayed=True)
FAST_FORWARD_B = _by_warm_up("fast_forward_b", p_b, "dapple_b with Bw in the gaps", 90, delayed=True)


def modulo(request: ScheduleRequest) -> Orders:
    """Orders all tasks by list scheduling on any placement, meant for stage l on device l mod n (section 5.2.1).

    The shorter of two list schedules: by the critical path alone, which runs forwards early (like GPipe), and with the
    oldest micro-batch first, which starts the backward early and has fewer in flight. K and D
    bound the micro-batches in flight of each stage.
    """
    limits = [request.limit(stage, request.micro_batches) for stage in range(request.stages)]
    queues = list_scheduling.free_queues(request)
    keys = (priorities.oldest_first(request), priorities.critical_path_first(request))
    return list_scheduling.best([list_scheduling.run(request, queues, key, limits=limits) for key in keys]).orders


MODULO = Policy(
    "modulo",
    modulo,
    "list scheduling of any placement by the critical path",
    splits=True,
    planning=Planning((Placement.STRAIGHT, Placement.PERIODIC), 80, by_seconds=True, list_runs=2),
)


def modulo_devices(stages: int, devices: int) -> list[list[int]]:
    """Allocates stage l to device l mod n."""
    return [[stage % devices] for stage in range(stages)]


def reverse_first_k(orders: Orders, k: int, micro_batches: int) -> Orders:
    """Moves the last micro-batch's Bw of stages below ``k`` to the end of each device, stage 0's first.

    Algorithm 2: ``for i <- L down to 1 do if i > k then D.append(dW_i); D.append(dO_i)``, then ``for i <- 1 to k do
    D.append(dW_i)``. Gradients of earlier micro-batches aren't complete, so nothing is gained by moving their Bw.
    """
    late = [Job(stage, Phase.WEIGHT_GRAD, micro_batches - 1) for stage in range(k)]
    moved = set(late)
    return {
        device: [job for job in jobs if job not in moved] + [job for job in late if job in set(jobs)]
        for device, jobs in orders.items()
    }


def best_reverse_first_k(layers: int, throughput: Callable[[int], float]) -> int:
    """Returns the k of the highest throughput, taken to be a concave function of k (section 5.1).

    The paper's search: from k = 0 in steps of dk = L/10 while k < L; then, for the best k, within (k - dk, k + dk) with
    dk halved; and so on until dk is 1. Ties go to the smallest k.

    Args:
        layers: L.
        throughput: measures a k from 0 to L - 1; called once for each.

    Raises:
        ValueError: there are no layers.
    """
    if layers < 1:
        raise ValueError(f"layers is {layers}; it must be at least 1")
    known: dict[int, float] = {}

    def measured(k: int) -> float:
        if k not in known:
            known[k] = throughput(k)
        return known[k]

    step = max(1, layers // 10)
    candidates = range(0, layers, step)
    while True:
        best = max(candidates, key=lambda k: (measured(k), -k))
        if step == 1:
            return best
        low, high = max(0, best - step + 1), min(layers, best + step)
        step = max(1, step // 2)
        first = best - (best - low) // step * step
        candidates = range(first, high, step)
