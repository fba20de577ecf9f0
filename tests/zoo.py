"""Tiny models for equivalence tests: each kind of structure that a plan can cut, with data for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

layers = keras.layers


@dataclasses.dataclass(frozen=True)
class Specimen:
    """A kind of model: how to build and compile it, where it can be cut into 2, 3 and 4 stages, and batches for it."""

    build: Callable[[], keras.Model]
    cuts: tuple[str, str, str]
    batch: Callable[[np.random.Generator, int], tuple[Any, Any, Any]]

    def cuts_for(self, stages: int) -> list[str]:
        """Cuts for 1 to 4 stages."""
        return {1: [], 2: [self.cuts[1]], 3: [self.cuts[0], self.cuts[2]], 4: list(self.cuts)}[stages]


def cnn() -> keras.Model:
    image = keras.Input((6, 6, 2))
    x = layers.Conv2D(3, 3, activation="tanh", padding="same", name="conv_0")(image)
    x = layers.MaxPooling2D(2, name="pool")(x)
    x = layers.Conv2D(4, 2, activation="relu", name="conv_1")(x)
    x = layers.GroupNormalization(2, name="norm")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(5, activation="gelu", name="hidden", kernel_regularizer=keras.regularizers.L2(0.01))(x)
    model = keras.Model(image, layers.Dense(3, name="logits")(x))
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, global_clipnorm=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _attention_block(x: Any, name: str) -> Any:
    attended = layers.LayerNormalization(name=f"{name}_norm")(x)
    attended = layers.MultiHeadAttention(2, 2, name=f"{name}_attention")(attended, attended, use_causal_mask=True)
    x = layers.Add(name=f"{name}_residual")([x, attended])
    y = layers.Dense(6, activation="gelu", name=f"{name}_wide")(layers.LayerNormalization(name=f"{name}_norm_2")(x))
    return layers.Add(name=name)([x, layers.Dense(4, name=f"{name}_narrow")(y)])


def transformer() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(7, 4, name="embedding")(tokens)
    for index in range(2):
        x = _attention_block(x, f"block_{index}")
    model = keras.Model(tokens, layers.Dense(7, name="logits")(x))
    model.compile(
        keras.optimizers.AdamW(1e-2, weight_decay=0.01, global_clipnorm=0.5, epsilon=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def lstm() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    x = layers.Embedding(6, 3, mask_zero=True, name="embedding")(tokens)
    backward = layers.GRU(3, return_sequences=True, go_backwards=True, name="gru")
    lstm = layers.LSTM(3, return_sequences=True, name="lstm")
    x = layers.Bidirectional(lstm, backward_layer=backward, name="both")(x)
    x = layers.TimeDistributed(layers.Dense(3, activation="tanh"), name="mixed")(x)
    model = keras.Model(tokens, layers.Dense(6, name="logits")(x))
    model.compile(
        keras.optimizers.RMSprop(1e-2, epsilon=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["sparse_categorical_crossentropy"],
    )
    return model


def branches() -> keras.Model:
    """Two branches, and a skip connection that jumps over everything between."""
    features = keras.Input((4,))
    stem = layers.Dense(6, activation="tanh", name="stem")(features)
    left = layers.Dense(6, activation="gelu", name="left_0")(stem)
    right = layers.Dense(3, activation="sigmoid", name="right_0", activity_regularizer=keras.regularizers.L2(0.1))(stem)
    left = layers.Dense(4, activation="gelu", name="left_1")(left)
    joined = layers.Concatenate(name="joined")([left, right])
    joined = layers.Dense(6, activation="tanh", name="after")(joined)
    x = layers.Add(name="long_skip")([joined, stem])
    model = keras.Model(features, layers.Dense(2, name="outputs")(x))
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=0.1, epsilon=1e-3), "mse", metrics=["mae"])
    return model


class TiedLogits(layers.Layer):
    """Logits from the embedding's own table."""

    def __init__(self, embedding: layers.Embedding, **options: Any) -> None:
        super().__init__(**options)
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


def tied() -> keras.Model:
    """An embedding that the first and the last stage use, and a layer that is called twice."""
    tokens = keras.Input((4,), dtype="int32")
    embedding = layers.Embedding(6, 4, name="embedding")
    shared = layers.Dense(4, activation="tanh", name="shared")
    x = shared(embedding(tokens))
    x = layers.Dense(4, activation="gelu", name="middle")(x)
    x = shared(x)
    x = layers.Dense(4, name="last")(x)
    model = keras.Model(tokens, TiedLogits(embedding, name="logits")(x))
    model.compile(
        keras.optimizers.Adagrad(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
    )
    return model


def multi_output() -> keras.Model:
    """Dict inputs and outputs, an auxiliary head early on, loss weights, sample weights."""
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    x = layers.Dense(5, activation="tanh", name="from_a")(inputs["a"])
    early = layers.Dense(1, name="early")(x)
    x = layers.Concatenate(name="joined")([x, inputs["b"]])
    x = layers.Dense(5, activation="tanh", name="middle")(x)
    x = layers.Dense(4, activation="gelu", name="late_hidden")(x)
    late = layers.Dense(3, activation="softmax", name="late")(x)
    model = keras.Model(inputs, {"early": early, "late": late})
    model.compile(
        keras.optimizers.Nadam(1e-2, epsilon=1e-3),
        loss={
            "early": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            "late": keras.losses.CategoricalCrossentropy(),
        },
        loss_weights={"early": 0.3, "late": 1.7},
        metrics={"late": ["accuracy"]},
        weighted_metrics={"early": ["mae"]},
    )
    return model


def _floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(keras.backend.floatx())


def _tokens(vocabulary: int, length: int, *, padded: bool = False) -> Callable[[np.random.Generator, int], Any]:
    def batch(rng: np.random.Generator, samples: int) -> tuple[Any, Any, Any]:
        x = rng.integers(1, vocabulary, size=(samples, length)).astype("int32")
        if padded:
            x[np.arange(length) >= rng.integers(1, length + 1, size=(samples, 1))] = 0
        return x, rng.integers(0, vocabulary, size=(samples, length)).astype("int32"), None

    return batch


def _multi_output_batch(rng: np.random.Generator, samples: int) -> tuple[Any, Any, Any]:
    x = {"a": _floats(rng, samples, 3), "b": _floats(rng, samples, 2)}
    y = {"early": _floats(rng, samples, 1), "late": np.eye(3)[rng.integers(0, 3, samples)]}
    weights = {name: rng.uniform(0.1, 2.0, samples).astype(keras.backend.floatx()) for name in y}
    return x, y, weights


def _cnn_batch(rng: np.random.Generator, samples: int) -> tuple[Any, Any, Any]:
    return _floats(rng, samples, 6, 6, 2), rng.integers(0, 3, samples), rng.uniform(0.1, 2.0, samples)


ZOO: dict[str, Specimen] = {
    "cnn": Specimen(cnn, ("conv_0", "conv_1", "flatten"), _cnn_batch),
    "transformer": Specimen(transformer, ("embedding", "block_0_residual", "block_0"), _tokens(7, 5)),
    "lstm": Specimen(lstm, ("embedding", "both", "mixed"), _tokens(6, 5, padded=True)),
    "branches": Specimen(
        branches, ("stem", "left_1", "after"), lambda rng, n: (_floats(rng, n, 4), _floats(rng, n, 2), None)
    ),
    "tied": Specimen(tied, ("embedding", "middle", "last"), _tokens(6, 4)),
    "multi_output": Specimen(multi_output, ("from_a", "middle", "late_hidden"), _multi_output_batch),
}
