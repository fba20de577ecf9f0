"""Devices' memory, by the stages that they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from graph_passes.ir.batching import Interval
from graph_passes.ir.tasks import Phase

if TYPE_CHECKING:
    from dapple_tf.simulation.cost import CostModel


class DeviceNeed(NamedTuple):
    """The memory that a device needs, in bytes.

    Attributes:
        stored: variables, slots and gradients: accumulators, or what a single micro-batch leaves at its end.
        each: kept by one micro-batch in all stages of the device.
        largest: kept by it in the stage where it keeps most.
        stages: number of stages of the device.
        samples: of its largest slice.
        working: needed by a running task besides.
        alone: for reductions at the end of the step.
        beside: for a reduction while tasks run.
    """

    stored: float
    each: float
    largest: float
    stages: int
    samples: int
    working: float = 0.0
    alone: float = 0.0
    beside: float = 0.0

    def peak(self, in_flight: int) -> float:
        """Returns the peak bytes with ``in_flight`` micro-batches in flight."""
        running = in_flight * self.each + self.working + self.beside
        return self.stored + max(running, self.alone)

    def fitting(self, limit: int, most: int, *, shared: bool = False) -> int:
        """Returns how many micro-batches fit in ``limit`` bytes, at most ``most`` in each stage.

        With ``shared`` it counts slices in any stage of the device: each may be as large as the largest, unless there
        are only one micro-batch's (`Policy.shares_room`).
        """
        room = limit - self.stored - self.working - self.beside
        if room < self.each or limit < self.peak(1):
            return 0
        if shared:
            return max(self.stages, slices_fitting(room, self.largest, most * self.stages))
        return min(most, slices_fitting(room, self.each, most))


def slices_fitting(room: float, each: float, most: int) -> int:
    """Returns how many slices of ``each`` bytes fit in ``room`` bytes; ``most`` if they keep nothing."""
    return max(0, int(room // each)) if each else most


def stored_bytes(costs: CostModel) -> Mapping[int, float]:
    """Maps each device to the bytes of variables, slots and accumulators, if any, of all stages kept there."""
    stages_on = _stages_on(costs)
    accumulated = costs.plan.accumulates() or not costs.profile.has_buffers  # Buffers contain gradients already.
    sizes = {stages: _stored(costs, stages, accumulated=accumulated) for stages in set(stages_on.values())}
    return {device: sizes[stages_on[device]] for device in costs.devices}


_Work = tuple[tuple[int, int], ...]
"""The stages of a device, each with the samples of its largest slice there."""


def device_needs(costs: CostModel) -> tuple[tuple[tuple[DeviceNeed, int | None], ...], ...]:
    """Returns each stage's needed and available memory, by devices with the same work."""
    plan, first = costs.plan, Interval(0, costs.micro_batches[0].size)
    samples = [
        dict(zip(devices, plan.largest_slices(stage, first), strict=True)) for stage, devices in enumerate(plan.devices)
    ]
    works: dict[int, _Work] = {
        device: tuple((stage, samples[stage][device]) for stage in stages)
        for device, stages in _stages_on(costs).items()
    }
    needs = {work: device_need(costs, dict(work)) for work in dict.fromkeys(works.values())}
    return tuple(
        tuple(
            (needs[work], limit)
            for work, limit in dict.fromkeys(
                (works[device], costs.cluster.devices[device].memory_bytes) for device in devices
            )
        )
        for devices in costs.plan.devices
    )


