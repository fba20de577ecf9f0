"""Out-of-order backprop (EuroSys'22): weight gradients (Bw) are computed when nothing waits for something else.

* Gradient fast-forwarding (section 5.2.1): Bx before Bw, so that the next device can go on with the backward.
* Modulo allocation (section 5.2.1): layer l on device l mod n, scheduled as a list by the critical path.
* Reverse first-k (section 5.1, algorithm 2): the Bw of the first k stages last, that of stage 0 first, so that the
  gradients that the next step needs first are reduced while the others are computed.
* A sub-stream (section 4.1): Bw on devices of their own, in the order in which they become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dapple_tf.schedules import list_scheduling, priorities
from dapple_tf.schedules.one_forward_one_backward import limited, sequence, wanted_warm_up, warm_up
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleRequest
from graph_passes.ir.tasks import Phase

FAST_FORWARD = {"fast_forward": "gpipe", "fast_forward_a": "dapple_a", "fast_forward_b": "dapple_b"}
"""Policies with gradient fast-forwarding -> what they are based on."""


def in_flight_limits(request: ScheduleRequest) -> list[int]:
    """The most micro-batches that each stage has in flight under gpipe, dapple_*, and fast_forward*.

    A stage whose Bw is delayed may have as many as the base policy's fullest stage has, if K and D allow it; any other
    K.

    Raises:
        ScheduleError: as `one_forward_one_backward.warm_up`.
    """
    base = FAST_FORWARD.get(request.policy, request.policy)
    fullest = max(wanted_warm_up(base, len(request.groups), request.micro_batches))
    limits = [request.limit(stage, fullest) for stage in range(request.stages)]
    if request.policy not in FAST_FORWARD:
        for group, count in zip(request.groups, warm_up(request), strict=True):
            for stage in group:
                limits[stage] = limits[stage] if stage in request.offloaded else count
    return limits


def fast_forward(request: ScheduleRequest) -> Orders:
    """Order gpipe, dapple_* and fast_forward*: the base policy's forwards and backwards, Bw in the gaps.

    Under fast_forward* every stage is split and its Bw runs when its device would idle, or when no further micro-batch
    may be in flight. Under the others this holds for the Bw that run on another device than their Bx; stages below
    ``reverse_first_k`` are split too, with Bw right after Bx.

    Raises:
        ScheduleError: as `in_flight_limits`.
    """
    stages = range(request.stages)
    if request.policy in FAST_FORWARD:
        base = FAST_FORWARD[request.policy]
        counts = limited(request, wanted_warm_up(base, len(request.groups), request.micro_batches))
        split, delayed_anywhere = set(stages), set(stages)
    else:
        counts = warm_up(request)
        split = {stage for stage in stages if stage < request.reverse_first_k or stage in request.offloaded}
        delayed_anywhere = set(request.offloaded)
    queues: dict[int, list[list[Job]]] = {}
    for group, count in zip(request.groups, counts, strict=True):
        for replica, device in enumerate(request.devices[group[0]]):
            delayed = {
                stage
                for stage in delayed_anywhere.intersection(group)
                if request.policy in FAST_FORWARD or request.weight_devices[stage][replica] != device
            }
            queues.setdefault(device, []).insert(0, sequence(request.micro_batches, group, count, split, delayed))
            for stage in delayed:
                bw = [Job(stage, Phase.WEIGHT_GRAD, micro_batch) for micro_batch in range(request.micro_batches)]
                queues.setdefault(request.weight_devices[stage][replica], []).append(bw)
    if not delayed_anywhere:
        return {device: jobs for device, (jobs,) in queues.items()}
    limits = in_flight_limits(request)
    return list_scheduling.run(request, queues, priorities.fill_gaps, limits=limits).orders


def modulo(request: ScheduleRequest) -> Orders:
    """List scheduling of all tasks on any placement, meant for stage l on device l mod n (section 5.2.1).

    Of two list schedules the one with the shorter step: by the critical path alone, which runs forwards early (as
    GPipe), and with the oldest micro-batch first, which starts the backward early and needs fewer in flight. K and D
    bound the micro-batches in flight of each stage.
    """
    limits = [request.limit(stage, request.micro_batches) for stage in range(request.stages)]
    queues = list_scheduling.free_queues(request)
    keys = (priorities.oldest_first(request), priorities.critical_path_first(request))
    return list_scheduling.best([list_scheduling.run(request, queues, key, limits=limits) for key in keys]).orders


def modulo_devices(stages: int, devices: int) -> list[list[int]]:
    """Modulo allocation: stage l on device l mod n."""
    return [[stage % devices] for stage in range(stages)]


def reverse_first_k(orders: Orders, k: int, micro_batches: int) -> Orders:
    """Move the last micro-batch's Bw of stages below ``k`` to the end of each device, stage 0's first.

    Algorithm 2: ``for i <- L down to 1 do if i > k then D.append(dW_i); D.append(dO_i)``, then ``for i <- 1 to k do
    D.append(dW_i)``. Of the micro-batches before the last, gradients aren't complete, so that there is no hurry.
    """
    late = [Job(stage, Phase.WEIGHT_GRAD, micro_batches - 1) for stage in range(k)]
    moved = set(late)
    return {
        device: [job for job in jobs if job not in moved] + [job for job in late if job in set(jobs)]
        for device, jobs in orders.items()
    }


def largest_reverse_first_k(
    limit: float, forward_bytes: float, output_gradient_bytes: Sequence[float], weight_gradient_bytes: Sequence[float]
) -> int:
    """Return the largest k that memory allows (algorithm 2, lines 1 and 2).

    ``max_k = argmax_j f(j) = M_fwd - sum_{i=j+1..L} M(dO_i) + sum_{i=1..j} M(dW_i)  s.t.  f(j) < MXM``: when the
    first j weight gradients are all that is left to compute, the other layers' memory is free again and theirs isn't.

    Args:
        limit: MXM, in bytes.
        forward_bytes: M_fwd, what the forward leaves in memory.
        output_gradient_bytes: M(dO_i) of each layer, from the first on.
        weight_gradient_bytes: M(dW_i) of each layer.

    Returns:
        The largest j of 0 to L for which f(j) < MXM; 0 also when not even that fits.

    Raises:
        ValueError: the two lists have different lengths.
    """
    layers = len(output_gradient_bytes)
    if len(weight_gradient_bytes) != layers:
        raise ValueError(
            f"output_gradient_bytes has {layers} entries, weight_gradient_bytes {len(weight_gradient_bytes)}; give one "
            f"for each layer"
        )
    fitting = [
        j
        for j in range(layers + 1)
        if forward_bytes - sum(output_gradient_bytes[j:]) + sum(weight_gradient_bytes[:j]) < limit
    ]
    return max(fitting, default=0)


def best_reverse_first_k(layers: int, throughput: Callable[[int], float]) -> int:
    """Return the k of the highest throughput, taken to be a concave function of k (section 5.1).

    The paper's search: from k = 0 in steps of dk = L/10 while k < L; then, for the best k, within (k - dk, k + dk) with
    dk halved; and so on until dk is 1. Of equal ones the smallest k wins.

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
