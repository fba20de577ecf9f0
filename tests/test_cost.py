"""The cost model against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hardware import cluster_of as cluster
from hardware import linked

from dapple_tf.describe.cluster import Cluster, Device, Link, ReductionLinks, Server
from dapple_tf.describe.layer_profile import ZERO, Cost, LayerProfile, NeededLater
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
from dapple_tf.simulation.all_reduce import all_reduce_time, exchange_time
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.stage_cost import stage_cost
from graph_passes.ir.tasks import Phase, Task


def layer(name: str, forward: float = 1.0, backward: float = 2.0, **values: Any) -> LayerProfile:
    """A layer that takes so many seconds per sample."""
    return LayerProfile(name, Cost(0.0, forward), Cost(0.0, backward), **values)


def profile(layers: Sequence[LayerProfile], tensors: float | Sequence[Tensor] = 10.0, **values: Any) -> Profile:
    return linked(layers, tensors, **values)


def letters(count: int, **values: Any) -> list[LayerProfile]:
    return [layer(name, **values) for name in "abcdefgh"[:count]]


# --- all-reduce ---


def all_reduce_seconds(cluster: Cluster, devices: Sequence[int], size: float, algorithm: str = "flat") -> float:
    members = Counter(cluster.devices[device].server for device in devices)
    return all_reduce_time(cluster, members, algorithm).seconds(size)


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_ring_inside_a_server(members: int) -> None:
    seconds = all_reduce_seconds(cluster(members, intra_bandwidth=100.0, intra_latency=0.5), range(members), 400.0)
    assert seconds == pytest.approx(2 * (members - 1) / members * 4 + 2 * (members - 1) * 0.5)


def test_an_exchange_sends_all_at_once_and_over_each_card_what_its_server_exchanges_with_others() -> None:
    """A reduce-scatter and an all-gather of 400 bytes."""
    inside = cluster(4, intra_bandwidth=100.0, intra_latency=0.5)
    assert exchange_time(inside, {0: 4}).seconds(400.0) == pytest.approx(2 * 3 / 4 * 4 + 2 * 0.5)
    links = {"intra_bandwidth": 1e9, "inter_bandwidth": 10.0, "inter_latency": 1.0}
    one_each, two_each = cluster(1, 1, 1, 1, **links), cluster(2, 2, **links)
    ring = all_reduce_seconds(cluster(1, 1, 1, 1, intra_bandwidth=1e9, inter_bandwidth=10.0), range(4), 400.0)
    assert exchange_time(one_each, dict.fromkeys(range(4), 1)).seconds(400.0) == pytest.approx(ring + 2 * 1.0)
    # Both devices of a server send half of the bytes to the other server, and get as much.
    assert exchange_time(two_each, {0: 2, 1: 2}).seconds(400.0) == pytest.approx(2 * 40.0 + 2 * 1.0)
    assert exchange_time(two_each, {0: 1}).seconds(400.0) == 0


def test_hierarchical_adds_the_ring_inside_to_the_ring_between_servers() -> None:
    two = cluster(4, 4, intra_bandwidth=100.0, intra_latency=0.25, inter_bandwidth=10.0, inter_latency=1.0)
    # Each device gets three quarters of the bytes at once, and sends as many back.
    inside, between = 1.5 * 2 + 2 * 0.25, 1.0 * 20 + 2 * 1.0
    assert all_reduce_seconds(two, range(8), 200.0, "hierarchical") == pytest.approx(inside + between)


def test_flat_is_one_ring_over_the_network_cards() -> None:
    two = cluster(4, 4, intra_bandwidth=100.0, intra_latency=0.25, inter_bandwidth=10.0, inter_latency=1.0)
    assert all_reduce_seconds(two, range(8), 200.0, "flat") == pytest.approx(2 * 7 / 8 * 20 + 14 * 1.0)
    assert all_reduce_seconds(two, range(4), 200.0, "flat") == pytest.approx(1.5 * 2 + 6 * 0.25)


def test_the_slowest_server_decides() -> None:
    servers = (Server(inter_bandwidth=5.0), Server(intra_bandwidth=1.0), Server(inter_latency=3.0))
    three = cluster(
        3, 2, 1, intra_bandwidth=100.0, inter_bandwidth=10.0, intra_latency=0.0, inter_latency=1.0, servers=servers
    )
    # One device of each server takes part between servers, because one has only one: all others send it everything.
    inside, between = max(2 * 1 * 60 / 1.0, 2 * 2 * 60 / 100), 2 * 2 / 3 * 60 / 5 + 4 * 3.0
    assert all_reduce_seconds(three, range(6), 60.0, "hierarchical") == pytest.approx(inside + between)


def test_buckets_are_reduced_one_after_the_other_inside_servers_while_others_are_between_them() -> None:
    two = cluster(2, 2, intra_bandwidth=100.0, intra_latency=0.25, inter_bandwidth=10.0, inter_latency=1.0)
    ring = all_reduce_time(two, {0: 2, 1: 2}, "flat")
    assert ring.seconds(200.0, 50.0) == pytest.approx(4 * ring.seconds(50.0))
    inside, between = 2 * 0.25 + 50 / 100, 2 * 1.0 + 50 / 10
    by_server = all_reduce_time(two, {0: 2, 1: 2}, "hierarchical")
    assert by_server.seconds(200.0, 50.0) == pytest.approx(inside + 4 * between)
    assert by_server.seconds(50.0, 50.0) == pytest.approx(inside + between)


def test_what_was_measured_of_all_reduces_counts_before_links() -> None:
    links = ReductionLinks(Link(20.0, 0.5), Link(200.0, 0.1), Link(40.0, 0.3), Link(400.0, 0.2))
    measured = cluster(2, 2, intra_bandwidth=1.0, inter_bandwidth=1.0, reductions=links)
    assert all_reduce_seconds(measured, range(4), 200.0) == pytest.approx(6 * 0.5 + 1.5 * 200 / 20)
    assert all_reduce_seconds(measured, [0, 1], 200.0) == pytest.approx(2 * 0.1 + 200 / 200)
    assert all_reduce_seconds(measured, [0, 2], 200.0) == pytest.approx(2 * 0.3 + 200 / 40)
    by_server = 2 * 0.2 + 200 / 400 + 2 * 0.3 + 200 / 40
    assert all_reduce_seconds(measured, range(4), 200.0, "hierarchical") == pytest.approx(by_server)


# --- stages ---


def test_recomputing_adds_f_to_b_and_keeps_only_what_enters() -> None:
    layers = letters(2, residual_bytes=Cost(0.0, 100.0), min_cut_residual_bytes=Cost(0.0, 30.0))
    model = profile(layers)
    kept = stage_cost(model, 1, 2)
    assert (kept.backward.at(1), kept.residual_bytes.at(1), kept.recomputed_bytes.at(1)) == (2.0, 110.0, 0.0)
    boundary = stage_cost(model, 1, 2, "boundary")
    assert (boundary.backward.at(1), boundary.residual_bytes.at(1), boundary.recomputed_bytes.at(1)) == (3, 10, 100)
    cut = stage_cost(model, 1, 2, "min_cut")
    assert (cut.backward.at(1), cut.residual_bytes.at(1), cut.recomputed_bytes.at(1)) == (pytest.approx(2.1), 40, 0)


def test_what_no_backward_of_the_stage_needs_is_not_computed_again() -> None:
    """Half of layer a is needed by c first, a quarter of b by none; computing all of d again takes half of its F."""
    a, b, c, d = letters(4)
    a = dataclasses.replace(a, needed_later=(NeededLater(2, 0.5),))
    b = dataclasses.replace(b, needed_later=(NeededLater(4, 0.25),))
    d = dataclasses.replace(d, recomputation=d.forward * 0.5)
    model = profile([a, b, c, d])
    again = {(0, 1): 0.5, (0, 2): 1.25, (0, 3): 2.75, (1, 2): 0.75, (1, 3): 1.75, (2, 4): 1.5, (0, 4): 3.25}
    for (start, stop), seconds in again.items():
        cost = stage_cost(model, start, stop, "boundary")
        assert cost.backward.at(1) == pytest.approx(2 * (stop - start) + seconds)
        assert cost.forward == stage_cost(model, start, stop).forward


# --- memory ---

# 2 x 100 for weights and gradients, 50 for slots, 10 for state: 260 stored. 30 per sample kept, 7 while B runs.
HEAVY = {
    "residual_bytes": Cost(0.0, 30.0),
    "temporary_bytes": Cost(1.0, 3.0),
    "parameter_bytes": 100,
    "slot_bytes": 50,
    "state_bytes": 10,
}


def heavy(memory: int | None, schedule: str = "dapple_a", micro_batches: int = 4, **options: Any) -> CostModel:
    """Two stages; a micro-batch of two samples keeps 60 bytes in the first and 60 + 20 in the second."""
    plan = Plan.straight([*"a"], 2 * micro_batches, micro_batches, schedule, **options)
    return CostModel(plan, profile(letters(2, **HEAVY)), cluster(2, memory=memory))


def test_memory_bounds_the_warm_up() -> None:
    assert heavy(None).holds is None
    assert heavy(None).warm_up == (2, 1)
    assert heavy(327).holds == (1, 0)
    assert heavy(347).holds == (1, 1)
    assert heavy(347).warm_up == (1, 1)
    assert heavy(387, "dapple_b").holds == (2, 1)
    assert heavy(387, "dapple_b").warm_up == (2, 1)
    assert heavy(10**6, "dapple_b").warm_up == (3, 1)
    assert heavy(10**6, "gpipe").warm_up == (4, 4)


def test_the_smallest_device_of_a_stage_decides() -> None:
    devices = tuple(Device(f"d{index}", 0, memory) for index, memory in enumerate((None, 400, 370, None)))
    plan = Plan.manual([*"a"], [[0, 1, 2], [3]], 4, 24)
    costs = CostModel(plan, profile(letters(2, **HEAVY)), Cluster(devices, real=False))
    assert costs.memory_limit(0) == 370
    assert costs.memory_limit(1) is None
    assert costs.holds == (1, 4)


# --- everything that a step costs, of plans small enough to work out ---


def told(costs: CostModel) -> str:
    """Seconds of tasks, bytes on devices and between them, and what is reduced when."""
    plan, lines = costs.plan, []
    for stage, devices in enumerate(plan.devices):
        for replica, device in enumerate(devices):
            seconds = [f"{phase.value} {costs.seconds(Task(stage, phase, 0, replica)):.4g}" for phase in Phase]
            lines.append(
                f"stage {stage} on {device}: {', '.join(seconds)}, apply {costs.apply_seconds(stage, device):.4g}"
            )
        needed = ", ".join(f"{costs.needed_bytes(stage, count):g}" for count in (1, 2, 4))
        pieces = ", ".join(f"{size:g} after {part:.4g}" for part, size in costs.backward_pieces(stage))
        lines.append(f"  {needed} bytes for 1, 2 and 4 micro-batches in flight; gradients: {pieces}")
    lines.append("stored: " + ", ".join(f"{size:g} on {device}" for device, size in costs.stored_bytes.items()))
    for one in costs.reductions:
        lines.append(f"reduction of {one.bytes:g} bytes of stages {one.stages} on {one.devices}")
    for producer, consumer in costs.routes:
        for backward in (False, True):
            sent = costs.messages(producer, consumer, 0, backward=backward)
            text = ", ".join(f"{one.sender}>{one.receiver} {one.bytes:g}" for one in sent)
            lines.append(f"{'gradients' if backward else 'tensors'} of {producer} and {consumer}: {text or 'none'}")
    return "\n".join(lines)


def test_costs_worked_out(golden: Callable[[str, str], None]) -> None:
    texts: list[str] = []

    def costs(title: str, plan: Plan, model: Profile, where: Cluster) -> None:
        texts.append(f"{title}\n{told(CostModel(plan, model, where))}\n")

    # Weights that stages share are kept by the devices of all of them.
    model = profile(
        letters(4, parameter_bytes=100, slot_bytes=600, apply_seconds=6.0), shared=[SharedParameters((0, 3), 40, 120)]
    )
    for shards in (False, True):
        plan = Plan.manual([*"b"], [[0, 1], [2, 3, 4]], 1, 6, optimizer_shards=shards)
        costs(f"slots and updates are divided by the replicas: {shards}", plan, model, cluster(5))
    # Of 100 bytes of a layer 60 are a table, of which a sample looks up 4: 3 replicas of 2 samples, 2 layers.
    tables = {"parameter_bytes": 100, "slot_bytes": 200, "table_bytes": 60, "row_bytes": Cost(0.0, 4.0)}
    model = profile(letters(2, **tables, apply_seconds=1.0))
    for options in ({}, {"row_shards": True}, {"row_shards": True, "optimizer_shards": True}):
        plan = Plan.data_parallel(3, 6, **options)
        costs(f"rows go one way, where an all-reduce brings sums back: {options}", plan, model, cluster(3))
    for rows in (False, True):
        costs(f"on one device: {rows}", Plan.data_parallel(1, 6, row_shards=rows), model, cluster(1))

    plan, speeds = Plan.manual([*"b"], [[0, 1], [2]], 2, 8), [1.0, 2.0, 0.5]
    model = profile(letters(3, apply_seconds=0.5), task_seconds=0.5)
    costs("a task takes its layers' time and that to start it, by speed", plan, model, cluster(3, speeds=speeds))
    layers = [dataclasses.replace(one, parameter_bytes=4) for one in letters(3)]
    layers[1] = dataclasses.replace(layers[1], backward_weight=Cost(0.0, 0.5))
    costs("Bx and Bw are half of B unless the profile knows", Plan.straight([*"ab"], 4, 2), profile(layers), cluster(3))
    layers[2] = layer("c")  # It has no parameters.
    costs("of two layers", Plan.straight([*"a"], 2, 1), profile(layers), cluster(2))

    tensors = [Tensor(0, (1,), Cost(0.0, 10.0))]
    costs("three to two", Plan.manual([*"a"], [[0, 1, 2], [3, 4]], 1, 6), profile(letters(2), tensors), cluster(5))
    tensors = [Tensor(0, (1,), Cost(0.0, 5.0), differentiable=False)]
    costs("what has no gradient", Plan.straight([*"a"], 2, 1), profile(letters(2), tensors), cluster(2))
    tensors = [Tensor(0, (1,), ZERO)]
    costs("what has no bytes is waited for", Plan.straight([*"a"], 2, 1), profile(letters(2), tensors), cluster(2))
    shared = [SharedParameters((0, 3), 40), SharedParameters((1, 2), 7)]
    plan, model = (
        Plan.manual([*"ac"], [[0], [1, 2], [3, 4]], 1, 2),
        profile(letters(4, parameter_bytes=100), shared=shared),
    )
    costs("tied weights are reduced over all replicas of all their stages", plan, model, cluster(5))

    backwards = [("a", 1.0, 30), ("b", 2.0, 50), ("c", 4.0, 60), ("d", 1.0, 40)]
    model = profile([layer(name, backward=time, parameter_bytes=size) for name, time, size in backwards])
    for cuts in ("b", "abc"):
        costs(f"pieces cut after {cuts}", Plan.data_parallel(2, 4, backward_cuts=[*cuts]), model, cluster(2))
    model = profile(letters(3, parameter_bytes=10), shared=[SharedParameters((1, 2), 5)])
    costs("shared in the first's piece", Plan.data_parallel(2, 4, backward_cuts=[*"ab"]), model, cluster(2))
    for backward, weight, cuts in ((3.0, 1.0, "c"), (1.0, 3.0, "bc")):  # The second Bw takes less than its layers say.
        model = profile(letters(4, backward=backward, backward_weight=Cost(0.0, weight), parameter_bytes=8))
        plan = Plan.manual([*"a"], [[0], [1, 2]], 2, 4, "zb_h1", backward_cuts=[*cuts])
        costs(f"pieces of Bw, cut after {cuts}", plan, model, cluster(3))

    costs(
        "K times the residuals and the running B", Plan.straight([*"a"], 8, 4), profile(letters(2, **HEAVY)), cluster(2)
    )
    model = profile(letters(3, **HEAVY), shared=[SharedParameters((0, 2), 40, 5)])
    plan = Plan.manual([*"ab"], [[0], [1], [0]], 1, 1, "modulo")
    costs("stages of one device share its memory", plan, model, cluster(2))
    assert [CostModel(plan, model, cluster(2, memory=size)).holds for size in (679, 678)] == [(1, 1, 1), (0, 1, 0)]
    model = profile(letters(2, **HEAVY, delayed_bytes=Cost(0.0, 50.0)))
    for policy in ("gpipe", "zb_h1"):  # The first stage's Bx does nothing.
        costs(f"what is delayed counts under {policy}", Plan.straight([*"a"], 4, 4, policy), model, cluster(2))
    golden("costs.txt", "\n".join(texts))
