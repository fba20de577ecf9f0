"""Every model of the registry, in its tiny form: pipelined training gives what plain Keras gives."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from equivalence import use_float64
from selection import sampled

import dapple_tf as dapple
from dapple_tf.models.registry import MODELS, find_model
from dapple_tf.models.sources import ModelSource
from dapple_tf.tools.evaluation.training_comparison import compare_training
from dapple_tf.tools.evaluation.zoo_models import normalizes_batches

TINY = [name for name in MODELS if name.endswith(":tiny")]

SAMPLES = 16
"""Two micro-batches of 8, of which each of two replicas gets 4."""
SLICE = 4


def built(source: ModelSource) -> keras.Model:
    """The model in the present float type, the same values each time; nothing is dropped, as draws are per slice."""
    keras.utils.set_random_seed(3)
    model = source.build()
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def batches(source: ModelSource, model: keras.Model) -> list[tuple[Any, Any, Any]]:
    """Two batches of the model's own data.

    With BatchNormalization each slice holds the same samples, each time in another order: all slices have the
    statistics of the whole batch then (docs/equivalence.md), so that the result has to be that of plain Keras.
    """
    rng, order, drawn = np.random.default_rng(5), np.arange(SAMPLES), []
    whole = source.data.example(model, 2 * SAMPLES)
    for number in range(2):
        if normalizes_batches(model):
            order = np.concatenate([rng.permutation(SLICE) for _ in range(SAMPLES // SLICE)])
        chosen = number * SAMPLES + order
        rows = keras.tree.map_structure(lambda array, chosen=chosen: None if array is None else array[chosen], whole)
        drawn.append(rows)
    return drawn


def pipelined(model: keras.Model) -> dapple.PipelinedModel:
    """Two stages with half of the parameters each, on two devices and one."""
    sizes = np.cumsum([layer.count_params() for layer in model.layers])
    middle = str(model.layers[int(np.searchsorted(sizes, sizes[-1] / 2))].name)
    plan = dapple.Plan.manual([middle], [[0, 1], [2]], 2, SAMPLES)
    return dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), plan)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(TINY, 2))
def test_two_stages_with_replicas_train_as_plain_keras(name: str) -> None:
    """Logs and all variables after two steps; the optimizer's slots hold the gradients of each."""
    use_float64()
    source = find_model(name)
    comparison = compare_training(lambda: built(source), pipelined, batches(source, built(source)))
    assert comparison.verdict == "equal", comparison
