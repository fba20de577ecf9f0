"""The bridge to TensorFlow: gradients, measured shapes and op signatures. The only module here that imports it.

Everything goes in and comes out as GraphDefs and references, so that the passes stay plain data transformations.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2, op_def_pb2, tensor_pb2, types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import COMPILED_ATTR, AttrValue, GraphDef, NodeDef, Ref, rename_functions
from graph_passes.ir.tensorflow_private import op_def_registry, replace_input
from graph_passes.ir.twin import Twin

FunctionDefLibrary: TypeAlias = function_pb2.FunctionDefLibrary
Shape = tuple[int | None, ...]


@functools.cache
def op_def(op: str) -> op_def_pb2.OpDef:
    """Returns the definition of a primitive op.

    Raises:
        PassError: TensorFlow doesn't know the op (a custom op whose library isn't loaded, say).
    """
    definition = op_def_registry.get(op)
    if definition is None:
        raise PassError(f"TensorFlow knows no op {op!r}; load the library that defines it before the transform")
    return definition


def is_stateful(op: str) -> bool:
    """Returns whether running the op twice may differ from running it once."""
    return bool(op_def(op).is_stateful)


def attribute(node: NodeDef, name: str) -> AttrValue:
    """Returns an attribute of a node, or the op's default if it is missing; ``node.attr[name]`` would add it."""
    if name in node.attr:
        return node.attr[name]
    return next(attr.default_value for attr in op_def(node.op).attr if attr.name == name)


def tensor_count(arg: op_def_pb2.OpDef.ArgDef, node: NodeDef) -> int:
    """Returns the number of tensors of a node's input or output, which may be a list."""
    if arg.number_attr:
        return int(attribute(node, arg.number_attr).i)
    if arg.type_list_attr:
        return len(attribute(node, arg.type_list_attr).list.type)
    return 1


def output_dtypes(node: NodeDef) -> list[int]:
    """Returns the dtype (a ``DT_*`` number) of each output of a node."""
    return _dtypes(_arguments(node.op, inputs=False), node)


class _Argument(NamedTuple):
    """An op's input or output, which may be a list: its dtypes by default, and the attributes that change them."""

    dtypes: tuple[int, ...]
    type_attr: str
    number_attr: str
    list_attr: str


@functools.cache
def _arguments(op: str, *, inputs: bool) -> tuple[_Argument, ...]:
    definition = op_def(op)
    defaults = {attr.name: attr.default_value for attr in definition.attr}
    arguments = []
    for arg in definition.input_arg if inputs else definition.output_arg:
        if arg.type_list_attr:
            dtypes = tuple(defaults[arg.type_list_attr].list.type)
        else:
            dtypes = (defaults[arg.type_attr].type if arg.type_attr else arg.type,)
        arguments.append(_Argument(dtypes, arg.type_attr, arg.number_attr, arg.type_list_attr))
    return tuple(arguments)


def _dtypes(arguments: Iterable[_Argument], node: NodeDef) -> list[int]:
    attrs = node.attr
    dtypes: list[int] = []
    for default, type_attr, number_attr, list_attr in arguments:
        if list_attr:
            dtypes += attrs[list_attr].list.type if list_attr in attrs else default
        else:
            dtype = attrs[type_attr].type if type_attr in attrs else default[0]
            dtypes += [dtype] * (attribute(node, number_attr).i if number_attr else 1)
    return dtypes


@functools.cache
def _wanted_attrs(op: str) -> tuple[str, ...]:
    """Returns the attributes of a primitive op that have no default."""
    return tuple(attr.name for attr in op_def(op).attr if not attr.HasField("default_value"))


def missing_attrs(node: NodeDef) -> list[str]:
    """Returns the attributes that a node must have, and hasn't."""
    return [name for name in _wanted_attrs(node.op) if name not in node.attr]


def input_dtypes(node: NodeDef) -> list[int]:
    """Returns the dtype (a ``DT_*`` number) that a node wants of each tensor that it reads."""
    return _dtypes(_arguments(node.op, inputs=True), node)


