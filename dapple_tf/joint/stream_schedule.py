"""The policy `joint`: a device's tasks on a main stream (F, Bx) and a sub-stream (Bw), tied together by regions.

Out-Of-Order BackProp, EuroSys'22, section 4.1. The main stream runs one micro-batch after another, forward and
backward; the sub-stream is `Plan.weight_devices`. ``weight_regions`` (from algorithm 1, `joint_scheduling`) names for
each stage the stage with whose Bx its Bw may start at the earliest::

    weight_regions (0, 0, 0)    0: 0F0 1F0 2F0 2Bx0 1Bx0 0Bx0
                                1: 2Bw0>1Bx0 1Bw0 0Bw0

A region begins when the main-stream task before its first one has ended: its Bw wait for that. Within a region Bw
run in the order in which they become ready. A Bw that doesn't fit beside the backward continues beside the next
micro-batch's forward: two micro-batches may be in flight in a stage, or fewer if K or D are lower.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.schedules.one_forward_one_backward import sequence
from dapple_tf.schedules.policy import Planning, Policy
from dapple_tf.schedules.schedule_request import Active, Job, Orders, ScheduleError, ScheduleRequest
from dapple_tf.units import counted
from graph_passes.ir.tasks import Phase, Task

_IN_FLIGHT = 2
"""Micro-batches in flight: one in the main stream, one whose Bw are being finished."""


def joint(request: ScheduleRequest) -> Orders:
    """Orders both streams.

    joint, [[0], [0]], weight_devices [[1], [1]], 2 micro-batches
    0: 0F0 1F0 1Bx0 0Bx0 0F1 1F1 1Bx1 0Bx1
    1: 1Bw0 0Bw0 1Bw1 0Bw1
    """
    stages = range(request.stages)
    main = sequence(request.micro_batches, stages, 1, stages, stages)
    starts = [_starts_after(request, stage) for stage in stages]
    order = sorted(stages, key=lambda stage: (-starts[stage], -stage))
    sub = [
        Job(stage, Phase.WEIGHT_GRAD, micro_batch) for micro_batch in range(request.micro_batches) for stage in order
    ]
    mains = {device: list(main) for device in request.devices[0]}
    return mains | {device: list(sub) for device in request.weight_devices[0]}


def _waits(request: ScheduleRequest, active: Active | None) -> dict[Task, Task]:
    """Returns what tasks wait for besides their data: Bw for their region, F for room."""
    waits = {}
    for stage in range(request.stages):
        limit = request.limit(stage, _IN_FLIGHT)
        after = _starts_after(request, stage)
        for replica in range(len(request.devices[stage])):
            every = range(request.micro_batches)
            numbers = [number for number in every if active is None or active(stage, number, replica)]
            for number, earlier in zip(numbers[limit:], numbers, strict=False):
                waits[Task(stage, Phase.FORWARD, number, replica)] = Task(stage, Phase.WEIGHT_GRAD, earlier, replica)
            if after != stage:
                for number in numbers:
                    waits[Task(stage, Phase.WEIGHT_GRAD, number, replica)] = Task(
                        after, Phase.INPUT_GRAD, number, replica
                    )
    return waits


def _check(request: ScheduleRequest) -> None:
    """Checks that there is one main stream and one sub-stream for each replica, and a region for each Bw."""
    if request.weight_regions is not None:
        _check_regions(request.weight_regions, request.stages)
    mains = request.devices[0]
    for stage in range(request.stages):
        if request.devices[stage] != mains:
            raise ScheduleError(
                f"joint schedules the two streams of one device, but stage 0 is on devices {list(mains)} and stage "
                f"{stage} on {list(request.devices[stage])}; give all stages the same devices, or use fast_forward"
            )
        subs = request.weight_devices[stage]
        shared = sorted({*mains} & {*subs})
        if shared:
            raise ScheduleError(
                f"joint runs Bw on a sub-stream, but device {shared[0]} stands in the devices and in the "
                f"weight_devices of stage {stage}; give each device another for its Bw, as "
                f"Cluster.with_sub_streams makes them"
            )
        if subs != request.weight_devices[0]:
            raise ScheduleError(
                f"joint has one sub-stream for each device, but weight_devices of stage 0 are "
                f"{list(request.weight_devices[0])} and of stage {stage} {list(subs)}; give all stages the same"
            )


def _check_regions(weight_regions: Sequence[int], stages: int) -> None:
    """Checks that each stage's Bw has a region that doesn't begin before its Bx."""
    if len(weight_regions) != stages:
        raise ScheduleError(
            f"weight_regions has {len(weight_regions)} entries for {counted(stages, 'stage')}; give one for each"
        )
    for stage, region in enumerate(weight_regions):
        if not 0 <= region <= stage:
            what = (
                f"the Bx of stage {region} runs before that of stage {stage}"
                if 0 <= region < stages
                else "there is no such stage"
            )
            raise ScheduleError(
                f"weight_regions puts the Bw of stage {stage} beside the Bx of stage {region}, but {what}; give a "
                f"stage from 0 to {stage}"
            )


def _starts_after(request: ScheduleRequest, stage: int) -> int:
    """Returns the stage whose Bx ends when the Bw of ``stage`` may start: its own, or the one before its region."""
    regions = request.weight_regions
    return stage if regions is None else min(stage, regions[stage] + 1)


JOINT = Policy(
    "joint",
    joint,
    "a main stream (F, Bx) and a sub-stream (Bw) on one device",
    check=_check,
    waits=_waits,
    splits=True,
    offloads=True,
    regions=True,
    planning=Planning(placements=()),
    source="dapple_tf.joint:JOINT",
)
