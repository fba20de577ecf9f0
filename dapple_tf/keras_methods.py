"""``fit``, ``evaluate``, ``predict`` and the ``*_on_batch`` methods of a pipelined model, as Keras declares them."""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from dapple_tf.checkpoints.checkpointing import Checkpointing
from dapple_tf.describe.plan import Plan
from dapple_tf.frontend.batch_sizes import whole_number
from dapple_tf.frontend.model_front import ModelFront, meant


class KerasMethods(ModelFront, abc.ABC):
    """Keras' methods by Keras' own signatures: arguments go by position or by name."""

    @abc.abstractmethod
    def _call(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the user's model, whose steps are pipelined meanwhile."""

    @abc.abstractmethod
    def _fit_with_checkpoints(self, checkpoint: Checkpointing, resume: bool, arguments: dict[str, Any]) -> Any:
        """``fit`` that saves checkpoints, and goes on from one."""

    @property
    @abc.abstractmethod
    def plan(self) -> Plan:
        """The plan."""

    def _batch_size(self, given: Any) -> int:
        """The batch size that arrays are cut by: the plan's global batch size, unless another is given."""
        return self.plan.global_batch_size if given is None else whole_number("batch_size", given)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        *args: Any,
        checkpoint: Checkpointing | None = None,
        resume: bool = False,
        **kwargs: Any,
    ) -> Any:
        """``keras.Model.fit``; ``batch_size`` and ``validation_batch_size`` are by default the plan's.

        Another batch size is cut into micro-batches of about the plan's size, which is said once: the plan's times and
        memory aren't for it.

        Args:
            x: as for Keras.
            y: as for Keras.
            args: as for Keras: batch_size, epochs, verbose, callbacks and the others, in its order.
            checkpoint: when and where to save checkpoints, in the background.
            resume: go on from the newest checkpoint of that directory, if it has any: with the same plan, devices and
                data, as if training hadn't stopped. Callbacks' own state isn't in it.
            kwargs: as for Keras.

        Raises:
            DataError: batches change their structure or shape.
            NonFiniteLossError: the loss isn't finite and the transform was told to stop.
            CheckpointError: the checkpoint to go on from is damaged, or of another model or other data.
            TypeError: an argument that Keras' method doesn't have.
        """
        if resume and checkpoint is None:
            raise ValueError("resume=True goes on from a checkpoint; give checkpoint=Checkpointing(directory), too")
        arguments = _bound("fit", (x, y, *args), kwargs, ("checkpoint", "resume"))
        size = arguments["batch_size"] = self._batch_size(arguments.get("batch_size"))
        arguments["validation_batch_size"] = arguments.get("validation_batch_size") or size
        if checkpoint is None:
            return self._call("fit", **arguments)
        return self._fit_with_checkpoints(checkpoint, resume, arguments)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``keras.Model.evaluate``, forward only; ``batch_size`` is by default the plan's global batch size."""
        return self._sized("evaluate", (x, y, *args), kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """``keras.Model.predict``, forward only; ``batch_size`` is by default the plan's global batch size."""
        return self._sized("predict", (x, *args), kwargs)

    def train_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``keras.Model.train_on_batch``."""
        return self._call("train_on_batch", **_bound("train_on_batch", (x, y, *args), kwargs))

    def test_on_batch(self, x: Any, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``keras.Model.test_on_batch``."""
        return self._call("test_on_batch", **_bound("test_on_batch", (x, y, *args), kwargs))

    def predict_on_batch(self, x: Any) -> Any:
        """``keras.Model.predict_on_batch``."""
        return self._call("predict_on_batch", x=x)

    def _sized(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = _bound(method, args, kwargs)
        arguments["batch_size"] = self._batch_size(arguments.get("batch_size"))
        return self._call(method, **arguments)


def _bound(method: str, args: tuple[Any, ...], kwargs: dict[str, Any], others: tuple[str, ...] = ()) -> dict[str, Any]:
    """The arguments of a method of Keras' by their names, as far as they are given.

    Args:
        method: of ``keras.Model``.
        args: by position.
        kwargs: by name.
        others: names that are ours.

    Raises:
        TypeError: there are too many, one is given twice or has an unknown name.
    """
    names = _parameters(method)
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        raise TypeError(f"{method}() has no argument {unknown[0]!r}{meant(unknown[0], (*names, *others))}")
    if len(args) > len(names):
        raise TypeError(f"{method}() takes {len(names)} arguments ({', '.join(names)}), but got {len(args)}")
    positional = dict(zip(names, args, strict=False))
    twice = [name for name in positional if name in kwargs]
    if twice:
        raise TypeError(f"{method}() got {twice[0]!r} twice, by position and by name")
    return positional | kwargs


@functools.cache  # Each step asks.
def _parameters(method: str) -> tuple[str, ...]:
    """The names of a method of ``keras.Model``'s parameters, without ``self``."""
    own: Callable[..., Any] = getattr(keras.Model, method)
    parameters = inspect.signature(own).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)[1:]
