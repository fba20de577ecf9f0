"""Data that workers read themselves: a ``tf.data`` pipeline as a graph, and the batches of it as the client sees them.

The client runs steps and counts batches. It knows a batch by its number, and the shapes of its arrays; the arrays
themselves stay on the workers.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from dapple_tf.common.keras_private import OwnAdapter
from dapple_tf.errors import DataError, reason
from graph_passes.ir.graph import GraphDef, NodeDef, Ref, all_nodes, copied, data_inputs
from graph_passes.ir.tensorflow_bridge import constant_value, function_graph, input_dtypes, is_stateful, op_def

Shape = tuple[int, ...]

_READING = ("fit", "evaluate", "predict")

_IGNORE = 1
"""TensorFlow's `ExternalStatePolicy.IGNORE`: state is looked for here, by `_check_order`."""
_MOST_BYTES = 2**26
"""Largest graph of a dataset: each worker that reads has a part of its own in the session's graph, of at most 2 GiB."""
_SERVICE, _DATASET = "DataServiceDataset", "Dataset"
_SIGNATURE = frozenset({"_Arg", "_Retval", "Const", "Placeholder", "NoOp", "Identity"})
_HARMLESS = frozenset(
    {"Assert", "CheckNumerics", "CheckNumericsV2", "Print", "PrintV2", "DummySeedGenerator", "DummyMemoryCache"}
    | {"StatefulPartitionedCall", "If", "While", "Case"}
)
"""The stateful ops, besides datasets, that give the same on all workers: checks, and calls of other functions."""
_PYTHON = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "GeneratorDataset"})
_AGAIN = ("reshuffle_each_iteration", "rerandomize_each_iteration")
"""The attributes of datasets with a generator of seeds."""
_OPENS_FIRST = frozenset(
    {"AssertCardinalityDataset", "BatchDatasetV2", "FilterDataset", "FlatMapDataset", "GroupByWindowDataset"}
    | {"InterleaveDataset", "MapAndBatchDataset", "MapDataset", "OptionsDataset", "PaddedBatchDatasetV2"}
    | {"ParallelBatchDataset", "ParallelFilterDataset", "ParallelInterleaveDatasetV4", "ParallelMapDatasetV2"}
    | {"ParseExampleDatasetV2", "PrefetchDataset", "ScanDataset", "ShardDataset", "SkipDataset", "TakeDataset"}
    | {"TakeWhileDataset", "UnbatchDataset", "WindowDataset"}
)
"""Datasets whose iterators make the one of their first input when they are made, and make no other one of it."""
_SHUFFLES = frozenset({"ShuffleDatasetV3"})
"""Those whose iterators make it for their first element."""
_ZIPS = frozenset({"ZipDataset"})
"""Those whose iterators make the ones of all inputs when they are made, and take an element of each for their first."""


class Drawn(enum.IntEnum):
    """When a round of a dataset has drawn all its seeds."""

    NONE = 0
    """There are none to draw: all rounds are alike, or what differs in them follows no generator."""
    BEGUN = 1
    """When it has begun."""
    FIRST = 2
    """When its first element has been read."""
    LATER = 3
    """Later: perhaps at its end."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A dataset as a graph: the whole one, or what one group of workers reads of it.

    Attributes:
        graph: the graph, without devices.
        output: name of the tensor in it that is the dataset.
        specs: specs of an element's arrays, in the order in which iterators give them.
        order: their numbers in feed order, which is Keras': the two differ in an ``OrderedDict``.
        num_batches: number of its elements; None if it isn't known, or there is no end.
        drawn: when a round has drawn its seeds.
    """

    graph: GraphDef
    output: str
    specs: tuple[tf.TensorSpec, ...]
    order: tuple[int, ...]
    num_batches: int | None
    drawn: Drawn


