"""A Program: a GraphDef and its tensors' meaning. Passes take one and return a new one.

A program starts flat: the model's graph as it was captured, for one slice of a batch. ``assign_stages`` cuts it,
``build_forward`` and ``build_backward`` move each stage into library functions, and ``replicate`` starts a new top
level with one call per task, which the later passes connect, order and complete.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.batching import Interval, micro_batch_intervals, slice_intervals
from graph_passes.ir.graph import COUNTABLE_DTYPES, GraphDef, Ref
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.spreads import Coupling
from graph_passes.ir.tasks import Phase, Schedule, Task


class VariableKind(enum.Enum):
    """A variable's role in a training step."""

    PARAMETER = "parameter"  # has a gradient
    STATE = "state"  # is updated by the forward pass (moving averages, counters, random seeds)
    METRIC = "metric"  # is updated from outputs and labels; lives on the host between steps
    OPTIMIZER = "optimizer"  # slots, step counter, learning rate, loss scale


ROWS_PER_SHARD = 20
"""Fewest rows of a shard that is rows: padding is at most a twentieth."""


def in_rows(shape: Sequence[int], shards: int) -> bool:
    """Whether the shards of variables of this shape are rows."""
    return len(shape) > 1 and shape[0] >= ROWS_PER_SHARD * shards


