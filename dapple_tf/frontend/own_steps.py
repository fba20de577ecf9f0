"""Tracing a model's own steps; what a ``train_step`` differentiates and applies is recorded instead of done.

Steps have the form of keras.io's guides: a loss is computed under a tape, its gradients with respect to the trainable
weights are applied by the model's optimizer, metrics are updated, and logs returned. The pipeline then computes
gradients and updates, whatever the loss is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.patching import replaced
from dapple_tf.frontend.step_logs import OptimizerReads, check_logs
from dapple_tf.frontend.trace_scope import TraceScope

_STEPS = ("train_step", "test_step", "predict_step")


def own_steps(model: keras.Model) -> tuple[str, ...]:
    """Returns the names of the steps that a model defines itself."""
    return tuple(name for name in _STEPS if getattr(type(model), name) is not getattr(keras.Model, name))


def own_losses(model: keras.Model) -> bool:
    """Whether a model computes its loss in its own steps, and so needn't be called as a whole."""
    return bool({"train_step", "test_step"} & set(own_steps(model)))


class OwnStep:
    """A ``train_step`` while it is traced.

    Attributes:
        terms: the tensors whose sum it differentiated.
        applied_by: the optimizer's method that it called.
    """

    def __init__(self, scope: TraceScope, reads: OptimizerReads) -> None:
        self._model = model = reads.model
        self._scope, self._reads = scope, reads
        self._variables = {id(variable): variable for variable in model.trainable_variables}
        self._values = {id(scope.get_current_value(v)): v for v in model.trainable_variables}
        self._gradients: list[tuple[tf.Tensor, keras.Variable]] = []
        self._applied = self._scaled = False
        self.terms: list[tf.Tensor] = []
        self.applied_by = "apply"

    def _refused(self, why: str) -> CaptureError:
        return CaptureError(
            f"train_step() of model {self._model.name!r} {why}, which a pipeline can't do: it trains on the gradients "
            f"of one loss with respect to all trainable weights, applied as they are by the model's optimizer. Compute "
            f"what you need in the loss (or in compute_loss()), by the optimizer's options, or by a metric"
        )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Makes tapes and optimizers record their calls inside the context."""
        optimizers = {type(self._model.optimizer), keras.optimizers.Optimizer}
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(tf.GradientTape, "gradient", self._gradient))
            for name, make in (("apply", self._apply), ("scale_loss", self._scale)):
                for owner in {_definer(optimizer, name) for optimizer in optimizers}:
                    stack.enter_context(replaced(owner, name, make))
            for owner in {_definer(optimizer, "apply_gradients") for optimizer in optimizers}:
                stack.enter_context(replaced(owner, "apply_gradients", self._apply_gradients))
            yield

    def check(self) -> None:
        """Refuses a step of another form.

        Raises:
            CaptureError: the step does something else; the text says what.
        """
        if not self.terms:
            raise self._refused("asks no tf.GradientTape for the gradients of its trainable weights")
        used = [reader.name for token, _ in self._gradients for reader in token.consumers()]
        if used:
            raise self._refused(f"computes with gradients of weights ({used[0]}) before or besides applying them")
        if not self._applied:
            raise self._refused("doesn't apply its gradients by self.optimizer")
        optimizer = self._model.optimizer
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
        if scales and not self._scaled:
            raise self._refused(
                "doesn't scale its loss by self.optimizer.scale_loss(), though the optimizer unscales it"
            )

    def _variable(self, source: Any) -> keras.Variable | None:
        return self._variables.get(id(source), self._values.get(id(source)))

    def _gradient(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def gradient(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            flat = keras.tree.flatten(sources)
            variables = [variable for source in flat if (variable := self._variable(source)) is not None]
            if not variables:
                return original(tape, target, sources, *args, **kwargs)
            if self.terms:
                raise self._refused("differentiates with respect to weights more than once")
            if len(variables) < len(flat) or {id(variable) for variable in variables} != set(self._variables):
                raise self._refused(
                    f"differentiates with respect to {len(variables)} of {len(self._variables)} trainable weights and "
                    f"{len(flat) - len(variables)} other tensors (freeze layers by trainable=False)"
                )
            if args or kwargs.get("output_gradients") is not None:
                raise self._refused("gives the gradient of its loss itself (output_gradients)")
            self.terms = [tf.convert_to_tensor(term) for term in keras.tree.flatten(target)]
            tokens = [tf.compat.v1.placeholder(v.dtype, v.shape, name="gradient_of_weight") for v in variables]
            self._gradients = list(zip(tokens, variables, strict=True))
            return keras.tree.pack_sequence_as(sources, tokens)

        return gradient

    def _apply(self, _: Callable[..., Any]) -> Callable[..., Any]:
        def apply(optimizer: Any, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
            if optimizer is not self._model.optimizer:
                raise self._refused(f"applies gradients by another optimizer ({optimizer.name}) than the model's")
            if self._applied:
                raise self._refused("applies gradients more than once")
            gradients = list(grads)
            wanted = self._model.trainable_variables if trainable_variables is None else list(trainable_variables)
            pairs = {(id(token), id(variable)) for token, variable in self._gradients}
            own = {(id(g), id(self._variable(v))) for g, v in zip(gradients, wanted, strict=True) if g is not None}
            if not own or own != pairs:
                raise self._refused("applies other gradients than those of its loss")
            self._applied = self._reads.updated = True
            self._scope.close_parameters(
                f"train_step() of model {self._model.name!r} reads weights after it has applied their gradients; a "
                f"pipeline updates them when the step has ended: read them before, or in a callback"
            )

        return apply

    def _apply_gradients(self, _: Callable[..., Any]) -> Callable[..., Any]:
        apply = self._apply(_)

        def apply_gradients(optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]], *__: Any, **___: Any) -> None:
            gradients, variables = zip(*grads_and_vars, strict=True)
            apply(optimizer, gradients, variables)
            self.applied_by = "apply_gradients"

        return apply_gradients

    def _scale(self, _: Callable[..., Any]) -> Callable[..., Any]:
        def scale_loss(optimizer: Any, loss: Any) -> Any:
            """Returns the loss unscaled: pipelined steps scale gradients themselves."""
            self._scaled |= optimizer is self._model.optimizer
            return loss

        return scale_loss


def run_own_step(name: str, scope: TraceScope, reads: OptimizerReads, data: Any) -> tuple[Any, list[tf.Tensor]]:
    """Runs a model's own step while it is traced; its table records by which method the step applies gradients.

    Args:
        name: ``"train_step"`` or ``"test_step"``.
        scope: has the values of the model's variables.
        reads: has the model and its table, and the values of the optimizer's variables.
        data: the step's argument.

    Returns:
        The logs that it returns, and what a ``train_step`` differentiated, see `OwnStep`.

    Raises:
        CaptureError: a pipeline can't run a step of its form.
    """
    own, model = OwnStep(scope, reads), reads.model
    trains = name == "train_step"
    with own.recorded() if trains else contextlib.nullcontext():
        logs = getattr(model, name)(data)
    check_logs(model, name, logs)
    if trains:
        own.check()
        reads.table.applied_by = own.applied_by
    return logs, own.terms


def predicted(model: keras.Model, data: Any) -> Any:
    """Returns the outputs of a model's own ``predict_step`` while it is traced.

    Raises:
        CaptureError: they aren't tensors with one row for each sample.
    """
    outputs = model.predict_step(data)
    for output in keras.tree.flatten(outputs):
        shape = output.shape if tf.is_tensor(output) else None
        if shape is None or shape.rank == 0 or (shape.rank is not None and shape[0] is not None):
            what = "something that isn't a tensor" if shape is None else f"a tensor of shape {shape}"
            raise CaptureError(
                f"predict_step() of model {model.name!r} returns {what}: return tensors with one row for each sample, "
                f"or compute this from what predict() returns"
            )
    return outputs


def plain_gradients(model: keras.Model, data: Any) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
    """Returns the loss and gradients of a model's own ``train_step``, without loss scale and without updates.

    Args:
        model: a model whose step has been captured, so that it has the right form.
        data: the step's argument.
    """
    optimizer, taken = type(model.optimizer), dict[str, Any]()

    def apply(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(_: Any, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
            variables = model.trainable_variables if trainable_variables is None else trainable_variables
            taken["gradients"] = {id(variable): gradient for gradient, variable in zip(grads, variables, strict=True)}

        return call

    def apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(own: Any, grads_and_vars: Iterable[tuple[Any, Any]], *_: Any, **__: Any) -> None:
            apply(original)(own, *zip(*grads_and_vars, strict=True))

        return call

    def gradient(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            if any(
                source is variable for source in keras.tree.flatten(sources) for variable in model.trainable_variables
            ):
                taken["loss"] = tf.add_n([tf.reduce_sum(term) for term in keras.tree.flatten(target)])
            return original(tape, target, sources, *args, **kwargs)

        return call

    with (
        replaced(tf.GradientTape, "gradient", gradient),
        replaced(_definer(optimizer, "apply"), "apply", apply),
        replaced(_definer(optimizer, "apply_gradients"), "apply_gradients", apply_gradients),
        replaced(_definer(optimizer, "scale_loss"), "scale_loss", lambda _: lambda _, loss: loss),
    ):
        model.train_step(data)
    return taken["loss"], [taken["gradients"].get(id(variable)) for variable in model.trainable_variables]


def _definer(cls: type, name: str) -> type:
    return next(each for each in cls.__mro__ if name in vars(each))
