"""The simulator against closed forms, schedules worked out by hand, and what holds for any plan; relays."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hardware import cluster_of as cluster
from schedule_runs import there_and_back

from dapple_tf.describe.cluster import Cluster, Device, Server
from dapple_tf.describe.layer_profile import ZERO, Cost, LayerBuffers, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile, SharedParameters, Tensor
from dapple_tf.planning.planner import plan as planned
from dapple_tf.schedules.schedules import POLICIES, make_schedule
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.legs import Leg
from dapple_tf.simulation.simulator import Simulation, simulate
from dapple_tf.view.timeline import Span
from graph_passes.ir.relays import sources_of
from graph_passes.ir.tasks import Phase, Schedule, Task

NAMES = [f"layer{index}" for index in range(32)]
WHOLE = ("gpipe", "dapple_a", "dapple_b")  # no Bx and Bw
STRAIGHT = [policy for policy in POLICIES if not there_and_back(policy)]  # one stage on each device will do


def profile(
    times: Sequence[tuple[float, float]], sizes: float | Sequence[Tensor] = 1.0, *, shared: Any = (), **layer: Any
) -> Profile:
    """Layers that take (forward, backward) seconds for whatever slice, and send so many bytes per sample."""
    layers = [LayerProfile(NAMES[i], Cost(f), Cost(b), **layer) for i, (f, b) in enumerate(times)]
    if isinstance(sizes, float | int):
        sizes = [Tensor(i, (i + 1,), Cost(0.0, sizes)) for i in range(len(times) - 1)]
    return Profile("model", "none", (1, 2), tuple(layers), tuple(sizes), tuple(shared))


def straight(stages: int, micro_batches: int, schedule: str = "dapple_a", samples: int = 1, **options: Any) -> Plan:
    return Plan.straight(NAMES[: stages - 1], samples * micro_batches, micro_batches, schedule, **options)


def replicated(replicas: Sequence[int], micro_batches: int, samples: int, schedule: str = "dapple_a") -> Plan:
    numbers = itertools.count()
    devices = [list(itertools.islice(numbers, count)) for count in replicas]
    return Plan.manual(NAMES[: len(replicas) - 1], devices, micro_batches, samples * micro_batches, schedule)


def times(step: Simulation, kind: str, **wanted: Any) -> list[tuple[float, float]]:
    """Start and end of the spans of a kind."""
    return sorted(
        (span.start, span.end)
        for span in step.spans
        if span.kind == kind and all(getattr(span, name) == value for name, value in wanted.items())
    )


# --- rows in shards ---


def test_forwards_wait_for_lookups_which_go_one_task_ahead() -> None:
    """A lookup takes 1 s for half of 120 bytes, and the links' latency for indices and for rows."""
    model = profile([(1.0, 2.0)], parameter_bytes=120)
    layers = [dataclasses.replace(layer, table_bytes=120, row_bytes=Cost(0.0, 120.0)) for layer in model.layers]
    model = dataclasses.replace(model, layers=layers)
    plan = Plan.data_parallel(2, 6, 3, row_shards=True)
    link = {"intra_bandwidth": 60.0, "intra_latency": 0.5}
    step = simulate(plan, model, cluster(2, **link))
    assert times(step, "send", target=0) == [(0.0, 2.0), (3.0, 5.0), (6.0, 8.0)]
    assert times(step, "F", device=0) == [(2.0, 3.0), (5.0, 6.0), (8.0, 9.0)]
    # A replica has three slices of 120 bytes, half of which it sends to the other.
    assert times(step, "all_reduce") == [(11.0, 15.0)]
    ready = simulate(plan, model, cluster(2, **link), next_forward=True)
    first, *_ = times(ready, "send", target=0)
    assert first[0] == times(ready, "all_reduce")[0][1], "once the rows are updated"


# --- pipelines with a closed form ---


@pytest.mark.parametrize("schedule", WHOLE)
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (3, 2), (4, 8)])
def test_equal_stages_take_m_plus_s_minus_1_rounds(stages: int, micro_batches: int, schedule: str) -> None:
    step = simulate(straight(stages, micro_batches, schedule), profile([(1.0, 2.0)] * stages), cluster(stages))
    rounds = micro_batches + stages - 1
    assert step.latency == pytest.approx(rounds * 3.0)
    assert step.bubbles == pytest.approx([(stages - 1) / rounds] * stages)
    assert step.throughput == pytest.approx(micro_batches / (rounds * 3.0))


@pytest.mark.parametrize("transfer", [0.25, 1.0])
def test_gpipe_hides_all_transfers_but_those_of_the_first_and_the_last_micro_batch(transfer: float) -> None:
    where = cluster(1, 1, 1, 1, inter_bandwidth=8.0, inter_latency=0.125)
    step = simulate(straight(4, 8, "gpipe"), profile([(1.0, 2.0)] * 4, 8.0 * transfer), where)
    assert step.latency == pytest.approx((8 + 4 - 1) * 3 + 2 * (4 - 1) * (transfer + 0.125))


def test_a_slow_link_is_the_bottleneck_of_gpipe() -> None:
    step = simulate(straight(2, 5, "gpipe"), profile([(1.0, 2.0)] * 2, 12.0), cluster(1, 1, inter_bandwidth=3.0))
    assert step.latency == 1 + 5 * 4 + 1 + 2 + 5 * 4 + 2


