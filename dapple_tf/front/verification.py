"""Comparison of pipelined steps with plain Keras on one device: the result of ``verify``, and a step's gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.keras_private import compute_loss, recompiled, seeds_of, takes_training
from dapple_tf.common.text import table
from dapple_tf.describe.cluster import Cluster
from dapple_tf.errors import VerificationError
from dapple_tf.errors import reason as reason_of
from dapple_tf.execution.builds import StepResult
from dapple_tf.execution.notes import Note, NoteKind
from dapple_tf.front.model_copies import coarsest, copy_of
from dapple_tf.frontend.own_steps import own_steps, plain_gradients
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.view.notebook import Table, notebook_html

TOLERANCES = {"float64": 1e-8, "float32": 1e-3, "tf32": 1e-2, "float16": 3e-2, "bfloat16": 1e-1}
"""Coarsest floating-point type that steps compute in -> largest relative difference of gradients and logs taken as
rounding."""

EXACT = 1e-6
"""Largest difference of a variable in float64 taken as rounding, relative to its change."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a variable or an optimizer slot differs after some steps, relative to how much these change it.

    Attributes:
        layer: path of its layer; "optimizer" if it belongs to none.
        trained: difference after training steps, in the model's dtype.
        checked: the same in inference behaviour, if layers behave differently on slices than on the whole batch.
        exact: ``checked`` in float64; None if that wasn't possible.
        bound: the largest value of ``exact``, or else of ``checked``, that rounding explains.
        state: whether it is state that layers update.
    """

    layer: str
    trained: float
    checked: float
    exact: float | None
    bound: float
    state: bool = False

    @property
    def is_rounding(self) -> bool:
        """Whether rounding alone explains the difference, without the layers' known reasons."""
        return (self.checked if self.exact is None else self.exact) <= self.bound


@dataclasses.dataclass(frozen=True)
class ComparedSteps:
    """The comparison of some steps of a pipeline and of plain Keras.

    Attributes:
        count: number of steps.
        dtype: the coarsest floating-point type of the model's steps, see `computed_in`.
        variables: path of a variable or slot -> how it differs.
        logs: name -> (pipelined, plain) value of a metric over the steps, the mean loss included.
        float64: why the same steps weren't compared in float64; empty if they were.
        reasons: reasons for training steps to differ, known from model and plan; metrics' own reasons, too.
        inference: whether steps were compared in inference behaviour, too, where some reasons don't hold.
        remaining: the reasons that hold there, too.
    """

    count: int
    dtype: str
    variables: Mapping[str, Difference]
    logs: Mapping[str, tuple[float, float]]
    float64: str = ""
    reasons: tuple[Note, ...] = ()
    inference: bool = False
    remaining: tuple[Note, ...] = ()

    def explains(self, difference: Difference) -> bool:
        """Whether a reason that holds in the steps that were compared explains how a variable differs."""
        names = difference.layer.split("/")
        return any(
            not note.alone
            or (note.kind is not NoteKind.METRIC and difference.state and note.layer.rpartition("/")[2] in names)
            for note in self.remaining
        )

    def explains_log(self, name: str) -> bool:
        """Whether a reason that holds in training explains how a metric differs."""
        metrics = {note.layer.rpartition("/")[2] for note in self.reasons if note.alone}
        return any(not note.alone for note in self.reasons) or any(
            name == metric or name.endswith(f"_{metric}") for metric in metrics
        )


