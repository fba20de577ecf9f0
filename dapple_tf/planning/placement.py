"""Which devices a stage may get: the three placement policies (DAPPLE, PPoPP'21, section 4.2 and figure 5)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dapple_tf.describe.cluster import Cluster
from dapple_tf.simulation.all_reduce import AllReduceTime, all_reduce_time

POLICIES = ("fresh_first", "append_first", "scatter_first")
"""Names of the placement policies."""

_MAX_STATES = 1000
"""The most different occupancies of the cluster that are explored."""
_FINE = 24
"""The most devices for which all numbers of replicas and all policies are tried in all states: see `Placements`."""
_COARSE = 128
"""On more devices than this, stages get multiples of a quantum of devices."""

Counts = tuple[int, ...]
"""Devices per server."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def allocate(policy: str, used: Sequence[int], sizes: Sequence[int], count: int, order: Sequence[int]) -> Counts:
    """Returns how many devices of each server a stage of ``count`` replicas gets.

    * ``fresh_first``: from fresh servers, so that the stage stays together; then from used ones.
    * ``append_first``: from servers that are partly used, to reduce fragmentation; then from fresh ones.
    * ``scatter_first``: equally from all used servers, or from all if all are fresh.

    Args:
        policy: one of `POLICIES`.
        used: devices of each server that are taken.
        sizes: devices of each server.
        count: number wanted; at most as many as are free.
        order: servers in the order in which they are preferred.
    """
    free = [size - taken for size, taken in zip(sizes, used, strict=True)]
    if count > sum(free):
        raise ValueError(f"{count} devices are wanted, but {sum(free)} are free")
    given = [0] * len(sizes)
    fresh = [server for server in order if not used[server]]
    begun = [server for server in order if used[server] and free[server]]
    left = count
    if policy == "scatter_first":
        for group in (begun, fresh):
            left = _scatter(group, free, given, left)
        return tuple(given)
    for server in fresh + begun if policy == "fresh_first" else begun + fresh:
        given[server] = min(free[server], left)
        left -= given[server]
    return tuple(given)


