"""List scheduling: simulated devices each take the best of their ready jobs.

Event-driven: whenever a job ends, every idle device looks at the heads of its queues and starts the ready one that
comes first by a key; a device never idles while one of its jobs is ready. The order in which each device took its
jobs is the schedule. The simulated run proves that it can't deadlock, whatever the real times are.

A micro-batch is in flight in a stage from its F to its B or Bw. F waits while its stage is at its limit. This can't
deadlock as long as a stage's forwards run in micro-batch order: no older micro-batch blocks the oldest unfinished one.
Under a limit for all stages of a device together (``room``) F waits unless the micro-batches on its device could still
finish one after another, the oldest first (banker's algorithm).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleError, ScheduleRequest
from graph_passes.ir.tasks import Phase, inputs

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD

_TOLERANCE = 1e-9
"""Ends that differ by less than this, relative to the time, are one moment: sums of equal times differ by rounding."""


Key = Callable[[Job, float], tuple[float, ...]]
"""(job, when it became ready) -> its key; a device takes the job with the least."""


@dataclass(frozen=True)
class Timeline:
    """What a simulated run saw.

    Attributes:
        orders: device -> its jobs in the order it took them.
        makespan: when the last job ended.
        spans: device -> when its first job began and its last ended; devices without jobs are left out.
    """

    orders: Orders
    makespan: float
    spans: Mapping[int, tuple[float, float]]

    @property
    def longest_span(self) -> float:
        """The longest time from a device's first job to its last one's end."""
        return max(end - start for start, end in self.spans.values())


def run(
    request: ScheduleRequest,
    queues: Mapping[int, Sequence[Sequence[Job]]],
    key: Key,
    *,
    limits: Sequence[int] | None = None,
    room: Mapping[int, int] | None = None,
) -> Timeline:
    """Runs all jobs of ``queues`` and returns their timeline.

    Args:
        request: the devices of stages, and the times of jobs.
        queues: device -> its queues; only the first unstarted job of each may start. A job is in one queue of each
            device that runs it.
        key: a device takes the ready job with the least key.
        limits: for each stage, the most micro-batches in flight; None is no limit.
        room: device -> the most micro-batches in flight, summed over its stages.

    Raises:
        ScheduleError: some jobs can't start, because of the order in their queues or a missing job.
    """
    return _Run(request, queues, key, limits, room or {}).run()


def replay(request: ScheduleRequest, orders: Orders) -> Timeline:
    """Runs the jobs of each device in a given order."""
    return run(request, {device: [jobs] for device, jobs in orders.items()}, lambda job, ready: ())


def keeps_within(request: ScheduleRequest, orders: Orders, room: Mapping[int, int] | None = None) -> bool:
    """Returns whether orders keep to K, D and the devices' room; without ``room`` only to K and D."""
    if room is None and request.holds is None and request.warm_up is None:
        return True
    for device, jobs in orders.items():
        counts: dict[int, int] = {}
        for job in jobs:
            if job.phase is not BX:
                counts[job.stage] = counts.get(job.stage, 0) + (1 if job.phase is F else -1)
            if counts.get(job.stage, 0) > request.limit(job.stage, request.micro_batches):
                return False
            if sum(counts.values()) > (room or {}).get(device, len(jobs)):
                return False
    return True


def best(runs: Sequence[Timeline]) -> Timeline:
    """Returns the run with the shortest step; ties go to the shortest `Timeline.longest_span`, then to the first."""
    return min(runs, key=lambda run: (round(run.makespan, 9), round(run.longest_span, 9)))


def merged_devices(request: ScheduleRequest) -> dict[int, int]:
    """Maps each device to the first with the same stages, so that one replica stands for all."""
    first: dict[tuple[int, ...], int] = {}
    return {device: first.setdefault(tuple(stages), device) for device, stages in sorted(request.stages_of.items())}


