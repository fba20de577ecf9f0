"""Multi-region joint scheduling (Out-Of-Order BackProp, EuroSys'22, section 4.1 and algorithm 1).

A device has a main stream, which runs forwards and output gradients (F, Bx) in their usual order, and a sub-stream,
which runs weight gradients (Bw) and updates. The backward's Bx are split into regions; each Bw goes into the region
whose kernels it overlaps with most profitably, not before the region in which its own Bx ends.

In the paper an iteration starts at the backward, so that Bw may also run beside the next iteration's forward. A step
here is synchronous: it ends with the update, and only the regions of its own backward can hold Bw.

All functions are pure. Regions are numbered from 0 in the order in which they run, kernels of the sub-stream by their
stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dapple_tf.view.timeline import Span, Timeline

Pairs = Callable[[int, int], float]
"""(kernel of the sub-stream, region) -> a number of the two together."""


class Ready(NamedTuple):
    """When a kernel of the sub-stream becomes runnable: ``offset`` seconds after a region began."""

    region: int
    offset: float = 0.0


def joint_schedule(
    main_seconds: Sequence[float], sub_seconds: Pairs, speedup: Pairs, ready: Mapping[int, Ready]
) -> tuple[tuple[int, ...], ...]:
    """Schedules the sub-stream's kernels in the main stream's regions: algorithm 1.

        1  S[i] = [], now[i] = 0 for i = 1..N
        2  U = {dW_2..dW_L}; C = {R[1]..R[N]}
        3  while U is not empty
        4      foreach region R[i] in C
        5          find dW_k runnable at now[i] with max speedup p in R[i]
        6          tmp[i] = (dW_k, p)
        7      j = argmax_i tmp[i][2]
        8      (dW_K, P) = tmp[j]
        9      S[j].append(dW_K); U.remove(dW_K)
       10      now[j] += T_sub(dW_K, R[j])
       11      if now[j] >= T_main(R[j]) then C.remove(R[j])
       12  return S[1..N]

    What the paper leaves open: among equal speedups the earliest region wins, and in it the kernel that was ready
    first. A region in which nothing is runnable yet is skipped; if all are, the sub-stream idles until the next kernel
    is ready within a region. Kernels left when no region has time run after the last one, in the order in which they
    became ready.

    Args:
        main_seconds: T_main of each region: seconds of its main-stream kernels together.
        sub_seconds: T_sub(k, i): seconds of kernel k in region i.
        speedup: of running k at the same time as region i's kernels, over one after the other.
        ready: when each kernel becomes runnable: the end of its own Bx.

    Returns:
        S: for each region its kernels in the order in which they run.

    Raises:
        ValueError: there are no regions, or a kernel becomes runnable in one that doesn't exist.
    """
    count = len(main_seconds)
    if not count:
        raise ValueError("there are no regions to schedule in; give at least one")
    for kernel, when in ready.items():
        if not 0 <= when.region < count:
            raise ValueError(
                f"kernel {kernel} becomes runnable in region {when.region}, but regions are 0 to {count - 1}"
            )
    schedule: list[list[int]] = [[] for _ in range(count)]
    now = [0.0] * count
    unscheduled = sorted(ready, key=lambda kernel: ready[kernel])
    open_regions = list(range(count))
    while unscheduled:
        best: dict[int, tuple[int, float]] = {}
        for i in open_regions:
            runnable = [kernel for kernel in unscheduled if ready[kernel] <= Ready(i, now[i])]
            if runnable:
                kernel = max(runnable, key=lambda kernel: speedup(kernel, i))
                best[i] = (kernel, speedup(kernel, i))
        if not best:
            ahead = [ready[kernel] for kernel in unscheduled if ready[kernel].region in open_regions]
            if not ahead:
                break
            region, offset = ahead[0]
            now[region] = offset
            if offset >= main_seconds[region]:
                open_regions.remove(region)
            continue
        j = max(best, key=lambda i: best[i][1])
        kernel, _ = best[j]
        schedule[j].append(kernel)
        unscheduled.remove(kernel)
        now[j] += sub_seconds(kernel, j)
        if now[j] >= main_seconds[j]:
            open_regions.remove(j)
    schedule[-1] += unscheduled
    return tuple(map(tuple, schedule))


@dataclass(frozen=True)
class StreamTimes:
    """Times of stages' tasks on two streams.

    Attributes:
        input_grad: seconds of each stage's Bx by itself; 0 where there is nothing to compute.
        weight_grad: seconds of each stage's Bw by itself; 0 where there is nothing to compute.
        beside: (k, r) -> seconds of stage k's Bw while stage r's Bx runs; a missing pair counts as Bw by itself.
        speedup: (k, r) -> how much faster stage k's Bw and stage r's Bx are at the same time than one after the other;
            a missing pair counts as 1.

    Raises:
        ValueError: the lists have different lengths, or a pair names a stage that doesn't exist.
    """

    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    beside: Mapping[tuple[int, int], float] = field(default_factory=dict)
    speedup: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.input_grad) != len(self.weight_grad):
            raise ValueError(
                f"there are {len(self.input_grad)} times of Bx and {len(self.weight_grad)} of Bw; give one of each for "
                f"each stage"
            )
        for pair in (*self.beside, *self.speedup):
            if not all(0 <= stage < self.stages for stage in pair):
                raise ValueError(f"stages {pair} are a pair, but there are {self.stages} stages, from 0 on")

    @property
    def stages(self) -> int:
        """L, the number of stages."""
        return len(self.input_grad)

    def sub_seconds(self, kernel: int, region: Sequence[int]) -> float:
        """Returns T_sub: seconds of a stage's Bw in a region, the mean over its Bx weighted by their times."""
        return self._mean(region, [self.beside.get((kernel, stage), self.weight_grad[kernel]) for stage in region])

    def region_speedup(self, kernel: int, region: Sequence[int]) -> float:
        """Returns the speedup of a stage's Bw in a region, averaged likewise."""
        return self._mean(region, [self.speedup.get((kernel, stage), 1.0) for stage in region])

    def _mean(self, region: Sequence[int], values: Sequence[float]) -> float:
        weights = [self.input_grad[stage] for stage in region]
        if not sum(weights):
            weights = [1.0] * len(values)
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


