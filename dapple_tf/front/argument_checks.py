"""Checks of arguments before any work: mistakes are reported in one line."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence

import keras

from dapple_tf.common.keras_private import functional_graph, items_of, nodes_in_order
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.plan import FD_DPS, Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.execution.step_passes import StepPasses, pipeline
from dapple_tf.frontend.batch import declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.operators.op_costs import OperatorCosts
from graph_passes.analysis.slice_shapes import LengthsUnknownError
from graph_passes.ir.program import LayerCall
from graph_passes.pass_manager import After, Before, run_passes
from graph_passes.passes.assign_stages import find_call


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


def check_combination(
    cluster: Cluster,
    plan: Plan | None,
    global_batch_size: int | None,
    placement: str | None,
    operator_costs: OperatorCosts | None,
    by_trial: bool,
    planning: Mapping[str, object],
) -> None:
    """Checks that each of ``transform``'s arguments has a meaning beside the others.

    Raises:
        PlanError: a value is unknown, missing, or contradicts another.
        TypeError: an argument means nothing beside the others.
    """
    places = placement == FD_DPS or (plan is not None and plan.places_operators)
    names = ", ".join(planning)
    if placement not in (None, FD_DPS):
        raise PlanError(f"unknown placement {placement!r}; use {FD_DPS!r}, or leave it out")
    if plan is None and global_batch_size is None:
        raise PlanError("transform() got neither a plan nor a global_batch_size; give one of them")
    if not isinstance(by_trial, bool):
        raise TypeError(f"by_trial is {by_trial!r}; give True or False")
    if by_trial and (plan is not None or places):
        why = "got a plan" if plan is not None else f"places all operators by placement={FD_DPS!r}"
        raise TypeError(f"transform() {why}, so that there are no plans to try; leave by_trial out")
    if planning and places:
        raise TypeError(
            f"transform() places operators, for which nothing is searched that {names} would be about; leave them out"
        )
    if operator_costs is not None and not places:
        raise TypeError(
            f"transform() got operator_costs, which mean nothing unless operators are placed; add "
            f"placement={FD_DPS!r}, or leave them out"
        )
    if plan is None and not places and not cluster.real:
        raise PlanError(
            "this cluster is a description without real devices: plan for it with dapple_tf.plan(), and transform on a "
            "real one"
        )
    if planning and plan is not None:
        raise TypeError(f"transform() got a plan, so that {names} mean nothing; leave them out")
    if plan is not None and global_batch_size not in (None, plan.global_batch_size):
        raise PlanError(
            f"transform() got global_batch_size={global_batch_size} and a plan for {plan.global_batch_size}; leave "
            f"global_batch_size out, or make a plan for it"
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


def check_cuts(model: keras.Model, passes: StepPasses) -> None:
    """Finds errors in cuts before there is data; the model is traced only if its layers don't show them.

    For a model without declared inputs it finds unknown names only. Errors that depend on lengths which the model
    leaves open show with the first batch.

    Args:
        model: a built model.
        passes: the passes of the plan with the cuts.

    Raises:
        CaptureError: the model can't be traced.
        PassError: a cut names no layer, leaves a stage empty, or a tensor can't be sent over it.
    """
    cuts = passes.plan.cuts
    if cuts_are_safe(model, cuts):
        return
    spec = declared_spec(model)
    if spec is not None:
        captured = capture(model, VariableTable(model), Mode.PREDICT, spec, gpus=passes.gpus)
        with contextlib.suppress(LengthsUnknownError):
            run_passes(captured, [passes.assign_stages()])
        return
    names = dict.fromkeys(layer.name for layer in items_of(model) if layer is not model)
    for cut in cuts:
        path, _, _ = cut.partition("#")
        if path.rpartition("/")[2] not in names:
            find_call(path, [LayerCall(name, 0, 1) for name in names])


def cuts_are_safe(model: keras.Model, cuts: Sequence[str]) -> bool:
    """Whether a functional model can certainly be cut after these layers, without data or a trace.

    True if every cut is the plain name of a layer of the model itself, called once and unique in all nested layers, the
    cuts are in calling order, every stage has a layer with weights, and every tensor that crosses a cut has the batch
    as its first and only unknown axis. All other cuts need a trace. Layers whose number of rows depends on the data
    show when the first batch is prepared.
    """
    graph = functional_graph(model)
    if graph is None:
        return False
    operations = {id(item): item for item in items_of(model) if item is not model}
    names = [operation.name for operation in operations.values()]
    calls = [node for node in nodes_in_order(graph) if node.operation and not node.is_input]
    order = {node.operation.name: position for position, node in enumerate(calls)}
    if any(names.count(cut) != 1 or cut not in order for cut in cuts):
        return False
    if any(sum(node.operation.name == cut for node in calls) != 1 for cut in cuts):
        return False
    starts = [0, *(order[cut] + 1 for cut in cuts), len(calls)]
    stages = [range(start, stop) for start, stop in itertools.pairwise(starts)]
    if not all(any(getattr(calls[position].operation, "weights", ()) for position in stage) for stage in stages):
        return False
    stage_of = {position: number for number, stage in enumerate(stages) for position in stage}
    maker = {id(tensor): stage_of[position] for position, node in enumerate(calls) for tensor in node.outputs}
    return all(
        tensor.shape[:1] == (None,) and None not in tensor.shape[1:]
        for position, node in enumerate(calls)
        for tensor in node.input_tensors
        if maker.get(id(tensor), stage_of[position]) != stage_of[position]
    )
