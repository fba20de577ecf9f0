"""Searches by simulation for the best out-of-order plan near DAPPLE's plans that the planner found."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.choice import Choice, simplest
from dapple_tf.planning.early_reductions import cut_trials
from dapple_tf.planning.features import has_chunks
from dapple_tf.planning.latency import stage_times
from dapple_tf.planning.local_search import neighbours
from dapple_tf.planning.out_of_order_plans import (
    even_plans,
    largest_reverse_first_k,
    least_seconds,
    more_stages,
    same_stages,
    stages_per_device,
    with_chunks,
    with_task_seconds,
)
from dapple_tf.planning.plan_request import AUTO, FOUND_LAST, PlanRequest
from dapple_tf.planning.recompute_modes import leanest
from dapple_tf.planning.relays import RelayGuess, better_ways
from dapple_tf.schedules.out_of_order import best_reverse_first_k
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.schedules.policy import Placement, Policy
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.simulation.simulator import Trial, tried

_CHUNKS = (2, 4, 8, 16)
"""Numbers of chunks of a replicated stage to try, as long as more are better."""
_PARALLEL_CHUNKS = 8
"""Number of chunks that data parallelism is tried with first."""
_PROBED = 8
"""Number of DAPPLE's plans of which a few variants are tried, beginning with the fastest apart from bubbles."""
_VARIED = 2
"""Number of DAPPLE's plans of which all variants are tried, if work is left."""
_BEST = 4
"""Number of leading plans explored further: more variants, and their neighbours."""
_LIKELY = 6
"""Number of policies tried for the same stages where all are allowed."""
_SORTING = 0.2
"""Policies whose list scheduling takes a larger share of the work are skipped, unless they are likely to gain most."""
_BOUND = 3
"""Work of a plan's costs and bound for each replica of a stage, relative to simulating a task."""
_FEW = 4
"""More stages on each device than this are tried as long as each one more makes a policy's step shorter."""
_CLIMBING = 0.7
"""Share of the work after which chunks are tried in the best plans, whose many stages take long to simulate."""
_FOR_K = 0.25
"""Additional share of the work that the search for k may take."""
_HOPEFUL = 1.1
"""Plans with several stages on a device aren't simulated if their estimate exceeds the best time by this factor."""
_NEAR = 1.2
"""Plans that are slower than the best by this factor aren't varied any more."""
_TIE = 1e-3
"""Relative difference of latencies below which they count as equal."""
_NOT_STRAIGHT = {policy for policy in BUILT_IN if Placement.STRAIGHT not in policy.planning.placements}
"""Policies that aren't tried with one stage on each device."""
_SORTED_TASKS = 0.5
"""Work of ordering a task by list scheduling, relative to simulating it."""


