"""All uses of TensorFlow's private parts, as they are in TensorFlow 2.18 to 2.21."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.client import device_lib, pywrap_tf_session
from tensorflow.python.data.ops.concatenate_op import _ConcatenateDataset
from tensorflow.python.data.ops.repeat_op import _RepeatDataset
from tensorflow.python.data.ops.shuffle_op import _ShuffleDataset
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.autograph_util import py_func_from_autograph
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.eager.polymorphic_function.transform import CONCRETE_FUNCTION_CALLBACKS
from tensorflow.python.framework import c_api_util, kernels, op_def_registry, ops
from tensorflow.python.ops import cond_v2, custom_gradient, script_ops, while_v2
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

__all__ = [
    "CONCRETE_FUNCTION_CALLBACKS",
    "ConcreteFunction",
    "UninitializedVariable",
    "cond_v2",
    "custom_gradient",
    "op_def_registry",
    "while_v2",
]

eager_mode = context.eager_mode
"""Context in which TensorFlow runs operations at once, even while a graph is being built."""

local_devices = device_lib.list_local_devices
"""Names, kinds and memory of the devices that a session's configuration makes in this process."""
registered_kernels = kernels.get_registered_kernels_for_op
"""The kernels of an operator in this TensorFlow, for all kinds of devices."""


def process_config() -> tf.compat.v1.ConfigProto:
    """Returns the configuration that ``tf.config`` has for this process: its visible and its logical devices."""
    config: tf.compat.v1.ConfigProto = context.context().config
    return config


def has_devices() -> bool:
    """Returns whether eager TensorFlow has made this process's devices, after which they can't be configured."""
    return context.context()._context_handle is not None


# ---- seeds


def global_seed() -> int | None:
    """Returns the seed of ``tf.random.set_seed``; None if none is set."""
    seed: int | None = context.global_seed()
    return seed


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Changes TensorFlow's global seed within it, unless it is the same."""
    own = context.context()
    if seed == own._seed:
        yield
        return
    kept = own._seed, own._rng
    own._set_global_seed(seed)
    try:
        yield
    finally:
        own._seed, own._rng = kept


# ---- functions and graphs


def compiles_with_xla(function: Any) -> bool:
    """Returns whether a ``tf.function`` has ``jit_compile=True``."""
    return bool(function._jit_compile)


def python_body(function: Any) -> Callable[..., Any]:
    """Returns the Python function of a ``tf.function``, converted by AutoGraph if the ``tf.function`` would be."""
    converts, options = function._autograph, function._experimental_autograph_options
    body = function._python_function
    body = py_func_from_autograph(body, options) if converts else body

    def call(*args: Any, **kwargs: Any) -> Any:
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED if converts else ag_ctx.Status.DISABLED, options):
            return body(*args, **kwargs)

    return call


def captured_inputs(function: Any) -> list[Any]:
    """Returns the captured inputs of a concrete function; the list itself."""
    captures: list[Any] = function._captured_inputs
    return captures


def functions_of(graph: tf.Graph) -> dict[str, Any]:
    """Returns the functions that a graph calls, by name."""
    return dict(graph._functions)


def has_scopes(graph: tf.Graph) -> bool:
    """Returns whether operations that are made in a graph now get more than they ask for.

    Control inputs, attributes, another gradient, or a place beside other operations.
    """
    return bool(
        graph._current_control_dependencies()
        or graph._attr_scope_map
        or graph._gradient_override_map
        or list(graph._colocation_stack.peek_objs())
        or graph._get_control_flow_context() is not None
    )


def number_of_nodes(graph: tf.Graph) -> int:
    """Returns how many operations a graph has, without a list of them."""
    return int(graph.num_operations())


def replace_input(operation: tf.Operation, number: int, tensor: tf.Tensor) -> None:
    """Makes an operation read another tensor."""
    operation._update_input(number, tensor)


def shapes_of_outputs(graph: bytes) -> dict[str, tuple[tuple[int | None, ...] | None, ...]]:
    """Returns node -> static shapes of its outputs, None for an unknown rank, from a serialized GraphDef.

    Importing it as TensorFlow does also makes, and fills in, a Python object for each node, which takes twice as long.

    Raises:
        ValueError: the shapes contradict each other, or the graph isn't one.
    """
    scope = tf.Graph()
    options = c_api_util.ScopedTFImportGraphDefOptions()
    buffer = pywrap_tf_session.TF_NewBufferFromString(graph)
    try:
        with scope._c_graph.get() as c_graph:
            results = pywrap_tf_session.TF_GraphImportGraphDefWithResults(c_graph, buffer, options.options)
        c_api_util.ScopedTFImportGraphDefResults(results)  # which deletes them
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(str(error)) from error
    finally:
        pywrap_tf_session.TF_DeleteBuffer(buffer)
    shapes_of = {}
    for c_operation in scope.new_operations():
        operation = ops.Operation._from_c_op(c_operation, scope)
        shapes = [output._shape for output in operation.outputs]  # A TensorShape takes as long as all else here.
        shapes_of[operation.name] = tuple(None if unknown else tuple(sizes) for sizes, unknown in shapes)
    return shapes_of