class OnWorkers:
    """A dataset whose graph workers have; see `on_workers`.

    Attributes:
        in_parts: whether groups of workers read parts of each batch, and not all of them whole batches.
        element_spec: structure of its batches, of any size.
        rounds: for each time that it was read from its beginning, the number of batches that were read; None if it was
            read to its end. Shuffled data have another order each time, which depends on the times before.
    """

    def __init__(self, make: Callable[[tf.distribute.InputContext], tf.data.Dataset], *, in_parts: bool) -> None:
        """Makes the dataset once.

        Raises:
            DataError: it can't be sent, workers would read different batches, or its elements aren't batches of arrays.
        """
        self.in_parts = in_parts
        self.rounds: list[int | None] = []
        self._make = make
        self._parts: dict[int, tuple[Part, ...]] = {}
        dataset = self._made(1, 0)
        self.element_spec = tf.nest.map_structure(_of_any_size, dataset.element_spec)
        if not in_parts:
            self._parts[1] = (_part(dataset),)

    def parts(self, count: int) -> tuple[Part, ...]:
        """Returns the datasets of as many groups of workers, or the whole one if all of them read whole batches."""
        count = count if self.in_parts else 1
        if count not in self._parts:
            self._parts[count] = tuple(_part(self._made(count, index)) for index in range(count))
        return self._parts[count]

    def _made(self, count: int, index: int) -> tf.data.Dataset:
        with tf.init_scope(), tf.device("CPU:0"):
            dataset = self._make(tf.distribute.InputContext(count, index, count))
        if not isinstance(dataset, tf.data.Dataset):
            raise DataError(
                f"the function given to on_workers returned a {type(dataset).__name__}; let it return a tf.data.Dataset"
            )
        _check_elements(dataset.element_spec)
        return dataset

    @functools.cached_property
    def apart(self) -> OnWorkers:
        """The same data with rounds of their own: who reads them changes nothing about the rounds of these."""
        other = copy.copy(self)
        other.rounds = []
        return other

    def batch(self, shapes: Sequence[Shape], address: Address) -> Any:
        """Returns a batch as its arrays' descriptions, in the structure of an element."""
        specs = keras.tree.flatten(self.element_spec)
        arrays = [
            RemoteArray(shape, np.dtype(spec.dtype.as_numpy_dtype), address)
            for shape, spec in zip(shapes, specs, strict=True)
        ]
        return keras.tree.pack_sequence_as(self.element_spec, arrays)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("the batches of dapple.on_workers(...) are on the workers; give it to fit, evaluate or predict")


