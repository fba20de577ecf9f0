"""Finds the plan: dynamic programming by the paper's formula, then the best candidates by simulation.

The formula (DAPPLE, PPoPP'21, section 4) knows neither the schedule's K nor memory beyond one micro-batch, nor links
that several transfers share. The search therefore gives many candidates, for several numbers of micro-batches and for
recomputation where memory is short; each is simulated under each schedule; and the best are improved by moving cuts and
devices between neighbouring stages as long as that helps.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from dapple_tf import progress
from dapple_tf.cluster import Cluster
from dapple_tf.cost import ALL_REDUCE, CostModel, gib
from dapple_tf.latency import PipelineLatency, StageTime, pipeline_latency
from dapple_tf.placement import Placements, links_of
from dapple_tf.plan import RECOMPUTE_MODES, Plan, PlanError, PlanReport, StageReport
from dapple_tf.profile import Profile
from dapple_tf.schedules import POLICIES
from dapple_tf.search import Candidate, Search, coarsened
from dapple_tf.simulator import Simulation, run
from graph_passes.batching import split_evenly

logger = logging.getLogger(__name__)

_WORK = 30_000
"""Tasks and transfers to simulate per plan that is sought, for a small cluster."""
_GROUPS = 36
"""Places at which the search considers cuts; the local search that follows moves them layer by layer."""
_MARGIN = 1.02
"""Plans that are certainly slower than the best by this factor aren't simulated to their end."""
_COUNTS = 3
"""Of so many numbers of micro-batches the search is run, the others are left to the local search."""
_FEW_DEVICES = 8
"""On so few devices it is run with all of them."""
_FIRST = 3
"""Plans that are simulated before it is decided whether to look at recomputation."""
_STARTS = 24
"""Of so many of the best plans the neighbours are looked at, if work is left."""
_SERVERS = 4
"""Servers whose unused devices the local search tries."""
_HOPELESS = 1.5
"""Plans whose L is above that of the best by this factor are simulated last."""
_TIE = 1e-3
"""Relative difference of latencies below which they count as equal."""
_MOST_MICRO_BATCHES = 64
"""More micro-batches than this aren't tried by themselves."""


def plan(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    *,
    micro_batches: int | Sequence[int] | None = None,
    schedule: str | Sequence[str] | None = None,
    recompute: str | Sequence[str] | None = None,
    overlap: bool = False,
    all_reduce: str = "hierarchical",
    jit_compile: bool = False,
) -> Plan:
    """Finds stages, replicas, placement, micro-batches, schedule and recomputation together.

    Args:
        profile: what the model's layers cost.
        cluster: what to run on. Devices without known memory count as large enough, unknown links as free.
        global_batch_size: samples in one step.
        micro_batches: M, or several to choose from; None tries the usual ones.
        schedule: a policy, or several to choose from; None tries all.
        recompute: a mode, or several; None recomputes only where memory demands it.
        overlap: whether gradients are all-reduced during the stage's last backward.
        all_reduce: ``hierarchical`` or ``flat``.
        jit_compile: passed on to the plan.

    Returns:
        The plan; ``print`` it for a table with the reasons, which are also in ``plan.report``.

    Raises:
        PlanError: nothing fits the devices' memory: the text says what is short by how much, and what would fit.
    """
    if global_batch_size < 1:
        raise PlanError(f"global_batch_size is {global_batch_size}; it must be at least 1")
    request = _Request(
        profile,
        cluster,
        global_batch_size,
        _several(micro_batches, _micro_batch_counts(profile, global_batch_size)),
        # For a single stage the first counts: one that doesn't hold all micro-batches, if there is a choice.
        tuple(sorted(_several(schedule, POLICIES), key=lambda policy: policy == "gpipe")),
        None if recompute is None else _several(recompute, ()),
        overlap,
        all_reduce,
        jit_compile,
    )
    for count in request.micro_batches:
        if not 1 <= count <= global_batch_size:
            raise PlanError(
                f"a global batch of {global_batch_size} samples can't be cut into {count} micro-batches; use 1 to "
                f"{global_batch_size}"
            )
    for name, given, known in (
        ("schedule", request.schedules, POLICIES),
        ("recompute", request.recompute or (), RECOMPUTE_MODES),
        ("all_reduce", (all_reduce,), ALL_REDUCE),
    ):
        for value in given:
            if value not in known:
                raise PlanError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
    return _Planner(request).plan()


