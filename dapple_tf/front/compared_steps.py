"""Comparing training steps of a pipeline and of plain Keras from the same values, which are restored afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import variables_of
from dapple_tf.common.keras_private import (
    compiled_metrics,
    compute_loss,
    inner_optimizer,
    recompiled,
    slots_by_parameter,
    takes_training,
)
from dapple_tf.errors import DappleError, reason
from dapple_tf.execution.notes import Note, NoteKind, notes_of
from dapple_tf.execution.runtime import Runtime
from dapple_tf.execution.terminal import without_noise
from dapple_tf.front.model_copies import FLOATS, copy_of, doubled
from dapple_tf.front.verification import EXACT, TOLERANCES, ComparedSteps, Difference, restored, tensors
from dapple_tf.frontend.batch import Batch
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.own_steps import own_steps

_FEW = 1e-3
"""Smallest change by which a variable's difference is scaled, relative to the largest change of its kind."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of some steps.

    Attributes:
        values: key of a variable or slot (``model/0``, ``optimizer/3``) -> its value.
        logs: the metrics over the steps.
    """

    values: Mapping[str, np.ndarray]
    logs: Mapping[str, float]

    @classmethod
    def of(cls, model: keras.Model, *, logs: bool) -> Outcome:
        """Returns a model's current values, and the metrics' results if ``logs``."""
        updated = getattr(compiled_metrics(model), "built", True)  # An own step may leave them out.
        results = model.get_metrics_result() if logs and updated else {}
        return cls(_values(model), {name: float(np.mean(np.asarray(value))) for name, value in results.items()})


def _values(model: keras.Model) -> dict[str, np.ndarray]:
    return {key: np.asarray(variable.value) for key, variable in variables_of(model).items()}


def plain_steps(model: keras.Model, data: tuple[Any, Any, Any], steps: int, *, training: bool) -> Outcome:
    """Runs some steps of plain Keras, losses and metrics compiled anew; the model is unchanged afterwards.

    Args:
        model: a compiled model with built optimizer and metrics.
        data: inputs, labels and sample weights of a batch.
        steps: number of steps.
        training: whether to run Keras' own training step; False calls the model in inference behaviour, and leaves
            metrics out.
    """
    x, y, sample_weight = tensors(data)

    @tf.function(autograph=False)
    def step() -> None:
        if training or "train_step" in own_steps(model):  # The model's own step decides how layers behave.
            model.train_step(keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
            return
        with tf.GradientTape() as tape:
            outputs = model(x, training=False) if takes_training(model) else model(x)
            loss = compute_loss(model, x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=False)
            loss = model.optimizer.scale_loss(loss)
        weights = model.trainable_weights
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    with restored(model), recompiled(model):
        traced = step.get_concrete_function()
        for _ in range(steps):
            traced()
        return Outcome.of(model, logs=training)


def of_arrays(trees: tuple[Any, Any, Any], function: Callable[[np.ndarray], np.ndarray]) -> tuple[Any, Any, Any]:
    """Applies a function to each array of some structures."""

    def applied(leaf: Any) -> Any:
        return None if leaf is None else function(np.asarray(leaf))

    x, y, sample_weight = (keras.tree.map_structure(applied, tree) for tree in trees)
    return x, y, sample_weight


# ---- the pipeline's side


def pipelined_steps(runtime: Runtime, batch: Batch, steps: int, *, training: bool) -> Outcome:
    """Runs some steps on the devices from the model's values, which model and devices have again afterwards.

    After a fault all of them are repeated, because recovery repeats the user's batches only.
    """
    model = runtime.model
    while True:
        faults = len(runtime.elastic.faults)
        with restored(model):
            try:
                for _ in range(steps):
                    result = runtime.run(Mode.TRAIN, batch, training=training)
                    runtime.metrics.update(Mode.TRAIN.value, result.metrics, result.loss, batch.samples)
                runtime.sync()
                outcome = Outcome.of(model, logs=training)
            finally:
                runtime.drop()
        if len(runtime.elastic.faults) == faults:
            return outcome


@dataclasses.dataclass(frozen=True)
class Reasons:
    """Reasons for training steps to differ from plain Keras', known from model and plan.

    Attributes:
        known: the notes of a training step.
        remaining: the notes that hold in inference behaviour as well.
    """

    known: tuple[Note, ...] = ()
    remaining: tuple[Note, ...] = ()

    @classmethod
    def of(cls, runtime: Runtime, batch: Batch) -> Reasons:
        """Finds the reasons for steps on a batch's slices."""
        known = cls._notes(runtime, batch, training=True)
        metrics_alone = all(note.kind is NoteKind.METRIC for note in known)
        return cls(known, known if metrics_alone else cls._notes(runtime, batch, training=False))

    @staticmethod
    def _notes(runtime: Runtime, batch: Batch, *, training: bool) -> tuple[Note, ...]:
        layout = runtime.engine.builder.passes.layout(batch.spec.parts(batch.samples))
        micro_batches = len(layout.micro_batch_intervals)
        slices = [
            sum(interval.size > 0 for number in range(micro_batches) for interval in layout.slices(stage, number))
            for stage in range(len(layout.devices))
        ]
        if max(slices) == 1:
            return ()
        built = runtime.engine.prepare(Mode.TRAIN, batch.spec, training)
        return notes_of(built.program, slices, micro_batches)

    @property
    def inference(self) -> bool:
        """Whether some reasons don't hold in inference behaviour, so that steps are compared in that, too."""
        return any(note not in self.remaining for note in self.known if note.kind is not NoteKind.METRIC)

    @property
    def first(self) -> str:
        """The first reason that doesn't hold in inference behaviour; empty if there is none."""
        notes = (note for note in self.known if note not in self.remaining and note.kind is not NoteKind.METRIC)
        return next((f"layer {note.layer!r} {note.text}" for note in notes), "")


