"""The memory that a stage's tasks keep, and what they use while they run: its layers' buffers, added up."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dapple_tf.describe.profile import ZERO, Cost, Profile, Tensor
from graph_passes.ir.tasks import Phase


class _Step(NamedTuple):
    """The backward of one layer, in bytes.

    Attributes:
        gradients: dense gradients of its parameters.
        partial: made by Bx for Bw.
        temporary: peak use, these two included.
        passing: the gradients that it gets from within the stage, and those that it returns.
    """

    gradients: int
    partial: Cost
    temporary: Cost
    passing: Cost

    def without_weights(self, samples: int) -> float:
        """Returns the peak bytes of the layer's part of Bx, beyond those that it makes for Bw."""
        own = self.temporary.at(samples) - self.gradients - self.partial.at(samples)
        return max(0.0, own) + self.passing.at(samples)


@dataclass(frozen=True)
class StageBuffers:
    """The buffers of the layers of one stage.

    A tensor is inside if no other stage reads it; crossing tensors have lives of their own (`step_memory.py`).

    Attributes:
        residual: made by F, kept to the end of the backward.
        delayed: the part of it that Bw reads.
        partial: made by Bx for Bw.
        gradients: dense gradients of parameters, which B or Bw returns.
        rows: gradients that are rows of embeddings, kept from the backward to the update.
        apply: peak use of the optimizer's update.
        kept: all that a slice keeps from F to its backward, crossing tensors included.
        late: all that it keeps from Bx to Bw, likewise.
        given: the gradients that the stage receives.
        returned: the gradients that it sends to earlier stages.
    """

    residual: Cost
    delayed: Cost
    partial: Cost
    gradients: int
    rows: Cost
    apply: int
    kept: Cost
    late: Cost
    given: Cost
    returned: Cost
    _steps: tuple[_Step, ...]

    def working(self, samples: int) -> float:
        """Returns the most bytes that a running B uses besides its arguments.

        The executor keeps a function's results until it is over: at each layer there are the gradients of all later
        layers' parameters, and the gradients that the layer receives and returns.
        """
        if samples in self._most:
            return self._most[samples]
        most, passed = 0.0, 0
        for step in reversed(self._steps):
            most = max(most, passed + step.temporary.at(samples) + step.passing.at(samples))
            passed += step.gradients
        self._most[samples] = most
        return most

    @functools.cached_property
    def _most(self) -> dict[int, float]:
        return {}

    def working_input(self, samples: int) -> float:
        """Returns the bytes that a running Bx uses besides, beyond those that it makes for Bw."""
        return max(step.without_weights(samples) for step in self._steps)

    def working_weight(self) -> float:
        """Returns the bytes that a running Bw uses besides: its results."""
        return float(self.gradients)

    def most(self, samples: int, phase: Phase) -> float:
        """Returns the most bytes that a running B, Bx or Bw uses beyond kept ones."""
        if phase is Phase.WEIGHT_GRAD:
            return self.working_weight()
        if phase is Phase.INPUT_GRAD:
            return self.partial.at(samples) + self.working_input(samples) + self.given.at(samples)
        return self.working(samples) + self.given.at(samples)


def stage_buffers(profile: Profile, start: int, stop: int, recompute: str = "none") -> StageBuffers | None:
    """Returns the buffers of layers ``start`` to ``stop`` (excluded); None if the profile has none."""
    if not profile.has_buffers:
        return None
    layers = profile.layers[start:stop]
    known = [layer.buffers for layer in layers if layer.buffers is not None]
    members = range(start, stop)
    inside = [tensor for tensor in profile.tensors if tensor.producer in members and _stays(tensor, members)]
    residual = _sum([x.residual for x in known], (t.bytes for t in inside if t.kept))
    delayed = _sum([x.delayed for x in known], (t.bytes for t in inside if t.delayed))
    partial = _sum([x.partial for x in known], (t.bytes for t in inside if t.gradient_delayed))
    temporary = [layer.temporary_bytes for layer in layers]
    if recompute == "boundary":
        temporary = [Cost(x.fixed + residual.fixed, x.per_sample + residual.per_sample) for x in temporary]
        residual, delayed, partial = ZERO, ZERO, partial + delayed
    elif recompute == "min_cut":
        leaving = [t for t in profile.tensors if t.producer in members and not _stays(t, members) and t.kept]
        fewest = _sum(
            [x.residual_bytes if x.min_cut_residual_bytes is None else x.min_cut_residual_bytes for x in layers]
        )
        crossing = _sum([t.bytes for t in leaving])
        least = Cost(max(0.0, fewest.fixed - crossing.fixed), max(0.0, fewest.per_sample - crossing.per_sample))
        again = Cost(max(0.0, residual.fixed - least.fixed), max(0.0, residual.per_sample - least.per_sample))
        temporary = [x + again for x in temporary]
        residual = least
        delayed = Cost(min(delayed.fixed, least.fixed), min(delayed.per_sample, least.per_sample))
    steps = []
    for index, layer, cost in zip(members, known, temporary, strict=True):
        flowing = [t for t in profile.tensors if t.differentiable]
        given = [t.bytes for t in flowing if t.producer == index and max(t.consumers) in members]
        returned = [t.bytes for t in flowing if index in t.consumers]
        steps.append(_Step(layer.gradients, layer.partial, cost, _sum([*given, *returned])))
    entering = [t for t in profile.tensors if t.producer < start and any(i in members for i in (*t.consumers, *t.kept))]
    leaving = [t for t in profile.tensors if t.producer in members and not _stays(t, members)]
    return StageBuffers(
        kept=_sum([residual], (t.bytes for t in (*entering, *leaving) if t.kept)),
        late=_sum(
            [delayed, partial],
            (
                t.bytes
                for t in (*entering, *leaving)
                if any(i in members for i in t.delayed) or (t in leaving and t.gradient_delayed)
            ),
        ),
        given=_sum([t.bytes for t in leaving if t.differentiable]),
        returned=_sum([t.bytes for t in entering if t.differentiable]),
        residual=residual,
        delayed=delayed,
        partial=partial,
        gradients=sum(x.gradients for x in known),
        rows=_sum([x.rows for x in known]),
        apply=sum(x.apply for x in known),
        _steps=tuple(steps),
    )


def _stays(tensor: Tensor, members: range) -> bool:
    return all(layer in members for layer in (*tensor.consumers, *tensor.kept))


def _sum(costs: Iterable[Cost], others: Iterable[Cost] = ()) -> Cost:
    terms = [*costs, *others]
    return Cost(sum(cost.fixed for cost in terms), sum(cost.per_sample for cost in terms))
