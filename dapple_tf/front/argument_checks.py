"""Checks of arguments before any work: mistakes are reported in one line."""

from __future__ import annotations

import contextlib

import keras

from dapple_tf.common.keras_private import items_of
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.profile import Profile
from dapple_tf.execution.step_passes import StepPasses, pipeline
from dapple_tf.frontend.batch import declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.functional import cuts_are_safe
from dapple_tf.frontend.variables import VariableTable
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
