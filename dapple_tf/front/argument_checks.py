"""Checks of ``transform``'s arguments before any work: mistakes are reported in one line."""

from __future__ import annotations

import keras

from dapple_tf.common.keras_private import items_of
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.profile import Profile
from dapple_tf.execution.step_passes import pipeline
from graph_passes.pass_manager import After, Before


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
