"""Whether stages hand on what they read, so that the network card of its maker doesn't set the pace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.choice import Choice
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.legs import Leg
from dapple_tf.simulation.simulator import Simulation, run

_LEAST_GAIN = 0.05
"""The least time that relays must save at the busiest port to be guessed, as a fraction of a device's computation."""
_BEST = 12
"""Number of best plans that are simulated with relays and without."""


class RelayGuess:
    """Guesses which plans gain from relays, before anything is simulated: where these relieve the busiest port.

    Tensors also wait at relays, so that a guess may be wrong: `other_ways` tries the opposite.
    """

    def __init__(self, request: PlanRequest) -> None:
        """Starts without guesses, for plans of a request."""
        self._request = request
        self._several = _read_by_several(request.profile)
        self._known: dict[tuple[object, ...], tuple[int, ...]] = {}

    def __call__(self, plan: Plan) -> Plan:
        """Returns the plan with relays, or without; its own don't count.

        Raises:
            PlanError: the plan doesn't fit the cluster, or cuts after layers that the profile lacks.
        """
        relays: tuple[int, ...] = ()
        if self._several and plan.num_stages > 2 and plan.operator_devices is None:
            key = (plan.cuts, plan.devices)
            if key not in self._known:
                self._known[key] = self._relays(plan)
            relays = self._known[key]
        return plan if plan.relays == relays else dataclasses.replace(plan, relays=relays)

    def _relays(self, plan: Plan) -> tuple[int, ...]:
        costs = self._request.costs(dataclasses.replace(plan, relays=()))
        if not any(_repeated(costs.legs, leg) for leg in costs.legs):
            return ()
        relayed = self._request.costs(_all(plan))
        computing = sum(stage.forward.at(1) + stage.backward.at(1) for stage in costs.stages) * plan.global_batch_size
        saved = _busiest(costs) - _busiest(relayed)
        return relays_of(relayed) if saved > _LEAST_GAIN * computing / len(costs.devices) else ()


def other_ways(choices: Sequence[Choice], request: PlanRequest) -> Iterator[tuple[Choice, Simulation]]:
    """Yields simulations of the best plans with relays where they have none, or without where they have some.

    Args:
        choices: simulated plans, the fastest first.
        request: the profile and the cluster.
    """
    if not _read_by_several(request.profile):
        return
    for choice in choices[:_BEST]:
        plan = choice.plan
        relays = () if plan.relays else relays_of(request.costs(_all(plan)))
        if relays or plan.relays:
            try:
                yield choice, run(request.costs(dataclasses.replace(plan, relays=relays)))
            except PlanError:
                continue  # What waits on its way needs memory.


def relays_of(costs: CostModel) -> tuple[int, ...]:
    """Returns the stages of a plan that have anything to hand on."""
    return tuple(sorted({leg.sender for leg in costs.legs if leg.source is not None}))


def _all(plan: Plan) -> Plan:
    possible = () if plan.operator_devices is not None else range(plan.num_stages)
    return dataclasses.replace(plan, relays=tuple(possible))


def _read_by_several(profile: Profile) -> bool:
    return any(len(tensor.consumers) > 1 for tensor in profile.tensors)


def _repeated(legs: Sequence[Leg], leg: Leg) -> bool:
    """Returns whether a stage sends any of a leg's tensors to a second stage."""
    return any(
        other.receiver != leg.receiver and not {*leg.tensors}.isdisjoint(other.tensors)
        for other in legs
        if other.sender == leg.sender
    )


def _busiest(costs: CostModel) -> float:
    """Returns the seconds of a step in which the busiest port sends or receives."""
    busy: dict[tuple[str, int], float] = {}
    plan, cluster = costs.plan, costs.cluster
    for sender, receiver in costs.routes:
        for backward in (False, True):
            ends = (receiver, sender) if backward else (sender, receiver)
            for message in costs.messages(sender, receiver, 0, backward=backward):
                source, target = plan.devices[ends[0]][message.sender], plan.devices[ends[1]][message.receiver]
                if source != target:
                    link = cluster.link(source, target)
                    a, b = cluster.devices[source].server, cluster.devices[target].server
                    for port in (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b)):
                        busy[port] = busy.get(port, 0.0) + message.bytes / link.bandwidth
    return max(busy.values(), default=0.0) * plan.micro_batches
