"""The planner's request: a model, a cluster, and what the search may choose from."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from dapple_tf.common.data_files import short
from dapple_tf.common.text import counted
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import ALL_REDUCE, RECOMPUTE_MODES, Plan, PlanError
from dapple_tf.describe.plan_values import SHARDS, integer
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.reductions import with_fastest_reductions
from dapple_tf.planning.shares import with_shares
from dapple_tf.schedules.policies import BUILT_IN, own_policy
from dapple_tf.schedules.policy import Placement, Policy
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.schedules.schedules import POLICIES, policy_of
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.stage_cost import StageCosts


@dataclass(frozen=True)
class Feature:
    """A feature of plans that the planner may use.

    Attributes:
        name: how it is called in ``only``.
        text: what it is.
        used: plan -> whether the plan has it.
        needs: the feature without which it isn't used.
        restraint: what it costs the user besides time, for the report; empty where steps are as without it.
    """

    name: str
    text: str
    used: Callable[[Plan], bool]
    needs: str | None = None
    restraint: str = ""


def groups(plan: Plan) -> list[tuple[list[int], tuple[int, ...]]]:
    """Returns the runs of consecutive stages with equal devices, and these devices."""
    runs = itertools.groupby(range(plan.num_stages), key=lambda stage: plan.devices[stage])
    return [(list(stages), devices) for devices, stages in runs]


def most_groups(plan: Plan) -> int:
    """Returns the most groups of stages that a device has."""
    return max(Counter(device for _, devices in groups(plan) for device in devices).values())


def has_chunks(plan: Plan) -> bool:
    """Returns whether a replicated stage is cut into chunks: stages in a row on the same devices, and only these."""
    return any(len(stages) > 1 < len(devices) for stages, devices in groups(plan)) and most_groups(plan) == 1


def has_several_stages(plan: Plan) -> bool:
    """Returns whether a device has several stages that aren't chunks."""
    return any(len(stages) > 1 == len(devices) for stages, devices in groups(plan)) or most_groups(plan) > 1


FEATURES = (
    Feature(
        "recompute",
        "backwards recompute what memory is short for",
        lambda plan: any(stage.recompute != "none" for stage in plan.stages),
    ),
    Feature(
        "stage_recompute",
        "each stage recomputes only what its own memory is short for (`StagePlan.recompute`)",
        lambda plan: len({stage.recompute for stage in plan.stages}) > 1,
        needs="recompute",
    ),
    Feature("several_stages", "devices have several stages each", has_several_stages),
    Feature(
        "pieces", "last backwards are cut into pieces (`Plan.backward_cuts`)", lambda plan: bool(plan.backward_cuts)
    ),
    Feature("relays", "stages hand on what several later ones read (`Plan.relays`)", lambda plan: bool(plan.relays)),
    Feature(
        "shares",
        "slices are in proportion to devices' speeds (`StagePlan.shares`)",
        lambda plan: any(stage.shares for stage in plan.stages),
    ),
    Feature("chunks", "replicated stages are cut into chunks (`chunked`)", has_chunks),
    Feature(
        "first_k",
        "weight gradients of the first stages come last (`Plan.reverse_first_k`)",
        lambda plan: plan.reverse_first_k > 0,
        needs="chunks",
    ),
    Feature(
        "carried_updates",
        "last updates are made during the next step's forward (`Plan.carried_updates`)",
        lambda plan: plan.carried_updates > 0,
        needs="first_k",
        restraint="what reads or changes variables between steps, such as a callback, first waits for these updates",
    ),
)
"""All features. Whoever adds one gives it a line here, and asks `PlanRequest.allows` where it is searched."""

NAMES = tuple(feature.name for feature in FEATURES)
"""The names of all features."""


WITH_ALL_GRADIENTS = frozenset(NAMES) - {"carried_updates"}
"""The features for optimizers that need all gradients before their first update."""