def function_body_name(node: NodeDef, index: int) -> str:
    """Spells output ``index`` of a node as function bodies do: ``node:output_name:index_within_it``."""
    left = index
    for arg in op_def(node.op).output_arg:
        count = tensor_count(arg, node)
        if left < count:
            return f"{node.name}:{arg.name}:{left}"
        left -= count
    raise PassError(f"node {node.name!r} ({node.op}) has no output {index}")


def output_number(node: NodeDef, argument: str, index: int) -> int:
    """Returns the number of the output ``node:argument:index`` of a function body; see `function_body_name`."""
    before = 0
    for arg in op_def(node.op).output_arg:
        if arg.name == argument:
            return before + index
        before += tensor_count(arg, node)
    raise PassError(f"node {node.name!r} ({node.op}) has no output {argument!r}")


@functools.cache
def takes_functions(op: str) -> bool:
    """Returns whether nodes of a primitive op run functions of the library: loops, branches, calls."""
    return any(attr.type in ("func", "list(func)") for attr in op_def(op).attr)


@functools.cache
def makes_resource(op: str) -> bool:
    """Returns whether a primitive op makes a handle of its own: of a variable, a table and the like."""
    definition = op_def(op)
    given = any(arg.type == types_pb2.DT_RESOURCE for arg in definition.output_arg)
    return given and not any(arg.type == types_pb2.DT_RESOURCE for arg in definition.input_arg)


def make_constant(node: NodeDef, value: np.ndarray | bytes) -> None:
    """Turns a node into a constant, in place: the placeholder of a tensor that a trace captured, say."""
    # A string that a trace captured is bytes.
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and 1 <= value.size <= _FEW_ELEMENTS:
        tensor = _small_tensor(value.dtype.str, value.shape, value.tobytes())
    else:
        tensor = tf.make_tensor_proto(value)
    node.op = "Const"
    del node.input[:]
    node.attr.clear()
    node.attr["dtype"].type = tensor.dtype
    node.attr["value"].tensor.CopyFrom(tensor)


_FEW_ELEMENTS = 16


@functools.lru_cache(maxsize=2**12)
def _small_tensor(dtype: str, shape: tuple[int, ...], content: bytes) -> tensor_pb2.TensorProto:
    """Makes a constant's value, not to be changed: equal layers have the same shapes and axes over and over."""
    return tf.make_tensor_proto(np.frombuffer(content, dtype).reshape(shape))


def empty_graph() -> GraphDef:
    """Returns a GraphDef without nodes, at TensorFlow's current version."""
    graph = GraphDef()
    graph.versions.producer = tf.version.GRAPH_DEF_VERSION
    graph.versions.min_consumer = tf.version.GRAPH_DEF_VERSION_MIN_CONSUMER
    return graph


class Gradient(NamedTuple):
    """A gradient as tensors of the extended graph.

    Attributes:
        dense: the whole gradient.
        slices: (values, indices) when it was computed as rows, one for each use of a row; None for a dense one.
    """

    dense: Ref
    slices: tuple[Ref, Ref] | None

    def located(self, place: Callable[[Ref], Ref]) -> Gradient:
        """Returns it as tensors of another graph."""
        return Gradient(place(self.dense), self.slices and (place(self.slices[0]), place(self.slices[1])))


_Pairs = tuple[tuple[Ref, Ref], ...]
Differentiate = Callable[[bytes, _Pairs, tuple[Ref, ...]], tuple[GraphDef, tuple[Gradient | None, ...]]]
"""Adds gradients to the twin of a graph; see `add_gradients`."""


