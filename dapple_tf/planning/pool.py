"""The pool of the planner's search: simulated plans with a memo, a budget, a ranking and one rule for ties.

Generators of plans (`dapple_tf.planning.moves`) propose, the pool simulates and remembers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.moves import least_seconds, neighbours
from dapple_tf.planning.plan_request import AUTO, FOUND_LAST, PlanRequest, has_chunks
from dapple_tf.planning.reductions import cut_trials
from dapple_tf.planning.relays import RelayGuess, other_way
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Trial, tried

NEAR = 1.2
"""Plans that are certainly slower than the best by this factor aren't simulated to the end; others may be varied."""
TIE = 1e-3
"""Relative difference of latencies below which they count as equal."""
_UNNAMED = tuple(
    field.name for field in dataclasses.fields(Plan) if field.name not in ("schedule", "warm_up", "report")
)
"""What a plan has besides its schedule."""
_RELAYED = 12
"""Number of best plans that are simulated with relays and without."""
_LEAST_TAIL = 0.004
"""The least part of a step after its last task for which backwards are cut."""
_REFUSED = 20
"""Work of a plan that doesn't fit in memory."""
_BOUND = 3
"""Work of a plan's costs and bound for each replica of a stage, relative to simulating a task."""
_SORTED_TASKS = 0.5
"""Work of ordering a task by list scheduling, relative to simulating it."""


@dataclass(frozen=True)
class Choice:
    """A simulated plan. The simulation isn't kept: tens of thousands of spans for each plan slow Python down.

    Attributes:
        plan: the plan.
        latency: simulated seconds of its step.
        costs: the costs it was simulated with.
        tail: seconds of its step after its last task: the most that earlier all-reduces can gain.
    """

    plan: Plan
    latency: float
    costs: CostModel
    tail: float = 0.0

    @classmethod
    def of(cls, trial: Trial) -> Choice | None:
        """Returns the choice of a simulated plan; None if it wasn't simulated to the end."""
        if trial.simulation is None:
            return None
        costs, seconds = trial.simulation.costs, trial.simulation.latency
        return cls(costs.plan, seconds, costs, trial.tail)

    def gains_from_cuts(self, fastest: float) -> bool:
        """Returns whether cutting its last backwards may make it faster than the fastest, by enough to matter."""
        return self.latency - self.tail < fastest and self.tail > _LEAST_TAIL * self.latency

    def with_warm_up(self) -> Choice:
        """Returns the choice with K in its plan, if devices' memory is known: a run keeps to K, or refuses it.

        K isn't written where one micro-batch is in flight, where the policy keeps all of them, and where K doesn't give
        the same order: some policies limit the stages of a device together.
        """
        costs = self.costs
        if costs.holds is None or max(costs.warm_up) == 1 or self.plan.policy.needs_all:
            return self
        plan = dataclasses.replace(self.plan, warm_up=costs.warm_up)
        written = CostModel(plan, costs.profile, costs.cluster)
        return dataclasses.replace(self, plan=plan, costs=written) if written.schedule == costs.schedule else self

    @property
    def memory(self) -> float:
        """Bytes that the fullest device needs with the most micro-batches in flight that the schedule allows."""
        return max(self.costs.needed_bytes(stage, count) for stage, count in enumerate(self.costs.warm_up))


def best_of(ranked: Sequence[Choice], limit: float | None = None) -> Choice | None:
    """Returns the fastest plan; on a tie one of DAPPLE's, then that of the fewest stages, micro-batches and bytes.

    Args:
        ranked: plans, the fastest first.
        limit: the seconds up to which plans tie with the first.
    """
    limit = ranked[0].latency * (1 + TIE) if limit is None and ranked else limit

    def complexity(choice: Choice) -> tuple[int, int, int, float]:
        plan = choice.plan
        orders = (not plan.policy.planning.formula) + (plan.reverse_first_k > 0) + (plan.carried_updates > 0)
        return orders, plan.num_stages, plan.micro_batches, choice.memory

    return min((choice for choice in ranked if choice.latency <= (limit or 0)), key=complexity, default=None)