def features_of(only: str | Iterable[str] | None) -> frozenset[str]:
    """Returns the names of the features that ``only`` allows; all for None.

    Raises:
        PlanError: a name is unknown, or one is given without the feature that it needs.
    """
    if only is None:
        return frozenset(NAMES)
    if not isinstance(only, str | Iterable):
        raise PlanError(f"only is {short(only)}; give names of features, some of {', '.join(NAMES)}")
    names = [only] if isinstance(only, str) else list(only)
    for name in names:
        if name not in NAMES:
            raise PlanError(
                f"only has {short(name)}; use some of {', '.join(NAMES)}, or none; schedule chooses policies"
            )
    for feature in FEATURES:
        if feature.name in names and feature.needs is not None and feature.needs not in names:
            raise PlanError(f"only has {feature.name}, which is for plans with {feature.needs}: add {feature.needs}")
    return frozenset(names)


def restraints(plan: Plan) -> tuple[str, ...]:
    """Returns what a plan's features cost the user besides time, a text for each."""
    return tuple(
        f"{feature.text}: {feature.restraint}" for feature in FEATURES if feature.restraint and feature.used(plan)
    )


AUTO = "auto"
"""Lets the planner choose."""

LEAST_GAIN = 0.01
"""The least fraction of a step's time that a plan must gain over a simpler one."""
_MOST_MICRO_BATCHES = 64
"""The most micro-batches that are tried by default."""


FOUND_LAST: Mapping[str, Any] = {"backward_cuts": (), "all_reduce": "flat", "relays": ()}
"""Options that the planner finds when the rest of a plan is known, as they are before."""
FOUND_AGAIN: Mapping[str, Any] = {**FOUND_LAST, "shares": None}
"""Options to find anew for other stages or devices: `FOUND_LAST` and shares (`PlanRequest.shared`)."""
Changes = Mapping[str, Any]
"""The options of a plan that a move changes, as `Plan.with_options` takes them."""
Move = Callable[[Plan, "PlanRequest"], Iterable[Changes]]
"""Yields small legal changes to a plan, for the planner's local search."""


class Flag(NamedTuple):
    """A program's flag for an option.

    Attributes:
        help: the text of ``--help``.
        words: word -> the option's value; None for lists of names and numbers.
        switch: whether the flag is ``--name`` or ``--noname``.
    """

    help: str
    words: Mapping[str, Any] | None = None
    switch: bool = False


