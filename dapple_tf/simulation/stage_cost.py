"""The summed costs of one stage's layers, and the memory that its tasks keep and use while they run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dapple_tf.describe.layer_profile import ZERO, Cost, LayerBuffers, LayerProfile
from dapple_tf.describe.profile import Profile, Tensor
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

    forward, backward = _sum([x.forward for x in layers]), _sum([x.backward for x in layers])
    tied = {layer for group in profile.shared for layer in group.layers}
    weights = [weight_gradient(layer, index in tied) for index, layer in enumerate(layers, start)]
    kept = _sum([x.residual_bytes for x in layers])
    entering = profile.crossing[start - 1][0] if start else ZERO
    delays = [x.delayed_bytes for x in layers if x.delayed_bytes is not None]
    delayed = _sum(delays) if len(delays) == len(layers) else kept + entering  # what B recomputes is kept for Bw
    recomputed = ZERO
    if recompute == "boundary":
        backward, recomputed, kept = backward + profile.recomputed(start, stop), kept, ZERO
    elif recompute == "min_cut":
        backward += forward * MIN_CUT_SHARE
        kept = _sum(
            [x.residual_bytes if x.min_cut_residual_bytes is None else x.min_cut_residual_bytes for x in layers]
        )
    buffers = stage_buffers(profile, start, stop, recompute)
    shared = [group for group in profile.shared if any(start <= layer < stop for layer in group.layers)]
    temporary = [x.temporary_bytes for x in layers]
    return StageCost(
        layers=(start, stop),
        forward=forward,
        backward=backward,
        backward_weight=_sum(weights),
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


# ---- buffers


class _Step(NamedTuple):
    """The backward of one layer, in bytes.

    Attributes:
        gradients: dense gradients of its parameters.
        partial: made by Bx for Bw.
        temporary: peak use, these two included.
        passing: the gradients of tensors within the stage, and of those that it reads, that are there meanwhile.
        recomputed: residuals computed again that this backward and earlier layers' are still to read: the executor
            frees each when its last reader in B is over, unlike those that F keeps, which are arguments of B.
        recomputed_input: those of them that Bw doesn't read.
    """

    gradients: int
    partial: Cost
    temporary: Cost
    passing: Cost
    recomputed: Cost
    recomputed_input: Cost

    def most(self, samples: int) -> float:
        """Returns the peak bytes of the layer's part of B, but for gradients of later layers' parameters."""
        return self.temporary.at(samples) + self.passing.at(samples) + self.recomputed.at(samples)

    def without_weights(self, samples: int) -> float:
        """Returns the peak bytes of the layer's part of Bx, without results for Bw."""
        own = self.temporary.at(samples) - self.gradients - self.partial.at(samples)
        return max(0.0, own) + self.passing.at(samples) + self.recomputed_input.at(samples)


@dataclass(frozen=True)
class StageBuffers:
    """The buffers of the layers of one stage.

    A tensor is inside if no other stage reads it; crossing tensors have lives of their own (`step_memory.py`).

    Attributes:
        residual: made by F, kept to the end of the backward.
        delayed: the part of it that Bw reads.
        partial: made by Bx for Bw.
        by_weight: what Bw computes again.
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
    by_weight: Cost
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
        layers' parameters, and those of tensors: what the layer receives and returns, what waits to be added up, and
        what goes to other stages. What B computes again goes layer by layer, while gradients of parameters come.
        """
        if samples in self._most:
            return self._most[samples]
        most, passed = 0.0, 0
        for step in reversed(self._steps):
            most = max(most, passed + step.most(samples))
            passed += step.gradients
        self._most[samples] = most
        return most

    @functools.cached_property
    def _most(self) -> dict[int, float]:
        return {}

    def working_input(self, samples: int) -> float:
        """Returns the working bytes of a running Bx, without results for Bw."""
        return max(step.without_weights(samples) for step in self._steps)

    def working_weight(self, samples: int) -> float:
        """Returns the working bytes of a running Bw: results and recomputed residuals."""
        return self.gradients + self.by_weight.at(samples)

    def most(self, samples: int, phase: Phase) -> float:
        """Returns the most bytes that a running B, Bx or Bw uses beyond kept ones."""
        if phase is Phase.WEIGHT_GRAD:
            return self.working_weight(samples)
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
    recomputed, by_weight = [_Unread(ZERO, ZERO)] * len(layers), ZERO
    if recompute == "boundary":
        recomputed = _unread(known, inside, start)
        residual, delayed, partial = ZERO, ZERO, partial + delayed
    elif recompute == "min_cut":
        leaving = [t for t in profile.tensors if t.producer in members and not _stays(t, members) and t.kept]
        fewest = _sum(
            [x.residual_bytes if x.min_cut_residual_bytes is None else x.min_cut_residual_bytes for x in layers]
        )
        crossing = _sum([t.bytes for t in leaving])
        least = _less(fewest, crossing)
        again = _less(residual, least)
        saved = list(itertools.accumulate(map(_saved, layers)))  # what layers up to each one don't keep
        of_layers = [_in_proportion(again, part, saved[-1]) for part in saved]
        recomputed = [_Unread(part, part) for part in of_layers]  # Bx and Bw each compute again what they read.
        kept_late = Cost(min(delayed.fixed, least.fixed), min(delayed.per_sample, least.per_sample))
        residual, delayed, by_weight = least, kept_late, _less(delayed, kept_late)
    steps = []
    for layer, own, flowing, unread in zip(layers, known, _passing(profile, members), recomputed, strict=True):
        steps.append(_Step(own.gradients, own.partial, layer.temporary_bytes, flowing, *unread))
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
        by_weight=by_weight,
        gradients=sum(x.gradients for x in known),
        rows=_sum([x.rows for x in known]),
        apply=sum(x.apply for x in known),
        _steps=tuple(steps),
    )