def _several(given: Any, default: Iterable[Any]) -> tuple[Any, ...]:
    if given is None:
        return tuple(default)
    return (given,) if isinstance(given, int | str) else tuple(given)


def _micro_batch_counts(profile: Profile, batch: int) -> tuple[int, ...]:
    """The numbers of micro-batches to try: divisors near powers of two, of slices that aren't smaller than profiled."""
    most = max(1, min(batch // profile.least_samples, _MOST_MICRO_BATCHES))
    wanted = [2**power for power in range(most.bit_length())]
    divisors = [count for count in range(1, most + 1) if batch % count == 0]
    found = {min(divisors, key=lambda divisor: (abs(math.log(divisor / count)), divisor)) for count in wanted}
    # A batch with few divisors is cut unevenly rather than hardly at all.
    found |= {count for count in wanted if all(abs(math.log(count / other)) > 0.5 for other in found)}
    return tuple(sorted(found))


@dataclasses.dataclass(frozen=True)
class _Request:
    profile: Profile
    cluster: Cluster
    batch: int
    micro_batches: tuple[int, ...]
    schedules: tuple[str, ...]
    recompute: tuple[str, ...] | None
    overlap: bool
    all_reduce: str
    jit_compile: bool


@dataclasses.dataclass(frozen=True)
class Choice:
    """A plan and its simulated step."""

    plan: Plan
    simulation: Simulation

    @property
    def latency(self) -> float:
        """Seconds of the step."""
        return self.simulation.latency

    @property
    def memory(self) -> float:
        """Peak use of the fullest device."""
        costs = self.simulation.costs
        return max(costs.needed_bytes(stage, count) for stage, count in enumerate(costs.warm_up))


class _Found(NamedTuple):
    """A plan that the formula thinks well of, with its L."""

    latency: float
    in_flight: int
    plan: Plan


class _Planner:
    """One search."""

    def __init__(self, request: _Request) -> None:
        self.request = request
        self.profile, self.cluster = request.profile, request.cluster
        self.choices: dict[tuple[Any, ...], Choice | None] = {}
        self.work = 0.0
        self.fastest = math.inf
        # Time is allowed to grow with the cluster: 1 s on 16 devices, 5 s on 64, a minute on thousands.
        self.allowed = _WORK * max(1.0, min(30.0, self.cluster.num_devices / 16))
        self.bar = progress.Progress("planning")
        # The schedule with the most micro-batches in flight of those whose memory doesn't grow with M: hardly ever
        # slower than the others, so that it stands for them until the last few plans are compared.
        self.quickest = max(request.schedules, key=("gpipe", "dapple_a", "dapple_b").index)

    def plan(self) -> Plan:
        started = time.perf_counter()
        found = self._candidates()
        self._data_parallel()
        for entry in self._interleaved(found):
            if self.work > 0.5 * self.allowed:
                break
            self._explore(entry.plan)
        best = self._improved()
        if best is None:
            raise PlanError(self._shortage())
        self.bar.close()
        logger.info(
            "planned %s in %.2f s, %d plans simulated", self.profile.model, time.perf_counter() - started,
            len(self.choices),
        )  # fmt: skip
        return dataclasses.replace(best.plan, report=self._report(best))

    # ---- candidates

    def _candidates(self) -> list[_Found]:
        """Plans that the formula finds good, with their L."""
        request = self.request
        placements = Placements(self.cluster)
        links = links_of(placements, request.all_reduce)
        ends = coarsened(self.profile, _GROUPS)
        found: list[_Found] = []
        modes: tuple[str, ...] = request.recompute or ("none", "min_cut", "boundary")
        if request.recompute is None and not any(layer.min_cut_residual_bytes for layer in self.profile.layers):
            modes = ("none", "boundary")
        bound = math.inf
        for mode in modes:
            search = Search(self.profile, placements, links, ends, overlap=request.overlap, recompute=mode)
            best = self._best()
            if best is not None and best.latency < search.least_seconds(request.batch):
                continue  # not even without bubbles and transfers
            fresh = self._even_plans(mode)
            for count in self._promising(fresh):
                self.bar.step(f"{mode}, {count} micro-batches")
                bound = min([bound, *(entry.latency for entry in fresh)])
                for item in search.run(count, request.batch, bound=bound):
                    fresh.append(_Found(item.latency, item.in_flight, self._plan(placements, item, count, mode)))
            fresh.sort(key=lambda entry: entry.latency)
            for entry in itertools.islice(self._interleaved(fresh), _FIRST):
                self._explore(entry.plan)
            # L knows nothing of the bubbles that too few micro-batches in flight make.
            best = self._best()
            bound = max(bound, best.latency) if best is not None else math.inf
            found += fresh
            if not search.memory_bound and request.recompute is None:
                break
        return sorted(found, key=lambda entry: entry.latency)

    def _promising(self, even: Sequence[_Found]) -> list[int]:
        """The numbers of micro-batches to search with, best first: by the plans of equal stages that they allow.

        All of them where the search is small, or where no such plan fits.
        """
        best: dict[int, float] = {}
        for entry in even:
            count = entry.plan.micro_batches
            # With one micro-batch stages never overlap.
            if count > 1 or len(self.request.micro_batches) == 1:
                best[count] = min(best.get(count, math.inf), entry.latency)
        ranked = sorted(best, key=lambda count: best[count])
        if len(ranked) < _COUNTS or self.cluster.num_devices <= _FEW_DEVICES:
            rest = set(self.request.micro_batches) - set(ranked)
            return ranked + sorted(rest, reverse=True)
        return ranked[:_COUNTS]

    def _even_plans(self, recompute: str) -> list[_Found]:
        """Pipelines of equal stages: data parallelism, straight, and those in between."""
        devices = self.cluster.num_devices
        stages = [
            count
            for count in range(1, min(devices, len(self.profile.layers)) + 1)
            if devices % count == 0 and (devices <= 64 or count <= 64)
        ]
        return [
            entry
            for micro_batches in self.request.micro_batches
            for count in stages
            for entry in self._even(count, micro_batches, recompute)
        ]

    def _even(self, stages: int, micro_batches: int, recompute: str) -> Iterator[_Found]:
        """A pipeline of stages of the same time and number of replicas, if it fits."""
        replicas = self.cluster.num_devices // stages
        if replicas > self.request.batch // micro_batches:
            return
        groups = [range(i * replicas, (i + 1) * replicas) for i in range(stages)]
        samples = self.profile.batch_sizes[-1]
        times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in self.profile.layers]
        plan = Plan.manual(
            [self.profile.layers[end - 1].name for end in balanced(times, stages)],
            groups,
            micro_batches,
            self.request.batch,
            self.request.schedules[0],
            recompute=recompute,
            jit_compile=self.request.jit_compile,
        )
        costs = self._costs(plan)
        holds = costs.holds or (micro_batches,)
        if min(holds) > 0:
            latency = pipeline_latency(stage_times(costs), micro_batches).latency
            yield _Found(latency, min(2, *holds, micro_batches), plan)

    def _costs(self, plan: Plan) -> CostModel:
        request = self.request
        return CostModel(plan, self.profile, self.cluster, overlap=request.overlap, all_reduce=request.all_reduce)

    def _plan(self, placements: Placements, item: Candidate, micro_batches: int, recompute: str) -> Plan:
        layers = self.profile.layers
        return Plan.manual(
            [layers[bound - 1].name for bound in item.bounds[:-1]],
            placements.devices(placements.steps[step] for step in item.steps),
            micro_batches,
            self.request.batch,
            self.request.schedules[0],
            recompute=recompute,
            jit_compile=self.request.jit_compile,
        )

    def _interleaved(self, found: Sequence[_Found]) -> Iterator[_Found]:
        """Best first, but those of every number of micro-batches early on."""
        ranks: dict[tuple[int, str, int], int] = {}
        keyed = []
        for order, entry in enumerate(found):
            key = (entry.plan.micro_batches, entry.plan.recompute, entry.in_flight)
            rank = ranks[key] = ranks.get(key, -1) + 1
            hopeless = entry.latency > _HOPELESS * found[0].latency
            keyed.append((order if hopeless else min(order, rank * 8) - len(found), order, entry))
        yield from (entry for _, _, entry in sorted(keyed, key=lambda item: item[:2]))

    def _data_parallel(self) -> None:
        for count in self.request.micro_batches:
            if self.request.batch // count >= self.cluster.num_devices:
                for mode in self.request.recompute or ("none",):
                    self._simulate_all(
                        Plan.data_parallel(
                            self.cluster.num_devices, self.request.batch, count, self.request.schedules[0],
                            recompute=mode, jit_compile=self.request.jit_compile,
                        )
                    )  # fmt: skip

    # ---- simulation

    def _simulate_all(self, plan: Plan) -> list[Choice]:
        """The plan under each schedule, where it fits."""
        schedules = self.request.schedules if plan.num_stages > 1 else self.request.schedules[:1]
        found = []
        for schedule in schedules:
            choice = self._simulate(dataclasses.replace(plan, schedule=schedule))
            if choice is not None:
                found.append(choice)
        return found

    def _explore(self, plan: Plan) -> None:
        """Simulates a plan under the schedule that is likely to be best."""
        choice = self._simulate(dataclasses.replace(plan, schedule=self.quickest))
        # Where memory cuts down K, that of neighbouring stages may be equal, and then they wait for each other; P_A's
        # is one less from stage to stage.
        limited = choice is None or choice.simulation.costs.warm_up != choice.plan.warm_up_counts()
        if limited and "dapple_a" in self.request.schedules:
            self._simulate(dataclasses.replace(plan, schedule="dapple_a"))

    def _hopeless(self, plan: Plan) -> bool:
        """Whether the first micro-batches tell already that a plan won't be the best one.

        The others take at least as long as the busiest device computes on them.
        """
        few = 2 * plan.num_stages + 4
        if self.fastest == math.inf or 2 * few > plan.micro_batches:
            return False
        size = plan.global_batch_size // plan.micro_batches
        short = dataclasses.replace(plan, micro_batches=few, global_batch_size=few * size)
        try:
            simulation = run(self._costs(short))
        except PlanError:
            return False
        self.work += len(simulation.spans)
        each = max(simulation.busy.values()) / few
        return simulation.latency + (plan.micro_batches - few) * each > self.fastest * _MARGIN

    def _simulate(self, plan: Plan) -> Choice | None:
        if plan.num_stages == 1:
            plan = dataclasses.replace(plan, schedule=self.request.schedules[0])
        key = (plan.cuts, plan.devices, plan.micro_batches, plan.schedule, plan.recompute)
        if key in self.choices:
            return self.choices[key]
        costs = self._costs(plan)
        choice: Choice | None = None
        try:
            warm_up = costs.warm_up
        except PlanError:
            self.work += 20
        else:
            # The same K by another name is the same schedule.
            alias = (*key[:3], warm_up, plan.recompute)
            known = self.choices.get(alias)
            if known is not None:
                choice = Choice(plan, known.simulation)
            elif alias not in self.choices and not self._hopeless(plan):
                choice = Choice(plan, run(costs))
                self.work += len(choice.simulation.spans)
                self.fastest = min(self.fastest, choice.latency)
            self.choices.setdefault(alias, choice)
            self.bar.step(f"{len(self.choices)} plans simulated")
        self.choices[key] = choice
        return choice

    def _best(self) -> Choice | None:
        """The fastest; of those within the tie the simplest, and of these the one that needs the least memory."""
        ranked = self._ranked()
        if not ranked:
            return None
        close = [choice for choice in ranked if choice.latency <= ranked[0].latency * (1 + _TIE)]
        return min(close, key=lambda choice: (choice.plan.num_stages, choice.plan.micro_batches, choice.memory))

    def _improved(self) -> Choice | None:
        """Local search from the best plans: other micro-batches, cuts and devices moved between neighbours."""
        tried: set[int] = set()
        while self.work < self.allowed:
            ranked = self._ranked()
            near = [choice for choice in ranked[:_STARTS] if choice.latency <= _HOPELESS * ranked[0].latency]
            start = next((choice for choice in near if id(choice) not in tried), None)
            if start is None:
                break
            tried.add(id(start))
            for neighbour in self._neighbours(start.plan):
                if self.work > self.allowed:
                    break
                self._simulate(neighbour)
        for choice in self._ranked()[:3]:
            self._simulate_all(choice.plan)
        return self._best()

    def _ranked(self) -> list[Choice]:
        """What has been simulated, the fastest first."""
        found = {id(choice): choice for choice in self.choices.values() if choice is not None}
        return sorted(found.values(), key=lambda choice: choice.latency)

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Plans that differ in one thing."""
        for count in self.request.micro_batches:
            if plan.micro_batches / 4 <= count <= plan.micro_batches * 4:
                yield from _legal(plan, micro_batches=count)
        for cuts in self._moved_cuts(plan):
            yield from _legal(plan, cuts=cuts)
        for devices in self._moved_devices(plan):
            yield from _legal(plan, devices=devices)
        for index in range(plan.num_stages - 1):
            merged = tuple(sorted([*plan.devices[index], *plan.devices[index + 1]]))
            groups = (*plan.devices[:index], merged, *plan.devices[index + 2 :])
            yield from _legal(plan, devices=groups, cuts=plan.cuts[:index] + plan.cuts[index + 1 :])
        for cuts, devices in self._split_stages(plan):
            yield from _legal(plan, cuts=cuts, devices=devices)

    def _bounds(self, plan: Plan) -> list[int]:
        """Index of the first layer of each stage, and of the one after the last."""
        return [0, *(self.profile.index[cut] + 1 for cut in plan.cuts), len(self.profile.layers)]

    def _moved_cuts(self, plan: Plan) -> Iterator[tuple[str, ...]]:
        bounds = self._bounds(plan)
        for index in range(1, len(bounds) - 1):
            for shift in (-1, 1, -2, 2):
                if bounds[index - 1] < bounds[index] + shift < bounds[index + 1]:
                    moved = self.profile.layers[bounds[index] + shift - 1].name
                    yield (*plan.cuts[: index - 1], moved, *plan.cuts[index:])

    def _free(self, plan: Plan) -> list[int]:
        """The first unused device of each server."""
        used = {device for group in plan.devices for device in group}
        cluster = self.cluster
        unused = ([d for d in cluster.devices_of(server) if d not in used] for server in range(cluster.num_servers))
        return [devices[0] for devices in unused if devices][:_SERVERS]

    def _moved_devices(self, plan: Plan) -> Iterator[tuple[tuple[int, ...], ...]]:
        groups = [list(group) for group in plan.devices]

        def changed(changes: dict[int, list[int]]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(sorted(changes.get(i, group))) for i, group in enumerate(groups))

        for giver, taker in _both_ways(range(len(groups))):
            if len(groups[giver]) > 1:
                index = -1 if giver < taker else 0
                device = groups[giver][index]
                left = [other for other in groups[giver] if other != device]
                yield changed({giver: left, taker: [*groups[taker], device]})
        for stage, group in enumerate(groups):
            for device in self._free(plan):
                yield changed({stage: [*group, device]})
                yield changed({stage: [*group[:-1], device]})
            yield changed({stage: group[:-1]})

    def _split_stages(self, plan: Plan) -> Iterator[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
        """A stage in two, of about half its time each: by sharing its devices, or with one that is free."""
        layers, samples = self.profile.layers, self.profile.batch_sizes[-1]
        for stage, (start, stop) in enumerate(itertools.pairwise(self._bounds(plan))):
            if stop - start < 2:
                continue
            times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in layers[start:stop]]
            passed = list(itertools.accumulate(times))
            middle = min(range(len(times) - 1), key=lambda i: abs(passed[i] - passed[-1] / 2))
            cuts = (*plan.cuts[:stage], layers[start + middle].name, *plan.cuts[stage:])
            group = plan.devices[stage]
            halves: list[tuple[tuple[int, ...], tuple[int, ...]]] = [(group, (free,)) for free in self._free(plan)]
            for part in sorted({1, len(group) // 2, len(group) - 1} & set(range(1, len(group)))):
                halves.append((group[:part], group[part:]))
            for first, second in halves:
                yield cuts, (*plan.devices[:stage], first, second, *plan.devices[stage + 1 :])

    # ---- what is told about the plan

    def _report(self, best: Choice) -> PlanReport:
        costs, simulation = best.simulation.costs, best.simulation
        total = sum(simulation.busy.values()) or 1.0
        stages = []
        for stage, devices in enumerate(best.plan.devices):
            first, stop = costs.stages[stage].layers
            stages.append(
                StageReport(
                    layers=stop - first,
                    share=sum(simulation.busy[device] for device in devices) / total,
                    bubble=simulation.bubbles[stage],
                    warm_up=costs.warm_up[stage],
                    memory_bytes=max(simulation.peak_bytes[device] for device in devices),
                    memory_limit=costs.memory_limit(stage),
                )
            )
        formula = pipeline_latency(stage_times(costs), len(costs.micro_batches))
        single = single_device_seconds(self.profile, self.request.batch)
        parallel = (c.latency for c in self._ranked() if c.plan.replicas == (self.cluster.num_devices,))
        data_parallel = next(parallel, None)
        runner_up = self._runner_up(best)
        return PlanReport(
            latency=best.latency,
            formula_latency=formula.latency,
            speedup=single / best.latency if best.latency else 1.0,
            data_parallel=data_parallel,
            data_parallel_note="" if data_parallel is not None else self._why_not_data_parallel(),
            runner_up=None if runner_up is None else runner_up.latency,
            runner_up_text="" if runner_up is None else shape(runner_up.plan),
            pivot=_stage_name(formula.pivot),
            limited_by=_limit(costs, simulation, formula),
            stages=tuple(stages),
            fingerprint=best.plan.fingerprint,
        )

    def _runner_up(self, best: Choice) -> Choice | None:
        """The best plan with other stages or replicas."""
        return next((choice for choice in self._ranked() if choice.plan.replicas != best.plan.replicas), None)

    def _why_not_data_parallel(self) -> str:
        devices = self.cluster.num_devices
        if self.request.batch < devices:
            return f"a batch of {self.request.batch} samples doesn't reach {devices} replicas"
        reaching = [count for count in self.request.micro_batches if self.request.batch // count >= devices]
        if not reaching:
            return f"a micro-batch has fewer samples than the {devices} devices"
        count = max(reaching)
        plan = Plan.data_parallel(devices, self.request.batch, count)
        costs = CostModel(plan, self.profile, self.cluster)
        limit = costs.memory_limit(0)
        need = costs.needed_bytes(0, 1)
        if limit is None or need <= limit:
            return "wasn't among the micro-batch counts to choose from"
        return f"doesn't fit: it needs {gib(need)} on each device, {gib(need - limit)} more than there is"

    def _shortage(self) -> str:
        """Why nothing fits, and what would."""
        request = self.request
        devices = self.cluster.num_devices
        best = min(self._attempts(request.cluster), key=lambda attempt: attempt[0], default=None)
        if best is None:
            smallest = min(request.micro_batches)
            return (
                f"no plan is possible: a global batch of {request.batch} samples in {smallest} micro-batches doesn't "
                f"reach the devices; use a larger batch or fewer micro-batches"
            )
        over, costs, stage = best
        limit = costs.memory_limit(stage) or 0
        need = costs.needed_bytes(stage, self._in_flight(costs.plan.micro_batches))
        text = (
            f"no plan fits the memory of {devices} device{'s' if devices > 1 else ''}: the one that comes nearest, "
            f"{shape(costs.plan)}, recompute "
            f"{costs.plan.recompute!r}: stage {stage} needs {gib(need)} on each device "
            f"({gib(costs.stages[stage].stored_bytes)} for weights, gradients and optimizer), {gib(over)} more than "
            f"the {gib(limit)} there are"
        )
        fixes = []
        if request.recompute is not None and "boundary" not in request.recompute:
            other = dataclasses.replace(request, recompute=("boundary",))
            if any(over <= 0 for over, _, _ in _Planner(other)._attempts(request.cluster)):
                fixes.append("recompute='boundary'")
        most = max(1, request.batch // self.profile.least_samples)
        if most > max(request.micro_batches):
            other = dataclasses.replace(request, micro_batches=(most,))
            if any(over <= 0 for over, _, _ in _Planner(other)._attempts(request.cluster)):
                fixes.append(f"smaller micro-batches (micro_batches={most})")
        for factor in (2, 4, 8, 16):
            if any(over <= 0 for over, _, _ in self._attempts(_enlarged(request.cluster, factor))):
                fixes.append(f"{factor} times as many devices ({factor * devices})")
                break
        if fixes:
            return f"{text}. What would fit: {', or '.join(fixes)}"
        largest = max(layer.parameter_bytes * 2 + layer.slot_bytes for layer in self.profile.layers)
        return f"{text}. The largest layer alone needs {gib(largest)} for weights, gradients and optimizer"

    def _in_flight(self, micro_batches: int) -> int:
        """The fewest micro-batches that a stage has to hold."""
        return micro_batches if set(self.request.schedules) == {"gpipe"} else 1

    def _attempts(self, cluster: Cluster) -> Iterator[tuple[float, CostModel, int]]:
        """Straight pipelines balanced by memory: (bytes over the limit, costs, the stage that is over)."""
        profile, request = self.profile, self.request
        for mode in request.recompute or ("none", "boundary"):
            for count in request.micro_batches:
                for stages in range(1, min(cluster.num_devices, len(profile.layers)) + 1):
                    replicas = min(cluster.num_devices // stages, request.batch // count)
                    if replicas < 1:
                        continue
                    cuts = _by_memory(profile, stages)
                    groups = [range(i * replicas, (i + 1) * replicas) for i in range(stages)]
                    plan = Plan.manual(cuts, groups, count, request.batch, recompute=mode)
                    costs = CostModel(plan, profile, cluster)
                    overs = [
                        (costs.needed_bytes(stage, self._in_flight(count)) - limit, costs, stage)
                        for stage in range(stages)
                        if (limit := costs.memory_limit(stage)) is not None
                    ]
                    if overs:
                        yield max(overs, key=lambda entry: entry[0])


def _both_ways(stages: range) -> Iterator[tuple[int, int]]:
    for first, second in itertools.pairwise(stages):
        yield first, second
        yield second, first


def _legal(plan: Plan, **changes: Any) -> Iterator[Plan]:
    """The plan with changes, if that is a legal plan."""
    try:
        yield dataclasses.replace(plan, **changes)
    except PlanError:
        return


def _enlarged(cluster: Cluster, factor: int) -> Cluster:
    """The cluster several times over."""
    servers = cluster.num_servers
    devices = tuple(
        dataclasses.replace(device, name=f"{device.name}/copy{copy}", server=device.server + copy * servers)
        for copy in range(factor)
        for device in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices, servers=cluster.servers * factor, real=False)


def balanced(times: Sequence[float], stages: int) -> list[int]:
    """Where to cut a row of layers into stages of which the longest is as short as can be: positions after each."""
    passed = [0.0, *itertools.accumulate(times)]
    low, high = max(max(times), passed[-1] / stages), passed[-1]
    best: list[int] = []
    for _ in range(50):
        limit = high if not best else (low + high) / 2
        ends = _packed(passed, stages, limit)
        if ends is None:
            low = limit
        else:
            best, high = ends, limit
    return best


def _packed(passed: Sequence[float], stages: int, limit: float) -> list[int] | None:
    """Stages of at most ``limit`` each, as long as possible but for a layer that every later stage needs."""
    ends: list[int] = []
    start, last = 0, len(passed) - 1
    for left in range(stages - 1, 0, -1):
        end = bisect.bisect_right(passed, passed[start] + limit * (1 + 1e-12)) - 1
        end = min(max(end, start + 1), last - left)
        ends.append(end)
        start = end
    return ends if passed[last] - passed[start] <= limit * (1 + 1e-12) else None


def _by_memory(profile: Profile, stages: int) -> list[str]:
    """Cuts that share out stored bytes and residuals evenly."""
    samples = profile.least_samples
    sizes = [
        2 * layer.parameter_bytes + layer.slot_bytes + layer.state_bytes + layer.residual_bytes.at(samples)
        for layer in profile.layers
    ]
    total, passed = sum(sizes) or 1.0, 0.0
    cuts: list[str] = []
    for index, size in enumerate(sizes[:-1]):
        passed += size
        left = len(sizes) - 1 - index
        wanted = stages - 1 - len(cuts)
        if wanted and (passed >= total * (len(cuts) + 1) / stages or left == wanted):
            cuts.append(profile.layers[index].name)
    return cuts


def stage_times(costs: CostModel) -> list[StageTime]:
    """Computation stages and the network stages between them, as formula 2 takes them."""
    cluster, plan = costs.cluster, costs.plan
    found: list[StageTime] = []
    for stage, devices in enumerate(plan.devices):
        if stage:
            found.append(StageTime(*(_transfer_seconds(costs, stage - 1, backward=back) for back in (False, True))))
        cost = costs.stages[stage]
        start = costs.profile.task_seconds
        times = []
        for part in (cost.forward, cost.backward):
            slices = costs.slices(stage, 0)
            times.append(
                max(
                    (start + part.at(costs.profile.timed_samples(interval.size))) / cluster.devices[device].speed
                    for interval, device in zip(slices, devices, strict=True)
                )
            )
        reduced = sum(costs.reduction_seconds(item) for item in costs.reductions if stage in item.stages)
        if costs.overlap:
            reduced = max(0.1 * reduced, reduced - times[1])
        found.append(StageTime(times[0], times[1], reduced + max(costs.apply_seconds(stage, d) for d in devices)))
    return found


def _transfer_seconds(costs: CostModel, stage: int, *, backward: bool) -> float:
    """Time to send everything that crosses the cut behind a stage, for one micro-batch: that of the busiest link."""
    cluster, plan = costs.cluster, costs.plan
    loads: dict[tuple[str, int], float] = {}
    latency = 0.0
    for producer, consumer in costs.routes:
        if producer > stage or consumer <= stage:
            continue
        ends = (consumer, producer) if backward else (producer, consumer)
        for piece in costs.pieces(producer, consumer, 0, backward=backward):
            source, target = plan.devices[ends[0]][piece.sender], plan.devices[ends[1]][piece.receiver]
            link = cluster.link(source, target)
            a, b = cluster.devices[source].server, cluster.devices[target].server
            ports = (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b))
            for port in ports:
                loads[port] = loads.get(port, 0.0) + piece.bytes / link.bandwidth
            latency = max(latency, link.latency)
    return max(loads.values(), default=0.0) + latency


def single_device_seconds(profile: Profile, batch: int) -> float:
    """Time to run all micro-batches one after the other on one device (section 6.3), in slices of the profiled size."""
    size = profile.batch_sizes[-1]
    cost = profile.total("forward") + profile.total("backward")
    slices = split_evenly(batch, -(-batch // size))
    apply = sum(layer.apply_seconds for layer in profile.layers)
    return sum(cost.at(profile.timed_samples(count)) for count in slices) + apply + profile.step_seconds


def shape(plan: Plan) -> str:
    """A plan in short, as the paper writes it: ``8:8`` with 4 micro-batches, ``data parallel``, ``straight``."""
    replicas = plan.replicas
    name = ":".join(map(str, replicas))
    if plan.num_stages == 1:
        name = "one device" if replicas == (1,) else f"data parallel on {replicas[0]}"
    elif set(replicas) == {1}:
        name = f"straight pipeline of {plan.num_stages} stages"
    return f"{name}, {plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}"


def _stage_name(index: int) -> str:
    return f"stage {index // 2}" if index % 2 == 0 else f"the network between stages {index // 2} and {index // 2 + 1}"


def _limit(costs: CostModel, simulation: Simulation, formula: PipelineLatency) -> str:
    """What the step's time is made of, longest part first."""
    parts: dict[str, float] = {}
    names = {"send": "transfers", "all_reduce": "all-reduce", "apply": "the optimizer"}
    for span in simulation.critical_path:
        name = names.get(span.kind, f"computation of stage {span.stage}")
        parts[name] = parts.get(name, 0.0) + span.end - span.start
    ranked: list[tuple[str, float]] = sorted(parts.items(), key=lambda item: -item[1])[:3]
    total = simulation.latency or 1.0
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ranked)
