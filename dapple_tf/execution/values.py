"""The store of values: where a model's newest ones are, and how they move."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import Checkpoint, Match, variables_of
from dapple_tf.checkpoints.checkpoint_manifest import CLIENT, CheckpointError
from dapple_tf.checkpoints.snapshots import Snapshot, Snapshots
from dapple_tf.common.keras_private import inner_optimizer, learning_rate_of
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.execution.device_session import DeviceSession
from dapple_tf.frontend.batch import Batch
from dapple_tf.frontend.initialization import any_deferred, initial_of, materialize
from dapple_tf.frontend.variables import VariableTable, read_tensor, read_value
from dapple_tf.variables.device_values import Holding
from dapple_tf.variables.stored_values import StoredValues
from graph_passes.ir.program import VariableKind
from graph_passes.pass_manager import Timing

logger = logging.getLogger(__name__)

Known = Mapping[str, tf.Tensor | None]
Base = Mapping[str, tf.Tensor] | Path
"""Values for a restart: the last on which devices and model agreed, or a checkpoint."""


class Newest(enum.Enum):
    """The place of the newest values; see `LiveValues`."""

    MODEL = enum.auto()
    FILES = enum.auto()
    EQUAL = enum.auto()
    DEVICES = enum.auto()


@dataclasses.dataclass(frozen=True)
class Trained:
    """A batch that was trained on.

    Attributes:
        step: the training step's number.
        batch: the batch.
        rate: the learning rate, if it is a variable.
        assigned: values that were assigned to variables before the step.
    """

    step: int
    batch: Batch
    rate: float | None
    assigned: Mapping[str, tf.Tensor]


class Log:
    """The record from which the devices' values can be restored.

    Attributes:
        policy: what to do when workers are lost; under ``raise`` no batches are noted.
        base: values to begin with; None before devices had any.
        batches: the batches since then, in order. Training on them again gives the same values: besides steps, only
            values from the model change the devices' values, and these are a new base or noted with the next batch.
        last: values from the model that devices got after the last batch.
        former: the base before a checkpoint that became one, and the batches between the two, until the next base.
    """

    def __init__(self, policy: FaultPolicy) -> None:
        self.policy = policy
        self.base: Base | None = None
        self.batches: list[Trained] = []
        self.last: dict[str, tf.Tensor] = {}
        self.former: tuple[Base, list[Trained]] | None = None

    def begin(self, base: Base | None) -> None:
        """Notes that devices have these values now; None if the model's are the valid ones, whatever devices had."""
        self.base, self.former = base, None
        self.batches.clear()
        self.last = {}

    def assigned(self, values: Mapping[str, tf.Tensor]) -> None:
        """Notes that devices get values of some variables from the model."""
        if self.policy.action != "raise":
            self.last |= values

    def trained(self, step: int, batch: Batch, rate: keras.Variable | None) -> None:
        """Notes that devices have trained on a batch."""
        if self.policy.action != "raise":
            value = None if rate is None else float(read_value(rate))
            self.batches.append(Trained(step, batch.copied(), value, self.last))
            self.last = {}

    def saved(self, path: Path, step: int) -> None:
        """Notes that a checkpoint of the values after a step is complete."""
        if not self.batches or self.batches[0].step > step:
            return  # The base is as new.
        between = [entry for entry in self.batches if entry.step <= step]
        self.former = None if self.base is None else (self.base, between)
        self.base = path
        self.batches = self.batches[len(between) :]

    def fall_back(self) -> bool:
        """Returns to the former base, as the base's checkpoint can't be read; False if there is none."""
        if self.former is None:
            return False
        (self.base, between), self.former = self.former, None
        self.batches = between + self.batches
        return True

    @property
    def settled(self) -> bool:
        """Whether the model has the newest values, if the devices have agreed with it on any."""
        return not self.batches and not isinstance(self.base, Path)


class _Source(NamedTuple):
    """A checkpoint that is restored.

    Attributes:
        checkpoint: the checkpoint.
        matches: the variables of the model and the optimizer, with their entries.
    """

    checkpoint: Checkpoint
    matches: Sequence[Match]

    def assign(self, *, by_client: bool) -> None:
        """Assigns the variables that the training process has saved, such as the learning rate, or all others.

        Raises:
            CheckpointError: a file is damaged; nothing is assigned.
        """
        self.checkpoint.assign(match for match in self.matches if (match.entry.shard == CLIENT) == by_client)