@dataclasses.dataclass(frozen=True)
class Verification:
    """How pipelined steps compare with plain Keras.

    Attributes:
        loss: (pipelined, plain) loss of the first step.
        differences: variable -> largest absolute difference of its first gradient, relative to the largest absolute
            value of the plain gradient (or 1e-3 of the largest of all gradients, if that is more).
        largest: variable -> largest absolute value of the plain gradient.
        layers: variable -> path of its layer.
        training: whether the model was called with ``training=True``.
        reason: why it wasn't; empty if it was.
        steps: comparison of every variable and slot after some steps; None if only gradients were compared.
        tolerance: largest relative difference of gradients and logs taken as rounding.
        remark: about plain Keras' model, if it isn't a copy that computes what the user's model does; else empty.
    """

    loss: tuple[float, float]
    differences: Mapping[str, float]
    largest: Mapping[str, float]
    layers: Mapping[str, str]
    training: bool
    reason: str = ""
    steps: ComparedSteps | None = None
    tolerance: float = TOLERANCES["float32"]
    remark: str = ""

    @property
    def worst(self) -> tuple[str, float]:
        """The variable whose gradient differs most, and by how much."""
        return max(self.differences.items(), key=lambda item: item[1], default=("(no variable)", 0.0))

    def by_layer(self) -> dict[str, float]:
        """Returns the largest difference of each layer's gradients."""
        largest: dict[str, float] = {}
        for name, difference in self.differences.items():
            layer = self.layers[name]
            largest[layer] = max(largest.get(layer, 0.0), difference)
        return largest

    @property
    def unexplained(self) -> dict[str, float]:
        """Layers, "loss" and logs that neither rounding nor a known reason explains -> their difference.

        A layer's number is that of its gradients, or of its variables and slots after the steps.
        """
        steps = self.steps
        if steps is not None and any(not note.alone for note in steps.remaining):
            return {}
        unexplained = {layer: value for layer, value in self.by_layer().items() if not value <= self.tolerance}
        compared = {"loss": self.loss}
        if steps is not None:
            for difference in steps.variables.values():
                if not difference.is_rounding and not steps.explains(difference):
                    value = difference.checked if difference.exact is None else difference.exact
                    unexplained[difference.layer] = max(unexplained.get(difference.layer, 0.0), value)
            logs = {name: both for name, both in steps.logs.items() if not steps.explains_log(name)}
            compared |= {f"logs[{name!r}]": both for name, both in logs.items()}
        for name, (own, plain) in compared.items():
            value = _relative(own, plain)
            if not value <= self.tolerance:
                unexplained[name] = value
        return unexplained

    @property
    def equal(self) -> bool:
        """Whether all differences are rounding, or have a known reason."""
        return not self.unexplained

    def assert_equal(self) -> None:
        """Raises a VerificationError if something differs that neither rounding nor a known reason explains."""
        if not self.equal:
            what = ", ".join(f"{name} by {value:.2g}" for name, value in self.unexplained.items())
            raise VerificationError(f"the pipeline differs from plain Keras without a known reason: {what}\n{self}")

    def __str__(self) -> str:
        """Returns a table, largest difference first."""
        return "\n".join([self._first_line(), table(self._rows()), *self._remarks()])

    def _repr_html_(self) -> str:
        """Returns the table for notebooks."""
        return notebook_html(self._first_line(), [Table("", self._rows())], (), self._remarks())

    def _first_line(self) -> str:
        behaviour = "training" if self.training else f"inference behaviour: {self.reason}"
        return f"loss: pipelined {self.loss[0]:.9g}, plain {self.loss[1]:.9g} ({behaviour})"

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns a heading, and a row for each layer."""
        gradients, steps = self.by_layer(), self.steps
        if steps is None:
            rows = sorted(gradients.items(), key=lambda item: -item[1])
            heading = ("layer", "largest relative difference of a gradient")
            return [heading, *((layer, f"{difference:.2e}") for layer, difference in rows)]
        apart, exact = steps.inference, not steps.float64
        layers: dict[str, list[Difference]] = {}
        for difference in steps.variables.values():
            layers.setdefault(difference.layer, []).append(difference)
        unexplained = self.unexplained
        keyed = []
        for layer, own in layers.items():
            largest = [max(one.trained for one in own), max(one.checked for one in own)]
            numbers = [gradients.get(layer), *([largest[0]] if apart else []), largest[1]]
            numbers += [max(one.exact or 0.0 for one in own)] if exact else []
            if layer in unexplained:
                verdict = "UNEXPLAINED"
            elif not all(one.is_rounding for one in own):
                verdict = "known reason"
            elif apart and largest[0] > 10 * largest[1] and largest[0] > self.tolerance:
                verdict = "known reason, and rounding"
            else:
                verdict = "rounding" if any(largest) else "equal"
            shown = ["" if number is None else f"{number:.2e}" for number in numbers]
            keyed.append((-max(largest), (layer, *shown, verdict)))
        columns = ["layer", "gradient", *(["as trained"] if apart else []), f"{steps.count} steps"]
        columns += ["float64"] if exact else []
        return [(*columns, ""), *(row for _, row in sorted(keyed))]

    def _remarks(self) -> list[str]:
        steps = self.steps
        lines = [self.remark] if self.remark else []
        if steps is None:
            return lines
        lines += [
            f"Largest differences of a layer's gradients, and of its variables and slots after {steps.count} steps "
            f"relative to their change."
        ]
        if steps.inference:
            lines.append(
                f"As trained: with what has a known reason. The {steps.count} steps are those in inference behaviour."
            )
        if steps.float64:
            lines.append(f"Not compared in float64: {steps.float64}.")
        lines += [f"Known reason: {note}" for note in steps.reasons]
        unlike = [name for name, both in steps.logs.items() if _relative(*both) > self.tolerance]
        for name in unlike:
            verdict = "known reason" if steps.explains_log(name) else "UNEXPLAINED"
            lines.append(f"{name}: pipelined {steps.logs[name][0]:.6g}, plain {steps.logs[name][1]:.6g}: {verdict}")
        if "loss" in self.unexplained:
            lines.append("The loss of the first step: UNEXPLAINED")
        count = len(self.unexplained)
        lines.append("All differences are explained." if not count else f"{count} differences are UNEXPLAINED.")
        return lines


def _relative(own: float, plain: float) -> float:
    if own == plain or (math.isnan(own) and math.isnan(plain)):
        return 0.0
    value = abs(own - plain) / max(abs(plain), 1e-6)
    return value if math.isfinite(value) else math.inf


@dataclasses.dataclass(frozen=True)
class PlainSide:
    """Plain Keras' side of a comparison, with the loss and the gradients of its first step.

    Attributes:
        model: a copy of the user's model that nothing of ours has touched, or the model itself.
        loss: a batch's loss.
        gradients: of the trainable variables, None for one without.
        itself: why it is the model itself; empty for a copy.
    """

    model: keras.Model
    loss: float
    gradients: Sequence[np.ndarray | None]
    itself: str = ""

    @classmethod
    def of(cls, model: keras.Model, data: tuple[Any, Any, Any], *, training: bool) -> PlainSide:
        """Makes plain Keras' side.

        Args:
            model: the model, with the devices' values.
            data: inputs, labels and sample weights of a batch.
            training: whether it is called with ``training=True``.
        """
        twin = copy_of(model)
        if not isinstance(twin, str):
            try:
                return cls(twin, *plain_step(twin, *data, training=training))
            except Exception as error:  # Whatever a copy lacks: a vocabulary, the globals of a lambda.
                twin = reason_of(error)
        return cls(model, *plain_step(model, *data, training=training), itself=twin)


def computed_in(model: keras.Model, cluster: Cluster) -> str:
    """Returns the coarsest floating-point type of a model's steps: GPUs multiply float32 as TF32 unless it is off."""
    dtype = coarsest(model)
    tf32 = dtype == "float32" and cluster.has_gpus and tf.config.experimental.tensor_float_32_execution_enabled()
    return "tf32" if tf32 else dtype


