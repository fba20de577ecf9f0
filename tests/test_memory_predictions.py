"""The memory of simulated steps: each buffer from its maker to its last reader; and beside it, what real steps take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import ZERO, Cost, LayerBuffers, LayerProfile
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.stage_cost import stage_buffers

OUT, KEPT, LATE, PARTIAL = 100.0, 10.0, 4.0, 7.0
"""Bytes of a slice: what a layer hands on, keeps for itself, keeps for Bw, and makes in Bx."""
GRADIENTS, APPLY = 1000, 500


def layer(name: str, **changes: Any) -> LayerProfile:
    buffers = LayerBuffers(
        Cost(KEPT), Cost(LATE), Cost(PARTIAL), gradients=GRADIENTS, apply=APPLY, **changes.pop("buffers", {})
    )
    times = {"forward": Cost(1.0), "backward": Cost(2.0), "apply_seconds": 0.1, "temporary_bytes": Cost(GRADIENTS)}
    return LayerProfile(name, **{**times, "parameter_bytes": GRADIENTS, "buffers": buffers, **changes})


def profile(count: int, kept: bool = True, late: bool = True) -> Profile:
    """A chain: each layer's backward reads what it has been given, as products with weights do."""
    tensors = [
        Tensor(i, (i + 1,), Cost(OUT), True, (i + 1,) if kept else (), (i + 1,) if late else ())
        for i in range(count - 1)
    ]
    return Profile("chain", "none", (1,), tuple(layer(f"l{i}") for i in range(count)), tuple(tensors))


def peaks(model: Profile, cuts: list[str], devices: list[list[int]], micro_batches: int = 1, **options: Any) -> Any:
    """Device -> its peak beyond what is stored; on devices with memory of their own unless ``cpu``."""
    count = 1 + max(device for group in devices for device in group)
    cluster = dapple.Cluster.local(count, kind="cpu")
    if not options.pop("cpu", False):
        own = [dataclasses.replace(d, name=d.name.replace("CPU", "GPU")) for d in cluster.devices]
        cluster = dataclasses.replace(cluster, devices=tuple(own), real=False)
    samples = micro_batches * max(map(len, devices))
    plan = dapple.Plan.manual(cuts, devices, micro_batches, samples, **options)
    simulation = dapple.simulate(plan, model, cluster)
    return {device: peak - simulation.costs.stored_bytes[device] for device, peak in simulation.peak_bytes.items()}


def test_one_stage_keeps_each_buffer_once_and_all_gradients_until_its_end() -> None:
    # Kept: two layers' own and the tensor between. At the first layer's backward its gradient is there, too.
    kept = 2 * KEPT + OUT
    assert peaks(profile(2), [], [[0]], 2) == {0: kept + max(GRADIENTS + OUT, 2 * GRADIENTS + OUT)}


def test_gradients_of_one_micro_batch_have_no_accumulators_and_stay_until_the_update() -> None:
    model = profile(2)
    one, two = (dapple.Plan.data_parallel(1, 2, count) for count in (1, 2))
    cluster = dapple.Cluster.local(1, kind="cpu")
    single, accumulated = (dapple.simulate(plan, model, cluster) for plan in (one, two))
    assert accumulated.costs.stored_bytes[0] - single.costs.stored_bytes[0] == 2 * GRADIENTS
    assert peaks(model, [], [[0]]) == {0: 2 * GRADIENTS + 2 * APPLY}
    needs = single.costs.needed_bytes(0, 1), single.peak_bytes[0]
    assert needs[0] >= needs[1]


def test_a_tensor_that_no_backward_reads_is_gone_when_the_next_stage_has_run() -> None:
    read, unread = (peaks(profile(2, kept), ["l0"], [[0], [1]], 4, schedule="gpipe") for kept in (True, False))
    assert read[1] - unread[1] == 4 * OUT
    assert read[0] == unread[0]


def test_cpus_read_what_they_receive_where_it_was_made() -> None:
    copied, shared = (peaks(profile(2), ["l0"], [[0], [1]], 4, schedule="gpipe", cpu=cpu) for cpu in (False, True))
    assert copied[1] > shared[1] and copied[0] < shared[0]


def test_stages_of_one_device_share_what_they_hand_on() -> None:
    # The first stage's backward: the second's residuals are gone, its update may be under way.
    assert peaks(profile(2), ["l0"], [[0], [0]], 2) == {0: KEPT + OUT + GRADIENTS + APPLY}
    assert peaks(profile(2), ["l0"], [[0], [0]]) == {0: KEPT + OUT + 2 * GRADIENTS + APPLY}


def test_weight_gradients_that_wait_keep_what_they_read() -> None:
    """F0 F1 Bx1 Bw0 Bw1 on one device, where stage 0 has no Bx."""
    model = profile(2)
    by_device = peaks(model, ["l0"], [[0], [0]], reverse_first_k=2)
    # In Bw1, beside the update of stage 0: what it reads (its own, what Bx1 made, what F0 made), and both gradients.
    assert by_device == {0: LATE + PARTIAL + OUT + 2 * GRADIENTS + APPLY}


def test_buckets_are_there_from_packing_to_the_update() -> None:
    model = profile(2)
    chunks = [[0, 1], [0, 1]]
    late, early = (peaks(model, ["l0"], chunks, 2, wait_free=free) for free in (False, True))
    assert late == {0: 2 * GRADIENTS + APPLY, 1: 2 * GRADIENTS + APPLY}
    # The update of stage 1 runs beside the backward of stage 0.
    first = KEPT + OUT + GRADIENTS
    assert early == dict.fromkeys((0, 1), first + GRADIENTS + APPLY)
    # When a step begins, the gradients of the one before are packed.
    carried = peaks(model, ["l0"], chunks, 2, carried_updates=2)
    assert carried == dict.fromkeys((0, 1), 2 * GRADIENTS + APPLY)


