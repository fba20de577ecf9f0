"""A few training steps of a model, pipelined and by plain Keras from the same values; every variable is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.errors import reason
from dapple_tf.notes import NoteKind

TOLERANCE = {"float64": 1e-8, "float32": 1e-4}
"""Float type -> largest difference that rounding explains, relative to an array's largest value or `FLOOR`."""
FLOOR = {"float64": 1e-6, "float32": 1.0}
"""Float type -> the least that differences are relative to: gradients that cancel to nothing consist of rounding."""

Batch = tuple[Any, Any, Any]
"""x, y and sample weights (or None)."""
Train = Callable[[Any, Batch], None]
"""Trains a model (plain or pipelined) on a batch."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How two trainings of a model compare.

    Attributes:
        verdict: "equal"; "listed", where `transform` has told why it differs; "refused", with an error that says why;
            "differs" and "failed" otherwise.
        difference: the largest of a variable, slot or log, see `TOLERANCE`; None where there is nothing to compare.
        where: the variable that differs most, what was listed, or the error.
    """

    verdict: str
    difference: float | None
    where: str

    @property
    def passed(self) -> bool:
        """Whether it is what users are promised."""
        return self.verdict in ("equal", "listed", "refused")


def train_on_batch(trainer: Any, batch: Batch) -> None:
    """The usual step."""
    x, y, sample_weight = batch
    trainer.train_on_batch(x, y, sample_weight=sample_weight)


def compare_training(
    build: Callable[[], keras.Model],
    transform: Callable[[keras.Model], dapple.PipelinedModel],
    batches: Sequence[Batch],
    *,
    train: Train = train_on_batch,
    dtype: str = "float64",
) -> Comparison:
    """Trains a model both ways and compares every variable and slot in the end.

    Args:
        build: makes the compiled model, each time with the same values, in float type ``dtype``.
        transform: makes a pipeline of it.
        batches: one for each step.
        train: makes a step.
        dtype: names the tolerance.
    """
    plain, own = build(), build()
    before = [variable.numpy() for variable in own.trainable_variables]
    try:
        pipelined = transform(own)
        for batch in batches:
            train(pipelined, batch)
        pipelined.sync()
    except (dapple.DappleError, dapple.PassError, dapple.PlanError) as error:
        return Comparison("refused", None, reason(error))
    except Exception as error:  # Whatever it is, the others are compared, and this one is told.
        return Comparison("failed", None, f"{type(error).__name__}: {reason(error)}")
    # What is noted of metrics alone changes no variable.
    listed = "; ".join(str(note) for note in pipelined.notes if note.kind is not NoteKind.METRIC)
    pipelined.close()
    plain.run_eagerly = True  # A few steps take less time than a trace.
    for batch in batches:
        train(plain, batch)
    difference, where = largest_difference(own, plain, dtype)
    if all(
        np.array_equal(old, variable.numpy()) for old, variable in zip(before, own.trainable_variables, strict=True)
    ):
        return Comparison("failed", difference, "training changed nothing")
    if difference <= TOLERANCE[dtype]:
        return Comparison("equal", difference, where)
    return Comparison("listed" if listed else "differs", difference, listed or where)


def largest_difference(own: keras.Model, plain: keras.Model, dtype: str) -> tuple[float, str]:
    """That of all variables of two models and of their optimizers, and the variable it is of."""
    worst, where = 0.0, "(no variable)"
    pairs = zip(_variables(own), _variables(plain), strict=True)
    for one, other in pairs:
        first, second = one.numpy().astype("float64"), other.numpy().astype("float64")
        if first.size == 0:
            continue
        scale = max(FLOOR[dtype], float(np.max(np.abs(second))))
        difference = float(np.max(np.abs(first - second))) / scale
        difference = difference if np.isfinite(difference) else float("inf")
        if difference > worst:
            worst, where = difference, one.path
    return worst, where


def _variables(model: keras.Model) -> list[keras.Variable]:
    return [*model.variables, *model.optimizer.variables]
