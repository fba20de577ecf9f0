"""Where the newest values are: on the devices, in the user's model, or the same in both."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import Checkpoint, Restoration
from dapple_tf.execution.engine import Engine
from dapple_tf.execution.recovery import Recovery
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.initialization import initial_of, materialize
from graph_passes.program import VariableKind

logger = logging.getLogger(__name__)


class Values:
    """Copies values between the devices and the user's model, as far as either has newer ones.

    Devices are ahead after a training step, until ``sync``. While they aren't, what someone assigns to the model
    counts: whenever that may have happened (``doubt``), the next step compares the model's values with those that both
    had.

    A model made under ``deferred_init`` has no values of its own before the first ``sync``: only the devices have.
    """

    def __init__(self, engine: Engine, recovery: Recovery) -> None:
        """Nothing is on the devices yet.

        Args:
            engine: has the devices.
            recovery: is told whenever devices and model agree.
        """
        self._engine = engine
        self._recovery = recovery
        self._loaded = False
        self._unsure = True
        self._agreed: dict[str, tf.Tensor] = {}
        self._pending: Restoration | None = None  # until a step tells what devices keep
        self._pending_agreed: dict[str, tf.Tensor] | None = None  # what it has brought into the model
        self._told: set[str] = set()

    def sync(self) -> None:
        """Devices -> model, if the devices are ahead or the model has no values yet; it has all of them then."""
        deferred = self._engine.deferred
        if deferred:
            self._tell(logging.WARNING, "all values are fetched into the memory of this process")
        if self._pending is not None and self._pending_agreed is None:
            self._pending.into_model()
            self._pending_agreed = self._in_model()
        elif self._engine.ahead or (deferred and self._loaded):
            self._engine.save()
            self._agree()
        if deferred:
            materialize(_variables(self._engine.model))  # what no device keeps
            self._agreed = self._in_model()

    def rescue(self) -> None:
        """``sync`` if the devices have what would be lost with them."""
        if self._engine.ahead or self._pending is not None:
            self.sync()

    def agree(self) -> None:
        """Before others look at the model and perhaps assign to it: ``sync``, but for a model without values."""
        if self._engine.deferred and not _averages(self._engine.model):
            self._tell(logging.INFO, "its values stay on the devices until sync(), save() or get_weights()")
        else:
            self.sync()
        self.doubt()

    def _tell(self, level: int, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.log(level, "model %r: %s", self._engine.model.name, what)

    def load(self) -> None:
        """Has the next step copy model -> devices, whatever these have."""
        self._engine.ahead = False
        self._loaded = False
        self._pending = None
        self._recovery.forget()

    def restore(self, source: Restoration) -> None:
        """Checkpoint -> devices, straight from files; where nobody knows yet what these keep, with the next step.

        Raises:
            CheckpointError: a file is damaged, or a server can't read it; devices have what they had.
        """
        if source.done:
            self.load()
        elif self._engine.has_values:
            source.onto_devices()
            self._recovery.restored(source.path)
            self._loaded, self._pending = True, None
        else:
            self._recovery.restored(source.path)
            self._pending, self._pending_agreed = source, None

    def settle(self) -> bool:
        """Has the devices have the values that count, to be saved from there.

        Returns:
            False as long as no step has been prepared: all values are in the model then.
        """
        if not self._engine.has_values:
            self.sync()
            return False
        self._resolve_doubt()
        if not self._loaded:
            self._load()
        return True

    def doubt(self) -> None:
        """Has the next step look whether someone has assigned values to the model."""
        self._unsure = True

    @property
    def kept(self) -> str:
        """What is left when the devices' values are gone, for messages."""
        if self._engine.deferred:
            return "the devices begin again with the model's initial values"
        return "the model keeps the values of its last sync()"

    def prepare(self, mode: Mode, spec: BatchSpec, training: bool | None = None) -> None:
        """Prepares a step, and copies model -> devices unless these have its values or newer ones."""
        self._resolve_doubt()
        generation = self._engine.generation
        self._engine.prepare(mode, spec, training=training)
        if self._pending is not None:
            source, self._pending = self._pending, None
            source.onto_devices()
            self._loaded = True
        elif not self._loaded or self._engine.generation != generation:
            self._load()

    def _resolve_doubt(self) -> None:
        if not self._unsure:
            return
        self._unsure = False
        if self._pending is not None and self._pending_agreed is not None:
            if not _same(self._pending_agreed, self._in_model()):
                self.load()
        elif self._loaded and not self._engine.ahead:
            self._loaded = _same(self._agreed, self._in_model())

    def _load(self) -> None:
        self._engine.load()
        self._agree()
        self._loaded = True

    def recover(self, model: keras.Model, spec: BatchSpec) -> None:
        """Brings devices that have lost their values to the base of recovery; the model stays as it is."""
        base = self._recovery.base
        assert base is not None
        self._engine.prepare(Mode.TRAIN, spec)
        self._pending = None
        if isinstance(base, Path):
            Restoration(Checkpoint.open(base), model, self._engine).onto_devices()
        else:
            self._engine.load(base)
            self._agreed = dict(base)
        self._loaded = True

    def _agree(self) -> None:
        self._agreed = self._in_model()
        self._recovery.agreed(self._agreed)

    def _in_model(self) -> dict[str, tf.Tensor]:
        """The model's values of what devices have too, but for the learning rate, which each step brings.

        A tensor shares its buffer with the variable that it was read from, until that is assigned.
        """
        table = self._engine.table
        rate = self._engine.learning_rate
        return {
            name: tf.convert_to_tensor(variable.value)
            for name, variable in table.keras_variables.items()
            if variable is not rate
            and table.describe(name).kind is not VariableKind.METRIC
            and initial_of(variable) is None
        }


def _variables(model: keras.Model) -> list[keras.Variable]:
    return [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]


def _averages(model: keras.Model) -> bool:
    """Whether Keras itself reads values: it assigns moving averages at the end of ``fit``."""
    return bool(getattr(getattr(model.optimizer, "inner_optimizer", model.optimizer), "use_ema", False))


def _same(ours: Mapping[str, tf.Tensor], theirs: Mapping[str, tf.Tensor]) -> bool:
    """Whether values are the same; what shares a buffer is, and isn't compared."""
    return ours.keys() == theirs.keys() and all(_equal(ours[name], theirs[name]) for name in ours)


def _equal(one: tf.Tensor, other: tf.Tensor) -> bool:
    a, b = _array(one), _array(other)
    return a.ctypes.data == b.ctypes.data or np.array_equal(a, b)


def _array(tensor: tf.Tensor) -> np.ndarray:
    """A tensor's buffer itself, where NumPy can have it, else a copy."""
    try:
        return np.asarray(memoryview(tensor))
    except (ValueError, TypeError, BufferError, RuntimeError):
        return np.asarray(tensor.numpy())
