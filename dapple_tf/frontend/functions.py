"""What ``tf.function`` makes of parts of a model, while the model is traced.

A function that has been called before has a graph that reads the model's variables themselves, not what stands for them
here. And nothing would be known of its call but a name: not which layers it calls, nor how to differentiate it. So
functions are traced where they are called, as if they weren't any; those for XLA, without which some operators don't
exist on CPUs, as functions of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.frontend.patching import replaced
from graph_passes.ir.tensorflow_private import compiles_with_xla, python_body

_Function = type(tf.function(lambda: None))


class Values(Protocol):
    """What a trace knows of the values that variables have."""

    def again(self) -> Assigned:
        """A scope in which variables have the values that they have now."""

    def take_over(self, updates: Iterable[tuple[keras.Variable, Any]]) -> None:
        """Assigns to variables."""


class Assigned(contextlib.AbstractContextManager[Any], Protocol):
    """A scope that keeps what is assigned within."""

    updates: list[tuple[keras.Variable, Any]]


@contextlib.contextmanager
def functions_traced(values: Values) -> Iterator[None]:
    """Within it, every call of a ``tf.function`` traces its body anew: into the present graph, unless it is for XLA."""

    def traced(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = tf.nest.map_structure(_as_tensor, (args, kwargs))
            if not compiles_with_xla(function):
                return python_body(function)(*args, **kwargs)
            variables: list[keras.Variable] = []

            def compiled(*args: Any, **kwargs: Any) -> Any:
                with values.again() as inside:
                    result = python_body(function)(*args, **kwargs)
                variables[:] = [variable for variable, _ in inside.updates]
                return result, [value for _, value in inside.updates]

            result, updates = original(tf.function(compiled, autograph=False, jit_compile=True), *args, **kwargs)
            values.take_over(zip(variables, updates, strict=True))
            return result

        return call

    with replaced(_Function, "__call__", traced):
        yield


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value
