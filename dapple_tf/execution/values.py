"""Where the newest values are: on the devices, in the user's model, or the same in both."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import Checkpoint, Restoration
from dapple_tf.common.keras_private import inner_optimizer
from dapple_tf.execution.engine import Engine
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.initialization import initial_of, materialize
from dapple_tf.frontend.variables import read_tensor
from graph_passes.ir.program import VariableKind

if TYPE_CHECKING:
    from dapple_tf.execution.elastic import Log

logger = logging.getLogger(__name__)


class LiveValues:
    """Copies values between the devices and the user's model, if either has newer ones.

    Devices are ahead after a training step, until ``sync``. Meanwhile `look` is called with the variables that are
    about to be read or assigned, and brings the devices' values of these into the model. Values assigned to the model
    are used: whenever there may be some, the next step compares the model's values with those that both had, and sends
    the devices those that differ.

    A model made under ``deferred_init`` has no values before the first ``sync``: only the devices have.
    """

    def __init__(self, engine: Engine, recovery: Log) -> None:
        """Starts with nothing on the devices.

        Args:
            engine: has the devices.
            recovery: is notified whenever devices and model agree.
        """
        self._engine = engine
        self._recovery = recovery
        self._loaded = False
        self._unsure = True
        self._agreed: dict[str, tf.Tensor] = {}  # the devices' values of what the model has, too
        self._synced: dict[str, tf.Tensor] = {}  # the model's values at that time, assigned ones included
        self._pending: Restoration | None = None  # until a step decides what devices keep
        self._pending_agreed: dict[str, tf.Tensor] | None = None  # the values that it brought into the model
        self._told: set[str] = set()
        self._seen: dict[str, tf.Tensor | None] = {}
        self._disturbed: set[str] = set()
        self._misses = 0
        self._order: list[str] = []
        self._known = 0

    def sync(self) -> None:
        """Copies all values devices -> model, if the devices are ahead or the model has no values yet."""
        deferred = self._engine.state.deferred
        assigned: set[str] = set()  # variables whose values were on devices only, which still have the old ones
        if deferred:
            self._tell(logging.WARNING, "all values are fetched into the memory of this process")
        if deferred and self._loaded and not self._engine.state.ahead:
            self._resolve_doubt()  # If something was assigned, the model's own initial values go with it.
        if self._pending is not None and self.restoring:
            self._pending.into_model()
            self._pending_agreed = self._in_model()
        elif self._engine.state.ahead or (deferred and self._loaded):
            # Variables that were looked at keep the model's values, which were fetched, or assigned since.
            variables = self._engine.table.keras_variables
            absent = {name for name in self._seen if initial_of(variables[name]) is not None}
            assigned = {name for name, value in self._seen.items() if value is None} - absent
            self._engine.state.fetched |= assigned
            self._engine.state.fetched -= absent
            self._engine.state.save()
            self._agree()
        if deferred:
            materialize(_variables(self._engine.model))  # what no device keeps
            self._synced = self._in_model()
            self._agreed = {name: value for name, value in self._synced.items() if name not in assigned}

    def rescue(self) -> None:
        """Syncs if values would be lost with the devices."""
        if self._engine.state.ahead or self._pending is not None:
            self.sync()

    def agree(self) -> None:
        """Syncs, unless the model has no values, before others read the model and perhaps assign to it."""
        if self._engine.state.deferred and not _averages(self._engine.model):
            self._tell(logging.INFO, "its values stay on the devices until sync(), save() or get_weights()")
        else:
            self.sync()
        self.doubt()

    def look(self, names: Sequence[str]) -> None:
        """Brings the newest values of some variables into the model, before they are read or assigned.

        If variables are looked at one by one, each fetch doubles their number: all variables of a model take few runs,
        and at most twice as many variables are fetched as are looked at.
        """
        if self.restoring:
            self.sync()
        if not self._engine.state.ahead:
            self._unsure = True
            return
        missing = [name for name in names if name not in self._seen]
        if not missing:
            return
        if len(names) == 1:
            missing = self._following(missing[0])
        variables = self._engine.table.keras_variables
        absent = [name for name in missing if initial_of(variables[name]) is not None]
        self._fetch([name for name in missing if name not in absent])
        # Absent variables have values on the devices only: they can't be read, but they may be assigned.
        self._seen |= dict.fromkeys(absent)

    def _following(self, name: str) -> list[str]:
        """Returns a variable, and the following ones to fetch with it."""
        variables = self._engine.table.keras_variables
        behind = self._all[self._all.index(name) + 1 :]
        others = (own for own in behind if own not in self._seen and initial_of(variables[own]) is None)
        count, self._misses = 2**self._misses, self._misses + 1
        return [name, *itertools.islice(others, count - 1)]

    @property
    def _all(self) -> list[str]:
        """The names of all variables whose newest values may be on the devices."""
        if self._known != (known := len(self._engine.table.keras_variables)):
            self._known, self._order = known, list(self.watched)
        return self._order

    def _fetch(self, names: Sequence[str]) -> None:
        if not names:
            return
        running = self._engine.running
        self._engine.state.fetch(names)
        self._disturbed |= set(names)
        if running:  # in another thread, so that the next look must fetch newer values
            self._engine.state.fetched.difference_update(names)
            return
        self._seen |= self._in_model(names)
        if len(self._seen) == len(self._all) and None not in self._seen.values():
            self._engine.state.agreed()
            self._agree()

    def _tell(self, level: int, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.log(level, "model %r: %s", self._engine.model.name, what)

    def load(self) -> None:
        """Lets the next step copy model -> devices, whatever these have."""
        self._engine.state.agreed()
        self._loaded = False
        self._pending = None
        self._seen, self._disturbed = {}, set()
        self._recovery.forget()

    def drop(self) -> None:
        """Discards the devices' values, which are lost or wrong, and lets the next step copy the model's to them.

        The model gets back its values of the last ``sync``, in case single variables were looked at since.
        """
        variables = self._engine.table.keras_variables
        for name in self._disturbed & self._synced.keys():
            variables[name].assign(self._synced[name])
        self.load()

    def restore(self, source: Restoration) -> None:
        """Copies a checkpoint to the devices, directly from files, or with the next step if none is prepared yet.

        Raises:
            CheckpointError: a file is damaged, or a server can't read it; the devices' values are unchanged.
        """
        if source.done:
            self.load()
        elif self._engine.state.has_values:
            source.onto_devices()
            self._recovery.restored(source.path)
            self._loaded, self._pending, self._pending_agreed = True, None, None
            self._seen = {}
        else:
            self._recovery.restored(source.path)
            self._pending, self._pending_agreed = source, None

    def restore_again(self, path: Path) -> None:
        """Restores devices that have lost a checkpoint's values, and keeps values assigned since."""
        if self._pending_agreed is not None:
            self.load()  # The model has them.
            return
        assigned = self._recovery.last | _changed(self._seen, self._in_model(self._seen))
        source = self._again(path)
        if not assigned:
            self.restore(source)
            return
        source.into_model()
        for name, value in assigned.items():
            self._engine.table.keras_variables[name].assign(value)
        self.load()

    def _again(self, path: Path) -> Restoration:
        return Restoration(Checkpoint.open(path), self._engine.model, self._engine, again=True)

    def settle(self) -> bool:
        """Brings the valid values to the devices, to be saved from there.

        Returns:
            False if no step has been prepared yet, so that all values are in the model.
        """
        if not self._engine.state.has_values:
            self.sync()
            return False
        self._resolve_doubt()
        if not self._loaded:
            self._load()
        return True

    def make_room(self) -> None:
        """Has the engine leave out steps that seldom run; the devices keep the values that they have, if any."""
        self._loaded = self._loaded and self._engine.state.has_values
        self._engine.make_room(values=self._loaded)

    def doubt(self) -> None:
        """Lets the next step check for values assigned to the model."""
        self._unsure = True

    def prepare(self, mode: Mode, spec: BatchSpec, training: bool | None = None) -> None:
        """Prepares a step, and copies model -> devices unless these have its values or newer ones."""
        self._resolve_doubt()
        generation = self._engine.state.generation
        self._engine.builder.prepare(mode, spec, training=training)
        if self._pending is not None:
            source, self._pending = self._pending, None
            source.onto_devices()
            self._loaded = True
        elif not self._loaded or self._engine.state.generation != generation:
            self._load()

    def _resolve_doubt(self) -> None:
        if self._seen:
            self._resolve_seen()
        if not self._unsure:
            return
        self._unsure = False
        if self._pending is not None and self._pending_agreed is not None:
            if not _same(self._pending_agreed, self._in_model()):
                self.load()
        elif self._loaded and not self._engine.state.ahead:
            self._resolve_all()

    def _resolve_seen(self) -> None:
        """Sends devices that are ahead the values assigned to variables that were looked at."""
        seen, self._seen, self._misses = self._seen, {}, 0
        self._engine.state.fetched.clear()
        changed = _changed(seen, self._in_model(seen))
        if changed:
            self._recovery.assigned(changed)
            self._disturbed |= changed.keys()
            self._engine.state.push(changed)

    def _resolve_all(self) -> None:
        """Sends devices that weren't ahead the assigned values."""
        now = self._in_model()
        if now.keys() != self._agreed.keys():
            self._loaded = False  # Some variables whose values were on devices only were assigned.
            return
        changed = _changed(self._agreed, now)
        if changed:
            self._engine.state.push(changed)
            self._agreed, self._synced, self._disturbed = now, now, set()
            self._recovery.agreed(now)

    def _load(self) -> None:
        self._engine.state.load()
        self._seen = {}
        self._agree()
        self._loaded = True

    def recover(self, spec: BatchSpec) -> None:
        """Brings devices that have lost their values to the base of recovery; the model stays as it is."""
        base = self._recovery.base
        assert base is not None
        self._engine.builder.prepare(Mode.TRAIN, spec)
        self._pending = None
        if isinstance(base, Path):
            self._again(base).onto_devices()
        else:
            self._engine.state.load(base)
            self._agreed = dict(base)
        self._loaded = True

    def _agree(self) -> None:
        """Records the devices' values, which the model has, too, or had for variables that were looked at."""
        seen, self._seen, self._misses = self._seen, {}, 0
        self._synced = self._in_model()
        self._agreed = {name: value for name, value in (self._synced | seen).items() if value is not None}
        self._disturbed = set()
        self._unsure |= bool(seen)
        self._recovery.agreed(self._agreed)

    def follow(self, other: LiveValues) -> None:
        """Continues on other devices, which are to get the values of another's devices."""
        self._seen, self._disturbed = other._seen, other._disturbed
        self._agreed, self._synced = other._agreed, other._synced
        self._pending_agreed = other._pending_agreed

    def replayed(self) -> None:
        """Notes that devices have their values again, and the model the read ones."""
        self._engine.state.fetched = set(self._seen)

    @property
    def restoring(self) -> bool:
        """Whether the newest values are in a checkpoint, and neither on the devices nor in the model yet."""
        return self._pending is not None and self._pending_agreed is None

    @property
    def watched(self) -> dict[str, keras.Variable]:
        """The variables whose newest values may be on the devices."""
        table, rate = self._engine.table, self._rate
        return {
            name: variable
            for name, variable in table.keras_variables.items()
            if name != rate and table.kind_of(name) is not VariableKind.METRIC
        }

    @property
    def _rate(self) -> str | None:
        """Name of the learning rate, if it is a variable, which each step brings."""
        rate = self._engine.state.learning_rate
        return None if rate is None or not self._engine.table.knows(rate) else self._engine.table.name_of(rate)

    def _in_model(self, names: Iterable[str] | None = None) -> dict[str, tf.Tensor]:
        """Returns the model's values of all or some variables that devices have, too.

        A tensor shares its buffer with the variable that it was read from, until that is assigned.
        """
        variables = self._engine.table.keras_variables
        return {
            name: read_tensor(variables[name])
            for name in (self.watched if names is None else names)
            if initial_of(variables[name]) is None
        }


def _variables(model: keras.Model) -> list[keras.Variable]:
    return [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]


def _averages(model: keras.Model) -> bool:
    """Whether Keras itself reads values: it assigns moving averages at the end of ``fit``."""
    return bool(getattr(inner_optimizer(model.optimizer), "use_ema", False))


def _same(ours: Mapping[str, tf.Tensor], theirs: Mapping[str, tf.Tensor]) -> bool:
    """Whether values are equal; tensors that share a buffer are, without a comparison."""
    return ours.keys() == theirs.keys() and not _changed(ours, theirs)


def _changed(before: Mapping[str, tf.Tensor | None], now: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the present values that differ from earlier ones, or are new."""
    return {name: value for name, value in now.items() if (own := before.get(name)) is None or not _equal(own, value)}


def _equal(one: tf.Tensor, other: tf.Tensor) -> bool:
    a, b = _array(one), _array(other)
    return a.ctypes.data == b.ctypes.data or np.array_equal(a, b)


def _array(tensor: tf.Tensor) -> np.ndarray:
    """Returns a tensor's own buffer if NumPy can use it, else a copy."""
    try:
        return np.asarray(memoryview(tensor))
    except (ValueError, TypeError, BufferError, RuntimeError):
        return np.asarray(tensor.numpy())
