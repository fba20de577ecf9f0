"""Variables that notify watchers before they are read or assigned, in Python and by traced functions.

Every read or assignment of a TensorFlow variable uses its handle. A watched variable becomes an instance of a subclass
that notifies its watchers when its handle is used; nothing else about it changes, and `unwatch` restores its class. A
traced ``tf.function`` has the handle already, as a capture: it gets another capture, of no tensor, which TensorFlow
computes before each call and which notifies the watchers of its variables. Functions that were traced before this
module was imported are found among Python's objects when the first variable is watched.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from graph_passes.ir.tensorflow_private import CONCRETE_FUNCTION_CALLBACKS, ConcreteFunction, captured_inputs

_WATCHERS = "_dapple_watchers"


class Watcher(Protocol):
    """An observer of variables."""

    def on_read(self, variables: Sequence[tf.Variable]) -> None:
        """Runs before these variables are read or assigned."""


class _Silent(threading.local):
    """The watchers that a thread doesn't notify."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []


_silent = _Silent()
_functions: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions that use variables."""
_lock = threading.RLock()
"""Held while these are changed or iterated: threads that read data trace functions, too."""
_by_handle: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
"""Identity of a handle -> its variable, for watched ones."""
_kinds: dict[Any, Any] = {}
"""Class of variables -> its subclass."""
_version = 0
_searched = False
"""Whether functions that were traced before this module was imported have been searched."""


def watch(variables: Iterable[tf.Variable], watcher: Watcher) -> None:
    """Makes these variables notify a watcher before one of them is read or assigned."""
    global _version
    fresh = False
    for variable in variables:
        watchers = watchers_of(variable)
        if any(own is watcher for own in watchers):
            continue
        _version += 1
        vars(variable)[_WATCHERS] = (*watchers, watcher)
        if not watchers:
            fresh = True
            _by_handle[id(vars(variable)["_handle"])] = variable
            variable.__class__ = _watched(type(variable))
    if fresh:
        _search()
    with _lock:
        functions = list(_functions) if fresh else []
    for function in functions:
        _attach(function)


def unwatch(variables: Iterable[tf.Variable], watcher: Watcher) -> None:
    """Undoes `watch`."""
    global _version
    for variable in variables:
        watchers = watchers_of(variable)
        left = tuple(own for own in watchers if own is not watcher)
        if len(left) == len(watchers):
            continue
        _version += 1
        vars(variable)[_WATCHERS] = left
        if not left:
            del vars(variable)[_WATCHERS]
            _by_handle.pop(id(vars(variable)["_handle"]), None)
            variable.__class__ = type(variable).__mro__[1]


def watchers_of(variable: tf.Variable) -> tuple[Watcher, ...]:
    """Returns the watchers of a variable."""
    watchers: tuple[Watcher, ...] = vars(variable).get(_WATCHERS, ())
    return watchers


def version() -> int:
    """Returns a number that changes whenever a variable gets or loses a watcher."""
    return _version


@contextlib.contextmanager
def untold(watcher: Watcher) -> Iterator[None]:
    """Keeps variables from notifying this watcher inside the context, in this thread."""
    _silent.watchers.append(watcher)
    try:
        yield
    finally:
        _silent.watchers.pop()


def _watched(kind: Any) -> Any:
    """Returns the subclass for watched variables of a class, which looks the same otherwise."""
    if kind in _kinds:
        return _kinds[kind]

    def get(variable: tf.Variable) -> Any:
        _tell((variable,))
        return vars(variable)["_handle"]

    def assign(variable: tf.Variable, handle: Any) -> None:
        vars(variable)["_handle"] = handle

    # Not `handle`, which returns it: TensorFlow's C++ code uses this one.
    names = {"_handle": property(get, assign), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    _kinds[kind] = type(kind)(kind.__name__, (kind,), names)
    return _kinds[kind]


def _tell(variables: Iterable[tf.Variable]) -> None:
    """Notifies watchers, unless a function is being traced, which uses nothing yet."""
    told: dict[int, tuple[Watcher, list[tf.Variable]]] = {}
    for variable in variables:
        for watcher in watchers_of(variable):
            if not any(own is watcher for own in _silent.watchers):
                told.setdefault(id(watcher), (watcher, []))[1].append(variable)
    if told and tf.executing_eagerly():
        for watcher, own in told.values():
            watcher.on_read(own)


class _Captured:
    """The watched variables that a function has captured."""

    def __init__(self) -> None:
        self.variables: dict[int, weakref.ref[tf.Variable]] = {}

    def __call__(self) -> list[tf.Tensor]:
        """Notifies watchers; returns the values of no captures."""
        _tell([variable for own in self.variables.values() if (variable := own()) is not None])
        return []


def _attach(function: Any) -> None:
    """Makes a traced function notify the watchers of the variables that it uses."""
    captures = captured_inputs(function)
    variables = [variable for own in captures if (variable := _by_handle.get(id(own))) is not None]
    if not variables:
        return
    captured = next((own for own in captures if isinstance(own, _Captured)), None)
    if captured is None:
        captures.append(captured := _Captured())
    for variable in variables:
        captured.variables[id(variable)] = weakref.ref(variable)


def _search() -> None:
    """Finds the functions that were traced before this module was imported, once."""
    global _searched
    if _searched:
        return
    _searched = True
    for own in gc.get_objects():
        if ConcreteFunction in type(own).__mro__:  # `isinstance` asks the objects, some of which answer with errors.
            _traced(own)


def _traced(function: Any) -> None:
    """Registers a traced function; TensorFlow calls this with each."""
    if any(getattr(own, "dtype", None) == tf.resource for own in captured_inputs(function)):
        with _lock:
            _functions.add(function)
        _attach(function)


CONCRETE_FUNCTION_CALLBACKS.append(_traced)