def _scatter(group: Sequence[int], free: Sequence[int], given: list[int], count: int) -> int:
    """Takes up to ``count`` devices from a group of servers, equally; returns how many are still missing."""
    while count:
        open_servers = [server for server in group if given[server] < free[server]]
        if not open_servers:
            break
        share = max(1, count // len(open_servers))
        for server in open_servers:
            taken = min(share, free[server] - given[server], count)
            given[server] += taken
            count -= taken
    return count


@dataclasses.dataclass(frozen=True)
class Step:
    """An assignment of devices to one stage: from one occupancy of the cluster to another.

    Servers are in a canonical order, those of a kind sorted by use, so that occupancies that differ only by an exchange
    of like servers are one state.

    Attributes:
        source: the state before.
        target: the state after.
        counts: devices of each server, in the source's order.
        order: for each place in the target's order, the place in the source's.
    """

    source: int
    target: int
    counts: Counts
    order: tuple[int, ...]


class Placements:
    """All ways to assign a cluster's devices to stages, one after the other, by the three policies.

    Unlike devices of one server count as separate servers here, on the same links.

    Attributes:
        cluster: the cluster.
        groups: the devices of each such server.
        servers: the real server of each.
        sizes: number of devices of each.
        states: occupancies; the first is the empty one.
        steps: see :class:`Step`, sorted by source.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.groups = cluster.device_groups
        self.servers = tuple(cluster.devices[group[0]].server for group in self.groups)
        self.sizes = tuple(map(len, self.groups))
        self.kinds = _kinds(cluster)
        self.counts = _replica_counts(self.sizes)
        self.states: list[Counts] = []
        self.steps: list[Step] = []
        self._explore()

    def _explore(self) -> None:
        numbers: dict[Counts, int] = {}

        def number(state: Counts) -> int | None:
            if state not in numbers:
                if len(numbers) >= _MAX_STATES:
                    return None
                numbers[state] = len(self.states)
                self.states.append(state)
            return numbers[state]

        number((0,) * len(self.sizes))
        orders = list(_orders(self.kinds))
        for source in itertools.count():
            if source == len(self.states):
                return
            used = self.states[source]
            seen: set[Counts] = set()
            for count in self._counts(used):
                for policy, order in itertools.product(self._policies(used, count), orders):
                    given = allocate(policy, used, self.sizes, count, order)
                    if given in seen:
                        continue
                    seen.add(given)
                    after = [taken + more for taken, more in zip(used, given, strict=True)]
                    places = self._canonical(after)
                    target = number(tuple(after[place] for place in places))
                    if target is not None:
                        self.steps.append(Step(source, target, given, places))

    def _counts(self, used: Counts) -> list[int]:
        """Returns the numbers of replicas to try, up to a whole server or all the rest."""
        free = sum(self.sizes) - sum(used)
        partly = sum(size - taken for size, taken in zip(self.sizes, used, strict=True) if taken)
        return sorted({count for count in (*self.counts, partly, free) if 0 < count <= free})

    def _policies(self, used: Counts, count: int) -> tuple[str, ...]:
        """Returns the policies to try.

        On large clusters, which have too many states, small stages stay together, and a stage is scattered only if it
        gets as many devices of each server, of which all have equally many left: so do then its successors.
        """
        if sum(self.sizes) <= _FINE:
            return POLICIES
        together = POLICIES[:2] if count >= max(self.sizes) else POLICIES[1:2]
        level = len(set(used)) == 1 and len(set(self.sizes)) == 1 and count % len(used) == 0
        return (*together, POLICIES[2]) if level else together

    def _canonical(self, used: Sequence[int]) -> tuple[int, ...]:
        """Sorts servers of each kind by descending use; kinds keep their places."""
        places = list(range(len(used)))
        for kind in set(self.kinds):
            slots = [place for place in places if self.kinds[place] == kind]
            ranked = sorted(slots, key=lambda place: (-used[place], place))
            for slot, place in zip(slots, ranked, strict=True):
                places[slot] = place
        # `places` was read while being written only at slots of the same kind, whose entries are their own numbers.
        return tuple(places)

    def devices(self, steps: Iterable[Step]) -> list[tuple[int, ...]]:
        """Returns the devices of each stage of a path from the empty cluster."""
        servers = list(range(len(self.sizes)))  # the actual server at each place
        taken = [0] * len(self.sizes)
        stages = []
        for step in steps:
            stage: list[int] = []
            for place, count in enumerate(step.counts):
                server = servers[place]
                members = self.groups[server]
                stage += members[taken[server] : taken[server] + count]
                taken[server] += count
            stages.append(tuple(sorted(stage)))
            servers = [servers[place] for place in step.order]
        return stages


def _kinds(cluster: Cluster) -> tuple[int, ...]:
    """Returns a number for each group of like devices; groups with the same number are exchangeable."""
    numbers: dict[object, int] = {}
    kinds = []
    groups = Counter(cluster.devices[group[0]].server for group in cluster.device_groups)
    for group in cluster.device_groups:
        device = cluster.devices[group[0]]
        links, capacity = cluster.server_links[device.server], cluster.capacity(device.server)
        # Parts of different servers aren't exchangeable: they have different neighbours.
        part = device.server if groups[device.server] > 1 else None
        key = (len(group), device.memory_bytes, device.speed, links, capacity, part)
        kinds.append(numbers.setdefault(key, len(numbers)))
    return tuple(kinds)


def _orders(kinds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields orders of preference for servers: each kind first in turn."""
    for first in sorted(set(kinds)):
        yield tuple(sorted(range(len(kinds)), key=lambda server: (kinds[server] != first, kinds[server], server)))


def _replica_counts(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of replicas to try: all on small clusters; on large ones all small ones, then by servers."""
    total, server = sum(sizes), max(sizes)
    if total <= _FINE or (server == 1 and total <= 64):
        return tuple(range(1, total + 1))
    if total > _COARSE:
        quantum = max(server, total // _COARSE)
        counts = {len(sizes) * each for each in range(1, server + 1)}
        counts |= {quantum * times for times in (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 56, 64)}
    else:
        counts = {2**power for power in range(server.bit_length())} | {
            len(sizes) * each for each in range(1, server + 1)
        }
        stride = max(1, total // 16 // server) * server
        counts |= {3, 6, *range(stride, total + 1, stride)}
    return tuple(sorted(count for count in counts if count <= total))


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """Devices of one speed and memory.

    Attributes:
        memory: bytes of each; infinite where unknown.
        used: whether each of `Placements.steps` has such devices.
        share: the samples of such a device, as a multiple of the mean over a step's devices.
    """

    memory: float
    used: npt.NDArray[np.bool_]
    share: Floats


@dataclasses.dataclass(frozen=True)
class Links:
    """Speeds and links of the devices of each of `Placements.steps`, as arrays.

    Attributes:
        source: state before each step.
        target: state after it.
        replicas: number of devices.
        speed: the mean: slices are in proportion to speeds.
        kinds: see :class:`DeviceKind`.
        inner: fixed seconds and seconds per byte of an all-reduce over them inside servers, see `AllReduceTime`.
        outer: the same for the rest of it.
        rest: for each state the step that takes all remaining devices; -1 for the full cluster.
        column: position of a step among those that leave its source.
        row: position of a step among those that lead to its target.
        base: for each state, where its block of the two arrays below starts: a row for each step into the state, a
            column for each step out of it.
        width: for each state, the number of steps out of it.
        per_byte: seconds per byte from the devices of the first step to those of the second.
        latency: seconds until the first byte arrives.
    """

    source: Ints
    target: Ints
    replicas: Ints
    speed: Floats
    kinds: tuple[DeviceKind, ...]
    inner: tuple[Floats, Floats]
    outer: tuple[Floats, Floats]
    rest: Ints
    column: Ints
    row: Ints
    base: Ints
    width: Ints
    per_byte: Floats
    latency: Floats

    def pair(self, before: Ints, step: Ints) -> Ints:
        """Returns the index in ``per_byte`` and ``latency`` of two consecutive steps."""
        state = self.source[step]
        return np.asarray(self.base[state] + self.row[before] * self.width[state] + self.column[step])

    def all_reduce(self, step: Ints, size: Floats, bucket_bytes: float) -> Floats:
        """Returns the seconds to all-reduce ``size`` bytes over the devices of steps; see `AllReduceTime.seconds`."""
        buckets = np.maximum(1, np.ceil(size / bucket_bytes))
        inner, outer = (start[step] + rate[step] * size / buckets for start, rate in (self.inner, self.outer))
        return np.asarray((inner + outer + (buckets - 1) * np.maximum(inner, outer)) * (size > 0))


def links_of(placements: Placements, all_reduce: Sequence[str], size: float) -> Links:
    """Computes `Links`, with that of these all-reduces which is the fastest for ``size`` bytes.

    Each byte of a micro-batch goes from its sender to its receiver. The part that finds its receiver in the same server
    is at most the overlap of the two stages' shares of that server; the rest passes the servers' network cards.
    """
    cluster, steps = placements.cluster, placements.steps
    firsts = [cluster.devices[group[0]] for group in placements.groups]
    free = [link.bandwidth for link, _ in cluster.server_links]
    card = np.array([1 / card.bandwidth for _, card in cluster.server_links])
    port = max(1 / bandwidth for bandwidth in free)
    speeds = [device.speed for device in firsts]
    memories = [math.inf if device.memory_bytes is None else device.memory_bytes for device in firsts]
    # Columns of groups -> columns of real servers.
    real = np.zeros((len(placements.groups), cluster.num_servers))
    real[np.arange(len(placements.groups)), placements.servers] = 1
    given = np.array([step.counts for step in steps])
    replicas = given.sum(axis=1)
    has = given > 0
    times_by_kind: dict[object, AllReduceTime] = {}
    times_of = []
    slowest = np.where(has, speeds, np.inf).min(axis=1)
    # The mean of equal numbers is this number, to the last bit.
    speed = np.where(slowest == np.where(has, speeds, 0).max(axis=1), slowest, given @ np.array(speeds) / replicas)
    described = list(zip(speeds, memories, strict=True))
    for counts in (step.counts for step in steps):
        members: Counter[int] = Counter()
        for group, count in enumerate(counts):
            if count:
                members[placements.servers[group]] += count
        key = tuple(sorted((placements.kinds[group], count) for group, count in enumerate(counts) if count))
        if key not in times_by_kind:
            times = (all_reduce_time(cluster, members, algorithm) for algorithm in all_reduce)
            times_by_kind[key] = min(times, key=lambda time: time.seconds(size))
        times_of.append(times_by_kind[key])
    states = len(placements.states)
    source, target = np.array([step.source for step in steps]), np.array([step.target for step in steps])
    rest = np.full(states, -1)
    total = sum(placements.sizes)
    left = np.array([total - sum(state) for state in placements.states])
    for last in np.nonzero(replicas == left[source])[0]:
        rest[source[last]] = last
    column, row = np.zeros(len(steps), int), np.zeros(len(steps), int)
    base, width = np.zeros(states, int), np.zeros(states, int)
    rates: list[Floats] = []
    latencies: list[Floats] = []
    outgoing: list[list[int]] = [[] for _ in range(states)]
    incoming: list[list[int]] = [[] for _ in range(states)]
    for index, step in enumerate(steps):
        outgoing[step.source].append(index)
        incoming[step.target].append(index)
    share = given * (np.array(speeds) / speed[:, None]) / replicas[:, None]  # of a micro-batch's samples
    # Like servers change places; parts of servers don't, so that places stay on their real servers.
    arrived = np.array([share[index][list(step.order)] for index, step in enumerate(steps)]) @ real
    share = share @ real
    shared = [server for server in range(cluster.num_servers) if len(cluster.devices_of(server)) > 1]
    inside = max(link.latency for link, _ in cluster.server_links)
    between = max(link.latency for _, link in cluster.server_links)
    size = 0
    for state in range(states):
        leaving, entering = outgoing[state], incoming[state]
        column[leaving], row[entering] = np.arange(len(leaving)), np.arange(len(entering))
        base[state], width[state] = size, len(leaving)
        if not leaving or not entering:
            continue
        out, into = arrived[entering], share[leaving]
        common = np.zeros((len(entering), len(leaving)))
        for server in shared:
            common += np.minimum(out[:, server, None], into[None, :, server])
        away = 1 - common
        over_cards = away * np.maximum((out * card).max(axis=1)[:, None], (into * card).max(axis=1)[None, :])
        over_ports = common * port / np.minimum(replicas[entering][:, None], replicas[leaving][None, :])
        rates.append(np.maximum(over_cards, over_ports).ravel())
        latencies.append(np.where(away > 1e-9, between, inside).ravel())
        size += len(entering) * len(leaving)
    empty = np.zeros(0)
    return Links(
        source=source,
        target=target,
        replicas=replicas,
        inner=(np.array([time.inner[0] for time in times_of]), np.array([time.inner[1] for time in times_of])),
        outer=(np.array([time.outer[0] for time in times_of]), np.array([time.outer[1] for time in times_of])),
        speed=speed,
        kinds=tuple(
            DeviceKind(
                memory, np.asarray(has[:, [other == (own, memory) for other in described]].any(axis=1)), own / speed
            )
            for own, memory in dict.fromkeys(described)
        ),
        rest=rest,
        column=column,
        row=row,
        base=base,
        width=width,
        per_byte=np.concatenate(rates) if rates else empty,
        latency=np.concatenate(latencies) if latencies else empty,
    )
