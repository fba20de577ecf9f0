"""Others' plans with every policy and feature that ours may have, searched less than ours: strong, not the strongest.

Who: data parallelism on its fastest number of devices, in chunks whose gradients are reduced one by one and in another
order where that gains; the plans that DAPPLE's paper publishes, which its planner HPGO found; PipeDream's, those of the
paper's Table 6 and those that its algorithm finds; and the layouts that experts write for Megatron (SC'21): a straight
pipeline of equal blocks times data-parallel replicas, consecutive or strided, with one or several stages on a device.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.moves import recomputing_by_stage, with_task_seconds
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.reductions import cut_trials, with_fastest_reductions
from dapple_tf.planning.relays import RelayGuess
from dapple_tf.planning.stage_cuts import by_time, chunked
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.schedules.schedules import POLICIES
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Simulation, tried
from dapple_tf.tools.evaluation.paper_models import Partition
from dapple_tf.tools.evaluation.paper_plans import Outcome
from dapple_tf.tools.evaluation.pipedream import pipedream

_PER_DEVICE = (1, 2, 3, 4, 6, 8)
"""Stages on each device in Megatron's layouts."""
_NEAR = 1.05
"""A plan that is slower than its owner's best by this factor under P_B isn't tried under other policies."""
_VARIED = 2
"""Number of an owner's leading plans that are tried under every policy."""
_CHUNKS = 8
"""Chunks of an owner's best plan, whose gradients are then reduced in another order."""
_HOPELESS = 1.1
"""Layouts of Megatron's that are slower than our plan by this factor aren't simulated to the end."""
_FIRST = ("dapple_b", "interleaved")
"""The policies that rank an owner's plans, with one stage on each device and with several."""


class Case(NamedTuple):
    """A model on a cluster.

    Attributes:
        profile: its layers.
        cluster: the devices.
        batch: samples of a step.
        counts: numbers of micro-batches.
    """

    profile: Profile
    cluster: Cluster
    batch: int
    counts: tuple[int, ...]


def experts(case: Case) -> Iterator[Plan]:
    """Yields Megatron's layouts."""
    devices, layers = case.cluster.num_devices, len(case.profile.layers)
    for stages in (count for count in range(2, devices + 1) if devices % count == 0):
        replicas = devices // stages
        consecutive = [tuple(range(stage * replicas, (stage + 1) * replicas)) for stage in range(stages)]
        strided = [tuple(range(stage, devices, stages)) for stage in range(stages)]
        for each, places in itertools.product(_PER_DEVICE, (consecutive, strided)[: 2 if replicas > 1 else 1]):
            if stages * each > layers:
                continue
            cuts = by_time(case.profile, stages * each)
            policies = ("interleaved",) if each > 1 else ("dapple_a", "dapple_b", "gpipe")
            for count, policy, mode in itertools.product(case.counts, policies, ("none", "boundary")):
                try:
                    yield Plan.manual(cuts, places * each, count, case.batch, policy, recompute=mode)
                except PlanError:
                    continue  # fewer samples than replicas, or micro-batches that don't fill the rounds


