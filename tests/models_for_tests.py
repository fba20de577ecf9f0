"""Small models, and pairs of a plain and a pipelined one, for the tests of the Keras front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple

layers = keras.layers

# What pipelined.fit and the like put into a model meanwhile, and what capture puts into its layers.
ATTACHED = (
    *("train_function", "test_function", "predict_function"),
    *("make_train_function", "make_test_function", "make_predict_function"),
    *("get_weights", "set_weights", "save", "save_weights", "load_weights", "export", "call"),
)


class Computed(layers.Layer):
    """A function of its inputs."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        super().__init__(name=name)
        self.function = function

    def call(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def classifier(*own: layers.Layer, name: str = "classifier", kind: Any = keras.Model, **options: Any) -> keras.Model:
    """4 features -> first -> the given layers -> second -> logits of 3 classes; options are those of ``compile``."""
    features = keras.Input((4,))
    x = layers.Dense(6, activation="tanh", name="first")(features)
    for layer in (*own, layers.Dense(5, activation="tanh", name="second")):
        x = layer(x)
    model: keras.Model = kind(features, layers.Dense(3, name="logits")(x), name=name)
    given = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    model.compile(**(given | options))
    return model


def with_layer(*own: Callable[[], keras.layers.Layer]) -> keras.Model:
    """4 features -> first -> the first layer -> second -> the second layer, if there is one -> last."""
    features = keras.Input((4,))
    x = own[0]()(layers.Dense(4, name="first")(features))
    x = layers.Dense(4, name="second")(x)
    model = keras.Model(features, layers.Dense(2, name="last")(own[1]()(x) if own[1:] else x))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def plan(**changes: Any) -> dapple.Plan:
    """Two stages, the second with two replicas; 7 samples make micro-batches of 4 and 3, slices of 2, 2, 2 and 1."""
    given: dict[str, Any] = {
        "cuts": ["first"],
        "devices": [[0], [1, 2]],
        "micro_batches": 2,
        "global_batch_size": 7,
    }
    return dapple.Plan.manual(**(given | changes))


def transform(model: keras.Model, own_plan: dapple.Plan | None = None, **options: Any) -> dapple.PipelinedModel:
    """A pipelined model on three logical CPU devices."""
    return dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), own_plan or plan(), **options)


def samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, classes and weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4)).astype("float32")
    return x, rng.integers(0, 3, size=count), rng.uniform(0.5, 2, size=count).astype("float32")


def randomised(model: keras.Model, scale: float = 0.5) -> keras.Model:
    """Biases and norms start at 0 and 1, which would hide that one of them is lost or left out."""
    generator = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(scale=scale, size=variable.shape))
    return model


def variables(model: keras.Model) -> list[keras.Variable]:
    """Those of the model and its optimizer."""
    model.optimizer.build(model.trainable_variables)
    return [*model.variables, *model.optimizer.variables]


def values(model: keras.Model) -> list[np.ndarray]:
    """Copies of the values of ``variables``."""
    return [variable.numpy() for variable in variables(model)]


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    """The same structure, and numbers that agree up to rounding."""
    keras.tree.assert_same_structure(ours, theirs)
    for own, other in zip(keras.tree.flatten(ours), keras.tree.flatten(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(other), rtol=tolerance, atol=tolerance)


def assert_same_values(one: keras.Model, other: keras.Model) -> None:
    """The same variables of model and optimizer, up to rounding."""
    for own, its, variable in zip(values(one), values(other), variables(one), strict=True):
        np.testing.assert_allclose(own, its, rtol=1e-5, atol=2e-6, err_msg=variable.path)


class Pair:
    """A plain model and one of the same values that is pipelined."""

    def __init__(self, build: Callable[[], keras.Model], own_plan: dapple.Plan | None = None, **options: Any) -> None:
        self.plain, self.model = build(), build()
        self.plain.run_eagerly = True  # A few batches take less than to trace it.
        self._initial = values(self.plain)
        self.pipelined = transform(self.model, own_plan, **options)
        self.reset()

    def reset(self) -> None:
        """Gives both models the initial values."""
        for model in (self.plain, self.model):
            model._initial_epoch = None  # Left behind by BackupAndRestore.
            for variable, value in zip(variables(model), self._initial, strict=True):
                variable.assign(value)
        self.pipelined.load()

    def fit(self, *data: Any, callbacks: Callable[[], list[Any]] | None = None, **arguments: Any) -> dict[str, Any]:
        """Fits both and compares History and values; callables make data and callbacks for each.

        Returns the History.
        """
        histories = []
        for model in (self.plain, self.pipelined):
            own = {key: value() if callable(value) else value for key, value in arguments.items()}
            own |= {"batch_size": 7} if model is self.plain else {}
            if callbacks is not None:
                own["callbacks"] = callbacks()
            parts = [part() if callable(part) else part for part in data]
            histories.append(model.fit(*parts, shuffle=False, verbose=0, **own).history)
        assert histories[0].keys() == histories[1].keys()
        assert_close(histories[1], histories[0])
        assert_same_values(self.model, self.plain)
        return histories[1]
