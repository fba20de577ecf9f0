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
from dapple_tf.planning.moves import (
    even_plans,
    largest_reverse_first_k,
    leanest,
    least_seconds,
    more_stages,
    recomputing_by_stage,
    same_stages,
    stages_per_device,
    with_chunks,
)
from dapple_tf.planning.placement import Placements, links_of
from dapple_tf.planning.plan_reasons import attempts, report, shortage
from dapple_tf.planning.plan_request import AUTO, PlanRequest, has_chunks
from dapple_tf.planning.pool import NEAR, TIE, Choice, PlanPool, best_of, simplest
from dapple_tf.planning.reductions import competes
from dapple_tf.planning.search import Candidate, Search, coarsened, pipeline_latency, stage_times
from dapple_tf.planning.stage_cuts import by_time
from dapple_tf.schedules.out_of_order import best_reverse_first_k
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.schedules.policy import Placement, Policy
from dapple_tf.simulation.simulator import run, tried

_Arguments = ParamSpec("_Arguments")
logger = logging.getLogger(__name__)

_WORK = 30_000
"""Number of tasks and transfers to simulate in one search, for a small cluster."""
_GROUPS = 36
"""Number of places at which the search considers cuts; the local search then moves them layer by layer."""
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
_CHUNKS = (2, 4, 8, 16)
"""Numbers of chunks of a replicated stage to try, as long as more are better."""
_PARALLEL_CHUNKS = 8
"""Number of chunks that data parallelism is tried with first."""
_PROBED = 8
"""Number of DAPPLE's plans of which a few variants are tried, beginning with the fastest apart from bubbles."""
_VARIED = 2
"""Number of DAPPLE's plans of which all variants are tried, if work is left."""
_LEADING = 4
"""Number of leading plans explored further: more variants, and their neighbours."""
_LIKELY = 6
"""Number of policies tried for the same stages where all are allowed."""
_SORTING = 0.2
"""Policies whose list scheduling takes a larger share of the work are skipped, unless they are likely to gain most."""
_FEW = 4
"""More stages on each device than this are tried as long as each one more makes a policy's step shorter."""
_CLIMBING = 0.7
"""Share of the work after which chunks are tried in the best plans, whose many stages take long to simulate."""
_FOR_K = 0.25
"""Additional share of the work that the search for k may take."""
_HOPEFUL = 1.1
"""Plans with several stages on a device aren't simulated if their estimate exceeds the best time by this factor."""
_NOT_STRAIGHT = {policy for policy in BUILT_IN if Placement.STRAIGHT not in policy.planning.placements}
"""Policies that aren't tried with one stage on each device."""

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
    return _searched(request).plan()


def rivals(request: PlanRequest) -> list[Plan]:
    """Finds the best plans of each kind, of which the fastest can be found by trials on real devices.

    Returns:
        The best plan; data parallelism and one device, unless they are expected to take twice as long. Each once, by
        expected time; none if nothing fits.
    """
    try:
        search = _searched(request)
    except PlanError:  # Nothing fits.
        return []
    best = search.plan()
    assert best.report is not None
    known = best.report
    timed = {best: known.latency}
    for choice in search.simple():
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


