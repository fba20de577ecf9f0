"""Which all-reduce each group of parameters takes: the faster one on the links between its devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import ALL_REDUCE, Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.simulation.cost import CostModel


def fastest_reductions(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """Returns the plan with the ``all_reduce`` that is the fastest for each stage's gradients.

    Args:
        plan: the plan; its report is dropped.
        profile: its layers' costs.
        cluster: the devices, and the links as they are described or were measured (`dapple_tf.measure_links`).

    Raises:
        PlanError: the plan doesn't fit the cluster, or cuts after layers that the profile lacks.
    """
    return with_fastest_reductions(CostModel(dataclasses.replace(plan, report=None), profile, cluster)).plan


def with_fastest_reductions(costs: CostModel, algorithms: Sequence[str] = ALL_REDUCE) -> CostModel:
    """Returns the costs of the same plan with the fastest of these all-reduces for each stage, the first of equal ones.

    Parameters that several stages read go by the first of these, so that what is reduced for it together decides.
    """
    plan = costs.plan
    seconds: dict[int, dict[str, float]] = {}
    # Inside one server there is one way.
    for reduction in costs.reductions if len(algorithms) > 1 and costs.cluster.num_servers > 1 else ():
        own = seconds.setdefault(min(reduction.stages), dict.fromkeys(algorithms, 0.0))
        for algorithm in algorithms:
            own[algorithm] += costs.reduction_seconds(reduction, algorithm=algorithm)
    fastest = [
        min(algorithms, key=lambda name: seconds[stage][name]) if stage in seconds else algorithms[0]
        for stage in range(plan.num_stages)
    ]
    return costs if fastest == [stage.all_reduce for stage in plan.stages] else costs.reducing(fastest)
