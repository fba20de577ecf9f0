"""The summed costs of one stage's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.describe.layer_profile import ZERO, Cost, LayerProfile
from dapple_tf.describe.profile import Profile
from dapple_tf.simulation.stage_buffers import StageBuffers, stage_buffers
from graph_passes.ir.tasks import Phase

MIN_CUT_SHARE = 0.1
"""Fraction of F's time that ``recompute="min_cut"`` adds to B: elementwise work, by memory bandwidth."""


@dataclass(frozen=True)
class StageCost:
    """The layers of one stage, added up.

    Attributes:
        layers: indices of the first layer and of the one after the last.
        forward: seconds of F.
        backward: seconds of B, recomputation included.
        backward_weight: the part of B for weight gradients. If the profile doesn't say, both gradients of a layer
            with parameters cost the same: one matrix product each.
        residual_bytes: kept from F to B.
        delayed_bytes: kept from Bx to Bw where B is split.
        recomputed_bytes: residuals that B computes again, alive while it runs.
        temporary_bytes: peak use of a running task beyond these.
        parameter_bytes: trainable variables, shared ones included.
        slot_bytes: the optimizer's variables.
        state_bytes: other variables.
        apply_seconds: the optimizer's update.
        buffers: its tasks' memory, buffer by buffer; None if the profile has none.
    """

    layers: tuple[int, int]
    forward: Cost
    backward: Cost
    backward_weight: Cost
    residual_bytes: Cost
    delayed_bytes: Cost
    recomputed_bytes: Cost
    temporary_bytes: Cost
    parameter_bytes: int
    slot_bytes: int
    state_bytes: int
    apply_seconds: float
    buffers: StageBuffers | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes on each of the stage's devices: variables, slots, and gradients (in accumulators or not)."""
        return 2 * self.parameter_bytes + self.slot_bytes + self.state_bytes

    def working_bytes(self, samples: int, phase: Phase) -> float:
        """Returns the peak bytes of a running B, Bx or Bw beyond kept ones; of a split backward, Bx recomputes."""
        if self.buffers is not None:
            return self.buffers.most(samples, phase)
        recomputed = 0.0 if phase is Phase.WEIGHT_GRAD else self.recomputed_bytes.at(samples)
        return self.temporary_bytes.at(samples) + recomputed

    @property
    def apply_bytes(self) -> int:
        """Temporary bytes of the optimizer's update; 0 if the profile has no buffers."""
        return 0 if self.buffers is None else self.buffers.apply

    @property
    def returned_bytes(self) -> Cost:
        """Bytes of gradients that a slice sends to earlier stages; 0 if the profile has no buffers."""
        return ZERO if self.buffers is None else self.buffers.returned


class StageCosts:
    """The costs of a profile's stages, each added up once: many plans have a stage in common."""

    def __init__(self, profile: Profile) -> None:
        """Starts with none added up."""
        self._profile = profile
        self._known: dict[tuple[int, int, str], StageCost] = {}

    def of(self, start: int, stop: int, recompute: str) -> StageCost:
        """Returns `stage_cost` of the profile's layers."""
        key = (start, stop, recompute)
        if key not in self._known:
            self._known[key] = stage_cost(self._profile, *key)
        return self._known[key]


def stage_cost(profile: Profile, start: int, stop: int, recompute: str = "none") -> StageCost:
    """Returns the layers ``start`` to ``stop`` (excluded) as one stage."""
    layers = profile.layers[start:stop]

    def total(costs: Sequence[Cost]) -> Cost:
        return Cost(sum(cost.fixed for cost in costs), sum(cost.per_sample for cost in costs))

    forward, backward = total([x.forward for x in layers]), total([x.backward for x in layers])
    tied = {layer for group in profile.shared for layer in group.layers}
    weights = [weight_gradient(layer, index in tied) for index, layer in enumerate(layers, start)]
    kept = total([x.residual_bytes for x in layers])
    entering = profile.crossing[start - 1][0] if start else ZERO
    delays = [x.delayed_bytes for x in layers if x.delayed_bytes is not None]
    delayed = total(delays) if len(delays) == len(layers) else kept + entering  # what B recomputes is kept for Bw
    recomputed = ZERO
    if recompute == "boundary":
        backward, recomputed, kept = backward + profile.recomputed(start, stop), kept, ZERO
    elif recompute == "min_cut":
        backward += forward * MIN_CUT_SHARE
        kept = total(
            [x.residual_bytes if x.min_cut_residual_bytes is None else x.min_cut_residual_bytes for x in layers]
        )
    buffers = stage_buffers(profile, start, stop, recompute)
    shared = [group for group in profile.shared if any(start <= layer < stop for layer in group.layers)]
    temporary = [x.temporary_bytes for x in layers]
    return StageCost(
        layers=(start, stop),
        forward=forward,
        backward=backward,
        backward_weight=total(weights),
        residual_bytes=kept + entering if buffers is None else buffers.kept,
        delayed_bytes=delayed if buffers is None else buffers.late,
        recomputed_bytes=recomputed,
        temporary_bytes=Cost(max(x.fixed for x in temporary), max(x.per_sample for x in temporary)),
        parameter_bytes=sum(x.parameter_bytes for x in layers) + sum(group.parameter_bytes for group in shared),
        slot_bytes=sum(x.slot_bytes for x in layers) + sum(group.slot_bytes for group in shared),
        state_bytes=sum(x.state_bytes for x in layers),
        apply_seconds=sum(x.apply_seconds for x in layers),
        buffers=buffers,
    )


def weight_gradient(layer: LayerProfile, tied: bool) -> Cost:
    """Returns the part of a layer's B that computes weight gradients.

    Args:
        layer: the layer.
        tied: whether other layers share some of its parameters.
    """
    if layer.backward_weight is not None:
        return layer.backward_weight
    return layer.backward * 0.5 if layer.parameter_bytes or tied else ZERO
