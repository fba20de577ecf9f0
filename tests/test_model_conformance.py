"""Every model of the registry, in its tiny form: pipelined training gives what plain Keras gives."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from equivalence import TOLERANCE, largest_difference, use_float64, variables_of
from selection import sampled

import dapple_tf as dapple
from dapple_tf.models.registry import MODELS, find_model
from dapple_tf.models.sources import ModelSource

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


def normalizes_batches(model: keras.Model) -> bool:
    """Whether the result depends on how a batch is sliced."""
    return any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers())


def batches(source: ModelSource, model: keras.Model, count: int) -> list[tuple[Any, Any, Any]]:
    """Batches of the model's own data.

    With BatchNormalization each slice holds the same samples, each time in another order: all slices have the
    statistics of the whole batch then (docs/equivalence.md), so that the result has to be that of plain Keras.
    """
    rng, drawn = np.random.default_rng(5), []
    order = np.arange(SAMPLES)
    whole = source.data.example(model, count * SAMPLES)
    for number in range(count):
        if normalizes_batches(model):
            order = np.concatenate([rng.permutation(SLICE) for _ in range(SAMPLES // SLICE)])
        chosen = number * SAMPLES + order
        drawn.append(tuple(None if part is None else _rows(part, chosen) for part in whole))
    return drawn


def _rows(part: Any, chosen: np.ndarray) -> Any:
    return keras.tree.map_structure(lambda array: array[chosen], part)


def middle(model: keras.Model) -> str:
    """The layer where half of the parameters are reached."""
    sizes = np.cumsum([layer.count_params() for layer in model.layers])
    return str(model.layers[int(np.searchsorted(sizes, sizes[-1] / 2))].name)


def train(trainer: Any, given: list[tuple[Any, Any, Any]]) -> list[dict[str, float]]:
    return [trainer.train_on_batch(x, y, sample_weight=weights, return_dict=True) for x, y, weights in given]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(TINY, 2))
def test_two_stages_with_replicas_train_as_plain_keras(name: str) -> None:
    """Logs and all variables after two steps; the optimizer's slots hold the gradients of each."""
    use_float64()
    source = find_model(name)
    plain, own = built(source), built(source)
    given = batches(source, plain, 2)
    plan = dapple.Plan.manual([middle(own)], [[0, 1], [2]], 2, SAMPLES)
    pipelined = dapple.transform(own, dapple.Cluster.local(3, kind="cpu"), plan)
    before = [keras.ops.convert_to_numpy(variable.value) for variable in own.trainable_variables]
    plain.run_eagerly = True  # Two steps take less time than a trace.
    for logs, expected in zip(train(pipelined, given), train(plain, given), strict=True):
        assert logs.keys() == expected.keys()
        for key, value in expected.items():  # Keras' metrics are float32 whatever the model is.
            assert abs(logs[key] - value) <= 2e-5 * max(1.0, abs(value)), f"{key}: {logs[key]} != {value}"
    pipelined.close()
    for variable, value in zip(variables_of(own), variables_of(plain), strict=True):
        difference = largest_difference(variable.value, value.value)
        assert difference <= TOLERANCE["float64"], f"{variable.path} differs by {difference:.3g}"
    changed = [np.any(v.value != value) for v, value in zip(own.trainable_variables, before, strict=True)]
    assert np.mean(changed) > 0.8, "training changed little"  # XLNet's segments matter in texts of two sentences only.