def _searched(request: PlanRequest) -> _Planner:
    """Returns the search for a request; the optimizer's slots are in shards if nothing fits otherwise.

    Raises:
        PlanError: as `plan`.
    """
    try:
        return _Planner(request)
    except PlanError:
        if request.optimizer_shards is not None:
            raise
    return _Planner(dataclasses.replace(request, optimizer_shards=True))


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
    """One search: DAPPLE's candidates by formula, climbing from them, and plans derived from the best.

    Attributes:
        pool: the simulated plans.
        known: those under DAPPLE's policies, the fastest first.
        dapple: the one of them to choose.
        best: the plan to choose of all.
    """

    def __init__(self, request: PlanRequest) -> None:
        """Searches.

        Raises:
            PlanError: nothing fits.
        """
        started = time.perf_counter()
        self.request, self.profile, self.cluster = request, request.profile, request.cluster
        self.even_cuts: dict[int, list[str]] = {}
        self.estimates: dict[Plan, float] = {}
        # Time may grow with the cluster: on a quick core 1 s on 16 devices, 5 s on 64, a minute on thousands.
        size = max(1.0, self.cluster.num_devices / 16)
        self.bar = Progress("planning")
        self.pool = PlanPool(request, _WORK * min(30.0, size), self.bar.step)
        # Among schedules whose memory doesn't grow with M, the one with the most micro-batches in flight is hardly
        # ever slower than the others, so that it represents them until the last few plans are compared.
        self.quickest = max(request.searched, key=lambda policy: policy.planning.rank)
        # The one with the fewest.
        self.leanest = min(request.searched, key=lambda policy: (policy.needs_all, policy.planning.rank))
        self._search_by_formula()
        self.known = self.pool.ranked()
        dapple = best_of(simplest(self.known, request.least_gain))
        assert dapple is not None
        self.best = self.dapple = dapple
        if self._derives():
            self.pool.allowed, self.pool.work = _DERIVING * _WORK * min(8.0, size), 0.0
            self.best = self._out_of_order()
        self.bar.close()
        seconds = time.perf_counter() - started
        count = len(self.pool.choices)
        logger.info("planned %s in %.2f s, %d plans simulated", self.profile.model, seconds, count)

    def plan(self) -> Plan:
        """Returns the plan to choose, with K and its report."""
        best = self.best.with_warm_up()
        return dataclasses.replace(best.plan, report=self._report(best))

    def _search_by_formula(self) -> None:
        pool = self.pool
        candidates = self._candidates()
        self._data_parallel()
        alike: Counter[tuple[object, ...]] = Counter()
        # A simulation takes as many times the work as there are micro-batches: each number of them has its share.
        share = 0.5 * pool.allowed / max(1, len({entry.micro_batches for entry in candidates}))
        spent: Counter[int] = Counter()
        for entry in self._interleaved(candidates):
            if pool.work > 0.5 * pool.allowed:
                break
            key = (entry.replicas, entry.micro_batches, entry.recompute)
            alike[key] += 1
            few = alike[key] <= _ALIKE or len(candidates) <= _FEW_PLANS
            if few and spent[entry.micro_batches] <= share:
                before = pool.work
                self._explore(entry.make())
                spent[entry.micro_batches] += round(pool.work - before)
        self._one_device()
        pool.climb(self._near)
        self._recompute_by_stage()
        for choice in pool.ranked()[:2]:
            self._simulate_all(choice.plan)
        pool.try_other_relays()
        if not pool.ranked():
            # Stages of equal memory may fit where those that the formula prefers don't.
            for over, costs, _ in attempts(self.request):
                if over <= 0:
                    self._simulate_all(costs.plan)
        if not pool.ranked():
            raise PlanError(shortage(self.request))

    def _near(self) -> list[Choice]:
        ranked = self.pool.ranked()
        return [choice for choice in ranked[:_STARTS] if choice.latency <= _HOPELESS * ranked[0].latency]

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
            if self.pool.fastest < search.least_seconds(request.batch):
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
            bound = max(bound, self.pool.fastest)
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
        if relayed and not (plan := self.pool.relayed(plan)).relays:
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
                    self.pool.simulate(self.request.plan((), [devices], count, mode), certainly=True)

    def _one_device(self) -> None:
        """Simulates one device, the first of the fastest, so that comparisons come from the same simulator."""
        device = max(range(self.cluster.num_devices), key=lambda device: self.cluster.devices[device].speed)
        for count in self.request.counts:
            for mode in self.request.named_modes or ("none",):
                self.pool.simulate(self.request.plan((), [[device]], count, mode), certainly=True)

    # ---- simulation

    def _simulate_all(self, plan: Plan) -> None:
        """Simulates a plan under each schedule, where it fits."""
        for schedule in self.request.searched:
            try:
                other = dataclasses.replace(plan, schedule=schedule)
            except PlanError:
                continue  # A move of the user's own has given it options that this policy doesn't take.
            self.pool.simulate(other, share=math.inf)

    def _explore(self, plan: Plan) -> None:
        """Simulates a plan under the schedule that is likely to be best."""
        choice = self.pool.simulate(dataclasses.replace(plan, schedule=self.quickest), share=math.inf)
        # Where memory lowers K, neighbouring stages may have equal K, and then wait for each other; P_A's falls by one
        # from stage to stage.
        limited = choice is None or choice.costs.warm_up != choice.plan.warm_up_counts()
        if limited:
            self.pool.simulate(dataclasses.replace(plan, schedule=self.leanest), share=math.inf)

    def _recompute_by_stage(self) -> None:
        """Lets stages of the best plans keep what their own memory suffices for, even if no work is left."""
        for _ in range(_BY_STAGE):
            fastest = self.pool.fastest
            for start in self.pool.ranked()[:_BY_STAGE]:
                for other in recomputing_by_stage(start.plan, self.request):
                    self.pool.simulate(other, share=math.inf)
            if self.pool.fastest == fastest:
                break

    # ---- plans that aren't DAPPLE's

    def _derives(self) -> bool:
        """Returns whether to search plans besides DAPPLE's; on one device, without any gain, only if asked."""
        request = self.request
        asked = isinstance(request.first_k, int) and request.first_k > 0
        asked |= not any(policy.planning.formula for policy in request.schedules)
        return request.out_of_order and (asked or self.cluster.num_devices > 1)

    def _out_of_order(self) -> Choice:
        """Returns the best plan under the policies that were asked for, derived from the best ones of DAPPLE's.

        Raises:
            PlanError: none fits.
        """
        request, pool, bases = self.request, self.pool, self._bases()
        pool.restrict(self.dapple)
        mode = leanest(stage.recompute for stage in bases[0].stages)
        starts = dict.fromkeys([*bases, *even_plans(request, mode)])
        # DAPPLE's best plan first, to know what there is to gain.
        ranked = sorted(starts, key=lambda base: (base != bases[0], self._estimate(base)))[:_PROBED]
        probed = [(self._probe(base), index) for index, base in enumerate(ranked)]
        for _, index in sorted(entry for entry in probed if entry[0] < math.inf)[:_VARIED]:
            self._vary(ranked[index])
        pool.climb(self._leaders, _CLIMBING, eager=True)
        self._combine()
        pool.climb(self._leaders, eager=True)
        self._order_bw_of_first_stages()
        pool.try_other_relays()
        best = pool.ranked()
        if not best:
            raise PlanError(
                f"no plan under {', '.join(map(str, request.schedules))} fits these devices and their memory, but one "
                f"under {self.dapple.plan.schedule} does: allow that as well, such as with schedule='auto'"
            )
        limit = best[0].latency * (1 + TIE)
        if self.dapple in best:
            if self.dapple.latency <= best[0].latency * (1 + request.least_gain):
                return self.dapple
            limit = min(limit, self.dapple.latency)
        chosen = best_of(best, limit)
        assert chosen is not None
        return chosen

    def _leaders(self) -> list[Choice]:
        return self.pool.leaders(_LEADING)

    def _bases(self) -> list[Plan]:
        """Returns the plans of DAPPLE's from which others are derived: the best, and unlike ones."""
        kinds: dict[tuple[object, ...], Plan] = {}
        for choice in self.known:
            kinds.setdefault((choice.plan.replicas, choice.plan.micro_batches), choice.plan)
        different: dict[tuple[int, ...], Plan] = {}
        for plan in kinds.values():
            different.setdefault(plan.replicas, plan)
        parallel = [plan for replicas, plan in different.items() if replicas == (self.cluster.num_devices,)]
        unlike = list(different.values())[: _BASES // 2]
        bases = dict.fromkeys([self.dapple.plan, *parallel, *unlike, *kinds.values()])
        return [*bases][:_BASES]

    def _probe(self, base: Plan) -> float:
        """Returns the least latency of a few plans that follow from one of DAPPLE's; infinite if none is known."""
        choices = self.pool.all(same_stages(base, self.request, self.request.straight[:1]))
        for policy, count in itertools.islice(stages_per_device(base, self.request), 1):
            choices += self.pool.all(self._worth(more_stages(base, self.request, policy, count)))
        if self.request.chunks and (base.num_stages == 1 or not choices) and self._may_gain_from_chunks(choices):
            choices += self.pool.all(with_chunks(base, self.request, _PARALLEL_CHUNKS))
        return min((choice.latency for choice in choices), default=math.inf)

    def _worth(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """Yields the plans whose estimates may be among the best."""
        return (plan for plan in plans if self._estimate(plan) <= self.pool.fastest * _HOPEFUL)

    def _vary(self, base: Plan) -> None:
        """Tries all plans that follow directly from a plan."""
        least: dict[Policy, float] = {}
        for policy, count in stages_per_device(base, self.request):
            if self.pool.work <= self.pool.allowed and (count <= _FEW or policy in least):
                choices = self.pool.all(self._worth(more_stages(base, self.request, policy, count)))
                seconds = min((choice.latency for choice in choices), default=math.inf)
                if seconds < least.get(policy, math.inf):
                    least[policy] = seconds
                elif count >= _FEW:
                    least.pop(policy, None)
        policies = self.request.straight
        if set(BUILT_IN) - set(policies) <= _NOT_STRAIGHT:
            policies = policies[:_LIKELY]  # the others are hardly ever better
        for plan in same_stages(base, self.request, policies):
            if self.pool.ordering(plan) <= _SORTING * self.pool.allowed:
                self.pool.all([plan])

    def _combine(self) -> None:
        """Tries chunks in the best plans without them (section 6 of Out-Of-Order BackProp)."""
        if self.request.chunks:
            for place, choice in enumerate(self._leaders()):
                # Where weight gradients fill bubbles, smaller ones fill them better.
                if not place or self._may_gain_from_chunks([choice]):
                    self._more_chunks(choice.plan, choice.latency)

    def _may_gain_from_chunks(self, choices: Sequence[Choice]) -> bool:
        """Returns whether chunks of these plans may be the fastest: they can only save what follows the last task."""
        if self.request.first_k not in (0, AUTO):
            return True  # the request asks for chunks
        return not choices or any(choice.gains_from_cuts(self.pool.fastest) for choice in choices)

    def _more_chunks(self, plan: Plan, seconds: float) -> None:
        """Doubles the number of chunks of a plan that takes ``seconds``, as long as that makes its step shorter."""
        for chunks in _CHUNKS:
            choices = self.pool.all(with_chunks(plan, self.request, chunks))
            least = min((choice.latency for choice in choices), default=math.inf)
            if least > seconds * (1 - TIE) or self.pool.work > self.pool.allowed:
                return
            seconds = least

    def _order_bw_of_first_stages(self) -> None:
        """Tries reverse first-k, with carried updates, in the best plans that reduce gradients chunk by chunk."""
        if not self.request.first_k:
            return
        cut = [choice for choice in self.pool.ranked() if has_chunks(choice.plan) and _splits(choice.plan)]
        # What comes after the last task may be hidden, and the better the more chunks there are.
        cut.sort(
            key=lambda choice: (round((choice.latency - choice.tail) / self.pool.fastest, 3), -choice.plan.num_stages)
        )
        parallel = [choice for choice in cut if len(set(choice.plan.devices)) == 1]
        near = [choice for choice in cut if choice.latency <= NEAR * self.pool.fastest]
        for choice in dict.fromkeys([*near[:1], *parallel[:1], *near[1:2]]):
            if least_seconds(choice.costs) >= self.pool.fastest * (1 - TIE):
                continue  # in any order
            # A stage whose weights others share can't be updated before these have their gradients.
            own = all(len(reduction.stages) == 1 for reduction in choice.costs.reductions)
            self._search_k(choice.plan, own and self.request.allows("carried_updates"))

    def _search_k(self, plan: Plan, carries: bool) -> None:
        """Searches k by simulated throughput as the paper does (section 5.1), and likewise the updates to carry over.

        The gradients of the first k stages are reduced last, stage 0's first; the next step's forward needs those at
        the end of this order last.
        """

        def throughput(k: int, carried: int) -> float:
            order = "first_layers" if carried else "completion"
            trial = dataclasses.replace(plan, reverse_first_k=k, carried_updates=carried, reduction_order=order)
            choice = self.pool.simulate(trial, share=1 + _FOR_K)
            return 0.0 if choice is None or not choice.latency else plan.global_batch_size / choice.latency

        def best_throughput(k: int) -> float:
            return max(throughput(k, carried) for carried in ({0, (k + 1) // 2, k} if carries else {0}))

        k = plan.reverse_first_k
        if self.request.first_k == AUTO:
            most = largest_reverse_first_k(plan, self.request.profile, self.request.cluster)
            k = best_reverse_first_k(min(plan.num_stages, most + 1), best_throughput)
        if carries:
            best_reverse_first_k(plan.num_stages + 1, lambda carried: throughput(k, carried))

    def _estimate(self, plan: Plan) -> float:
        """Estimates the seconds of a step with bubbles of the first and last micro-batch alone.

        Formula 1 of DAPPLE (section 4.1) for orders in which Bw fill bubbles.
        """
        if plan not in self.estimates:
            costs = self.request.costs(self.pool.relayed(plan))
            times = stage_times(costs)
            per_device = plan.num_stages / len(set(plan.devices))
            self.estimates[plan] = (
                least_seconds(costs)
                + sum(time.forward for time in times[::2]) / per_device
                + sum(time.forward + time.backward for time in times[1::2])
                + max(time.all_reduce for time in times)
            )
        return self.estimates[plan]

    # ---- results

    def simple(self) -> list[Choice]:
        """Returns the best plan of data parallelism and of one device, as far as the request allows them."""
        request, simple = self.request, []
        policies = request.for_one_stage
        for count in (self.cluster.num_devices, 1) if policies else ():
            choice = best_of([choice for choice in self.known if choice.plan.replicas == (count,)])
            if choice is not None and choice.plan.policy not in policies:
                # The search has used one of DAPPLE's policies in place of those.
                plan = dataclasses.replace(choice.plan, schedule=policies[0])
                choice = Choice.of(tried(request.costs(plan)))
            simple += [] if choice is None else [choice.with_warm_up()]
        return simple

    def _report(self, best: Choice) -> PlanReport:
        def first(wanted: Callable[[Plan], bool]) -> Choice | None:
            return next((choice for choice in self.known if wanted(choice.plan)), None)

        replicas = tuple(map(len, dict.fromkeys(best.plan.devices)))
        runner_up = first(lambda plan: plan.replicas != replicas)
        single = first(lambda plan: plan.replicas == (1,))
        parallel = first(lambda plan: plan.replicas == (self.cluster.num_devices,))
        return report(
            self.request,
            run(best.costs),
            runner_up=None if runner_up is None else (runner_up.plan, runner_up.latency),
            data_parallel=None if parallel is None else parallel.latency,
            one_device=None if single is None else single.latency,
            dapple=self.dapple if self._derives() else None,
        )


def _splits(plan: Plan) -> bool:
    """Returns whether the backwards of a plan's first stages are known to be splittable."""
    return plan.policy.reverses and plan.policy.splits is not None