def compare(
    run: Callable[[bool], StepResult],
    model: keras.Model,
    table: VariableTable,
    plain: PlainSide,
    data: tuple[Any, Any, Any],
    *,
    dtype: str,
    reason: str = "",
) -> Verification:
    """Compares a pipelined step with a plain one.

    Args:
        run: runs the pipelined step, in training behaviour if True, with gradients, without an update.
        model: the model, with the devices' values.
        table: names of its variables.
        plain: plain Keras' step.
        data: inputs, labels and sample weights of the batch.
        dtype: result of `computed_in`.
        reason: why layers compute something else on slices than on the whole batch in training; empty if they don't.
    """
    training = not reason
    result = run(training)
    unit = _scale(model)
    variables = model.trainable_variables
    paths = {table.name_of(variable): variable.path for variable in variables}
    expected = {table.name_of(v): gradient for v, gradient in zip(variables, plain.gradients, strict=True)}
    size = {name: float(np.max(np.abs(value), initial=0.0)) for name, value in expected.items() if value is not None}
    floor = max(1e-3 * max(size.values(), default=0.0), float(np.finfo(np.float64).tiny))
    differences, largest = {}, {}
    for name, value in expected.items():
        own = result.gradients.get(name)
        if own is None and value is None:
            continue
        difference = (0.0 if own is None else np.asarray(own, np.float64) / unit) - (0.0 if value is None else value)
        largest[name] = size.get(name, 0.0)
        # NaN counts as infinitely wrong; max() would skip it.
        error = float(np.max(np.abs(difference), initial=0.0)) / max(largest[name], floor)
        differences[name] = error if math.isfinite(error) else math.inf
    assert result.loss is not None
    layers = {name: paths[name].rpartition("/")[0] or paths[name] for name in differences}
    tolerance = TOLERANCES[dtype]
    remark = f"Plain Keras ran on the model itself, which can't be made again: {plain.itself}." if plain.itself else ""
    if not plain.itself and _relative(result.loss, plain.loss) > tolerance:
        loss, _ = plain_step(model, *data, training=training)
        if _relative(result.loss, loss) <= tolerance:
            remark = (
                f"Plain Keras' loss of the model itself is {loss:.9g}, as the pipeline's, but its copy by get_config() "
                f"has {plain.loss:.9g}: the configuration lacks something, or something was changed afterwards."
            )
    return Verification(
        (result.loss, plain.loss),
        differences,
        largest,
        layers,
        training,
        reason,
        tolerance=tolerance,
        remark=remark,
    )


