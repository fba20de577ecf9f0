"""Devices' memory, by the stages that they run and those whose variables they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dapple_tf.simulation.legs import handed_on
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
        working: needed by a running task besides.
        alone: for reductions at the end of the step.
        beside: for a reduction while tasks run.
    """

    stored: float
    each: float
    largest: float
    stages: int
    working: float
    alone: float
    beside: float

    def peak(self, in_flight: int) -> float:
        """Returns the peak bytes with ``in_flight`` micro-batches in flight."""
        return self.stored + max(in_flight * self.each + self.working + self.beside, self.alone)

    def fitting(self, limit: int, most: int, *, shared: bool = False) -> int:
        """Returns how many micro-batches fit in ``limit`` bytes, at most ``most`` in each stage.

        With ``shared`` it counts slices in any stage of the device: each may be as large as the largest, unless there
        are only one micro-batch's (`Policy.shares_room`).
        """
        room = limit - self.stored - self.working - self.beside
        if room < self.each or limit < self.peak(1):
            return 0
        if shared:
            return max(self.stages, int(room // self.largest)) if self.largest else most * self.stages
        return min(most, int(room // self.each)) if self.each else most


def stored_bytes(costs: CostModel) -> Mapping[int, float]:
    """Maps each device to the bytes of variables, slots and accumulators, if any, of all stages kept there."""
    owned = _stages_on(costs.devices, costs.owner_devices)
    accumulated = costs.plan.accumulates() or not costs.profile.has_buffers  # Buffers contain gradients already.
    sizes = {stages: _stored(costs, stages, accumulated=accumulated) for stages in set(owned.values())}
    return {device: sizes[owned[device]] for device in costs.devices}


def device_needs(costs: CostModel) -> tuple[tuple[DeviceNeed, ...], ...]:
    """Returns each stage's devices' needs; devices that run and own the same stages need the same."""
    runs = _stages_on(costs.devices, costs.plan.devices)
    owned = _stages_on(costs.devices, costs.owner_devices)
    stages_of = {device: (runs[device], owned[device]) for device in costs.devices}
    needs = {pair: _need(costs, *pair) for pair in dict.fromkeys(stages_of.values())}
    return tuple(
        tuple(needs[pair] for pair in dict.fromkeys(stages_of[device] for device in (*devices, *kept)))
        for devices, kept in zip(costs.plan.devices, costs.owner_devices, strict=True)
    )


def _need(costs: CostModel, runs: tuple[int, ...], owned: tuple[int, ...]) -> DeviceNeed:
    """Returns the need of a device that runs F and Bx of ``runs``, and keeps the variables of ``owned``."""
    kept = []
    for stage in {*runs, *owned}:
        samples = costs.samples(stage)
        residual = costs.residual_bytes(stage, samples) if stage in runs else 0.0
        delayed = costs.delayed_bytes(stage, samples) if stage in owned and costs.delays(stage) else 0.0
        kept.append(max(residual, delayed))
    each = sum(kept)
    stages = {*runs, *owned}
    working = max(_working(costs, stage) for stage in stages)
    working += sum(handed_on(costs.legs, stage, costs.samples(stage)) for stage in runs) if costs.plan.relays else 0.0
    buffers = {stage: own for stage in stages if (own := costs.stages[stage].buffers) is not None}
    applying = [buffers[stage].apply for stage in owned if stage in buffers]
    sending = sum(own.returned.at(costs.samples(stage)) for stage, own in buffers.items())
    reducing = [reduction.bytes for reduction in costs.reductions if stages & {*reduction.stages}]
    alone = sum(reducing) + (
        each + working if any(costs.backward_pieces(stage)[0][0] < 1.0 for stage in owned) else 0.0
    )
    alone += sum(applying) + sending
    beside = max(reducing, default=0.0) if len(stages) > 1 else 0.0  # while other stages compute
    beside += max(applying, default=0) if len(stages) > 1 else 0
    stored = _stored(costs, owned, accumulated=True)
    return DeviceNeed(stored, each, max(kept, default=0.0), len(stages), working, alone, beside)


def _working(costs: CostModel, stage: int) -> float:
    """Returns the bytes of a stage's largest backward task."""
    samples = costs.samples(stage)
    split = (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD)
    phases = split if costs.delays(stage) and costs.stages[stage].buffers is not None else (Phase.BACKWARD,)
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
    return total


def _stages_on(devices: Sequence[int], stages: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """Maps each device to its stages."""
    stages_on: dict[int, tuple[int, ...]] = dict.fromkeys(devices, ())
    for stage, members in enumerate(stages):
        for device in members:
            stages_on[device] += (stage,)
    return stages_on
