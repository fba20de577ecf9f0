"""The variables on an engine's devices, and copying their values from the Keras model and back."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.checkpoints.snapshots import Snapshot, Snapshots
from dapple_tf.common.keras_private import inner_optimizer, learning_rate_of
from dapple_tf.frontend.initialization import any_deferred
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.variables.device_values import Holding
from dapple_tf.variables.stored_values import Run, StoredValues
from graph_passes.ir.graph import GraphDef
from graph_passes.pass_manager import Timing


class DeviceState:
    """The devices' variables, in one session after the other.

    Attributes:
        ahead: whether the devices have newer values than the Keras model.
        updating: whether an update has begun and not succeeded, after which devices may have a mixture of values.
        fetched: variables of which the model has the devices' values or newer ones, although these are ahead.
        generation: number of times that the devices' variables were dropped; each time they need ``load`` again.
        left_over: the node that makes the updates left to the next step; None if there are none.
    """

    def __init__(
        self,
        model: keras.Model,
        table: VariableTable,
        timing: Timing,
        holdings: Callable[[], list[Holding]],
        run: Run,
        add: Callable[[GraphDef, str], None],
        update: Callable[[str], Any],
    ) -> None:
        """Starts with nothing on the devices.

        Args:
            model: the Keras model.
            table: names of its variables.
            timing: records the seconds of loading.
            holdings: returns what devices keep.
            run: runs nodes of the session's graph.
            add: adds a graph to the session's, under a name.
            update: runs a node that makes left-over updates.
        """
        self._model, self._table, self._timing = model, table, timing
        self._holdings, self._run, self._add, self._update = holdings, run, add, update
        self.ahead = self.updating = False
        self.fetched: set[str] = set()
        self.generation = 0
        self._open()

    def _open(self) -> None:
        self.left_over: str | None = None
        self._stored = StoredValues(self._table, self._holdings, self._run, self._add)
        self._snapshots = Snapshots(self._holdings, self._run, self._add)

    def reset(self) -> None:
        """Starts over for a session with a fresh graph, whose variables are empty."""
        self.generation += 1
        self._open()

    def moved(
        self, run: Run, add: Callable[[GraphDef, str], None], update: Callable[[str], Any], *, values: bool
    ) -> DeviceState:
        """Returns the state in another session on the same devices; this one stays as it is.

        Updates left to the next step are made, and a snapshot that is being written is finished first.

        Args:
            run: as for `DeviceState`, in the other session.
            add: as above.
            update: as above.
            values: whether the devices have values, which are copied.
        """
        other = DeviceState(self._model, self._table, self._timing, self._holdings, run, add, update)
        other.ahead, other.fetched, other.generation = self.ahead, set(self.fetched), self.generation
        if values:
            self.flush()
            other._stored.take_over(self._stored)
        self._snapshots.wait()
        return other

    def close(self) -> None:
        """Prepares for the session's end, after finishing a snapshot that is being written."""
        self._snapshots.wait()
        self.agreed()

    def load(self, given: Mapping[str, tf.Tensor] | None = None) -> None:
        """Copies Keras values, or given ones by name -> devices; drops updates left to the next step."""
        self.agreed()
        self.left_over = None
        with self._timing.part("load variables"):
            self._stored.load(self.learning_rate, given)

    def save(self) -> None:
        """Copies devices -> Keras values, except fetched ones and the learning rate, which devices get from Keras."""
        self.flush()
        self._stored.save(self.learning_rate, self.fetched)
        self.agreed()

    def agreed(self) -> None:
        """Notes that the devices have nothing newer than the Keras model."""
        self.ahead = self.updating = False
        self.fetched.clear()

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
                self._update(node)

    def fetch(self, names: Collection[str]) -> None:
        """Copies devices -> Keras values of some variables, of which devices have the newest."""
        self.flush()
        self._stored.save_some(names)
        self.fetched |= set(names)

    def push(self, values: Mapping[str, tf.Tensor]) -> None:
        """Copies values of some variables -> devices, which have values of all."""
        self.flush()
        with self._updates():
            self._stored.load_some({name: value.numpy() for name, value in values.items()})

    def rearrange(self, before: list[Holding]) -> None:
        """Moves values from device to device, because other devices keep the variables from now on.

        Args:
            before: what devices kept until now.
        """
        self._snapshots.rearrange()
        self._stored.rearrange(before)

    @property
    def deferred(self) -> bool:
        """Whether the model has no values of its own for some variables, see :func:`dapple_tf.deferred_init`."""
        return any_deferred(self._table.keras_variables.values())

    @property
    def has_values(self) -> bool:
        """Whether devices may have values, as they do from the first step on."""
        return self._stored.used

    @property
    def names(self) -> frozenset[str]:
        """The variables that devices keep, as far as the prepared steps tell."""
        return frozenset(variable.name for holding in self._holdings() for variable in holding.variables)

    def snapshot(self, keys: Mapping[str, str]) -> Snapshot:
        """Takes a snapshot of the devices' variables, to be written during steps, after the last one was written.

        Args:
            keys: variable -> its name in files. Others aren't written.
        """
        self.flush()
        return self._snapshots.take(keys)

    def restore(self, path: pathlib.Path, located: Mapping[str, tuple[str, str]]) -> None:
        """Copies files -> devices, except the learning rate, which the next step brings; needs a prepared step.

        Args:
            path: directory of the files.
            located: variable -> (name of its tensor bundle there, its name in it), for all that devices keep.

        Raises:
            CheckpointError: a file is damaged, or a server can't read it; the variables are unchanged.
        """
        self._snapshots.restore(path, located)
        self._stored.forget_rate()
        self.left_over = None
        self.ahead = True
        self.fetched.clear()

    @property
    def learning_rate(self) -> keras.Variable | None:
        """The learning rate if it is a plain variable, which callbacks may assign during training; else None."""
        optimizer = inner_optimizer(self._model.optimizer)
        rate = learning_rate_of(optimizer)
        return rate if isinstance(rate, keras.Variable) else None

    def push_learning_rate(self) -> None:
        """Copies the learning rate -> devices, if they have another one."""
        rate = self.learning_rate
        if rate is not None and self._stored.lacks_rate(rate):
            self.flush()  # with the rate of its own step
            with self._updates():
                self._stored.load_rate(rate)