def _scale(model: keras.Model) -> float:
    """Returns the loss scale, by which pipelined gradients are multiplied."""
    scaled = model.optimizer.scale_loss(tf.ones([], tf.float32))
    return float(keras.ops.convert_to_numpy(scaled))


@contextlib.contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Resets a model's metrics, and restores weights, state, seeds, optimizer and metrics at the context's end.

    Values are restored after an error, too.
    """
    changeable = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    changeable += [variable for metric in model.metrics for variable in metric.variables]
    changeable += seeds_of(model)
    own = list({id(variable): variable for variable in changeable}.values())
    before = [np.asarray(variable.value) for variable in own]
    try:
        for metric in model.metrics:
            metric.reset_state()
        yield
    finally:
        for variable, value in zip(own, before, strict=True):
            variable.assign(value)


def tensors(trees: tuple[Any, Any, Any]) -> list[Any]:
    """Converts structures of arrays to structures of tensors."""

    def tensor(leaf: Any) -> Any:
        return None if leaf is None else tf.convert_to_tensor(leaf)

    return [keras.tree.map_structure(tensor, tree) for tree in trees]


def plain_step(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, *, training: bool
) -> tuple[float, list[np.ndarray | None]]:
    """Returns plain Keras' loss and gradients of the trainable variables (None for a variable without one).

    Losses and metrics are compiled anew for it. The model's values, seeds and metrics don't change.
    """
    data = tensors((x, y, sample_weight))

    @tf.function(autograph=False)
    def step() -> tuple[tf.Tensor, list[tf.Tensor | None]]:
        if "train_step" in own_steps(model):
            loss, gradients = plain_gradients(model, keras.utils.pack_x_y_sample_weight(*data))
            return loss, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        with tf.GradientTape() as tape:
            outputs = model(data[0], training=training) if takes_training(model) else model(data[0])
            loss = compute_loss(model, x=data[0], y=data[1], y_pred=outputs, sample_weight=data[2], training=training)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return loss, [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]

    with restored(model), recompiled(model):
        loss, gradients = step.get_concrete_function()()
    return float(loss), [None if gradient is None else np.asarray(gradient) for gradient in gradients]
