"""A model's computations on strings and lookup tables, which run on the client's host before the first stage.

Text vectorization, hashing and the like depend on a batch alone. They are cut out of the captured graph by data flow
and run once for each whole batch, as in plain Keras; their results become inputs of the pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from dapple_tf.errors import CaptureError, DataError
from dapple_tf.frontend.batch import BatchSpec
from graph_passes.ir.graph import Graph, GraphDef, Ref, dtype_attr, make_node, shape_attr
from graph_passes.ir.program import Program
from graph_passes.ir.tensorflow_bridge import Shape, is_stateful, output_dtypes, takes_functions

_HOST_DTYPES = frozenset({types_pb2.DT_STRING, types_pb2.DT_RESOURCE})
_DRAWS = "RngReadAndSkip"
_METADATA = frozenset({"Shape", "ShapeN", "Size", "Rank"})


@dataclasses.dataclass(frozen=True)
class HostPart:
    """The computation on a batch before devices get it.

    Attributes:
        kept: numbers of the batch's arrays that devices get unchanged.
        read: numbers of the arrays that it reads.
        names: names of its results in messages.
        shapes: shapes of its results; None for the batch and for lengths that differ.
        function: the arrays that it reads -> its results.
    """

    kept: tuple[int, ...]
    read: tuple[int, ...]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    function: Callable[..., Sequence[tf.Tensor]]

    def device_shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns the shapes of the devices' arrays for batches of these shapes; empty if one is unknown."""
        of_devices = (*(shapes[number] for number in self.kept), *self.shapes) if shapes else ()
        return of_devices if all(None not in shape[1:] for shape in of_devices) else ()

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the arrays that devices get.

        Raises:
            DataError: a result hasn't one row for each sample.
        """
        with tf.device("CPU:0"):
            results = [np.asarray(result) for result in self.function(*(tf.constant(arrays[n]) for n in self.read))]
        samples = len(arrays[0])
        for name, result in zip(self.names, results, strict=True):
            if result.ndim == 0 or len(result) != samples:
                raise DataError(
                    f"{name} computes an array of shape {result.shape} from {samples} samples, which can't be cut into "
                    f"slices: it needs one row for each sample"
                )
        return [*(arrays[number] for number in self.kept), *results]


@dataclasses.dataclass(frozen=True)
class CapturedProgram(Program):
    """A program with a part that is computed on the client's host.

    Attributes:
        host: the part that computes its inputs; None if devices get a batch unchanged.
    """

    host: HostPart | None = None


def on_host(program: Program, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Returns the arrays that devices get for a batch's arrays: inputs of the program, in their order."""
    host = program.host if isinstance(program, CapturedProgram) else None
    return arrays if host is None else host(arrays)


def shapes_on_devices(program: Program, spec: BatchSpec) -> list[Shape]:
    """Returns the shapes of a program's batch inputs, None for the batch and for open lengths."""
    shapes, host = [leaf.shape for leaf in spec.leaves], program.host if isinstance(program, CapturedProgram) else None
    return shapes if host is None else [*(shapes[number] for number in host.kept), *host.shapes]


def tables_of(graph: Any) -> dict[str, tf.Tensor]:
    """Returns placeholder -> handle of each captured resource that isn't a variable: lookup tables."""
    return {
        internal.op.name: external
        for external, internal in graph.captures
        if external.dtype == tf.resource and not any(_reads_variable(reader) for reader in internal.consumers())
    }


def _reads_variable(operation: Any) -> bool:
    return operation.type in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape") or (
        operation.type.startswith("Assign")
    )


def split_host_part(
    graph_def: GraphDef,
    traced: Any,
    inputs: Sequence[Ref],
    tables: Mapping[str, tf.Tensor],
    wanted: Sequence[Ref],
    layer_of: Callable[[int], str],
) -> tuple[GraphDef, list[Ref], HostPart | None]:
    """Cuts the computations on strings and tables out of a graph.

    Everything that follows from them without trained values is cut out, too, up to the first variable, except
    computations on shapes of the results.

    Args:
        graph_def: a captured graph.
        traced: the same graph as TensorFlow traced it, with its shapes.
        inputs: batch inputs.
        tables: placeholders of lookup tables, see `tables_of`.
        wanted: the tensors that must be computed.
        layer_of: position of a node -> path of its layer, for messages.

    Returns:
        The graph without that part, its new batch inputs, and the part; None if there is none.

    Raises:
        CaptureError: strings or a table meet trained or random values, a layer draws from a ``tf.random.Generator``, or
            a result has no batch axis.
    """
    graph = Graph(graph_def)
    dtypes = {name: output_dtypes(node) for name, node in graph.nodes.items()}
    needed = graph.ancestors(wanted, control=False)
    alone = _of_batch_alone(graph, {ref.node for ref in inputs} | set(tables), dtypes)
    first = {name for name in needed if any(_is_for_host(dtypes, ref) for ref in graph.inputs(name))}
    for name in graph.ordered(first - alone):
        if graph.nodes[name].op == _DRAWS:
            raise CaptureError(
                f"layer {layer_of(graph.position[name])!r} draws from a tf.random.Generator, whose state Keras doesn't "
                f"know: use keras.random with a keras.random.SeedGenerator"
            )
        others = [ref.node for ref in graph.inputs(name) if ref.node not in alone]
        raise CaptureError(
            f"layer {layer_of(graph.position[name])!r} ({graph.nodes[name].op}) works on strings or by a table with "
            f"what isn't of the batch alone "
            f"({', '.join(others) or 'random numbers'}): such work is done before the first stage; move it into the "
            f"input pipeline"
        )
    behind = set(first)
    for node in graph:
        if node.name in needed & alone and any(ref.node in behind for ref in graph.inputs(node.name)):
            behind.add(node.name)
    host = behind - _told_by_shapes(graph, behind - first)
    read = [ref for node in graph if node.name in needed - host for ref in graph.inputs(node.name)]
    crossing = [ref for ref in dict.fromkeys([*read, *wanted]) if ref.node in host]
    if not crossing:
        return graph_def, list(inputs), None
    kept = tuple(number for number, ref in enumerate(inputs) if types_pb2.DT_STRING not in dtypes[ref.node])
    used = graph.ancestors(crossing)
    read_by_host = tuple(number for number, ref in enumerate(inputs) if ref.node in used)
    places, shapes, names = [], [], []
    for ref in crossing:
        tensor = traced.get_tensor_by_name(f"{ref.node}:{ref.output}")
        layer = f"layer {layer_of(graph.position[ref.node])!r}"
        if _is_for_host(dtypes, ref) or tensor.shape.rank in (None, 0) or tensor.shape[0] is not None:
            raise CaptureError(
                f"{layer} gives a {tensor.dtype.name} tensor of shape {tensor.shape}, computed of strings or by a "
                f"table: what the pipeline gets of them must be numbers with one row for each sample"
            )
        names.append(layer)
        shapes.append((None, *tensor.shape.as_list()[1:]))
        places.append(ref)
    function = _function(graph_def, [inputs[number] for number in read_by_host], tables, crossing)
    device, now = _with_placeholders(graph_def, host, places, shapes, dtypes)
    part = HostPart(kept, read_by_host, tuple(names), tuple(shapes), function)
    return device, [*(inputs[number] for number in kept), *now], part


