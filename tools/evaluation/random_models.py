"""Random models, plans and batches, trained as pipelines and with plain Keras: a search for differences.

A seed gives a model of some blocks (dense, convolution with strides, attention, recurrence, layers that are used twice,
skip connections, lookups by the batch and by constants, penalties that are means or sums, rows in another order than
the samples, lengths that data decide, state in branches and loops), whose length may be open, outputs, a loss, a
metric, an optimizer, a plan, and the training loop's actions between steps: nothing, or reading and assigning variables
as callbacks do. Blocks are drawn one after another with each other's tensors as inputs; a layer of block k is named
``block_k``, so that any plan may cut there: the last one, or the one whose rows or length differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.describe.plan_text import recompute_text
from dapple_tf.keras_private import learning_rate_of
from dapple_tf.tools.evaluation.random_blocks import (
    DEPENDENT,
    IMAGE,
    LENGTHS,
    SEQUENCE,
    UNUSUAL,
    VECTOR,
    VOCABULARY,
    Apply,
    LookUp,
    look_up_both_ways,
)
from dapple_tf.tools.evaluation.training_comparison import Batch, Comparison, compare_training, train_on_batch

layers, ops = keras.layers, keras.ops

_CLASSES = 3
_SCHEDULES = ("gpipe", "dapple_a", "dapple_b", "fast_forward", "fast_forward_a", "zb_h1", "zb_h2", "zero_bubble")


@dataclasses.dataclass(frozen=True)
class Draw:
    """A model to train.

    Attributes:
        about: blocks, loss, optimizer and plan, in a line.
        build: function that returns the compiled model; the same values each time.
        plan: its plan.
        batches: one batch for each step.
        between: name of the training loop's action after each step, see `BETWEEN`.
        exact: whether the result must be equal, see `Chain.exact`.
    """

    about: str
    build: Callable[[], keras.Model]
    plan: dapple.Plan
    batches: tuple[Batch, ...]
    between: str
    exact: bool


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
    whole = chain.end == "rows" and bool(rng.integers(2))  # One slice per stage, where labels' rows needn't be cut.
    replicas = [int(rng.integers(1, 2 if whole else 3)) for _ in range(stages)]
    starts = np.cumsum([0, *replicas])
    micro_batches = int(rng.integers(1, 2 if whole else 5))
    samples = int(rng.integers(micro_batches * 2, micro_batches * 3 + 3))
    plan = dapple.Plan.manual(
        [f"block_{cut}" for cut in cuts],
        [list(range(start, start + count)) for start, count in zip(starts, replicas, strict=False)],
        micro_batches,
        samples,
        str(rng.choice(_SCHEDULES)),
        recompute=rng.choice(["none", "none", "boundary", "min_cut"], stages).tolist(),
    )
    data = tuple(chain.batch(rng, size) for size in (samples, max(1, samples // 2), samples))

    def build() -> keras.Model:
        keras.utils.set_random_seed(seed)
        model = chain.build()
        noise = np.random.default_rng(seed)
        for variable in model.trainable_variables:
            variable.assign(variable.numpy() + noise.normal(scale=0.1, size=variable.shape))
        model.compile(_OPTIMIZERS[optimizer](), chain.losses(), metrics=chain.metrics(), jit_compile=False)
        return model

    about = (
        f"{chain.form}: {', '.join(chain.blocks)}; {chain.end}; {chain.loss}; {chain.metric}; {optimizer}; "
        f"stages {'+'.join(plan.cuts) or 'one'}, replicas {':'.join(map(str, replicas))}, "
        f"M = {micro_batches} of {samples}, {plan.schedule}, recompute {recompute_text(plan)}; between: {between}"
    )
    return Draw(about, build, plan, data, between, chain.exact)


# ---- models


class Chain:
    """Blocks, drawn one after another; `build` makes the same model each time."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.form = str(rng.choice(["vector", "sequence", "tokens", "image"]))
        self.open = bool(rng.integers(2)) and self.form in ("sequence", "tokens")
        self.length = int(rng.integers(4, 8))
        self.width = int(rng.integers(2, 5)) * 2
        self.masked = self.form == "tokens" and bool(rng.integers(2))
        self.end = str(rng.choice(["one output", "one output", "one in a list", "two heads", "two heads", "rows"]))
        self.heads = 2 if self.end == "two heads" else 1
        self.rows = 2 if self.end == "rows" else 1
        self.loss = str(rng.choice(list(_LOSSES)))
        self.metric = str(rng.choice(list(_METRICS)))
        count = int(rng.integers(3, 7))
        kinds = {"vector": VECTOR, "image": IMAGE}.get(self.form, SEQUENCE)
        pool = [kind for kind in kinds for _ in range(1 if kind in UNUSUAL else 3)]
        self.blocks = [str(rng.choice(pool)) for _ in range(count)]
        self.seeds = rng.integers(0, 2**31, size=count).tolist()
        self.kinds = kinds

    @property
    def exact(self) -> bool:
        """Whether nothing in the model may be refused or noted."""
        return not {*self.blocks, self.end} & {*DEPENDENT, "rows"}

    def build(self) -> keras.Model:
        """Builds the model, not compiled."""
        inputs, x = self._inputs()
        early = None
        for number, (kind, seed) in enumerate(zip(self.blocks, self.seeds, strict=True)):
            x = self.kinds[kind]([x, inputs] if kind in LENGTHS else x, f"block_{number}", np.random.default_rng(seed))
            early = x if early is None else early
        outputs = [layers.Dense(self.rows * _CLASSES, name="head")(self._pooled(x, "pool"))]
        if self.heads == 2:
            outputs.append(layers.Dense(_CLASSES, name="early_head")(self._pooled(early, "early_pool")))
        if self.end == "rows":
            outputs = [Apply(lambda y: ops.reshape(y, (-1, _CLASSES)))(outputs[0])]
        return keras.Model(inputs, outputs[0] if self.end in ("one output", "rows") else outputs)

    def losses(self) -> Any:
        """Returns the losses to compile the model with."""
        return [_LOSSES[self.loss]() for _ in range(2)] if self.heads == 2 else _LOSSES[self.loss]()

    def metrics(self) -> Any:
        """Returns the metrics to compile the model with."""
        return [_METRICS[self.metric]() for _ in range(self.heads)]

    def batch(self, rng: np.random.Generator, samples: int) -> Batch:
        """Returns inputs, labels and sample weights, with another length each time if it is open."""
        length = int(rng.integers(4, 9)) if self.open else self.length
        if self.form == "tokens":
            x = rng.integers(0, VOCABULARY, size=(samples, length)).astype("int32")
            x[:, 0] = rng.integers(1, VOCABULARY, size=samples)  # No sample is masked completely.
        else:
            shape = {"vector": (self.width,), "sequence": (length, self.width), "image": (8, 8, 2)}[self.form]
            x = rng.normal(size=(samples, *shape))
        integers = self.loss == "classes"

        def labels() -> Any:
            rows = self.rows * samples
            drawn = rng.integers(0, _CLASSES, rows) if integers else rng.normal(size=(rows, _CLASSES))
            drawn[0] = 1  # No batch is masked completely.
            return drawn

        weighted = self.loss in ("mse", "classes") and self.rows == 1 and rng.integers(2)
        weights = rng.uniform(0.5, 2.0, size=samples) if weighted else None
        if self.heads == 1:
            return x, labels(), weights
        return x, [labels(), labels()], None if weights is None else [weights, weights[::-1].copy()]

    def _inputs(self) -> tuple[Any, Any]:
        length = None if self.open else self.length
        if self.form == "tokens":
            tokens = keras.Input((length,), dtype="int32")
            if self.masked:
                return tokens, layers.Embedding(VOCABULARY, self.width, mask_zero=True, name="embedding")(tokens)
            return tokens, LookUp(VOCABULARY, self.width, look_up_both_ways, name="embedding")(tokens)
        shape = {"vector": (self.width,), "sequence": (length, self.width), "image": (8, 8, 2)}[self.form]
        inputs = keras.Input(shape)
        return inputs, inputs

    def _pooled(self, x: Any, name: str) -> Any:
        if len(x.shape) == 4:
            return layers.GlobalAveragePooling2D(name=name)(x)
        return layers.GlobalAveragePooling1D(name=name)(x) if len(x.shape) == 3 else x