def test_what_b_computes_again_goes_layer_by_layer() -> None:
    """All of it was taken to be there beside all gradients: up to 21 % more than allocation records show."""
    model = profile(4)
    kept, again = stage_buffers(model, 1, 3), stage_buffers(model, 1, 3, "boundary")
    assert kept is not None and again is not None
    # At the first layer's backward the second one's residuals are gone, and the tensor between the two.
    assert again.working(1) == kept.working(1) + KEPT
    # With small gradients of parameters, the last layer's backward is the most.
    small = dataclasses.replace(
        model,
        layers=tuple(
            dataclasses.replace(one, temporary_bytes=ZERO, buffers=dataclasses.replace(one.buffers, gradients=0))
            for one in model.layers
            if one.buffers is not None
        ),
    )
    again = stage_buffers(small, 1, 3, "boundary")
    assert again is not None and again.working(1) == 2 * KEPT + OUT + OUT  # the last: the gradient that it returns
    # Bw reads the rest of them, which counts as made by Bx.
    assert again.working_input(1) == max(2 * (KEPT - LATE) + OUT, KEPT - LATE + 2 * OUT)


def fan(adds: bool, kept: tuple[int, ...] = ()) -> Profile:
    """Layers l0 to l4: l1 to l3 read the tensors of l0 and of the layer before, l4 reads that of l3.

    With ``adds`` l2 and l3 have no parameters and no residuals, like additions; backwards of ``kept`` read it, too.
    """
    layers = [layer(f"l{i}") for i in range(5)]
    if adds:
        layers[2:4] = [dataclasses.replace(one, buffers=LayerBuffers()) for one in layers[2:4]]
    tensors = [Tensor(0, (1, 2, 3), Cost(OUT), True, kept), *(Tensor(i, (i + 1,), Cost(OUT)) for i in (1, 2, 3))]
    return Profile("fan", "none", (1,), tuple(layers), tuple(tensors))


def gradients_by_layer(model: Profile, start: int, stop: int) -> list[float]:
    """The gradients of tensors that are there in the backward of each layer of a stage, in tensors."""
    own = stage_buffers(model, start, stop)
    assert own is not None
    return [step.passing.at(1) / OUT for step in own._steps]


def test_gradients_of_what_several_layers_read_wait_for_the_last_one() -> None:
    """A last stage whose layers all read the first one's tensor took 11 % more than predicted: its gradients wait."""
    # In l1: what it is given, its own for l0, and those of l2 and l3. In l0: their sum.
    assert gradients_by_layer(fan(adds=False), 0, 5) == [1, 4, 4, 3, 1]
    assert gradients_by_layer(fan(adds=False), 1, 5) == [4, 4, 3, 1]


def test_an_addition_returns_the_gradient_that_it_was_given() -> None:
    # l4's gradient goes to l1, and to l0 from both additions.
    assert gradients_by_layer(fan(adds=True), 0, 5) == [1, 2, 1, 1, 1]
    # Without l4, l3 is given another stage's gradient, which counts as the stage's.
    assert gradients_by_layer(fan(adds=True), 0, 4) == [1, 3, 2, 2]


def test_a_product_makes_a_gradient_for_each_of_its_factors() -> None:
    """Gated units took a fifth more than predicted, as their products were taken for additions."""
    assert gradients_by_layer(fan(adds=True, kept=(2, 3)), 0, 5) == [1, 4, 4, 3, 1]


def test_bx_and_bw_each_compute_again_what_a_min_cut_does_not_keep() -> None:
    """It was taken to be handed from Bx to Bw: up to 2.7 times as much as there was."""
    model = profile(4)
    layers = [
        dataclasses.replace(one, residual_bytes=Cost(KEPT + OUT), min_cut_residual_bytes=Cost(60.0))
        for one in model.layers
    ]
    again = stage_buffers(dataclasses.replace(model, layers=tuple(layers)), 1, 3, "min_cut")
    assert again is not None
    # It keeps 60 bytes of each of two layers; the tensor to the next stage is one of them.
    assert again.residual == again.delayed == Cost(2 * 60 - OUT)
    assert again.partial == Cost(2 * PARTIAL)
    assert again.working_weight(1) == 2 * GRADIENTS + (2 * LATE + OUT) - (2 * 60 - OUT)


@pytest.mark.parametrize("devices", [[[0], [1], [2]], [[0, 1], [2], [3, 4]], [[0, 1], [0, 1], [0, 1]]])
@pytest.mark.parametrize("options", [{}, {"reverse_first_k": 2}, {"recompute": "boundary"}], ids=str)
def test_what_a_plan_is_said_to_need_is_enough(devices: list[list[int]], options: dict[str, Any]) -> None:
    model = profile(6)
    plan = dapple.Plan.manual(["l1", "l3"], devices, 4, 16, "dapple_a", **options)
    cluster = dataclasses.replace(dapple.Cluster.local(5, kind="cpu"), real=False)
    costs = CostModel(plan, model, cluster)
    simulation = dapple.simulate(plan, model, cluster)
    for stage, members in enumerate(devices):
        need = costs.needed_bytes(stage, 4)
        assert all(simulation.peak_bytes[device] <= need for device in members), (stage, simulation.peak_bytes, need)


# ---- real steps
