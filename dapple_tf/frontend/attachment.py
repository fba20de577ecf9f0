"""Running the steps of a Keras model elsewhere, while its own ``fit``, ``evaluate`` and ``predict`` drive them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

WHOLE = ("get_weights", "save", "save_weights", "export", "set_weights", "load_weights")
"""Methods of a model that read or assign all of its values, before which all are fetched at once."""


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The replacements of a model's functions.

    Attributes:
        train: takes an iterator, trains on its next batches and returns the logs.
        test: the same, without training.
        predict: takes a list of batches and returns the outputs for all of them, in the model's structure.
        sync: copies values from the devices into the model, if they have newer ones.
        agree: ``sync`` for callbacks that may read the model, or assign values for the next step; a model without
            values of its own gets none.
        between_epochs: the same when an epoch begins or ends; it may leave values to be fetched when they are read.
        steps_left: called before each training step with the number of steps left in its epoch; None if unknown.
    """

    train: Callable[[Any], dict[str, Any]]
    test: Callable[[Any], dict[str, Any]]
    predict: Callable[[list[Any]], Any]
    sync: Callable[[], object]
    agree: Callable[[], None]
    between_epochs: Callable[[], None]
    steps_left: Callable[[int | None], None]


@contextlib.contextmanager
def attached(model: keras.Model, hooks: Hooks) -> Iterator[None]:
    """Makes a model run its steps by the hooks inside the context; methods for all of its values sync first.

    Afterwards the model is as before: only attributes of the instance are replaced, and none of them remains.
    """

    def nothing(force: bool = False) -> None:
        """The functions are in place already."""

    def synced(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            hooks.sync()
            return method(*args, **kwargs)

        return call

    replaced: dict[str, Any] = {
        "train_function": hooks.train,
        "test_function": hooks.test,
        "predict_function": hooks.predict,
        **dict.fromkeys(("make_train_function", "make_test_function", "make_predict_function"), nothing),
        **{name: synced(getattr(model, name)) for name in WHOLE},
    }
    # Not by setattr: Keras would track the values.
    attributes = vars(model)
    kept = {name: attributes[name] for name in replaced if name in attributes}
    attributes.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            if name in kept:
                attributes[name] = kept[name]
            else:
                attributes.pop(name, None)


_entries: dict[str, dict[int, Callable[..., Any] | None]] = collections.defaultdict(dict)
"""Method of ``keras.Model`` -> identity of a model -> replacement; None while that runs."""
_lock = threading.Lock()
"""Held while methods are replaced and restored."""


def has_own(model: keras.Model, method: str) -> bool:
    """Whether a model has another method of this name than Keras' own."""
    return method in vars(model) or getattr(type(model), method) is not getattr(keras.Model, method)


@contextlib.contextmanager
def entered(model: keras.Model, method: str, enter: Callable[..., Any]) -> Iterator[None]:
    """Makes a model's own method call ``enter`` where it calls Keras' method of its name, inside the context.

    Other models, and calls that ``enter`` makes itself, get Keras' method.
    """
    entries, key = _entries[method], id(model)
    with _lock:
        if not entries:
            setattr(keras.Model, method, _forwarding(entries, getattr(keras.Model, method)))
        running = key in entries  # A callback calls the method again.
        entries[key] = enter
    try:
        yield
    finally:
        with _lock:
            if running:
                entries[key] = None
            else:
                del entries[key]
            if not entries:  # Others may have replaced the method before.
                setattr(keras.Model, method, getattr(keras.Model, method).__wrapped__)


def _forwarding(entries: dict[int, Callable[..., Any] | None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        enter = entries.get(id(model))
        if enter is None:
            return original(model, *args, **kwargs)
        entries[id(model)] = None
        try:
            return enter(*args, **kwargs)
        finally:
            entries[id(model)] = enter

    return call


def listed(callbacks: Any) -> list[Any]:
    """Returns callbacks that were given as Keras takes them: several, one or None."""
    given = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


@contextlib.contextmanager
def behind(first: keras.callbacks.Callback, callbacks: Any) -> Iterator[Any]:
    """Yields the user's callbacks, behind one of our own."""
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        yield [first, *listed(callbacks)]
        return
    callbacks.callbacks.insert(0, first)
    try:
        yield callbacks
    finally:
        callbacks.callbacks.remove(first)


class Sync(keras.callbacks.Callback):
    """Runs before the user's callbacks: they see the devices' values, and the next step uses what they assign."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self._hooks = hooks

    def on_train_begin(self, logs: Any = None) -> None:
        """Runs before callbacks restore a backup, say."""
        self._hooks.agree()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Runs after callbacks' assignments at the end of the previous epoch."""
        self._hooks.between_epochs()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Reports the number of steps left in the epoch, as far as Keras knows."""
        steps = (self.params or {}).get("steps")
        self._hooks.steps_left(None if steps is None else steps - batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Runs before callbacks save or judge the epoch's result."""
        self._hooks.between_epochs()

    def on_test_begin(self, logs: Any = None) -> None:
        """Runs before callbacks swap in moving averages, say."""
        self._hooks.agree()

    def on_predict_begin(self, logs: Any = None) -> None:
        """Runs for the same reason as `on_test_begin`."""
        self._hooks.agree()