def _of_any_size(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def _part(dataset: tf.data.Dataset) -> Part:
    options = tf.data.Options()
    options.deterministic = True
    graph, output = _graph_of(dataset.with_options(options))
    _check_order(graph)
    cardinality = int(dataset.cardinality())
    specs = tuple(tf.nest.flatten(dataset.element_spec))
    order = tuple(keras.tree.flatten(tf.nest.pack_sequence_as(dataset.element_spec, range(len(specs)))))
    num_batches = cardinality if cardinality >= 0 else None
    name = f"{output.node}:{output.output}"
    return Part(graph, name, specs, order, num_batches, _drawn(graph, output.node))


@dataclasses.dataclass(frozen=True)
class Address:
    """What tells a batch that is on workers from all others.

    Attributes:
        source: the data.
        round: number of the round, from 0.
        number: number of the batch in the round, from 0.
    """

    source: OnWorkers
    round: int
    number: int


@dataclasses.dataclass(frozen=True)
class RemoteArray:
    """An array of a batch that is on workers.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        address: its batch.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: Address

    @property
    def ndim(self) -> int:
        """Its rank."""
        return len(self.shape)


def address_of(arrays: Sequence[Any]) -> Address | None:
    """Returns the address of a batch; None if its arrays are in this process."""
    return arrays[0].address if arrays and isinstance(arrays[0], RemoteArray) else None


Read = Callable[[Address], "Sequence[Shape] | None"]
"""Has workers read a batch; returns the shapes of its arrays, or None if the round has ended before."""


class Round(Iterator[Any]):
    """The batches of one round.

    Attributes:
        element_spec: structure of the batches.
    """

    def __init__(self, source: OnWorkers, read: Read, start: int = 0) -> None:
        """Begins the next round of the data, at batch ``start``."""
        self.element_spec = source.element_spec
        self._source, self._read, self._next = source, read, start
        self._round = len(source.rounds)
        source.rounds.append(start)

    def __next__(self) -> Any:
        """Returns the next batch, as `RemoteArray`s.

        Raises:
            DataError: it can't be read.
            WorkerLostError: a worker was lost; the next call reads the same batch.
        """
        address = Address(self._source, self._round, self._next)
        shapes = self._read(address)
        if shapes is None:
            self._source.rounds[self._round] = None
            raise StopIteration
        self._next += 1
        self._source.rounds[self._round] = self._next
        return self._source.batch(shapes, address)


class WorkerBatches(OwnAdapter):
    """The data of workers, for Keras and for the devices that read them.

    Attributes:
        source: the data.
        read: see `Read`.
    """

    def __init__(self, source: OnWorkers, read: Read, num_batches: int | None) -> None:
        self.source, self.read = source, read
        self._num_batches = num_batches

    def get_tf_dataset(self) -> WorkerBatches:
        """Returns the object from which Keras takes iterators."""
        return self

    def __iter__(self) -> Round:
        """Begins the next round."""
        return Round(self.source, self.read)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in a round; None if it isn't known."""
        return self._num_batches


def on_workers(make_dataset: Callable[..., tf.data.Dataset] | tf.data.Dataset, *, in_parts: bool = False) -> OnWorkers:
    """Returns data for ``fit``, ``evaluate`` and ``predict`` that workers read themselves, instead of this process.

        pipelined.fit(dapple.on_workers(make_dataset), epochs=3)

    The dataset is made here, and its graph is sent to the workers. Each worker whose devices read inputs, labels or
    weights has its own iterator on its CPU, and takes the samples that its devices need. All of them read the same
    batches in the same order, so that training is the same as with ``fit(make_dataset())``, bit for bit. Files must be
    there under the same names on all of these workers.

    With ``in_parts``, each worker reads and decodes only its part of each batch. The function is then called for each
    part, with a ``tf.distribute.InputContext``, as for ``tf.distribute``:

        def make_dataset(context):
            files = dataset_of_files.shard(context.num_input_pipelines, context.input_pipeline_id)
            return files.map(decode).batch(context.get_per_replica_batch_size(64), drop_remainder=True)

    Args:
        make_dataset: a function that returns a dataset of batches, such as ``(x, y)``; or such a dataset.
        in_parts: whether the function takes a context and returns a part.

    Raises:
        DataError: the dataset can't be sent: it runs Python code, or has a state of its own (random numbers that follow
            no seed, tables); or workers would read different batches.
    """
    if isinstance(make_dataset, tf.data.Dataset):
        if in_parts:
            raise DataError("in_parts=True calls a function for each part; give it instead of a tf.data.Dataset")
        return OnWorkers(lambda context: make_dataset, in_parts=False)
    if not callable(make_dataset):
        raise DataError(
            f"on_workers takes a function that returns a tf.data.Dataset, not a {type(make_dataset).__name__}: arrays "
            f"and generators are in this process only; feed them from here, or read files in a tf.data.Dataset"
        )
    return OnWorkers(make_dataset if in_parts else lambda context: make_dataset(), in_parts=in_parts)


def _check_elements(element_spec: Any) -> None:
    for spec in tf.nest.flatten(element_spec):
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise DataError(
                f"the dataset's elements have {spec}, which can't be cut into slices: give it dense tensors of known "
                f"rank (RaggedTensor.to_tensor(), tf.sparse.to_dense, tf.ensure_shape)"
            )
        if spec.shape.rank == 0:
            raise DataError(f"the dataset's elements have the scalar {spec}: are they batched (dataset.batch(...))?")


def _graph_of(dataset: tf.data.Dataset) -> tuple[GraphDef, Ref]:
    """Returns the graph of a dataset, and its output."""
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=_IGNORE,
            strip_device_assignment=True,
        )
    except tf.errors.OpError as error:
        raise _unsent(reason(error)) from error
    if len(serialized.numpy()) > _MOST_BYTES:
        raise DataError(
            f"the dataset's graph has {len(serialized.numpy()):,} bytes, more than {_MOST_BYTES:,}: arrays in it would "
            f"be sent to each worker; read them from files there, or feed the data from here"
        )
    graph = _merged(GraphDef.FromString(serialized.numpy()))
    (end,) = (node for node in graph.node if node.op == "_Retval")
    (output,) = data_inputs(end)
    graph.node.remove(end)
    return graph, output