def simplest(ranked: Sequence[Choice], least_gain: float) -> list[Choice]:
    """Returns the plans of the simplest kind that no other plan beats by enough, the fastest first.

    From simple to complex: one device, data parallelism, pipelines; fewer stages first, then fewer devices.

    Args:
        ranked: plans, the fastest first.
        least_gain: the fraction of its step's time that a plan must gain over a simpler one.
    """

    def kind(choice: Choice) -> tuple[int, int]:
        plan = choice.plan
        return plan.num_stages, len({device for stage in plan.devices for device in stage})

    near = [choice for choice in ranked if choice.latency <= ranked[0].latency * (1 + least_gain)]
    least = min(map(kind, near))
    return [choice for choice in near if kind(choice) == least]


class PlanPool:
    """The simulated plans of one search.

    Attributes:
        request: the request.
        choices: plan, without what the planner finds last -> its simulation, with the best cuts and relays; None for a
            plan that doesn't fit in memory, or is certainly too slow.
        work: number of tasks and transfers simulated so far.
        allowed: the work after which nothing is simulated any more that needn't be.
        fastest: seconds of the fastest plan, of those that `ranked` has.
    """

    def __init__(self, request: PlanRequest, allowed: float, step: Callable[[str], None]) -> None:
        """Starts with nothing.

        Args:
            request: the request.
            allowed: the work allowed.
            step: receives the progress.
        """
        self.request, self.allowed, self._step = request, allowed, step
        self.relayed = RelayGuess(request)
        self.choices: dict[object, Choice | None] = {}
        self.work, self.fastest = 0.0, math.inf
        self._asked_only, self._entered = False, dict[Plan, Choice]()

    # ---- ranking

    def restrict(self, first: Choice) -> None:
        """Ranks from now on only a plan, and others as they are asked for: no stand-ins for policies and k."""
        self._asked_only, self._entered, self.fastest = True, {}, math.inf
        self._enter(first)

    def ranked(self) -> list[Choice]:
        """Returns the simulated plans, the fastest first."""
        return sorted(self._entered.values(), key=lambda choice: choice.latency)

    def leaders(self, count: int) -> list[Choice]:
        """Returns the best plans near the first; one for each combination of devices, policy and micro-batches."""
        ranked = self.ranked()
        varied: dict[tuple[object, ...], Choice] = {}
        for choice in ranked:
            if choice.latency > NEAR * ranked[0].latency or len(varied) == count:
                break
            varied.setdefault((choice.plan.devices, choice.plan.schedule, choice.plan.micro_batches), choice)
        return list(varied.values())

    # ---- simulation

    def all(self, plans: Iterable[Plan]) -> list[Choice]:
        """Simulates plans; returns the choices that fit and may be fast."""
        return [choice for plan in plans if (choice := self.simulate(plan)) is not None]

    def simulate(self, plan: Plan, *, certainly: bool = False, share: float = 1.0) -> Choice | None:
        """Returns the simulated plan; None if it doesn't fit in memory, or isn't worth simulating.

        It isn't when this share of the work is done, or when it can't be among the best.

        Args:
            plan: the plan; what the planner finds last is found for it.
            certainly: simulates it in any case, and to the end.
            share: the share of the work allowed.
        """
        request, formula = self.request, plan.policy.planning.formula
        if plan.backward_cuts:
            plan = dataclasses.replace(plan, backward_cuts=())
        plan = self.relayed(plan)
        if plan.num_stages == 1 and formula and not self._asked_only:
            plan = dataclasses.replace(plan, schedule=request.searched[0])
        if plan in self.choices and (self.choices[plan] is not None or not certainly):
            return self._enter(self.choices[plan])
        if self.work > share * self.allowed and self.fastest < math.inf and not certainly:
            return None
        costs, limit = request.costs(plan), math.inf if certainly else self.fastest * NEAR
        choice: Choice | None = None
        key: object = plan
        try:
            if formula:  # Another of DAPPLE's policies with the same K is the same schedule.
                key = (costs.warm_up, *(getattr(plan, name) for name in _UNNAMED))
            known = self.choices.get(key)
            if known is not None:
                follows = {name: known.plan.options[name] for name in FOUND_LAST}
                choice = dataclasses.replace(known, plan=plan.with_options(**follows))
            elif key in self.choices and not certainly:
                pass  # It doesn't fit, or is too slow.
            elif self._may_be_fast(costs, certainly=certainly or share > 1):
                choice = self._simulated(costs, limit)
        except (PlanError, ScheduleError):
            self.work += _REFUSED
        self.choices[key] = self.choices[plan] = choice
        self._step(f"{len(self.choices)} plans simulated")
        return self._enter(choice)

    def _enter(self, choice: Choice | None) -> Choice | None:
        """Ranks a choice, if the request asks for such plans or stand-ins are wanted."""
        if choice is not None:
            request, plan = self.request, choice.plan
            asked = plan.policy in request.schedules and (request.first_k in (0, AUTO) or plan.reverse_first_k > 0)
            if asked or not self._asked_only:
                self._entered[plan] = choice
                self.fastest = min(self.fastest, choice.latency)
        return choice

    def try_other_relays(self) -> None:
        """Simulates the best plans with relays where they have none, and without where they have some."""
        for choice in self.ranked()[:_RELAYED]:
            plan = other_way(choice.plan, self.request)
            if plan is None:
                continue
            try:
                trial = tried(self.request.costs(plan), choice.latency)
            except PlanError:
                continue  # What waits on its way needs memory.
            other = Choice.of(trial)
            if other is not None and other.latency < choice.latency and self._fits(trial):
                self.choices[other.plan] = self._enter(other)

    def ordering(self, plan: Plan) -> float:
        """Returns the work of ordering a plan's tasks."""
        planning = plan.policy.planning
        runs = planning.list_runs + planning.list_runs_per_stage * plan.num_stages
        return _SORTED_TASKS * 3 * plan.num_stages * plan.micro_batches * runs

    def _may_be_fast(self, costs: CostModel, *, certainly: bool) -> bool:
        """Returns whether some order may make a plan the fastest; DAPPLE's orders only have bounds of their own."""
        if certainly or _within_k(costs.plan):
            return True
        self.work += _BOUND * costs.plan.num_stages * max(costs.plan.replicas)
        return least_seconds(costs) < self.fastest

    def _simulated(self, costs: CostModel, limit: float) -> Choice | None:
        self.work += self.ordering(costs.plan)
        trial = tried(costs, limit)
        self.work += trial.work
        choice = Choice.of(trial) if self._fits(trial) else None
        if choice is None or not self.request.allows("pieces"):
            return choice
        # With a single stage, cuts gain wherever reductions take time.
        alone = costs.plan.num_stages == 1 and _within_k(costs.plan)
        return self._cut(choice, trial) if alone or choice.gains_from_cuts(self.fastest) else choice

    def _cut(self, choice: Choice, trial: Trial) -> Choice:
        """Returns the choice with its last backwards cut, so that all-reduces run during them, as far as that gains."""
        best = choice
        for other in cut_trials(choice.costs, trial):
            self.work += other.work
            cut = Choice.of(other)
            if cut is not None and cut.latency < best.latency and self._fits(other):
                best = cut
        return best

    def _fits(self, trial: Trial) -> bool:
        """Returns whether a step fits in memory. Adding that up takes long: K says it where stages are alone.

        Slow steps aren't asked, since they are never chosen.
        """
        step = trial.simulation
        if step is None:
            return False
        return _within_k(step.costs.plan) or step.latency > NEAR * self.fastest or step.fits

    # ---- search

    def climb(self, starts: Callable[[], Sequence[Choice]], share: float = 1.0, *, eager: bool = False) -> None:
        """Simulates the neighbours of the best plans, and of the best that come of it, while work is left.

        Args:
            starts: gives the plans to start from, the best first; asked again after each.
            share: the share of the work after which it ends.
            eager: leaves a plan for the first neighbour that is faster.
        """
        begun: set[Plan] = set()
        while self.work < share * self.allowed:
            start = next((choice for choice in starts() if choice.plan not in begun), None)
            if start is None:
                return
            begun.add(start.plan)
            for plan in neighbours(start.plan, self.request):
                if self.work >= share * self.allowed:
                    return
                better = self.simulate(plan, share=share)
                if eager and better is not None and better.latency < start.latency * (1 - TIE):
                    break


def _within_k(plan: Plan) -> bool:
    """Returns whether K of its stages says all about a plan's memory, and bounds of DAPPLE's orders about its time."""
    return plan.policy.planning.formula and not has_chunks(plan)
