"""The values that devices keep in one session, and how they come from the Keras model and go back to it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from dapple_tf.frontend.initialization import Initial, initial_of
from dapple_tf.frontend.variables import VariableTable, assign_value
from dapple_tf.values.device_initialization import initialization, reading, rearrangement, removal
from dapple_tf.values.device_values import DeviceValues, Holding, load_one
from graph_passes.graph import GraphDef
from graph_passes.storage import buckets, by_dtype

# What is fetched at once of models that were never all on the client.
_BUCKET_BYTES = 2**26


class Run(Protocol):
    """Runs nodes of a session's graph: what to fetch, and placeholders' values."""

    def __call__(self, fetches: Any, feed: Mapping[str, Any] | None = None, /) -> Any:
        """What the session gives for them."""


class StoredValues:
    """The variables of the devices of one session.

    Nodes that load and save them are made when they are first needed; from then on the holdings don't change, but by
    ``rearrange``.
    """

    def __init__(
        self,
        table: VariableTable,
        holdings: Callable[[], list[Holding]],
        run: Run,
        add: Callable[[GraphDef, str], None],
    ) -> None:
        """Nothing is on the devices yet.

        Args:
            table: names of the variables.
            holdings: tells what devices keep.
            run: runs nodes of the session's graph.
            add: adds a graph to the session's, under a name.
        """
        self._table, self._holdings, self._run, self._add = table, holdings, run, add
        self._nodes: DeviceValues | None = None
        self._numbers = itertools.count()  # of graphs that have been added
        self._rate: float | None = None  # that the devices have

    @property
    def used(self) -> bool:
        """Whether devices may have values."""
        return self._nodes is not None

    def load(self, rate: keras.Variable | None, given: Mapping[str, Any] | None = None) -> None:
        """Keras values -> devices, which initialise by themselves what has none (see `deferred_init`).

        Args:
            rate: the learning rate, where it is a variable; devices have its value then.
            given: values that count in place of Keras'.
        """
        nodes = self._made()
        if self.deferred:
            self._bring(nodes.holdings, given or {})
        else:
            self._feed(nodes, given or {})
        self._rate = None if rate is None else float(rate.numpy())

    @property
    def deferred(self) -> bool:
        """Whether some of the variables have no value in the Keras model."""
        return bool(self._initials(self._holdings()))

    def _initials(self, holdings: Iterable[Holding]) -> dict[str, Initial]:
        names = {variable.name for holding in holdings for variable in holding.variables}
        found = ((name, initial_of(self._table.keras_variables[name])) for name in names)
        return {name: initial for name, initial in found if initial is not None}

    def _bring(self, holdings: Sequence[Holding], given: Mapping[str, Any]) -> None:
        """Gives devices the values of variables, of which some are deferred."""
        initials = self._initials(holdings)
        self._added(initialization, holdings, initials)
        known = [
            dataclasses.replace(h, variables=tuple(v for v in h.variables if v.name not in initials)) for h in holdings
        ]
        nodes = DeviceValues([holding for holding in known if holding.variables], self._prefix())
        self._add(nodes.graph, nodes.prefix)
        self._feed(nodes, given)

    def _feed(self, nodes: DeviceValues, given: Mapping[str, Any]) -> None:
        for holding, feeds, loads in zip(nodes.holdings, nodes.feeds, nodes.loads, strict=True):
            feed = {}
            for place, (_, group) in zip(feeds, by_dtype(holding.variables).items(), strict=True):
                values = [np.asarray(given[v.name]) if v.name in given else self._table.value(v.name) for v in group]
                feed[f"{nodes.prefix}/{place}:0"] = np.concatenate([value.ravel() for value in values])
            if feed:
                self._run([f"{nodes.prefix}/{node}" for node in loads], feed)

    def rearrange(self, before: Sequence[Holding]) -> None:
        """Has devices hand values on to those that are to keep them now that the holdings have changed.

        Args:
            before: what the devices have values of.
        """
        self._nodes = None
        after = self._made().holdings
        missing = self._added(rearrangement, before, after)
        if missing:
            self._bring(missing, {})
        self._added(removal, before, after)

    def _added(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Adds a graph and runs its nodes; what else was returned beside them."""
        prefix = self._prefix()
        graph, nodes, *others = make(*arguments, prefix)
        if nodes:
            self._add(graph, prefix)
            self._run([f"{prefix}/{node}" for node in nodes])
        return others[0] if others else None

    def _prefix(self) -> str:
        return f"{DeviceValues.PREFIX}{next(self._numbers)}"

    def save(self, rate: keras.Variable | None) -> None:
        """Devices -> Keras values, each variable from the first device that keeps it.

        Args:
            rate: the learning rate, where it is a variable; it isn't saved: devices get it from Keras, and what a
                callback has assigned last may not be there yet.
        """
        nodes = self._made()
        seen = {self._table.name_of(rate)} if rate is not None and self._table.knows(rate) else set()
        if self.deferred:
            self._save_in_parts(nodes.holdings, seen)
            return
        # All before the first is assigned: where one can't be had, the model keeps what fits together.
        wanted = [[f"{nodes.prefix}/{ref.node}:{ref.output}" for ref in names] for names in nodes.saves]
        fetched = self._run(wanted)
        for holding, vectors in zip(nodes.holdings, fetched, strict=True):
            for vector, group in zip(vectors, by_dtype(holding.variables).values(), strict=True):
                sizes = [math.prod(variable.shape) for variable in group]
                parts = np.split(vector, np.cumsum(sizes)[:-1])
                for variable, part in zip(group, parts, strict=True):
                    if variable.name not in seen:
                        seen.add(variable.name)
                        assign_value(self._table.keras_variables[variable.name], part.reshape(variable.shape))

    def _save_in_parts(self, holdings: Iterable[Holding], seen: set[str]) -> None:
        """Devices -> Keras values, some at a time."""
        for holding in holdings:
            wanted = [variable for variable in holding.variables if variable.name not in seen]
            for bucket in buckets(sorted(wanted, key=lambda variable: variable.dtype), _BUCKET_BYTES):
                seen |= {variable.name for variable in bucket}
                graph, results = reading(holding.devices[0], bucket, prefix := self._prefix())
                self._add(graph, prefix)
                values = self._run([f"{prefix}/{ref.node}:{ref.output}" for ref in results])
                for variable, value in zip(bucket, values, strict=True):
                    self._table.keras_variables[variable.name].assign(value)

    def forget_rate(self) -> None:
        """After devices have got a learning rate from elsewhere, so that the model's is loaded again."""
        self._rate = None

    def lacks_rate(self, rate: keras.Variable | None) -> bool:
        """Whether the learning rate is a variable that devices keep, and they have another value of it."""
        return rate is not None and self._table.knows(rate) and float(rate.numpy()) != self._rate

    def load_rate(self, rate: keras.Variable) -> None:
        """The learning rate -> devices."""
        value = self._rate = float(rate.numpy())
        nodes = self._made()
        if nodes.rate is None:
            prefix = f"{nodes.prefix}_rate"
            graph, feed, loads = load_one(self._table.name_of(rate), nodes.holdings, prefix)
            self._add(graph, prefix)
            nodes.rate = (f"{prefix}/{feed}:0", [f"{prefix}/{node}" for node in loads])
        feed, loads = nodes.rate
        if loads:
            self._run(loads, {feed: [value]})

    def _made(self) -> DeviceValues:
        if self._nodes is None:
            self._nodes = DeviceValues(self._holdings(), self._prefix())
            self._add(self._nodes.graph, self._nodes.prefix)
        return self._nodes