class _Run:
    def __init__(
        self,
        request: ScheduleRequest,
        queues: Mapping[int, Sequence[Sequence[Job]]],
        key: Key,
        limits: Sequence[int] | None,
        room: Mapping[int, int],
    ) -> None:
        self.request, self.key, self.limits, self.room = request, key, limits, room
        self.merged = merged_devices(request)
        self.devices = [device for device in sorted(queues) if self.merged.get(device, device) == device]
        self.queues = {device: [list(queue) for queue in queues[device]] for device in self.devices}
        self.heads = {device: [0] * len(self.queues[device]) for device in self.devices}
        self.mains = [{self.merged[device] for device in replicas} for replicas in request.devices]
        self.ended: dict[tuple[Job, int], float] = {}
        self.left: dict[Job, int] = {}  # job -> the devices that haven't run it yet
        self.in_flight: dict[tuple[int, int], int] = {}
        self.orders: Orders = {device: [] for device in self.devices}
        self.spans: dict[int, tuple[float, float]] = {}
        for device in self.devices:
            for queue in self.queues[device]:
                for job in queue:
                    self.left[job] = self.left.get(job, 0) + 1
        self._count_room()
        # Device -> queues whose first unstarted job has all of its inputs -> its key and the number of the queue.
        self.ready: dict[int, dict[int, tuple[tuple[float, ...], int]]] = {device: {} for device in self.devices}
        # What must end before the first job of a queue has its inputs: a job on a device, or on all (None) -> queues.
        self.waiting: dict[tuple[Job, int | None], list[tuple[int, int]]] = {}
        for device in self.devices:
            for index in range(len(self.queues[device])):
                self._look(device, index)

    def run(self) -> Timeline:
        """Runs until nothing can start any more."""
        ends: list[tuple[float, int, Job]] = []
        idle = set(self.devices)
        now = 0.0
        while True:
            for device in sorted(idle):
                index = self._choose(device)
                if index is None:
                    continue
                job = self._start(device, index)
                end = now + self.request.duration(job)
                self.spans[device] = (self.spans.get(device, (now, end))[0], end)
                heapq.heappush(ends, (end, device, job))
                idle.discard(device)
            if not ends:
                break
            now = ends[0][0]
            moment = now + _TOLERANCE * abs(now)
            while ends and ends[0][0] <= moment:
                end, device, job = heapq.heappop(ends)
                now = max(now, end)
                self._end(device, job, end)
                idle.add(device)
        self._check_all_ran()
        orders = {device: list(self.orders[first]) for device, first in self.merged.items() if first in self.orders}
        spans = {device: self.spans[first] for device, first in self.merged.items() if first in self.spans}
        return Timeline(orders, max((end for _, end in self.spans.values()), default=0.0), spans)

    def _choose(self, device: int) -> int | None:
        best: tuple[tuple[float, ...], int] | None = None
        for index, choice in self.ready[device].items():
            if best is None or choice < best:
                job = self.queues[device][index][self.heads[device][index]]
                if job.phase is not F or self._fits(device, job):
                    best = choice
        return None if best is None else best[1]

    def _look(self, device: int, index: int) -> None:
        """Notes a queue's first unstarted job as ready, or its missing inputs, without limits in flight."""
        head, queue = self.heads[device][index], self.queues[device][index]
        if head == len(queue):
            return
        job = queue[head]
        ready = 0.0
        for stage, phase in inputs(job.stage, job.phase):
            before = Job(stage, phase, job.micro_batch)
            own = stage == job.stage
            left = (before, device) not in self.ended if own else self.left.get(before)
            if left:
                self.waiting.setdefault((before, device if own else None), []).append((device, index))
                return
            if left is not None:
                devices = (device,) if own else self.mains[stage]
                ready = max([ready, *(self.ended[before, other] for other in devices)])
        self.ready[device][index] = (self.key(job, ready), index)

    def _fits(self, device: int, job: Job) -> bool:
        if self.limits is not None and self.in_flight.get((job.stage, device), 0) >= self.limits[job.stage]:
            return False
        if device not in self.room:
            return True
        held, ahead = self.held[device], self.ahead[device]
        free = self.room[device] - sum(held.values()) - 1
        for micro_batch in range(self.oldest[device], max([job.micro_batch, *held]) + 1):
            mine = micro_batch == job.micro_batch
            if ahead[micro_batch] - mine > free:
                return False
            free += held.get(micro_batch, 0) + mine
        return True

    def _start(self, device: int, index: int) -> Job:
        job = self.queues[device][index][self.heads[device][index]]
        self.heads[device][index] += 1
        del self.ready[device][index]
        self._look(device, index)
        self.orders[device].append(job)
        if job.phase is F:
            self.in_flight[job.stage, device] = self.in_flight.get((job.stage, device), 0) + 1
            self.ahead[device][job.micro_batch] -= 1
            held = self.held[device]
            held[job.micro_batch] = held.get(job.micro_batch, 0) + 1
        return job

    def _end(self, device: int, job: Job, end: float) -> None:
        self.ended[job, device] = end
        self.left[job] -= 1
        if job.phase in (B, BW):
            self.in_flight[job.stage, device] -= 1
            held = self.held[device]
            held[job.micro_batch] -= 1
            if not held[job.micro_batch]:
                del held[job.micro_batch]
            while self.oldest[device] not in held and self.ahead[device].get(self.oldest[device]) == 0:
                self.oldest[device] += 1
        ended = [(job, device)] if self.left[job] else [(job, device), (job, None)]
        for event in ended:
            for waiting in self.waiting.pop(event, ()):
                self._look(*waiting)

    def _count_room(self) -> None:
        """Counts each micro-batch's stages in flight and not begun on each device."""
        self.held: dict[int, dict[int, int]] = {device: {} for device in self.devices}
        self.ahead: dict[int, dict[int, int]] = {device: {} for device in self.devices}
        self.oldest = dict.fromkeys(self.devices, 0)
        for device in self.devices:
            ahead = self.ahead[device]
            for queue in self.queues[device]:
                for job in queue:
                    if job.phase is F:
                        ahead[job.micro_batch] = ahead.get(job.micro_batch, 0) + 1

    def _check_all_ran(self) -> None:
        stuck = [
            f"device {device} before {job.stage}{job.phase.value}{job.micro_batch}"
            for device in self.devices
            for queue, head in zip(self.queues[device], self.heads[device], strict=True)
            if head < len(queue)
            for job in queue[head : head + 1]
        ]
        if stuck:
            ran = sum(map(len, self.orders.values()))
            raise ScheduleError(
                f"{self.request.policy} deadlocks after {ran} jobs: {', '.join(stuck)}; run forwards of a stage in "
                f"micro-batch order, or allow more micro-batches in flight"
            )


