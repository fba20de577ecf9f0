"""Plain training of the zoo's models, once for all modules and processes that compare with it."""

from __future__ import annotations

import functools
import os
import pathlib
import pickle

import keras
from equivalence import Reference
from zoo import ZOO

# One batch size for all cases, so that each model is trained once: never a multiple of the number of micro-batches, nor
# these of the replicas, and enough for 7 micro-batches on 3 replicas.
SAMPLES = 23

FOLDER = "DAPPLE_TEST_REFERENCES"
"""Environment variable: where the processes of a test run leave what they have trained for each other."""


def reference(model: str) -> Reference:
    """What plain Keras does with batches of ``SAMPLES`` in the present float type."""
    return _trained(model, keras.config.dtype_policy().name)


@functools.cache
def _trained(model: str, policy: str) -> Reference:
    folder = os.environ.get(FOLDER)
    if folder is None:
        return Reference.of(ZOO[model], SAMPLES)
    path = pathlib.Path(folder) / f"{model}-{policy}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    trained = Reference.of(ZOO[model], SAMPLES)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(pickle.dumps(trained))
    unfinished.rename(path)
    return trained
