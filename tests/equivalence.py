"""Comparison of pipelined training with plain Keras: the harness of all equivalence tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from zoo import Specimen

import dapple_tf as dapple

# One table for all: relative to the largest value of an array (or to 1, for small ones).
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


def use_float64() -> None:
    """Makes float64 the type of models built from now on; the end of the test undoes it."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def device_lists(replicas: Sequence[int]) -> list[list[int]]:
    """Consecutive device numbers: (3, 1) is [[0, 1, 2], [3]]."""
    starts = np.cumsum([0, *replicas])
    return [list(range(start, start + count)) for start, count in zip(starts, replicas, strict=False)]


def pair(build: Callable[[], keras.Model], seed: int = 3) -> tuple[keras.Model, keras.Model]:
    """Two models with the same initial values and random seeds.

    The second is for plain Keras, which runs it operator by operator: in a few steps that takes less than to trace it.
    """
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(seed)
        models.append(build())
    for own, other in zip(models[0].variables, models[1].variables, strict=True):
        other.assign(own)
    models[1].run_eagerly = True
    return models[0], models[1]


def pipeline(
    model: keras.Model, cuts: Sequence[str], replicas: Sequence[int], micro_batches: int, batch: int, **options: Any
) -> dapple.PipelinedModel:
    """The model as a pipeline on local devices."""
    plan = dapple.Plan.manual(cuts, device_lists(replicas), micro_batches, batch, **options)
    return dapple.transform(model, dapple.Cluster.local(sum(replicas), kind="cpu"), plan)


def largest_difference(own: Any, other: Any) -> float:
    """The largest difference of two arrays, relative to the largest value of the second, but at least to 1."""
    first, second = (np.asarray(array, dtype="float64") for array in (own, other))
    if first.size == 0:
        return 0.0
    return float(np.max(np.abs(first - second)) / max(1.0, float(np.max(np.abs(second)))))


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """All that training changes, metrics apart."""
    return [*model.variables, *model.optimizer.variables]


def assert_same_variables(model: keras.Model, plain: keras.Model, tolerance: float) -> None:
    """Every variable, optimizer slots included."""
    for own, other in zip(variables_of(model), variables_of(plain), strict=True):
        difference = largest_difference(own.value, other.value)
        assert difference <= tolerance, f"{own.path} differs by {difference:.3g}"


def assert_same_variables_after(
    steps: int, pipelined: dapple.PipelinedModel, plain: keras.Model, x: Any, y: Any
) -> None:
    """All variables are equal, as far as float64 goes, after both have trained on a batch so many times."""
    for _ in range(steps):
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(pipelined.model, plain, TOLERANCE["float64"])


def assert_same_training(
    pipelined: dapple.PipelinedModel,
    plain: keras.Model,
    batches: Sequence[tuple[Any, Any, Any]],
    *,
    tolerance: float | None = None,
) -> None:
    """Logs of every step, and all variables and slots at the end."""
    tolerance = TOLERANCE[keras.backend.floatx()] if tolerance is None else tolerance
    before = [np.asarray(variable.value) for variable in pipelined.model.trainable_variables]
    for x, y, weights in batches:
        own = pipelined.train_on_batch(x, y, sample_weight=weights, return_dict=True)
        other = plain.train_on_batch(x, y, sample_weight=weights, return_dict=True)
        assert own.keys() == other.keys()
        for name, value in other.items():
            # Keras' metrics are float32 whatever the model is.
            assert abs(own[name] - value) <= max(tolerance, 2e-5) * max(1.0, abs(value)), (
                f"{name}: {own[name]} != {value}"
            )
    pipelined.sync()
    assert_same_variables(pipelined.model, plain, tolerance)
    after = [np.asarray(variable.value) for variable in pipelined.model.trainable_variables]
    assert any(np.any(a != b) for a, b in zip(before, after, strict=True)), "training changed nothing"


def assert_trains_as_keras(
    build: Callable[[], keras.Model],
    cuts: Sequence[str],
    replicas: Sequence[int],
    micro_batches: int,
    batches: Sequence[tuple[Any, Any, Any]],
    **options: Any,
) -> None:
    """A pipeline of a model, for batches of the first one's size, trains as plain Keras does in float64."""
    use_float64()
    model, plain = pair(build)
    samples = len(keras.tree.flatten(batches[0][0])[0])
    assert_same_training(pipeline(model, cuts, replicas, micro_batches, samples, **options), plain, batches)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What plain Keras did in three steps, the last of which has a smaller batch.

    Attributes:
        batches: what it was given.
        logs: of each step.
        variables: values after each step.
    """

    batches: list[tuple[Any, Any, Any]]
    logs: list[dict[str, float]]
    variables: list[list[np.ndarray]]

    @classmethod
    def of(cls, specimen: Specimen, samples: int) -> Reference:
        """Trains a model of the zoo."""
        keras.utils.set_random_seed(3)
        model = specimen.build()
        model.run_eagerly = True  # Three steps of two sizes take less than to trace them.
        rng = np.random.default_rng(1)
        batches = [specimen.batch(rng, size) for size in (samples, samples, samples // 2 - 1)]
        logs, variables = [], []
        for x, y, weights in batches:
            logs.append(model.train_on_batch(x, y, sample_weight=weights, return_dict=True))
            variables.append([np.asarray(variable.value).copy() for variable in variables_of(model)])
        return cls(batches, logs, variables)


def assert_equal_training(
    specimen: Specimen,
    cluster: dapple.Cluster,
    plan: dapple.Plan,
    plain: Reference,
    *,
    steps: int = 3,
) -> None:
    """Trains a model of the zoo by a plan and compares logs and every variable and slot.

    Two steps are of whole batches; a third, of a smaller one, takes as long to prepare again.
    """
    keras.utils.set_random_seed(3)
    model = specimen.build()
    pipelined = dapple.transform(model, cluster, plan)
    for (x, y, weights), expected in zip(plain.batches[:steps], plain.logs[:steps], strict=True):
        logs = pipelined.train_on_batch(x, y, sample_weight=weights, return_dict=True)
        assert logs == pytest.approx(expected, rel=2e-5, abs=2e-5), "Keras' metrics are float32 whatever the model is"
    pipelined.close()
    for variable, value in zip(variables_of(model), plain.variables[steps - 1], strict=True):
        difference = largest_difference(variable.value, value)
        assert difference <= TOLERANCE["float64"], f"{variable.path} differs by {difference:.3g}"
