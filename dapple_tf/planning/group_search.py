"""Searches plans whose stages place their operators on groups of devices: cuts, replicas and groups together.

Stages alone are planned first, as ever. The dynamic programme then runs again with stages that may have groups, by what
the profile says of ranges of layers (`dapple_tf.simulation.placed_stages`); the best of its plans by the formula are
simulated, and improved by moving cuts, and devices between groups and stages. What this gains is by predictions of two
kinds together, so that it has to gain more than other features do (`LEAST_GROUP_GAIN`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.choice import Choice
from dapple_tf.planning.local_search import change_micro_batches, move_cuts
from dapple_tf.planning.placement import Placements, links_of
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.search import Candidate, Search, coarsened
from dapple_tf.progress import Progress
from dapple_tf.schedules.policy import Policy
from dapple_tf.simulation.simulator import tried

logger = logging.getLogger(__name__)

LEAST_GROUP_GAIN = 0.05
"""The least fraction of a step's time that placing operators must gain over stages alone."""
_POSITIONS = 16
"""Number of places at which cuts are considered, besides the ends of pieces."""
_PLANS = 60
"""Number of the formula's best plans that are simulated."""
_STARTS = 4
"""Number of best plans whose neighbours are simulated."""
_NEAR = 1.2
"""Plans that are certainly slower than the best by this factor aren't simulated to the end."""
_ROUNDS = 4
"""The most times that the ranges of the best plan are searched as a whole; the fastest of those plans is taken then."""

Exact = Callable[[Profile, Plan], Profile | None]
"""Returns a profile with the ranges of a plan's placed stages searched as a whole; None if it has them already."""
Groups = tuple[tuple[int, ...], ...]
Kind = Callable[[Plan], bool]
"""Returns whether a plan is of a kind."""


def any_plan(plan: Plan) -> bool:
    """Returns True: the kind of all plans."""
    return True


def several_stages(plan: Plan) -> bool:
    """Returns whether a plan has at least two stages."""
    return plan.num_stages > 1


def several_on_groups(plan: Plan) -> bool:
    """Returns whether a plan has at least two stages, all of them on groups of devices."""
    return plan.num_stages > 1 and len(plan.spread_stages) == plan.num_stages


def with_groups(
    request: PlanRequest, alone: float | None, exact: Exact | None, suits: Kind = any_plan
) -> Choice | None:
    """Returns the best plan with groups of devices if it gains enough over stages alone, or if these don't fit.

    Args:
        request: the request, which allows groups.
        alone: simulated seconds of the best plan without groups, which those with groups must undercut; None if no such
            plan fits, or if any with groups will do.
        exact: searches the ranges of a plan as a whole; None takes what is composed of pieces for granted.
        suits: which plans with groups are meant.

    Returns:
        None if no such plan gains enough.
    """
    fastest = math.inf if alone is None else alone
    limit = fastest * (1 - LEAST_GROUP_GAIN)
    best: Choice | None = None
    settled: list[Choice] = []  # plans whose ranges have been searched as a whole
    for _ in range(_ROUNDS):
        best = _GroupSearch(request, limit, suits).best()
        known = None if best is None or exact is None else exact(request.profile, best.plan)
        if known is None:
            break
        assert best is not None
        request = dataclasses.replace(request, profile=known)
        with contextlib.suppress(PlanError):  # As a whole it doesn't fit.
            settled += filter(None, [Choice.of(tried(request.costs(best.plan)))])
    else:
        best = None  # The next one might be composed of pieces, too.
    choices = [*settled, *([] if best is None else [best])]
    best = min(choices, key=lambda choice: choice.latency, default=None)
    gains = best is not None and best.latency < limit
    expected = "doesn't fit" if best is None else f"{best.latency:.4g} s with operators placed on groups of devices"
    logger.info(
        "planned %s: %.4g s for stages alone, %s; placing operators has to gain %.0f%%, and is %s",
        *(request.profile.model, fastest, expected, 100 * LEAST_GROUP_GAIN, "taken" if gains else "left out"),
    )
    return best if gains else None


