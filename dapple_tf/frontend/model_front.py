"""The attributes and methods of the user's Keras model, with current values, for a pipelined model."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import keras

from dapple_tf.errors import DappleError, meant
from dapple_tf.frontend.attachment import WHOLE

_Method = TypeVar("_Method", bound=Callable[..., Any])

_NOT_HERE = {
    **dict.fromkeys(("make_train_function", "train_function", "train_step"), "train_on_batch() or fit()"),
    **dict.fromkeys(("make_test_function", "test_function", "test_step"), "test_on_batch() or evaluate()"),
    **dict.fromkeys(("make_predict_function", "predict_function", "predict_step"), "predict_on_batch() or predict()"),
}
"""Attributes of plain Keras' steps -> the methods that run a pipelined step."""
_ASSIGNED = frozenset({"stop_training", "trainable", "optimizer", "steps_per_execution"})
"""Attributes of a model that have the same meaning for its pipelined steps."""
_ONCE = frozenset({"model", "profile"})
"""Its own attributes that steps are made from, so that another value would do nothing."""


class ModelFront:
    """Attributes of a Keras model, for a class that has one.

    Variables are live and steps follow the model, so that all of its attributes work: ``summary``, ``layers``,
    ``weights``, ``optimizer``, ``compile`` and the others.

    Attributes:
        model: the Keras model.
    """

    model: keras.Model
    _own: ClassVar[frozenset[str]] = frozenset({"model"})
    """Public attributes that may be assigned."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._at_work = threading.RLock()
        self._method = ""  # that the thread at work has called

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Runs in copies and pickles.

        Raises:
            DappleError: always.
        """
        raise self._not_copied()

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Runs in ``keras.models.clone_model``.

        Raises:
            DappleError: always.
        """
        raise cls._not_copied()

    @staticmethod
    def _not_copied() -> DappleError:
        return DappleError(
            "a pipelined model holds devices, and can't be copied, cloned or pickled: copy the Keras model that "
            "pipelined.sync() returns, and call dapple_tf.transform() with the copy"
        )

    def sync(self) -> keras.Model:
        """Brings all of the newest values into the model at once; returns the model."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's model itself on this host with current values; ``predict_on_batch`` runs on devices."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the user's model.

        Raises:
            AttributeError: the model has no such attribute, or it belongs to steps that aren't pipelined.
        """
        model = vars(self).get("model")
        if model is None or name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _NOT_HERE:
            raise AttributeError(
                f"{name} is plain Keras' step, on this host; call {_NOT_HERE[name]} of the pipelined model, or "
                f"pipelined.model.{name}"
            )
        if not hasattr(model, name):
            names = {own for own in (*dir(type(self)), *dir(model)) if not own.startswith("_")}
            raise AttributeError(
                f"neither the pipelined model nor model {model.name!r} has an attribute {name!r}{meant(name, names)}"
            )
        if name in WHOLE:
            self.sync()
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assigns its own attribute, or one of the user's model that steps follow.

        Raises:
            AttributeError: the assignment would do nothing.
        """
        once = name in _ONCE and name in vars(self)
        if name.startswith("_") or (name in self._own and not once):
            super().__setattr__(name, value)
        elif name in _ASSIGNED:
            setattr(self.model, name, value)
        elif once or name in ("plan", "cluster"):
            raise AttributeError(f"a pipelined model keeps its {name}; call dapple_tf.transform() again for another")
        else:
            names = {*_ASSIGNED, *self._own} - _ONCE
            raise AttributeError(
                f"setting {name!r} of a pipelined model does nothing{meant(name, names)}; attributes of the user's "
                f"model are those of pipelined.model, options those of dapple_tf.transform()"
            )


def in_one_thread(method: _Method) -> _Method:
    """Returns a method that refuses to run while another thread is in such a method of the same pipelined model."""

    @functools.wraps(method)
    def call(self: ModelFront, *args: Any, **kwargs: Any) -> Any:
        if not self._at_work.acquire(blocking=False):
            raise DappleError(
                f"{method.__name__.strip('_')}(): another thread is in {self._method}() of pipelined model "
                f"{self.model.name!r}, which works in one thread at a time: call one after the other, or from a "
                f"callback of the first"
            )
        outer, self._method = self._method, self._method or method.__name__
        try:
            return method(self, *args, **kwargs)
        finally:
            self._method = outer
            self._at_work.release()

    return cast(_Method, call)