def test_one_forward_one_backward_waits_for_a_round_trip() -> None:
    """With K = 1 a micro-batch goes all the way forth and back before the next begins."""
    plan = straight(2, 3, warm_up=(1, 1))
    step = simulate(plan, profile([(1.0, 2.0)] * 2, 8.0), cluster(1, 1, inter_bandwidth=16.0))
    assert step.latency == 3 * (1 + 0.5 + 1 + 2 + 0.5 + 2)


def test_the_slowest_stage_is_never_idle_in_the_steady_phase() -> None:
    step = simulate(straight(3, 8), profile([(1.0, 1.0), (3.0, 4.0), (1.0, 1.0)]), cluster(3))
    assert step.latency == 1 + 8 * 7 + 1
    assert step.bubbles == pytest.approx([1 - 16 / 58, 1 - 56 / 58, 1 - 16 / 58])


# --- links ---


def sends(step: Simulation) -> list[tuple[int | None, int | None, float, float]]:
    return [(span.device, span.target, span.start, span.end) for span in step.spans if span.kind == "send"]


def test_two_transfers_over_one_network_card_take_twice_as_long() -> None:
    step = simulate(replicated([2, 2], 1, 2), profile([(1.0, 2.0)] * 2, 6.0), cluster(2, 2, inter_bandwidth=3.0))
    assert sends(step)[:2] == [(0, 2, 1.0, 3.0), (1, 3, 3.0, 5.0)]


def test_a_network_card_sends_and_receives_at_the_same_time() -> None:
    step = simulate(straight(2, 2, "gpipe"), profile([(1.0, 1.0)] * 2, 4.0), cluster(1, 1, inter_bandwidth=2.0))
    assert sends(step) == [(0, 1, 1, 3), (0, 1, 3, 5), (1, 0, 7, 9), (1, 0, 9, 11)]


def test_latency_delays_a_message_but_not_the_next_one() -> None:
    links = {"intra_bandwidth": 3.0, "intra_latency": 0.5}
    step = simulate(replicated([1, 2], 1, 2), profile([(1.0, 2.0)] * 2, 6.0), cluster(3, **links))
    assert sends(step)[:2] == [(0, 1, 1.0, 3.5), (0, 2, 3.0, 5.5)]


def test_between_servers_the_slower_card_decides() -> None:
    servers = (Server(inter_bandwidth=8.0, inter_latency=0.25), Server(inter_bandwidth=2.0))
    step = simulate(straight(2, 1), profile([(1.0, 2.0)] * 2, 4.0), cluster(1, 1, servers=servers))
    assert sends(step) == [(0, 1, 1.0, 3.25), (1, 0, 6.25, 8.5)]


def test_a_skip_connection_holds_up_the_stage_that_reads_it() -> None:
    tensors = [Tensor(0, (1,), Cost(1.0)), Tensor(1, (2,), Cost(1.0)), Tensor(0, (2,), Cost(10.0))]
    step = simulate(straight(3, 1), profile([(1.0, 2.0)] * 3, tensors), cluster(1, 1, 1, inter_bandwidth=1.0))
    # Stage 0's card sends 1 byte to stage 1, then 10 to stage 2, whose card is busy with them until 12.
    assert times(step, "F") == [(0, 1), (2, 3), (13, 14)]
    # Backwards too the nearest stage comes first; stage 0 waits for both gradients, which its card gets one by one.
    assert sends(step)[3:] == [(2, 1, 16, 17), (2, 0, 17, 27), (1, 0, 27, 28)]
    assert times(step, "B") == [(14, 16), (17, 19), (28, 30)]


# --- the end of the step ---


def test_all_reduce_starts_when_the_last_replica_is_done_and_the_update_follows() -> None:
    model = profile([(1.0, 2.0)], parameter_bytes=20, apply_seconds=0.5)
    step = simulate(Plan.data_parallel(2, 4, 2), model, cluster(2, speeds=[1.0, 2.0], intra_bandwidth=4.0))
    assert times(step, "B", device=1)[-1] == (2.0, 3.0)
    assert times(step, "all_reduce") == [(6.0, 11.0)]
    assert times(step, "apply") == [(11.0, 11.25), (11.0, 11.5)]
    assert step.latency == 11.5


def test_tied_weights_are_reduced_once_both_stages_are_done() -> None:
    model = profile([(1.0, 2.0)] * 3, shared=[SharedParameters((0, 2), 30)], apply_seconds=1.0)
    step = simulate(straight(3, 2), model, cluster(1, 1, 1, inter_bandwidth=10.0))
    assert [span.stage for span in step.spans if span.kind == "all_reduce"] == [0]
    end_of_first = times(step, "B", stage=0)[-1][1]
    assert times(step, "all_reduce") == [(end_of_first, end_of_first + 3.0)]
    assert times(step, "apply", stage=2) == times(step, "apply", stage=0) == [(end_of_first + 3, end_of_first + 4)]
    assert times(step, "apply", stage=1)[0][0] == times(step, "B", stage=1)[-1][1]


def cut_everywhere(plan: Plan, model: Profile) -> Plan:
    """The plan with backwards cut after every layer."""
    names = [layer.name for layer in model.layers[:-1] if layer.name not in plan.cuts]
    return dataclasses.replace(plan, backward_cuts=tuple(names))


def two_pieces(cut: bool, **options: Any) -> Simulation:
    """A B of 4 s through two layers, whose gradients take 1 s each to reduce over two devices."""
    plan = Plan.data_parallel(2, 4, 2, backward_cuts=NAMES[:1] if cut else ())
    model = profile([(1.0, 2.0), (1.0, 2.0)], parameter_bytes=8, apply_seconds=0.25)
    return simulate(plan, model, cluster(2, intra_bandwidth=8.0, **options))