Regions = Sequence[Sequence[int]]
"""For each region the stages whose Bx it has, in the order in which they run: descending."""


def stage_regions(stages: int) -> tuple[tuple[int, ...], ...]:
    """Returns a region for each stage's Bx, the last stage's first."""
    return tuple((stage,) for stage in reversed(range(stages)))


def check_regions(regions: Regions, stages: int) -> None:
    """Checks that the regions are runs of all stages, the last stage first.

    Raises:
        ValueError: naming the region that isn't.
    """
    expected = stages - 1
    for number, region in enumerate(regions):
        if not region:
            raise ValueError(f"region {number} has no stages; leave it out")
        for stage in region:
            if stage != expected:
                raise ValueError(
                    f"region {number} is {list(region)}, where stage {expected} should come next; regions run through "
                    f"all stages from {stages - 1} down to 0"
                )
            expected -= 1
    if expected >= 0:
        raise ValueError(
            f"regions end at stage {expected + 1}; they run through all stages from {stages - 1} down to 0"
        )


def readiness(times: StreamTimes, regions: Regions) -> dict[int, Ready]:
    """Returns when each stage's Bw becomes runnable: when its Bx ends; stages without a Bw are left out."""
    ready = {}
    for number, region in enumerate(regions):
        ends = itertools.accumulate(times.input_grad[stage] for stage in region)
        for stage, end in zip(region, ends, strict=True):
            last = stage == region[-1] and number + 1 < len(regions)
            if times.weight_grad[stage] > 0:
                ready[stage] = Ready(number + 1) if last else Ready(number, end)
    return ready


def schedule_regions(times: StreamTimes, regions: Regions, prescheduled: int = 0) -> tuple[tuple[int, ...], ...]:
    """Runs algorithm 1 for stages, after ``prescheduled`` regions in which Bw run as soon as they are ready.

    Section 4.1: "we pre-schedule for k regions at the beginning of the backpropagation; in the k regions, we schedule
    the weight gradient computations as soon as they are ready [...]. Then we re-run Algorithm 1 for the remaining
    regions".

    Raises:
        ValueError: regions that aren't runs of all stages, or more of them prescheduled than there are.
    """
    check_regions(regions, times.stages)
    if not 0 <= prescheduled <= len(regions):
        raise ValueError(f"prescheduled is {prescheduled}; with {len(regions)} regions it must be 0 to {len(regions)}")
    ready = readiness(times, regions)
    early = sorted((kernel for kernel, when in ready.items() if when.region < prescheduled), key=lambda k: ready[k])
    first = [tuple(kernel for kernel in early if ready[kernel].region == region) for region in range(prescheduled)]
    rest = {
        kernel: Ready(when.region - prescheduled, when.offset)
        for kernel, when in ready.items()
        if when.region >= prescheduled
    }
    if prescheduled == len(regions):
        return tuple(first)
    left = list(regions[prescheduled:])
    return (
        *first,
        *joint_schedule(
            [sum(times.input_grad[stage] for stage in region) for region in left],
            lambda kernel, i: times.sub_seconds(kernel, left[i]),
            lambda kernel, i: times.region_speedup(kernel, left[i]),
            rest,
        ),
    )


