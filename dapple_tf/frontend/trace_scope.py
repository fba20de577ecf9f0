"""What variables are while a model is traced: tensors, and what layers assign to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.patching import replaced
from graph_passes.ir.tensorflow_private import watches_variables


class TraceScope(keras.StatelessScope):
    """Keeps what layers assign. A layer that reads what it has assigned gets it without a gradient.

    So it is with TensorFlow's variables, whose values don't tell how they were computed.

    Attributes:
        provide: gives values of variables that aren't in the mapping; None for those that it doesn't know either.

    Args:
        mapping: variables and their values.
        state: ids of the floating-point variables that layers assign.
        parameters: ids of the trainable variables.
    """

    def __init__(
        self, mapping: list[tuple[keras.Variable, tf.Tensor]], state: Container[int], parameters: Container[int]
    ) -> None:
        super().__init__(mapping, collect_losses=True)
        self.state, self.parameters = state, parameters
        self.assigned: dict[int, tf.Tensor] = {}
        self.provide: Callable[[keras.Variable], tf.Tensor | None] = lambda _: None
        self.updates: list[tuple[keras.Variable, tf.Tensor]] = []
        self._watchers: list[list[tf.Tensor]] = []
        self._tapes: list[tf.GradientTape] = []
        self._entered = contextlib.ExitStack()
        self._closed = ""

    def __enter__(self) -> TraceScope:
        """Tapes watch trainable variables by themselves from now on, as they would TensorFlow's."""

        def begun(original: Callable[..., Any]) -> Callable[..., Any]:
            def begin(tape: tf.GradientTape) -> None:
                self._tapes.append(tape)
                original(tape)

            return begin

        def ended(original: Callable[..., Any]) -> Callable[..., Any]:
            def end(tape: tf.GradientTape) -> None:
                self._tapes.remove(tape)
                original(tape)

            return end

        self._entered.enter_context(replaced(tf.GradientTape, "_push_tape", begun))
        self._entered.enter_context(replaced(tf.GradientTape, "_pop_tape", ended))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._entered.close()

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[tf.Tensor]]:
        """Within it, the values of trainable variables that are read are added to a list, each once."""
        values: list[tf.Tensor] = []
        self._watchers.append(values)
        try:
            yield values
        finally:
            self._watchers.pop()

    def again(self) -> TraceScope:
        """A scope in which variables have the values that they have now."""
        copy = TraceScope([], self.state, self.parameters)
        copy.state_mapping = dict(self.state_mapping)
        copy.assigned = dict(self.assigned)
        copy.provide = self.provide
        return copy

    def close_parameters(self, why: str) -> None:
        """From now on, reading trainable variables is an error."""
        self._closed = why

    def take_over(self, updates: Iterable[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Assigns to variables what has been assigned to them in a scope of its own."""
        for update in updates:
            self.add_update(update)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Called by ``variable.assign``."""
        super().add_update(update)
        variable, value = update
        self.assigned[id(variable)] = value
        self.updates.append(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        """What a variable's readers get."""
        value = super().get_current_value(variable)
        if value is None:
            return self.provide(variable)
        if id(variable) in self.parameters:
            if self._closed:
                raise CaptureError(self._closed)
            for tape in self._tapes:
                if watches_variables(tape):
                    tape.watch(value)
            for values in self._watchers:
                if all(value is not known for known in values):
                    values.append(value)
        return tf.stop_gradient(value) if id(variable) in self.assigned and id(variable) in self.state else value