def test_pieces_are_reduced_while_b_goes_on() -> None:
    apart, together = two_pieces(cut=False), two_pieces(cut=True)
    assert times(apart, "all_reduce") == [(12.0, 14.0)]
    assert apart.latency == 14.5
    assert times(together, "all_reduce") == [(10.0, 11.0), (12.0, 13.0)]
    assert together.latency == 13.5


def test_where_cores_are_shared_pieces_end_later_but_in_time_for_their_reductions() -> None:
    together = two_pieces(cut=True, servers=(Server(capacity=1.0),))
    assert times(together, "B")[-1] == (pytest.approx(16.0), pytest.approx(24.0))
    assert times(together, "all_reduce") == [(pytest.approx(20.0), pytest.approx(21.0)), (24.0, 25.0)]


# --- devices ---


def test_a_device_of_twice_the_speed_takes_half_the_time() -> None:
    step = simulate(straight(2, 1), profile([(1.0, 2.0)] * 2), cluster(2, speeds=[1.0, 2.0]))
    assert timeline(step, 1) == "1F@1-1.5 1B@1.5-2.5"
    assert step.latency == 4.5


def shared(capacity: float, devices: int = 2) -> Cluster:
    return cluster(devices, servers=(Server(capacity=capacity),))


@pytest.mark.parametrize(("capacity", "factor"), [(1.0, 2.0), (1.5, 4 / 3)])
def test_two_devices_that_share_cores_slow_each_other_down(capacity: float, factor: float) -> None:
    step = simulate(Plan.data_parallel(2, 2), profile([(1.0, 2.0)], apply_seconds=1.0), shared(capacity))
    assert times(step, "F") == [(0, pytest.approx(factor))] * 2
    assert times(step, "B") == [(pytest.approx(factor), pytest.approx(3 * factor))] * 2
    assert times(step, "apply") == [(pytest.approx(3 * factor), pytest.approx(4 * factor))] * 2
    assert step.latency == pytest.approx(4 * factor)


def test_a_task_is_slowed_down_only_while_the_other_runs() -> None:
    layers = (LayerProfile("only", Cost(0.0, 1.0), ZERO),)
    model = Profile("model", "none", (1, 2), layers, ())
    forward = make_schedule("gpipe", [[0, 1]], 1, forward_only=True)
    step = simulate(Plan.data_parallel(2, 3), model, shared(1.0), schedule=forward)
    assert times(step, "F") == [(0, 2), (0, 3)]


# --- schedules of one's own ---


def test_forwards_alone_reduce_and_update_nothing() -> None:
    model = profile([(1.0, 2.0)] * 3, parameter_bytes=5, apply_seconds=1.0)
    plan = replicated([2, 1, 1], 4, 2)
    forward = make_schedule("gpipe", plan.devices, 4, forward_only=True)
    step = simulate(plan, model, cluster(4), schedule=forward)
    assert {span.kind for span in step.spans} == {"F", "send"}
    assert step.latency == (4 + 2) * 1


def test_weight_gradients_fill_the_wait_for_input_gradients() -> None:
    split = Schedule.parse("0: 0F0 0F1 0Bx0 0Bx1 0Bw0 0Bw1\n1: 1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1")
    step = simulate(
        straight(2, 2),
        profile([(1.0, 2.0)] * 2, parameter_bytes=4, apply_seconds=0.5),
        cluster(2),
        schedule=split,
    )
    assert timeline(step, 1) == "1F@1-2 1Bx@2-3 1F@3-4 1Bx@4-5 1Bw@5-6 1Bw@6-7 1apply@7-7.5"
    # The first stage has no input gradients: Bx takes no time and waits for nothing, Bw is the whole backward and
    # starts with the first gradient that comes, as in a real step, where such a Bx is a NoOp.
    assert timeline(step, 0) == "0F@0-1 0F@1-2 0Bx@2-2 0Bx@2-2 0Bw@3-5 0Bw@5-7 0apply@7-7.5"
    assert step.latency == 7.5


def test_a_schedule_that_deadlocks_is_refused() -> None:
    stuck = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")
    with pytest.raises(ValueError, match="the schedule deadlocks: 0B0, 1F1 wait for ever"):
        simulate(straight(2, 2), profile([(1.0, 2.0)] * 2), cluster(2), schedule=stuck)


# --- stages that share devices ---


def timeline(step: Simulation, device: int) -> str:
    return " ".join(f"{span.stage}{span.kind}@{span.start:g}-{span.end:g}" for span in step.timeline[device])


def test_what_stays_on_a_device_is_there_at_once() -> None:
    plan = Plan.manual(NAMES[:2], [[0], [0], [1]], 1, 1, "gpipe")
    step = simulate(plan, profile([(1.0, 2.0)] * 3, 4.0), cluster(1, 1, inter_bandwidth=4.0))
    assert sends(step) == [(0, 1, 2, 3), (1, 0, 6, 7)]
    assert timeline(step, 0) == "0F@0-1 1F@1-2 1B@7-9 0B@9-11"
    assert step.idle == {0: pytest.approx(5 / 11), 1: pytest.approx(8 / 11)}
    assert step.bubbles == pytest.approx([5 / 11, 5 / 11, 8 / 11])
    assert str(step).splitlines()[2].split()[:4] == ["0", "1", "0", "45.5%"]


