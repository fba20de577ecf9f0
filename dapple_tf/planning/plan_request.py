"""The planner's request: a model, a cluster, and what the search may choose from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.data_files import short
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import ALL_REDUCE, RECOMPUTE_MODES, Plan, PlanError
from dapple_tf.describe.plan_values import integer
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.fastest_reductions import with_fastest_reductions
from dapple_tf.planning.features import NAMES, features_of
from dapple_tf.planning.shares import with_shares
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.schedules.policy import Placement, Policy
from dapple_tf.schedules.policy_names import own_policy
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.schedules.schedules import POLICIES, policy_of
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.stage_cost import StageCosts
from dapple_tf.units import counted

DAPPLE_POLICIES = tuple(policy.name for policy in BUILT_IN if policy.planning.formula)
"""The policies of the paper, which the search by formula covers."""

AUTO = "auto"
"""Lets the planner choose."""

LEAST_GAIN = 0.01
"""The least fraction of a step's time that a plan must gain over a simpler one."""
_MOST_MICRO_BATCHES = 64
"""The most micro-batches that are tried by default."""


FOUND_LAST: Mapping[str, Any] = {"backward_cuts": (), "all_reduce": "flat", "relays": ()}
"""Options that the planner finds when the rest of a plan is known, as they are before."""
Changes = Mapping[str, Any]
"""The options of a plan that a move changes, as `Plan.with_options` takes them."""
Move = Callable[[Plan, "PlanRequest"], Iterable[Changes]]
"""Yields small changes to a plan, for the planner's local search. Those that make no legal plan are skipped."""


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster and the choices there are.

    Attributes:
        profile: the costs of the model's layers.
        cluster: the devices and links.
        batch: samples in one step.
        micro_batches: numbers of micro-batches.
        schedules: policies that a plan may have; where a stage has no successor the first counts.
        recompute: modes; None recomputes only where memory requires it.
        all_reduce: the algorithms of all-reduce, of which each stage takes the fastest.
        jit_compile: passed on to plans.
        reverse_first_k: of plans with chunks; ``auto`` looks for the best.
        derives: whether to search plans that aren't DAPPLE's, with chunks, say.
        features: the names of the features that plans may have, see `dapple_tf.planning.features`.
        least_gain: the fraction of its time that a plan must gain over a simpler one.
        moves: the user's own moves of the local search, besides the built-in ones.
        optimizer_shards: whether `Plan.shards` has ``optimizer``; None for where memory requires it.
        row_shards: whether it has ``rows``.

    Raises:
        PlanError: a choice that doesn't exist.
    """

    profile: Profile
    cluster: Cluster
    batch: int
    micro_batches: tuple[int, ...]
    schedules: tuple[Policy, ...]
    recompute: tuple[str, ...] | None
    all_reduce: tuple[str, ...]
    jit_compile: bool | None
    reverse_first_k: int | str = 0
    derives: bool = False
    features: frozenset[str] = frozenset(NAMES)
    least_gain: float = LEAST_GAIN
    moves: tuple[Move, ...] = ()
    optimizer_shards: bool | None = False
    row_shards: bool = False

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        batch: int,
        micro_batches: int | Sequence[int] | None = None,
        schedule: str | Policy | Sequence[str | Policy] | None = None,
        recompute: str | Sequence[str] | None = None,
        *,
        all_reduce: str | Sequence[str] | None = None,
        jit_compile: bool | None = None,
        reverse_first_k: int | str | None = None,
        least_gain: float = LEAST_GAIN,
        moves: Sequence[Move] = (),
        only: str | Iterable[str] | None = None,
        optimizer_shards: bool | None = False,
        row_shards: bool = False,
    ) -> PlanRequest:
        """Fills in defaults, for :func:`dapple_tf.plan`."""
        Profile.check("profile", profile)
        Cluster.check("cluster", cluster)
        batch = integer("global_batch_size", batch)
        if batch < 1:
            raise PlanError(f"global_batch_size is {batch}; it must be at least 1")
        automatic = schedule is None or (isinstance(schedule, str) and schedule == AUTO)
        schedules = _policies(POLICIES if automatic else _several(schedule, POLICIES))
        features = features_of(only)
        if reverse_first_k is None:
            reverse_first_k = AUTO if automatic and "first_k" in features else 0
        elif reverse_first_k != AUTO:
            reverse_first_k = _first_k(reverse_first_k)
        if reverse_first_k and "first_k" not in features:
            raise PlanError(
                f"reverse_first_k is {reverse_first_k!r}, but only doesn't have first_k: add it, or leave one out"
            )
        modes = None if recompute is None else _several(recompute, ())
        if "recompute" not in features:
            if modes is not None and set(modes) != {"none"}:
                raise PlanError(
                    f"recompute is {short(recompute)}, but only doesn't have recompute: add it, or leave one out"
                )
            modes = ("none",)
        counts = _several(micro_batches, _micro_batch_counts(profile, batch))
        return cls(
            profile,
            cluster,
            batch,
            tuple(integer("micro_batches", count) for count in counts),
            # Policies that don't hold all micro-batches go first.
            tuple(sorted(schedules, key=lambda policy: policy.needs_all)),
            modes,
            _several(all_reduce, ALL_REDUCE),
            jit_compile,
            reverse_first_k,
            automatic or reverse_first_k != 0,
            features=features,
            least_gain=least_gain,
            moves=tuple(moves),
            optimizer_shards=optimizer_shards,
            row_shards=row_shards,
        )

    def __post_init__(self) -> None:
        types = sorted({device.type for device in self.cluster.devices})
        if len(types) > 1:
            raise PlanError(
                f"the cluster has devices of several types, {' and '.join(types)}, but a profile describes one: plan "
                f"for a cluster of devices of one type, or write the plan yourself"
            )
        for move in self.moves:
            if not callable(move):
                raise PlanError(f"moves has {move!r}; give functions (plan, request) -> changes of the plan's options")
        if (
            isinstance(self.least_gain, bool)
            or not isinstance(self.least_gain, int | float)
            or not (0 <= self.least_gain < 1)
        ):
            raise PlanError(
                f"least_gain is {self.least_gain!r}; give the part of a step's time that a plan must gain over simpler "
                f"ones, from 0 to below 1"
            )
        if self.optimizer_shards is not None and not isinstance(self.optimizer_shards, bool):
            raise PlanError(
                f"optimizer_shards is {short(self.optimizer_shards)}; give True, False, or None for where memory "
                f"requires it"
            )
        if not isinstance(self.row_shards, bool):
            raise PlanError(f"row_shards is {short(self.row_shards)}; it must be True or False")
        for count in self.micro_batches:
            if not 1 <= count <= self.batch:
                raise PlanError(
                    f"a global batch of {counted(self.batch, 'sample')} can't be cut into "
                    f"{counted(count, 'micro-batch')}; use 1 to {self.batch}"
                )
        for name, given, known in (
            ("recompute", self.recompute or (), RECOMPUTE_MODES),
            ("all_reduce", self.all_reduce, ALL_REDUCE),
        ):
            for value in given:
                if value not in known:
                    raise PlanError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
        choices = {
            **{"micro_batches": self.micro_batches, "schedule": self.schedules},
            **{"recompute": self.recompute, "all_reduce": self.all_reduce},
        }
        for name, choice in choices.items():
            if choice is not None and not choice:
                raise PlanError(f"{name} is empty; give at least one to choose from, or None for the usual ones")
        if self.reverse_first_k not in (0, AUTO) and not any(policy.reverses for policy in self.schedules):
            raise PlanError(
                f"reverse_first_k is {self.reverse_first_k}, but {self.schedules[0]} doesn't split backwards; leave it "
                f"out, or use modulo"
            )

    @property
    def modes(self) -> tuple[str, ...]:
        """What backwards may recompute, the modes of a plan or of its stages, in the order in which they are tried."""
        if self.recompute is not None:
            return self.recompute
        profiled = any(layer.min_cut_residual_bytes for layer in self.profile.layers)
        return ("none", "min_cut", "boundary") if profiled else ("none", "boundary")

    @property
    def searched(self) -> tuple[Policy, ...]:
        """DAPPLE's policies that may be chosen, or the ones that the search uses in place of others."""
        standing_in = (policy for policy in BUILT_IN if policy.planning.formula and not policy.needs_all)
        return tuple(policy for policy in self.schedules if policy.planning.formula) or tuple(standing_in)

    @property
    def ranked(self) -> list[Policy]:
        """The policies that may be chosen, the most likely to gain first."""
        return sorted(self.schedules, key=lambda policy: -policy.planning.rank)

    @property
    def straight(self) -> list[Policy]:
        """Those of them for one stage on each device."""
        return [policy for policy in self.ranked if Placement.STRAIGHT in policy.planning.placements]

    @property
    def for_one_stage(self) -> list[Policy]:
        """Those for plans of one stage; none if a k was asked for."""
        simple = self.reverse_first_k in (0, AUTO)
        return [policy for policy in self.schedules if policy in self.straight] if simple else []

    @property
    def out_of_order(self) -> bool:
        """Whether to derive other plans from DAPPLE's that the search finds."""
        return self.derives or not all(policy.planning.formula for policy in self.schedules)

    def allows(self, feature: str) -> bool:
        """Returns whether plans may have a feature, by its name in `dapple_tf.planning.features`."""
        return feature in self.features

    @property
    def chunks(self) -> bool:
        """Whether to cut replicated stages into chunks, so that gradients are reduced while others are computed."""
        return self.derives and self.allows("chunks")

    def plan(
        self, cuts: Iterable[str], devices: Iterable[Iterable[int]], micro_batches: int, recompute: str = "none"
    ) -> Plan:
        """Returns a plan for this request, under the first schedule that is searched, with the best shares."""
        plan = Plan.manual(
            cuts,
            devices,
            micro_batches,
            self.batch,
            self.searched[0],
            recompute=recompute,
            jit_compile=self.jit_compile,
            optimizer_shards=bool(self.optimizer_shards),
            row_shards=self.row_shards,
        )
        return self.shared(plan)

    def shared(self, plan: Plan) -> Plan:
        """Returns the plan with the best shares of replicas on unlike devices, see `with_shares`.

        Raises:
            PlanError: the plan doesn't suit the model or the cluster.
        """
        return with_shares(plan, self.profile, self.cluster) if self.allows("shares") else plan

    def costs(self, plan: Plan) -> CostModel:
        """Returns what a plan costs, with the fastest of the requested all-reduces."""
        costs = CostModel(plan, self.profile, self.cluster, self._stage_costs)
        return with_fastest_reductions(costs, self.all_reduce)

    @functools.cached_property
    def _stage_costs(self) -> StageCosts:
        return StageCosts(self.profile)


