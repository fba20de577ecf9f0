"""Trains a model for a few steps, pipelined and with plain Keras from the same values; compares variables and logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import reason
from dapple_tf.execution.notes import Note, NoteKind

TOLERANCE = {"float64": 1e-8, "float32": 1e-4}
"""Float type -> largest difference that rounding explains, relative to what training has changed (see `_scale`)."""
FLOOR = {"float64": 1e-6, "float32": 1e-2}
"""Float type -> minimum scale of differences: gradients that cancel to nothing consist of rounding."""
_ROUNDED = 1e-2
"""Minimum scale of differences as a part of an array's largest value."""

_NO_EXCUSE = (NoteKind.METRIC, NoteKind.RANDOM)
"""Notes on metrics alone change no variable; the compared models draw nothing that counts."""
_LOG = "log "
"""Stands before the name of a log, where variables have their paths."""

Batch = tuple[Any, Any, Any]
"""x, y and sample weights (or None)."""
Train = Callable[[Any, Batch], Mapping[str, Any]]
"""Trains a model (plain or pipelined) on a batch; returns the logs."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of two trainings of a model.

    Attributes:
        verdict: "equal"; "listed" if `transform` has said why it differs; "refused" with an error that says why;
            "differs" and "failed" otherwise, the latter also where a device failed in the middle of a step.
        difference: largest difference of a variable, slot or log, see `TOLERANCE`; None if there is nothing to compare.
        where: the variable or log that differs most, what was listed, or the error.
    """

    verdict: str
    difference: float | None
    where: str

    @property
    def passed(self) -> bool:
        """Whether the result is what users are promised."""
        return self.verdict in ("equal", "listed", "refused")


def train_on_batch(trainer: Any, batch: Batch) -> Mapping[str, Any]:
    """Trains on a batch in the usual way."""
    if isinstance(trainer, keras.Model):  # Its eager step hands arrays on to losses and metrics, which expect tensors.
        batch = keras.tree.map_structure(lambda array: None if array is None else tf.constant(array), batch)
    x, y, sample_weight = batch
    return trainer.train_on_batch(x, y, sample_weight=sample_weight, return_dict=True)


def compare_training(
    build: Callable[[], keras.Model],
    transform: Callable[[keras.Model], dapple.PipelinedModel],
    batches: Sequence[Batch],
    *,
    train: Train = train_on_batch,
    dtype: str = "float64",
) -> Comparison:
    """Trains a model both ways and compares the logs of every step, and finally every variable and slot.

    Args:
        build: function that returns the compiled model, each time with the same values, in float type ``dtype``.
        transform: function that makes a pipeline of it.
        batches: one batch for each step.
        train: function that makes a step.
        dtype: selects the tolerance.
    """
    plain, own = build(), build()
    before = [variable.numpy() for variable in own.variables]
    try:
        pipelined = transform(own)
        try:
            logs = [train(pipelined, batch) for batch in batches]
            pipelined.sync()
            notes = list(pipelined.notes)
        finally:
            pipelined.close(sync=False)
    except Exception as error:  # Whatever it is, it is reported, and the others are still compared.
        own_errors = (dapple.DappleError, dapple.PassError, dapple.PlanError)
        if isinstance(error, own_errors) and not isinstance(error, dapple.StepError):
            return Comparison("refused", None, reason(error))
        return Comparison("failed", None, f"{type(error).__name__}: {reason(error)}")
    plain.run_eagerly = True  # A few steps take less time than a trace.
    expected = [train(plain, batch) for batch in batches]
    difference, where = largest_difference(own, plain, before, dtype)
    moved = zip(before, own.variables, strict=True)
    if all(np.array_equal(old, variable.numpy()) for old, variable in moved if variable.trainable):
        return Comparison("failed", difference, "training changed nothing")
    bound = TOLERANCE[dtype]
    told = [note for note in notes if note.kind not in _NO_EXCUSE]
    if difference <= bound:
        difference, where = max((difference, where), _largest_of_logs(logs, expected, dtype))
        told = [note for note in notes if note.kind != NoteKind.RANDOM]
    if difference <= bound:
        return Comparison("equal", difference, where)
    if told:
        return Comparison("listed", difference, briefly(told))
    return Comparison("differs", difference, where)


def briefly(notes: Sequence[Note]) -> str:
    """Joins notes with equal texts, with the first of their layers."""
    layers: dict[str, list[str]] = {}
    for note in notes:
        layers.setdefault(f"{note.text}; {note.way_out}", []).append(note.layer)
    more = {text: f" and {len(own) - 1} more" if len(own) > 1 else "" for text, own in layers.items()}
    return "; ".join(f"{own[0]}{more[text]}: {text}" for text, own in layers.items())


def largest_difference(
    own: keras.Model, plain: keras.Model, before: Sequence[np.ndarray], dtype: str
) -> tuple[float, str]:
    """Returns the largest difference of two models' and their optimizers' variables, and its variable.

    Args:
        own: a model.
        plain: the same one, trained otherwise.
        before: values of the models' variables before training; the optimizers' were zeros.
        dtype: selects the minimum scale of differences.
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


def _largest_of_logs(
    logs: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]], dtype: str
) -> tuple[float, str]:
    """Returns the largest relative difference of logs, and its log."""
    differences = [(0.0, "(no log)")]
    for own, plain in zip(logs, expected, strict=True):
        if own.keys() != plain.keys():
            return float("inf"), f"{_LOG}names {', '.join(own)} for {', '.join(plain)}"
        for name, value in plain.items():
            first, second = np.asarray(own[name], "float64"), np.asarray(value, "float64")
            difference = float(np.max(np.abs(first - second))) / max(FLOOR[dtype], float(np.max(np.abs(second))))
            differences.append((difference if np.isfinite(difference) else float("inf"), f"{_LOG}{name}"))
    return max(differences)


def _scale(old: np.ndarray, new: np.ndarray, dtype: str) -> float:
    """Returns the scale of an array's differences: how far training has changed it."""
    return max(FLOOR[dtype], float(np.max(np.abs(new - old))), _ROUNDED * float(np.max(np.abs(new))))


def _variables(model: keras.Model) -> list[keras.Variable]:
    return [*model.variables, *model.optimizer.variables]
