"""Finds the plan: dynamic programming by the paper's formula, then the best candidates by simulation.

The formula (DAPPLE, PPoPP'21, section 4) ignores the schedule's K, memory beyond one micro-batch, and links that
several transfers share. The search therefore returns many candidates, for several numbers of micro-batches and for
recomputation where memory is short; each is simulated under each schedule; and the best are improved by moving cuts and
devices between neighbouring stages as long as that helps.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec

from dapple_tf.common.garbage import without_collection
from dapple_tf.common.progress import Progress
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_report import PlanReport
from dapple_tf.describe.profile import Profile
from dapple_tf.errors import names_checked
from dapple_tf.planning.choice import Choice, simplest
from dapple_tf.planning.early_reductions import competes, cut_trials
from dapple_tf.planning.latency import pipeline_latency, stage_times
from dapple_tf.planning.local_search import neighbours
from dapple_tf.planning.out_of_order_search import OutOfOrderSearch
from dapple_tf.planning.placement import Placements, links_of
from dapple_tf.planning.plan_reasons import Derivation, attempts, report, shortage
from dapple_tf.planning.plan_request import FOUND_LAST, PlanRequest
from dapple_tf.planning.recompute_modes import recomputing_by_stage
from dapple_tf.planning.relays import RelayGuess, better_ways
from dapple_tf.planning.search import Candidate, Search, coarsened
from dapple_tf.planning.stage_cuts import by_time
from dapple_tf.simulation.simulator import Trial, run, tried

_Arguments = ParamSpec("_Arguments")
logger = logging.getLogger(__name__)

_WORK = 30_000
"""Number of tasks and transfers to simulate in one search, for a small cluster."""
_GROUPS = 36
"""Number of places at which the search considers cuts; the local search then moves them layer by layer."""
_NEAR = 1.2
"""Plans that are certainly slower than the best by this factor aren't simulated to the end; others may be varied."""
_COUNTS = 3
"""Number of counts of micro-batches that the search runs with; the others are left to the local search."""
_FEW_DEVICES = 16
"""The most devices for which the search runs with all counts of micro-batches."""
_STRIDE = 4
"""The second best plan of a kind is simulated after at most this many others."""
_ALIKE = 2
"""The most simulated plans with the same replicas and micro-batches; the local search varies their cuts."""
_FEW_PLANS = 300
"""The most candidates for which all are simulated, if work is left."""
_FIRST = 3
"""Number of plans simulated before deciding whether to try recomputation."""
_STARTS = 24
"""Number of best plans whose neighbours are tried, if work is left."""
_HOPELESS = 1.5
"""Plans whose L exceeds the best L by this factor are simulated last."""
_BASES = 10
"""Number of plans from which out-of-order plans are derived."""
_DERIVING = 1.25
"""Work allowed for deriving them, on a small cluster, as a multiple of that for finding the stages."""
_BY_STAGE = 3
"""Number of best plans whose stages get modes of their own, and of times that this is done with what comes of it."""
_TIE = 1e-3
"""Relative difference of latencies below which they count as equal."""

_RIVAL = 2.0
"""Simple plans are tried if their expected step is at most this many times the best plan's."""


def _arguments_of(
    request: Callable[_Arguments, PlanRequest],
) -> Callable[[Callable[..., Plan]], Callable[_Arguments, Plan]]:
    """Returns a decorator that gives a function a request's arguments, for type checkers and ``help``."""

    def decorated(function: Callable[..., Plan]) -> Callable[_Arguments, Plan]:
        function.__signature__ = inspect.signature(request).replace(return_annotation=Plan)  # type: ignore[attr-defined]
        return function

    return decorated


@names_checked()
@_arguments_of(PlanRequest)
def plan(profile: Profile, cluster: Cluster, global_batch_size: int, **options: Any) -> Plan:
    """Finds stages, replicas, placement, micro-batches, schedule and recomputation together.

        best = plan(profile, cluster, 64)

    Args:
        profile: the costs of the model's layers.
        cluster: the devices and links.
        global_batch_size: samples in one step.
        **options: what the plan may be chosen from, see `PlanRequest`.

    Returns:
        The plan; ``print`` it for a table with the reasons, which are also in ``plan.report``.

    Raises:
        PlanError: nothing fits the devices' memory; the text says what is short by how much, and what would fit.
        TypeError: an argument has another class, or is unknown.
    """
    return find(PlanRequest(profile, cluster, global_batch_size, **options))