def test_a_device_keeps_what_all_its_stages_do_and_shared_parameters_once() -> None:
    model = profile([(1.0, 1.0)] * 3, 0.0, shared=[SharedParameters((0, 2), 40, 20)], **HEAVY)
    step = simulate(Plan.manual(NAMES[:2], [[0], [1], [0]], 1, 1, "modulo"), model, cluster(2))
    assert step.costs.stored_bytes == {0: 2 * 250 + 2 * 40 + 20, 1: 250}
    assert step.peak_bytes == {0: 600 + 2 * 30 + 5, 1: 250 + 30 + 5}
    assert [span.kind for span in step.spans if span.kind == "all_reduce"] == []
    assert step.costs.needed_bytes(0, 1) == step.peak_bytes[0]


def test_whether_a_schedule_fits_is_a_matter_of_its_peak() -> None:
    plan, model = straight(2, 4, "gpipe"), profile([(1.0, 2.0)] * 2, 0.0, **HEAVY)
    step = simulate(plan, model, cluster(2, memory=250 + 4 * 30 + 5))
    assert step.fits
    step.check_memory()
    greedy = make_schedule("gpipe", plan.devices, 4)
    limited = simulate(straight(2, 4), model, cluster(2, memory=250 + 2 * 30 + 5), schedule=greedy)
    assert not limited.fits
    with pytest.raises(PlanError, match="device 1 needs 375 bytes, 60 bytes more than it has"):
        limited.check_memory()


# --- reductions ---


def chunks(count: int, seconds: float = 1.0, **options: Any) -> Simulation:
    """Data parallelism on two devices in stages of F = Bx = Bw = 1 whose gradients take so long to reduce."""
    plan_options = {name: options.pop(name) for name in ("reverse_first_k", "wait_free") if name in options}
    plan = Plan.manual(NAMES[: count - 1], [[0, 1]] * count, 1, 2, "gpipe", **plan_options)
    model = profile([(1.0, 2.0)] * count, parameter_bytes=4, apply_seconds=options.pop("apply_seconds", 0.0))
    return simulate(plan, model, cluster(2, intra_bandwidth=4.0 / seconds), **options)


def test_gradients_are_reduced_while_other_stages_compute_theirs() -> None:
    assert times(chunks(3), "all_reduce") == [(5, 6), (7, 8), (9, 10)]
    assert times(chunks(3, wait_free=False), "all_reduce") == [(9, 10), (10, 11), (11, 12)]


def test_one_reduction_at_a_time_in_the_order_in_which_gradients_are_completed() -> None:
    step = chunks(3, seconds=4.0)
    assert [(span.stage, span.start) for span in step.spans if span.kind == "all_reduce"] == [(2, 5), (1, 9), (0, 13)]
    assert [span.reduction for span in step.spans if span.kind == "all_reduce"] == [2, 1, 0]
    step = chunks(3, seconds=4.0, reduction_order=[0, 1, 2])
    assert [(span.stage, span.start) for span in step.spans if span.kind == "all_reduce"] == [(0, 9), (1, 13), (2, 17)]
    with pytest.raises(
        ValueError, match=r"reduction_order is \[0, 1\]; there are 3 reductions, give the order of 0 to 2"
    ):
        chunks(3, reduction_order=[0, 1])


def test_reverse_first_k_brings_the_first_stages_gradients_forward() -> None:
    step = chunks(3, reverse_first_k=2)
    assert timeline(step, 0) == "0F@0-1 1F@1-2 2F@2-3 2B@3-5 1Bx@5-6 0Bx@6-6 0Bw@6-8 1Bw@8-9"
    assert [(span.stage, span.start) for span in step.spans if span.kind == "all_reduce"] == [(2, 5), (0, 8), (1, 9)]


def test_a_step_reduces_in_the_order_of_a_real_one() -> None:
    """That of `tasks.reduction_order`: by place in a device's order, then the later stages first."""
    plan = Plan.manual(NAMES[:2], [[0, 1], [0, 1], [2]], 1, 2, "gpipe")
    model = profile(
        [(1.0, 2.0)] * 3, parameter_bytes=4, shared=[SharedParameters((0, 2), 4), SharedParameters((1, 2), 4)]
    )
    step = simulate(plan, model, cluster(3, intra_bandwidth=4.0))
    assert [one.stages for one in step.costs.reductions] == [(0,), (1,), (0, 2), (1, 2)]
    assert [span.reduction for span in step.spans if span.kind == "all_reduce"] == [3, 1, 2, 0]


def test_updates_run_while_a_device_waits_and_let_tasks_go_first() -> None:
    plan = Plan.manual(NAMES[:2], [[0], [1], [0]], 1, 1, "modulo")
    model = profile([(1.0, 1.0), (1.0, 4.0), (1.0, 1.0)], parameter_bytes=4, apply_seconds=3.0)
    text = "0: 0F0 2F0 2B0 0B0\n1: 1F0 1B0"
    step = simulate(plan, model, cluster(2), schedule=Schedule.parse(text))
    assert timeline(step, 0) == "0F@0-1 2F@2-3 2B@3-4 2apply@4-7 0B@8-9 0apply@9-12"