def _unsent(cause: str) -> DataError:
    return DataError(
        f"this dataset can't be read on workers: {cause}. Python code (from_generator, py_function), variables, tables "
        "and random numbers with a state stay in this process: draw by tf.random.stateless_* from numbers in the "
        "dataset (Dataset.counter(), enumerate()), and look up in constants (tf.gather); or feed the data from here, "
        "fit(make_dataset())"
    )


def _check_order(graph: GraphDef) -> None:
    """Makes what a dataset gives follow from its graph and its files alone.

    Raises:
        DataError: it can't.
    """
    bodies = [function_graph(graph.library, function.signature.name)[0] for function in graph.library.function]
    for body in (graph, *bodies):
        constants = {node.name: node for node in body.node if node.op == "Const"}
        for node in body.node:
            _check_node(node, constants)
    for node in all_nodes(graph):
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            node.attr["deterministic"].s = b"true"
        if "sloppy" in node.attr:
            node.attr["sloppy"].b = False


def _check_node(node: NodeDef, constants: Mapping[str, NodeDef]) -> None:
    """Checks a node of a dataset, or of a function in it, beside the constants of its graph."""
    if node.op.startswith(_SERVICE):
        raise DataError(
            "the dataset reads from a tf.data service, which gives each reader other elements: several workers would "
            "read different batches; feed the data from this process"
        )
    if node.op in _PYTHON:
        raise _unsent(f"it has the op {node.op}, which runs Python code")
    if node.op in _SIGNATURE:
        return
    if _DATASET in node.op:
        seeds = [argument.name for argument in op_def(node.op).input_arg if argument.name in ("seed", "seed2")]
        if seeds and not _is_seeded(node, constants):
            raise DataError(
                f"the dataset is shuffled, or draws, without a seed ({node.op}): each worker would draw another order. "
                f"Give one, shuffle(size, seed=1), or call keras.utils.set_random_seed before the dataset is made"
            )
        return
    if node.op not in _HARMLESS and (is_stateful(node.op) or types_pb2.DT_RESOURCE in input_dtypes(node)):
        raise _unsent(f"it has the op {node.op}, which depends on a state")


def _is_seeded(node: NodeDef, constants: Mapping[str, NodeDef]) -> bool:
    """Whether a node has a seed, as far as its seeds are constants."""
    arguments = [argument.name for argument in op_def(node.op).input_arg]
    seeds = [data_inputs(node)[arguments.index(name)].node for name in ("seed", "seed2")]
    return any(name not in constants or constant_value(constants[name]) != 0 for name in seeds)


