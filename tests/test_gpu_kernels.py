"""Steps on GPUs, told without one: by the kernels that this TensorFlow has."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf
from models_for_tests import Computed
from step_programs import of_model

import dapple_tf as dapple
from dapple_tf.models import gpt
from graph_passes.analysis.device_kernels import (
    MOVED,
    ON_CPU,
    REFUSED,
    TO_HOST,
    UNORDERED,
    UNPLACED,
    gpu_report,
)
layers = keras.layers

GPUS = dapple.Cluster(
    tuple(
        dapple.Device(f"/job:worker/replica:0/task:{number // 2}/device:GPU:{number % 2}", number // 2, 2**34)
        for number in range(4)
    ),
    real=False,
)
"""Two workers with two GPUs each, which don't exist."""


def compiled(inputs: Any, outputs: Any, optimizer: Any = "adam", loss: Any = "mse", **options: Any) -> keras.Model:
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss, **options)
    return model


def small_gpt(**options: Any) -> keras.Model:
    model = gpt.gpt_tiny(sequence=8, vocabulary=16, width=8, dropout=0.1)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def convolutions(synchronized: bool = False, **options: Any) -> keras.Model:
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", name="stem")(image)
    for number in range(2):
        y = layers.BatchNormalization(synchronized=synchronized, name=f"norm_{number}")(x)
        y = layers.Conv2D(4, 3, padding="same", name=f"conv_{number}")(layers.ReLU()(y))
        x = layers.Add(name=f"block_{number}")([x, y])
    pooled = layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(image, layers.Dense(3, name="logits")(pooled), keras.optimizers.SGD(0.1, momentum=0.9), loss)


def recurrent(kind: type[layers.Layer], masked: bool) -> keras.Model:
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=masked, name="embedding")(words)
    x = kind(4, return_sequences=True, name="first")(x)
    return compiled(words, layers.Dense(1, name="logit")(kind(4, name="second")(x)))


def recommendation() -> keras.Model:
    ids = keras.Input((2,), dtype="int64"), keras.Input((3,), dtype="int32")
    tables = [layers.Embedding(30, 4, name=f"table_{number}")(own) for number, own in enumerate(ids)]
    x = layers.Concatenate(axis=1, name="joined")(tables)
    x = layers.Dense(4, activation="relu", name="hidden")(layers.Flatten()(x))
    y = layers.Dense(1, activation="sigmoid", name="click")(x)
    return compiled(ids, y, keras.optimizers.Adagrad(0.1), "binary_crossentropy", metrics=["AUC"])


def routed() -> keras.Model:
    x = keras.Input((4,))
    h = layers.Dense(4, name="first")(x)
    h, best, positive = Computed(lambda t: (t * 1.0, keras.ops.argmax(t, axis=-1), t > 0), name="route")(h)
    chosen = Computed(lambda t, b, p: tf.where(p, t, 0.0) * tf.one_hot(b, 4), name="chosen")(h, best, positive)
    return compiled(x, layers.Dense(1, name="last")(chosen))


class Counting(layers.Layer):
    """Counts its calls in an int32."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(2,), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add([1, 1])
        return x


def counted() -> keras.Model:
    x = keras.Input((4,))
    return compiled(x, layers.Dense(2, name="last")(Counting(name="counting")(layers.Dense(3, name="first")(x))))


def plan(cut: str, devices: Sequence[Sequence[int]], schedule: str = "dapple_a", **options: Any) -> dapple.Plan:
    return dapple.Plan.manual([cut], devices, 2, 8, schedule, **options)


C = {
    "gpt": (small_gpt, plan("block_0", [[0], [1]])),
    "zb": (small_gpt, plan("block_0", [[0], [1]], "zero_bubble")),
    "recompute": (small_gpt, plan("block_0", [[0], [1]], recompute="boundary")),
    "slot shards": (small_gpt, plan("block_0", [[0, 1], [2, 3]], optimizer_shards=True)),
    "jit": (small_gpt, plan("block_0", [[0, 1], [2, 3]], jit_compile=True)),
    "mixed": (small_gpt, plan("block_0", [[0, 1], [2, 3]])),
    "placed": (routed, dapple.Plan.by_operators(2, 8)),
    "resnet": (convolutions, plan("block_0", [[0], [1]])),
    "syncbn": (lambda: convolutions(True), plan("block_0", [[0, 1], [2, 3]])),
    "syncbn same": (lambda: convolutions(True), plan("block_0", [[1, 2], [1, 2]])),
    "lstm": (lambda: recurrent(layers.LSTM, True), plan("first", [[0], [1]])),
    "gru": (lambda: recurrent(layers.GRU, False), plan("first", [[0], [1]])),
    "rec": (recommendation, plan("joined", [[0, 1], [2]])),
    "routed": (routed, plan("route", [[0], [1, 2]])),
    "routed back": (routed, plan("route", [[0, 1], [2]])),
    "int32": (counted, plan("counting", [[0], [1, 2]])),
}

if __name__ == "__main__":
    import sys
    names=sys.argv[1:] or C
    for name in names:
        make, own = C[name]
        t0=time.time()
        if name == "mixed": keras.config.set_dtype_policy("mixed_float16")
        model = make()
        if name == "mixed": keras.config.set_dtype_policy("float32")
        t=time.time()
        p = of_model(model, own, GPUS)
        t1=time.time()
        r = gpu_report(p.graph)
        t2=time.time()
        print(f"{name}: model {t-t0:.1f} step {t1-t:.1f} check {t2-t1:.2f}", len(p.graph.node), {k: r.of(k) for k in (REFUSED, MOVED, ON_CPU, UNPLACED, UNORDERED) if r.of(k)}, r.by_part(TO_HOST), flush=True)
        if "-v" in sys.argv: pass
