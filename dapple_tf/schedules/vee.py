"""V-shaped pipelines, with stages i and 2p - 1 - i on one device: recognising them, and their parts.

    device   0  1  2  2  1  0
    stage    0  1  2  3  4  5     p = 3 positions

Consecutive stages with equal devices count as one, so that a position may have several on either way.
"""

from __future__ import annotations

import itertools

from dapple_tf.schedules.schedule_request import ScheduleError, ScheduleRequest


def is_vee(request: ScheduleRequest) -> bool:
    """Returns whether the second half of the stages goes back over the devices of the first."""
    lists = request.devices
    half = len(lists) // 2
    if len(lists) % 2 or len(request.groups) == 1 or lists != lists[::-1]:
        return False
    first = [devices for devices, _ in itertools.groupby(lists[:half])]
    return sum(map(len, first)) == len({device for devices in first for device in devices})


def check_vee(request: ScheduleRequest) -> None:
    """Checks that the devices are a V.

    Raises:
        ScheduleError: they aren't.
    """
    if not is_vee(request):
        raise ScheduleError(
            f"{request.policy} wants stages i and {request.stages} - 1 - i on the same devices, such as [[0], [1], "
            f"[1], [0]], and the first half on different ones, but the stages are on "
            f"{list(map(list, request.devices))}; use such a list, or zb_h1, zb_h2 or modulo"
        )


def ways(request: ScheduleRequest) -> list[range]:
    """Returns the stages of each of the 2p ways of a V: first there, position by position, then back."""
    half = request.stages // 2
    there = [list(stages) for _, stages in itertools.groupby(range(half), key=lambda stage: request.devices[stage])]
    spans = [(stages[0], stages[-1] + 1) for stages in there]
    back = [(request.stages - stop, request.stages - start) for start, stop in reversed(spans)]
    return [range(start, stop) for start, stop in (*spans, *back)]


def stages_of_devices(request: ScheduleRequest) -> dict[int, list[int]]:
    """Maps each device to its stages."""
    stages_of: dict[int, list[int]] = {}
    for stage, devices in enumerate(request.devices):
        for device in devices:
            stages_of.setdefault(device, []).append(stage)
    return stages_of
