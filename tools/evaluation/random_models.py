"""Random models, plans and batches, trained as pipelines and with plain Keras: a search for differences.

A seed gives a model of some blocks (dense, convolution with strides, attention, recurrence, layers that are used twice,
skip connections, lookups by the batch and by constants, penalties that are means or sums), whose length may be open,
a loss, an optimizer, a plan, and the training loop's actions between steps: nothing, or reading and assigning variables
as callbacks do. Blocks are drawn one after another with each other's tensors as inputs; the last layer of block k is
named ``block_k``, so that any plan may cut there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.describe.plan_text import recompute_text
from dapple_tf.keras_private import learning_rate_of
from dapple_tf.tools.evaluation.training_comparison import Batch, Comparison, compare_training

layers, ops = keras.layers, keras.ops

_STEPS = 3
_CLASSES = 3
_VOCABULARY = 7
_SCHEDULES = ("gpipe", "dapple_a", "dapple_b", "fast_forward", "fast_forward_a", "zb_h1", "zb_h2", "zero_bubble")
_ACTIVATIONS = ("tanh", "gelu", "sigmoid", "softplus", "swish")


class AddPositions(keras.layers.Layer):
    """Adds a row of a table for each place along axis 1: places don't come from the batch."""

    def __init__(self, places: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.table = layers.Embedding(places, width)

    def call(self, x: Any) -> Any:
        """``x``, [batch, places, width], with a row added at each place."""
        return x + self.table(ops.arange(ops.shape(x)[1]))


class AddConstantRows(keras.layers.Layer):
    """Adds the mean over rows of a table, some of which are looked up twice."""

    def __init__(self, rows: int, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.table = layers.Embedding(rows, width)

    def call(self, x: Any) -> Any:
        """``x``, [..., width], plus the mean."""
        rows = self.table(np.array([0, 2, 2, 1]))
        return x + ops.mean(rows, axis=0)


class LookUpBothWays(keras.layers.Layer):
    """One table, looked up by the batch's tokens and by a constant."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.table = layers.Embedding(_VOCABULARY, width)

    def call(self, tokens: Any) -> Any:
        """[batch, length] -> [batch, length, width]."""
        return self.table(tokens) + self.table(np.array([1]))


class AddPenalty(keras.layers.Layer):
    """Adds a loss of what it passes on: a mean over the samples, or (as few do on purpose) a sum."""

    def __init__(self, mean: bool, factor: float, **options: Any) -> None:
        super().__init__(**options)
        self.mean, self.factor = mean, factor

    def call(self, x: Any) -> Any:
        """``x`` itself."""
        squares = ops.square(x)
        self.add_loss(self.factor * (ops.mean(squares) if self.mean else ops.sum(squares)))
        return x


@dataclasses.dataclass(frozen=True)
class Draw:
    """A model to train.

    Attributes:
        about: blocks, loss, optimizer and plan, in a line.
        build: function that returns the compiled model; the same values each time.
        plan: its plan.
        batches: one batch for each step.
        between: name of the training loop's action after each step, see `BETWEEN`.
    """

    about: str
    build: Callable[[], keras.Model]
    plan: dapple.Plan
    batches: tuple[Batch, ...]
    between: str


def compare_draw(seed: int) -> tuple[str, Comparison]:
    """Trains a random model both ways; returns its description, and the comparison.

    The float type must be float64.
    """
    drawn = draw(seed)
    devices = max(device for stage in drawn.plan.devices for device in stage) + 1
    comparison = compare_training(
        drawn.build,
        lambda model: dapple.transform(model, dapple.Cluster.local(devices, kind="cpu"), drawn.plan),
        drawn.batches,
        train=functools.partial(_train, drawn.between),
    )
    return drawn.about, comparison


def draw(seed: int) -> Draw:
    """Returns the model, plan and batches of a seed."""
    rng = np.random.default_rng(seed)
    chain = Chain(rng)
    optimizer = str(rng.choice(list(_OPTIMIZERS)))
    between = str(rng.choice([*BETWEEN, "nothing", "nothing"]))
    stages = int(rng.integers(1, min(3, len(chain.blocks)) + 1))
    cuts = sorted(rng.choice(len(chain.blocks) - 1, size=stages - 1, replace=False).tolist()) if stages > 1 else []
    replicas = [int(rng.integers(1, 3)) for _ in range(stages)]
    starts = np.cumsum([0, *replicas])
    micro_batches = int(rng.integers(1, 5))
    samples = int(rng.integers(micro_batches * 2, micro_batches * 3 + 3))
    plan = dapple.Plan.manual(
        [f"block_{cut}" for cut in cuts],
        [list(range(start, start + count)) for start, count in zip(starts, replicas, strict=False)],
        micro_batches,
        samples,
        str(rng.choice(_SCHEDULES)),
        recompute=rng.choice(["none", "none", "boundary", "min_cut"], stages).tolist(),
    )
    sizes = [samples, max(1, samples // 2), samples]
    data = tuple(chain.batch(rng, size) for size in sizes[:_STEPS])

    def build() -> keras.Model:
        keras.utils.set_random_seed(seed)
        model = chain.build()
        noise = np.random.default_rng(seed)
        for variable in model.trainable_variables:
            variable.assign(variable.numpy() + noise.normal(scale=0.1, size=variable.shape))
        model.compile(_OPTIMIZERS[optimizer](), chain.losses(), jit_compile=False)
        return model

    about = (
        f"{chain.form}: {', '.join(chain.blocks)}; {chain.loss}; {optimizer}; stages {'+'.join(plan.cuts) or 'one'}, "
        f"replicas {':'.join(map(str, replicas))}, M = {micro_batches} of {samples}, {plan.schedule}, "
        f"recompute {recompute_text(plan)}; between: {between}"
    )
    return Draw(about, build, plan, data, between)


# ---- models


class Chain:
    """Blocks, drawn one after another; `build` makes the same model each time."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.form = str(rng.choice(["vector", "sequence", "tokens", "image"]))
        self.open = bool(rng.integers(2)) and self.form in ("sequence", "tokens")
        self.length = int(rng.integers(4, 8))
        self.width = int(rng.integers(2, 5)) * 2
        self.masked = self.form == "tokens" and bool(rng.integers(2))
        self.second_head = bool(rng.integers(3) == 0)
        self.loss = str(rng.choice(list(_LOSSES)))
        count = int(rng.integers(3, 7))
        kinds = {"vector": _VECTOR, "image": _IMAGE}.get(self.form, _SEQUENCE)
        self.blocks = [str(rng.choice(list(kinds))) for _ in range(count)]
        self.seeds = rng.integers(0, 2**31, size=count).tolist()
        self.kinds = kinds

    def build(self) -> keras.Model:
        """Builds the model, not compiled."""
        inputs, x = self._inputs()
        early = None
        for number, (kind, seed) in enumerate(zip(self.blocks, self.seeds, strict=True)):
            x = self.kinds[kind](x, f"block_{number}", np.random.default_rng(seed))
            early = x if early is None else early
        outputs = [layers.Dense(_CLASSES, name="head")(self._pooled(x, "pool"))]
        if self.second_head:
            outputs.append(layers.Dense(_CLASSES, name="early_head")(self._pooled(early, "early_pool")))
        return keras.Model(inputs, outputs if self.second_head else outputs[0])

    def losses(self) -> Any:
        """Returns the losses to compile the model with."""
        return [_LOSSES[self.loss]() for _ in range(2)] if self.second_head else _LOSSES[self.loss]()

    def batch(self, rng: np.random.Generator, samples: int) -> Batch:
        """Returns inputs, labels and sample weights, with another length each time if it is open."""
        length = int(rng.integers(4, 9)) if self.open else self.length
        if self.form == "tokens":
            x = rng.integers(0, _VOCABULARY, size=(samples, length)).astype("int32")
            x[:, 0] = rng.integers(1, _VOCABULARY, size=samples)  # No sample is masked completely.
        else:
            shape = {"vector": (self.width,), "sequence": (length, self.width), "image": (8, 8, 2)}[self.form]
            x = rng.normal(size=(samples, *shape))
        integers = self.loss == "classes"

        def labels() -> Any:
            return rng.integers(0, _CLASSES, samples) if integers else rng.normal(size=(samples, _CLASSES))

        weights = rng.uniform(0.5, 2.0, size=samples) if self.loss in ("mse", "classes") and rng.integers(2) else None
        if not self.second_head:
            return x, labels(), weights
        return x, [labels(), labels()], None if weights is None else [weights, weights[::-1].copy()]

    def _inputs(self) -> tuple[Any, Any]:
        length = None if self.open else self.length
        if self.form == "tokens":
            tokens = keras.Input((length,), dtype="int32")
            if self.masked:
                return tokens, layers.Embedding(_VOCABULARY, self.width, mask_zero=True, name="embedding")(tokens)
            return tokens, LookUpBothWays(self.width, name="embedding")(tokens)
        shape = {"vector": (self.width,), "sequence": (length, self.width), "image": (8, 8, 2)}[self.form]
        inputs = keras.Input(shape)
        return inputs, inputs

    def _pooled(self, x: Any, name: str) -> Any:
        if len(x.shape) == 4:
            return layers.GlobalAveragePooling2D(name=name)(x)
        return layers.GlobalAveragePooling1D(name=name)(x) if len(x.shape) == 3 else x


Block = Callable[[Any, str, np.random.Generator], Any]
"""(tensor, name of the last layer, numbers to draw from) -> tensor."""


def _activation(rng: np.random.Generator) -> str:
    return str(rng.choice(_ACTIVATIONS))


def _dense(x: Any, name: str, rng: np.random.Generator) -> Any:
    penalty = keras.regularizers.L2(0.01) if rng.integers(2) else None
    return layers.Dense(x.shape[-1], _activation(rng), kernel_regularizer=penalty, name=name)(x)


def _wide(x: Any, name: str, rng: np.random.Generator) -> Any:
    hidden = layers.Dense(2 * x.shape[-1], _activation(rng), name=f"{name}_hidden")(x)
    return layers.Add(name=name)([x, layers.Dense(x.shape[-1], name=f"{name}_narrow")(hidden)])


def _twice(x: Any, name: str, rng: np.random.Generator) -> Any:
    shared = layers.Dense(x.shape[-1], _activation(rng), name=f"{name}_shared")
    return layers.LayerNormalization(name=name)(shared(shared(x)))


def _gate(x: Any, name: str, rng: np.random.Generator) -> Any:
    left = layers.Dense(x.shape[-1], "sigmoid", name=f"{name}_gate")(x)
    right = layers.Dense(x.shape[-1], _activation(rng), activity_regularizer=keras.regularizers.L2(0.01))(x)
    return layers.Multiply(name=name)([left, right])


def _constant_rows(x: Any, name: str, rng: np.random.Generator) -> Any:
    return AddConstantRows(3, x.shape[-1], name=name)(layers.Dense(x.shape[-1], name=f"{name}_dense")(x))


def _mean_penalty(x: Any, name: str, rng: np.random.Generator) -> Any:
    return AddPenalty(True, 0.1, name=name)(layers.Dense(x.shape[-1], _activation(rng), name=f"{name}_dense")(x))


def _sum_penalty(x: Any, name: str, rng: np.random.Generator) -> Any:
    return AddPenalty(False, 0.01, name=name)(layers.Dense(x.shape[-1], _activation(rng), name=f"{name}_dense")(x))


def _strides(x: Any, name: str, rng: np.random.Generator) -> Any:
    padding = str(rng.choice(["same", "valid"]))
    return layers.Conv1D(x.shape[-1], 2, strides=int(rng.integers(1, 3)), padding=padding, name=name)(_room(x, name))


def _room(x: Any, name: str) -> Any:
    """Keeps at least two places of a sequence that strides make shorter."""
    return layers.ZeroPadding1D((1, 1), name=f"{name}_room")(x)


def _recurrent(x: Any, name: str, rng: np.random.Generator) -> Any:
    kind = layers.LSTM if rng.integers(2) else layers.GRU
    return kind(x.shape[-1], return_sequences=True, name=name)(x)


def _attention(x: Any, name: str, rng: np.random.Generator) -> Any:
    # A bias of keys has only rounding as its gradient, which Lamb, for one, makes as large as any other.
    attention = layers.MultiHeadAttention(2, x.shape[-1] // 2, use_bias=False, name=f"{name}_attention")
    attended = attention(x, x)
    return layers.LayerNormalization(name=name)(layers.Add(name=f"{name}_sum")([x, attended]))


def _positions(x: Any, name: str, rng: np.random.Generator) -> Any:
    return AddPositions(32, x.shape[-1], name=name)(layers.Dense(x.shape[-1], name=f"{name}_dense")(x))


def _convolution(x: Any, name: str, rng: np.random.Generator) -> Any:
    strides = int(rng.integers(1, 3)) if x.shape[1] is None or x.shape[1] > 2 else 1
    return layers.Conv2D(4, 3, strides, "same", activation=_activation(rng), name=name)(x)


def _depthwise(x: Any, name: str, rng: np.random.Generator) -> Any:
    return layers.SeparableConv2D(4, 3, padding="same", activation=_activation(rng), name=name)(x)


def _group_norm(x: Any, name: str, rng: np.random.Generator) -> Any:
    return layers.GroupNormalization(2, name=name)(layers.Conv2D(4, 1, name=f"{name}_mixed")(x))


_VECTOR: Mapping[str, Block] = {
    "dense": _dense,
    "wide": _wide,
    "twice": _twice,
    "gate": _gate,
    "constant_rows": _constant_rows,
    "mean_penalty": _mean_penalty,
    "sum_penalty": _sum_penalty,
}
_SEQUENCE: Mapping[str, Block] = {
    **_VECTOR,
    "strides": _strides,
    "recurrent": _recurrent,
    "attention": _attention,
    "positions": _positions,
}
_IMAGE: Mapping[str, Block] = {
    "convolution": _convolution,
    "depthwise": _depthwise,
    "group_norm": _group_norm,
    "mean_penalty": _mean_penalty,
    "wide": _wide,
}


def _summed_squares(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(y_true - y_pred))


def _mean_squares(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred))


_LOSSES: Mapping[str, Callable[[], Any]] = {
    "mse": keras.losses.MeanSquaredError,
    "huber": lambda: keras.losses.Huber(reduction="sum"),
    "classes": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "sum of squares": lambda: _summed_squares,
    "mean of squares": lambda: _mean_squares,
}

_OPTIMIZERS: Mapping[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0),
    "adam": lambda: keras.optimizers.Adam(1e-2, epsilon=1e-4),
    "adam, scheduled": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(1e-2, 1, 0.5), epsilon=1e-4
    ),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.01, epsilon=1e-4, global_clipnorm=0.5),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, epsilon=1e-4, momentum=0.5),
    "lamb": lambda: keras.optimizers.Lamb(1e-2, epsilon=1e-4),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.1),
    "nadam": lambda: keras.optimizers.Nadam(1e-2, epsilon=1e-4, use_ema=True, ema_momentum=0.9),
}