def test_the_next_steps_forwards_wait_for_their_stages_updates() -> None:
    step = chunks(3, seconds=2.0, apply_seconds=0.5, next_forward=True)
    assert (
        timeline(step, 0)
        == "2B@0-2 1B@2-4 0B@4-6 2apply@6-6.5 1apply@6.5-7 0apply@8-8.5 0F@8.5-9.5 1F@9.5-10.5 2F@10.5-11.5"
    )
    assert step.memory[0][:2] == ((0.0, 24), (0.0, 26))  # what the last two stages were given in the step before
    assert step.memory[0][-2][1] == 26
    kept = profile([(1.0, 2.0)], residual_bytes=Cost(0.0, 30.0))
    forth = simulate(Plan.data_parallel(1, 2, 2, "gpipe"), kept, cluster(1), next_forward=True)
    assert forth.memory[0] == ((0.0, 0), (0.0, 60), (2.0, 30), (4.0, 30), (5.0, 60), (6.0, 0))


# --- memory ---

# 2 x 100 for weights and gradients, 50 for slots: 250 stored; 30 kept per sample, 5 while a B runs.
HEAVY = {
    "residual_bytes": Cost(0.0, 30.0),
    "temporary_bytes": Cost(5.0),
    "parameter_bytes": 100,
    "slot_bytes": 50,
}


def test_memory_curve_of_one_device() -> None:
    step = simulate(Plan.data_parallel(1, 2, 2, "gpipe"), profile([(1.0, 2.0)], **HEAVY), cluster(1))
    assert step.memory[0] == ((0.0, 250), (0.0, 280), (1.0, 310), (2.0, 315), (4.0, 285), (6.0, 250))
    assert step.peak_bytes == {0: 315}


def test_weight_gradients_keep_the_residuals_until_they_are_done() -> None:
    split = Schedule.parse("0: 0F0 0F1 0B0 0B1\n1: 1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1")
    model = profile([(1.0, 2.0)] * 2, 0.0, residual_bytes=Cost(0.0, 30.0), parameter_bytes=4)
    step = simulate(straight(2, 2), model, cluster(2), schedule=split)
    assert step.memory[1] == ((0, 8), (1, 38), (2, 38), (3, 68), (4, 68), (5, 68), (6, 38), (7, 8))
    layers = [dataclasses.replace(layer, delayed_bytes=Cost(0.0, 10.0)) for layer in model.layers]
    step = simulate(straight(2, 2), dataclasses.replace(model, layers=layers), cluster(2), schedule=split)
    assert step.memory[1] == ((0, 8), (1, 38), (2, 38), (3, 48), (4, 48), (5, 28), (6, 18), (7, 8))


def test_memory_bounds_how_many_micro_batches_are_in_flight() -> None:
    model = profile([(1.0, 2.0)] * 4, 0.0, **HEAVY)
    free = simulate(straight(4, 8), model, cluster(4))
    bound = simulate(straight(4, 8), model, cluster(4, memory=250 + 2 * 30 + 5))
    assert free.costs.warm_up == (4, 3, 2, 1)
    assert bound.costs.warm_up == (2, 2, 2, 1)
    assert max(bound.peak_bytes.values()) == 315
    assert bound.latency > free.latency == (8 + 3) * 3


# --- what it tells ---


def test_text() -> None:
    model = profile([(1e-3, 2e-3)] * 2, 4.0, parameter_bytes=2**20, apply_seconds=5e-4)
    links = {"intra_bandwidth": 1e9, "inter_bandwidth": 1e4}
    step = simulate(replicated([2, 1], 4, 2), model, cluster(2, 1, **links))
    assert str(step) == (
        "step 19.35 ms, 413.5 samples/s\n"
        "stage  devices  bubble  busy ms  peak memory\n"
        "0      0 1      35.4%   12.5     3 MiB\n"
        "1      2        35.4%   12.5     2 MiB\n"
        "critical path: F 5 ms, send 2.8 ms, B 10 ms, all_reduce 1.049 ms, apply 0.5 ms"
    )
    # What no device does is part of the step, too: a tiny model's critical path ended at a tenth of it.
    step = simulate(replicated([2, 1], 4, 2), model.scaled(1.0, step_seconds=0.1), cluster(2, 1, **links))
    assert str(step).startswith("step 119.3 ms")
    assert str(step).endswith("apply 0.5 ms, what a step takes once 100 ms")
    in_pieces = str(two_pieces(cut=True)).splitlines()[-1]
    assert in_pieces == "critical path: F 4000 ms, B 8000 ms, all_reduce 1000 ms, apply 500 ms"


# --- any plan ---