@dataclass
class _Gradient:
    """A gradient of a tensor in a stage's backward: its bytes, and the layers during whose backwards it is there.

    Attributes:
        bytes: its size.
        made: the layer whose backward makes it.
        until: the layer whose backward reads it last, at most ``made``.
    """

    bytes: Cost
    made: int
    until: int


def _passing(profile: Profile, members: range) -> list[Cost]:
    """Returns for each layer of a stage the gradients of tensors that are there during its backward.

    What several layers read gets a gradient from each. They are added up when the last one is there, as a tape does;
    until then all of them wait. The sum stays until the producer's backward or, for another stage's tensor, to the end.
    A layer that adds returns the buffer that it was given: see `_adds`.
    """
    made: list[_Gradient] = []
    sums: dict[int, list[_Gradient]] = {}  # layer -> the gradients of what it makes, but for those of other stages
    for layer in reversed(members):
        own = sums.get(layer, [])
        passes_on = len(own) == 1 and _adds(profile, layer, own[0].bytes)
        for tensor in profile.tensors:
            if not tensor.differentiable or layer not in tensor.consumers:
                continue
            readers = [reader for reader in tensor.consumers if reader in members]
            gradient = own[0] if passes_on else _Gradient(tensor.bytes, layer, layer)
            gradient.until = min(gradient.until, readers[0])
            made += [] if passes_on else [gradient]
            if layer > readers[0]:
                continue
            start = max(tensor.producer, members.start)
            total = gradient
            if len(readers) > 1 or (tensor.producer in members and len(readers) < len(tensor.consumers)):
                total = _Gradient(tensor.bytes, layer - 1, start)
                made.append(total)
            total.until = min(total.until, start)
            sums.setdefault(tensor.producer, []).append(total)
    passing = [ZERO] * len(members)
    for gradient in made:
        for layer in range(gradient.until, gradient.made + 1):
            passing[layer - members.start] += gradient.bytes
    return passing


def _adds(profile: Profile, layer: int, size: Cost) -> bool:
    """Returns whether a layer joins tensors of its result's size and its backward reads none, as an addition's.

    Its gradients are one buffer then; products, pools and concatenations make one for each.
    """
    buffers, read = profile.layers[layer].buffers, [tensor for tensor in profile.tensors if layer in tensor.consumers]
    reads_forward = any(layer in tensor.kept for tensor in profile.tensors)
    alike = len(read) > 1 and all(tensor.differentiable and tensor.bytes == size for tensor in read)
    own = buffers is not None and not buffers.residual.per_sample and not buffers.gradients
    return alike and own and not reads_forward


class _Unread(NamedTuple):
    """Residuals that the backwards of a stage's first layers read: all, and without Bw's."""

    all: Cost
    input: Cost


def _unread(layers: Sequence[LayerBuffers], inside: Sequence[Tensor], start: int) -> list[_Unread]:
    """Returns each layer's residuals that its own and earlier layers' backwards read.

    Args:
        layers: the buffers of its layers.
        inside: tensors between them that no other stage reads.
        start: number of the first layer.
    """
    unread, total, of_input = [], ZERO, ZERO
    for index, layer in enumerate(layers, start):
        last_read = [tensor for tensor in inside if tensor.kept and min(tensor.kept) == index]
        total = _sum([total, layer.residual], (tensor.bytes for tensor in last_read))
        own = _less(layer.residual, layer.delayed)
        of_input = _sum([of_input, own], (tensor.bytes for tensor in last_read if not tensor.delayed))
        unread.append(_Unread(total, of_input))
    return unread


def _less(first: Cost, second: Cost) -> Cost:
    """Returns the difference of two costs, at least 0 in both parts."""
    return Cost(max(0.0, first.fixed - second.fixed), max(0.0, first.per_sample - second.per_sample))


def _saved(layer: LayerProfile) -> Cost:
    """Returns the residuals of a layer that a min-cut doesn't keep."""
    least = layer.min_cut_residual_bytes
    return ZERO if least is None else _less(layer.residual_bytes, least)


def _in_proportion(amount: Cost, part: Cost, whole: Cost) -> Cost:
    """Returns the share of an amount that ``part`` is of ``whole``; all of it where nothing tells."""
    return Cost(
        amount.fixed * (part.fixed / whole.fixed if whole.fixed else 1.0),
        amount.per_sample * (part.per_sample / whole.per_sample if whole.per_sample else 1.0),
    )


def _stays(tensor: Tensor, members: range) -> bool:
    return all(layer in members for layer in (*tensor.consumers, *tensor.kept))


def _sum(costs: Iterable[Cost], others: Iterable[Cost] = ()) -> Cost:
    terms = [*costs, *others]
    return Cost(sum(cost.fixed for cost in terms), sum(cost.per_sample for cost in terms))
