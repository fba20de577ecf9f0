"""Relays hand on tensors that several later stages read: the rule, the simulated step, its memory, the planner."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hardware import cluster_of
from test_simulator import random_case

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import Cost, LayerBuffers, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.planning.planner import plan as planned
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.legs import Leg
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.timeline import Span
from graph_passes.ir.relays import sources_of

# ---- who gets a tensor from whom


@pytest.mark.parametrize(
    ("readers", "relays", "devices", "sources"),
    [
        ((1, 2, 3), (1, 2), "abcd", {1: 0, 2: 1, 3: 2}),
        ((1, 2, 3), (), "abcd", {1: 0, 2: 0, 3: 0}),
        ((1, 2, 3), (2,), "abcd", {1: 0, 2: 0, 3: 2}),
        ((2, 4), (1, 2, 3), "abcde", {2: 0, 4: 2}),  # what a stage doesn't read it doesn't hand on
        ((1, 2, 3), (1, 2), "abab", {1: 0, 2: 0, 3: 1}),  # interleaved: it is there already
        ((1, 2, 3, 4, 5), (1, 2, 3, 4), "abccba", {1: 0, 2: 1, 3: 2, 4: 1, 5: 0}),  # there and back
        ((1, 2, 3), (1, 2, 3), "aabb", {1: 0, 2: 1, 3: 2}),  # chunks
    ],
)
def test_a_stage_gets_a_tensor_from_the_nearest_that_has_it(
    readers: Sequence[int], relays: Sequence[int], devices: str, sources: dict[int, int]
) -> None:
    assert sources_of(0, readers, relays, devices) == sources


def layers_of(count: int, seconds: float = 1.0, **options: Any) -> tuple[LayerProfile, ...]:
    cost = Cost(0.0, seconds)
    return tuple(LayerProfile(f"l{index}", cost, cost * 2.0, **options) for index in range(count))


def skips(count: int, size: float = 4.0, *, differentiable: bool = True, **options: Any) -> Profile:
    """Layers in a row, which hand nothing to each other but all read a tensor of the first."""
    tensors = [Tensor(index, (index + 1,), Cost(0.0, 0.0)) for index in range(1, count - 1)]
    first = Tensor(0, tuple(range(1, count)), Cost(0.0, size), differentiable=differentiable)
    return Profile("skips", "none", (1,), layers_of(count, **options), (first, *tensors))


def straight(count: int, micro_batches: int, **options: Any) -> Plan:
    return Plan.straight([f"l{index}" for index in range(count - 1)], micro_batches, micro_batches, **options)


def slow(count: int) -> Cluster:
    """Devices of which each sends 1 byte a second."""
    return cluster_of(*[1] * count, inter_bandwidth=1.0)


def test_tensors_with_the_same_readers_travel_together() -> None:
    tensors = (
        Tensor(0, (1, 2, 3), Cost(0.0, 1.0)),
        Tensor(0, (1, 2, 3), Cost(0.0, 2.0), differentiable=False),
        Tensor(0, (2, 3), Cost(0.0, 4.0)),
        Tensor(0, (3,), Cost(0.0, 8.0)),
        Tensor(2, (3,), Cost(0.0, 16.0)),
    )
    profile = Profile("four", "none", (1,), layers_of(4), tensors)
    legs = CostModel(straight(4, 2, relays=[1, 2]), profile, slow(4)).legs
    shown = [(leg.sender, leg.receiver, leg.forward.per_sample, leg.backward.per_sample, leg.source) for leg in legs]
    assert shown == [
        (0, 1, 3.0, 1.0, None),
        (0, 2, 4.0, 4.0, None),
        (0, 3, 8.0, 8.0, None),
        (1, 2, 3.0, 1.0, 0),
        (2, 3, 16.0, 16.0, None),
        (2, 3, 3.0, 1.0, 3),
        (2, 3, 4.0, 4.0, 1),
    ]
    assert [leg.onward for leg in legs] == [(3,), (6,), (), (5,), (), (), ()]


# ---- the simulated step


def sends(step: Simulation) -> list[tuple[int, int | None, float, float]]:
    """(device, target, start, end) of the transfers of some bytes."""
    return [(s.device or 0, s.target, s.start, s.end) for s in step.spans if s.kind == "send" and s.bytes]


def test_a_relay_hands_a_tensor_on_as_soon_as_it_has_come_and_adds_its_gradient_before_it_returns() -> None:
    direct = simulate(straight(3, 1), skips(3), slow(3))
    assert sends(direct) == [(0, 1, 1, 5), (0, 2, 5, 9), (2, 0, 12, 16), (1, 0, 16, 20)]
    relayed = simulate(straight(3, 1, relays=[1]), skips(3), slow(3))
    #   0 -> 1 from 1 to 5, 1 -> 2 from 5 to 9, while stage 1 computes from 5 to 6; stage 2 from 9 to 12; its gradient
    #   is at stage 1 at 16, which has been ready since 14; the sum is at stage 0 at 20.
    assert sends(relayed) == [(0, 1, 1, 5), (1, 2, 5, 9), (2, 1, 12, 16), (1, 0, 16, 20)]
    assert relayed.latency == direct.latency == 22


def relayed_case(seed: int) -> tuple[Plan, Profile, Cluster]:
    """A case of `random_case`, with tensors that several layers read and stages that hand them on."""
    plan, profile, cluster = random_case(seed)
    draw = random.Random(seed)
    count = len(profile.layers)
    tensors = [*profile.tensors]
    for _ in range(draw.randrange(1, 4) if count > 2 else 0):
        maker = draw.randrange(count - 2)
        readers = tuple(sorted(draw.sample(range(maker + 1, count), draw.randrange(2, count - maker))))
        size = Cost(draw.choice([0.0, 2.0]), draw.uniform(1, 20))
        tensors.append(Tensor(maker, readers, size, differentiable=draw.random() < 0.7))
    relays = draw.choice([range(plan.num_stages), draw.sample(range(plan.num_stages), (plan.num_stages + 1) // 2)])
    profile = dataclasses.replace(profile, tensors=tuple(tensors))
    return dataclasses.replace(plan, relays=tuple(relays)), profile, cluster


def arrivals(step: Simulation, leg: Leg, micro_batch: int, device: int, *, backward: bool) -> list[float]:
    return [span.end for span in over(step, leg, micro_batch, backward=backward) if span.target == device]


def over(step: Simulation, leg: Leg, micro_batch: int, *, backward: bool) -> list[Span]:
    stage = leg.receiver if backward else leg.sender
    return [s for s in step.spans if (s.leg, s.micro_batch, s.stage) == (leg.number, micro_batch, stage)]


@pytest.mark.parametrize("seed", range(30))
def test_a_slice_leaves_a_relay_once_and_when_all_of_it_is_there(seed: int) -> None:
    plan, profile, cluster = relayed_case(seed)
    step = simulate(plan, profile, cluster)
    costs = step.costs
    repeats = False
    tasks = {(s.stage, s.micro_batch, s.replica, s.kind[0]): s for s in step.spans if s.kind in ("F", "B", "Bx")}
    for leg, micro_batch in itertools.product(costs.legs, range(plan.micro_batches)):
        for backward in (False, True):
            messages = costs.leg_messages(leg, micro_batch, backward=backward)
            ends = (leg.receiver, leg.sender) if backward else (leg.sender, leg.receiver)
            apart = [m for m in messages if plan.devices[ends[0]][m.sender] != plan.devices[ends[1]][m.receiver]]
            spans = over(step, leg, micro_batch, backward=backward)
            assert len(spans) == len(apart)
            for span in spans:
                own = tasks[ends[0], micro_batch, span.replica, "B" if backward else "F"]
                if backward or leg.source is None:
                    assert span.start >= own.end - 1e-9
                waits = [costs.legs[number] for number in leg.onward] if backward else [costs.legs[leg.source or 0]]
                for other in waits if backward or leg.source is not None else ():
                    came = arrivals(step, other, micro_batch, span.device or 0, backward=backward)
                    assert span.start >= max(came, default=0.0) - 1e-9
    with contextlib.suppress(PlanError, ValueError):  # Not all schedules repeat step after step.
        simulate(dataclasses.replace(plan, relays=()), profile, cluster, next_forward=True)
        repeats = True
    if repeats:
        simulate(plan, profile, cluster, next_forward=True)


def test_replicas_whose_devices_begin_the_next_step_at_other_times_send_what_a_relay_hands_on() -> None:
    """Devices 1 and 2 run stage 0's forwards first, device 0 only that of the first micro-batch: it has all stages."""
    plan = Plan.manual(["l0", "l1"], [[0, 1, 2], [3, 0], [0]], 2, 26, "modulo", relays=[1])
    step = simulate(plan, skips(3, parameter_bytes=4), slow(4), next_forward=True)
    direct = simulate(dataclasses.replace(plan, relays=()), skips(3, parameter_bytes=4), slow(4), next_forward=True)
    assert {kind_of(span) for span in step.spans} == {kind_of(span) for span in direct.spans}