def device_need(costs: CostModel, sizes: Mapping[int, int]) -> DeviceNeed:
    """Returns what a device of a plan needs.

    Args:
        costs: the plan's costs.
        sizes: stage -> samples of its largest slice, for each of the device's stages.
    """
    kept = []
    for stage, samples in sizes.items():
        delayed = costs.delayed_bytes(stage, samples) if costs.delays(stage) else 0.0
        kept.append(max(costs.residual_bytes(stage, samples), delayed))
    each = sum(kept)
    working = max(_working(costs, stage, samples) for stage, samples in sizes.items())
    handed_on = ((leg, samples) for stage, samples in sizes.items() for leg in costs.incoming[stage] if leg.onward)
    working += sum(leg.forward.at(samples) + leg.backward.at(samples) for leg, samples in handed_on)
    applying = [costs.apply_bytes(stage) for stage in sizes]
    sending = sum(costs.stages[stage].returned_bytes.at(samples) for stage, samples in sizes.items())
    reducing = [reduction.bytes for reduction in costs.reductions if not sizes.keys().isdisjoint(reduction.stages)]
    alone = sum(reducing) + (
        each + working if any(costs.backward_pieces(stage)[0][0] < 1.0 for stage in sizes) else 0.0
    )
    alone += sum(applying) + sending
    beside = max(reducing, default=0.0) if len(sizes) > 1 else 0.0  # while other stages compute
    beside += max(applying) if len(sizes) > 1 else 0
    stored = _stored(costs, tuple(sizes), accumulated=True)
    largest, samples = max(kept, default=0.0), max(sizes.values())
    return DeviceNeed(stored, each, largest, len(sizes), samples, working, alone, beside)


def _working(costs: CostModel, stage: int, samples: int) -> float:
    """Returns the bytes of a stage's largest backward task."""
    phases = (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD) if costs.delays(stage) else (Phase.BACKWARD,)
    return max(costs.working_bytes(stage, samples, phase) for phase in phases)


def _stored(costs: CostModel, stages: Sequence[int], *, accumulated: bool) -> float:
    """Returns the bytes that some stages store on one device; parameters that several of them read count once."""
    total = sum(costs.stages[stage].stored_bytes for stage in stages)
    copies = 2  # of parameters: with gradients
    if not accumulated:
        copies = 1
        total -= sum(costs.stages[stage].parameter_bytes for stage in stages)
    for group in costs.profile.shared:
        readers = sum(
            any(first <= layer < stop for layer in group.layers)
            for first, stop in (costs.stages[stage].layers for stage in stages)
        )
        total -= max(0, readers - 1) * (copies * group.parameter_bytes + group.slot_bytes)
    elsewhere = _kept_elsewhere(costs, stages) if "optimizer" in costs.plan.shards else 0.0
    return total - elsewhere - sum(_rows_elsewhere(costs, stage, accumulated=accumulated) for stage in stages)


def _kept_elsewhere(costs: CostModel, stages: Sequence[int]) -> float:
    """Returns the bytes of slots of some stages that other devices keep, where each keeps a shard."""
    stage_of = costs.profile.stage_of_layers(costs.plan.cuts)

    total = 0.0
    for stage in stages:
        own = sum(layer.slot_bytes for layer in costs.profile.layers[slice(*costs.stages[stage].layers)])
        total += own * (1 - 1 / len(costs.plan.devices[stage]))
    for group in costs.profile.shared:
        readers = {stage_of[layer] for layer in group.layers}
        if not readers.isdisjoint(stages):
            keepers = {device for stage in readers for device in costs.plan.devices[stage]}
            total += group.slot_bytes * (1 - 1 / len(keepers))
    return total


def _rows_elsewhere(costs: CostModel, stage: int, *, accumulated: bool) -> float:
    """Returns the bytes that a device has less of a stage's tables in shards: of rows, slots, and whole gradients."""
    if not costs.table_bytes(stage):
        return 0.0
    part = 1 - 1 / len(costs.plan.devices[stage])
    layers = costs.profile.layers[slice(*costs.stages[stage].layers)]
    bytes_elsewhere = part * costs.table_bytes(stage)
    if "optimizer" not in costs.plan.shards:
        bytes_elsewhere += part * sum(layer.table_slot_bytes for layer in layers)
    # There are only the rows that were looked up.
    return bytes_elsewhere + (costs.table_bytes(stage) - costs.step_row_bytes(stage) if accumulated else 0.0)


def _stages_on(costs: CostModel) -> dict[int, tuple[int, ...]]:
    """Maps each device to its stages."""
    return {device: tuple(costs.plan.request.stages_of.get(device, ())) for device in costs.devices}