def _is_for_host(dtypes: Mapping[str, Sequence[int]], ref: Ref) -> bool:
    return dtypes[ref.node][ref.output] in _HOST_DTYPES


def _of_batch_alone(graph: Graph, given: Collection[str], dtypes: Mapping[str, Sequence[int]]) -> set[str]:
    """Returns the nodes whose results depend on the batch alone, not on trained or random values."""
    of_batch: set[str] = set()
    for node in graph:
        reads = graph.inputs(node.name)
        same = takes_functions(node.op) or not is_stateful(node.op) or any(_is_for_host(dtypes, ref) for ref in reads)
        own = node.name in given if node.op == "Placeholder" else same and all(ref.node in of_batch for ref in reads)
        if own:
            of_batch.add(node.name)
    return of_batch


def _told_by_shapes(graph: Graph, candidates: Collection[str]) -> set[str]:
    """Returns the nodes that devices can compute from the shapes of their inputs: they have no rows."""
    told: set[str] = set()
    for node in graph:
        reads = [ref for ref in graph.inputs(node.name) if graph.nodes[ref.node].op != "Const"]
        if node.name in candidates and reads and (node.op in _METADATA or all(ref.node in told for ref in reads)):
            told.add(node.name)
    return told


def _function(
    graph_def: GraphDef, inputs: Sequence[Ref], tables: Mapping[str, tf.Tensor], wanted: Sequence[Ref]
) -> Callable[..., Sequence[tf.Tensor]]:
    """Returns a function of batch inputs that computes tensors of a graph."""
    graph = Graph(graph_def)
    names = graph.ancestors(wanted)
    part = GraphDef(versions=graph_def.versions, library=graph_def.library)
    part.node.extend(node for node in graph_def.node if node.name in names)
    for node in part.node:
        node.device = ""
        node.attr.pop("_class", None)

    @tf.function(autograph=False)
    def function(*arrays: tf.Tensor) -> Any:
        given = {f"{ref.node}:0": array for ref, array in zip(inputs, arrays, strict=True)}
        scope = tf.compat.v1.get_default_graph()
        given |= {f"{name}:0": scope.capture(handle) for name, handle in tables.items() if name in names}
        return tf.graph_util.import_graph_def(part, given, [f"{ref.node}:{ref.output}" for ref in wanted], name="host")

    return function


def _with_placeholders(
    graph_def: GraphDef,
    host: Collection[str],
    crossing: Sequence[Ref],
    shapes: Sequence[Shape],
    dtypes: Mapping[str, Sequence[int]],
) -> tuple[GraphDef, list[Ref]]:
    """Returns the graph with placeholders for the results of the host's nodes, in place of some of these."""
    now: dict[Ref, Ref] = {}
    free = [name for name in (node.name for node in graph_def.node) if name in host]
    for ref in crossing:  # In the order of the graph a node of the host comes before what reads it.
        name = ref.node if ref.node in free else free[0]
        free.remove(name)
        now[ref] = Ref(name)
    replaced = {place.node: (ref, shape) for (ref, place), shape in zip(now.items(), shapes, strict=True)}
    rewritten = GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in graph_def.node:
        if node.name in replaced:
            ref, shape = replaced[node.name]
            attrs = {"dtype": dtype_attr(dtypes[ref.node][ref.output]), "shape": shape_attr(shape)}
            rewritten.node.append(make_node(node.name, "Placeholder", attrs=attrs))
            continue
        own = rewritten.node.add()
        own.CopyFrom(node)
        for index, text in enumerate(node.input):
            if not text.startswith("^"):
                own.input[index] = str(now.get(Ref.parse(text), text))
    return rewritten, [now[ref] for ref in crossing]