def storage_shape(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """Returns the shape of a shard, all of which are equal: the last ones may end with padding.

    Shards are rows where there are many, so that each row of a gradient belongs to one; otherwise they are vectors.
    """
    if in_rows(shape, shards):
        return (-(-shape[0] // shards), *shape[1:])
    return (-(-math.prod(shape) // shards),)


@dataclasses.dataclass(frozen=True)
class Variable:
    """One logical variable of the user's model.

    Attributes:
        name: unique in the program; also the name of its storage on every device that keeps it.
        dtype: a ``DT_*`` number.
        shape: fully known.
        kind: see :class:`VariableKind`.
        value: the placeholder that stands for it in the flat graph; None when the flat graph doesn't read it.
        update: this slice's contribution to its value after the step, in the flat graph; None when the forward pass
            doesn't change it. Contributions to floating-point state add up over the slices of the global batch (each is
            weighted by its samples); for other state (counters, random seeds) the first slice's is the new value;
            metric values pass from one micro-batch to the next.
        additive: of a metric: whether an update only adds to the value, so that each replica can keep a sum of its
            own. One value passes through all replicas otherwise, in the order of samples.
        metric: the metric that it belongs to, so that all its variables are updated from the same slices; None for a
            metric of its own.
        merge: how slices' contributions to floating-point state make its value: ``"Add"``, ``"Max"`` or ``"Min"``.
        storage: name of its storage on devices; None for the variable's own. Counters that every parameter group steps
            for itself have one for each group.
        shards: number of devices that keep it together, each an equal part of its elements (`storage_shape`); 1 if each
            device that keeps it has all of it.
    """

    name: str
    dtype: int
    shape: tuple[int, ...]
    kind: VariableKind
    value: Ref | None = None
    update: Ref | None = None
    additive: bool = True
    metric: str | None = None
    merge: str = "Add"
    storage: str | None = None
    shards: int = 1

    @property
    def storage_name(self) -> str:
        """Name of its storage on the devices that keep it."""
        return self.storage or self.name

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Shape of what a device keeps of it."""
        return self.shape if self.shards == 1 else storage_shape(self.shape, self.shards)

    @property
    def storage_dtype(self) -> int:
        """Dtype of what a device keeps of it: GPUs have no int32 variables, all of a process would share the host's."""
        widened = self.kind is VariableKind.STATE and self.dtype == types_pb2.DT_INT32
        return types_pb2.DT_INT64 if widened else self.dtype

    @property
    def is_counter(self) -> bool:
        """Whether it is integer state: a random seed or a counter, which every reader may step for itself."""
        return self.kind is VariableKind.STATE and self.dtype not in COUNTABLE_DTYPES


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """A number of the whole global batch that slices read, such as the divisor of a loss term.

    A masked mean divides by the number of valid entries of the whole batch, which no slice knows by itself. In the flat
    graph slices read a placeholder for ``1 / divisor``; ``of_whole_batch`` computes it from whole batches. Losses that
    are written as functions read other statistics of batch inputs in the same way (`scale_losses`).

    Attributes:
        placeholder: of floating-point numbers, mostly a scalar, that slices read.
        of_whole_batch: its value, computed from batch inputs alone.
        loss: name of the loss, for messages.
    """

    placeholder: Ref
    of_whole_batch: Ref
    loss: str


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer while the model was captured: the nodes ``start`` to ``stop`` of the flat graph.

    Attributes:
        path: names of the layers around it and its own: ``encoder/block_1``.
        start: position of the first node that was made inside the call.
        stop: position after the last one.
        number: 0 for the first call of this layer, 1 for the second.
    """

    path: str
    start: int
    stop: int
    number: int = 0


class Slice(NamedTuple):
    """The scalars that tell a stage function which slice of the global batch it works on (placeholders)."""

    weight: Ref  # float64: samples of the slice / samples of the global batch
    number: Ref  # int32: a number unique among the slices of one stage and step; 0 for the first
    samples: Ref  # int32: samples of the slice


@dataclasses.dataclass(frozen=True)
class Peers:
    """The peers with which a stage function adds up: the replicas that have samples of its micro-batch.

    All are int32 placeholders. Keys are those of TensorFlow's collective operations.

    Attributes:
        count: number of these replicas, its own included.
        group: key of their devices.
        instance: the first of the keys that are this task's own: each sum takes one, its gradient the next.
        keys: number of keys that one task takes.
    """

    count: Ref
    group: Ref
    instance: Ref
    keys: int

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The placeholders."""
        return self.count, self.group, self.instance


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the tensors of the flat graph mean.

    Attributes:
        inputs: leaves of x, y and sample_weight, in feed order; their first axis is the batch, unless they are `uncut`.
        variables: all variables of the model, in the model's order.
        slice: see :class:`Slice`.
        normalizers: see :class:`Normalizer`.
        outputs: leaves of the model's output, in order.
        loss: the slice's contribution to the mean loss over the global batch (a scalar); None for prediction.
        calls: layer calls in the order in which they began.
        model_end: position after the last node of the model itself; losses and metrics come behind it.
        example_shapes: shapes of ``inputs`` in a batch at hand, by which lengths are known that the model leaves open,
            None for the number of samples, except where they are `uncut`; empty where no batch is at hand.
        peers: see :class:`Peers`; None where nothing is added up over replicas.
        output_shapes: of ``outputs``, as traced; None for open lengths, and for one of unknown rank.
    """

    inputs: tuple[Ref, ...]
    variables: tuple[Variable, ...]
    slice: Slice
    normalizers: tuple[Normalizer, ...] = ()
    outputs: tuple[Ref, ...] = ()
    loss: Ref | None = None
    calls: tuple[LayerCall, ...] = ()
    model_end: int = 0
    example_shapes: tuple[tuple[int | None, ...], ...] = ()
    peers: Peers | None = None
    output_shapes: tuple[tuple[int | None, ...] | None, ...] = ()

    @property
    def uncut(self) -> bool:
        """Whether the first axes of ``inputs`` are lengths of their own, so that no batch can be cut."""
        return any(shape[0] is not None for shape in self.example_shapes)

    @property
    def scalars(self) -> tuple[Ref, ...]:
        """The scalars about a stage function's slice and its peers."""
        return *self.slice, *(() if self.peers is None else self.peers.refs)


@dataclasses.dataclass(frozen=True)
class Boundary:
    """A tensor that crosses a cut, from the stage that makes it to all stages that read it.

    Attributes:
        ref: the tensor in the flat graph.
        producer: stage that computes it.
        consumers: later stages that read it, ascending; skip connections have several.
        dtype: a ``DT_*`` number.
        batch_axis: the axis along which it is cut into slices; None when it has no batch axis (a scalar loss term,
        say).
        rows_per_sample: length of that axis per sample; None when it is only known at run time.
        outer: number of parts of that axis each of which has rows of all samples, in order (2 where two batches are
            concatenated, 1 where each sample's rows are together); None when it isn't known.
        shape: static shape; None for axes that grow with the batch or are unknown.
        differentiable: whether a gradient flows back through it.
        example_shape: its shape for one sample of the batch at hand (see `Roles`); None for what isn't known then.
        own_lengths: whether samples of a slice decide its lengths together, so that those of several can't be joined.
        whole: whether it can't be split either: it is handed on between equal slices only. It has no known rows for
            each sample, or readers that compute such lengths of their own slice.
    """

    ref: Ref
    producer: int
    consumers: tuple[int, ...]
    dtype: int
    batch_axis: int | None
    rows_per_sample: int | None
    shape: tuple[int | None, ...]
    differentiable: bool
    example_shape: tuple[int | None, ...]
    outer: int | None = 1
    own_lengths: bool = False
    whole: bool = False

    def slice_shape(self, samples: int) -> tuple[int | None, ...]:
        """Returns the shape for a slice of ``samples`` samples, whatever the lengths that the model leaves open."""
        return self._sliced(self.shape, self.rows_per_sample, samples)

    def example_slice_shape(self, samples: int) -> tuple[int | None, ...]:
        """Returns the shape for a slice of ``samples`` samples with the lengths of the batch at hand."""
        rows = None if self.batch_axis is None else self.example_shape[self.batch_axis]
        return self._sliced(self.example_shape, rows, samples)

    def _sliced(self, shape: tuple[int | None, ...], rows: int | None, samples: int) -> tuple[int | None, ...]:
        if self.batch_axis is None:
            return shape
        length = None if rows is None else rows * samples
        return (*shape[: self.batch_axis], length, *shape[self.batch_axis + 1 :])


class ValueKind(enum.Enum):
    """The meaning of a function's argument or result."""

    FORWARD = "forward"  # a tensor of the flat graph
    GRADIENT = "gradient"  # the gradient with respect to a tensor of the flat graph
    SLICE_VALUES = "slice_values"  # a slice's own rows of the gradient of a parameter that is only gathered from
    SLICE_INDICES = "slice_indices"  # the rows of the parameter that they belong to
    SHARED_VALUES = "shared_values"  # rows that all slices have in common, with this one's share of their values
    SHARED_INDICES = "shared_indices"  # the rows of the parameter that they belong to, the same in every slice
    RESIDUAL = "residual"  # a tensor that the stage's forward function keeps for its backward functions
    PARTIAL = "partial"  # a tensor that Bx computes and Bw reads
    INDICES = "indices"  # a tensor of the stage's graph: the rows of a parameter that are looked up before F
    LOOKED_UP = "looked_up"  # these rows: an argument in place of the parameter
    INTEGERS = "integers"  # an int32 tensor that a GPU's host computes before F: an argument in place of its makers


OWN_ROWS = (ValueKind.SLICE_VALUES, ValueKind.SLICE_INDICES)
SHARED_ROWS = (ValueKind.SHARED_VALUES, ValueKind.SHARED_INDICES)
ROWS = frozenset((*OWN_ROWS, *SHARED_ROWS))
"""Kinds of a gradient that isn't a whole tensor."""


class Value(NamedTuple):
    """The meaning of an argument or a result of a stage function."""

    ref: Ref
    kind: ValueKind = ValueKind.FORWARD

    def __str__(self) -> str:
        return str(self.ref) if self.kind is ValueKind.FORWARD else f"{self.kind.value}({self.ref})"


@dataclasses.dataclass(frozen=True)
class StageFunction:
    """A library function and the meaning of its arguments and results.

    Attributes:
        function: the function.
        inputs: meaning of its arguments, in order.
        outputs: meaning of its results, in order.
    """

    function: FunctionDef
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def name(self) -> str:
        """Name in the function library."""
        return str(self.function.signature.name)

    def result_dtype(self, value: Value) -> int:
        """Returns the dtype (a ``DT_*`` number) of a result."""
        return int(self.function.signature.output_arg[self.outputs.index(value)].type)


class Contribution(NamedTuple):
    """A stage's contribution to a variable, summed over slices: a dense gradient, or floating-point state.

    Attributes:
        value: one slice's part, among the stage's results.
        variable: whose it is.
        accumulator: where a replica of the stage adds it up over micro-batches.
    """

    value: Value
    variable: Variable
    accumulator: Variable


class Growth(NamedTuple):
    """Bytes that grow with the samples of a slice."""

    per_sample: int = 0
    fixed: int = 0

    def at(self, samples: int) -> int:
        """Returns the bytes for a number of samples."""
        return self.per_sample * samples + self.fixed


NO_GROWTH = Growth()


class Lookup(NamedTuple):
    """Rows of a parameter that are looked up before a stage's F, by whichever devices keep them.

    Attributes:
        table: name of the parameter.
        indices: what tells the rows, of kind `INDICES`.
        rows: the rows, of kind `LOOKED_UP`: their shape is that of the indices and of a row.
    """

    table: str
    indices: Value
    rows: Value


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: the variables that it reads and, as they come to be, its graph and its functions.

    Attributes:
        index: 0 for the first stage.
        reads: names of the variables that it reads, parameters and state, in the model's order.
        graph: its nodes, with placeholders for what comes from outside; after ``build_backward`` with its gradients.
        arguments: what its placeholders mean.
        results: its results, forward and gradients, as tensors of ``graph``.
        metric_results: its new metric values, likewise.
        state: the floating-point state that it updates (moving averages), in the model's order.
        gradients: the parameters of which it computes a dense gradient, in the model's order.
        forward: F: (variables, batch inputs, boundary inputs) -> (boundary outputs, new state, loss, residuals).
        backward: B: (variables, residuals, gradients of boundary outputs) -> (gradients of boundary inputs and
            parameters). None where it is split.
        input_grad: Bx: (variables, residuals, gradients of boundary outputs) -> (gradients of boundary inputs,
            partial results for Bw). None where B isn't split, or nothing that the stage receives has a gradient.
        weight_grad: Bw: (variables, residuals, partial results of Bx, gradients of boundary outputs) -> (gradients of
            parameters). None where B isn't split, or the stage has no parameters.
        split: whether Bx and Bw take the place of B.
        fused: F and B in one function, which is called in their place: (variables, batch inputs, boundary inputs,
            gradient of the loss) -> (results of F, results of B). None where there is no such function.
        pieces: the function that gives the gradients of parameters, as functions that follow each other; empty where it
            isn't cut, see `CutBackward`.
        metrics: (tensors of F, labels, metric values) -> metric values.
        lookups: what is looked up before F: F and its backward functions get these rows, and not the parameters.
        indices: (batch inputs, boundary inputs) -> the indices of ``lookups``. None where there are none.
        integers: (batch inputs, integer state) -> the integers that a GPU's host computes before F, which F and its
            backward functions get. None where there are none.
        whole_tables: parameter of which rows are looked up, but not before F -> why.
        loops: what its functions run in loops, besides the library of ``graph``.
        residual_bytes: bytes that a slice keeps from F to B, boundary inputs included.
        undecided_rows: parameter -> why it is unknown which rows of its gradient slices have in common.
        delayed_bytes: bytes that a slice keeps from Bx to Bw: residuals, partial results and gradients of boundary
            outputs that Bw reads.
    """

    index: int
    reads: tuple[str, ...]
    graph: GraphDef | None = None
    arguments: Mapping[Value, Ref] = dataclasses.field(default_factory=dict)
    results: Mapping[Value, Ref] = dataclasses.field(default_factory=dict)
    metric_results: Mapping[Value, Ref] = dataclasses.field(default_factory=dict)
    state: tuple[Contribution, ...] = ()
    gradients: tuple[Contribution, ...] = ()
    forward: StageFunction | None = None
    backward: StageFunction | None = None
    input_grad: StageFunction | None = None
    weight_grad: StageFunction | None = None
    split: bool = False
    fused: StageFunction | None = None
    pieces: tuple[StageFunction, ...] = ()
    metrics: StageFunction | None = None
    lookups: tuple[Lookup, ...] = ()
    indices: StageFunction | None = None
    integers: StageFunction | None = None
    whole_tables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    undecided_rows: Mapping[str, str] = dataclasses.field(default_factory=dict)
    loops: tuple[FunctionDef, ...] = ()
    residual_bytes: Growth = NO_GROWTH
    delayed_bytes: Growth = NO_GROWTH

    @property
    def own_graph(self) -> GraphDef:
        """Its graph.

        Raises:
            PassError: it has none yet.
        """
        if self.graph is None:
            raise PassError(f"stage {self.index} has no graph yet; run {Fact.GRAPHS.made_by} before")
        return self.graph

    @property
    def own_forward(self) -> StageFunction:
        """F.

        Raises:
            PassError: it has no functions yet.
        """
        if self.forward is None:
            raise PassError(f"stage {self.index} has no functions yet; run {Fact.FUNCTIONS.made_by} before")
        return self.forward

    @property
    def own_backward(self) -> StageFunction:
        """B.

        Raises:
            PassError: it has none, or one that is split.
        """
        if self.backward is None:
            raise PassError(f"stage {self.index} has no function B: it isn't trained, or has Bx and Bw")
        return self.backward

    @property
    def phases(self) -> tuple[tuple[Phase, StageFunction | None], ...]:
        """The phases that a slice runs, with their functions; None for a phase with nothing to do."""
        forward = (Phase.FORWARD, self.forward if self.fused is None else self.fused)
        if self.split:
            return forward, (Phase.INPUT_GRAD, self.input_grad), (Phase.WEIGHT_GRAD, self.weight_grad)
        backward = (Phase.BACKWARD, self.backward if self.fused is None else None)
        return (forward, backward) if self.backward is not None else (forward,)

    @property
    def functions(self) -> tuple[StageFunction, ...]:
        """All its functions, makers of residuals and partial results before their readers."""
        backward = self.backward, self.input_grad, self.weight_grad, self.fused
        own = self.integers, self.indices, self.forward, *backward, self.metrics
        return tuple(function for function in own if function is not None)

    @property
    def looked_up(self) -> frozenset[str]:
        """The parameters that its functions don't read themselves: their rows are looked up before."""
        return frozenset(lookup.table for lookup in self.lookups)

    @property
    def gives_gradients(self) -> Phase:
        """The phase that takes gradients of sent tensors, and gives gradients of received ones."""
        return Phase.INPUT_GRAD if self.split else Phase.BACKWARD

    @property
    def parameter_gradients(self) -> tuple[Phase, StageFunction | None]:
        """The phase that gives the gradients of the stage's parameters, and its function."""
        return (Phase.WEIGHT_GRAD, self.weight_grad) if self.split else (Phase.BACKWARD, self.backward)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which samples each task works on, and where.

    Attributes:
        devices: names of the devices of each stage's replicas.
        batch: samples in this step's batch.
        global_batch_size: samples in a full batch.
        micro_batches: micro-batches of a full batch.
        shares: for each stage the share of each replica in a micro-batch, in whole numbers; None for equal ones.
    """

    devices: tuple[tuple[str, ...], ...]
    batch: int
    global_batch_size: int
    micro_batches: int
    shares: tuple[tuple[int, ...], ...] | None = None

    def device_of(self, task: Task) -> str:
        """Returns the name of the device that runs a task."""
        return self.devices[task.stage][task.replica]

    @property
    def micro_batch_intervals(self) -> tuple[Interval, ...]:
        """The samples of each micro-batch."""
        return micro_batch_intervals(self.batch, self.global_batch_size, self.micro_batches)

    def slices(self, stage: int, micro_batch: int) -> tuple[Interval, ...]:
        """Returns the samples of each replica of a stage; empty intervals if there are fewer samples than replicas."""
        shares = None if self.shares is None else self.shares[stage]
        return slice_intervals(self.micro_batch_intervals[micro_batch], len(self.devices[stage]), shares)

    def slices_with_samples(self, stage: int) -> dict[tuple[int, int], Interval]:
        """Returns (micro-batch, replica) -> samples, for each slice of a stage that has any."""
        return {
            (micro_batch, replica): interval
            for micro_batch in range(len(self.micro_batch_intervals))
            for replica, interval in enumerate(self.slices(stage, micro_batch))
            if interval.size
        }

    @property
    def sliced(self) -> bool:
        """Whether some stage has several slices of the batch."""
        return any(len(self.slices_with_samples(stage)) > 1 for stage in range(len(self.devices)))

    def samples(self, task: Task) -> Interval:
        """Returns the samples that a task works on."""
        return self.slices(task.stage, task.micro_batch)[task.replica]

    def active(self, stage: int, micro_batch: int, replica: int) -> bool:
        """Returns whether the replica has any sample of this micro-batch."""
        return self.slices(stage, micro_batch)[replica].size > 0


@dataclasses.dataclass(frozen=True)
class TakenBatch:
    """The batch of a step that workers have read themselves.

    Attributes:
        number: the placeholder of the number under which each worker keeps the batch (int64).
        arrays: CPU of a worker -> its tensors of the batch inputs, in the order of `Roles.inputs`: whole batches, or
            its part of them.
        parts: CPU of a worker -> the samples that are its part, in order; empty if each has whole batches.
    """

    number: Ref
    arrays: Mapping[str, tuple[Ref, ...]]
    parts: Mapping[str, tuple[Interval, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Step:
    """The top level of a step graph, as far as it has been built.

    Attributes:
        layout: see :class:`Layout`.
        owners: the stages that keep each variable on their devices.
        host_device: the device on which batches are fed and cut, and the step ends.
        prefix: start of the names of its functions.
        next_key: the first of the collective keys that it doesn't use yet.
        entry: the first node of each task: the one that control edges make wait.
        exit: the last nodes of each task: those that the next task of the device waits for.
        values: (task, value) -> the tensor of a task's result.
        pieces: for a task that was cut into pieces, their calls in order.
        accumulated: whether gradients are in accumulators; if not, each replica has made them in one task, from which
            they are taken.
        empty: (stage, replica) without samples -> the node that sets its accumulators to zeros.
        pending: (task, value) -> the placeholder that stands for an argument until a later pass connects it.
        schedule: the order of tasks on each device, once it is fixed.
        reads: (stage, replica) -> the nodes that read its variables, but for those in shards.
        shard_reads: (stages of a parameter group, device) -> the nodes that read the group's shards on the device.
        ahead: task -> the nodes that begin a task ahead of it: reads of parameters that are gathered for it, indices of
            the rows that it needs.
        feeds: flat batch input -> placeholder of the whole batch; empty if workers read it themselves.
        taken: the batch that workers have read themselves; None if it is fed.
        metric_feeds: metric variable -> placeholders of its value before the step and of its value after a reset.
        metric_results: metric variable -> its value on each replica after the step, the first replica first.
        loss: mean loss over the global batch.
        outputs: for each of the model's outputs, its slices in the order of samples.
        gradients: parameter -> its reduced gradient, on the first replica of its first stage; for checks.
        train: the node that has run when all variables have been updated.
        dissolved: stages without tasks: their operators are ordered one by one, or the step is one function (`Join`).
            ``entry`` and ``exit`` have none of theirs; ``schedule`` still has their order.
        placed_on: devices of operators that were placed one by one.
        hosts: the devices that compute integers for GPUs.
    """

    layout: Layout
    owners: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    host_device: str = ""
    prefix: str = ""
    next_key: int = 1
    entry: Mapping[Task, str] = dataclasses.field(default_factory=dict)
    exit: Mapping[Task, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    values: Mapping[tuple[Task, Value], Ref] = dataclasses.field(default_factory=dict)
    pieces: Mapping[Task, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    accumulated: bool = False
    empty: Mapping[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    pending: Mapping[tuple[Task, Value], str] = dataclasses.field(default_factory=dict)
    schedule: Schedule | None = None
    reads: Mapping[tuple[int, int], Sequence[str]] = dataclasses.field(default_factory=dict)
    shard_reads: Mapping[tuple[tuple[int, ...], str], Sequence[str]] = dataclasses.field(default_factory=dict)
    ahead: Mapping[Task, Sequence[str]] = dataclasses.field(default_factory=dict)
    feeds: Mapping[Ref, Ref] = dataclasses.field(default_factory=dict)
    taken: TakenBatch | None = None
    metric_feeds: Mapping[str, tuple[Ref, Ref]] = dataclasses.field(default_factory=dict)
    metric_results: Mapping[str, tuple[Ref, ...]] = dataclasses.field(default_factory=dict)
    loss: Ref | None = None
    outputs: tuple[tuple[Ref, ...], ...] = ()
    gradients: Mapping[str, Ref] = dataclasses.field(default_factory=dict)
    train: str | None = None
    dissolved: frozenset[int] = frozenset()
    placed_on: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()

    @property
    def results(self) -> list[Ref]:
        """The tensors that every run of it may fetch: but for gradients, which are fetched in place of training."""
        several = [*self.outputs, *self.metric_results.values()]
        return [*(() if self.loss is None else (self.loss,)), *itertools.chain.from_iterable(several)]

    def moved(self, now: Callable[[Ref], Ref]) -> Step:
        """Returns the step with its fetched tensors replaced."""
        return dataclasses.replace(
            self,
            metric_results={name: tuple(map(now, refs)) for name, refs in self.metric_results.items()},
            loss=None if self.loss is None else now(self.loss),
            outputs=tuple(tuple(map(now, refs)) for refs in self.outputs),
            gradients={name: now(ref) for name, ref in self.gradients.items()},
        )

    @property
    def named_nodes(self) -> set[str]:
        """The nodes that the step refers to, except feeds."""
        refs = [*self.results, *self.gradients.values(), *self.values.values()]
        names = {*(ref.node for ref in refs), *self.entry.values(), *(n for names in self.exit.values() for n in names)}
        return names | ({self.train} if self.train is not None else set())


class Fact(enum.Enum):
    """A property of a program that passes require before they run, or ensure afterwards. Its value appears in errors.

    Attributes:
        made_by: the pass that establishes it.
    """

    STAGES = "stages", "assign_stages"
    GRAPHS = "stages with graphs", "build_forward"
    FUNCTIONS = "stages with functions", "partition"
    STEP = "a step", "replicate"
    CONNECTED = "a step whose tasks are connected over stages", "split_concat"
    ORDERED = "a step whose tasks are ordered", "schedule"
    COMPLETE = "a complete training step", "update"

    def __new__(cls, text: str, made_by: str) -> Fact:
        """The text alone is a fact's value."""
        member = object.__new__(cls)
        member._value_ = text
        return member

    def __init__(self, text: str, made_by: str) -> None:
        self.made_by = made_by


@dataclasses.dataclass(frozen=True)
class Program:
    """A GraphDef and the meaning of its tensors.

    Attributes:
        graph: the flat graph until ``replicate``; then the step's top level. Its library holds all functions so far.
        roles: what the tensors of the flat graph mean.
        flat: the flat graph that the roles speak of, kept once ``graph`` is something else.
        node_stage: stage of each node of the flat graph; nodes that belong to no single stage are missing.
        boundaries: tensors that cross cuts, in the order of the graph.
        stages: see :class:`Stage`.
        step: see :class:`Step`.
        couplings: nodes of the flat graph that make a slice's results differ from the whole batch's, and how.
    """

    graph: GraphDef
    roles: Roles
    flat: GraphDef | None = None
    node_stage: Mapping[str, int] = dataclasses.field(default_factory=dict)
    boundaries: tuple[Boundary, ...] = ()
    stages: tuple[Stage, ...] = ()
    step: Step | None = None
    couplings: tuple[tuple[str, Coupling], ...] = ()

    def replace(self, **changes: object) -> Program:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def flat_graph(self) -> GraphDef:
        """The flat graph, even after ``graph`` has become something else."""
        return self.graph if self.flat is None else self.flat

    @property
    def own_step(self) -> Step:
        """The step.

        Raises:
            PassError: it hasn't been begun.
        """
        if self.step is None:
            raise PassError(f"the program has no step yet; run {Fact.STEP.made_by} before")
        return self.step

    def calls_of(self, task: Task) -> tuple[tuple[str, StageFunction], ...]:
        """Returns the nodes of the step that run a task, with their functions: several if it is cut into pieces.

        There is none for a task with nothing to do.
        """
        step, stage = self.own_step, self.stages[task.stage]
        if task in step.pieces:
            return tuple(zip(step.pieces[task], stage.pieces, strict=True))
        function = dict(stage.phases)[task.phase]
        return () if function is None else ((step.entry[task], function),)

    @property
    def facts(self) -> frozenset[Fact]:
        """Its facts; see :class:`Fact`."""
        step, stages = self.step, self.stages
        loss = None if self.roles.loss is None else Value(self.roles.loss, ValueKind.GRADIENT)
        has = {
            Fact.STAGES: bool(stages),
            Fact.GRAPHS: bool(stages) and all(stage.graph is not None for stage in stages),
            Fact.FUNCTIONS: bool(stages) and all(stage.forward is not None for stage in stages),
            Fact.STEP: step is not None,
            Fact.CONNECTED: step is not None and all(value == loss for _, value in step.pending),
            Fact.ORDERED: step is not None and step.schedule is not None,
            Fact.COMPLETE: step is not None and step.train is not None and not step.pending,
        }
        return frozenset(fact for fact, there in has.items() if there)

    @property
    def variables(self) -> dict[str, Variable]:
        """Variables by name."""
        return {variable.name: variable for variable in self.roles.variables}