def add_gradients(
    graph: GraphDef,
    outputs: Sequence[tuple[Ref, Ref]],
    sources: Sequence[Ref],
    differentiate: Differentiate | None = None,
) -> tuple[GraphDef, list[Gradient | None]]:
    """Extends a graph by the gradients of its outputs.

    Args:
        graph: a flat graph.
        outputs: pairs of an output and the tensor (of the same shape) that holds the gradient with respect to it.
        sources: tensors to differentiate with respect to.
        differentiate: does so for the serialized twin of the graph; by default TensorFlow, for all of it at once.

    Returns:
        The extended graph and, for each source, its gradient (None when no output depends on it differentiably).
    """
    twin = Twin(graph)
    extended, gradients = (differentiate or gradients_of_twin)(
        twin.serialized,
        tuple((twin.of(output), twin.of(gradient)) for output, gradient in outputs),
        tuple(map(twin.of, sources)),
    )
    result, named = twin.named(extended)
    return result, [None if gradient is None else gradient.located(named) for gradient in gradients]


@functools.lru_cache(maxsize=64)
def gradients_of_twin(
    serialized: bytes, outputs: _Pairs, sources: tuple[Ref, ...]
) -> tuple[GraphDef, tuple[Gradient | None, ...]]:
    """Adds gradients to a graph with nodes n0, n1, ...: stages of equal layers differ in names only, and share it."""
    graph = GraphDef.FromString(serialized)
    # TensorFlow changes the functions of a loop that it differentiates, under names derived from theirs that stay in
    # use in the whole process as long as anything refers to them. Differentiating the same loop again, in a stage that
    # is cut elsewhere, would give these names to other functions, which is an error.
    rename_functions(graph, f"_differentiated{next(_differentiations)}")
    with tf.Graph().as_default() as scope:
        tf.graph_util.import_graph_def(graph, name="")

        def tensor(ref: Ref) -> tf.Tensor:
            return scope.get_tensor_by_name(f"{ref.node}:{ref.output}")

        stopped = _without_stopped(scope)
        gradients = tf.gradients(
            [tensor(output) for output, _ in outputs],
            [tensor(source) for source in sources],
            grad_ys=[tensor(gradient) for _, gradient in outputs],
            name="gradients",
        )
        of_sources = tuple(None if gradient is None else _gradient(gradient) for gradient in gradients)
        extended = scope.as_graph_def()
    made = GraphDef(versions=extended.versions, library=extended.library)
    inputs = {node.name: node.input for node in graph.node if node.name in stopped}
    placeholders = set(stopped.values())
    for node in extended.node:
        if node.name not in placeholders:
            made.node.append(node)
            if node.name in inputs:
                made.node[-1].input[:] = inputs[node.name]
    return made, of_sources


CALL_GRADIENT = "DappleCall"
"""Type of the gradient of a call; see `call_gradients.differentiable_calls`, which gives calls these attributes."""
CALL_GRADIENT_FUNCTION = "_gradient_function"
"""The function that computes it."""
CALL_GRADIENT_DTYPES = "_gradient_dtypes"
"""Of its results."""
CALL_GRADIENT_READS = "_gradient_reads"
"""Its inputs: numbers of the call's inputs, of its outputs, of outputs whose gradients it reads; -1 between."""
CALL_GRADIENT_RESULTS = "_gradient_results"
"""For each of its results twice the number of the input; plus 1 for the values of rows, before their indices."""


