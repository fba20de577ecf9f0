"""What the planner may add to plain stages under a policy: one line for each feature; `only` narrows the choice.

Stages, replicas, devices and numbers of micro-batches are always open; policies are named by ``schedule``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dapple_tf.common.data_files import short
from dapple_tf.describe.plan import Plan, PlanError


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


def has_chunks(plan: Plan) -> bool:
    """Returns whether a replicated stage is cut into chunks: stages in a row on the same devices, and only these."""
    runs = [(devices, len(list(stages))) for devices, stages in itertools.groupby(plan.devices)]
    used = Counter(device for devices, _ in runs for device in devices)
    return max(used.values()) == 1 and any(count > 1 and len(devices) > 1 for devices, count in runs)


def has_several_stages(plan: Plan) -> bool:
    """Returns whether a device has several stages that aren't chunks."""
    runs = [(devices, len(list(stages))) for devices, stages in itertools.groupby(plan.devices)]
    used = Counter(device for devices, _ in runs for device in devices)
    return max(used.values()) > 1 or any(count > 1 and len(devices) == 1 for devices, count in runs)


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
