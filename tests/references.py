"""Plain training of the zoo's models, once in a process for all modules that compare with it."""

from __future__ import annotations

import functools

import keras
from equivalence import Reference
from zoo import ZOO

# One batch size for all cases, so that each model is trained once: never a multiple of the number of micro-batches, nor
# these of the replicas, and enough for 7 micro-batches on 3 replicas.
SAMPLES = 23


def reference(model: str) -> Reference:
    """What plain Keras does with batches of ``SAMPLES`` in the present float type."""
    return _trained(model, keras.backend.floatx())


@functools.cache
def _trained(model: str, floatx: str) -> Reference:
    return Reference.of(ZOO[model], SAMPLES)
