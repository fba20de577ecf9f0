"""Whether stages hand on what they read, so that the network card of its maker doesn't set the pace."""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_checks import refused
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.simulation.cost import Leg, legs_of

_LEAST_GAIN = 0.05
"""The least time that relays must save at the busiest port to be guessed, as a fraction of a device's computation."""


class RelayGuess:
    """Guesses which plans gain from relays, before anything is simulated: where these relieve the busiest port.

    Tensors also wait at relays, so that a guess may be wrong: `other_way` is the opposite.
    """

    def __init__(self, request: PlanRequest) -> None:
        """Starts without guesses, for plans of a request."""
        self._request = request
        self._several = _read_by_several(request.profile)
        layers = request.profile.layers
        self._computing = sum(layer.forward.per_sample + layer.backward.per_sample for layer in layers)
        self._known: dict[tuple[object, ...], tuple[int, ...]] = {}

    def __call__(self, plan: Plan) -> Plan:
        """Returns the plan with relays, or without; its own don't count.

        Raises:
            PlanError: the plan doesn't fit the cluster, or cuts after layers that the profile lacks.
        """
        relays: tuple[int, ...] = ()
        if self._several and self._request.allows("relays") and plan.num_stages > 2 and not refused(plan, "relays"):
            key = (plan.cuts, plan.devices)
            if key not in self._known:
                self._known[key] = self._relays(plan)
            relays = self._known[key]
        return plan if plan.relays == relays else plan.with_options(relays=relays)

    def _relays(self, plan: Plan) -> tuple[int, ...]:
        profile, cluster = self._request.profile, self._request.cluster
        plan.validate_on(cluster)
        try:
            stage_of = profile.stage_of_layers(plan.cuts)
        except ValueError as error:
            raise PlanError(str(error)) from error
        direct = legs_of(profile, plan.with_options(relays=()), stage_of)
        if not any(_repeated(direct, leg) for leg in direct):
            return ()
        relayed = legs_of(profile, _all(plan), stage_of)
        saved = _busiest(direct, plan, cluster) - _busiest(relayed, plan, cluster)
        computing = self._computing * plan.global_batch_size / sum(plan.replicas)
        return _handing_on(relayed) if saved > _LEAST_GAIN * computing else ()


def other_way(plan: Plan, request: PlanRequest) -> Plan | None:
    """Returns a plan with relays if it has none, or without if it has some; None if there is no other way."""
    if not (request.allows("relays") and _read_by_several(request.profile)):
        return None
    relays = () if plan.relays else _handing_on(request.costs(_all(plan)).legs)
    return plan.with_options(relays=relays) if relays or plan.relays else None


def _handing_on(legs: Sequence[Leg]) -> tuple[int, ...]:
    return tuple(sorted({leg.sender for leg in legs if leg.source is not None}))


def _all(plan: Plan) -> Plan:
    return plan if refused(plan, "relays") else plan.with_options(relays=range(plan.num_stages))


def _read_by_several(profile: Profile) -> bool:
    return any(len(tensor.consumers) > 1 for tensor in profile.tensors)


def _repeated(legs: Sequence[Leg], leg: Leg) -> bool:
    """Returns whether a stage sends any of a leg's tensors to a second stage."""
    return any(
        other.receiver != leg.receiver and not {*leg.tensors}.isdisjoint(other.tensors)
        for other in legs
        if other.sender == leg.sender
    )


def _busiest(legs: Sequence[Leg], plan: Plan, cluster: Cluster) -> float:
    """Estimates the seconds of a step in which the busiest port sends or receives: replicas share evenly."""
    busy: dict[tuple[str, int], float] = {}
    server = [device.server for device in cluster.devices]
    for leg in legs:
        for cost, *ends in ((leg.forward, leg.sender, leg.receiver), (leg.backward, leg.receiver, leg.sender)):
            places = [plan.devices[stage] for stage in ends]
            apart = next(((one, other) for one in places[0] for other in places[1] if one != other), None)
            if places[0] == places[1] or apart is None:
                continue
            servers = [dict.fromkeys(server[device] for device in devices) for devices in places]
            inside = len({*servers[0], *servers[1]}) == 1
            link = cluster.link(*apart)
            for kind, ports in zip(("out", "in"), places if inside else servers, strict=True):
                seconds = cost.per_sample * plan.global_batch_size / link.bandwidth / len(ports)
                for port in ports:
                    busy[kind, port] = busy.get((kind, port), 0.0) + seconds
    return max(busy.values(), default=0.0)
