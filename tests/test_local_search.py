"""The steps of the planner's local search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.local_search import neighbours
from dapple_tf.planning.plan_request import Changes, PlanRequest


def request(plan: Plan, layers: int, *servers: int, **options: Any) -> PlanRequest:
    batch = plan.global_batch_size
    return PlanRequest.of(profile_of(layers), cluster_of(*servers), batch, (1, 2, 4, 8), **options)


def changed(plan: Plan, layers: int, *servers: int) -> set[tuple[tuple[str, ...], tuple[tuple[int, ...], ...], int]]:
    plans = neighbours(plan, request(plan, layers, *servers))
    return {(other.cuts, other.devices, other.micro_batches) for other in plans}


def test_cuts_move_by_up_to_two_layers_and_never_empty_a_stage() -> None:
    plan = Plan.manual(["layer_1"], [[0], [1]], 2, 8)
    cuts = {cuts for cuts, devices, count in changed(plan, 4, 2) if devices == plan.devices and count == 2}
    assert cuts == {("layer_0",), ("layer_2",)}


def test_devices_move_between_neighbours_and_in_from_what_is_free() -> None:
    plan = Plan.manual(["layer_1"], [[0, 1], [2]], 2, 8)
    devices = {devices for cuts, devices, count in changed(plan, 4, 3, 2) if cuts == plan.cuts and count == 2}
    assert devices == {
        ((0,), (1, 2)),  # from the first stage to the second
        ((0,), (2,)),  # one less
        ((1,), (2,)),
        ((0, 1, 3), (2,)),  # the free device of server 1 joins
        ((0, 1), (2, 3)),
        ((0, 3), (2,)),  # or takes a place
        ((0, 1), (3,)),
    }


def test_micro_batches_double_and_halve() -> None:
    plan = Plan.manual(["layer_1"], [[0], [1]], 2, 8)
    same = {count for cuts, devices, count in changed(plan, 4, 2) if (cuts, devices) == (plan.cuts, plan.devices)}
    assert same == {1, 4}


def test_stages_are_merged_and_split() -> None:
    plan = Plan.manual(["layer_1"], [[0, 1], [2]], 2, 8)
    others = changed(plan, 4, 4)
    assert ((), ((0, 1, 2),), 2) in others
    assert (("layer_0", "layer_1"), ((0,), (1,), (2,)), 2) in others  # shares its devices
    assert (("layer_1", "layer_2"), ((0, 1), (2,), (3,)), 2) in others  # gets the free one


def test_all_are_legal_and_none_has_more_replicas_than_samples() -> None:
    plan = Plan.manual(["layer_0"], [[0, 1], [2]], 4, 8)
    for other in neighbours(plan, request(plan, 3, 5)):
        assert max(other.replicas) <= 8 // other.micro_batches


def exchange(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
    yield {"devices": plan.devices[::-1]}


def test_moves_of_ones_own_come_last() -> None:
    plan = Plan.manual(["layer_1"], [[0, 1], [2]], 2, 8)
    *built_in, last = neighbours(plan, request(plan, 4, 3, moves=[exchange]))
    assert last.devices == ((2,), (0, 1))
    assert built_in == [*neighbours(plan, request(plan, 4, 3))]


def test_what_moves_may_not_change_is_refused() -> None:
    def smaller(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
        yield {"global_batch_size": 1, "cut": ()}

    plan = Plan.manual(["layer_1"], [[0, 1], [2]], 2, 8)
    with pytest.raises(PlanError, match=r"^move smaller changes cut, global_batch_size; a move may change .*devices"):
        [*neighbours(plan, request(plan, 4, 3, moves=[smaller]))]
    with pytest.raises(PlanError, match="moves has 'left'; give functions"):
        request(plan, 4, 3, moves=["left"])
