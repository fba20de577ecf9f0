"""What ``transform`` is given, looked at before anything is done with it: mistakes are told in one line."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, ProfileError
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
    """Checks the classes of ``transform``'s arguments but the model, which `check_model` looks at.

    Raises:
        TypeError: one is of another; two of them are in each other's place, say.
    """
    for name, value in arguments.items():
        kind, way = _WAYS[name]
        if isinstance(value, kind) or (value is None and name != "cluster"):
            continue
        shown = type(value).__name__ if isinstance(value, (Plan, Cluster, keras.Model)) else f"{value!r:.60}"
        raise TypeError(f"transform(model, cluster, plan): {name} is {shown}; give {way}")


def check_names(names: Iterable[str], own: Sequence[str], examples: Sequence[str]) -> None:
    """Checks the names of what ``transform`` hands on to the planner.

    Args:
        names: that were given.
        own: of ``transform``'s own arguments.
        examples: of arguments that are example data.

    Raises:
        TypeError: nobody knows one of them.
    """
    parameters = inspect.signature(find_plan).parameters.values()
    known = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    for name in names:
        if name not in known and name not in examples:
            raise TypeError(f"transform() has no argument {name!r}{meant(name, {*known, *examples, *own})}")


def check_profile(profile: Profile | None, model: keras.Model) -> None:
    """Checks that a profile is one of the model.

    Raises:
        ProfileError: the model hasn't one of its layers.
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
        TypeError: it isn't a sequence of After and Before.
        PassError: one is at an unknown place, is no pass, or has the name of another.
    """
    if not isinstance(passes, (list, tuple)) or not all(isinstance(place, (After, Before)) for place in passes):
        raise TypeError(f"transform(): passes is {passes!r:.60}; give a list such as [After('split_concat', MyPass())]")
    pipeline(passes)