def _summed_squares(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.square(y_true - y_pred))


def _mean_squares(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred))


def _masked_twice(y_true: Any, y_pred: Any) -> Any:
    labels, scores = (tf.boolean_mask(values, _valid(y_true)) for values in (y_true, y_pred))
    return ops.mean(ops.square(labels - scores))


def _columns(y_true: Any, y_pred: Any) -> Any:
    """The labels as numbers for each class, whether they are that or classes."""
    return y_true if len(y_true.shape) == 2 else ops.one_hot(ops.cast(y_true, "int32"), _CLASSES, dtype=y_pred.dtype)


def _valid(y_true: Any) -> Any:
    """Which samples count, by their labels: [batch]."""
    return (y_true if len(y_true.shape) == 1 else y_true[:, 0]) > 0


class Scalar(keras.losses.Loss):
    """A mean that isn't to be reduced any more."""

    def __init__(self) -> None:
        super().__init__(reduction="none")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """[batch, classes] twice -> []."""
        return _mean_squares(y_true, y_pred)


def _masked_error(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(tf.boolean_mask(ops.abs(_columns(y_true, y_pred) - y_pred), _valid(y_true)))


def _error_by_valid(y_true: Any, y_pred: Any) -> Any:
    valid = ops.cast(_valid(y_true), y_pred.dtype)
    return ops.mean(valid[:, None] * ops.abs(_columns(y_true, y_pred) - y_pred), -1) / ops.mean(valid)


class TopHit(keras.metrics.Mean):
    """How often the label has the largest score, where equal scores are drawn by lot."""

    def __init__(self) -> None:
        super().__init__(name="top_hit")
        self.seed_generator = keras.random.SeedGenerator(3)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """[batch] or [batch, classes], and [batch, classes]."""
        lots = 1e-9 * keras.random.uniform(ops.shape(y_pred), seed=self.seed_generator)
        hits = ops.argmax(_columns(y_true, y_pred), -1) == ops.argmax(y_pred + lots, -1)
        super().update_state(hits, sample_weight)


_METRICS: Mapping[str, Callable[[], Any]] = {
    "no metric": list,
    "masked error": lambda: _masked_error,
    "error by valid": lambda: _error_by_valid,
    "top hit": TopHit,
}

_LOSSES: Mapping[str, Callable[[], Any]] = {
    "mse": keras.losses.MeanSquaredError,
    "huber": lambda: keras.losses.Huber(reduction="sum"),
    "classes": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "sum of squares": lambda: _summed_squares,
    "mean of squares": lambda: _mean_squares,
    "masked twice": lambda: _masked_twice,
    "scalar": Scalar,
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


def _train(between: str, trainer: Any, batch: Batch) -> Mapping[str, Any]:
    logs = train_on_batch(trainer, batch)
    BETWEEN[between](trainer.model if isinstance(trainer, dapple.PipelinedModel) else trainer)
    return logs