# ---- training loops


def _clip(model: keras.Model) -> None:
    kernel = model.get_layer("head").kernel
    kernel.assign(ops.clip(kernel, -0.2, 0.2))


def _halve_rate(model: keras.Model) -> None:
    rate = model.optimizer.learning_rate
    if isinstance(learning_rate_of(model.optimizer), keras.Variable):
        model.optimizer.learning_rate = rate * 0.5


def _add_iterations(model: keras.Model) -> None:
    bias = model.get_layer("head").bias
    bias.assign(bias + 1e-3 * ops.cast(model.optimizer.iterations, bias.dtype))


def _average(model: keras.Model) -> None:
    model.set_weights([0.9 * value for value in model.get_weights()])


BETWEEN: Mapping[str, Callable[[keras.Model], None]] = {
    "nothing": lambda model: None,
    "clips a kernel": _clip,
    "halves the rate": _halve_rate,
    "reads iterations": _add_iterations,
    "sets weights": _average,
}
"""Actions of a training loop on the user's model after each step."""


def _train(between: str, trainer: Any, batch: Batch) -> None:
    x, y, sample_weight = batch
    trainer.train_on_batch(x, y, sample_weight=sample_weight)
    BETWEEN[between](trainer.model if isinstance(trainer, dapple.PipelinedModel) else trainer)