def _flag(help: str, words: Mapping[str, Any] | None = None, *, switch: bool = False) -> dict[str, Flag]:
    return {"flag": Flag(help, words, switch)}


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster, and what the planner may choose from: the arguments of :func:`dapple_tf.plan`.

    A field with a flag is an option of ``dapple-plan``, too.

    Attributes:
        profile: the costs of the model's layers.
        cluster: the devices and links. Devices without known memory count as large enough, unknown links as free.
        global_batch_size: samples in one step.
        micro_batches: M, or several to choose from; None tries the usual ones.
        schedule: a policy (a built-in one's name, or one of your own), or several to choose from. None, or ``auto``,
            tries all, those for several stages on a device, too, and cuts replicated stages into chunks
            (:func:`dapple_tf.chunked`), whose gradients are reduced while others are computed. DAPPLE's own are
            ``["gpipe", "dapple_a", "dapple_b"]``.
        recompute: a mode, or several; None recomputes only where memory requires it.
        all_reduce: ``flat`` or ``hierarchical``, or several; each stage takes the fastest of them. None tries both.
        jit_compile: passed on to the plan.
        reverse_first_k: k of the plan, whose replicated stages are then cut into chunks: the weight gradients of the
            first k stages (at most all) come last (Out-Of-Order BackProp, EuroSys'22, section 5.1). ``auto`` searches
            the best k as the paper does, by simulated throughput; it is the default where ``schedule`` is. The
            last updates may then be left to the next step's forward (`Plan.carried_updates`), which an optimizer that
            needs all gradients first doesn't allow: leave ``carried_updates`` out of ``only`` for it.
        only: the features that the plan may have besides stages under a policy, some of ``recompute``,
            ``stage_recompute``, ``several_stages``, ``pieces``, ``relays``, ``shares``, ``chunks``, ``first_k`` and
            ``carried_updates`` (`dapple_tf.planning.plan_request.FEATURES`); an empty list for none, None for all.
            ``plan.report.restraints`` says what those of the chosen plan cost besides time.
        optimizer_shards: whether replicas keep and update a shard of the optimizer's slots each
            (`Plan.shards`), which optimizers that update each element by itself allow; None lets them where
            nothing fits otherwise.
        row_shards: whether they keep a shard of the rows of embeddings each (`Plan.shards`).
        least_gain: the fraction of the step's time that a plan must gain over the best simpler one: with fewer stages,
            or as many on fewer devices, or under DAPPLE's policies. Predictions are hardly more exact than that.
        moves: functions of your own that yield changes to a plan, for the local search to try (docs/extending.md).

    Raises:
        PlanError: a choice that doesn't exist.
    """

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    _: KW_ONLY
    micro_batches: int | Sequence[int] | None = field(
        default=None, metadata=_flag("Micro-batches per step: one number, or several to choose from.")
    )
    schedule: str | Policy | Sequence[str | Policy] | None = field(
        default=None,
        metadata=_flag(
            f"A schedule, or several to choose from: {', '.join(POLICIES)}; auto, the default, for all of them."
        ),
    )
    recompute: str | Sequence[str] | None = field(
        default=None,
        metadata=_flag(
            f"What backward passes recompute, or several to choose from: {', '.join(RECOMPUTE_MODES)}. By default only "
            f"if memory requires it."
        ),
    )
    all_reduce: str | Sequence[str] | None = field(
        default=None,
        metadata=_flag(
            "All-reduces over several servers; by default the faster one for each stage.",
            {name: name for name in ALL_REDUCE},
        ),
    )
    jit_compile: bool | None = field(default=None, metadata=_flag("Compile the plan's stages with XLA.", switch=True))
    reverse_first_k: int | str | None = field(
        default=None,
        metadata=_flag(
            "k of reverse first-k in plans with chunks, or auto for the best. By default auto if --schedule is, else 0."
        ),
    )
    only: str | Iterable[str] | None = field(
        default=None,
        metadata=_flag(
            f"The features that the plan may have besides stages under a policy, some of {', '.join(NAMES)}; --only= "
            f"for none. By default all."
        ),
    )
    optimizer_shards: bool | None = field(
        default=False,
        metadata=_flag(
            "Whether replicas keep a shard of the optimizer's slots each, for optimizers that update each element by "
            "itself; auto: where nothing fits the devices' memory otherwise.",
            {"no": False, "yes": True, "auto": None},
        ),
    )
    row_shards: bool = field(
        default=False,
        metadata=_flag(
            "Replicas keep a shard of the rows of embeddings each, and exchange the rows that they look up.",
            switch=True,
        ),
    )
    least_gain: float = LEAST_GAIN
    moves: Sequence[Move] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Iterator):  # `dataclasses.replace` reads it again.
                object.__setattr__(self, name, tuple(value))
        Profile.check("profile", self.profile)
        Cluster.check("cluster", self.cluster)
        if self.batch < 1:
            raise PlanError(f"global_batch_size is {self.batch}; it must be at least 1")
        if self.first_k and not self.allows("first_k"):
            raise PlanError(
                f"reverse_first_k is {self.first_k!r}, but only doesn't have first_k: add it, or leave one out"
            )
        if self.recompute is not None and not self.allows("recompute") and set(self.named_modes or ()) != {"none"}:
            raise PlanError(
                f"recompute is {short(self.recompute)}, but only doesn't have recompute: add it, or leave one out"
            )
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
        for count in self.counts:
            if not 1 <= count <= self.batch:
                raise PlanError(
                    f"a global batch of {counted(self.batch, 'sample')} can't be cut into "
                    f"{counted(count, 'micro-batch')}; use 1 to {self.batch}"
                )
        for name, values, known in (
            ("recompute", self.named_modes, RECOMPUTE_MODES),
            ("all_reduce", self.reductions, ALL_REDUCE),
        ):
            for value in values or ():
                if value not in known:
                    raise PlanError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
        choices = {
            **{"micro_batches": self.counts, "schedule": self.schedules},
            **{"recompute": self.named_modes, "all_reduce": self.reductions},
        }
        for name, choice in choices.items():
            if choice is not None and not choice:
                raise PlanError(f"{name} is empty; give at least one to choose from, or None for the usual ones")
        if self.first_k not in (0, AUTO) and not any(policy.reverses for policy in self.schedules):
            raise PlanError(
                f"reverse_first_k is {self.first_k}, but {self.schedules[0]} doesn't split backwards; leave it "
                f"out, or use modulo"
            )

    # ---- the options, as the search reads them

    @functools.cached_property
    def batch(self) -> int:
        """Samples in one step."""
        return integer("global_batch_size", self.global_batch_size)

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """The numbers of micro-batches that plans may have."""
        counts = _several(self.micro_batches, _micro_batch_counts(self.profile, self.batch))
        return tuple(integer("micro_batches", count) for count in counts)

    @property
    def _automatic(self) -> bool:
        return self.schedule is None or (isinstance(self.schedule, str) and self.schedule == AUTO)

    @functools.cached_property
    def schedules(self) -> tuple[Policy, ...]:
        """The policies that plans may have; where a stage has no successor the first counts."""
        policies = _policies(POLICIES if self._automatic else _several(self.schedule, POLICIES))
        return tuple(sorted(policies, key=lambda policy: policy.needs_all))  # The others hold fewer micro-batches.

    @functools.cached_property
    def features(self) -> frozenset[str]:
        """The names of the features that plans may have, see `dapple_tf.planning.plan_request`."""
        return features_of(self.only)

    @functools.cached_property
    def first_k(self) -> int | str:
        """Number of stages whose weight gradients come last in plans with chunks; ``auto`` looks for the best."""
        if self.reverse_first_k is None:
            return AUTO if self._automatic and self.allows("first_k") else 0
        return AUTO if self.reverse_first_k == AUTO else _first_k(self.reverse_first_k)

    @functools.cached_property
    def named_modes(self) -> tuple[str, ...] | None:
        """The modes of recomputation that the user names; None where memory decides."""
        if self.recompute is None:
            return None if self.allows("recompute") else ("none",)
        return _several(self.recompute, ())

    @functools.cached_property
    def reductions(self) -> tuple[str, ...]:
        """The algorithms of all-reduce, of which each stage takes the fastest."""
        return _several(self.all_reduce, ALL_REDUCE)

    @property
    def shards(self) -> tuple[str, ...]:
        """What replicas keep in shards, as `Plan.shards`."""
        wanted = {"optimizer": self.optimizer_shards, "rows": self.row_shards}
        return tuple(kind for kind in SHARDS if wanted[kind])

    @property
    def asks_for_k(self) -> bool:
        """Whether plans have a given k, and so chunks."""
        return self.first_k not in (0, AUTO)

    @property
    def _searches_k(self) -> bool:
        return self._automatic or self.first_k != 0

    @property
    def modes(self) -> tuple[str, ...]:
        """What backwards may recompute, the modes of a plan or of its stages, in the order in which they are tried."""
        if self.named_modes is not None:
            return self.named_modes
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
        """Policies for one stage on each device."""
        return [policy for policy in self.ranked if Placement.STRAIGHT in policy.planning.placements]

    @property
    def for_one_stage(self) -> list[Policy]:
        """Those for plans of one stage; none if a k was asked for."""
        return [] if self.asks_for_k else [policy for policy in self.schedules if policy in self.straight]

    @property
    def out_of_order(self) -> bool:
        """Whether to search plans besides DAPPLE's; on one device, only if they are asked for."""
        formula = [policy.planning.formula for policy in self.schedules]
        gains = self.cluster.num_devices > 1 and (self._searches_k or not all(formula))
        return gains or self.asks_for_k or not any(formula)

    def allows(self, feature: str) -> bool:
        """Returns whether plans may have a feature, by its name in `dapple_tf.planning.plan_request`."""
        return feature in self.features

    def asks_for(self, plan: Plan) -> bool:
        """Returns whether a plan has a policy and a k that the planner may choose."""
        return plan.policy in self.schedules and (not self.asks_for_k or plan.reverse_first_k > 0)

    @property
    def chunks(self) -> bool:
        """Whether to cut replicated stages into chunks, so that gradients are reduced while others are computed."""
        return self._searches_k and self.allows("chunks")

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
        return with_fastest_reductions(costs, self.reductions)

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
