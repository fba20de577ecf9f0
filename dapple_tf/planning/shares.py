"""Shares of replicas on unlike devices: slices in proportion to their speed, as far as their memory allows."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.device_memory import device_need
from graph_passes.ir.batching import split_by_shares

_STEPS = 64
"""Number of parts of a device's slices in which they are lowered where memory is short."""


def with_shares(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """Returns the plan with the shares with which the slowest replica of each stage is as early as possible.

    A replica's time is that of F and B of its slice, by the profile and the speed of its device. No device gets more
    than its memory holds with the K micro-batches in flight of the plan, or, if that isn't possible, with one; the plan
    then has no K of its own (`Plan.warm_up`). Stages of like devices have equal shares, and so has the whole plan if no
    other shares fit.

    Args:
        plan: the plan; its own shares don't count.
        profile: its layers' costs.
        cluster: the devices.

    Raises:
        PlanError: the plan doesn't suit the profile or the cluster.
    """
    shares, warm_up = None, plan.warm_up
    if not cluster.alike and not plan.places_operators and max(plan.replicas) > 1:
        costs = CostModel(plan, profile, cluster)
        shares = _Split(costs, plan.warm_up_counts()).shares()
        if shares is None:
            shares, warm_up = _Split(costs, (1,) * plan.num_stages).shares(), None
    if shares is None and not any(stage.shares for stage in plan.stages):
        return plan
    shared = plan.with_options(shares=shares, warm_up=warm_up)
    return plan if shared == plan else shared


def best_split(
    samples: int, seconds: Sequence[Callable[[int], float]], most: Sequence[int] | None = None
) -> tuple[int, ...] | None:
    """Splits samples so that the last of some workers is as early as possible; None if ``most`` doesn't allow any.

    Args:
        samples: number of samples, at least one for each worker.
        seconds: for each worker, samples -> its seconds, which more samples never make fewer.
        most: the most samples of each worker; None for no limit.
    """
    limits = [samples] * len(seconds) if most is None else most
    if samples < len(seconds) or min(limits) < 1 or sum(limits) < samples:
        return None
    sizes = [1] * len(seconds)
    # The next sample goes where it is over first: no other split ends earlier.
    queue = [(own(2), worker) for worker, own in enumerate(seconds) if limits[worker] > 1]
    heapq.heapify(queue)
    for _ in range(samples - len(seconds)):
        _, worker = heapq.heappop(queue)
        sizes[worker] += 1
        if sizes[worker] < limits[worker]:
            heapq.heappush(queue, (seconds[worker](sizes[worker] + 1), worker))
    return tuple(sizes)


class _Split:
    """The best splits of all stages of a plan, with some micro-batches in flight."""

    def __init__(self, costs: CostModel, in_flight: Sequence[int]) -> None:
        self.costs, self.in_flight = costs, in_flight
        # Shares are a split of the smallest micro-batch, so that every replica gets a sample of each; the largest one
        # gives at most one sample more to some replica, for which memory must suffice.
        sizes = [part.size for part in costs.micro_batches]
        self.samples, self.more = min(sizes), max(sizes) - min(sizes)
        self.most = [[self.samples] * len(devices) for devices in costs.plan.devices]

    def shares(self) -> tuple[tuple[int, ...], ...] | None:
        """Returns the shares; None if none fits."""
        while True:
            splits = []
            for stage in range(len(self.costs.stages)):
                split = self._stage(stage)
                if split is None:
                    return None
                splits.append(split)
            if not self._lowered(splits):
                return tuple(splits)

    def _stage(self, stage: int) -> tuple[int, ...] | None:
        costs, devices = self.costs, self.costs.plan.devices[stage]
        known = [costs.cluster.devices[device] for device in devices]
        if len({device.speed for device in known}) == 1 and min(self.most[stage]) * len(devices) >= self.samples:
            return (1,) * len(devices)
        cost = costs.stages[stage].forward + costs.stages[stage].backward
        start = 2 * costs.profile.task_seconds

        def seconds(speed: float) -> Callable[[int], float]:
            return lambda samples: (start + cost.at(costs.profile.timed_samples(samples))) / speed

        return best_split(self.samples, [seconds(device.speed) for device in known], self.most[stage])

    def _lowered(self, splits: Sequence[tuple[int, ...]]) -> bool:
        """Lowers the limits of devices whose memory is short; returns whether there were any."""
        costs, plan, short = self.costs, self.costs.plan, False
        sizes = [split_by_shares(costs.micro_batches[0].size, split) for split in splits]
        places: dict[int, list[tuple[int, int]]] = {}
        for stage, devices in enumerate(plan.devices):
            for replica, device in enumerate(devices):
                places.setdefault(device, []).append((stage, replica))
        fitting: dict[tuple[object, ...], int] = {}
        for device, own in places.items():
            limit = costs.cluster.devices[device].memory_bytes
            if limit is None:
                continue
            slices = {stage: max(sizes[stage][replica] for s, replica in own if s == stage) for stage, _ in own}
            key = (limit, tuple(slices.items()), costs.cluster.devices[device].speed)
            if key not in fitting:
                fitting[key] = self._fitting(slices, limit)
            if fitting[key] < _STEPS:
                short = True
                for stage, replica in own:
                    size = min(sizes[stage][replica] - 1, sizes[stage][replica] * fitting[key] // _STEPS)
                    self.most[stage][replica] = max(0, size - bool(self.more))
        return short

    def _fitting(self, slices: dict[int, int], limit: int) -> int:
        """Returns the largest fraction of a device's slices that fits in its memory, in parts of `_STEPS`."""
        in_flight = max(self.in_flight[stage] for stage in slices)

        def fits(part: int) -> bool:
            lowered = {stage: max(1, size * part // _STEPS) for stage, size in slices.items()}
            return device_need(self.costs, lowered).peak(in_flight) <= limit

        return _STEPS if fits(_STEPS) else bisect.bisect_left(range(1, _STEPS), True, key=lambda part: not fits(part))