def free_queues(request: ScheduleRequest, split: bool = True) -> dict[int, list[list[Job]]]:
    """Returns each device's queues: one for each phase of each of its stages, in micro-batch order."""
    queues: dict[int, list[list[Job]]] = {}
    for stage in range(request.stages):
        for phase in (F, BX, BW) if split else (F, B):
            queue = [Job(stage, phase, micro_batch) for micro_batch in range(request.micro_batches)]
            for device in request.devices[stage]:
                queues.setdefault(device, []).append(queue)
    return queues


# ---- keys: which of its ready jobs a device takes first


def fill_gaps(job: Job, ready: float) -> tuple[float, ...]:
    """Ranks weight gradients last; among them the one that became ready first."""
    return (1.0, ready) if job.phase is BW else (0.0, 0.0)


def critical_path_first(request: ScheduleRequest) -> Key:
    """Ranks by the longest remaining work; ties go to the earlier micro-batch, then to the earlier stage."""
    remaining = critical_path(request)
    return lambda job, ready: (-remaining(job), job.micro_batch, job.stage)


def oldest_first(request: ScheduleRequest) -> Key:
    """Ranks weight gradients last and the oldest micro-batch first; within it, the longest remaining work."""
    remaining = critical_path(request)
    return lambda job, ready: (float(job.phase is BW), job.micro_batch, -remaining(job))


def deepest_first(request: ScheduleRequest) -> Key:
    """Ranks weight gradients last, forwards before them; within a phase, the job nearest to the step's end."""
    remaining = critical_path(request)
    order = (BX, F, BW)
    return lambda job, ready: (order.index(job.phase), remaining(job), job.micro_batch)


def critical_path(request: ScheduleRequest) -> Callable[[Job], float]:
    """Returns the longest time from a job's start to the step's end, by `ScheduleRequest.duration`.

    The classic priority of list scheduling; all backwards are Bx and Bw.
    """
    lengths: dict[tuple[int, Phase], float] = defaultdict(float)
    last_first = [(stage, phase) for stage in range(request.stages) for phase in (BW, BX)]
    last_first += [(stage, F) for stage in reversed(range(request.stages))]
    for stage, phase in last_first:
        lengths[stage, phase] += request.duration(Job(stage, phase, 0))
        for before in inputs(stage, phase):
            lengths[before] = max(lengths[before], lengths[stage, phase])
    return lambda job: lengths[job.stage, job.phase]


# ---- runs by several keys


def free_runs(
    request: ScheduleRequest,
    room: Mapping[int, int] | None = None,
    keys: Sequence[Callable[[ScheduleRequest], Key]] = (oldest_first, deepest_first),
) -> list[Timeline]:
    """Runs all jobs by each of some keys, in any order that K and D allow.

    Args:
        request: the devices of stages, the times of jobs, and the limits.
        room: device -> the most micro-batches in flight, summed over its stages.
        keys: makes each key.
    """
    limits = [request.limit(stage, request.micro_batches) for stage in range(request.stages)]
    queues = free_queues(request)
    return [run(request, queues, key(request), limits=limits, room=room) for key in keys]