def plan_anew(known: Plan, profile: Profile, cluster: Cluster, only: Iterable[str] | None = None) -> Plan:
    """Finds a plan for the batch of another one, compiled and with shards as that.

    Args:
        known: the other plan.
        profile: as in `plan`, like the others.
        cluster: likewise.
        only: likewise.

    Raises:
        PlanError: as `plan`.
    """
    same = {name: known.options[name] for name in ("jit_compile", "optimizer_shards", "row_shards")}
    return plan(profile, cluster, known.global_batch_size, only=only, **same)


@without_collection
def find(request: PlanRequest) -> Plan:
    """Finds the plan for a request, as :func:`plan`.

    Raises:
        PlanError: as `plan`.
    """
    return best_plans(request).best


def rivals(request: PlanRequest) -> list[Plan]:
    """Finds the best plans of each kind, of which the fastest can be found by trials on real devices.

    Returns:
        The best plan; data parallelism and one device, unless they are expected to take twice as long. Each once, by
        expected time; none if nothing fits.
    """
    try:
        best, simple = best_plans(request)
    except PlanError:  # Nothing fits.
        return []
    assert best.report is not None
    known = best.report
    timed = {best: known.latency}
    for choice in simple:
        if choice.latency <= _RIVAL * known.latency and choice.plan not in timed:
            reasons = report(
                request,
                run(choice.costs),
                runner_up=(best, known.latency),
                data_parallel=known.data_parallel,
                one_device=known.one_device,
            )
            timed[dataclasses.replace(choice.plan, report=reasons)] = choice.latency
    return sorted(timed, key=lambda plan: timed[plan])


class BestPlans(NamedTuple):
    """The best plans of a request.

    Attributes:
        best: the best one.
        simple: the best of data parallelism and the best on one device, where they fit and the request allows them.
    """

    best: Plan
    simple: list[Choice]


def best_plans(request: PlanRequest) -> BestPlans:
    """Finds the best plan, and the best simple ones.

    Raises:
        PlanError: as `plan`.
    """
    try:
        return _Planner(request).plans()
    except PlanError:
        if request.optimizer_shards is not None:
            raise
    return _Planner(dataclasses.replace(request, optimizer_shards=True)).plans()


class _Found(NamedTuple):
    """A plan that the formula rates highly, with its L.

    Attributes:
        latency: L.
        group: the group of plans that it leads: a search with one count of micro-batches and one recomputation, or
            plans of equal stages.
        micro_batches: M.
        replicas: number of replicas of each stage.
        recompute: the mode.
        make: makes the plan, of which hundreds are never simulated.
    """

    latency: float
    group: tuple[object, ...]
    micro_batches: int
    replicas: tuple[int, ...]
    recompute: str
    make: Callable[[], Plan]


