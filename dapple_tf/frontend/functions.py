"""Calls of ``tf.function`` inside a model, while the model is traced.

A function that has been called before has a graph that reads the model's variables themselves, not their replacements
in the trace. And only a name would be known of its call: neither which layers it calls, nor how to differentiate it.
Functions are therefore traced inline where they are called; functions for XLA, which some operators need on CPUs, are
traced as functions.
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


class TracedValues(Protocol):
    """A trace's values of variables."""

    def again(self) -> Assigned:
        """Returns a scope in which variables have their present values."""

    def take_over(self, updates: Iterable[tuple[keras.Variable, Any]]) -> None:
        """Assigns to variables."""


class Assigned(contextlib.AbstractContextManager[Any], Protocol):
    """A scope that records the assignments within it."""

    updates: list[tuple[keras.Variable, Any]]


@contextlib.contextmanager
def functions_traced(values: TracedValues) -> Iterator[None]:
    """Makes every call of a ``tf.function`` trace its body anew, inline unless it is for XLA, inside the context."""

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