# ---- differences


@dataclasses.dataclass(frozen=True)
class Unlike:
    """How a variable differs between two outcomes.

    Attributes:
        difference: the largest difference, relative to the largest change of the variable (or to 1e-3 of the largest
            change of any of its kind, if that is more); infinite if something isn't a number.
        unit: the last bit of the variable's largest value, relative to the same.
    """

    difference: float
    unit: float


def unlike(
    own: Mapping[str, np.ndarray],
    plain: Mapping[str, np.ndarray],
    before: Mapping[str, np.ndarray],
    kinds: Mapping[str, str],
) -> dict[str, Unlike]:
    """Compares values after some steps.

    Args:
        own: values of one outcome.
        plain: values of the outcome that counts as right.
        before: initial values of both.
        kinds: key -> name of a group of variables of about the same size: parameters, or one kind of slots.
    """
    changes = {key: _largest(_wide(value) - _wide(before[key])) for key, value in plain.items()}
    floors: dict[str, float] = {}
    for key, change in changes.items():
        floors[kinds[key]] = max(floors.get(kinds[key], 0.0), _FEW * change)
    differences = {}
    for key, value in plain.items():
        difference = _largest(_wide(own[key]) - _wide(value))
        scale = max(changes[key], floors[kinds[key]])
        last = _epsilon(value) * _largest(_wide(value))
        if difference == 0:
            differences[key] = Unlike(0.0, 0.0)
        elif scale == 0:
            differences[key] = Unlike(np.inf, 0.0)
        else:
            differences[key] = Unlike(difference / scale if np.isfinite(difference) else np.inf, last / scale)
    return differences


def _wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).astype("float64")


def _largest(array: np.ndarray) -> float:
    # NaN counts as infinitely wrong; max() would skip it.
    largest = float(np.max(np.abs(array), initial=0.0))
    return largest if np.isfinite(largest) else float("inf")


def _epsilon(array: np.ndarray) -> float:
    name = keras.backend.standardize_dtype(array.dtype)
    return float(tf.experimental.numpy.finfo(name).eps) if name in FLOATS else 0.0


@dataclasses.dataclass(frozen=True)
class Description:
    """A variable's description.

    Attributes:
        label: its path.
        layer: path of its layer; "optimizer" if it has none.
        kind: name of the group of variables whose values are of about the same size.
        state: whether it is state that layers update.
    """

    label: str
    layer: str
    kind: str
    state: bool


def descriptions_of(model: keras.Model) -> dict[str, Description]:
    """Returns key -> description of each variable and slot."""
    variables = variables_of(model)
    trained = {id(variable) for variable in model.trainable_variables}
    slots = _slots(model.optimizer)
    taken: set[str] = set()
    descriptions = {}
    for key, variable in variables.items():
        owner, kind = slots.get(id(variable), (variable, "trained" if id(variable) in trained else variable.path))
        path = owner.path.rpartition("/")[0] or owner.path
        label = variable.path if variable.path not in taken else f"{variable.path} ({key})"
        taken.add(label)
        of_none = key.startswith("optimizer/") and id(variable) not in slots
        state = id(variable) not in trained and not key.startswith("optimizer/")
        descriptions[key] = Description(label, "optimizer" if of_none else path, kind, state)
    return descriptions


