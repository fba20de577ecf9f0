"""State that layers assign in branches and loops, while a model is traced.

TensorFlow traces each branch and each body into a graph of its own. What is assigned there leaves it as one more output
of the branch, or as one more variable of the loop. All of Keras' and TensorFlow's control flow comes here:
``ops.cond``, ``switch``, ``while_loop``, ``fori_loop``, ``map``, ``scan``, ``keras.layers.RNN``, ``tf.cond``,
``tf.map_fn``, AutoGraph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from dapple_tf.frontend.patching import replaced
from graph_passes.ir.tensorflow_private import cond_v2, while_v2


class Scope(Protocol):
    """A trace's values of variables."""

    def inside(
        self, values: Iterable[tuple[keras.Variable, tf.Tensor]]
    ) -> contextlib.AbstractContextManager[list[tuple[keras.Variable, tf.Tensor]]]:
        """Yields the list of assignments inside the context, a graph of its own, which are undone at its end."""

    def present_value(self, variable: keras.Variable) -> tf.Tensor:
        """Returns a variable's value."""

    def take_over(self, updates: Iterable[tuple[keras.Variable, tf.Tensor]]) -> None:
        """Assigns to variables."""


@contextlib.contextmanager
def state_passed_on(scope: Scope) -> Iterator[None]:
    """Hands assignments in branches and loops' bodies on to the scope, inside the context."""

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
    scope: Scope, build: Callable[[list[Callable[[], Any]]], Any], branches: Sequence[Callable[[], Any]]
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
    scope: Scope,
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
