"""The steps of the planner's local search, and its simulations that end early or go on from where plans differ."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hardware import cluster_of, profile_of
from test_simulator import relayed_case

from dapple_tf.describe.plan import ALL_REDUCE, Plan, PlanError
from dapple_tf.planning.moves import neighbours
from dapple_tf.planning.plan_request import Changes, Move, PlanRequest
from dapple_tf.planning.planner import plan as find_plan
from dapple_tf.planning.reductions import early_reductions
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import LeastTimes, run, tried

PLAN = Plan.manual(["layer_1"], [[0, 1], [2]], 2, 8)


def request(layers: int = 4, *servers: int, batch: int = 8, **options: Any) -> PlanRequest:
    return PlanRequest(profile_of(layers), cluster_of(*(servers or (3,))), batch, micro_batches=(1, 2, 4, 8), **options)


def changed(plan: Plan, layers: int, *servers: int) -> set[tuple[tuple[str, ...], tuple[tuple[int, ...], ...], int]]:
    plans = [*neighbours(plan, request(layers, *servers))]
    assert all(max(other.replicas) <= 8 // other.micro_batches for other in plans)
    return {(other.cuts, other.devices, other.micro_batches) for other in plans}


def test_cuts_micro_batches_and_devices_move() -> None:
    straight = Plan.manual(["layer_1"], [[0], [1]], 2, 8)
    others = changed(straight, 4, 2)
    cuts = {cuts for cuts, devices, count in others if devices == straight.devices and count == 2}
    assert cuts == {("layer_0",), ("layer_2",)}, "by up to two layers, and no stage is empty"
    assert {count for *same, count in others if same == [straight.cuts, straight.devices]} == {1, 4}
    devices = {devices for cuts, devices, count in changed(PLAN, 4, 3, 2) if cuts == PLAN.cuts and count == 2}
    assert devices == {
        ((0,), (1, 2)),  # from the first stage to the second
        ((0,), (2,)),  # one less
        ((1,), (2,)),
        ((0, 1, 3), (2,)),  # the free device of server 1 joins
        ((0, 1), (2, 3)),
        ((0, 3), (2,)),  # or takes a place
        ((0, 1), (3,)),
    }


def test_stages_are_merged_and_split() -> None:
    others = changed(PLAN, 4, 4)
    assert ((), ((0, 1, 2),), 2) in others
    assert (("layer_0", "layer_1"), ((0,), (1,), (2,)), 2) in others  # shares its devices
    assert (("layer_1", "layer_2"), ((0, 1), (2,), (3,)), 2) in others  # gets the free one


# ---- moves of one's own


def yielding(made: Any) -> Move:
    def mine(plan: Plan, request: PlanRequest) -> Any:
        return made

    return mine


def test_moves_of_ones_own_come_last_and_impossible_plans_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    changes: list[Changes] = [
        {"devices": ((), (2,))},
        {"devices": ((0, 1), (3,))},  # There are three devices.
        {"cuts": ("layer_3",)},  # The last layer.
        {"micro_batches": 100},
        {"devices": ((2,), (0, 1)), "warm_up": (3, 1), "micro_batches": 4},
    ]
    with caplog.at_level("DEBUG", logger="dapple_tf"):
        *built_in, last = neighbours(PLAN, request(moves=[yielding(changes)]))
    assert (last.devices, last.micro_batches, last.warm_up) == (((2,), (0, 1)), 4, (3, 1))
    assert built_in == [*neighbours(PLAN, request())]
    assert caplog.messages == ["move mine changed a plan in 5 ways, 1 of them legal"]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (None, "move mine returned None; let it yield dicts of a plan's options, such as {'micro_batches': 8}"),
        ({"micro_batches": 4}, "move mine returned {'micro_batches': 4}; let it yield dicts"),
        ([5], "move mine yields 5; let it yield dicts"),
        ([{"global_batch_size": 1, "cut": ()}], "move mine changes cut, global_batch_size; a move may change "),
        ([{"devices": "nonsense"}], "move mine yields {'devices': 'nonsense'}: devices is 'nonsense'; give a list"),
        ([{"micro_batches": "a"}], "move mine yields {'micro_batches': 'a'}: micro_batches: 'a' isn't a whole number"),
        ([{"schedule": "nosuch"}], "move mine yields {'schedule': 'nosuch'}: unknown schedule 'nosuch'; use one of"),
        ([{"recompute": "all"}], "move mine yields {'recompute': 'all'}: unknown recompute 'all'; use one of"),
        ([{"jit_compile": 1}], "move mine yields {'jit_compile': 1}: jit_compile is 1; it must be True or False"),
        ([{"cuts": ["nowhere"]}], "move mine cuts after 'nowhere', which is no layer of"),
    ],
)
def test_a_wrong_move_is_named(made: Any, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        [*neighbours(PLAN, request(moves=[yielding(made)]))]
    assert str(caught.value).startswith(text)
    assert "report" not in str(caught.value)
    with pytest.raises(PlanError, match="moves has 'left'; give functions"):
        request(moves=["left"])


def test_an_exception_in_a_move_names_the_move() -> None:
    def mine(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
        yield {"micro_batches": 1 // 0}

    with pytest.raises(ZeroDivisionError) as caught:
        [*neighbours(PLAN, request(moves=[mine]))]
    assert caught.value.__notes__ == ["in the move mine, of a plan of 2 stages"]


def test_moves_may_change_fields_that_the_planner_leaves_alone_and_end_though_they_dont() -> None:
    """Plans that differed in such a field only counted as simulated already."""

    def more_in_flight(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
        while True:
            yield {"warm_up": tuple(2 * (plan.num_stages - stage) for stage in range(plan.num_stages))}

    def asked(*moves: Move) -> Plan:
        profile, cluster = profile_of(4, size=1e6, parameters=10**8), cluster_of(1, 1, inter_bandwidth=1e9)
        return find_plan(profile, cluster, 16, micro_batches=8, schedule="dapple_a", moves=moves)

    without, own = asked(), asked(more_in_flight)
    assert without.num_stages == 2 and without.warm_up is None and own.warm_up == (4, 2)
    assert own.report is not None and without.report is not None and own.report.latency < without.report.latency


# ---- trials: the same numbers as whole simulations


def some_of(seeds: range) -> list[CostModel]:
    """The costs of random plans that are possible, with relays, unlike slices and all-reduces by server."""
    made = []
    for seed in seeds:
        plan, profile, cluster = relayed_case(seed)
        draw = random.Random(seed)
        with contextlib.suppress(PlanError):
            ways, carried = [draw.choice(ALL_REDUCE) for _ in plan.devices], draw.choice([0, 0, 0, 1])
            plan = plan.with_options(backward_cuts=(), all_reduce=ways, carried_updates=carried)
            costs = CostModel(plan, profile, cluster)
            run(costs)
            made.append(costs)
    return made


def least(costs: CostModel) -> float:
    delaying = {stage for stage in range(costs.plan.num_stages) if costs.delays(stage)}
    return LeastTimes(costs, delaying, carried=range(costs.plan.num_stages * costs.plan.carried_updates)).busiest()


def test_a_step_within_its_limit_is_simulated_as_without_and_none_is_given_up_wrongly() -> None:
    known = some_of(range(120))
    assert len(known) > 20
    for costs in known:
        whole = run(costs)
        within = tried(costs, whole.latency)
        assert within.simulation is not None and within.simulation.spans == whole.spans
        computed = max(span.end for span in whole.spans if span.kind in ("F", "B", "Bx", "Bw"))
        assert within.tail == pytest.approx(whole.latency - computed)
        assert tried(costs, 0.1 * computed).simulation is None  # all-reduces may end during backwards
        assert 0 < least(costs) <= whole.latency * (1 + 1e-9)


def test_steps_with_other_cuts_go_on_from_where_they_differ() -> None:
    resumed = 0
    for costs in some_of(range(120)):
        whole = tried(costs)
        for plan in () if costs.plan.carried_updates else early_reductions(costs):
            cut = CostModel(plan, costs.profile, costs.cluster)
            simulation, own = run(cut), whole.with_cuts(cut).simulation
            assert own is not None and (own.latency, own.spans) == (simulation.latency, simulation.spans)
            assert tried(costs, simulation.latency).simulation is not None, "a limit is for the best way to cut"
            resumed += 1
        assert whole.simulation is not None and whole.simulation.spans == run(costs).spans
    assert resumed > 5


def test_no_plan_that_is_fast_enough_once_cut_is_given_up() -> None:
    """All-reduces hold up tasks, and may be over before the backwards during which they run."""
    for costs in some_of(range(120)):
        for plan in early_reductions(costs):
            cut = CostModel(plan, costs.profile, costs.cluster)
            latency = run(cut).latency
            assert all(tried(own, latency).simulation is not None for own in (costs, cut))
            assert least(cut) <= latency * (1 + 1e-9)
        waiting = dataclasses.replace(costs.plan, wait_free=False)
        assert not [*early_reductions(CostModel(waiting, costs.profile, costs.cluster))]
