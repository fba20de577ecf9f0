"""A few training steps of a model, pipelined and by plain Keras from the same values; every variable is compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.errors import reason
from dapple_tf.execution.notes import Note, NoteKind

TOLERANCE = {"float64": 1e-8, "float32": 1e-4}
"""Float type -> largest difference that rounding explains, relative to what training has changed (see `_scale`)."""
FLOOR = {"float64": 1e-6, "float32": 1e-2}
"""Float type -> the least that differences are relative to: gradients that cancel to nothing consist of rounding."""
_ROUNDED = 1e-2
"""The least that differences are relative to, as a part of an array's largest value: that is what is rounded."""

_NO_EXCUSE = (NoteKind.METRIC, NoteKind.RANDOM)
"""What is noted of metrics alone changes no variable; the models that are compared draw nothing that counts."""

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
        difference: the largest of a variable or slot, see `TOLERANCE`; None where there is nothing to compare.
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
    before = [variable.numpy() for variable in own.variables]
    try:
        pipelined = transform(own)
        try:
            for batch in batches:
                train(pipelined, batch)
            pipelined.sync()
            told = [note for note in pipelined.notes if note.kind not in _NO_EXCUSE]
        finally:
            pipelined.close(sync=False)
    except (dapple.DappleError, dapple.PassError, dapple.PlanError) as error:
        return Comparison("refused", None, reason(error))
    except Exception as error:  # Whatever it is, the others are compared, and this one is told.
        return Comparison("failed", None, f"{type(error).__name__}: {reason(error)}")
    plain.run_eagerly = True  # A few steps take less time than a trace.
    for batch in batches:
        train(plain, batch)
    difference, where = largest_difference(own, plain, before, dtype)
    moved = zip(before, own.variables, strict=True)
    if all(np.array_equal(old, variable.numpy()) for old, variable in moved if variable.trainable):
        return Comparison("failed", difference, "training changed nothing")
    if difference <= TOLERANCE[dtype]:
        return Comparison("equal", difference, where)
    if told:
        return Comparison("listed", difference, briefly(told))
    return Comparison("differs", difference, where)


def briefly(notes: Sequence[Note]) -> str:
    """Notes of equal text as one, with the first of the layers that they are about."""
    layers: dict[str, list[str]] = {}
    for note in notes:
        layers.setdefault(f"{note.text}; {note.way_out}", []).append(note.layer)
    more = {text: f" and {len(own) - 1} more" if len(own) > 1 else "" for text, own in layers.items()}
    return "; ".join(f"{own[0]}{more[text]}: {text}" for text, own in layers.items())


def largest_difference(
    own: keras.Model, plain: keras.Model, before: Sequence[np.ndarray], dtype: str
) -> tuple[float, str]:
    """That of all variables of two models and of their optimizers, and the variable it is of.

    Args:
        own: a model.
        plain: the same one, trained otherwise.
        before: what the models' variables were before training; the optimizers' were zeros.
        dtype: names the least that differences are relative to.
    """
    worst, where = 0.0, "(no variable)"
    pairs = list(zip(_variables(own), _variables(plain), strict=True))
    starts = [*before, *[np.zeros(())] * (len(pairs) - len(before))]
    for (one, other), old in zip(pairs, starts, strict=True):
        first, second = one.numpy().astype("float64"), other.numpy().astype("float64")
        if first.size == 0:
            continue
        difference = float(np.max(np.abs(first - second))) / _scale(old, second, dtype)
        difference = difference if np.isfinite(difference) else float("inf")
        if difference > worst:
            worst, where = difference, one.path
    return worst, where


def _scale(old: np.ndarray, new: np.ndarray, dtype: str) -> float:
    """Returns what differences of an array are relative to: how far training has moved it."""
    return max(FLOOR[dtype], float(np.max(np.abs(new - old))), _ROUNDED * float(np.max(np.abs(new))))


def _variables(model: keras.Model) -> list[keras.Variable]:
    return [*model.variables, *model.optimizer.variables]