class LiveValues:
    """The values of a model's variables: on devices, in the model, and in files.

    | newest | where the newest values are | known |
    |---|---|---|
    | MODEL | in the model; devices have none that count | |
    | FILES | in a checkpoint, until a step decides what devices keep | nothing, or all once the model read them |
    | EQUAL | on the devices and in the model | all values |
    | DEVICES | on the devices | values of the variables that were looked at since the last step |

    *Known* values are those newest ones which the model has had, too. A variable whose value in the model differs
    from its known one was assigned: the model's is newer.

    | event | MODEL | FILES | EQUAL | DEVICES |
    |---|---|---|---|---|
    | `look`: a variable is read | | as `sync` | | it becomes known; if all are: EQUAL |
    | `sync` | | all become known | | others are fetched: EQUAL |
    | `resolve`: assigned ones are found | | MODEL, if known | they are pushed | they are pushed, none is known |
    | `supply`: a step needs values | all are loaded: EQUAL | servers read; known: EQUAL, else DEVICES | | |
    | `step` that trains | | | DEVICES | |
    | `rearrange`: others keep variables | | | MODEL | as `sync`, then MODEL |
    | `restore`: a checkpoint's values count | DEVICES, or FILES before the first step | same | same | same |
    | `load`: the model's values count | MODEL | MODEL | MODEL | MODEL |
    | `drop`: the devices' are lost or wrong | MODEL | MODEL, if known | MODEL | MODEL, with values of the last EQUAL |
    | `close`: the session ends | | | | MODEL, but known ones stay known for recovery |
    | `recover`: the base of recovery counts | DEVICES | DEVICES | | |
    | `restore_again`: devices lost a checkpoint | as `restore`; MODEL if some were assigned | MODEL, if known | | |

    A model made under ``deferred_init`` lacks values that only devices have: EQUAL then has all values that the model
    has, `sync` fetches the others, and `rearrange` moves values from device to device. The learning rate is always the
    model's, and goes to the devices before a step.

    Attributes:
        table: names of the model's variables.
        newest: where the newest values are.
        updating: whether an update has begun and not succeeded, after which devices may have a mixture of values.
        left_over: the node that makes the updates left to the next step; None if there are none.
    """

    def __init__(
        self,
        model: keras.Model,
        table: VariableTable,
        timing: Timing,
        holdings: Callable[[], Sequence[Holding]],
        session: DeviceSession,
        log: Log,
    ) -> None:
        """Starts with nothing on the devices.

        Args:
            model: the Keras model.
            table: names of its variables.
            timing: records the seconds of loading.
            holdings: returns what devices keep.
            session: the session on the devices.
            log: is notified of all that devices get from elsewhere.
        """
        self._model, self.table, self._timing, self._holdings, self._log = model, table, timing, holdings, log
        self.newest = Newest.MODEL
        self.updating = False
        self._known: Known = {}  # None: it was looked at, but only devices had a value
        self._synced: Known = {}  # what the model had before devices were ahead
        self._source: _Source | None = None  # the files' values
        self._unsure = True  # whether something may have been assigned
        self._rate: tf.Tensor | None = None  # the learning rate that devices have
        self._running = False
        self._told: set[str] = set()
        self._open(session)

    def _open(self, session: DeviceSession) -> None:
        self.left_over: str | None = None
        self._session = session
        self._stored = StoredValues(self.table, self._holdings, session)
        self._snapshots = Snapshots(self._holdings, session)

    def _become(self, newest: Newest, known: Known | None = None, source: _Source | None = None) -> None:
        if newest is not Newest.DEVICES:
            self._synced = {}
        elif self.newest is Newest.EQUAL:
            self._synced = self._known
        self.newest, self._known, self._source = newest, known or {}, source
        self.updating = False

    # ---- what there is

    @property
    def ahead(self) -> bool:
        """Whether the devices have newer values than the model."""
        return self.newest is Newest.DEVICES

    @property
    def restoring(self) -> bool:
        """Whether the newest values are in a checkpoint, and neither on the devices nor in the model yet."""
        return self.newest is Newest.FILES and not self._known

    @property
    def deferred(self) -> bool:
        """Whether the model has no values of its own for some variables, see :func:`dapple_tf.deferred_init`."""
        return any_deferred(self.table.keras_variables.values())

    @property
    def prepared(self) -> bool:
        """Whether devices may have values, as they do from the first step on."""
        return self._stored.used

    @property
    def _kept(self) -> set[str]:
        """The variables that devices keep, as far as the prepared steps tell."""
        return {variable.name for holding in self._holdings() for variable in holding.variables}

    @property
    def learning_rate(self) -> keras.Variable | None:
        """The learning rate if it is a plain variable, which callbacks may assign during training; else None."""
        rate = learning_rate_of(inner_optimizer(self._model.optimizer))
        return rate if isinstance(rate, keras.Variable) else None

    @property
    def _rate_name(self) -> list[str]:
        """Name of the learning rate, if it is a variable, which devices get from the model, and may lack."""
        rate = self.learning_rate
        return [self.table.name_of(rate)] if rate is not None and self.table.knows(rate) else []

    @property
    def watched(self) -> dict[str, keras.Variable]:
        """The variables whose newest values may be on the devices."""
        table, rate = self.table, self._rate_name
        return {
            name: variable
            for name, variable in table.keras_variables.items()
            if name not in rate and table.kind_of(name) is not VariableKind.METRIC
        }

    def _has(self, name: str) -> bool:
        """Whether the model has a value of a variable, new or old."""
        return initial_of(self.table.keras_variables[name]) is None

    def _in_model(self, names: Iterable[str] | None = None) -> dict[str, tf.Tensor]:
        """Returns the model's values of all or some variables that devices have, too.

        A tensor shares its buffer with the variable that it was read from, until that is assigned.
        """
        names = self.watched if names is None else names
        return {name: read_tensor(self.table.keras_variables[name]) for name in names if self._has(name)}

    # ---- devices -> model

    def sync(self) -> None:
        """Copies all values devices -> model, if the devices are ahead or the model has no values yet."""
        if deferred := self.deferred:
            self._tell(logging.WARNING, "all values are fetched into the memory of this process")
            if self.newest is Newest.EQUAL:
                self.resolve()
        source, fetches = self._source, self.ahead or (deferred and self.newest is Newest.EQUAL)
        if source is not None and self.restoring:
            source.assign(by_client=False)
        elif fetches:
            # Known variables keep the model's values, which were fetched, or assigned since.
            known = {name for name in self._known if self._has(name)} if self.ahead else set()
            self.flush()
            self._stored.save(known | {*self._rate_name})
        elif not deferred:
            return
        if deferred:
            optimizer = self._model.optimizer
            materialize([*self._model.variables, *(() if optimizer is None else optimizer.variables)])
        if fetches:
            self._agree()
        elif source is not None:
            self._become(Newest.FILES, self._in_model(), source)

    def rescue(self) -> None:
        """Syncs if values would be lost with the devices."""
        if self.ahead or self.newest is Newest.FILES:
            self.sync()

    def agree(self) -> None:
        """Syncs, unless the model has no values, before others read the model and perhaps assign to it."""
        averages = getattr(inner_optimizer(self._model.optimizer), "use_ema", False)  # Keras assigns these after `fit`.
        if self.deferred and not averages:
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
        self.doubt()
        missing = [name for name in names if name not in self._known] if self.ahead else []
        if len(missing) == len(names) == 1:
            watched = list(self.watched)
            behind = watched[watched.index(missing[0]) + 1 :]
            others = (name for name in behind if name not in self._known and self._has(name))
            missing += itertools.islice(others, len(self._known))
        self._fetch([name for name in missing if self._has(name)])
        if self.ahead:
            # Absent variables have values on the devices only: they can't be read, but they may be assigned.
            self._known = {**self._known, **{name: None for name in missing if not self._has(name)}}

    def _fetch(self, names: Sequence[str]) -> None:
        if not names:
            return
        running = self._running
        self.flush()
        self._stored.save_some(names)
        if running:  # in another thread, so that the next look must fetch newer values
            return
        self._known = {**self._known, **self._in_model(names)}
        if len(self._known) == len(self.watched) and None not in self._known.values():
            self._agree()

    def _agree(self) -> None:
        """Records the devices' values, which the model has, too, or had when it looked at them."""
        self._unsure |= bool(self._known)
        values = {name: value for name, value in {**self._in_model(), **self._known}.items() if value is not None}
        self._become(Newest.EQUAL, values)
        self._log.begin(values)

    def _tell(self, level: int, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.log(level, "model %r: %s", self._model.name, what)

    # ---- model -> devices

    def doubt(self) -> None:
        """Lets the next step check for values assigned to the model."""
        self._unsure = True

    def resolve(self) -> None:
        """Sends the devices the values assigned to the model since they were known."""
        unsure, self._unsure = self._unsure, False
        if not unsure or self.newest is Newest.MODEL:
            return
        known, now = self._known, self._in_model(self._known if self.ahead else None)
        if self.ahead:
            self._known = {}
        changed = _changed(known, now)
        if not changed or self.restoring:
            return
        if self.newest is Newest.FILES:
            self.load()
        elif self.ahead:
            self._log.assigned(changed)
            self.push(changed)
        else:
            self.push(changed)
            self._become(Newest.EQUAL, now)
            self._log.begin(now)

    def push(self, values: Mapping[str, tf.Tensor]) -> None:
        """Copies values of some variables -> devices, which have values of all."""
        self.flush()
        with self._updates():
            self._stored.load_some({name: value.numpy() for name, value in values.items()})

    def push_learning_rate(self) -> None:
        """Copies the learning rate -> devices, if they have another one."""
        for name, value in self._in_model(self._rate_name).items():
            if self._rate is None or not _equal(self._rate, value):
                self.push({name: value})  # after left-over updates, which have the rate of their own step
                self._rate = value

    def load(self) -> None:
        """Lets the next step copy model -> devices, whatever these have."""
        self.left_over = None
        self._become(Newest.MODEL)
        self._log.begin(None)

    def drop(self) -> None:
        """Discards the devices' values, which are lost or wrong, and lets the next step copy the model's to them.

        The model gets back its values of the last ``sync``, in case single variables were looked at since. Values of a
        checkpoint that devices haven't had yet aren't lost with them.
        """
        for name, value in _changed(self._in_model(self._synced), self._synced).items():
            self.table.keras_variables[name].assign(value)
        if not self.restoring:
            self.load()

    def supply(self) -> None:
        """Gives the devices the newest values, unless they have them; a step must have been prepared."""
        source, known = self._source, self._known
        if source is not None:
            try:
                self._onto_devices(source)
            except CheckpointError:
                self._become(Newest.MODEL)
                raise
            if known:
                self._become(Newest.EQUAL, known)
                self._log.begin({name: value for name, value in known.items() if value is not None})
        elif self.newest is Newest.MODEL:
            self._load()
            self._agree()

    def _load(self, given: Mapping[str, tf.Tensor] | None = None) -> None:
        with self._timing.part("load variables"):
            self._stored.load(given)
        self._rate = next(iter(self._in_model(self._rate_name).values()), None)

    # ---- steps

    @contextlib.contextmanager
    def step(self, *, trains: bool, left_over: str | None) -> Iterator[None]:
        """Notes that a step runs inside the context.

        Args:
            trains: whether it updates variables.
            left_over: the node that makes the updates that it leaves to the next step, if any.
        """
        if trains and not self.ahead:
            self._become(Newest.DEVICES)
        self.updating = trains
        self.left_over = left_over  # also if Ctrl-C comes instead of the result
        self._running = True
        try:
            yield
        finally:
            self._running = False
        self.updating = False

    @contextlib.contextmanager
    def _updates(self) -> Iterator[None]:
        """Runs an update inside the context; after an error `updating` stays true, as some devices may have made it."""
        self.updating = True
        yield
        self.updating = False

    def flush(self) -> None:
        """Makes the updates that the last step left to the next one."""
        if self.left_over is not None:
            node, self.left_over = self.left_over, None
            with self._updates():
                self._session.run_update(node)

    # ---- sessions and devices, one after the other

    def close(self) -> None:
        """Prepares for the session's end, after finishing a snapshot that is being written."""
        self._snapshots.wait()
        self.left_over = None
        if self.ahead:
            self.newest = Newest.MODEL

    def move_to(self, session: DeviceSession) -> None:
        """Continues in another session on the same devices, with the values that devices have.

        Updates left to the next step are made, and a snapshot that is being written is finished first.
        """
        stored = StoredValues(self.table, self._holdings, session)
        if self.newest in (Newest.EQUAL, Newest.DEVICES):
            self.flush()
            stored.take_over(self._stored)
        self._snapshots.wait()
        self._session, self._stored, self._snapshots = session, stored, Snapshots(self._holdings, session)

    def rearrange(self, before: Sequence[Holding], after: Sequence[Holding], renew: Callable[[], None]) -> None:
        """Prepares for other devices to keep the variables from now on.

        Values move from device to device if the model has no place for them. Otherwise they go into the model, and a
        fresh session begins.

        Args:
            before: what devices keep.
            after: what they are to keep.
            renew: opens the fresh session.
        """
        if self.ahead and self.deferred:
            self.flush()
            self._snapshots.rearrange()
            self._stored.rearrange(before, after)
            return
        if self.ahead:
            self.sync()
        self.close()
        self._become(Newest.MODEL)
        renew()
        self._open(self._session)

    def follow(self, other: LiveValues) -> None:
        """Continues on other devices, which are to get the values of another's devices."""
        self.newest, self._known = other.newest, other._known
        self._synced, self._source = other._synced, other._source

    # ---- files

    def snapshot(self, variables: Mapping[str, keras.Variable]) -> Snapshot:
        """Takes a snapshot of what devices keep, to be written during steps, after the last one was written.

        The learning rate isn't among it: the model's is the valid one.

        Args:
            variables: name in files -> variable.
        """
        table, kept = self.table, self._kept.difference(self._rate_name)
        names = {table.name_of(own): key for key, own in variables.items() if table.knows(own)}
        self.flush()
        return self._snapshots.take({name: key for name, key in names.items() if name in kept})

    def settle(self) -> bool:
        """Brings the valid values to the devices, to be saved from there.

        Returns:
            False if no step has been prepared yet, so that all values are in the model.
        """
        if not self.prepared:
            self.sync()
            return False
        self.resolve()
        self.supply()
        return True

    def restore(self, checkpoint: Checkpoint) -> None:
        """Copies a checkpoint to the devices, directly from files, or with the next step if none is prepared yet.

        Raises:
            CheckpointError: it doesn't fit the model, a file is damaged, or a server can't read it; the devices' values
                are unchanged.
        """
        source = self._source_of(checkpoint)
        source.assign(by_client=True)  # They may be changed from now on.
        self._restore(source)

    def _source_of(self, checkpoint: Checkpoint) -> _Source:
        return _Source(checkpoint, checkpoint.match(variables_of(self._model)))

    def _restore(self, source: _Source) -> None:
        if all(match.entry.shard == CLIENT for match in source.matches):  # It was saved before the first step.
            self.load()
            return
        if self.prepared:
            self._onto_devices(source)
        else:
            self._become(Newest.FILES, source=source)
        self._log.begin(source.checkpoint.path)

    def _onto_devices(self, source: _Source) -> None:
        """Has the servers read what their devices keep, and the model the rest; a step must have been prepared.

        The next step brings the learning rate.
        """
        table, kept = self.table, self._kept
        located, others = {}, []
        for match in source.matches:
            name = table.name_of(match.variable) if table.knows(match.variable) else None
            if name in kept:
                located[name] = (match.entry.shard, match.entry.key)
            elif match.entry.shard != CLIENT:
                others.append(match)
        self._snapshots.restore(source.checkpoint.path, located)
        self._stored.filled()
        self.left_over = self._rate = None
        self._become(Newest.DEVICES)
        source.checkpoint.assign(others)

    # ---- recovery

    def restore_again(self, path: Path) -> None:
        """Restores devices that have lost a checkpoint's values, and keeps values assigned since."""
        if self.newest is Newest.FILES and self._known:
            self.load()  # The model has them.
            return
        assigned = self._log.last | _changed(self._known, self._in_model(self._known))
        source = self._source_of(Checkpoint.open(path))
        if not assigned:
            self._restore(source)
            return
        source.assign(by_client=False)
        for name, value in assigned.items():
            self.table.keras_variables[name].assign(value)
        self.load()

    def recover(self) -> None:
        """Brings devices that have lost their values to the base of recovery; the model stays as it is."""
        base, known = self._log.base, self._known
        assert base is not None
        if isinstance(base, Path):
            self._onto_devices(self._source_of(Checkpoint.open(base)))
        else:
            self._load(base)
        self._become(Newest.DEVICES, known)


def _changed(before: Known, now: Known) -> dict[str, tf.Tensor]:
    """Returns the present values that differ from earlier ones, or are new."""
    pairs = ((name, before.get(name), value) for name, value in now.items())
    return {name: new for name, old, new in pairs if new is not None and (old is None or not _equal(old, new))}


def _equal(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Whether values are equal; tensors that share a buffer are, without a comparison."""
    a, b = _array(one), _array(other)
    return a.ctypes.data == b.ctypes.data or np.array_equal(a, b)


def _array(tensor: tf.Tensor) -> np.ndarray:
    """Returns a tensor's own buffer if NumPy can use it, else a copy."""
    try:
        return np.asarray(memoryview(tensor))
    except (ValueError, TypeError, BufferError, RuntimeError):
        return np.asarray(tensor.numpy())
