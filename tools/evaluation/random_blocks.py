"""Building blocks of `random_models`: tables of names and of functions that add a block's layers to a tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers, ops = keras.layers, keras.ops

VOCABULARY = 7
"""Number of words of models that read tokens."""
_ACTIVATIONS = ("tanh", "gelu", "sigmoid", "softplus", "swish")


class Apply(keras.layers.Layer):
    """A function of tensors; unlike ``Lambda``, it keeps their types."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def call(self, *tensors: Any) -> Any:
        """The function's result."""
        return self.function(*tensors)


class LookUp(keras.layers.Layer):
    """A table, and what a function makes of it and of the layer's input."""

    def __init__(self, rows: int, width: int, look_up: Callable[[Any, Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.table = layers.Embedding(rows, width)
        self.look_up = look_up

    def call(self, x: Any) -> Any:
        """``look_up(table, x)``."""
        return self.look_up(self.table, x)


def add_positions(table: Any, x: Any) -> Any:
    """Adds a row for each place along axis 1 to ``x``, [batch, places, width]: places don't come from the batch."""
    return x + table(ops.arange(ops.shape(x)[1]))


def add_constant_rows(table: Any, x: Any) -> Any:
    """Adds the mean over rows, some of which are looked up twice."""
    return x + ops.mean(table(np.array([0, 2, 2, 1])), axis=0)


def look_up_both_ways(table: Any, tokens: Any) -> Any:
    """One table, looked up by the batch's tokens and by a constant: [batch, length] -> [batch, length, width]."""
    return table(tokens) + table(np.array([1]))


class Track(keras.layers.Layer):
    """Adds a moving mean, which is updated in a branch or a loop."""

    def __init__(self, way: str, width: int, name: str) -> None:
        super().__init__(name=name)
        self.way = way
        self.mean = self.add_weight(shape=(width,), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any, training: bool = False) -> Any:
        """``x``, [..., width], plus the mean of earlier steps."""
        y = x + self.mean
        if training:
            batch = ops.mean(x, tuple(range(len(x.shape) - 1)))
            _WAYS_OF_STATE[self.way](self.mean[0] < 1e9, lambda: self.mean.assign(0.9 * self.mean + 0.1 * batch))
        return y


def _assigned(assign: Callable[[], Any]) -> int:
    assign()
    return 1


_WAYS_OF_STATE: Mapping[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "cond": lambda always, assign: ops.cond(always, lambda: _assigned(assign), lambda: 0),
    "switch": lambda always, assign: ops.switch(ops.cast(always, "int32"), [lambda: 0, lambda: _assigned(assign)]),
    "loop": lambda _, assign: ops.fori_loop(0, 2, lambda number, total: total + _assigned(assign), 0),
}
"""Places of state's assignment: functions of a true condition and the assignment."""


class AddPenalty(keras.layers.Layer):
    """Adds a loss of its output: a mean over samples, or rarely a sum."""

    def __init__(self, mean: bool, factor: float, **options: Any) -> None:
        super().__init__(**options)
        self.mean, self.factor = mean, factor

    def call(self, x: Any) -> Any:
        """``x`` itself."""
        squares = ops.square(x)
        self.add_loss(self.factor * (ops.mean(squares) if self.mean else ops.sum(squares)))
        return x


Block = Callable[[Any, str, np.random.Generator], Any]
"""(tensor, name of a layer, numbers to draw from) -> tensor."""


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


def _after_dense(make: Callable[[int, str], keras.layers.Layer]) -> Block:
    """A dense layer, and after it the layer that a width and a name make."""
    return lambda x, name, rng: make(x.shape[-1], name)(
        layers.Dense(x.shape[-1], _activation(rng), name=f"{name}_dense")(x)
    )


def _apart(spread: Callable[..., Any], gather: Callable[..., Any]) -> Block:
    """A dense layer of what ``spread`` makes of a tensor; ``gather`` brings the result into the tensor's form again."""

    def block(x: Any, name: str, rng: np.random.Generator) -> Any:
        tensors = x if isinstance(x, list) else [x]
        y = Apply(spread, name=name)(*tensors)
        y = layers.Dense(y.shape[-1], _activation(rng), name=f"{name}_apart")(y)
        return layers.Add(name=f"{name}_sum")([tensors[0], Apply(gather, name=f"{name}_gather")(y, *tensors)])

    return block


def _mean_of_copies(copies: int) -> Callable[[Any, Any], Any]:
    return lambda y, x: ops.mean(ops.reshape(y, (copies, *ops.shape(x))), 0)


def _lengths(inputs: Any) -> Any:
    """The samples' lengths, 1 to 4, by the model's tokens or vectors: [batch, places, ...] -> [batch]."""
    words = inputs if len(inputs.shape) == 2 else ops.cast(inputs[..., 0] > 0, "int32")
    return 1 + ops.sum(words, 1) % 4


def _longest(x: Any, inputs: Any) -> Any:
    return ops.minimum(ops.max(_lengths(inputs)), ops.shape(x)[1])


def _sum_within(y: Any, x: Any, inputs: Any) -> Any:
    """Sums ``y``, [batch, longest, width], over the places within each sample's length."""
    within = ops.arange(ops.shape(y)[1], dtype="int32")[None, :, None] < _lengths(inputs)[:, None, None]
    return ops.sum(ops.where(within, y, 0.0), 1, keepdims=True) + ops.zeros_like(x)


def _words(x: Any) -> Any:
    """A whole number for each place: [..., width] -> [...]."""
    return ops.cast(3 * ops.tanh(x[..., 0]), "int32")


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


def _convolution(x: Any, name: str, rng: np.random.Generator) -> Any:
    strides = int(rng.integers(1, 3)) if x.shape[1] is None or x.shape[1] > 2 else 1
    return layers.Conv2D(4, 3, strides, "same", activation=_activation(rng), name=name)(x)


def _depthwise(x: Any, name: str, rng: np.random.Generator) -> Any:
    return layers.SeparableConv2D(4, 3, padding="same", activation=_activation(rng), name=name)(x)


def _group_norm(x: Any, name: str, rng: np.random.Generator) -> Any:
    return layers.GroupNormalization(2, name=name)(layers.Conv2D(4, 1, name=f"{name}_mixed")(x))


_STATES: Mapping[str, Block] = {
    f"state in a {way}": _after_dense(functools.partial(Track, way)) for way in _WAYS_OF_STATE
}
_ROWS: Mapping[str, Block] = {
    "views": _apart(lambda x: ops.concatenate([x, -x], 0), _mean_of_copies(2)),
    "tile": _apart(lambda x: ops.tile(x, [3] + [1] * (len(x.shape) - 1)), _mean_of_copies(3)),
    "heads": _apart(
        lambda x: ops.concatenate(ops.split(x, 2, -1), 0), lambda y, x: ops.concatenate(ops.split(y, 2, 0), -1)
    ),
    "unique": _apart(
        lambda x: ops.one_hot(tf.unique(ops.reshape(_words(x), (-1,)))[0], x.shape[-1]),
        lambda y, x: ops.reshape(ops.take(y, tf.unique(ops.reshape(_words(x), (-1,)))[1], 0), ops.shape(x)),
    ),
}
"""Rows in another order than the samples, or as many as there are different words in the batch."""
LENGTHS: Mapping[str, Block] = {
    "crop": _apart(lambda x, inputs: x[:, : _longest(x, inputs)], _sum_within),
    "crop by range": _apart(lambda x, inputs: ops.take(x, ops.arange(_longest(x, inputs)), 1), _sum_within),
    "top_k": _apart(
        lambda x, inputs: tf.gather(x, tf.math.top_k(x[..., 0], _longest(x, inputs)).indices, batch_dims=1), _sum_within
    ),
}
"""Lengths that data decide; these blocks take the model's inputs, too."""
DEPENDENT = (*_ROWS, *LENGTHS, "time_major")
"""Blocks that may be refused or noted, as slices differ from the batch."""
UNUSUAL = (*_STATES, *DEPENDENT)
"""Blocks that are drawn less often, so that few models have several."""

VECTOR: Mapping[str, Block] = {
    "dense": _dense,
    "wide": _wide,
    "twice": _twice,
    "gate": _gate,
    "constant_rows": _after_dense(lambda width, name: LookUp(3, width, add_constant_rows, name=name)),
    "mean_penalty": _after_dense(lambda width, name: AddPenalty(True, 0.1, name=name)),
    "sum_penalty": _after_dense(lambda width, name: AddPenalty(False, 0.01, name=name)),
    **_STATES,
    **_ROWS,
}
SEQUENCE: Mapping[str, Block] = {
    **VECTOR,
    **LENGTHS,
    "time_major": _apart(
        lambda x: ops.reshape(ops.transpose(x, (1, 0, 2)), (-1, x.shape[-1])),
        lambda y, x: ops.transpose(ops.reshape(y, (ops.shape(x)[1], ops.shape(x)[0], x.shape[-1])), (1, 0, 2)),
    ),
    "strides": _strides,
    "recurrent": _recurrent,
    "attention": _attention,
    "positions": _after_dense(lambda width, name: LookUp(32, width, add_positions, name=name)),
}
IMAGE: Mapping[str, Block] = {
    "convolution": _convolution,
    "depthwise": _depthwise,
    "group_norm": _group_norm,
    "mean_penalty": VECTOR["mean_penalty"],
    "views": _ROWS["views"],
    "wide": _wide,
}