def arguments_on_workers(method: str, arguments: dict[str, Any], read: Read, groups: int) -> dict[str, Any]:
    """Returns the arguments of one of Keras' methods with `WorkerBatches` in place of data that workers read.

    Args:
        method: the method.
        arguments: its arguments.
        read: see `Read`.
        groups: number of parts into which batches are cut, of data that are read in parts.

    Raises:
        DataError: the method doesn't read such data, or other arguments don't go with them.
    """
    if method not in _READING and any(isinstance(value, OnWorkers) for value in arguments.values()):
        raise DataError(f"{method} takes a batch of this process; {', '.join(_READING)} read data on workers")
    for name in ("x", "validation_data"):
        if isinstance(arguments.get(name), OnWorkers):
            _check_alone(arguments, name)
    parts = arguments.get("validation_data")
    if isinstance(parts, (tuple, list)) and any(isinstance(part, OnWorkers) for part in parts):
        raise DataError("give data on workers alone, validation_data=dapple.on_workers(...): labels are in the dataset")
    for name in ("y", "sample_weight"):
        if isinstance(arguments.get(name), OnWorkers):
            raise DataError(f"{name} is data on workers; give one dataset of (x, y) or (x, y, sample_weight) as x")

    def bound(data: Any) -> Any:
        if not isinstance(data, OnWorkers):
            return data
        lengths = [part.num_batches for part in data.parts(groups)]
        known = [length for length in lengths if length is not None]
        return WorkerBatches(data, read, min(known) if len(known) == len(lengths) else None)

    return {name: bound(value) for name, value in arguments.items()}


def _check_alone(arguments: dict[str, Any], name: str) -> None:
    if name == "x":
        for other in ("y", "sample_weight", "class_weight"):
            if arguments.get(other) is not None:
                raise DataError(f"{other} doesn't go with data on workers: let the dataset give (x, y, sample_weight)")
        if arguments.get("validation_split"):
            raise DataError("validation_split doesn't go with data on workers: give validation_data")


# ---- graphs of datasets


def _drawn(graph: GraphDef, output: str) -> Drawn:
    """Returns when a round of a dataset has drawn its seeds.

    A dataset that shuffles anew in each round keeps a generator of seeds, and each of its iterators draws one. So the
    order of a round depends on how many iterators there were in the rounds before; a repeated dataset has several in
    each.

    Args:
        graph: graph of the dataset, its nodes in the order in which they run.
        output: name of the dataset's node.
    """
    times: dict[str, Drawn] = {}
    for node in graph.node:
        times[node.name] = _drawn_by(node, [times[ref.node] for ref in data_inputs(node)])
    return times[output]


def _drawn_by(node: NodeDef, inputs: list[Drawn]) -> Drawn:
    own = Drawn.BEGUN if any(name in node.attr and node.attr[name].b for name in _AGAIN) else Drawn.NONE
    latest = max(inputs, default=Drawn.NONE)
    if latest is Drawn.NONE:
        return own
    first, *others = inputs
    if node.op in _ZIPS:
        return latest
    if any(others) or node.op not in _OPENS_FIRST | _SHUFFLES:
        return Drawn.LATER
    return max(first, Drawn.FIRST) if node.op in _SHUFFLES else first


def _merged(graph: GraphDef) -> GraphDef:
    """Returns the graph with one node for a dataset that several others read, which TensorFlow repeats for each.

        range/1 → shuffle/2 ─┐                                        ┌─┐
        range/3 → shuffle/4 ─┴─ zip      becomes    range/1 → shuffle/2 ─ zip

    Only so do they draw from one generator of seeds, as in the process that has made the dataset. Datasets that were
    made apart have generators of their own, whose names differ.
    """
    smaller = GraphDef(versions=graph.versions, library=graph.library)
    names: dict[str, str] = {}  # node -> the one that stands for it
    known: dict[bytes, str] = {}
    for original in graph.node:
        node = copied(original)
        node.name = ""
        node.input[:] = [str(Ref(names[ref.node], ref.output)) for ref in data_inputs(node)]
        name = known.setdefault(hashlib.sha256(node.SerializeToString(deterministic=True)).digest(), original.name)
        names[original.name] = name
        if name == original.name:
            node.name = name
            smaller.node.append(node)
    return smaller