def kind_of(span: Span) -> tuple[str, int, int | None]:
    return ("send", 0, 0) if span.kind == "send" else (span.kind, span.stage, span.micro_batch)


# ---- memory


def test_what_waits_on_its_way_counts() -> None:
    """Stage 1 needs the tensor for 1 s, but its card for 8 s: the tensors that stage 0 makes meanwhile wait there."""
    where = cluster_of(2, 1, inter_bandwidth=0.5, intra_bandwidth=100.0)
    profile, plan = skips(3, size=4.0, buffers=LayerBuffers()), straight(3, 6, schedule="gpipe")
    direct, relayed = (simulate(dataclasses.replace(plan, relays=r), profile, where) for r in ([], [1]))
    assert relayed.peak_bytes[1] >= direct.peak_bytes[1] + 3 * 4.0
    assert relayed.costs.needed_bytes(1, 1) == direct.costs.needed_bytes(1, 1) + 2 * 4.0


def test_a_gradient_waits_for_that_of_its_relay() -> None:
    layers = [dataclasses.replace(layer, buffers=LayerBuffers()) for layer in layers_of(3)]
    layers[1] = dataclasses.replace(layers[1], backward=Cost(0.0, 50.0))
    profile = dataclasses.replace(skips(3, size=4.0), layers=tuple(layers))
    step = simulate(straight(3, 1, relays=[1]), profile, slow(3))
    (back,) = [span for span in step.spans if span.kind == "B" and span.stage == 1]
    (came,) = [span.end for span in step.spans if (span.device, span.target) == (2, 1) and span.bytes]
    levels = [level for time, level in step.memory[1] if came <= time < back.end]
    assert levels
    assert min(levels) >= 4.0  # from stage 2
    (sent,) = [span.end for span in step.spans if (span.device, span.target) == (1, 0) and span.bytes]
    assert min(level for time, level in step.memory[1] if back.end <= time < sent) >= 4.0  # the sum


