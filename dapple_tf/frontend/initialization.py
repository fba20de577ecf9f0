"""Deferred initialisation: Keras models whose variables get their initial values on the devices that keep them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.keras_private import initialize, tensorflow_variable
from dapple_tf.errors import DappleError
from graph_passes.ir.graph import Graph, GraphDef, Ref, all_nodes
from graph_passes.ir.tensorflow_bridge import is_stateful, make_constant
from graph_passes.ir.tensorflow_private import UninitializedVariable

logger = logging.getLogger(__name__)

# Counters, seeds, loss scales: nothing is gained by deferring them, and Keras may read them.
_SMALL = 64
# Values that an initializer computes in Python are constants of its graph, already made by the client.
_LARGEST_GRAPH = 2**20
_ONLY_HERE = frozenset({"PyFunc", "EagerPyFunc", "PyFuncStateless"})


@dataclasses.dataclass(frozen=True)
class Initial:
    """The computation of a variable's initial value.

    Attributes:
        graph: a graph without placeholders.
        output: the value.
        shape: its shape.
        dtype: its dtype.
        repeatable: whether it gives the same value again and on another device, because it has no stateful ops.
    """

    graph: GraphDef
    output: Ref
    shape: tuple[int, ...]
    dtype: tf.DType
    repeatable: bool

    def value(self) -> tf.Tensor:
        """Computes the value on the client."""
        return _evaluate(self.graph, [self.output])[0]


class Deferred(UninitializedVariable):
    """A TensorFlow variable without a value, until one is assigned.

    Attributes:
        initial: the computation of its initial value; None once it has a value.
    """

    def __init__(self, initial: Initial, **options: Any) -> None:
        super().__init__(**options)
        self.initial: Initial | None = initial

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        """Reads the value as usual; within a trace nothing is read yet.

        Raises:
            DappleError: there is no value.
        """
        if tf.executing_eagerly() and _pending(self) is not None:
            raise DappleError(
                f"variable {self.name!r} was made under dapple_tf.deferred_init() and has no value here: train and "
                f"evaluate by the pipelined model, or fetch all values by its sync() first"
            )
        return super()._read_variable_op(no_copy)


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Builds Keras models inside the context without parameters, which each device initialises for itself.

        with dapple_tf.deferred_init():
            model = build()
            model.compile(...)
        pipelined = dapple_tf.transform(model, cluster, plan)

    A model may thus be larger than the memory of the client, or of any one device. Parameters and optimizer slots get
    the same values as without deferring, with the same seeds. An initializer that draws by TensorFlow's stateful random
    ops gives other values, equal on all replicas. Variables of a few bytes (counters, seeds) are initialised at once,
    as are those whose initializers compute in Python or NumPy, or read values outside TensorFlow's graph.

    A variable without a value can be assigned (by ``load_weights``, say), and is then fed to devices as usual. Reading
    one raises an error.
    """
    numbers = itertools.count()
    busy = False

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        nonlocal busy
        initializer = options["initial_value"]
        if busy or not callable(initializer) or not tf.executing_eagerly():
            return next_creator(**options)
        busy = True
        try:
            initial = _traced(initializer, options.get("dtype"), next(numbers))
            if initial is None:
                return next_creator(**options)
            if math.prod(initial.shape) * initial.dtype.size <= _SMALL:
                return next_creator(**options | {"initial_value": initial.value()})
            if initial.graph.ByteSize() > _LARGEST_GRAPH:
                logger.warning("the initializer of variable %r computes in Python, on the client", options.get("name"))
                return next_creator(**options | {"initial_value": initial.value()})
        finally:
            busy = False
        known = ("trainable", "caching_device", "name", "constraint", "synchronization", "aggregation")
        kept = {name: options.get(name) for name in known}
        return Deferred(initial, shape=initial.shape, dtype=initial.dtype, **kept)

    with tf.variable_creator_scope(create):
        yield


def initial_of(variable: keras.Variable) -> Initial | None:
    """Returns the computation of a variable's initial value; None if it has a value."""
    held = tensorflow_variable(variable)
    return _pending(held) if isinstance(held, Deferred) else None


def any_deferred(variables: Iterable[keras.Variable]) -> bool:
    """Whether one of the variables has no value yet."""
    return any(initial_of(variable) is not None for variable in variables)


def deferred_like(variables: Iterable[keras.Variable]) -> contextlib.AbstractContextManager[None]:
    """Returns ``deferred_init()`` if one of the variables is deferred: optimizer slots are made as their variables."""
    return deferred_init() if any_deferred(variables) else contextlib.nullcontext()


