"""Variables while a model is traced: tensors, and the values that layers assign to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.control_flow import state_passed_on
from dapple_tf.frontend.patching import replaced
from graph_passes.ir.tensorflow_private import watches_variables


class TraceScope(keras.StatelessScope):
    """Records what layers assign. A layer that reads an assigned value gets it without a gradient.

    TensorFlow's variables behave the same: their values don't record how they were computed.

    Attributes:
        provide: returns values of variables that aren't in the mapping; None for unknown ones.
        unknown: the unknown variables that were read.

    Args:
        mapping: variables and their values.
        state: ids of the floating-point variables that layers assign.
        parameters: ids of the trainable variables.
    """

    state_mapping: dict[int, Any]

    def __init__(
        self, mapping: list[tuple[keras.Variable, tf.Tensor]], state: Container[int], parameters: Container[int]
    ) -> None:
        super().__init__(mapping, collect_losses=True)
        self.state, self.parameters = state, parameters
        self.assigned: dict[int, tf.Tensor] = {}
        self.provide: Callable[[keras.Variable], tf.Tensor | None] = lambda _: None
        self.unknown: list[keras.Variable] = []
        self.updates: list[tuple[keras.Variable, tf.Tensor]] = []
        self._watchers: list[list[tf.Tensor]] = []
        self._tapes: list[tf.GradientTape] = []
        self._entered = contextlib.ExitStack()
        self._closed = ""

    def __enter__(self) -> TraceScope:
        """Makes tapes watch trainable variables by themselves, as they watch TensorFlow's."""

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
        self._entered.enter_context(state_passed_on(self))
        self._graph = tf.compat.v1.get_default_graph()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._entered.close()

    @property
    def observed(self) -> bool:
        """Whether an observer sees the variables read now, or values computed from them."""
        return bool(self._tapes or self._watchers or self._closed)

    def role_of(self, variable: keras.Variable) -> Hashable:
        """Returns what readers of a variable get besides its value, equal for variables that are read alike."""
        return tuple(id(variable) in ids for ids in (self.state, self.parameters, self.assigned))

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[tf.Tensor]]:
        """Yields a list of the values of trainable variables that are read inside the context, each once."""
        values: list[tf.Tensor] = []
        self._watchers.append(values)
        try:
            yield values
        finally:
            self._watchers.pop()

    def again(self) -> TraceScope:
        """Returns a scope in which variables have their present values."""
        copy = TraceScope([], self.state, self.parameters)
        copy.state_mapping = dict(self.state_mapping)
        copy.assigned = dict(self.assigned)
        copy.provide, copy.unknown = self.provide, self.unknown
        return copy

    def close_parameters(self, why: str) -> None:
        """Makes reading trainable variables an error with the text ``why`` from now on."""
        self._closed = why

    @contextlib.contextmanager
    def inside(
        self, values: Iterable[tuple[keras.Variable, tf.Tensor]]
    ) -> Iterator[list[tuple[keras.Variable, tf.Tensor]]]:
        """Yields the list of assignments inside the context, a graph of its own, which are undone at its end.

        Args:
            values: variables, and the values with which this graph begins.
        """
        outside = self._graph, self.state_mapping, self.assigned, self.updates
        self._graph, self.updates = tf.compat.v1.get_default_graph(), []
        begun = {id(variable): value for variable, value in values}
        self.state_mapping, self.assigned = outside[1] | begun, outside[2] | begun
        try:
            yield self.updates
        finally:
            self._graph, self.state_mapping, self.assigned, self.updates = outside

    def present_value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns a variable's value, with its gradient."""
        value = self.state_mapping.get(id(variable))
        return tf.convert_to_tensor(variable.value) if value is None else value

    def take_over(self, updates: Iterable[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Assigns to variables the values that were assigned to them in another scope."""
        for update in updates:
            self.add_update(update)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Records an assignment; called by ``variable.assign``.

        Raises:
            ValueError: it is within a graph from which the value can't be handed on.
        """
        variable, value = update
        if tf.compat.v1.get_default_graph() is not self._graph and not tf.executing_eagerly():
            raise ValueError(
                f"variable {variable.path!r} is assigned in a function that TensorFlow traces by itself: assign it "
                f"outside, or in keras.ops' branches and loops"
            )
        super().add_update(update)
        self.assigned[id(variable)] = value
        self.updates.append(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns the value for a variable's readers."""
        value = super().get_current_value(variable)
        if value is None:
            value = self.provide(variable)
            if value is None:
                self.unknown.append(variable)
            return value
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