# ---- plans


def test_relays_are_checked_and_kept_in_order() -> None:
    plan = straight(4, 4, relays=[2, 1, 2])
    assert plan.relays == (1, 2)
    assert Plan.from_json(plan.to_json()) == plan
    assert "stages 1 2 hand on what they read" in str(plan)
    with pytest.raises(PlanError, match="relays has stage 4; with 4 stages they are numbered 0 to 3"):
        straight(4, 4, relays=[4])
    with pytest.raises(PlanError, match="relays: 'a' isn't a whole number"):
        straight(4, 4, relays=["a"])
    with pytest.raises(PlanError, match=r"operators can't be placed one by one with relays=\(0,\)"):
        Plan.by_operators(2, 2, relays=[0])


# ---- the planner


def test_the_planner_hands_on_what_would_hold_up_the_first_stage() -> None:
    layers = tuple(
        LayerProfile(f"l{index}", Cost(0.0, 0.05), Cost(0.0, 0.1), parameter_bytes=10**9) for index in range(6)
    )
    tensors = (Tensor(0, tuple(range(1, 6)), Cost(0.0, 1e7)), *(Tensor(i, (i + 1,), Cost(0.0, 1e4)) for i in range(5)))
    profile = Profile("skips", "none", (1,), layers, tensors)
    cluster = cluster_of(*[1] * 6, inter_bandwidth=1e8)
    plan = planned(profile, cluster, 32)
    assert plan.relays
    assert plan.report is not None
    assert plan.report.latency == simulate(plan, profile, cluster).latency
    assert plan.report.latency < 0.7 * simulate(dataclasses.replace(plan, relays=()), profile, cluster).latency