def random_case(seed: int) -> tuple[Plan, Profile, Cluster]:
    """A plan that fits its cluster: skips, uneven slices and stages, shared cores and devices, tied weights."""
    draw = random.Random(seed)
    count = draw.randrange(2, 9)
    layers = [
        LayerProfile(
            NAMES[i],
            Cost(draw.choice([0.0, 0.1]), draw.uniform(0.1, 1.0)),
            Cost(0.0, draw.uniform(0.1, 3.0)),
            residual_bytes=Cost(0.0, draw.uniform(0, 50)),
            temporary_bytes=Cost(draw.uniform(0, 20)),
            parameter_bytes=draw.choice([0, 10, 1000]),
            apply_seconds=draw.choice([0.0, 0.3]),
        )
        for i in range(count)
    ]
    tensors = [Tensor(i, (i + 1,), Cost(draw.choice([0.0, 3.0]), draw.uniform(1, 20))) for i in range(count - 1)]
    if count > 2 and draw.random() < 0.5:
        tensors.append(Tensor(0, (count - 1,), Cost(0.0, 5.0), differentiable=draw.random() < 0.5))
    tied = (SharedParameters((0, count - 1), 50),) if draw.random() < 0.3 else ()
    model = Profile("model", "none", (1, 2), tuple(layers), tuple(tensors), tied, draw.choice([0, 0.5]))
    stages = draw.randrange(1, min(count, 5) + 1)
    replicas = [draw.randrange(1, 4) for _ in range(stages)]
    order = draw.sample(range(sum(replicas) + 2), sum(replicas))
    devices = [[order.pop() for _ in range(replica)] for replica in replicas]
    policy = draw.choice(STRAIGHT)
    if draw.random() < 0.4:  # stages that share devices
        devices, policy = [devices[stage % 2] for stage in range(stages)], "modulo"
    options: dict[str, Any] = {"bucket_bytes": 500, "wait_free": draw.random() < 0.8}
    if draw.random() < 0.3 and policy != "interleaved":
        options["reverse_first_k"] = draw.randrange(stages + 1)
    cuts = sorted(draw.sample(range(count - 1), stages - 1))
    micro_batches = draw.randrange(1, 8)
    samples = micro_batches * max(map(len, devices)) + draw.randrange(4 * micro_batches)
    plan = Plan.manual([NAMES[cut] for cut in cuts], devices, micro_batches, samples, policy, **options)
    if plan.wait_free and draw.random() < 0.5:
        plan = cut_everywhere(plan, model)
    with contextlib.suppress(PlanError):  # Some replica gets no sample.
        shares = tuple(tuple(draw.choice([1, 1, 2, 3]) for _ in group) for group in devices)
        plan = dataclasses.replace(plan, shares=shares) if draw.random() < 0.4 else plan
    where = cluster(
        *[draw.randrange(1, 4) for _ in range(12)],
        *[1] * 40,
        speeds=[draw.choice([0.5, 1.0, 2.0]) for _ in range(40)],
        intra_bandwidth=draw.choice([None, 20.0, 200.0]),
        inter_bandwidth=draw.choice([None, 10.0, 100.0]),
        intra_latency=draw.choice([None, 0.01]),
        inter_latency=draw.choice([None, 0.05]),
        servers=tuple(Server(capacity=draw.choice([None, None, 1.0, 1.5])) for _ in range(52)),
    )
    return plan, model, where


def test_a_task_of_no_time_needs_its_memory_all_the_same() -> None:
    """What rose and fell at one time cancelled out, so that a free layer seemed to need nothing."""
    layers = (
        LayerProfile("a", Cost(0, 1e-3), Cost(0, 1e-3)),
        LayerProfile("b", Cost(), Cost(), residual_bytes=Cost(0, 5e8), temporary_bytes=Cost(0, 1e9)),
    )
    profile = Profile("p", "none", (1, 8), layers, (Tensor(0, (1,), Cost(0, 1e3)),))
    cluster = Cluster((Device("x", 0), Device("y", 0)), real=False)
    step = simulate(Plan.manual(["a"], [[0], [1]], 1, 1), profile, cluster)
    assert step.peak_bytes[1] == step.costs.needed_bytes(1, 1) == 1_500_001_000


# ---- updates that are carried over


def carrying(carried_updates: int = 0, reverse_first_k: int = 0) -> Simulation:
    """Three layers of F 1, Bx 1, Bw 1 s (the first without Bx) on two devices; each all-reduce takes 2 s."""
    layers = tuple(
        LayerProfile(f"l{i}", Cost(0, 1.0), Cost(0, 2.0 if i else 1.0), Cost(0, 1.0), parameter_bytes=2)
        for i in range(3)
    )
    tensors = tuple(Tensor(i, (i + 1,), Cost(0, 0.0)) for i in range(2))
    profile = Profile("chunks", "any", (1,), layers, tensors)
    cluster = Cluster((Device("a", 0), Device("b", 1)), 1.0, 1.0, 0.0, 0.0, real=False)
    plan = Plan.manual(
        ["l0", "l1"], [[0, 1]] * 3, 1, 2, reverse_first_k=reverse_first_k, carried_updates=carried_updates
    )
    return simulate(plan, profile, cluster)


def test_what_is_carried_over_is_reduced_during_the_forward_of_its_own_stage() -> None:
    """F0 F1 F2, B2 B1 B0, reductions of 2 s behind 2B, 1B, 0B; then with dW0 before dW1, whose update is carried over.

    Reverse first-2: 2B 3..5, 1Bx 5..6, 0Bw 6..7, 1Bw 7..8. Stage 1's reduction 0..2 holds its forward back to 2.
    """
    assert carrying().latency == 11.0  # 2B 3..5, 1B 5..7, 0B 7..8; reductions 5..7, 7..9, 9..11
    carried = carrying(carried_updates=1, reverse_first_k=2)
    starts = {str(span).split()[0]: span.start for span in carried.spans}
    assert (starts["0F0"], starts["1F0"], starts["2F0"]) == (0.0, 2.0, 3.0)
    reductions = [(span.stage, span.start) for span in carried.spans if span.kind == "all_reduce"]
    assert reductions == [(1, 0.0), (2, 6.0), (0, 8.0)]
    assert carried.latency == 10.0