def materialize(variables: Iterable[keras.Variable]) -> None:
    """Computes the initial values of variables that have none, one by one, on the client."""
    for variable in variables:
        initial = initial_of(variable)
        if initial is not None:
            variable.assign(initial.value())


def tensor_of(variable: keras.Variable) -> tf.Tensor:
    """Returns a variable's value, or its initial one; a deferred variable stays deferred."""
    initial = initial_of(variable)
    return tf.convert_to_tensor(variable.value) if initial is None else initial.value()


def value_of(variable: keras.Variable) -> np.ndarray:
    """Returns ``tensor_of`` as an array."""
    return np.asarray(tensor_of(variable))


def _pending(variable: Deferred) -> Initial | None:
    """Returns the computation of the initial value as long as there is no value; a value is never lost again."""
    # By the attribute: this isn't a read that `watching` must report.
    if variable.initial is not None and bool(tf.raw_ops.VarIsInitializedOp(resource=vars(variable)["_handle"])):
        variable.initial = None
    return variable.initial


class _Recording(keras.StatelessScope):
    """A scope in which variables aren't assigned, but recorded."""

    def __init__(self) -> None:
        # Leaving the scope mustn't initialise variables that an outer scope has left without a value.
        super().__init__(initialize_variables=False)
        self.assigned: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Records the variable, too."""
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


def _traced(initializer: Callable[[], Any], dtype: Any, number: int) -> Initial | None:
    """Traces an initializer without arguments; returns None if it can only run in this process.

    A keras.random.SeedGenerator that it draws from is read and advanced now, as if it had run.

    Args:
        initializer: returns the value.
        dtype: dtype of the value; None for its own.
        number: number of this variable among the deferred ones, from which stateful random ops get seeds.
    """
    graph = tf.__internal__.FuncGraph("initializer")
    graph.seed = _mixed(graph.seed, number)
    scope = _Recording()
    try:
        with graph.as_default(), scope:
            value = tf.convert_to_tensor(initializer(), dtype)
            updates = {key: tf.convert_to_tensor(scope.state_mapping[key]) for key in scope.assigned}
    except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
        logger.debug("initializer can't be traced, so that it runs at once: %s", error)
        return None
    graph_def = _without_captures(graph)
    if graph_def is None or not value.shape.is_fully_defined():
        return None
    if any(node.op in _ONLY_HERE for node in all_nodes(graph_def)):
        return None
    if updates:
        tensors = _evaluate(graph_def, [Ref.parse(tensor.name) for tensor in updates.values()])
        for key, new in zip(updates, tensors, strict=True):
            _initialized(scope.assigned[key]).assign(new)
    return _pruned(graph_def, value)


def _mixed(seed: int | None, number: int) -> int:
    """Returns each variable's own seed: within a trace TensorFlow numbers ops from the start."""
    entropy = [_process_seed() if seed is None else seed % 2**63, number]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0] % 2**31)


@functools.cache
def _process_seed() -> int:
    return int.from_bytes(os.urandom(8), "little")


def _initialized(variable: keras.Variable) -> keras.Variable:
    """Returns the variable with a value: Keras makes its global seed generator on first use, in the trace."""
    if tensorflow_variable(variable) is None:
        initialize(variable)
    return variable


def _without_captures(graph: Any) -> GraphDef | None:
    """Returns the graph with the values of eager tensors and variables that it reads; None if it needs others."""
    graph_def: GraphDef = graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    for external, internal in graph.captures:
        if external.dtype == tf.variant:
            return None
        if external.dtype != tf.resource:
            make_constant(nodes[internal.op.name], external.numpy())
            continue
        for reader in internal.consumers():
            if reader.type != "ReadVariableOp" or not tf.raw_ops.VarIsInitializedOp(resource=external):
                return None
            value = tf.raw_ops.ReadVariableOp(resource=external, dtype=reader.outputs[0].dtype)
            make_constant(nodes[reader.name], value.numpy())
    return graph_def


def _pruned(graph: GraphDef, value: tf.Tensor) -> Initial:
    index, output = Graph(graph), Ref.parse(value.name)
    nodes = [index.nodes[name] for name in index.ordered(index.ancestors([output], control=True))]
    kept = GraphDef(node=nodes, versions=graph.versions, library=graph.library)
    for node in kept.node:
        node.device = ""
        node.attr.pop("_class", None)
    repeatable = not any(is_stateful(node.op) for node in nodes)
    return Initial(kept, output, tuple(value.shape.as_list()), value.dtype, repeatable)


def _evaluate(graph: GraphDef, refs: Sequence[Ref]) -> list[tf.Tensor]:
    names = [f"{ref.node}:{ref.output}" for ref in refs]
    function = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(graph, return_elements=names, name=""), []
    )
    return list(function())
