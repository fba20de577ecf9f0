"""How tensors travel between stages: directly, or handed on by relays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dapple_tf.describe.layer_profile import ZERO, Cost
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor
from graph_passes.ir.tasks import Phase, sources_of


class Leg(NamedTuple):
    """The way of some tensors from one stage to the next that reads them; their gradients return over it.

    Attributes:
        number: its position in `CostModel.legs`.
        sender: the stage that makes the tensors, or hands them on.
        receiver: the stage that gets them.
        forward: bytes of a slice.
        backward: bytes of its gradients.
        differentiable: whether any of the tensors has a gradient.
        source: number of the leg over which the sender gets the tensors; None if it makes them.
        onward: numbers of the legs over which the receiver hands them on.
        tensors: positions of the tensors in the profile.
    """

    number: int
    sender: int
    receiver: int
    forward: Cost
    backward: Cost
    differentiable: bool
    source: int | None = None
    onward: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()

    @property
    def sums(self) -> bool:
        """Whether the receiver adds up gradients before it sends them back."""
        return bool(self.onward) and self.differentiable

    def sending(self, backward: bool, split: Collection[int]) -> tuple[int, Phase]:
        """Returns the stage and the phase of the tasks that send tensors, or gradients back.

        Args:
            backward: whether gradients are sent.
            split: the stages whose backward is Bx and Bw.
        """
        if not backward:
            return self.sender, Phase.FORWARD
        return self.receiver, Phase.INPUT_GRAD if self.receiver in split else Phase.BACKWARD


_Ends = tuple[int, int, tuple[int, ...]]
"""Sender, receiver, and all readers of tensors that are handed on; no readers for what comes from its maker alone."""


def legs_of(profile: Profile, plan: Plan, stage_of: Sequence[int]) -> tuple[Leg, ...]:
    """Returns the legs of a plan's tensors, ordered by their ends.

    Tensors of one maker and the same readers travel together where relays hand them on; all others of two stages do.

    Args:
        profile: the tensors between layers.
        plan: its relays and devices.
        stage_of: each layer's stage.
    """
    tensors: dict[_Ends, list[tuple[int, Tensor]]] = {}
    before: dict[_Ends, _Ends | None] = {}  # the leg over which the sender gets them
    for position, tensor in enumerate(profile.tensors):
        maker = stage_of[tensor.producer]
        readers = tuple(sorted({stage_of[layer] for layer in tensor.consumers} - {maker}))
        if plan.relays:
            sources = sources_of(maker, readers, plan.relays, plan.devices)
        else:
            sources = dict.fromkeys(readers, maker)
        bundle = (maker, *readers) if any(source != maker for source in sources.values()) else ()
        for reader, source in sources.items():
            ends = (source, reader, bundle)
            tensors.setdefault(ends, []).append((position, tensor))
            before[ends] = None if source == maker else (sources[source], source, bundle)
    order = sorted(tensors)
    numbers = {ends: number for number, ends in enumerate(order)}
    onward: dict[_Ends | None, list[int]] = {}
    for ends in order:
        onward.setdefault(before[ends], []).append(numbers[ends])
    legs = []
    for ends in order:
        came, (positions, own) = before[ends], zip(*tensors[ends], strict=True)
        forward = _sum([tensor.bytes for tensor in own])
        back = [tensor.bytes for tensor in own if tensor.differentiable]
        legs.append(
            Leg(
                numbers[ends],
                *ends[:2],
                forward,
                forward if len(back) == len(own) else _sum(back),
                bool(back),
                None if came is None else numbers[came],
                tuple(onward.get(ends, ())),
                tuple(positions),
            )
        )
    return tuple(legs)


def _sum(costs: Sequence[Cost]) -> Cost:
    return sum(costs[1:], costs[0]) if costs else ZERO


def handed_on(legs: Sequence[Leg], stage: int, samples: int) -> float:
    """Returns the bytes of a slice that a stage hands on, and of the gradients that it adds to its own."""
    own = [leg for leg in legs if leg.receiver == stage and leg.onward]
    return sum(leg.forward.at(samples) + leg.backward.at(samples) for leg in own)
