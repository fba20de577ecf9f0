"""Models without values: their layers, shapes and variables, in no memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import keras
import pytest
from keras.src.backend.common import global_state

from dapple_tf.models import catalogue


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within it, models of images are built without computing any parameter, and not compiled."""
    before = global_state.get_global_attribute("uninitialized_variables")
    with pytest.MonkeyPatch.context() as patch, keras.StatelessScope(initialize_variables=False):
        patch.setattr(catalogue, "_compiled", lambda model: model)  # An optimizer has variables that need values.
        yield
    global_state.set_global_attribute("uninitialized_variables", before)


def parameters(model: keras.Model | keras.layers.Layer, kind: str = "") -> int:
    """Number of trainable parameters whose path ends so."""
    variables = [variable for variable in model.trainable_variables if variable.path.endswith(kind)]
    return sum(math.prod(variable.shape) for variable in variables)