def two_streams(times: StreamTimes, regions: Regions, schedule: Sequence[Sequence[int]]) -> Timeline:
    """Simulates a backward on two streams: device 0 is the main stream, device 1 the sub-stream.

    The main stream runs without gaps. The sub-stream runs in the schedule's order, no Bw before its region or its Bx.

    Args:
        times: seconds of tasks.
        regions: runs of stages.
        schedule: for each region its Bw.
    """
    order = [stage for region in regions for stage in region]
    ends = dict(zip(order, itertools.accumulate(times.input_grad[stage] for stage in order), strict=True))
    spans = [Span("Bx", ends[stage] - times.input_grad[stage], ends[stage], 0, stage, 0) for stage in order]
    now = 0.0
    for region, kernels in zip(regions, schedule, strict=True):
        now = max(now, ends[region[0]] - times.input_grad[region[0]])
        for kernel in kernels:
            start = max(now, ends[kernel])
            now = start + times.sub_seconds(kernel, region)
            spans.append(Span("Bw", start, now, 1, kernel, 0))
    latency = max((span.end for span in spans), default=0.0)
    return Timeline("simulated", latency, tuple(spans), {0: "main stream", 1: "sub-stream"})


def peak_bytes(
    times: StreamTimes,
    regions: Regions,
    schedule: Sequence[Sequence[int]],
    residual_bytes: Sequence[float],
    delayed_bytes: Sequence[float],
) -> float:
    """Returns the most bytes that one micro-batch keeps during its backward in `two_streams`.

    A stage keeps its residuals until its Bx has run, then the inputs of its Bw until that has run.

    Args:
        times: seconds of tasks.
        regions: runs of stages.
        schedule: for each region its Bw.
        residual_bytes: what each stage keeps from F to Bx.
        delayed_bytes: what each stage keeps from Bx to Bw.
    """
    spans = two_streams(times, regions, schedule).spans
    finished = {span.stage: span.end for span in spans if span.kind == "Bw"}
    peak = 0.0
    order = [span for span in spans if span.kind == "Bx"]
    for place, own in enumerate(order):
        kept = max(residual_bytes[own.stage], delayed_bytes[own.stage])
        kept += sum(residual_bytes[later.stage] for later in order[place + 1 :])
        kept += sum(delayed_bytes[k.stage] for k in order[:place] if finished.get(k.stage, 0.0) > own.start)
        peak = max(peak, kept)
    return peak


@dataclass(frozen=True)
class Fitted:
    """A schedule of the sub-stream under a memory limit.

    Attributes:
        schedule: for each region its Bw.
        prescheduled: k, the number of regions at the beginning in which Bw run as soon as they are ready.
        peak: bytes that a micro-batch keeps at most.
    """

    schedule: tuple[tuple[int, ...], ...]
    prescheduled: int
    peak: float


def fit_memory(
    times: StreamTimes,
    regions: Regions,
    residual_bytes: Sequence[float],
    delayed_bytes: Sequence[float],
    limit: float | None,
) -> Fitted:
    """Runs algorithm 1 under the memory rule of section 4.1: pre-schedules k regions, with k growing until it fits.

    Args:
        times: what tasks take.
        regions: runs of stages.
        residual_bytes: what each stage keeps from F to Bx.
        delayed_bytes: what each stage keeps from Bx to Bw.
        limit: bytes that a micro-batch may keep; None for no limit.

    Returns:
        The fitting schedule with the least k; if none fits, the one with all regions prescheduled, whose ``peak`` is
        above the limit.
    """
    fitted = []
    for k in range(len(regions) + 1):
        schedule = schedule_regions(times, regions, k)
        fitted.append(Fitted(schedule, k, peak_bytes(times, regions, schedule, residual_bytes, delayed_bytes)))
        if limit is None or fitted[-1].peak <= limit:
            break
    return fitted[-1]
