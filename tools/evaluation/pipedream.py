"""PipeDream's planner (SOSP'19, section 3.1): the stages whose slowest stage or link takes the least time.

It plans level by level, the devices of a server first and then the servers, each of which counts as one component that
runs a range of layers as the level below has planned it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.search import coarsened
from dapple_tf.tools.evaluation.paper_models import Partition

_Floats = NDArray[np.float64]
_GROUPS = 60
"""Number of places at most where models are cut; glue of longer ones is joined."""


@dataclass(frozen=True)
class _Level:
    """Plans of all ranges of layers on up to `size` components.

    Attributes:
        size: number of components.
        times: m - 1, first layer, last layer -> time of the slowest stage or link on m components.
        stops: m - 1, first layer, last layer -> last layer of the part before the last stage; -1 for one stage.
        own: m - 1, first layer, last layer -> components of the last stage.
    """

    size: int
    times: _Floats
    stops: NDArray[np.int64]
    own: NDArray[np.int64]


def pipedream(profile: Profile, cluster: Cluster, *, flat: bool = True) -> Partition:
    """Returns the partition of PipeDream's algorithm: the least time of the slowest stage or link (formula 1).

    A stage's time is the larger of its computation and of its all-reduce, which PipeDream makes for every mini-batch.

    Args:
        profile: the layers' costs, at the profile's batch.
        cluster: servers of equally many devices.
        flat: whether all devices are one level with the network between servers, from which plans come that are like
            those of DAPPLE's Table 6; otherwise a server's devices are a level of their own.
    """
    samples = profile.batch_sizes[-1]
    ends = coarsened(profile, _GROUPS)
    starts = [0, *ends[:-1]]
    layers = profile.layers
    work = [
        sum(layer.forward.at(samples) + layer.backward.at(samples) for layer in layers[start:stop])
        for start, stop in zip(starts, ends, strict=True)
    ]
    sizes = [
        float(sum(layer.parameter_bytes for layer in layers[start:stop]))
        for start, stop in zip(starts, ends, strict=True)
    ]
    crossing = [sum(cost.at(samples) for cost in profile.crossing[end - 1]) for end in ends[:-1]]
    each = 1 if flat else cluster.num_devices // cluster.num_servers
    levels: list[_Level] = []
    base = _ranges(work)
    for count, bandwidth in ((each, cluster.intra_bandwidth), (cluster.num_devices // each, cluster.inter_bandwidth)):
        if count > 1:
            levels.append(_level(base, _ranges(sizes), crossing, bandwidth or float("inf"), count))
            base = levels[-1].times[-1]
    stages = _stages(levels, 0, len(ends) - 1)
    cuts = tuple(ends[last] - 1 for last, _ in stages[:-1])
    places = tuple(tuple(devices) for _, devices in stages)
    replicas = tuple(len(devices) for devices in places)
    plain = Partition(cuts, replicas)
    return plain if plain.devices == places else Partition(cuts, replicas, places)


def _ranges(values: Sequence[float]) -> _Floats:
    """Returns first, last -> the sum from first to last; infinite where last < first."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table: _Floats = sums[None, 1:] - sums[:-1, None]
    table[np.tril_indices(len(values), -1)] = np.inf  # no such range
    return table


def _level(base: _Floats, sizes: _Floats, crossing: Sequence[float], bandwidth: float, count: int) -> _Level:
    layers = len(base)
    alone = [np.maximum(base, 2 * (m - 1) / m * sizes / bandwidth) / m if m > 1 else base for m in range(1, count + 1)]
    times = np.array(alone)
    stops = np.full(times.shape, -1, np.int64)
    own = np.repeat(np.arange(1, count + 1), layers * layers).reshape(times.shape).astype(np.int64)
    for m, last in ((total, part) for total in range(2, count + 1) for part in range(1, total)):
        for stop in range(layers - 1):
            before, after = times[m - last - 1][: stop + 1, stop], alone[last - 1][stop + 1, stop + 1 :]
            slowest = np.maximum(np.maximum(before[:, None], after[None, :]), crossing[stop] / bandwidth)
            part = (m - 1, slice(0, stop + 1), slice(stop + 1, layers))
            better = slowest < times[part] * (1 - 1e-9)
            times[part] = np.where(better, slowest, times[part])
            stops[part] = np.where(better, stop, stops[part])
            own[part] = np.where(better, last, own[part])
    return _Level(count, times, stops, own)


def _stages(levels: Sequence[_Level], first: int, last: int) -> list[tuple[int, list[int]]]:
    """Returns (last layer, devices) of each stage of a range of layers on all components of the highest level."""
    level, below = levels[-1], levels[:-1]
    each = int(np.prod([other.size for other in below])) if below else 1
    stages: list[tuple[int, list[int]]] = []
    components, stop = level.size, last
    while True:
        count = int(level.own[components - 1, first, stop])
        before = int(level.stops[components - 1, first, stop])
        begin = first if before < 0 else before + 1
        inner = _stages(below, begin, stop) if below else [(stop, [0])]
        used = range(components - count, components)
        stages = [
            (end, [part * each + device for part, device in itertools.product(used, devices)]) for end, devices in inner
        ] + stages
        if before < 0:
            return stages
        components, stop = components - count, before
