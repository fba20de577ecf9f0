"""What a plan is sought for, and what the search may choose from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.cluster import Cluster
from dapple_tf.cost import ALL_REDUCE, CostModel
from dapple_tf.plan import RECOMPUTE_MODES, Plan, PlanError, integer
from dapple_tf.profile import Profile
from dapple_tf.schedules import POLICIES

_MOST_MICRO_BATCHES = 64
"""More micro-batches than this aren't tried by themselves."""


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster and the choices there are.

    Attributes:
        profile: what the model's layers cost.
        cluster: what to run on.
        batch: samples in one step.
        micro_batches: numbers of micro-batches.
        schedules: policies; where a stage has no successor the first counts.
        recompute: modes; None recomputes only where memory demands it.
        overlap: whether gradients are all-reduced during the stage's last backward.
        all_reduce: the algorithm.
        jit_compile: passed on to plans.

    Raises:
        PlanError: a choice that doesn't exist.
    """

    profile: Profile
    cluster: Cluster
    batch: int
    micro_batches: tuple[int, ...]
    schedules: tuple[str, ...]
    recompute: tuple[str, ...] | None
    overlap: bool
    all_reduce: str
    jit_compile: bool

    @classmethod
    def of(
        cls,
        profile: Profile,
        cluster: Cluster,
        batch: int,
        micro_batches: int | Sequence[int] | None = None,
        schedule: str | Sequence[str] | None = None,
        recompute: str | Sequence[str] | None = None,
        *,
        overlap: bool = False,
        all_reduce: str = "hierarchical",
        jit_compile: bool = False,
    ) -> PlanRequest:
        """Fills in what wasn't said, for :func:`dapple_tf.planner.plan`."""
        batch = integer("global_batch_size", batch)
        if batch < 1:
            raise PlanError(f"global_batch_size is {batch}; it must be at least 1")
        schedules = _several(schedule, POLICIES)
        counts = _several(micro_batches, _micro_batch_counts(profile, batch))
        return cls(
            profile,
            cluster,
            batch,
            tuple(integer("micro_batches", count) for count in counts),
            # First one that doesn't hold all micro-batches, if there is a choice.
            tuple(sorted(schedules, key=lambda policy: policy == "gpipe")),
            None if recompute is None else _several(recompute, ()),
            overlap,
            all_reduce,
            jit_compile,
        )

    def __post_init__(self) -> None:
        for count in self.micro_batches:
            if not 1 <= count <= self.batch:
                raise PlanError(
                    f"a global batch of {self.batch} samples can't be cut into {count} micro-batches; use 1 to "
                    f"{self.batch}"
                )
        for name, given, known in (
            ("schedule", self.schedules, POLICIES),
            ("recompute", self.recompute or (), RECOMPUTE_MODES),
            ("all_reduce", (self.all_reduce,), ALL_REDUCE),
        ):
            for value in given:
                if value not in known:
                    raise PlanError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
        choices = {"micro_batches": self.micro_batches, "schedule": self.schedules, "recompute": self.recompute}
        for name, choice in choices.items():
            if choice is not None and not choice:
                raise PlanError(f"{name} is empty; give at least one to choose from, or None for the usual ones")

    def plan(
        self, cuts: Iterable[str], devices: Iterable[Iterable[int]], micro_batches: int, recompute: str = "none"
    ) -> Plan:
        """A plan for this request, under the first schedule."""
        return Plan.manual(
            cuts,
            devices,
            micro_batches,
            self.batch,
            self.schedules[0],
            recompute=recompute,
            jit_compile=self.jit_compile,
        )

    def costs(self, plan: Plan) -> CostModel:
        """What a plan costs, all-reduce as requested."""
        return CostModel(plan, self.profile, self.cluster, overlap=self.overlap, all_reduce=self.all_reduce)


def _several(given: Any, default: Iterable[Any]) -> tuple[Any, ...]:
    if given is None:
        return tuple(default)
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def _micro_batch_counts(profile: Profile, batch: int) -> tuple[int, ...]:
    """The numbers of micro-batches to try: divisors near powers of two, of slices that aren't smaller than profiled."""
    most = max(1, min(batch // profile.least_samples, _MOST_MICRO_BATCHES))
    wanted = [2**power for power in range(most.bit_length())]
    divisors = [count for count in range(1, most + 1) if batch % count == 0]
    found = {min(divisors, key=lambda divisor: (abs(math.log(divisor / count)), divisor)) for count in wanted}
    # A batch with few divisors is cut unevenly rather than hardly at all.
    found |= {count for count in wanted if all(abs(math.log(count / other)) > 0.5 for other in found)}
    return tuple(sorted(found))