def _slots(optimizer: Any) -> dict[int, tuple[keras.Variable, str]]:
    """Returns id of an optimizer's slot -> its parameter, and the name of the list of slots that it is in."""
    inner = inner_optimizer(optimizer)
    return {id(slot): (parameter, name) for name, slot, parameter in slots_by_parameter(inner)}


# ---- all together

Run: TypeAlias = Callable[[tuple[Any, Any, Any], int, bool], Outcome]
"""(data, number of steps, training behaviour) -> outcome of the pipeline's steps; the model's values are restored."""


def compare_steps(
    model: keras.Model,
    plain_model: keras.Model,
    run: Run,
    data: tuple[Any, Any, Any],
    count: int,
    reasons: Reasons,
    *,
    dtype: str,
    pipelined: Callable[[keras.Model], contextlib.AbstractContextManager[Run]] | None = None,
) -> ComparedSteps:
    """Compares some steps on a batch with plain Keras, in the model's dtype and float64.

    If float64 isn't possible, plain Keras also takes the samples in another order: what that changes is the size of
    rounding.

    Args:
        model: the model, with the devices' values, before and afterwards.
        plain_model: plain Keras' model, with the same values (`PlainSide`).
        run: runs the pipeline's steps.
        data: inputs, labels and sample weights of a batch.
        count: number of steps.
        reasons: why training steps may differ. If some don't hold in inference behaviour, steps are compared in that
            as well.
        dtype: result of `dapple_tf.front.verification.computed_in`.
        pipelined: makes the same pipeline of another model for the duration of its context; None leaves float64 out.
    """
    before, descriptions = _values(model), descriptions_of(model)
    kinds = {key: own.kind for key, own in descriptions.items()}
    own, plain = run(data, count, True), plain_steps(plain_model, data, count, training=True)
    logs = {name: (own.logs[name], value) for name, value in plain.logs.items() if name in own.logs}
    inference = reasons.inference
    trained = unlike(own.values, plain.values, before, kinds)
    checked = trained
    if inference:
        plain = plain_steps(plain_model, data, count, training=False)
        checked = unlike(run(data, count, False).values, plain.values, before, kinds)
    exact, missing = None, "it wasn't asked for"
    if dtype == "float64":
        exact, missing = checked, ""
    elif pipelined is not None:
        exact, missing = _exactly(model, data, count, pipelined, training=not inference)
    bounds = dict.fromkeys(checked, EXACT)
    if exact is None:
        turned = plain_steps(plain_model, of_arrays(data, lambda array: array[::-1]), count, training=not inference)
        noise = unlike(turned.values, plain.values, before, kinds)
        bounds = {
            key: 0.1 * TOLERANCES[dtype] + 10 * noise[key].difference + 16 * one.unit for key, one in checked.items()
        }
    variables = {
        own.label: Difference(
            own.layer,
            trained[key].difference,
            checked[key].difference,
            None if exact is None else exact[key].difference,
            bounds[key],
            own.state,
        )
        for key, own in descriptions.items()
    }
    return ComparedSteps(count, dtype, variables, logs, missing, reasons.known, inference, reasons.remaining)


def _exactly(
    model: keras.Model,
    data: tuple[Any, Any, Any],
    count: int,
    pipelined: Callable[[keras.Model], contextlib.AbstractContextManager[Run]],
    *,
    training: bool,
) -> tuple[dict[str, Unlike] | None, str]:
    """Returns the differences of the same steps in float64, or None and why they couldn't be made."""
    twin, plain_twin = copy_of(model, float64=True), copy_of(model, float64=True)
    if isinstance(twin, str) or isinstance(plain_twin, str):
        return None, f"the model can't be made again in float64: {twin}"
    wide = of_arrays(data, doubled)
    kinds = {key: own.kind for key, own in descriptions_of(twin).items()}
    before = _values(twin)
    try:
        with without_noise():
            plain = plain_steps(plain_twin, wide, count, training=training)
            with pipelined(twin) as run:
                own = run(wide, count, training)
    except (DappleError, tf.errors.OpError, TypeError, ValueError, NameError) as error:
        return None, f"steps in float64 failed: {reason(error)}"
    return unlike(own.values, plain.values, before, kinds), ""
