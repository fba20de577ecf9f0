"""Run times of GPU kernels in TensorFlow's step stats, by the node that launched them.

Beside the lists of nodes that executors ran, there are lists of what each GPU ran, with the time of each launch. They
name a GPU by its number in its process, and a kernel by an operator inside a function: neither by worker nor by call.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_GPU = re.compile(r"/device:GPU:\d+")
_ALL_KERNELS = "/stream:all"
_MICROSECOND = 1000
"""Nanoseconds by which launches may seem to be outside of their node: their times are cut to microseconds."""


class Times(NamedTuple):
    """Nanoseconds from the first to the last of some kernels."""

    start: float
    end: float


class _Kernel(NamedTuple):
    launched: float
    start: float
    end: float


def is_executors(device: str) -> bool:
    """Returns whether a list is of nodes that the executor ran, rather than of a GPU's reports."""
    return "/stream" not in device and not device.endswith(("/sync", "/memcpy"))


def kernel_times(stats: Any, launches: Mapping[str, tuple[str, float, float]]) -> dict[str, Times] | None:
    """Returns node -> the span of the kernels that its device launched while it ran.

    Nodes without kernels are missing. Kernels of a GPU run in the order of their launches, so that nodes that follow
    each other on a device have kernels that follow each other.

    Args:
        stats: step stats.
        launches: node -> its device, and its start and end by the executor.

    Returns:
        None if the kernels of a GPU among these devices aren't known: without CUPTI; where several workers have a GPU
        of this number; or if a kernel was launched while no node ran, so that the clocks of the two can't be the same.
    """
    gpus = {device: _GPU.search(device) for device, _, _ in launches.values()}
    numbers = [found[0] for found in gpus.values() if found is not None]
    lists = [own for own in stats.dev_stats if own.device.endswith(_ALL_KERNELS)]
    reported = [own.device.removesuffix(_ALL_KERNELS) for own in lists]
    if len(set(numbers)) < len(numbers) or any(reported.count(number) != 1 for number in numbers):
        return None
    times: dict[str, Times] = {}
    for device, found in gpus.items():
        if found is None:
            continue
        kernels = sorted(map(_kernel, lists[reported.index(found[0])].node_stats))
        launched = [kernel.launched for kernel in kernels]
        known: set[int] = set()
        for name, (own, start, end) in launches.items():
            if own == device:
                part = slice(bisect.bisect_left(launched, start - _MICROSECOND), bisect.bisect_right(launched, end))
                if kernels[part]:
                    times[name] = Times(min(k.start for k in kernels[part]), max(k.end for k in kernels[part]))
                    known.update(range(len(kernels))[part])
        if len(known) < len(kernels):
            return None
    return times


def _kernel(record: Any) -> _Kernel:
    start = record.all_start_micros + record.op_start_rel_micros
    end = record.all_start_micros + record.op_end_rel_micros
    return _Kernel(*(1000 * micros for micros in (record.scheduled_micros, start, end)))
