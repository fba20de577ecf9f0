"""Random models, plans and batches, trained as pipelines and with plain Keras: a search for differences.

A seed gives a model of some blocks (dense, convolution with strides, attention, recurrence, layers that are used twice,
skip connections, lookups by the batch and by constants, penalties that are means or sums, rows in another order than
the samples, lengths that data decide, state in branches and loops), whose length may be open, outputs, a loss, a
metric, an optimizer, a plan of `random_plans`, and the training loop's actions between steps: nothing, or reading and
assigning variables as callbacks do. Blocks are drawn one after another with each other's tensors as inputs; a layer of
block k is named ``block_k``, so that any plan may cut there: the last one, or the one whose rows or length differ.
Operators are placed at random, not by search, which would keep operators as small as these together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.common.keras_private import learning_rate_of
from dapple_tf.operators import step_placer
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
from dapple_tf.tools.evaluation.random_placements import random_placement
from dapple_tf.tools.evaluation.random_plans import Drawn, MixedPlan, allowed_optimizers, allowed_plan
from dapple_tf.tools.evaluation.training_comparison import Batch, Comparison, compare_training, train_on_batch

layers, ops = keras.layers, keras.ops

_CLASSES = 3
_LEVELS = ("placed", "shards", "stages")
"""Levels of plans, see `random_plans.LEVELS`; few of these models have tables whose rows could be in shards."""


class Draw(NamedTuple):
    """A model to train.

    Attributes:
        chain: the model.
        plan: its plan and optimizer.
        batches: one batch for each step.
        between: name of the training loop's action after each step, see `BETWEEN`.
    """

    chain: Chain
    plan: MixedPlan
    batches: tuple[Batch, ...]
    between: str


def compare_draw(seed: int) -> tuple[str, Comparison]:
    """Trains a random model both ways; returns its description, and the comparison.

    The float type must be float64.
    """
    drawn = draw(seed)
    plan, cluster = drawn.plan.plan, drawn.plan.cluster
    costs = dapple.OperatorCosts() if plan.operator_devices else None
    with mock.patch.object(step_placer, "fd_dps", random_placement(seed)):
        comparison = compare_training(
            drawn.plan.build,
            lambda model: dapple.transform(model, cluster, plan, operator_costs=costs),
            drawn.batches,
            train=functools.partial(_train, drawn.between),
        )
    return f"{drawn.plan}; between: {drawn.between}", comparison


def draw(seed: int) -> Draw:
    """Returns the model, plan and batches of a seed."""
    rng = np.random.default_rng(seed)
    chain = Chain(rng)
    between = str(rng.choice([*BETWEEN, "nothing", "nothing"]))
    level = str(rng.choice(_LEVELS))
    whole = chain.end == "rows" and bool(rng.integers(2))  # One slice per stage, where labels' rows needn't be cut.
    while True:
        plan, servers = allowed_plan(rng, chain.cuts, level)
        if not whole or plan.micro_batches == max(plan.replicas) == 1:
            break
    optimizer = str(rng.choice(allowed_optimizers(plan)))
    batch = plan.global_batch_size
    sizes = (batch, int(rng.integers(1, batch)), batch)
    model = Drawn(chain.about, chain.build, chain.cuts, chain.batch, chain.losses, chain.metrics)
    batches = tuple(chain.batch(rng, size) for size in sizes)
    return Draw(chain, MixedPlan(seed, model, optimizer, plan, servers, sizes), batches, between)


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

    @property
    def about(self) -> str:
        """Its blocks, outputs, loss and metric."""
        return f"{self.form}: {', '.join(self.blocks)}; {self.end}; {self.loss}; {self.metric}"

    @property
    def cuts(self) -> tuple[str, ...]:
        """Layers after which it may be cut."""
        return tuple(f"block_{number}" for number in range(len(self.blocks) - 1))

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