@tf.RegisterGradient(CALL_GRADIENT)
def _differentiate_call(operation: tf.Operation, *gradients: tf.Tensor | None) -> list[tf.Tensor | None]:
    """Returns the gradients of a call's inputs, in the graph where its graph's gradient is made."""
    reads = iter(operation.get_attr(CALL_GRADIENT_READS))
    of_inputs, of_outputs, of_gradients = (list(itertools.takewhile(lambda number: number >= 0, reads)) for _ in "123")
    outputs = operation.outputs
    arguments = [operation.inputs[number] for number in of_inputs] + [outputs[number] for number in of_outputs]
    for number in of_gradients:
        gradient = gradients[number]
        arguments.append(tf.zeros_like(outputs[number]) if gradient is None else tf.convert_to_tensor(gradient))
    inputs = operation.inputs
    dtypes = operation.get_attr(CALL_GRADIENT_DTYPES)
    attrs = {
        "Tin": AttrValue(list=AttrValue.ListValue(type=[tensor.dtype.as_datatype_enum for tensor in arguments])),
        "Tout": AttrValue(list=AttrValue.ListValue(type=[dtype.as_datatype_enum for dtype in dtypes])),
        "f": AttrValue(func=operation.get_attr(CALL_GRADIENT_FUNCTION)),
    }
    attrs |= {name: value for name, value in operation.node_def.attr.items() if name == COMPILED_ATTR}
    graph = tf.compat.v1.get_default_graph()  # In the gradient of a loop it isn't the operation's.
    computed = iter(graph.create_op(operation.type, arguments, dtypes, attrs=attrs, name="gradient_call").outputs)
    by_input: dict[int, tf.Tensor | tf.IndexedSlices] = {}
    for number in operation.get_attr(CALL_GRADIENT_RESULTS):
        values = next(computed)
        source = inputs[number // 2]
        by_input[number // 2] = tf.IndexedSlices(values, next(computed), tf.shape(source)) if number % 2 else values
    return [by_input.get(number) for number in range(len(inputs))]


def _without_stopped(graph: tf.Graph) -> dict[str, str]:
    """Makes operators through which no gradient flows read placeholders; returns operator -> placeholder.

    Unlike a tape, tf.gradients makes their predecessors wait for them: sums of gradients would have another order than
    in plain Keras, round differently, and be fused differently by XLA, which repeats whole chains of sums.
    """
    placeholders = {}
    for stopped in [each for each in graph.get_operations() if each.type == "StopGradient"]:
        given = stopped.inputs[0]
        replace_input(stopped, 0, tf.compat.v1.placeholder(given.dtype, given.shape, name="stopped"))
        placeholders[stopped.name] = stopped.inputs[0].op.name
    return placeholders


_differentiations = itertools.count()


def _gradient(gradient: tf.Tensor | tf.IndexedSlices) -> Gradient:
    slices = None
    if isinstance(gradient, tf.IndexedSlices):
        slices = (Ref.parse(gradient.values.name), Ref.parse(gradient.indices.name))
    return Gradient(Ref.parse(tf.convert_to_tensor(gradient).name), slices)


def bare_config(**devices: int) -> tf.compat.v1.ConfigProto:
    """Returns a configuration of sessions that run a graph as it is: unoptimized, each node on the device it names.

    Args:
        devices: kind -> number of devices that the session makes, such as ``GPU=0``; of other kinds TensorFlow's own.
    """
    config = tf.compat.v1.ConfigProto(allow_soft_placement=False, device_count=devices)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config


def measure_shapes(
    graph: GraphDef, placeholders: Mapping[str, Sequence[int]], values: Mapping[Ref, int], wanted: Sequence[Ref]
) -> dict[Ref, Shape]:
    """Returns the shapes of tensors that depend on values, from one run of the nodes that compute them.

    Args:
        graph: a flat graph.
        placeholders: shapes of placeholders; others (parameters, say) have fixed ones. All get random numbers, integers
            0 and 1. Large ones are drawn where they are read, and gone when the run has read them.
        values: values of scalar placeholders.
        wanted: the tensors to measure.

    Returns:
        Shapes; empty if the graph doesn't run on such numbers.
    """
    generator = np.random.default_rng(0)
    config = bare_config(GPU=0)
    # Nothing is fed: the optimizer would make everything constant.
    config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    given: dict[str, tf.Tensor] = {}
    with tf.Graph().as_default() as scope:
        for number, node in enumerate(graph.node):
            if node.op != "Placeholder":
                continue
            dtype = tf.dtypes.as_dtype(node.attr["dtype"].type)
            declared = [dim.size for dim in node.attr["shape"].shape.dim]
            size = placeholders.get(node.name) or declared
            if dtype.is_floating and Ref(node.name) not in values:
                tensor = tf.random.stateless_normal(size, (0, number))
            else:
                tensor = tf.constant(values.get(Ref(node.name), generator.integers(0, 2, size=size)))
            # TensorFlow mustn't see which numbers they are, either, before the run.
            hidden = [size if size >= 0 else None for size in declared]
            given[f"{node.name}:0"] = tf.compat.v1.placeholder_with_default(tf.cast(tensor, dtype), hidden)
        tf.graph_util.import_graph_def(graph, input_map=given, name="measured")
        shapes = [tf.shape(scope.get_tensor_by_name(f"measured/{ref.node}:{ref.output}")) for ref in wanted]
        try:
            with tf.compat.v1.Session(graph=scope, config=config) as session:
                measured = session.run(shapes)
        except tf.errors.OpError:
            return {}
    return {ref: tuple(map(int, shape)) for ref, shape in zip(wanted, measured, strict=True)}


def function_graph(library: FunctionDefLibrary, name: str) -> tuple[GraphDef, tuple[Ref, ...]]:
    """Returns a library function as a flat graph: its arguments are placeholders, in order and before all other nodes.

    Args:
        library: functions, with those that this one calls.
        name: the function's name.

    Returns:
        The graph and the function's results.

    Raises:
        PassError: there is no such function.
    """
    function = next((function for function in library.function if function.signature.name == name), None)
    if function is None:
        raise PassError(f"the graph calls function {name!r}, which its library lacks")
    graph = GraphDef(versions=tf.Graph().as_graph_def().versions, library=library)
    body = {node.name: node for node in function.node_def}
    arguments: dict[str, str] = {}
    for argument in function.signature.input_arg:
        node = graph.node.add(name=f"{argument.name}/argument", op="Placeholder")
        node.attr["dtype"].type = argument.type
        arguments[argument.name] = node.name

    def tensor(text: str) -> Ref:
        if text in arguments:
            return Ref(arguments[text])
        producer, output, index = text.split(":")
        return Ref(producer, output_number(body[producer], output, int(index)))

    for original in function.node_def:
        inputs = [text if text.startswith("^") else str(tensor(text)) for text in original.input]
        graph.node.append(original)
        graph.node[-1].input[:] = inputs
    return graph, tuple(tensor(function.ret[result.name]) for result in function.signature.output_arg)


def constant_value(node: NodeDef) -> np.ndarray:
    """Returns the value of a ``Const`` node."""
    value: np.ndarray = tf.make_ndarray(node.attr["value"].tensor)
    return value


def dtype_size(dtype: int) -> int:
    """Returns the bytes per element; 0 for dtypes without a fixed size (variants, resources, strings)."""
    kind = tf.dtypes.as_dtype(dtype)
    return int(kind.size) if kind.is_numpy_compatible and kind != tf.string else 0


def numpy_dtype(dtype: int) -> np.dtype[Any]:
    """Returns the dtype of arrays with values of a dtype (a ``DT_*`` number)."""
    return np.dtype(tf.dtypes.as_dtype(dtype).as_numpy_dtype)


class EvaluationError(PassError):
    """A node of a graph without inputs can't be computed.

    Attributes:
        node: its name; empty if TensorFlow doesn't tell.
        why: what TensorFlow says.
    """

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"node {node!r} can't be computed: {why}")
        self.node, self.why = node, why


def evaluate(graph: GraphDef, wanted: Sequence[Ref]) -> dict[Ref, np.ndarray]:
    """Returns the values of tensors of a graph without inputs, computed on the CPU without optimization.

    Raises:
        EvaluationError: a node can't be computed.
    """
    if not wanted:
        return {}
    config = bare_config(GPU=0)
    with tf.Graph().as_default() as scope:
        tf.graph_util.import_graph_def(graph, name="")
        with tf.compat.v1.Session(graph=scope, config=config) as session:
            try:
                values = session.run([f"{ref.node}:{ref.output}" for ref in wanted])
            except tf.errors.OpError as error:
                said = re.search(r"^Node: .*\n(.*)", str(error.message), re.MULTILINE)  # before it, where it was made
                why = said[1] if said else str(error.message).partition("\n")[0]
                raise EvaluationError("" if error.op is None else error.op.name, why) from error
    return dict(zip(wanted, map(np.asarray, values), strict=True))
