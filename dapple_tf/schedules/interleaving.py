"""Interleaved 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).

Stage i is on device i mod p, so that each device has v stages ("model chunks"); a micro-batch passes each device v
times. A device's jobs come in rounds of p micro-batches: F of its first stage for all of them, then of its second, and
so on; B in the same rounds, from the last stage to the first. Device r (from 0) runs ``2(p - r - 1) + (v - 1)p``
forwards before alternating one F and one B; with one stage per device it is 1F1B. The bubble is ``(p - 1)/(v M)`` of
the ideal time, v times smaller than that of 1F1B.

M should be a multiple of p. If it isn't, the ``M // p`` rounds have p micro-batches or slightly more, evenly.
"""

from __future__ import annotations

from dapple_tf.schedules import list_scheduling
from dapple_tf.schedules.policy import Placement, Planning, Policy
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleError, ScheduleRequest
from graph_passes.ir.batching import split_evenly
from graph_passes.ir.tasks import Phase


def interleaved(request: ScheduleRequest) -> Orders:
    """Orders an interleaved pipeline over groups of stages.

    Where K or D are too small for this order, devices take backwards first, then forwards in the order above, within
    the limits (list scheduling).

    Raises:
        ScheduleError: the groups' devices don't repeat with a period.
    """
    period = _period(request)
    chunks = len(request.groups) // period
    rounds = split_evenly(request.micro_batches, max(1, request.micro_batches // period))
    orders: Orders = {}
    for rank in range(period):
        groups = request.groups[rank::period]
        forwards = _passes(groups, rounds)
        backwards = _passes(groups[::-1], rounds)
        later = period - rank - 1
        ahead = min(2 * later + (chunks - 1) * max(rounds) if chunks > 1 else later, len(forwards))
        jobs = [Job(stage, Phase.FORWARD, number) for group, number in forwards[:ahead] for stage in group]
        for index, (group, number) in enumerate(backwards):
            if ahead + index < len(forwards):
                next_group, next_number = forwards[ahead + index]
                jobs += [Job(stage, Phase.FORWARD, next_number) for stage in next_group]
            jobs += [Job(stage, Phase.BACKWARD, number) for stage in reversed(group)]
        orders |= {device: list(jobs) for device in request.devices[groups[0][0]]}
    if list_scheduling.keeps_within(request, orders):
        return orders
    return _limited(request, {job: place for jobs in orders.values() for place, job in enumerate(jobs)})


def _check_periodic(request: ScheduleRequest) -> None:
    _period(request)


INTERLEAVED = Policy(
    "interleaved",
    interleaved,
    "Megatron's 1F1B with several stages on each device",
    check=_check_periodic,
    splits=False,
    reverses=False,
    planning=Planning((Placement.PERIODIC,), 45, by_seconds=True),
)


def _period(request: ScheduleRequest) -> int:
    """Returns the number of groups after which their devices repeat."""
    lists = [request.devices[group[0]] for group in request.groups]
    period = next((index for index in range(1, len(lists)) if lists[index] == lists[0]), len(lists))
    if len(lists) % period:
        raise ScheduleError(
            f"interleaved has {len(lists)} groups of stages on {period} lists of devices, which doesn't divide them; "
            f"use {len(lists) // period * period} or {(len(lists) // period + 1) * period}"
        )
    for index, devices in enumerate(lists):
        if devices != lists[index % period]:
            raise ScheduleError(
                f"interleaved wants devices that repeat every {period} stages, but stage {request.groups[index][0]} is "
                f"on {list(devices)} where stage {request.groups[index % period][0]} is on "
                f"{list(lists[index % period])}; use the same, such as [[0], [1], [0], [1]], or modulo"
            )
    group_of: dict[int, int] = {}
    for index, devices in enumerate(lists[:period]):
        for device in devices:
            if device in group_of:
                raise ScheduleError(
                    f"interleaved has device {device} in stages {request.groups[group_of[device]][0]} and "
                    f"{request.groups[index][0]}, which have different lists of devices; use the same list or other "
                    f"devices, or modulo"
                )
            group_of[device] = index
    return period


def _passes(groups: tuple[range, ...], rounds: tuple[int, ...]) -> list[tuple[range, int]]:
    """Returns (group, micro-batch) in the order of one device's forwards; for backwards ``groups`` is reversed."""
    passes, first = [], 0
    for size in rounds:
        passes += [(group, first + offset) for group in groups for offset in range(size)]
        first += size
    return passes


def _limited(request: ScheduleRequest, places: dict[Job, int]) -> Orders:
    limits = [request.limit(stage, request.micro_batches) for stage in range(request.stages)]

    def key(job: Job, ready: float) -> tuple[float, ...]:
        return (float(job.phase is Phase.FORWARD), places[job])

    queues = list_scheduling.free_queues(request, split=False)
    return list_scheduling.run(request, queues, key, limits=limits).orders