def _first_k(value: Any) -> int:
    """Returns the number of ``reverse_first_k``."""
    if isinstance(value, str):
        raise PlanError(f"reverse_first_k is {value!r}; give a number of stages, or 'auto'")
    count = integer("reverse_first_k", value)
    if count < 0:
        raise PlanError(f"reverse_first_k is {count}; it must be at least 0, or 'auto'")
    return count


def _policies(given: Iterable[Any]) -> tuple[Policy, ...]:
    """Converts names of policies to policies.

    Raises:
        PlanError: one is unknown.
    """
    policies = []
    for value in given:
        named = isinstance(value, str) and ":" in value
        if not isinstance(value, Policy) and not named and not callable(value) and value not in POLICIES:
            raise PlanError(
                f"unknown schedule {value!r}; use one of {', '.join(POLICIES)}, or 'auto' alone for all of them"
            )
        try:
            policies.append(policy_of(own_policy(value) if named else value))
        except ScheduleError as error:
            raise PlanError(str(error)) from error
    return tuple(policies)


def _several(given: Any, default: Iterable[Any]) -> tuple[Any, ...]:
    if given is None:
        return tuple(default)
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def _micro_batch_counts(profile: Profile, batch: int) -> tuple[int, ...]:
    """Returns the counts of micro-batches to try: divisors near powers of two, with slices no smaller than profiled."""
    most = max(1, min(batch // profile.least_samples, _MOST_MICRO_BATCHES))
    wanted = [2**power for power in range(most.bit_length())]
    divisors = [count for count in range(1, most + 1) if batch % count == 0]
    counts = {min(divisors, key=lambda divisor: (abs(math.log(divisor / count)), divisor)) for count in wanted}
    # A batch with few divisors is cut unevenly.
    counts |= {count for count in wanted if all(abs(math.log(count / other)) > 0.5 for other in counts)}
    return tuple(sorted(counts))
