"""``fit``, ``evaluate``, ``predict`` and the ``*_on_batch`` methods of a pipelined model, as Keras declares them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from dapple_tf.checkpoints.checkpointing import Checkpointing
from dapple_tf.errors import DappleError, check_names
from dapple_tf.front.training import Training
from dapple_tf.frontend.attachment import has_own
from dapple_tf.frontend.batch_sizes import whole_number
from dapple_tf.frontend.model_front import in_one_thread

_Method = TypeVar("_Method", bound=Callable[..., Any])


@functools.cache  # Called for each step.
def _parameters(method: str) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a method of ``keras.Model``, without ``self``, by their names."""
    own: Callable[..., Any] = getattr(keras.Model, method)
    _, *parameters = inspect.signature(own).parameters.values()
    return {each.name: each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}


def _as_keras(method: _Method) -> _Method:
    """Gives a method the signature of Keras' own, with keyword arguments of ours behind, for help and completion."""
    signature = inspect.signature(method)
    self, *given = signature.parameters.values()
    ours = [each for each in given if each.kind is each.KEYWORD_ONLY]
    theirs = _parameters(method.__name__).values()
    vars(method)["__signature__"] = signature.replace(parameters=[self, *theirs, *ours])
    return method


class KerasMethods(Training):
    """Keras' methods: arguments are given by position or by name, as Keras takes them or the model's own method."""

    def _batch_size(self, given: Any) -> int:
        """Returns the batch size for cutting arrays: the plan's global batch size, unless another is given."""
        return self.plan.global_batch_size if given is None else whole_number("batch_size", given)

    @_as_keras
    @in_one_thread
    def fit(self, *args: Any, checkpoint: Checkpointing | None = None, resume: bool = False, **kwargs: Any) -> Any:
        """Runs ``keras.Model.fit``; ``batch_size`` and ``validation_batch_size`` are by default the plan's.

        Batches of another size are cut into micro-batches of about the plan's size. A message says so once, because the
        plan's times and memory don't hold for them.

        A model's own ``fit`` (``evaluate``, ``predict``) gets the arguments as they are given, whatever it takes; the
        above, and checkpoints, are for the call of Keras' method in it.

        Args:
            args: as for Keras: x, y, batch_size, epochs, verbose, callbacks and the others, in its order.
            checkpoint: when and where to save checkpoints, in the background.
            resume: whether to resume from the newest checkpoint of that directory, if it has any: with the same plan,
                devices and data, as if training hadn't stopped. Checkpoints don't hold the callbacks' own state.
            kwargs: as for Keras.

        Raises:
            DataError: batches change their structure or shape, or there are none.
            NonFiniteLossError: the loss isn't finite and the transform was told to stop.
            CheckpointError: the checkpoint to resume from is damaged, or of another model or other data; or another
                training uses the directory; or, at the end of training, the last checkpoint couldn't be written.
            TypeError: Keras' method doesn't have an argument, or ``checkpoint`` isn't a Checkpointing.
            ValueError: ``resume`` without ``checkpoint``.
            DappleError: another thread uses the pipelined model; or ``checkpoint`` for a model whose own ``fit`` calls
                Keras' method more than once, or never.
        """
        if not isinstance(checkpoint, Checkpointing | None):
            raise TypeError(f"checkpoint is {checkpoint!r:.60}; give a dapple_tf.Checkpointing(directory)")
        if resume and checkpoint is None:
            raise ValueError("resume=True goes on from a checkpoint; give checkpoint=Checkpointing(directory), too")
        calls = 0

        def fit(_: str, **arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            size = arguments["batch_size"] = self._batch_size(arguments.get("batch_size"))
            arguments["validation_batch_size"] = arguments.get("validation_batch_size") or size
            if checkpoint is None:
                return self._call("fit", **arguments)
            if calls > 1:
                raise self._unsaved("calls Keras' fit() more than once")
            return self._fit_with_checkpoints(checkpoint, resume, arguments)

        result = self._called("fit", fit, args, kwargs, ("checkpoint", "resume"))
        if checkpoint is not None and not calls:
            raise self._unsaved("never calls Keras' fit()")
        return result

    def _unsaved(self, what: str) -> DappleError:
        return DappleError(
            f"fit(checkpoint=...) saves in one call of keras.Model.fit, but the own fit() of model {self.model.name!r} "
            f"{what}: leave checkpoint out, and call save_checkpoint() where values are to be saved"
        )

    @_as_keras
    @in_one_thread
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.evaluate``, forward only; ``batch_size`` is by default the plan's global batch size."""
        return self._called("evaluate", self._sized, args, kwargs)

    @_as_keras
    @in_one_thread
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.predict``, forward only; ``batch_size`` is by default the plan's global batch size."""
        return self._called("predict", self._sized, args, kwargs)

    @_as_keras
    @in_one_thread
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.train_on_batch``."""
        return self._called("train_on_batch", self._on_batch, args, kwargs)

    @_as_keras
    @in_one_thread
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.test_on_batch``."""
        return self._called("test_on_batch", self._on_batch, args, kwargs)

    @_as_keras
    @in_one_thread
    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``keras.Model.predict_on_batch``."""
        return self._called("predict_on_batch", self._call, args, kwargs)

    def _called(
        self,
        method: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        others: tuple[str, ...] = (),
    ) -> Any:
        """Calls a model's method; Keras' own as ``run(method, ...)``, with arguments by name."""
        if not has_own(self.model, method):
            return run(method, **_bound(method, args, kwargs, others))
        return self._call_own(method, lambda *own, **named: run(method, **_bound(method, own, named)), *args, **kwargs)

    def _sized(self, method: str, **arguments: Any) -> Any:
        arguments["batch_size"] = self._batch_size(arguments.get("batch_size"))
        return self._call(method, **arguments)


def _bound(method: str, args: tuple[Any, ...], kwargs: dict[str, Any], others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the given arguments of a Keras method by name.

    Args:
        method: a method of ``keras.Model``.
        args: arguments by position.
        kwargs: arguments by name.
        others: names of our own arguments, to suggest in errors.

    Raises:
        TypeError: there are too many, one is given twice or has an unknown name.
    """
    names = _parameters(method)
    check_names(method, kwargs, (*names, *others))
    if len(args) > len(names):
        raise TypeError(f"{method}() takes {len(names)} arguments ({', '.join(names)}), but got {len(args)}")
    positional = dict(zip(names, args, strict=False))
    twice = [name for name in positional if name in kwargs]
    if twice:
        raise TypeError(f"{method}() got {twice[0]!r} twice, by position and by name")
    return positional | kwargs