class _Search:
    """The best of the plans of one owner."""

    def __init__(self, case: Case, limit: float) -> None:
        self.case, self.limit = case, limit
        self.request = PlanRequest(case.profile, case.cluster, case.batch, micro_batches=case.counts)
        self.handed_on = RelayGuess(self.request)
        self.read_by_several = any(len(tensor.consumers) > 1 for tensor in case.profile.tensors)
        self.best: Simulation | None = None
        self.times: dict[Plan, float] = {}

    @property
    def seconds(self) -> float:
        return math.inf if self.best is None else self.best.latency

    def add(self, plans: Iterable[Plan], *, both: bool = True) -> None:
        """Simulates plans; where several stages read a tensor, with relays and without, or as `RelayGuess` has it."""
        for plan in plans:
            with contextlib.suppress(PlanError, ScheduleError):  # doesn't fit, or isn't what this policy orders
                ways = [self.handed_on(plan)]
                if both and self.read_by_several and plan.num_stages > 2:
                    ways = [plan.with_options(relays=relays) for relays in ((), tuple(range(plan.num_stages)))]
                for way in ways:
                    with contextlib.suppress(PlanError, ScheduleError):
                        self.times[plan] = min(self._try(way), self.times.get(plan, math.inf))

    def _try(self, plan: Plan) -> float:
        costs = CostModel(with_task_seconds(plan, self.request), self.case.profile, self.case.cluster)
        costs = with_fastest_reductions(costs)
        trial = tried(costs, min(self.limit, self.seconds * _NEAR))
        if trial.simulation is None:
            return math.inf
        least = self._noted(trial.simulation)
        if trial.simulation.latency - trial.tail < self.seconds:
            for other in cut_trials(costs, trial):
                if other.simulation is not None:
                    least = min(least, self._noted(other.simulation))
        return least

    def _noted(self, simulation: Simulation) -> float:
        if simulation.latency < self.seconds * (1 - 1e-9):
            if not simulation.fits:
                return math.inf
            self.best = simulation
        return simulation.latency

    def vary(self) -> None:
        """Tries the leading plans, and the best of each kind of stages if there are few, under every policy.

        Before that, each stage of the leading plans may keep what its own memory suffices for. The best of all is then
        tried in chunks.
        """
        for plan in sorted(self.times, key=lambda plan: self.times[plan])[:_VARIED]:
            self.add(other for other in recomputing_by_stage(plan, self.request) if other.cuts == plan.cuts)
        ranked = sorted(self.times, key=lambda plan: self.times[plan])
        kinds: dict[object, Plan] = {}
        for plan in ranked:
            kinds.setdefault((plan.cuts, plan.devices), plan)
        leaders = [plan for plan in ranked if self.times[plan] <= self.seconds * _NEAR][:_VARIED]
        if len(kinds) <= _VARIED:
            leaders = list(dict.fromkeys([*leaders, *kinds.values()]))
        for plan in leaders:
            if plan.num_stages > 1:
                self.add(_changed(plan, ({"schedule": name} for name in POLICIES if name not in _FIRST)))
        if self.best is not None:
            best = self.best.costs.plan.with_options(backward_cuts=(), relays=())
            parts = chunked(best, self.case.profile, _CHUNKS)
            if parts != best:
                self.add(_changed(parts, ({"reverse_first_k": k} for k in (0, parts.num_stages))))


def _changed(plan: Plan, changes: Iterable[Mapping[str, Any]]) -> Iterator[Plan]:
    """Yields the plan with each of the changes that make a legal one."""
    for change in changes:
        with contextlib.suppress(PlanError):
            yield plan.with_options(**change)


def _plans(partitions: Iterable[Partition], case: Case) -> Iterator[Plan]:
    """Yields the plans of these stages under P_B."""
    for partition, count, mode in itertools.product(partitions, case.counts, ("none", "boundary")):
        plan = partition.plan(case.profile, count, case.batch, "dapple_b", mode)
        if plan is not None:
            yield plan


def strongest(
    case: Case, published: Sequence[Partition], dreams: Sequence[Partition], ours: float
) -> dict[str, Outcome | None]:
    """Returns whose -> the fastest of their plans; None where none fits, or Megatron's is hopeless.

    Args:
        case: the model, cluster, batch and numbers of micro-batches.
        published: stages of DAPPLE's paper.
        dreams: stages of PipeDream that the paper has, beside those that its planner finds here.
        ours: seconds of our plan's step.
    """
    some_idle = [Partition((), (used,)) for used in range(case.cluster.num_devices, 0, -1)]
    streams = {
        "data parallelism": _plans(some_idle, case),
        "HPGO": _plans(published, case),
        "PipeDream": _plans(
            [*dreams, *(pipedream(case.profile, case.cluster, flat=flat) for flat in (True, False))], case
        ),
        "Megatron": (plan for plan in experts(case) if str(plan.schedule) in _FIRST),
    }
    outcomes: dict[str, Outcome | None] = {}
    for who, plans in streams.items():
        search = _Search(case, _HOPELESS * ours if who == "Megatron" else math.inf)
        search.add(plans, both=False)
        search.vary()
        outcomes[who] = None if search.best is None else Outcome(search.best)
    return outcomes
