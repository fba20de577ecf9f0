"""The best plans of each kind, of which the fastest can be found by trials on real devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.choice import Choice
from dapple_tf.planning.group_search import Exact, any_plan, several_on_groups, several_stages, with_groups
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import stages_alone, with_report

_RIVAL = 2.0
"""Simple plans that are expected to take this many times as long as the best one aren't tried."""
_MOST_OPERATOR_DEVICES = 8
"""The most devices over which all operators are placed for a trial: searching that grows with them."""


def rivals(request: PlanRequest, exact: Exact | None = None) -> list[Plan]:
    """Finds the best plans of the kinds that there are, to be tried for real.

    Args:
        request: the request.
        exact: as for `find`.

    Returns:
        The best plan whose stages run as a whole; with groups of devices for single operators the best one, that of at
        least two stages, that of at least two which are all on groups, and all operators on all devices, up to 8; data
        parallelism and one device, unless they are expected to take twice as long. Those that there are, each once, and
        none if nothing fits by what is predicted; what is expected to be the fastest comes first, and all operators on
        all devices, whose time isn't predicted, last.
    """
    plans: list[Plan] = []
    simple: list[Choice] = []
    plain: Plan | None = None
    with contextlib.suppress(PlanError):  # It doesn't fit.
        plain, simple = stages_alone(request)
        plans.append(plain)
    if request.places_operators:
        for suits in (any_plan, several_stages, several_on_groups):
            best = with_groups(request, None, exact, suits)
            plans += [] if best is None else [with_report(request, best, plain)]
        plans += _all_operators(request) if plans else []
    limit = _RIVAL * min((plan.report.latency for plan in plans if plan.report is not None), default=math.inf)
    plans += [with_report(request, choice, plain) for choice in simple if choice.latency <= limit]
    plans.sort(key=lambda plan: math.inf if plan.report is None else plan.report.latency)
    return list(dict.fromkeys(plans))


def _all_operators(request: PlanRequest) -> list[Plan]:
    """Returns the plan that places all operators on all devices, if there aren't too many and the request allows it."""
    count, policies = request.cluster.num_devices, request.for_one_stage
    if count > _MOST_OPERATOR_DEVICES or not policies or 1 not in request.micro_batches or "none" not in request.modes:
        return []
    plan = Plan.by_operators(count, request.batch, jit_compile=request.jit_compile)
    return [plan if plan.policy in policies else dataclasses.replace(plan, schedule=policies[0])]
