"""The cost model against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hardware import cluster_of as cluster

from dapple_tf.describe.cluster import Cluster, Device, Link, ReductionLinks, Server
from dapple_tf.describe.layer_profile import ZERO, Cost, LayerProfile, NeededLater
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
from dapple_tf.simulation.all_reduce import all_reduce_time, exchange_time
from dapple_tf.simulation.cost import CostModel, Message
from dapple_tf.simulation.stage_cost import stage_cost
from graph_passes.ir.tasks import Phase, Task


def layer(name: str, forward: float = 1.0, backward: float = 2.0, **values: Any) -> LayerProfile:
    """A layer that takes so many seconds per sample."""
    return LayerProfile(name, Cost(0.0, forward), Cost(0.0, backward), **values)


def profile(layers: Sequence[LayerProfile], tensors: Sequence[Tensor] | None = None, **values: Any) -> Profile:
    """Layers one after another, with 10 bytes per sample between them unless told otherwise."""
    if tensors is None:
        tensors = [Tensor(i, (i + 1,), Cost(0.0, 10.0)) for i in range(len(layers) - 1)]
    return Profile("model", "none", (1, 2), tuple(layers), tuple(tensors), **values)


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


def test_shards_divide_slots_and_updates_by_the_replicas() -> None:
    """Weights that stages share are kept by the devices of all of them."""
    layers = letters(4, parameter_bytes=100, slot_bytes=600, apply_seconds=6.0)
    model = profile(layers, shared=[SharedParameters((0, 3), 40, 120)])
    plan = Plan.manual([*"b"], [[0, 1], [2, 3, 4]], 1, 6)
    whole, shards = (CostModel(plan.with_options(optimizer_shards=value), model, cluster(5)) for value in (False, True))
    saved = [whole.stored_bytes[device] - shards.stored_bytes[device] for device in range(5)]
    assert saved == pytest.approx([1200 / 2 + 120 * 4 / 5] * 2 + [1200 * 2 / 3 + 120 * 4 / 5] * 3)
    assert [shards.apply_seconds(0, 0), shards.apply_seconds(1, 2)] == pytest.approx([6.0, 4.0])
    assert whole.needed_bytes(0, 1) - shards.needed_bytes(0, 1) == pytest.approx(saved[0])


def test_rows_in_shards_divide_tables_and_take_the_place_of_their_gradients() -> None:
    """Of 100 bytes of a layer 60 are a table, of which a sample looks up 4: 2 replicas of 3 samples, 2 layers."""
    model = profile(letters(2, parameter_bytes=100, slot_bytes=200, table_bytes=60, row_bytes=Cost(0.0, 4.0)))
    plan = Plan.data_parallel(2, 6)
    whole, rows = (CostModel(plan.with_options(row_shards=value), model, cluster(2)) for value in (False, True))
    assert whole.stored_bytes[0] - rows.stored_bytes[0] == 2 * (60 + 120) / 2 + (2 * 60 - 24)
    # Rows go one way, where an all-reduce brings sums back.
    assert [costs.reductions[0].bytes for costs in (whole, rows)] == [200, 200 - 120 + 24 / 2]
    assert sum(rows.layer_gradients(0)) == rows.reductions[0].bytes
    busy = dataclasses.replace(model, layers=[dataclasses.replace(each, apply_seconds=1.0) for each in model.layers])
    assert CostModel(rows.plan, busy, cluster(2)).apply_seconds(0, 0) == pytest.approx(2 * (0.4 + 0.6 / 2))
    both = CostModel(plan.with_options(row_shards=True, optimizer_shards=True), model, cluster(2))
    assert rows.stored_bytes[0] - both.stored_bytes[0] == 2 * (200 - 120) / 2, "slots of the rest"
    alone = CostModel(Plan.data_parallel(1, 6, row_shards=True), model, cluster(1))
    assert alone.stored_bytes[0] == whole.stored_bytes[0]


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


# --- tasks ---


def test_a_task_takes_its_layers_time_and_that_to_start_it_by_the_devices_speed() -> None:
    model = profile(letters(3), task_seconds=0.5)
    costs = CostModel(Plan.manual([*"b"], [[0, 1], [2]], 2, 8), model, cluster(3, speeds=[1.0, 2.0, 0.5]))
    assert costs.seconds(Task(0, Phase.FORWARD, 0, 0)) == 0.5 + 2 * 2.0
    assert costs.seconds(Task(0, Phase.FORWARD, 0, 1)) == (0.5 + 2 * 2.0) / 2
    assert costs.seconds(Task(0, Phase.BACKWARD, 1, 0)) == 0.5 + 2 * 4.0
    assert costs.seconds(Task(1, Phase.BACKWARD, 1)) == (0.5 + 4 * 2.0) / 0.5


GRADIENTS = (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)


def test_the_two_gradients_of_a_layer_are_half_of_b_each_unless_the_profile_knows() -> None:
    plan = Plan.straight([*"ab"], 4, 2)
    layers = [layer("a"), layer("b", backward_weight=Cost(0.0, 0.5)), layer("c")]
    layers = [dataclasses.replace(one, parameter_bytes=4) for one in layers]
    costs = CostModel(plan, profile(layers), cluster(3))
    assert [costs.seconds(Task(1, phase, 0)) for phase in GRADIENTS] == [3.0, 1.0]
    assert [costs.seconds(Task(2, phase, 0)) for phase in GRADIENTS] == [2.0, 2.0]
    whole = CostModel(Plan.straight([*"a"], 2, 1), profile([layers[0], layers[1], layer("c")]), cluster(2))
    assert [whole.seconds(Task(1, phase, 0)) for phase in GRADIENTS] == [7.0, 1.0]  # c has no parameters


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


# --- what goes between stages ---


TEN = Cost(0.0, 10.0)


def two_stages(senders: int, receivers: int, samples: int, size: Cost = TEN) -> CostModel:
    devices = [range(senders), range(senders, senders + receivers)]
    model = profile(letters(2), [Tensor(0, (1,), size)])
    return CostModel(Plan.manual([*"a"], devices, 1, samples), model, cluster(senders + receivers))


def test_three_to_two_sends_from_owner_to_owner_and_back() -> None:
    costs = two_stages(3, 2, 6)
    assert costs.messages(0, 1, 0) == (Message(0, 0, 20), Message(1, 0, 10), Message(1, 1, 10), Message(2, 1, 20))
    assert costs.messages(0, 1, 0, backward=True) == (
        Message(0, 0, 20),
        Message(0, 1, 10),
        Message(1, 1, 10),
        Message(1, 2, 20),
    )


def test_no_gradient_of_what_has_none() -> None:
    model = profile(letters(2), [Tensor(0, (1,), Cost(0.0, 5.0), differentiable=False)])
    costs = CostModel(Plan.straight([*"a"], 2, 1), model, cluster(2))
    assert [message.bytes for message in costs.messages(0, 1, 0)] == [10.0]
    assert costs.messages(0, 1, 0, backward=True) == ()


def test_a_tensor_without_bytes_is_waited_for_all_the_same() -> None:
    model = profile(letters(2), [Tensor(0, (1,), ZERO)])
    costs = CostModel(Plan.straight([*"a"], 2, 1), model, cluster(2))
    assert costs.messages(0, 1, 0) == costs.messages(0, 1, 0, backward=True) == (Message(0, 0, 0.0),)


# --- reductions ---


def test_tied_weights_are_reduced_over_all_replicas_of_all_their_stages() -> None:
    model = profile(letters(4, parameter_bytes=100), shared=[SharedParameters((0, 3), 40), SharedParameters((1, 2), 7)])
    costs = CostModel(Plan.manual([*"ac"], [[0], [1, 2], [3, 4]], 1, 2), model, cluster(5))
    assert [(r.stages, r.devices, r.bytes) for r in costs.reductions] == [
        ((1,), (1, 2), 207),
        ((2,), (3, 4), 100),
        ((0, 2), (0, 3, 4), 40),
    ]
    assert [cost.parameter_bytes for cost in costs.stages] == [140, 207, 140]


def in_pieces(layers: Sequence[LayerProfile], cuts: str, recompute: str = "none", **values: Any) -> CostModel:
    plan = Plan.data_parallel(2, 4, recompute=recompute, backward_cuts=[*cuts])
    return CostModel(plan, profile(layers, **values), cluster(2))


def test_pieces_are_ready_as_b_runs_through_the_layers_from_the_last() -> None:
    layers = [
        layer("a", backward=1.0, parameter_bytes=30),
        layer("b", backward=2.0, parameter_bytes=50),
        layer("c", backward=4.0, parameter_bytes=60),
        layer("d", backward=1.0, parameter_bytes=40),
    ]
    assert in_pieces(layers, "b").backward_pieces(0) == ((5 / 8, 100), (1.0, 80))
    assert in_pieces(layers, "abc").backward_pieces(0) == ((1 / 8, 40), (5 / 8, 60), (7 / 8, 50), (1.0, 30))
    assert in_pieces(layers, "").backward_pieces(0) == ((1.0, 180),)


def test_parameters_that_layers_of_one_stage_share_are_in_the_piece_of_the_first() -> None:
    layers = letters(3, parameter_bytes=10)
    costs = in_pieces(layers, "ab", shared=[SharedParameters((1, 2), 5)])
    assert costs.backward_pieces(0) == ((pytest.approx(1 / 3), 10), (pytest.approx(2 / 3), 15), (1.0, 10))
    assert sum(size for _, size in costs.backward_pieces(0)) == costs.reductions[0].bytes


def test_a_piece_of_a_split_backward_is_one_of_bw() -> None:
    layers = letters(4, backward=3.0, backward_weight=Cost(0.0, 1.0), parameter_bytes=8)
    plan = Plan.manual([*"b"], [[0], [1, 2]], 2, 4, "zb_h1", backward_cuts=["c"])
    assert CostModel(plan, profile(layers), cluster(3)).backward_pieces(1) == ((1 / 2, 8), (1.0, 8))


def test_pieces_end_within_a_bw_that_takes_less_than_its_layers_say() -> None:
    layers = letters(4, backward=1.0, backward_weight=Cost(0.0, 3.0), parameter_bytes=8)
    plan = Plan.manual([*"a"], [[0], [1, 2]], 2, 4, "zb_h1", backward_cuts=["b", "c"])
    assert CostModel(plan, profile(layers), cluster(3)).backward_pieces(1) == (
        (pytest.approx(1 / 3), 8),
        (pytest.approx(2 / 3), 8),
        (1.0, 8),
    )


def test_an_update_takes_its_layers_time_by_the_devices_speed() -> None:
    costs = CostModel(Plan.data_parallel(2, 2), profile(letters(2, apply_seconds=0.5)), cluster(2, speeds=[1.0, 4.0]))
    assert [costs.apply_seconds(0, device) for device in (0, 1)] == [1.0, 0.25]


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


def test_needed_bytes_are_what_is_stored_and_k_times_the_residuals_and_the_running_b() -> None:
    costs = heavy(None)
    assert [costs.needed_bytes(0, k) for k in (1, 2, 4)] == [260 + k * 60 + 7 for k in (1, 2, 4)]
    assert [costs.needed_bytes(1, k) for k in (1, 2, 4)] == [260 + k * 80 + 7 for k in (1, 2, 4)]


def test_stages_of_one_device_share_its_memory() -> None:
    model = profile(letters(3, **HEAVY), shared=[SharedParameters((0, 2), 40, 5)])
    plan = Plan.manual([*"ab"], [[0], [1], [0]], 1, 1, "modulo")
    costs = CostModel(plan, model, cluster(2))
    assert costs.stored_bytes == {0: 2 * 260 + 2 * 40 + 5, 1: 260}
    assert costs.needed_bytes(0, 1) == costs.needed_bytes(2, 1) == 605 + (30 + 40) + 4
    assert costs.needed_bytes(1, 1) == 260 + 40 + 4
    assert costs.reductions == ()
    assert CostModel(plan, model, cluster(2, memory=679)).holds == (1, 1, 1)
    assert CostModel(plan, model, cluster(2, memory=678)).holds == (0, 1, 0)


def test_what_is_delayed_counts_where_backwards_are_split() -> None:
    layers = letters(2, **{**HEAVY, "delayed_bytes": Cost(0.0, 50.0)})
    whole, split = (
        CostModel(Plan.straight([*"a"], 4, 4, policy), profile(layers), cluster(2)) for policy in ("gpipe", "zb_h1")
    )
    assert whole.needed_bytes(1, 2) == 260 + 2 * 40 + 4
    assert split.needed_bytes(1, 2) == 260 + 2 * 50 + 4
    assert split.needed_bytes(0, 2) == 260 + 2 * 30 + 4  # the first stage's Bx does nothing


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


# --- wrong input ---
