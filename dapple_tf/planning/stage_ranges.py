"""Times and bytes of every possible stage, as arrays, for `dapple_tf.planning.search`."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dapple_tf.describe.profile import Profile
from dapple_tf.simulation.stage_cost import MIN_CUT_SHARE

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class StageRanges:
    """Sums over the layers of each possible stage, as arrays over (first group, group after the last).

    Pairs are a fixed part and one per sample, as of a `Cost`.

    Attributes:
        forward: seconds of F.
        backward: seconds of B, recomputation included.
        residual: bytes kept from F to B, those that enter the stage included.
        working: bytes that a running task needs beyond these.
        parameters: bytes of trainable variables, shared ones included.
        stored: bytes of variables, slots and gradients.
        slots: those of them that are the optimizer's.
        apply: seconds of the update.
        entering: bytes of the boundary before each first group.
        returning: bytes of its gradients.
        tables: the part of the parameters of which only rows are looked up.
        table_slots: the slots of these.
        rows: bytes of the rows that are looked up.
    """

    forward: tuple[Floats, Floats]
    backward: tuple[Floats, Floats]
    residual: tuple[Floats, Floats]
    working: tuple[Floats, Floats]
    parameters: Floats
    stored: Floats
    slots: Floats
    apply: Floats
    entering: tuple[Floats, Floats]
    returning: tuple[Floats, Floats]
    tables: Floats
    table_slots: Floats
    rows: tuple[Floats, Floats]


def stage_ranges(profile: Profile, ends: Sequence[int], recompute: str) -> StageRanges:
    """Returns the sums for stages between these positions (`coarsened`), with one recomputation for all."""
    starts = [0, *ends]
    count = len(ends) + 1

    def sums(values: Sequence[float] | Floats) -> Floats:
        total = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])[starts]
        return np.asarray(total[None, :] - total[:, None])

    def costs(name: str) -> tuple[Floats, Floats]:
        layer_costs = [getattr(layer, name) for layer in profile.layers]
        return sums([cost.fixed for cost in layer_costs]), sums([cost.per_sample for cost in layer_costs])

    def crossing(backward: bool) -> tuple[Floats, Floats]:
        cut = [(0.0, 0.0)] + [(pair[backward].fixed, pair[backward].per_sample) for pair in profile.crossing]
        array = np.array(cut)[starts]
        return array[:, 0], array[:, 1]

    forward, backward, residual = costs("forward"), costs("backward"), costs("residual_bytes")
    entering, returning = crossing(False), crossing(True)
    temporary = [layer.temporary_bytes for layer in profile.layers]
    working = [np.zeros((count, count)), np.zeros((count, count))]
    for part, values in enumerate(([c.fixed for c in temporary], [c.per_sample for c in temporary])):
        peaks = [max(values[a:b], default=0.0) for a, b in itertools.pairwise(starts)]
        for first in range(count - 1):
            working[part][first, first + 1 :] = np.maximum.accumulate(peaks[first:])
    if recompute == "boundary":
        later = _needed_later(profile, starts)
        again = [np.maximum(0.0, whole - part) for whole, part in zip(costs("all_again"), later, strict=True)]
        backward = (backward[0] + again[0], backward[1] + again[1])
        working = [working[0] + residual[0], working[1] + residual[1]]
        residual = (np.zeros((count, count)), np.zeros((count, count)))
    elif recompute == "min_cut":
        backward = (backward[0] + MIN_CUT_SHARE * forward[0], backward[1] + MIN_CUT_SHARE * forward[1])
        least = [layer.min_cut_residual_bytes or layer.residual_bytes for layer in profile.layers]
        residual = sums([cost.fixed for cost in least]), sums([cost.per_sample for cost in least])
    residual = (residual[0] + entering[0][:, None], residual[1] + entering[1][:, None])
    parameters = sums([layer.parameter_bytes for layer in profile.layers])
    slots = sums([layer.slot_bytes for layer in profile.layers])
    state = sums([layer.state_bytes for layer in profile.layers])
    for group in profile.shared:
        users = np.zeros(len(profile.layers))
        users[list(group.layers)] = 1
        used = sums(users) > 0
        parameters = parameters + used * group.parameter_bytes
        slots = slots + used * group.slot_bytes
    apply = sums([layer.apply_seconds for layer in profile.layers])
    tables = sums([layer.table_bytes for layer in profile.layers])
    table_slots = sums([layer.table_slot_bytes for layer in profile.layers])
    return StageRanges(
        forward, backward, residual, (working[0], working[1]), parameters, 2 * parameters + slots + state, slots, apply,
        entering, returning, tables, table_slots, costs("row_bytes"),
    )  # fmt: skip


def _needed_later(profile: Profile, starts: Sequence[int]) -> tuple[Floats, Floats]:
    """Returns the time of the part of F that each possible stage's B needn't compute again, as arrays of `StageRanges`.

    Args:
        profile: the layers.
        starts: the first layer of each group, and the number of layers.
    """
    count = len(starts)
    fixed, per_sample = np.zeros((count, count)), np.zeros((count, count))
    for index, layer in enumerate(profile.layers):
        for later in layer.needed_later:
            # Stages that begin up to the layer, and end after it but before the one that needs the part.
            first, last = bisect.bisect_right(starts, index), bisect.bisect_right(starts, later.layer)
            fixed[:first, first:last] += layer.all_again.fixed * later.share
            per_sample[:first, first:last] += layer.all_again.per_sample * later.share
    return fixed, per_sample