class _WatchedTensor(ops.SymbolicTensor):
    """A tensor that tells who looks at the operation behind it."""

    @property
    def op(self) -> Any:
        reader = str(sys._getframe(1).f_globals.get("__name__"))
        if not reader.startswith(_LIBRARIES):
            _LOOKED_AT[self.graph]()
        return super().op


_LIBRARIES = ("tensorflow.", "keras.")
"""Packages that look at operations for what they need, such as the values of constants."""
_LOOKED_AT: weakref.WeakKeyDictionary[tf.Graph, Callable[[], None]] = weakref.WeakKeyDictionary()


def watch_operation(tensor: tf.Tensor, looked: Callable[[], None]) -> None:
    """Calls ``looked`` when code of others than TensorFlow and Keras looks at the operation behind a tensor.

    Args:
        tensor: a tensor of a graph.
        looked: the same for all tensors of a graph, which it mustn't keep alive.
    """
    _LOOKED_AT[tensor.graph] = looked
    tensor.__class__ = _WatchedTensor


def registered_gradient(name: str) -> Callable[..., Any]:
    """Returns the gradient function of an operation type, or of a name given by ``tf.RegisterGradient``."""
    gradient: Callable[..., Any] = ops.gradient_registry.lookup(name)
    return gradient


def python_function(token: str) -> Any:
    """Returns the object that TensorFlow keeps for a ``tf.py_function`` while a graph calls it; see `code_of`."""
    return script_ops._py_funcs.get(token)


def code_of(python_function: Any) -> Callable[..., Any]:
    """Returns the Python code of a ``tf.py_function``."""
    code: Callable[..., Any] = python_function._func
    return code


def watches_variables(tape: tf.GradientTape) -> bool:
    """Returns whether a tape watches trainable variables by itself."""
    return bool(tape._watch_accessed_variables)


# ---- sessions and datasets


def prepared_run(session: tf.compat.v1.Session, options: Any) -> Callable[..., Any]:
    """Returns a function that runs a ``CallableOptions``: feeds' values -> fetches' values."""
    run: Callable[..., Any] = session._make_callable_from_options(options)
    return run


def looked_up_run(
    session: tf.compat.v1.Session, feeds: Sequence[str], fetches: Sequence[str], nodes: Sequence[str], options: Any
) -> Callable[..., list[Any]]:
    """Returns a function that does as ``Session.run``: arrays of the feeds' dtypes -> values of the fetched tensors.

    ``Session.run`` looks for each tensor by its name, each time.

    Args:
        session: the session.
        feeds: names of the tensors that are fed.
        fetches: names of the tensors that are fetched.
        nodes: names of nodes that are run besides.
        options: a ``RunOptions``, or None.
    """
    graph = session.graph
    inputs = [graph.get_tensor_by_name(name)._as_tf_output() for name in feeds]
    outputs = [graph.get_tensor_by_name(name)._as_tf_output() for name in fetches]
    targets = [graph.get_operation_by_name(name)._c_op for name in nodes]
    serialized = None if options is None else options.SerializeToString()

    def call(feed: dict[Any, Any]) -> Any:
        if session._closed:
            raise RuntimeError("this session is closed")
        session._extend_graph()
        buffer = None if serialized is None else pywrap_tf_session.TF_NewBufferFromString(serialized)
        try:
            return session._call_tf_sessionrun(buffer, feed, outputs, targets, None)
        finally:
            if buffer is not None:
                pywrap_tf_session.TF_DeleteBuffer(buffer)

    def run(*values: Any) -> list[Any]:
        fetched: list[Any] = session._do_call(call, dict(zip(inputs, values, strict=True)))
        return fetched

    return run


SESSION_RUN = (pywrap_tf_session, "TF_SessionRun_wrapper")
"""Where ``Session.run`` finds the C function that it calls: a module, and the name in it. For those who time it."""


def _datasets_within(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns a dataset and its inputs, however deep."""
    return [dataset, *(inner for source in dataset._inputs() for inner in _datasets_within(source))]


def shuffled_datasets(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the inputs of all ``shuffle`` that a dataset is made by, which have another order in each round."""
    return [
        node._inputs()[0]
        for node in _datasets_within(dataset)
        if isinstance(node, _ShuffleDataset) and node._reshuffle_each_iteration is not False
    ]


def shuffles_within_rounds(dataset: tf.data.Dataset) -> bool:
    """Whether shuffles may begin anew within a round, other than outermost ones: by ``repeat`` or ``concatenate``."""
    twice = any(map(shuffled_datasets, shuffled_datasets(dataset)))
    return any(
        isinstance(node, _ConcatenateDataset) or (twice and isinstance(node, _RepeatDataset))
        for node in _datasets_within(dataset)
        if shuffled_datasets(node)
    )


def iterator_resource(iterator: Any) -> tf.Tensor:
    """Returns the resource of an iterator over a ``tf.data.Dataset``."""
    return iterator._iterator_resource
