"""Variables that tell somebody before they are read or assigned, in Python and by functions that were traced.

A TensorFlow variable is used by its handle, whoever reads or assigns it and however. A variable that is watched becomes
an instance of a subclass that tells its watchers when its handle is asked for; nothing else about it changes, and
`unwatch` makes it what it was. A ``tf.function`` that was traced has the handle already, as a capture: it gets another
capture, of no tensor, which TensorFlow computes before each call and which tells watchers of its variables. Functions
that were traced before this module was imported are found among Python's objects when the first variable is watched.
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
    """Is told of variables."""

    def looked_at(self, variables: Sequence[tf.Variable]) -> None:
        """Before somebody reads or assigns these variables."""


class _Silent(threading.local):
    """What isn't told in a thread."""

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []


_silent = _Silent()
_functions: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions that use variables."""
_lock = threading.RLock()
"""Held while these are changed or gone through: threads that read data trace functions, too."""
_by_handle: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
"""Identity of a handle -> its variable, for those that are watched."""
_kinds: dict[Any, Any] = {}
"""Class of variables -> its subclass."""
_version = 0
_searched = False
"""Whether functions have been looked for that were traced before TensorFlow told of them."""


def watch(variables: Iterable[tf.Variable], watcher: Watcher) -> None:
    """Has a watcher told before one of these variables is read or assigned."""
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
    """The opposite of `watch`."""
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
    """Who watches a variable."""
    watchers: tuple[Watcher, ...] = vars(variable).get(_WATCHERS, ())
    return watchers


def version() -> int:
    """A number that changes whenever somebody begins or ends to watch a variable."""
    return _version


@contextlib.contextmanager
def untold(watcher: Watcher) -> Iterator[None]:
    """Within it, variables tell this watcher nothing, in this thread."""
    _silent.watchers.append(watcher)
    try:
        yield
    finally:
        _silent.watchers.pop()


def _watched(kind: Any) -> Any:
    """The subclass of variables of a kind that are watched; it looks the same otherwise."""
    if kind in _kinds:
        return _kinds[kind]

    def get(variable: tf.Variable) -> Any:
        _tell((variable,))
        return vars(variable)["_handle"]

    def assign(variable: tf.Variable, handle: Any) -> None:
        vars(variable)["_handle"] = handle

    # Not `handle`, which gives it: what TensorFlow has in C++ asks for this one.
    names = {"_handle": property(get, assign), "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    _kinds[kind] = type(kind)(kind.__name__, (kind,), names)
    return _kinds[kind]


def _tell(variables: Iterable[tf.Variable]) -> None:
    """Tells watchers, unless a function is being traced, which uses nothing yet."""
    told: dict[int, tuple[Watcher, list[tf.Variable]]] = {}
    for variable in variables:
        for watcher in watchers_of(variable):
            if not any(own is watcher for own in _silent.watchers):
                told.setdefault(id(watcher), (watcher, []))[1].append(variable)
    if told and tf.executing_eagerly():
        for watcher, own in told.values():
            watcher.looked_at(own)


class _Captured:
    """The watched variables that a function has captured."""

    def __init__(self) -> None:
        self.variables: dict[int, weakref.ref[tf.Variable]] = {}

    def __call__(self) -> list[tf.Tensor]:
        """Tells watchers; gives the values of no captures."""
        _tell([variable for own in self.variables.values() if (variable := own()) is not None])
        return []


def _attach(function: Any) -> None:
    """Has a function that has been traced tell of the watched variables that it uses."""
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
    """Is called by TensorFlow with each function that has been traced."""
    if any(getattr(own, "dtype", None) == tf.resource for own in captured_inputs(function)):
        with _lock:
            _functions.add(function)
        _attach(function)


CONCRETE_FUNCTION_CALLBACKS.append(_traced)
