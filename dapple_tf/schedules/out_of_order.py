"""Out-of-order backprop (EuroSys'22): weight gradients (Bw) are computed when no other task is waited for.

* Gradient fast-forwarding (section 5.2.1): Bx before Bw, so that the next device can continue the backward.
* Modulo allocation (section 5.2.1): layer l on device l mod n, scheduled as a list by the critical path.
* Reverse first-k (section 5.1, algorithm 2): the Bw of the first k stages last, that of stage 0 first, so that the
  gradients that the next step needs first are reduced while the others are computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from dapple_tf.schedules import list_scheduling
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
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleRequest
from graph_passes.ir.tasks import Phase


def _warm_up_limits(request: ScheduleRequest, wanted: Wanted) -> list[int]:
    """Returns K of each stage: the most micro-batches in flight under gpipe and dapple_*.

    Raises:
        ScheduleError: as `one_forward_one_backward.warm_up`.
    """
    return [count for group, count in zip(request.groups, warm_up(request, wanted), strict=True) for _ in group]


def by_warm_up(request: ScheduleRequest, wanted: Wanted) -> Orders:
    """Orders gpipe and dapple_*: forwards and backwards by K; stages below ``reverse_first_k`` have Bw right after Bx.

    Raises:
        ScheduleError: as `one_forward_one_backward.warm_up`.
    """
    split = range(request.reverse_first_k)
    return {
        device: sequence(request.micro_batches, group, count, split)
        for group, count in zip(request.groups, warm_up(request, wanted), strict=True)
        for device in request.devices[group[0]]
    }


def _delayed_limits(request: ScheduleRequest, wanted: Wanted) -> list[int]:
    """Returns the most micro-batches in flight under fast_forward*: what the fullest stage wants, if K and D allow."""
    fullest = max(wanted(len(request.groups), request.micro_batches))
    return [request.limit(stage, fullest) for stage in range(request.stages)]


def fast_forward(request: ScheduleRequest, wanted: Wanted) -> Orders:
    """Orders fast_forward*: Bw run when their device would idle, or when no further micro-batch may be in flight."""
    stages, numbers = range(request.stages), range(request.micro_batches)
    queues: dict[int, list[list[Job]]] = {}
    for group, count in zip(request.groups, limited(request, wanted(len(request.groups), len(numbers))), strict=True):
        for device in request.devices[group[0]]:
            queues[device] = [sequence(len(numbers), group, count, stages, stages)]
            queues[device] += [[Job(stage, Phase.WEIGHT_GRAD, number) for number in numbers] for stage in group]
    limits = _delayed_limits(request, wanted)
    return list_scheduling.run(request, queues, list_scheduling.fill_gaps, limits=limits).orders


def _check_warm_up(request: ScheduleRequest, wanted: Wanted) -> None:
    request.check_straight()
    warm_up(request, wanted)


def _by_warm_up(name: str, wanted: Wanted, summary: str, rank: int) -> Policy:
    """Returns a policy of forwards and backwards in turn, behind K forwards."""
    return Policy(
        name,
        functools.partial(by_warm_up, wanted=wanted),
        summary,
        in_flight=functools.partial(_warm_up_limits, wanted=wanted),
        check=functools.partial(_check_warm_up, wanted=wanted),
        splits=False,
        needs_all=wanted is all_micro_batches,
        planning=Planning(rank=rank, formula=True),
    )


def _delayed(name: str, wanted: Wanted, summary: str, rank: int) -> Policy:
    """Returns a policy that delays Bw."""
    return Policy(
        name,
        functools.partial(fast_forward, wanted=wanted),
        summary,
        in_flight=functools.partial(_delayed_limits, wanted=wanted),
        check=ScheduleRequest.check_straight,
        splits=True,
        planning=Planning(rank=rank, by_seconds=True, list_runs=1),
    )


GPIPE = _by_warm_up("gpipe", all_micro_batches, "all forwards, then all backwards (GPipe)", 10)
DAPPLE_A = _by_warm_up("dapple_a", p_a, "1F1B: stage i of S begins with S - i forwards (DAPPLE's P_A)", 20)
DAPPLE_B = _by_warm_up("dapple_b", p_b, "1F1B behind 2 (S - i) - 1 forwards (DAPPLE's P_B)", 30)
FAST_FORWARD = _delayed("fast_forward", all_micro_batches, "gpipe with Bw in the gaps", 40)
FAST_FORWARD_A = _delayed("fast_forward_a", p_a, "dapple_a with Bw in the gaps", 60)
FAST_FORWARD_B = _delayed("fast_forward_b", p_b, "dapple_b with Bw in the gaps", 90)


def modulo(request: ScheduleRequest) -> Orders:
    """Orders all tasks by list scheduling on any placement, meant for stage l on device l mod n (section 5.2.1).

    The shorter of two list schedules: by the critical path alone, which runs forwards early (like GPipe), and with the
    oldest micro-batch first, which starts the backward early and has fewer in flight. K and D
    bound the micro-batches in flight of each stage.
    """
    keys = (list_scheduling.oldest_first, list_scheduling.critical_path_first)
    return list_scheduling.best(list_scheduling.free_runs(request, keys=keys)).orders


MODULO = Policy(
    "modulo",
    modulo,
    "list scheduling of any placement by the critical path",
    splits=True,
    planning=Planning((Placement.STRAIGHT, Placement.PERIODIC), 80, by_seconds=True, list_runs=2),
)


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
