"""PipeDream's planner: as its authors released it, and the formula of the paper (SOSP'19, section 3.1).

Both plan level by level: the devices of a server first, then the servers, each of which counts as one component that
runs a range of layers as the level below has planned it. The paper takes the larger of a stage's computation and
all-reduce, and transfers; the released optimizer (msr-fiddle/pipedream, optimizer_graph_hierarchical.py) adds an
all-reduce of twice the bytes to the computation, and counts transfers only if it is asked to.
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
class Cost:
    """How a plan's cost is counted.

    Attributes:
        released: the released optimizer's sum instead of the paper's maximum.
        transfers: whether the slower of a stage and the transfers at its ends counts.
    """

    released: bool = False
    transfers: bool = True

    def stage(self, work: _Floats, sizes: _Floats, count: int, bandwidth: float) -> _Floats:
        """Returns the seconds of stages on so many components."""
        if not self.released:
            return np.maximum(work, 2 * (count - 1) / count * sizes / bandwidth) / count if count > 1 else work
        return (work + 4 * (count - 1) / count * np.minimum(sizes, 1e18) / bandwidth) / count

    def link(self, crossing: _Floats | float, count: int, bandwidth: float) -> _Floats | float:
        """Returns the seconds of a stage's transfer at a cut; the paper's formula has one link for all components."""
        if not self.transfers:
            return 0.0
        return 2 * crossing / (bandwidth * count) if self.released else crossing / bandwidth


PUBLISHED = Cost()
"""The formula of the paper."""


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


def pipedream(profile: Profile, cluster: Cluster, *, flat: bool = True, cost: Cost = PUBLISHED) -> Partition:
    """Returns the partition whose slowest stage or link takes the least time.

    Args:
        profile: the layers' costs, at the profile's batch.
        cluster: servers of equally many devices.
        flat: whether all devices are one level with the network between servers; otherwise a server's devices are a
            level of their own.
        cost: the cost; by default the paper's.
    """
    samples = profile.batch_sizes[-1]
    layers = profile.layers
    ends = states(profile) if cost.released else coarsened(profile, _GROUPS)
    starts = [0, *ends[:-1]]
    pairs = list(zip(starts, ends, strict=True))
    work = [sum(one.forward.at(samples) + one.backward.at(samples) for one in layers[a:b]) for a, b in pairs]
    sizes = [float(sum(one.parameter_bytes for one in layers[a:b])) for a, b in pairs]
    crossing = np.array([sum(each.at(samples) for each in profile.crossing[end - 1]) for end in ends[:-1]] + [0.0])
    if cost.released:  # its activations are a layer's output
        crossing[:-1] = [layers[end - 1].output_bytes.at(samples) for end in ends[:-1]]
    each = 1 if flat else cluster.num_devices // cluster.num_servers
    levels: list[_Level] = []
    base = _ranges(work)
    for count, bandwidth in ((each, cluster.intra_bandwidth), (cluster.num_devices // each, cluster.inter_bandwidth)):
        if count > 1:
            levels.append(_level(base, _ranges(sizes), crossing, bandwidth or float("inf"), count, cost))
            base = levels[-1].times[-1]
    stages = _stages(levels, 0, len(ends) - 1)
    places = tuple(tuple(devices) for _, devices in stages)
    return Partition(tuple(ends[last] - 1 for last, _ in stages[:-1]), tuple(map(len, places)), places)


def states(profile: Profile) -> tuple[int, ...]:
    """Returns where the released optimizer may cut: it takes inputs out, and layers that take no time here."""
    samples = profile.batch_sizes[-1]
    first = next(index for index, layer in enumerate(profile.layers) if layer.parameter_bytes)
    return tuple(
        index + 1
        for index, layer in enumerate(profile.layers)
        if index >= first and (layer.forward.at(samples) + layer.backward.at(samples) > 0 or layer.parameter_bytes)
    )


def _ranges(values: Sequence[float]) -> _Floats:
    """Returns first, last -> the sum from first to last; infinite where last < first."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table: _Floats = sums[None, 1:] - sums[:-1, None]
    table[np.tril_indices(len(values), -1)] = np.inf  # no such range
    return table


def _level(base: _Floats, sizes: _Floats, crossing: _Floats, bandwidth: float, count: int, cost: Cost) -> _Level:
    layers = len(base)
    alone = [cost.stage(base, sizes, m, bandwidth) for m in range(1, count + 1)]
    times = np.array(alone)
    stops = np.full(times.shape, -1, np.int64)
    own = np.repeat(np.arange(1, count + 1), layers * layers).reshape(times.shape).astype(np.int64)
    # Of equal plans the first one stays: the released optimizer asks all replicas of a last stage before the next cut.
    inner = itertools.product(range(layers - 1), range(1, count))
    pairs = list(inner) if cost.released else sorted(inner, key=lambda pair: pair[1])
    for m, (stop, last) in itertools.product(range(2, count + 1), pairs):
        if last >= m:
            continue
        slowest = np.maximum(times[m - last - 1][: stop + 1, stop, None], alone[last - 1][None, stop + 1, stop + 1 :])
        slowest = np.maximum(slowest, cost.link(crossing[stop], last, bandwidth))
        if cost.released:  # its last stage also waits for what it sends
            slowest = np.maximum(slowest, cost.link(crossing[None, stop + 1 :], last, bandwidth))
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