class _Planner:
    """One search."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.handed_on = request, RelayGuess(request)
        self.profile, self.cluster = request.profile, request.cluster
        self.choices: dict[tuple[Any, ...], Choice | None] = {}
        self.even_cuts: dict[int, list[str]] = {}
        self.work = 0.0
        self.fastest = math.inf
        # Time may grow with the cluster: on a quick core 1 s on 16 devices, 5 s on 64, a minute on thousands.
        size = max(1.0, self.cluster.num_devices / 16)
        self.allowed, self.deriving = _WORK * min(30.0, size), _DERIVING * _WORK * min(8.0, size)
        self.bar = Progress("planning")
        # Among schedules whose memory doesn't grow with M, the one with the most micro-batches in flight is hardly
        # ever slower than the others, so that it represents them until the last few plans are compared.
        self.quickest = max(request.searched, key=lambda policy: policy.planning.rank)
        # The one with the fewest.
        self.leanest = min(request.searched, key=lambda policy: (policy.needs_all, policy.planning.rank))

    def plans(self) -> BestPlans:
        started = time.perf_counter()
        candidates = self._candidates()
        self._data_parallel()
        alike: Counter[tuple[object, ...]] = Counter()
        # A simulation takes as many times the work as there are micro-batches: each number of them has its share.
        share = 0.5 * self.allowed / max(1, len({entry.micro_batches for entry in candidates}))
        spent: Counter[int] = Counter()
        for entry in self._interleaved(candidates):
            if self.work > 0.5 * self.allowed:
                break
            key = (entry.replicas, entry.micro_batches, entry.recompute)
            alike[key] += 1
            few = alike[key] <= _ALIKE or len(candidates) <= _FEW_PLANS
            if few and spent[entry.micro_batches] <= share:
                before = self.work
                self._explore(entry.make())
                spent[entry.micro_batches] += round(self.work - before)
        self._one_device()
        best = self._improved()
        if best is None:
            # Stages of equal memory may fit where those that the formula prefers don't.
            for over, costs, _ in attempts(self.request):
                if over <= 0:
                    self._simulate_all(costs.plan)
            best = self._best()
        if best is None:
            raise PlanError(shortage(self.request))
        best = self._simplest()
        derived = self._out_of_order(best) if self._derives() else None
        self.bar.close()
        seconds = time.perf_counter() - started
        logger.info("planned %s in %.2f s, %d plans simulated", self.profile.model, seconds, len(self.choices))
        if derived is not None:
            best = derived.choice
        best = best.with_warm_up()
        return BestPlans(dataclasses.replace(best.plan, report=self._report(best, derived)), self._simple())

    # ---- candidates

    def _candidates(self) -> list[_Found]:
        """Returns plans that the formula rates highly, with their L."""
        request = self.request
        placements = Placements(self.cluster)
        links = links_of(placements, request.reductions, request.profile.parameter_bytes)
        ends = coarsened(self.profile, _GROUPS)
        candidates: list[_Found] = []
        bound = math.inf
        # Whether all-reduces end during backwards shows in simulations only.
        hidden = (False,) if competes(self.cluster, range(self.cluster.num_devices)) else (True, False)
        even: dict[str, list[_Found]] = {}
        for mode, overlap in itertools.product(request.modes, hidden):
            search = Search(
                self.profile,
                placements,
                links,
                ends,
                overlap=overlap,
                recompute=mode,
                shards=request.shards,
            )
            best = self._best()
            if best is not None and best.latency < search.least_seconds(request.batch):
                continue  # not even without bubbles and transfers
            if mode not in even:
                even[mode] = self._even_plans(mode)
            fresh = [*even[mode]]
            for count in self._promising(fresh):
                self.bar.step(f"{mode}, {count} micro-batches")
                bound = min([bound, *(entry.latency for entry in fresh)])
                for item in search.run(count, request.batch, bound=bound):
                    group = (count, mode, overlap, item.in_flight)
                    replicas = tuple(int(links.replicas[step]) for step in item.steps)
                    make = functools.partial(self._plan, placements, item, count, mode)
                    fresh.append(_Found(item.latency, group, count, replicas, mode, make))
            fresh += self._even_plans(mode, relayed=True)  # L doesn't know how long tensors wait: no bound for others
            fresh.sort(key=lambda entry: entry.latency)
            for entry in itertools.islice(self._interleaved(fresh), _FIRST):
                self._explore(entry.make())
            # L ignores the bubbles that too few micro-batches in flight cause.
            best = self._best()
            bound = max(bound, best.latency) if best is not None else math.inf
            candidates += fresh
            if not overlap and not search.memory_bound and request.named_modes is None:
                break
        return sorted(candidates, key=lambda entry: entry.latency)

    def _promising(self, even: Sequence[_Found]) -> list[int]:
        """Returns the counts of micro-batches to search with, best first: by the plans of equal stages that they allow.

        It returns all of them if the search is small, or if no such plan fits. A single micro-batch is always tried, at
        the end, where the others' bound makes it cheap: its stages never overlap, so that equal ones say nothing about
        plans with few replicas for the parameters and many for the computation.
        """
        best: dict[int, float] = {}
        for entry in even:
            count = entry.micro_batches
            if count > 1 or len(self.request.counts) == 1:
                best[count] = min(best.get(count, math.inf), entry.latency)
        ranked = sorted(best, key=lambda count: best[count])
        if len(ranked) < _COUNTS or self.cluster.num_devices <= _FEW_DEVICES:
            rest = set(self.request.counts) - set(ranked)
            return ranked + sorted(rest, reverse=True)
        return ranked[:_COUNTS] + ([1] if 1 in self.request.counts and ranked != [1] else [])

    def _even_plans(self, recompute: str, *, relayed: bool = False) -> list[_Found]:
        """Returns pipelines of equal stages: data parallelism, straight, and those in between."""
        devices = self.cluster.num_devices
        stages = [
            count
            for count in range(1, min(devices, len(self.profile.layers)) + 1)
            if devices % count == 0 and (devices <= 64 or count <= 64)
        ]
        return [
            entry
            for micro_batches in self.request.counts
            for count in stages
            for entry in self._even(count, micro_batches, recompute, relayed)
        ]

    def _even(self, stages: int, micro_batches: int, recompute: str, relayed: bool) -> Iterator[_Found]:
        """Yields a pipeline of stages of the same time and number of replicas, if it fits."""
        replicas = self.cluster.num_devices // stages
        if replicas > self.request.batch // micro_batches:
            return
        groups = [range(i * replicas, (i + 1) * replicas) for i in range(stages)]
        speeds = [sum(self.cluster.devices[device].speed for device in group) for group in groups]
        if stages not in self.even_cuts:  # asked for with each number of micro-batches and each recomputation
            self.even_cuts[stages] = by_time(self.profile, stages, None if self.cluster.alike else speeds)
        plan = self.request.plan(self.even_cuts[stages], groups, micro_batches, recompute)
        if relayed and not (plan := self.handed_on(plan)).relays:
            return
        costs = self.request.costs(plan)
        holds = costs.holds or (micro_batches,)
        if min(holds) > 0:
            latency = pipeline_latency(stage_times(costs), micro_batches).latency
            yield _Found(latency, ("even", recompute), micro_batches, plan.replicas, recompute, lambda: plan)

    def _plan(self, placements: Placements, item: Candidate, micro_batches: int, recompute: str) -> Plan:
        cuts = [self.profile.layers[bound - 1].name for bound in item.bounds[:-1]]
        devices = placements.devices(placements.steps[step] for step in item.steps)
        return self.request.plan(cuts, devices, micro_batches, recompute)

    def _interleaved(self, candidates: Sequence[_Found]) -> Iterator[_Found]:
        """Yields the best plans first, but the best of every kind early."""
        ranks: dict[tuple[object, ...], int] = {}
        keyed = []
        for order, entry in enumerate(candidates):
            rank = ranks[entry.group] = ranks.get(entry.group, -1) + 1
            hopeless = entry.latency > _HOPELESS * candidates[0].latency
            keyed.append((order if hopeless else min(order, rank * _STRIDE) - len(candidates), order, entry))
        yield from (entry for _, _, entry in sorted(keyed, key=lambda item: item[:2]))

    def _data_parallel(self) -> None:
        """Simulates data parallelism on all devices in any case: users want to know."""
        devices = range(self.cluster.num_devices)
        for count in self.request.counts:
            if self.request.batch // count >= self.cluster.num_devices:
                for mode in self.request.named_modes or ("none",):
                    self._simulate(self.request.plan((), [devices], count, mode), certainly=True)

    def _one_device(self) -> None:
        """Simulates one device, the first of the fastest, so that comparisons come from the same simulator."""
        device = max(range(self.cluster.num_devices), key=lambda device: self.cluster.devices[device].speed)
        for count in self.request.counts:
            for mode in self.request.named_modes or ("none",):
                self._simulate(self.request.plan((), [[device]], count, mode), certainly=True)

    # ---- simulation

    def _simulate_all(self, plan: Plan) -> None:
        """Simulates a plan under each schedule, where it fits."""
        for schedule in self.request.searched:
            try:
                other = dataclasses.replace(plan, schedule=schedule)
            except PlanError:
                continue  # A move of the user's own has given it options that this policy doesn't take.
            self._simulate(other)

    def _explore(self, plan: Plan) -> None:
        """Simulates a plan under the schedule that is likely to be best."""
        choice = self._simulate(dataclasses.replace(plan, schedule=self.quickest))
        # Where memory lowers K, neighbouring stages may have equal K, and then wait for each other; P_A's falls by one
        # from stage to stage.
        limited = choice is None or choice.costs.warm_up != choice.plan.warm_up_counts()
        if limited:
            self._simulate(dataclasses.replace(plan, schedule=self.leanest))

    def _simulate(self, plan: Plan, *, certainly: bool = False) -> Choice | None:
        """Returns the simulated plan; None if it doesn't fit in memory, or is hopeless and not wanted ``certainly``."""
        plan = self.handed_on(dataclasses.replace(plan, backward_cuts=()))
        if plan.num_stages == 1 and plan.policy.planning.formula:
            plan = dataclasses.replace(plan, schedule=self.request.searched[0])
        in_key = ("cuts", "devices", "micro_batches", "schedule")
        others = tuple(value for name, value in plan.options.items() if name not in (*in_key, *FOUND_LAST))
        key = (plan.cuts, plan.devices, plan.micro_batches, plan.schedule, *others)
        if key in self.choices and (self.choices[key] is not None or not certainly):
            return self.choices[key]
        costs = self.request.costs(plan)
        choice: Choice | None = None
        try:
            warm_up = costs.warm_up
        except PlanError:
            self.work += 20
        else:
            # Another of DAPPLE's policies with the same K is the same schedule.
            alias = (*key[:3], warm_up if plan.policy.planning.formula else plan.policy, *others)
            known = self.choices.get(alias)
            if known is not None:
                follows = {name: known.plan.options[name] for name in FOUND_LAST}
                same = plan.with_options(**follows)
                choice = dataclasses.replace(known, plan=same)
            elif certainly or alias not in self.choices:
                trial = tried(costs, math.inf if certainly else self.fastest * _NEAR)
                choice = Choice.of(trial)
                self.work += trial.work
                if choice is not None:
                    cuts = plan.num_stages == 1 or choice.gains_from_cuts(self.fastest)
                    if cuts and self.request.allows("pieces"):
                        choice = self._cut(choice, trial)
                    self.fastest = min(self.fastest, choice.latency)
            self.choices.setdefault(alias, choice)
            self.bar.step(f"{len(self.choices)} plans simulated")
        self.choices[key] = choice
        return choice

    def _cut(self, choice: Choice, trial: Trial) -> Choice:
        """Returns the choice with its last backwards cut, so that all-reduces run during them, as far as that gains."""
        best = choice
        for other in cut_trials(choice.costs, trial):
            self.work += other.work
            cut = Choice.of(other)
            if cut is not None and cut.latency < best.latency:
                best = cut
        return best

    def _best(self) -> Choice | None:
        """Returns the fastest; on a tie the simplest, then the one that needs the least memory."""
        ranked = self._ranked()
        if not ranked:
            return None
        close = [choice for choice in ranked if choice.latency <= ranked[0].latency * (1 + _TIE)]
        return min(close, key=lambda choice: (choice.plan.num_stages, choice.plan.micro_batches, choice.memory))

    def _simplest(self) -> Choice:
        """Returns the plan to choose: the best one of the simplest kind over which all others gain too little."""
        best = _best_of(simplest(self._ranked(), self.request.least_gain))
        assert best is not None
        return best

    def _improved(self) -> Choice | None:
        """Searches locally from the best plans: other micro-batches, cuts and devices moved between neighbours."""
        tried: set[int] = set()
        while self.work < self.allowed:
            ranked = self._ranked()
            near = [choice for choice in ranked[:_STARTS] if choice.latency <= _HOPELESS * ranked[0].latency]
            start = next((choice for choice in near if id(choice) not in tried), None)
            if start is None:
                break
            tried.add(id(start))
            for neighbour in neighbours(start.plan, self.request):
                if self.work > self.allowed:
                    break
                self._simulate(neighbour)
        self._recompute_by_stage()
        for choice in self._ranked()[:2]:
            self._simulate_all(choice.plan)
        for choice, better, _ in better_ways(self._ranked(), self.request):
            self.fastest = min(self.fastest, better.latency)
            self.choices |= {key: better for key, known in self.choices.items() if known is choice}
        return self._best()

    def _recompute_by_stage(self) -> None:
        """Lets stages of the best plans keep what their own memory suffices for, even if no work is left."""
        for _ in range(_BY_STAGE):
            fastest = self.fastest
            for start in self._ranked()[:_BY_STAGE]:
                for other in recomputing_by_stage(start.plan, self.request):
                    self._simulate(other)
            if self.fastest == fastest:
                break

    def _derives(self) -> bool:
        """Returns whether to search plans besides DAPPLE's; on one device, without any gain, only if asked."""
        request = self.request
        asked = isinstance(request.first_k, int) and request.first_k > 0
        asked |= not any(policy.planning.formula for policy in request.schedules)
        return request.out_of_order and (asked or self.cluster.num_devices > 1)

    def _out_of_order(self, best: Choice) -> Derivation:
        """Returns the best plan under the policies that were asked for, derived from the best ones of DAPPLE's."""
        search = OutOfOrderSearch(self.request, self.deriving, self.bar.step)
        kinds: dict[tuple[object, ...], Plan] = {}
        for choice in self._ranked():
            kinds.setdefault((choice.plan.replicas, choice.plan.micro_batches), choice.plan)
        different: dict[tuple[int, ...], Plan] = {}
        for plan in kinds.values():
            different.setdefault(plan.replicas, plan)
        parallel = [plan for replicas, plan in different.items() if replicas == (self.cluster.num_devices,)]
        bases = dict.fromkeys([best.plan, *parallel, *list(different.values())[: _BASES // 2], *kinds.values()])
        derived = search.run([*bases][:_BASES])
        if derived is None:
            raise PlanError(
                f"no plan under {', '.join(map(str, self.request.schedules))} fits these devices and their memory, but "
                f"one under {best.plan.schedule} does: allow that as well, such as with schedule='auto'"
            )
        return Derivation(derived, search.origin[derived.plan], search.dapple())

    def _ranked(self) -> list[Choice]:
        """Returns the simulated plans, the fastest first."""
        choices = {id(choice): choice for choice in self.choices.values() if choice is not None}
        return sorted(choices.values(), key=lambda choice: choice.latency)

    def _simple(self) -> list[Choice]:
        """Returns the best plan of data parallelism and of one device, as far as the request allows them."""
        request, simple = self.request, []
        policies = request.for_one_stage
        for count in (self.cluster.num_devices, 1) if policies else ():
            choice = _best_of([choice for choice in self._ranked() if choice.plan.replicas == (count,)])
            if choice is not None and choice.plan.policy not in policies:
                # The search has used one of DAPPLE's policies in place of those.
                plan = dataclasses.replace(choice.plan, schedule=policies[0])
                choice = Choice.of(tried(request.costs(plan)))
            simple += [] if choice is None else [choice.with_warm_up()]
        return simple

    def _report(self, best: Choice, derived: Derivation | None) -> PlanReport:
        ranked = self._ranked()
        replicas = best.plan.replicas if derived is None else derived.origin.replicas
        runner_up = next((choice for choice in ranked if choice.plan.replicas != replicas), None)
        single = next((choice for choice in ranked if choice.plan.replicas == (1,)), None)
        parallel = next((choice for choice in ranked if choice.plan.replicas == (self.cluster.num_devices,)), None)
        return report(
            self.request,
            run(best.costs),
            runner_up=None if runner_up is None else (runner_up.plan, runner_up.latency),
            data_parallel=None if parallel is None else parallel.latency,
            one_device=None if single is None else single.latency,
            derived=derived,
        )


def _best_of(ranked: Sequence[Choice]) -> Choice | None:
    """Returns the fastest of plans of a kind, the fastest of which comes first; on a tie that of the fewest slices."""
    close = [choice for choice in ranked if choice.latency <= ranked[0].latency * (1 + _TIE)]
    return min(close, key=lambda choice: (choice.plan.micro_batches, choice.memory), default=None)
