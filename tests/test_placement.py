"""The three placement policies, and the walk through a cluster's occupancies."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hardware import cluster_of

from dapple_tf.planning.placement import Placements, Step, allocate, links_of
from dapple_tf.simulation.all_reduce import all_reduce_time


# Figure 5 of the paper: three servers of 8 (here), two of them partly used, and 6 devices wanted.
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fresh_first", (0, 0, 6)),
        ("append_first", (5, 1, 0)),
        ("scatter_first", (3, 3, 0)),
    ],
)
def test_figure_5(policy: str, expected: tuple[int, ...]) -> None:
    assert allocate(policy, (3, 4, 0), (8, 8, 8), 6, (0, 1, 2)) == expected


def test_scatter_first_on_a_fresh_cluster_uses_all_servers_equally() -> None:
    assert allocate("scatter_first", (0, 0, 0), (8, 8, 8), 6, (0, 1, 2)) == (2, 2, 2)
    assert allocate("scatter_first", (0, 0), (8, 8), 5, (0, 1)) == (3, 2)


def test_what_a_policy_prefers_may_not_suffice() -> None:
    assert allocate("fresh_first", (3, 0), (4, 4), 5, (0, 1)) == (1, 4)
    assert allocate("append_first", (3, 0), (4, 4), 4, (0, 1)) == (1, 3)
    assert allocate("scatter_first", (3, 3, 0), (4, 4, 4), 5, (0, 1, 2)) == (1, 1, 3)


def test_more_devices_than_are_free_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 devices are wanted, but 2 are free"):
        allocate("fresh_first", (1, 1), (2, 2), 3, (0, 1))


@pytest.mark.parametrize("sizes", [(4,), (1, 1, 1, 1), (2, 3), (8, 8), (4, 4, 4), (1,) * 40, (8,) * 16])
def test_every_step_takes_free_devices_and_leads_to_its_target(sizes: tuple[int, ...]) -> None:
    placements = Placements(cluster_of(*sizes))
    assert placements.states[0] == (0,) * len(sizes)
    for step in placements.steps:
        before, after = placements.states[step.source], placements.states[step.target]
        used = [taken + given for taken, given in zip(before, step.counts, strict=True)]
        assert all(taken <= size for taken, size in zip(used, sizes, strict=True))
        assert sum(step.counts) > 0
        assert tuple(used[place] for place in step.order) == after
    full = placements.states.index(sizes)
    assert all(any(step.target == full and step.source == state for step in placements.steps)
               for state in range(len(sizes)) if state != full)  # fmt: skip


def test_all_numbers_of_replicas_are_tried_on_a_small_cluster() -> None:
    placements = Placements(cluster_of(8, 8))
    assert {sum(step.counts) for step in placements.steps if step.source == 0} == set(range(1, 17))


def test_like_servers_are_exchangeable_and_unlike_ones_are_not() -> None:
    alike, unlike = Placements(cluster_of(2, 2)), Placements(cluster_of(2, 2, speeds=(1.0, 1.0, 0.5, 0.5)))
    assert (1, 0) in alike.states
    assert (0, 1) not in alike.states
    assert {(1, 0), (0, 1)} <= set(unlike.states)


def test_unlike_devices_of_a_stage_work_at_their_mean_speed_on_shares_by_speed() -> None:
    cluster = cluster_of(1, 2, speeds=(1.5, 0.5, 0.5), memory=2**30, inter_bandwidth=1e9)
    placements = Placements(cluster)
    links = links_of(placements, ["hierarchical"], 1e6)
    step = next(i for i, own in enumerate(placements.steps) if own.source == 0 and own.counts == (1, 1))
    assert links.speed[step] == 1.0
    used = {(kind.memory, kind.share[step]) for kind in links.kinds if kind.used[step]}
    assert used == {(2**30, 1.5), (2**30, 0.5)}
    alone = next(i for i, own in enumerate(placements.steps) if own.source == 0 and own.counts == (0, 2))
    assert [(kind.share[alone], bool(kind.used[alone])) for kind in links.kinds] == [(3.0, False), (1.0, True)]


@pytest.mark.parametrize("sizes", [(2, 3), (4, 4), (2, 2, 2)])
def test_a_path_gives_each_device_once(sizes: tuple[int, ...]) -> None:
    cluster = cluster_of(*sizes)
    placements = Placements(cluster)
    leaving: dict[int, list[Step]] = {}
    for step in placements.steps:
        leaving.setdefault(step.source, []).append(step)

    def walk(state: int, path: list[Step]) -> None:
        devices = placements.devices(path)
        flat = list(itertools.chain.from_iterable(devices))
        assert len(set(flat)) == len(flat)
        assert [len(group) for group in devices] == [sum(step.counts) for step in path]
        used = sorted(
            (sum(cluster.devices[device].server == server for device in flat) for server in range(len(sizes))),
            reverse=True,
        )
        assert used == sorted(placements.states[state], reverse=True)
        if len(path) < 3:
            for step in leaving.get(state, ())[::3]:
                walk(step.target, [*path, step])

    walk(0, [])


def test_links_are_those_of_the_devices() -> None:
    cluster = cluster_of(2, 2, intra_bandwidth=1e9, inter_bandwidth=1e8, intra_latency=1e-6, inter_latency=1e-5)
    placements = Placements(cluster)
    links = links_of(placements, ["hierarchical"], 1e6)
    for index, step in enumerate(placements.steps):
        if step.source == 0:
            devices = placements.devices([step])[0]
            members = Counter(cluster.devices[device].server for device in devices)
            expected = all_reduce_time(cluster, members, "hierarchical").seconds(1e6)
            assert links.all_reduce(np.array(index), np.array(1e6), math.inf) == pytest.approx(expected)
            assert links.replicas[index] == len(devices)
            for following, other in enumerate(placements.steps):
                if other.source != step.target:
                    continue
                groups = placements.devices([step, other])
                servers = [{cluster.devices[device].server for device in group} for group in groups]
                at = links.pair(np.array([index]), np.array([following]))[0]
                if servers[0].isdisjoint(servers[1]):
                    # The busiest card carries the share of the server with most replicas.
                    counts = [np.bincount([cluster.devices[d].server for d in group]) for group in groups]
                    share = max((count / count.sum()).max() for count in counts)
                    assert links.per_byte[at] == pytest.approx(share / 1e8)
                    assert links.latency[at] == 1e-5
                elif len(servers[0] | servers[1]) == 1:
                    assert links.per_byte[at] == pytest.approx(1e-9 / min(map(len, groups)))
                    assert links.latency[at] == 1e-6


def test_a_state_knows_the_step_that_takes_the_rest() -> None:
    placements = Placements(cluster_of(2, 3))
    links = links_of(placements, ["flat"], 1e6)
    for state, used in enumerate(placements.states):
        rest = links.rest[state]
        if sum(used) == 5:
            assert rest == -1
        else:
            assert placements.steps[rest].source == state
            assert sum(placements.steps[rest].counts) == 5 - sum(used)


@pytest.mark.parametrize("servers", [(8,) * 4, (8,) * 8, (8,) * 128])
def test_all_three_policies_are_tried_on_large_clusters(servers: tuple[int, ...]) -> None:
    placements = Placements(cluster_of(*servers))
    counts = {step.counts for step in placements.steps if step.source == 0}
    assert (8, *[0] * (len(servers) - 1)) in counts  # a server to itself
    assert (1,) * len(servers) in counts  # a device of each: scatter first
    scattered = [step for step in placements.steps if step.counts == (4,) * len(servers)]
    assert any(step.source == 0 and len(set(placements.states[step.target])) == 1 for step in scattered)
    assert any(step.source != 0 for step in scattered)  # and the next stage beside it
    assert len(placements.states) <= 1000
