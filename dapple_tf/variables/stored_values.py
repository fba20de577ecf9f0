"""The values that devices keep in one session, and copying them from the Keras model and back."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dapple_tf.common.memory import without_collection
from dapple_tf.frontend.initialization import Initial, initial_of
from dapple_tf.frontend.variables import VariableTable, assign_value
from dapple_tf.variables.device_values import (
    Holding,
    StorageNodes,
    initialization,
    load_each,
    reading,
    rearrangement,
    removal,
    save_each,
)
from graph_passes.ir.graph import GraphDef
from graph_passes.ir.program import Variable
from graph_passes.ir.storage import buckets, by_dtype
from graph_passes.ir.tensorflow_bridge import dtype_size

# Bytes fetched or fed at once where the client may have no place for all values.
_BUCKET_BYTES = 2**26


class Session(Protocol):
    """A session, and its graph."""

    def run(self, fetches: Any, feed: Mapping[str, Any] | None = None, /) -> Any:
        """Runs nodes of the graph with placeholders' values; returns the values of the fetches."""

    def add(self, graph: GraphDef, name: str, /) -> None:
        """Adds a graph, under a name."""


class StoredValues:
    """The variables of the devices of one session.

    Nodes that load and save them are made on first use; from then on only ``rearrange`` changes the holdings.
    """

    def __init__(self, table: VariableTable, holdings: Callable[[], Sequence[Holding]], session: Session) -> None:
        """Starts with nothing on the devices.

        Args:
            table: names of the variables.
            holdings: returns what devices keep.
            session: the session.
        """
        self._table, self._holdings, self._session = table, holdings, session
        self._nodes: StorageNodes | None = None
        self._numbers = itertools.count()  # of graphs that have been added
        self._loaders: dict[str, tuple[str, list[str]]] = {}  # variable -> placeholder, nodes
        self._savers: dict[str, str] = {}  # variable -> its value

    @property
    def used(self) -> bool:
        """Whether devices may have values."""
        return self._nodes is not None

    def load(self, given: Mapping[str, Any] | None = None) -> None:
        """Copies Keras values -> devices, which initialise variables without one themselves (see `deferred_init`).

        Args:
            given: values to use instead of Keras'.
        """
        nodes = self._made()
        if self._initials(nodes.holdings):
            self._bring(nodes.holdings, given or {})
        else:
            self._feed(nodes, given or {})

    def _initials(self, holdings: Iterable[Holding]) -> dict[str, Initial]:
        """Returns how to compute the variables that have no value in the Keras model."""
        names = {variable.name for holding in holdings for variable in holding.variables}
        pairs = ((name, initial_of(self._table.keras_variables[name])) for name in names)
        return {name: initial for name, initial in pairs if initial is not None}

    def _bring(self, holdings: Sequence[Holding], given: Mapping[str, Any]) -> None:
        """Gives devices the values of variables, some of which are deferred."""
        initials = self._initials(holdings)
        self._added(initialization, holdings, initials)
        known = [
            dataclasses.replace(h, variables=tuple(v for v in h.variables if v.name not in initials)) for h in holdings
        ]
        nodes = StorageNodes([holding for holding in known if holding.variables], self._prefix())
        self._session.add(nodes.graph, nodes.prefix)
        self._feed(nodes, given)

    def _feed(self, nodes: StorageNodes, given: Mapping[str, Any]) -> None:
        """Loads as many holdings at once as have 64 MiB together, or one: TensorFlow prepares each run anew."""
        feed: dict[str, np.ndarray] = {}
        loads: list[str] = []
        pending = 0  # bytes
        for holding, places, own in zip(nodes.holdings, nodes.feeds, nodes.loads, strict=True):
            size = sum(math.prod(v.shape) * dtype_size(v.dtype) for v in holding.variables)
            if pending and pending + size > _BUCKET_BYTES:
                self._session.run(loads, feed)
                feed, loads, pending = {}, [], 0
            for place, group in zip(places, by_dtype(holding.variables).values(), strict=True):
                values = [np.asarray(given[v.name]) if v.name in given else self._table.value(v.name) for v in group]
                feed[f"{nodes.prefix}/{place}:0"] = np.concatenate([value.ravel() for value in values])
            loads += [f"{nodes.prefix}/{node}" for node in own]
            pending += size
        if feed:
            self._session.run(loads, feed)

    def rearrange(self, before: Sequence[Holding], after: Sequence[Holding]) -> None:
        """Lets devices pass values on to the devices of other holdings.

        Args:
            before: the holdings of which devices have values.
            after: those of which they are to have values.
        """
        self._nodes = None
        self._loaders, self._savers = {}, {}
        self._made(after)
        missing = self._added(rearrangement, before, after)
        if missing:
            self._bring(missing, {})
        self._added(removal, before, after)

    def _added(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Makes and adds a graph and runs its nodes; returns the third result of ``make``, if any."""
        prefix = self._prefix()
        graph, nodes, *others = make(*arguments, prefix)
        if nodes:
            self._session.add(graph, prefix)
            self._session.run([f"{prefix}/{node}" for node in nodes])
        return others[0] if others else None

    def _prefix(self) -> str:
        return f"{StorageNodes.PREFIX}{next(self._numbers)}"

    def take_over(self, other: StoredValues) -> None:
        """Copies all values from the devices of another session, some at a time; ``other`` keeps them, too."""
        for holding in self._made().holdings:
            for bucket in _buckets(holding.variables):
                values = other._read(holding, bucket)
                nodes = StorageNodes([dataclasses.replace(holding, variables=bucket)], self._prefix())
                self._session.add(nodes.graph, nodes.prefix)
                self._feed(nodes, {variable.name: value for variable, value in zip(bucket, values, strict=True)})

    def _read(self, holding: Holding, variables: Sequence[Variable]) -> list[Any]:
        """Returns the values of some of a holding's variables."""
        graph, refs = reading(dataclasses.replace(holding, variables=tuple(variables)), prefix := self._prefix())
        self._session.add(graph, prefix)
        return self._session.run([f"{prefix}/{ref.node}:{ref.output}" for ref in refs])

    def save(self, others: Collection[str]) -> None:
        """Copies devices -> Keras values but for ``others``, each variable from the first device that keeps it."""
        nodes = self._made()
        seen = set(others)
        if self._initials(nodes.holdings):
            self._save_in_parts(nodes.holdings, seen)
            return
        # Fetches all before it assigns the first: after an error the model keeps consistent values.
        wanted = [[f"{nodes.prefix}/{ref.node}:{ref.output}" for ref in names] for names in nodes.saves]
        fetched = self._session.run(wanted)
        for holding, vectors in zip(nodes.holdings, fetched, strict=True):
            for vector, group in zip(vectors, by_dtype(holding.variables).values(), strict=True):
                sizes = [math.prod(variable.shape) for variable in group]
                parts = np.split(vector, np.cumsum(sizes)[:-1])
                for variable, part in zip(group, parts, strict=True):
                    if variable.name not in seen:
                        seen.add(variable.name)
                        assign_value(self._table.keras_variables[variable.name], part.reshape(variable.shape))

    def _save_in_parts(self, holdings: Iterable[Holding], seen: set[str]) -> None:
        """Copies devices -> Keras values, some at a time."""
        for holding in holdings:
            wanted = [variable for variable in holding.variables if variable.name not in seen]
            for bucket in _buckets(wanted):
                seen |= {variable.name for variable in bucket}
                values = self._read(holding, bucket)
                for variable, value in zip(bucket, values, strict=True):
                    self._table.keras_variables[variable.name].assign(value)

    def save_some(self, names: Collection[str]) -> None:
        """Copies devices -> Keras values of these variables, if devices keep them; they must have Keras values."""
        holdings = self._made().holdings
        missing = [name for name in names if name not in self._savers]
        if missing:
            prefix = self._prefix()
            graph, values = save_each(missing, holdings, prefix)
            self._session.add(graph, prefix)
            tensors = {name: f"{prefix}/{ref.node}:{ref.output}" for name, ref in values.items()}
            self._savers |= {name: tensors.get(name, "") for name in missing}
        held = [name for name in names if self._savers[name]]
        read = self._session.run([self._savers[name] for name in held]) if held else ()
        for name, value in zip(held, read, strict=True):
            assign_value(self._table.keras_variables[name], value)

    def load_some(self, values: Mapping[str, Any]) -> None:
        """Copies values of variables -> the devices that keep them, if any."""
        holdings = self._made().holdings
        missing = [name for name in values if name not in self._loaders]
        if missing:
            prefix = self._prefix()
            graph, loaders = load_each(missing, holdings, prefix)
            self._session.add(graph, prefix)
            for name in missing:
                feed, nodes = loaders.get(name, ("", []))
                self._loaders[name] = f"{prefix}/{feed}:0", [f"{prefix}/{node}" for node in nodes]
        held = {self._loaders[name][0]: np.asarray(value) for name, value in values.items() if self._loaders[name][1]}
        if held:
            self._session.run([node for name in values for node in self._loaders[name][1]], held)

    def filled(self) -> None:
        """Notes that devices have values from elsewhere."""
        self._made()

    @without_collection
    def _made(self, holdings: Sequence[Holding] | None = None) -> StorageNodes:
        if self._nodes is None:
            self._nodes = StorageNodes(self._holdings() if holdings is None else holdings, self._prefix())
            self._session.add(self._nodes.graph, self._nodes.prefix)
        return self._nodes


def _buckets(variables: Iterable[Variable]) -> list[tuple[Variable, ...]]:
    """Groups variables by dtype into parts that the client has memory for."""
    return buckets(sorted(variables, key=lambda variable: variable.dtype), _BUCKET_BYTES)
