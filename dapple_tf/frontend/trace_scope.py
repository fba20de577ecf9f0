"""Variables while a model is traced: tensors, and the values that layers assign to them.

Branches, loops and calls of ``tf.function`` hand on what is assigned within them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.patching import replaced
from graph_passes.ir.tensorflow_private import compiles_with_xla, cond_v2, python_body, watches_variables, while_v2

_Function = type(tf.function(lambda: None))


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


@contextlib.contextmanager
def state_passed_on(scope: TraceScope) -> Iterator[None]:
    """Hands assignments in branches and loops' bodies on to the scope, inside the context.

    TensorFlow traces each branch and each body into a graph of its own. What is assigned there leaves it as one more
    output of the branch, or as one more variable of the loop. All control flow of Keras and TensorFlow comes here:
    ``ops.cond``, ``switch``, ``while_loop``, ``fori_loop``, ``map``, ``scan``, ``keras.layers.RNN``, ``tf.cond``,
    ``tf.map_fn``, AutoGraph.
    """

    def conditional(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(predicate: Any, true: Callable[[], Any], false: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            return _branch(scope, lambda branches: original(predicate, *branches, *args, **kwargs), [true, false])

        return call

    def indexed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(index: Any, functions: Sequence[Callable[[], Any]], *args: Any, **kwargs: Any) -> Any:
            return _branch(scope, lambda branches: original(index, branches, *args, **kwargs), functions)

        return call

    def loop(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: _loop(scope, original, *args, **kwargs)

    with (
        replaced(cond_v2, "cond_v2", conditional),
        replaced(cond_v2, "indexed_case", indexed),
        replaced(while_v2, "while_loop", loop),
    ):
        yield


def _branch(
    scope: TraceScope, build: Callable[[list[Callable[[], Any]]], Any], branches: Sequence[Callable[[], Any]]
) -> Any:
    """Builds a conditional, once more with the assigned variables as outputs if there are any."""
    assigned: dict[int, keras.Variable] = {}

    def passing(branch: Callable[[], Any], variables: Sequence[keras.Variable]) -> Callable[[], Any]:
        def call() -> Any:
            with scope.inside(()) as updates:
                result = branch()
                assigned.update((id(variable), variable) for variable, _ in updates)
                return (result, [scope.present_value(variable) for variable in variables]) if variables else result

        return call

    while True:
        variables = list(assigned.values())
        result = build([passing(branch, variables) for branch in branches])
        if len(assigned) == len(variables):
            break
    if not variables:
        return result
    result, values = result
    scope.take_over(zip(variables, values, strict=True))
    return result


def _loop(
    scope: TraceScope,
    original: Callable[..., Any],
    condition: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Sequence[Any],
    shape_invariants: Sequence[Any] | None = None,
    *args: Any,
    return_same_structure: bool = True,
    **kwargs: Any,
) -> Any:
    """Builds a loop, once more with the assigned variables as variables of the loop if there are any.

    Raises:
        ValueError: the loop's condition assigns a variable.
    """
    assigned: dict[int, keras.Variable] = {}

    def check(*arguments: Any) -> Any:
        *own, values = arguments
        with scope.inside(zip(variables, values, strict=True)) as updates:
            result = condition(*own)
        if updates:
            raise ValueError(
                f"the condition of a loop assigns variable {updates[0][0].path!r}, which it can't hand on: assign it "
                f"in the loop's body"
            )
        return result

    def step(*arguments: Any) -> Any:
        *own, values = arguments
        with scope.inside(zip(variables, values, strict=True)) as updates:
            results = body(*own)
            assigned.update((id(variable), variable) for variable, _ in updates)
            values = [scope.present_value(variable) for variable in variables]
        return [*(results if tf.nest.is_nested(results) else [results]), values]

    while True:
        variables = list(assigned.values())
        values = [scope.present_value(variable) for variable in variables]
        shapes = None if shape_invariants is None else [*shape_invariants, [value.shape for value in values]]
        *results, values = original(check, step, [*loop_vars, values], shapes, *args, **kwargs)
        if len(assigned) == len(variables):
            break
    scope.take_over(zip(variables, values, strict=True))
    if len(results) == 1 and not return_same_structure:
        return results[0]
    return tf.nest.pack_sequence_as(loop_vars, tf.nest.flatten(results))


@contextlib.contextmanager
def functions_traced(scope: TraceScope) -> Iterator[None]:
    """Makes every call of a ``tf.function`` trace its body anew, inline unless it is for XLA, inside the context.

    A function that has been called before has a graph that reads the model's variables themselves, not their
    replacements in the trace. And only a name would be known of its call: neither which layers it calls, nor how to
    differentiate it. Functions for XLA, which some operators need on CPUs, are traced as functions.
    """

    def traced(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = tf.nest.map_structure(_as_tensor, (args, kwargs))
            if not compiles_with_xla(function):
                return python_body(function)(*args, **kwargs)
            variables: list[keras.Variable] = []

            def compiled(*args: Any, **kwargs: Any) -> Any:
                with scope.again() as inside:
                    result = python_body(function)(*args, **kwargs)
                variables[:] = [variable for variable, _ in inside.updates]
                return result, [value for _, value in inside.updates]

            result, updates = original(tf.function(compiled, autograph=False, jit_compile=True), *args, **kwargs)
            scope.take_over(zip(variables, updates, strict=True))
            return result

        return call

    with replaced(_Function, "__call__", traced):
        yield


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value