def test_stages_that_share_parameters_carry_nothing_over_in_a_simulation() -> None:
    """Its own update was awaited together with the shared one, which comes at the end of the step: a deadlock."""
    one = Cost(0, 1.0)
    layers = tuple(LayerProfile(f"l{i}", one, one + one if i else one, one, parameter_bytes=2) for i in range(3))
    tensors = tuple(Tensor(i, (i + 1,), Cost(0, 0.0)) for i in range(2))
    profile = Profile("tied", "any", (1,), layers, tensors, (SharedParameters((0, 2), 2, 0),))
    cluster = Cluster((Device("a", 0), Device("b", 1)), 1.0, 1.0, 0.0, 0.0, real=False)
    plan = Plan.manual(["l0", "l1"], [[0, 1]] * 3, 1, 2, reverse_first_k=2, carried_updates=4)
    spans = simulate(plan, profile, cluster).spans
    first = {span.stage: span.start for span in reversed(spans) if span.kind == "all_reduce"}
    assert first[1] == 0.0
    assert sorted(span.stage for span in spans if span.kind == "all_reduce") == [0, 0, 1, 2]


def test_a_profile_is_not_its_files_name() -> None:
    with pytest.raises(TypeError, match=r"profile is 'profile.json'; give a .* or Profile.load\(path\)"):
        simulate(straight(1, 1), "profile.json", cluster(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_any_step_obeys_its_dependencies_ports_and_memory(seed: int) -> None:
    step = simulate(*random_case(seed))
    costs, schedule = step.costs, step.costs.schedule
    spans = {
        Task(span.stage, Phase(span.kind), span.micro_batch, span.replica): span
        for span in step.spans
        if span.kind in ("F", "B", "Bx", "Bw") and span.micro_batch is not None
    }
    assert spans.keys() == {*schedule.tasks}
    for device, tasks in schedule.orders.items():
        assert [str(span).split()[0] for span in step.timeline[device] if span.kind != "apply"] == [*map(str, tasks)]
        assert all(b.start >= a.end - 1e-9 for a, b in itertools.pairwise(step.timeline[device]))
        assert sum(map(costs.seconds, tasks)) - 1e-9 <= step.busy[device] <= step.latency + 1e-9

    def reaches(sender: Task, receiver: Task, size: float) -> None:
        ends = schedule.device_of(sender), schedule.device_of(receiver)
        seconds = 0.0 if ends[0] == ends[1] else costs.cluster.link(*ends).seconds(size)
        assert spans[receiver].start >= spans[sender].end + seconds - 1e-9

    for (producer, consumer), micro_batch in itertools.product(costs.routes, range(costs.plan.micro_batches)):
        for one in costs.messages(producer, consumer, micro_batch):
            sender = Task(producer, Phase.FORWARD, micro_batch, one.sender)
            reaches(sender, Task(consumer, Phase.FORWARD, micro_batch, one.receiver), one.bytes)
        for one in costs.messages(producer, consumer, micro_batch, backward=True):
            sends_in = Phase.INPUT_GRAD if consumer in schedule.split else Phase.BACKWARD
            takes = costs.gradient_phase(producer, producer in schedule.split)
            sender = Task(consumer, sends_in, micro_batch, one.sender)
            reaches(sender, Task(producer, takes, micro_batch, one.receiver), one.bytes)
    for task in schedule.tasks:
        if task.phase is Phase.WEIGHT_GRAD:
            samples = costs.slices(task.stage, task.micro_batch)[task.replica].size
            reaches(dataclasses.replace(task, phase=Phase.INPUT_GRAD), task, costs.delayed_bytes(task.stage, samples))
    for port in ports(step).values():
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(sorted(port)))
    for device, stored in costs.stored_bytes.items():
        assert step.memory[device][0] == (0.0, stored)
        assert step.memory[device][-1][1] == pytest.approx(stored)
        reducing = sum(one.bytes for one in costs.reductions if device in one.devices)
        assert -1e-6 <= step.peak_bytes[device] - stored - peak_of(costs, device) <= reducing + 1e-6


def ports(step: Simulation) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """When each device, and between servers each network card, sends and receives."""
    where, taken = step.costs.cluster, collections.defaultdict(list)
    for span in step.spans:
        if span.kind == "send" and span.device is not None and span.target is not None:
            link = where.link(span.device, span.target)
            a, b = (where.devices[device].server for device in (span.device, span.target))
            if span.bytes / link.bandwidth:
                for port in (
                    (("out", span.device), ("in", span.target)) if a == b else (("card out", a), ("card in", b))
                ):
                    taken[port].append((span.start, span.end - link.latency))
    return taken


def peak_of(costs: CostModel, device: int) -> float:
    """Bytes that a device's tasks need beyond what is stored, from their order alone."""
    level = peak = 0.0
    split = costs.schedule.split
    for task in costs.schedule.orders[device]:
        samples = costs.slices(task.stage, task.micro_batch)[task.replica].size
        kept = costs.residual_bytes(task.stage, samples)
        delayed = costs.delayed_bytes(task.stage, samples) if task.stage in split else 0.0
        if task.phase is Phase.FORWARD:
            level += kept
        peak = max(peak, level)
        if task.phase is not Phase.FORWARD:
            peak = max(peak, level + costs.working_bytes(task.stage, samples, task.phase))
            level -= {Phase.BACKWARD: kept, Phase.INPUT_GRAD: kept - delayed, Phase.WEIGHT_GRAD: delayed}[task.phase]
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("seed", range(20))
def test_a_slower_world_is_slower_by_as_much_and_its_critical_path_has_no_gaps(seed: int) -> None:
    """The factor is a power of two: what is ready at the same time stays so to the last bit."""
    factor = 2.0**13
    plan, model, where = random_case(seed)
    slower = model.scaled(factor, step_seconds=model.step_seconds * factor, task_seconds=model.task_seconds * factor)
    bandwidths = [value and value / factor for value in (where.intra_bandwidth, where.inter_bandwidth)]
    instant = Cluster(where.devices, *bandwidths, real=False, servers=where.servers)
    step = simulate(plan, slower, instant)
    before = simulate(plan, model, dataclasses.replace(where, intra_latency=None, inter_latency=None))
    assert step.latency == pytest.approx(before.latency * factor)
    assert step.critical_path[0].start == 0
    for span, after in itertools.pairwise(step.critical_path):
        early = after.kind == "all_reduce" and after.start < span.end  # of a piece of the task before
        assert early or after.start == pytest.approx(span.end)


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


def skips(count: int, **layer: Any) -> Profile:
    """Layers in a row, which hand nothing to each other but all read a tensor of the first."""
    tensors = [Tensor(index, (index + 1,), ZERO) for index in range(1, count - 1)]
    first = Tensor(0, tuple(range(1, count)), Cost(0.0, 4.0))
    return profile([(1.0, 2.0)] * count, [first, *tensors], **layer)


def slow(count: int) -> Cluster:
    """Devices of which each sends 1 byte a second."""
    return cluster(*[1] * count, inter_bandwidth=1.0)


def test_tensors_with_the_same_readers_travel_together() -> None:
    tensors = (
        Tensor(0, (1, 2, 3), Cost(0.0, 1.0)),
        Tensor(0, (1, 2, 3), Cost(0.0, 2.0), differentiable=False),
        Tensor(0, (2, 3), Cost(0.0, 4.0)),
        Tensor(0, (3,), Cost(0.0, 8.0)),
        Tensor(2, (3,), Cost(0.0, 16.0)),
    )
    model = profile([(1.0, 2.0)] * 4, tensors)
    legs = CostModel(straight(4, 2, relays=[1, 2]), model, slow(4)).legs
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


def transfers(step: Simulation) -> list[tuple[int, int | None, float, float]]:
    """(device, target, start, end) of the transfers of some bytes."""
    return [(s.device or 0, s.target, s.start, s.end) for s in step.spans if s.kind == "send" and s.bytes]


def test_a_relay_hands_a_tensor_on_as_soon_as_it_has_come_and_adds_its_gradient_before_it_returns() -> None:
    direct = simulate(straight(3, 1), skips(3), slow(3))
    assert transfers(direct) == [(0, 1, 1, 5), (0, 2, 5, 9), (2, 0, 12, 16), (1, 0, 16, 20)]
    relayed = simulate(straight(3, 1, relays=[1]), skips(3), slow(3))
    #   0 -> 1 from 1 to 5, 1 -> 2 from 5 to 9, while stage 1 computes from 5 to 6; stage 2 from 9 to 12; its gradient
    #   is at stage 1 at 16, which has been ready since 14; the sum is at stage 0 at 20.
    assert transfers(relayed) == [(0, 1, 1, 5), (1, 2, 5, 9), (2, 1, 12, 16), (1, 0, 16, 20)]
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
    plan = Plan.manual(NAMES[:2], [[0, 1, 2], [3, 0], [0]], 2, 26, "modulo", relays=[1])
    step = simulate(plan, skips(3, parameter_bytes=4), slow(4), next_forward=True)
    direct = simulate(dataclasses.replace(plan, relays=()), skips(3, parameter_bytes=4), slow(4), next_forward=True)
    assert {kind_of(span) for span in step.spans} == {kind_of(span) for span in direct.spans}


def kind_of(span: Span) -> tuple[str, int, int | None]:
    return ("send", 0, 0) if span.kind == "send" else (span.kind, span.stage, span.micro_batch)


# ---- memory


def test_what_waits_on_its_way_counts() -> None:
    """Stage 1 needs the tensor for 1 s, but its card for 8 s: the tensors that stage 0 makes meanwhile wait there."""
    where = cluster(2, 1, inter_bandwidth=0.5, intra_bandwidth=100.0)
    model, plan = skips(3, buffers=LayerBuffers()), straight(3, 6, schedule="gpipe")
    direct, relayed = (simulate(dataclasses.replace(plan, relays=r), model, where) for r in ([], [1]))
    assert relayed.peak_bytes[1] >= direct.peak_bytes[1] + 3 * 4.0
    assert relayed.costs.needed_bytes(1, 1) == direct.costs.needed_bytes(1, 1) + 2 * 4.0


def test_a_gradient_waits_for_that_of_its_relay() -> None:
    model = profile([(1.0, 2.0), (1.0, 50.0), (1.0, 2.0)], skips(3).tensors, buffers=LayerBuffers())
    step = simulate(straight(3, 1, relays=[1]), model, slow(3))
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


# ---- the planner


def test_the_planner_hands_on_what_would_hold_up_the_first_stage() -> None:
    costs = {"forward": Cost(0.0, 0.05), "backward": Cost(0.0, 0.1), "parameter_bytes": 10**9}
    tensors = (Tensor(0, tuple(range(1, 6)), Cost(0.0, 1e7)), *(Tensor(i, (i + 1,), Cost(0.0, 1e4)) for i in range(5)))
    model = Profile("skips", "none", (1,), tuple(LayerProfile(NAMES[i], **costs) for i in range(6)), tensors)
    where = cluster(*[1] * 6, inter_bandwidth=1e8)
    plan = planned(model, where, 32)
    assert plan.relays and plan.report is not None
    assert plan.report.latency == simulate(plan, model, where).latency
    assert plan.report.latency < 0.7 * simulate(dataclasses.replace(plan, relays=()), model, where).latency