class _GroupSearch:
    """One search with what is known of ranges of layers."""

    def __init__(self, request: PlanRequest, limit: float, suits: Kind) -> None:
        """Starts a search for plans that suit and take less than ``limit`` seconds."""
        self.request, self.limit, self.suits = request, limit, suits
        self.cluster, self.profile = request.cluster, request.profile
        self.choices: dict[Plan, Choice | None] = {}
        self.fastest = math.inf

    def best(self) -> Choice | None:
        """Returns the best plan with groups; None if none fits."""
        with Progress("planning groups of devices") as bar:
            self._bar = bar
            for plan in self._candidates():
                self._simulate(plan)
            done: set[Plan] = set()
            while starts := [choice.plan for choice in self._ranked()[:_STARTS] if choice.plan not in done]:
                done.add(starts[0])
                for plan in self._neighbours(starts[0]):
                    self._simulate(plan)
            for choice in self._ranked()[:1]:
                for schedule in self._schedules:
                    for plan in self._legal(choice.plan, [{"schedule": schedule}]):
                        self._simulate(plan)
        # The search has used one of DAPPLE's policies in place of others.
        ranked = [choice for choice in self._ranked() if choice.plan.policy in self.request.schedules]
        if not ranked:
            return None
        best = ranked[0]
        # In a step, the devices' memory doesn't limit the micro-batches in flight where operators are placed.
        if best.costs.warm_up != best.plan.warm_up_counts():
            held = dataclasses.replace(best.plan, warm_up=best.costs.warm_up)
            best = Choice.of(tried(self.request.costs(held))) or best
        return best

    @property
    def _schedules(self) -> list[Policy]:
        """The policies that are tried for the best plan: those that leave backwards whole, if there are any.

        What of a backward on a group makes the gradient of its input, and when that is ready, was never searched.
        """
        straight = self.request.straight
        return [policy for policy in straight if policy.splits is False] or straight

    def _candidates(self) -> list[Plan]:
        request = self.request
        placements = Placements(self.cluster)
        links = links_of(placements, ("flat",), self.profile.parameter_bytes)
        groups = self.profile.groups
        assert groups is not None
        ends = sorted({*groups.ends, *coarsened(self.profile, _POSITIONS)})
        estimated: list[tuple[float, Plan]] = []
        for mode in request.modes:
            search = Search(self.profile, placements, links, ends, recompute=mode, placed=request.placed)
            for count in request.micro_batches:
                self._bar.step(f"{mode}, {count} micro-batches")
                for item in search.run(count, request.batch, bound=self.limit):
                    plan = self._plan(placements, item, count, mode) if item.groups else None
                    if plan is not None and self.suits(plan):
                        estimated.append((item.latency, plan))
            if request.recompute is None and not search.memory_bound:
                break
        estimated.sort(key=lambda pair: pair[0])
        return [plan for _, plan in estimated[:_PLANS]]

    def _plan(self, placements: Placements, item: Candidate, micro_batches: int, recompute: str) -> Plan | None:
        cuts = [self.profile.layers[bound - 1].name for bound in item.bounds[:-1]]
        devices = placements.devices(placements.steps[step] for step in item.steps)
        groups = [self._grouped(own, size) for own, size in zip(devices, item.groups, strict=True)]
        if not all(groups):
            return None
        first = [[group[0] for group in own] for own in groups if own]
        plan = self.request.plan(cuts, first, micro_batches, recompute)
        return dataclasses.replace(plan, operator_devices=tuple(own for own in groups if own), shares=None)

    def _grouped(self, devices: Sequence[int], size: int) -> Groups | None:
        """Returns devices in groups of like ones of a server; None if they can't be divided so."""
        groups: list[tuple[int, ...]] = []
        for alike in self.cluster.device_groups:
            own = [device for device in alike if device in devices]
            if len(own) % size:
                return None
            groups += [tuple(own[start : start + size]) for start in range(0, len(own), size)]
        return tuple(groups)

    # ---- neighbours

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        for move in (move_cuts, change_micro_batches):
            yield from self._legal(plan, move(plan, self.request))
        yield from self._legal(plan, self._regrouped(plan))

    def _legal(self, plan: Plan, changes: Iterable[Mapping[str, Any]]) -> Iterator[Plan]:
        for change in changes:
            try:
                other = dataclasses.replace(plan, **change)
            except PlanError:
                continue  # Moves needn't know all that makes a plan legal.
            if other.spread_stages and self.suits(other):
                yield other

    def _regrouped(self, plan: Plan) -> Iterator[dict[str, Any]]:
        """Divides a stage's devices otherwise, or gives some of them to a neighbour."""
        groups = self.profile.groups
        assert groups is not None and plan.operator_devices is not None
        sizes = (1, *groups.sizes)
        working = [list(devices) for devices in plan.working_devices]
        current = [len(own[0]) for own in plan.operator_devices]
        choices: list[tuple[list[list[int]], dict[int, int]]] = []
        for stage in range(plan.num_stages):
            choices += [(working, {stage: size}) for size in sizes if size != current[stage]]
        for first, second in itertools.pairwise(range(plan.num_stages)):
            for giver, taker in ((first, second), (second, first)):
                for count in sizes:
                    if count >= len(working[giver]):
                        continue
                    moving = working[giver][-count:] if giver < taker else working[giver][:count]
                    moved = [list(own) for own in working]
                    moved[giver] = [device for device in working[giver] if device not in moving]
                    moved[taker] = sorted([*working[taker], *moving])
                    choices += [(moved, {giver: one, taker: other}) for one, other in itertools.product(sizes, sizes)]
        for devices, changed in choices:
            own = [self._grouped(members, changed.get(stage, current[stage])) for stage, members in enumerate(devices)]
            if all(own):
                divided = tuple(each for each in own if each)
                yield {
                    "devices": tuple(tuple(group[0] for group in each) for each in divided),
                    "operator_devices": divided,
                }

    # ---- simulation

    def _simulate(self, plan: Plan) -> None:
        if plan in self.choices:
            return
        self._bar.step(f"{len(self.choices)} plans simulated")
        try:
            choice = Choice.of(tried(self.request.costs(plan), min(self.fastest, self.limit) * _NEAR))
        except PlanError:  # It doesn't fit.
            choice = None
        self.choices[plan] = choice
        if choice is not None:
            self.fastest = min(self.fastest, choice.latency)

    def _ranked(self) -> list[Choice]:
        return sorted((choice for choice in self.choices.values() if choice), key=lambda choice: choice.latency)
