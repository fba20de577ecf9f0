"""Checks of ``transform``'s arguments before any work: mistakes are reported in one line."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.execution.step_passes import pipeline
from dapple_tf.frontend.model_front import meant
from dapple_tf.keras_private import items_of
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.planning.planner import plan as find_plan
from graph_passes.pass_manager import After, Before

_WAYS = {
    "cluster": (Cluster, "a dapple_tf.Cluster: Cluster.local(2), say"),
    "plan": (Plan, "a dapple_tf.Plan, by Plan.manual(...) or Plan.load(path), or None to have one found"),
    "profile": (Profile, "a dapple_tf.Profile, by dapple_tf.profile(...) or Profile.load(path)"),
    "operator_costs": (OperatorCosts, "dapple_tf.OperatorCosts, by dapple_tf.profile_operators(...)"),
    "faults": (FaultPolicy, "a dapple_tf.FaultPolicy"),
}


def check_types(**arguments: Any) -> None:
    """Checks the classes of ``transform``'s arguments except the model, which `check_model` checks.

    Raises:
        TypeError: one has another class, because two of them are swapped, say.
    """
    for name, value in arguments.items():
        kind, way = _WAYS[name]
        if isinstance(value, kind) or (value is None and name != "cluster"):
            continue
        shown = type(value).__name__ if isinstance(value, (Plan, Cluster, keras.Model)) else f"{value!r:.60}"
        raise TypeError(f"transform(model, cluster, plan): {name} is {shown}; give {way}")


def check_names(names: Iterable[str], own: Sequence[str], examples: Sequence[str]) -> None:
    """Checks the names of the arguments that ``transform`` passes on to the planner.

    Args:
        names: the names to check.
        own: the names of ``transform``'s own arguments.
        examples: the names of arguments that are example data.

    Raises:
        TypeError: a name is unknown.
    """
    parameters = inspect.signature(find_plan).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    for name in names:
        if name not in known and name not in examples:
            raise TypeError(f"transform() has no argument {name!r}{meant(name, {*known, *examples, *own})}")


def check_profile(profile: Profile | None, model: keras.Model) -> None:
    """Checks that a profile belongs to the model.

    Raises:
        ProfileError: the model lacks one of its layers.
    """
    if profile is None or not isinstance(model, keras.Model):
        return
    layers = items_of(model)
    names = {layer.name for layer in layers}
    for layer in profile.layers:
        path, _, _ = layer.name.partition("#")
        if path.rpartition("/")[2] not in names:
            raise ProfileError(
                f"the profile is of another model: {profile.model!r} has a layer {layer.name!r}, model {model.name!r} "
                f"hasn't; profile this one by dapple_tf.profile(model, ...), or leave profile out"
            )


def check_passes(passes: object) -> None:
    """Checks a user's own passes, before anything is measured or planned.

    Raises:
        TypeError: ``passes`` isn't a list or tuple of After and Before.
        PassError: one has an unknown place, isn't a pass, or has another's name.
    """
    if not isinstance(passes, (list, tuple)) or not all(isinstance(place, (After, Before)) for place in passes):
        raise TypeError(f"transform(): passes is {passes!r:.60}; give a list such as [After('split_concat', MyPass())]")
    pipeline(passes)