class OutOfOrderSearch:
    """One search.

    Attributes:
        choices: plan, without cuts of its backwards -> its simulation, with the best cuts; None for a plan that doesn't
            fit in memory, or is certainly too slow.
        origin: the plan of DAPPLE's from which each was derived.
        bases: DAPPLE's plans that were simulated themselves.
    """

    def __init__(self, request: PlanRequest, allowed: float, step: Callable[[str], None]) -> None:
        """Starts with nothing.

        Args:
            request: the request.
            allowed: approximate number of tasks and transfers to simulate.
            step: receives the progress.
        """
        self.request, self.handed_on = request, RelayGuess(request)
        self.allowed, self.step = allowed, step
        self.work, self.fastest = 0.0, math.inf
        self.estimates: dict[Plan, float] = {}
        self.choices: dict[Plan, Choice | None] = {}
        self.origin: dict[Plan, Plan] = {}
        self.bases: list[Choice] = []

    def run(self, bases: Sequence[Plan]) -> Choice | None:
        """Returns the best plan that the request allows and that follows from a base; None if none fits.

        Args:
            bases: plans of DAPPLE's, the best first.
        """
        self._baseline(bases)
        mode = leanest(stage.recompute for stage in bases[0].stages)
        starts = dict.fromkeys([*bases, *even_plans(self.request, mode)])
        # DAPPLE's best plan first, to know what there is to gain.
        ranked = sorted(starts, key=lambda base: (base != bases[0], self._estimate(base)))[:_PROBED]
        probed = [(self._probe(base), index) for index, base in enumerate(ranked)]
        for _, index in sorted(entry for entry in probed if entry[0] < math.inf)[:_VARIED]:
            self._vary(ranked[index])
        self._climb(_CLIMBING)
        self._combine()
        self._climb()
        self._order_bw_of_first_stages()
        self._relay_best()
        return self.best()

    def _relay_best(self) -> None:
        """Tries the best plans with relays where they have none, and without where they have some."""
        for choice, other, fits in better_ways(self.ranked(), self.request):
            if fits:
                self.choices[other.plan], self.origin[other.plan] = other, self.origin[choice.plan]
                self.fastest = min(self.fastest, other.latency)

    def _cut(self, choice: Choice, trial: Trial) -> Choice:
        """Returns the choice with its last backwards cut, so that all-reduces run during them, as far as that gains."""
        best = choice
        for other in cut_trials(choice.costs, trial):
            self.work += other.work
            cut = Choice.of(other)
            if (
                cut is not None
                and cut.latency < best.latency
                and other.simulation is not None
                and other.simulation.fits
            ):
                best = cut
        return best

    def dapple(self) -> Choice | None:
        """Returns the best of DAPPLE's own plans, without chunks; None if no base fits."""
        ranked = sorted(self.bases, key=lambda choice: choice.latency)
        return simplest(ranked, self.request.least_gain)[0] if ranked else None

    def best(self) -> Choice | None:
        """Returns the fastest; the simplest on a tie, and one of DAPPLE's if others gain too little."""
        ranked = self.ranked()
        if not ranked:
            return None
        limit = ranked[0].latency * (1 + _TIE)
        dapple = self.dapple()
        if dapple is not None and dapple in ranked:
            if dapple.latency <= ranked[0].latency * (1 + self.request.least_gain):
                return dapple
            limit = min(limit, dapple.latency)
        close = [choice for choice in ranked if choice.latency <= limit]
        return min(close, key=_complexity)

    def ranked(self) -> list[Choice]:
        """Returns the simulated plans that the request allows, the fastest first."""
        choices = [
            choice for choice in self.choices.values() if choice and choice.plan.policy in self.request.schedules
        ]
        return sorted(choices, key=lambda choice: choice.latency)

    # ---- candidates

    def _baseline(self, bases: Sequence[Plan]) -> None:
        """Simulates DAPPLE's best plan."""
        choice = self._try(bases[0], bases[0], certainly=True)
        self.bases += [choice] if choice is not None else []
        if self.request.first_k not in (0, AUTO):
            self.choices = dict.fromkeys(self.choices)  # the request asks for k
            self.fastest = math.inf

    def _probe(self, base: Plan) -> float:
        """Returns the least latency of a few plans that follow from one of DAPPLE's; infinite if none is known."""
        choices = self._all(same_stages(base, self.request, self.request.straight[:1]), base)
        for policy, count in itertools.islice(stages_per_device(base, self.request), 1):
            choices += self._all(self._worth(more_stages(base, self.request, policy, count)), base)
        if self.request.chunks and (base.num_stages == 1 or not choices) and self._may_gain_from_chunks(choices):
            choices += self._all(with_chunks(base, self.request, _PARALLEL_CHUNKS), base)
        return min((choice.latency for choice in choices if choice is not None), default=math.inf)

    def _worth(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """Yields the plans whose estimates may be among the best."""
        return (plan for plan in plans if self._estimate(plan) <= self.fastest * _HOPEFUL)

    def _vary(self, base: Plan) -> None:
        """Tries all plans that follow directly from a plan."""
        least: dict[Policy, float] = {}
        for policy, count in stages_per_device(base, self.request):
            if self.work <= self.allowed and (count <= _FEW or policy in least):
                choices = self._all(self._worth(more_stages(base, self.request, policy, count)), base)
                seconds = min((choice.latency for choice in choices if choice is not None), default=math.inf)
                if seconds < least.get(policy, math.inf):
                    least[policy] = seconds
                elif count >= _FEW:
                    least.pop(policy, None)
        policies = self.request.straight
        if set(BUILT_IN) - set(policies) <= _NOT_STRAIGHT:
            policies = policies[:_LIKELY]  # the others are hardly ever better
        for plan in same_stages(base, self.request, policies):
            if self._ordering(plan) <= _SORTING * self.allowed:
                self._all([plan], base)

    def _combine(self) -> None:
        """Tries chunks in the best plans without them (section 6 of Out-Of-Order BackProp)."""
        if self.request.chunks:
            for place, choice in enumerate(self._near()):
                # Where weight gradients fill bubbles, smaller ones fill them better.
                if not place or self._may_gain_from_chunks([choice]):
                    self._more_chunks(choice.plan, self.origin[choice.plan], choice.latency)

    def _may_gain_from_chunks(self, choices: Sequence[Choice | None]) -> bool:
        """Returns whether chunks of these plans may be the fastest: they can only save what follows the last task."""
        if self.request.first_k not in (0, AUTO):
            return True  # the request asks for chunks
        simulated = [choice for choice in choices if choice is not None]
        return not simulated or any(choice.gains_from_cuts(self.fastest) for choice in simulated)

    def _more_chunks(self, plan: Plan, origin: Plan, seconds: float) -> None:
        """Doubles the number of chunks of a plan that takes ``seconds``, as long as that makes its step shorter."""
        for chunks in _CHUNKS:
            choices = self._all(with_chunks(plan, self.request, chunks), origin)
            least = min((choice.latency for choice in choices if choice is not None), default=math.inf)
            if least > seconds * (1 - _TIE) or self.work > self.allowed:
                return
            seconds = least

    def _climb(self, share: float = 1.0) -> None:
        """Moves cuts and devices of the best plans, while less than this share of the work is done."""
        allowed = share * self.allowed
        tried: set[Plan] = set()
        while self.work < allowed:
            start = next((choice for choice in self._near() if choice.plan not in tried), None)
            if start is None:
                return
            tried.add(start.plan)
            bare = start.plan.with_options(task_seconds=None)
            for plan in neighbours(bare, self.request):
                if self.work >= allowed:
                    return
                better = self._try(with_task_seconds(plan, self.request), self.origin[start.plan])
                if better is not None and better.latency < start.latency * (1 - _TIE):
                    break  # and go on from there

    def _order_bw_of_first_stages(self) -> None:
        """Tries reverse first-k, with carried updates, in the best plans that reduce gradients chunk by chunk."""
        if not self.request.first_k:
            return
        cut = [choice for choice in self.ranked() if has_chunks(choice.plan) and _splits(choice.plan)]
        # What comes after the last task may be hidden, and the better the more chunks there are.
        cut.sort(key=lambda choice: (round((choice.latency - choice.tail) / self.fastest, 3), -choice.plan.num_stages))
        parallel = [choice for choice in cut if len(set(choice.plan.devices)) == 1]
        near = [choice for choice in cut if choice.latency <= _NEAR * self.fastest]
        for choice in dict.fromkeys([*near[:1], *parallel[:1], *near[1:2]]):
            if least_seconds(choice.costs) >= self.fastest * (1 - _TIE):
                continue  # in any order
            # A stage whose weights others share can't be updated before these have their gradients.
            own = all(len(reduction.stages) == 1 for reduction in choice.costs.reductions)
            self._search_k(choice.plan, self.origin[choice.plan], own and self.request.allows("carried_updates"))

    def _search_k(self, plan: Plan, origin: Plan, carries: bool) -> None:
        """Searches k by simulated throughput as the paper does (section 5.1), and likewise the updates to carry over.

        The gradients of the first k stages are reduced last, stage 0's first; the next step's forward needs those at
        the end of this order last.
        """

        def throughput(k: int, carried: int) -> float:
            order = "first_layers" if carried else "completion"
            trial = dataclasses.replace(plan, reverse_first_k=k, carried_updates=carried, reduction_order=order)
            choice = self._try(trial, origin, share=1 + _FOR_K)
            return 0.0 if choice is None or not choice.latency else plan.global_batch_size / choice.latency

        def best_throughput(k: int) -> float:
            return max(throughput(k, carried) for carried in ({0, (k + 1) // 2, k} if carries else {0}))

        k = plan.reverse_first_k
        if self.request.first_k == AUTO:
            most = largest_reverse_first_k(plan, self.request.profile, self.request.cluster)
            k = best_reverse_first_k(min(plan.num_stages, most + 1), best_throughput)
        if carries:
            best_reverse_first_k(plan.num_stages + 1, lambda carried: throughput(k, carried))

    def _near(self) -> list[Choice]:
        """Returns the best plans not much slower than the first; one for each combination of devices and policy."""
        ranked = self.ranked()
        near: dict[tuple[object, ...], Choice] = {}
        for choice in ranked:
            if choice.latency <= _NEAR * ranked[0].latency:
                near.setdefault((choice.plan.devices, choice.plan.schedule, choice.plan.micro_batches), choice)
        return [*near.values()][:_BEST]

    # ---- simulation

    def _all(self, plans: Iterable[Plan], origin: Plan) -> list[Choice | None]:
        return [self._try(plan, origin) for plan in plans]

    def _try(self, plan: Plan, origin: Plan, *, certainly: bool = False, share: float = 1.0) -> Choice | None:
        """Returns the simulated plan; None if it doesn't fit in memory, or isn't worth simulating.

        It isn't when this share of the work is done, or when no order could make it faster than the fastest.
        """
        plan = self.handed_on(plan.with_options(**FOUND_LAST))
        if plan in self.choices:
            return self.choices[plan]
        if self.work > share * self.allowed and self.fastest < math.inf and not certainly:
            return None
        choice: Choice | None = None
        costs = self.request.costs(plan)
        self.work += _BOUND * plan.num_stages * max(plan.replicas)
        if certainly or share > 1 or least_seconds(costs) < self.fastest:
            self.work += self._ordering(plan)
            try:
                trial = tried(costs, math.inf if certainly else self.fastest * _NEAR)
            except (PlanError, ScheduleError):
                self.work += 20
            else:
                self.work += trial.work
                # Adding up memory takes long.
                simulation = trial.simulation
                if simulation is not None and (simulation.latency > _NEAR * self.fastest or simulation.fits):
                    choice = Choice.of(trial)
        if choice is not None and choice.gains_from_cuts(self.fastest) and self.request.allows("pieces"):
            choice = self._cut(choice, trial)
        self.choices[plan], self.origin[plan] = choice, origin
        if choice is not None:
            self.origin[choice.plan] = origin
            if plan.policy in self.request.schedules:
                self.fastest = min(self.fastest, choice.latency)
        self.step(f"{len(self.choices)} out-of-order plans simulated")
        return choice

    def _ordering(self, plan: Plan) -> float:
        """Returns the work of ordering a plan's tasks."""
        planning = plan.policy.planning
        runs = planning.list_runs + planning.list_runs_per_stage * plan.num_stages
        return _SORTED_TASKS * 3 * plan.num_stages * plan.micro_batches * runs

    def _estimate(self, plan: Plan) -> float:
        """Estimates the seconds of a step with bubbles of the first and last micro-batch alone.

        Formula 1 of DAPPLE (section 4.1) for orders in which Bw fill bubbles.
        """
        if plan not in self.estimates:
            costs = self.request.costs(self.handed_on(plan))
            times = stage_times(costs)
            per_device = plan.num_stages / len(set(plan.devices))
            self.estimates[plan] = (
                least_seconds(costs)
                + sum(time.forward for time in times[::2]) / per_device
                + sum(time.forward + time.backward for time in times[1::2])
                + max(time.all_reduce for time in times)
            )
        return self.estimates[plan]


def _splits(plan: Plan) -> bool:
    """Returns whether the backwards of a plan's first stages are known to be splittable."""
    return plan.policy.reverses and plan.policy.splits is not None


def _complexity(choice: Choice) -> tuple[int, int, int, float]:
    """Ranks plans by simplicity: DAPPLE's first, then by the fewest stages, micro-batches and bytes."""
    plan = choice.plan
    orders = (not plan.policy.planning.formula) + (plan.reverse_first_k > 0) + (plan.carried_updates > 0)
    return orders, plan.num_stages, plan.micro_batches, choice.memory
