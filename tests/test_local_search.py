"""The steps of the planner's local search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hardware import cluster_of, profile_of

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.local_search import neighbours
from dapple_tf.planning.plan_request import Changes, Move, PlanRequest
from dapple_tf.planning.planner import plan as find_plan


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
    with pytest.raises(
        PlanError, match=r"^move smaller changes cut, global_batch_size; a move may .*devices"
    ) as caught:
        [*neighbours(plan, request(plan, 4, 3, moves=[smaller]))]
    assert "report" not in str(caught.value)
    with pytest.raises(PlanError, match="moves has 'left'; give functions"):
        request(plan, 4, 3, moves=["left"])


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (None, "move mine returned None; let it yield dicts of a plan's fields, such as {'micro_batches': 8}"),
        ({"micro_batches": 4}, "move mine returned {'micro_batches': 4}; let it yield dicts"),
        ([None], "move mine yields None; let it yield dicts of a plan's fields"),
        ([5], "move mine yields 5; let it yield dicts"),
        ([{"devices": "nonsense"}], "move mine yields {'devices': 'nonsense'}: devices is 'nonsense'; give a list"),
        ([{"micro_batches": "a"}], "move mine yields {'micro_batches': 'a'}: micro_batches: 'a' isn't a whole number"),
        ([{"schedule": "nosuch"}], "move mine yields {'schedule': 'nosuch'}: unknown schedule 'nosuch'; use one of"),
        ([{"recompute": "all"}], "move mine yields {'recompute': 'all'}: unknown recompute 'all'; use one of"),
        ([{"jit_compile": 1}], "move mine yields {'jit_compile': 1}: jit_compile is 1; it must be True or False"),
        ([{"cuts": ["nowhere"]}], "move mine cuts after 'nowhere', which is no layer of"),
    ],
)
def test_a_wrong_move_is_named(made: Any, text: str) -> None:
    def mine(plan: Plan, request: PlanRequest) -> Any:
        return made

    plan = Plan.manual(["layer_1"], [[0, 1], [2]], 2, 8)
    with pytest.raises(PlanError) as caught:
        [*neighbours(plan, request(plan, 4, 3, moves=[mine]))]
    assert str(caught.value).startswith(text)


def test_what_makes_no_legal_plan_of_this_model_and_cluster_is_skipped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def mine(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
        yield {"devices": ((), (2,))}
        yield {"devices": ((0, 1), (3,))}  # There are three devices.
        yield {"cuts": ("layer_3",)}  # The last layer.
        yield {"micro_batches": 100}
        yield {"micro_batches": 4, "warm_up": (3, 1)}

    plan = Plan.manual(["layer_1"], [[0, 1], [2]], 2, 8)
    with caplog.at_level("DEBUG", logger="dapple_tf"):
        *_, last = neighbours(plan, request(plan, 4, 3, moves=[mine]))
    assert (last.micro_batches, last.warm_up) == (4, (3, 1))
    assert caplog.messages == ["move mine changed a plan in 5 ways, 1 of them legal"]


def test_an_exception_in_a_move_names_the_move() -> None:
    def mine(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
        yield {"micro_batches": 1 // 0}

    plan = Plan.manual(["layer_1"], [[0, 1], [2]], 2, 8)
    with pytest.raises(ZeroDivisionError) as caught:
        [*neighbours(plan, request(plan, 4, 3, moves=[mine]))]
    assert caught.value.__notes__ == ["in the move mine, of a plan of 2 stages"]


@pytest.mark.parametrize("changes", [{"micro_batches": 2}, {"micro_batches": 100}])
def test_a_move_without_end_ends(changes: Changes) -> None:
    def endless(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
        while True:
            yield changes

    find_plan(profile_of(2), cluster_of(2), 8, micro_batches=2, moves=[endless])


def test_moves_may_change_what_the_planner_leaves_alone() -> None:
    """Plans that differed in such a field only counted as simulated already."""

    def more_in_flight(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
        yield {"warm_up": tuple(2 * (plan.num_stages - stage) for stage in range(plan.num_stages))}

    def asked(*moves: Move) -> Plan:
        profile, cluster = profile_of(4, size=1e6, parameters=10**8), cluster_of(1, 1, inter_bandwidth=1e9)
        return find_plan(profile, cluster, 16, micro_batches=8, schedule="dapple_a", moves=moves)

    without, own = asked(), asked(more_in_flight)
    assert without.num_stages == 2 and without.warm_up is None and own.warm_up == (4, 2)
    assert own.report is not None and without.report is not None and own.report.latency < without.report.latency
