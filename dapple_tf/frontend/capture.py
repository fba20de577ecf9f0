"""Capturing an unmodified Keras model as a flat Program for one slice of a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import (
    adds_loss,
    build_for,
    compute_loss,
    functional_graph,
    hardware_questions,
    layers_of,
    output_structure,
    recompiled,
    seeds_of,
    takes_training,
    tensorflow_variable,
)
from dapple_tf.errors import CaptureError, reason
from dapple_tf.frontend.batch import BatchSpec, Leaf, Shape, spec_of
from dapple_tf.frontend.custom_gradients import (
    custom_gradients,
    gradients_of_variables,
    own_gradients,
    write_gradients,
)
from dapple_tf.frontend.host_part import CapturedProgram, split_host_part, tables_of
from dapple_tf.frontend.layer_calls import LayerCalls
from dapple_tf.frontend.losses import GlobalNormalizers
from dapple_tf.frontend.metrics import is_sum, metric_names, weighted_means
from dapple_tf.frontend.model_front import ModelFront
from dapple_tf.frontend.own_steps import own_losses, own_steps, predicted, run_own_step
from dapple_tf.frontend.patching import replaced
from dapple_tf.frontend.replica_sums import ReplicaSums
from dapple_tf.frontend.step_logs import OptimizerReads, StepLogs, TracedLogs
from dapple_tf.frontend.trace_scope import TraceScope, functions_traced
from dapple_tf.frontend.variables import VariableTable, placeholders_of
from graph_passes.ir.graph import FLOAT_DTYPES, LAYER_ATTR, POSITION_ATTR, Graph, GraphDef, Ref
from graph_passes.ir.program import LayerCall, Program, Roles, Slice, Variable, VariableKind
from graph_passes.ir.tensorflow_bridge import make_constant
from graph_passes.ir.tensorflow_private import number_of_nodes
from graph_passes.passes.scale_losses import scale_losses

# 2^32 / golden ratio: consecutive slice numbers give seeds far apart.
_SEED_STRIDE = 2654435769
_SOME_SAMPLES = 12  # which many numbers divide
_REFUSED = (AttributeError, KeyError, RuntimeError, TypeError, ValueError, tf.errors.OperatorNotAllowedInGraphError)
"""What TensorFlow and Keras raise for models that can't be traced."""


class Mode(enum.Enum):
    """The purpose of a program."""

    TRAIN = "train"
    TEST = "test"
    PREDICT = "predict"


def check_model(model: keras.Model, *, training: bool) -> None:
    """Refuses models that can't be captured, before anything is traced.

    Raises:
        CaptureError: the model isn't built or compiled, or has a setting that slices don't allow.
    """
    if not isinstance(model, keras.Model):
        way = "; give the Keras model that its sync() returns" if isinstance(model, ModelFront) else ""
        raise CaptureError(f"expected a keras.Model, got {type(model).__name__}{way}")
    if not _is_built(model):
        raise CaptureError(
            f"model {model.name!r} isn't built: it has no variables yet. Call it on a batch before the transform, or "
            f"give example inputs to transform(..., x=...)"
        )
    if not training:
        return
    if not model.compiled or model.optimizer is None:
        raise CaptureError(f"model {model.name!r} isn't compiled: call compile(optimizer=..., loss=...) first")
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is not None:
        raise CaptureError(
            f"model {model.name!r} was made under the scope of a {type(strategy).__name__}; make it outside: the plan "
            f"says which devices it runs on"
        )
    for layer in layers_of(model):
        if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
            raise CaptureError(
                f"layer {layer.name!r} is a stateful RNN, whose state belongs to one fixed batch; use stateful=False"
            )
    for tensor in getattr(model, "inputs", None) or ():
        if tensor.shape and tensor.shape[0] is not None:
            raise CaptureError(
                f"input {tensor.name!r} has the fixed batch size {tensor.shape[0]}, but slices have other sizes; leave "
                f"batch_size out of keras.Input"
            )


def _is_built(model: keras.Model) -> bool:
    # A model with its own step needn't be called as a whole.
    return (model.built or own_losses(model)) and bool(getattr(model, "inputs", None) or model.variables)


def build_from(model: keras.Model, x: Any) -> None:
    """Makes the variables of a model that isn't built, from example inputs.

    Raises:
        CaptureError: the model can't be called on such inputs.
    """
    if x is None or not isinstance(model, keras.Model) or own_losses(model) or _is_built(model):
        return
    tensors = keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype), spec_of(model, x).x)
    try:
        with tf.device("CPU:0"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*unbuilt state")  # The error says so.
            model(tensors)
    except _REFUSED as error:
        raise CaptureError(f"model {model.name!r} can't be built from x: {reason(error)}") from error


def build(model: keras.Model, table: VariableTable, spec: BatchSpec) -> None:
    """Creates what Keras creates on its first batch: the variables of compiled losses, metrics and the optimizer.

    A model with its own steps gets those of losses and metrics in the trace, as its steps may call it on other data.

    Raises:
        CaptureError: the model, its loss or a metric can't be called on such a batch.
    """
    if own_losses(model):
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return

    def symbolic(*, sized: bool = False) -> Any:
        return spec.filled(keras.KerasTensor(_shape(leaf, sized=sized), leaf.dtype) for leaf in spec.leaves)

    try:
        with _outputs_as_declared(model):
            build_for(model, symbolic())
    except _REFUSED as error:
        capture(model, table, Mode.PREDICT, spec)  # Names the layer, if it is one.
        where = f"the loss or a metric of model {model.name!r}"
        with recompiled(model):  # The failed one may count as built.
            static = _works(lambda: build_for(model, symbolic(sized=True)))
        if static:
            raise _takes_static_size(where, error) from error
        raise CaptureError(f"{where} can't be computed for batches of {spec}: {reason(error)}") from error


@contextlib.contextmanager
def _outputs_as_declared(model: keras.Model) -> Iterator[None]:
    """Makes a functional model's call return placeholders of its declared shapes and dtypes, inside the context.

    Building losses and metrics needs only these, and otherwise traces the whole model.
    """
    graph = functional_graph(model)
    if graph is None or "call" in vars(model):
        yield
        return

    def call(*_: Any, **__: Any) -> Any:
        return keras.tree.map_structure(
            lambda tensor: tf.compat.v1.placeholder(tensor.dtype, tensor.shape), output_structure(graph)
        )

    vars(model)["call"] = call  # An assignment would be tracked by Keras.
    try:
        yield
    finally:
        del vars(model)["call"]


def capture(
    model: keras.Model,
    table: VariableTable,
    mode: Mode,
    spec: BatchSpec,
    *,
    training: bool | None = None,
    predict_step: bool = False,
    gpus: bool = False,
) -> Program:
    """Traces a model for one slice of a batch of any size.

    Args:
        model: a built Keras model, compiled unless ``mode`` is PREDICT.
        table: names of its variables.
        mode: TRAIN and TEST give the loss and metrics, PREDICT the outputs.
        spec: structure, dtypes and shapes of batches.
        training: the ``training`` argument of the model's call; by default as Keras does in this mode.
        predict_step: whether PREDICT runs the model's own ``predict_step``, if it has one, instead of its call, and
            notes the structure of outputs in the table.
        gpus: whether it will run on GPUs, where Keras takes cuDNN for recurrent layers. The client's own don't count.

    Returns:
        A flat program. Its loss is the slice's contribution to the mean over the global batch; its random draws derive
        from the model's seeds and the slice's number.

    Raises:
        CaptureError: the model can't be traced for a slice; the text names the layer.
    """
    own = f"{mode.value}_step" in own_steps(model) and (mode is not Mode.PREDICT or predict_step)
    tracing = _Tracing(model, table, mode, spec, mode is Mode.TRAIN if training is None else training, own, gpus)
    program = tracing.run()
    if predict_step:
        table.outputs[spec.key] = tracing.structure
    return program


@dataclasses.dataclass(eq=False)
class _Tracing:
    """One trace.

    Attributes:
        model, table, mode, spec, training, gpus: see `capture`.
        own: whether it is the model's own step.
        share: whether equal calls of layers may be traced once.
        sized: whether for one size of batches instead of any: that at hand if there is one.
    """

    model: keras.Model
    table: VariableTable
    mode: Mode
    spec: BatchSpec
    training: bool
    own: bool
    gpus: bool
    share: bool = True
    sized: bool = False

    def __post_init__(self) -> None:
        # What its own step does with tensors, such as differentiating, isn't known, nor what strings are used for.
        self.share = self.share and not self.own and all(leaf.dtype != "string" for leaf in self.spec.leaves)
        self.calls = LayerCalls(self.model, share=self.share)
        self.logs: TracedLogs | None = None
        self.structure: Any = None

    def run(self) -> Program:
        try:
            graph = self.graph_of_trace()
        except Exception as error:
            if self.calls.repeats:  # Perhaps somebody looked at more of them than their tensors.
                return self._again(share=False)
            if isinstance(error, _REFUSED):
                raise self._explained(error) from error
            raise
        if self._has_new_metrics:
            return self._again(share=self.share)
        if self.logs is not None and self.logs.missing:
            for place, (name, dtype) in self.logs.missing.items():
                name = name.replace("/", "_")
                self.table.batch_logs[place] = keras.Variable(0, trainable=False, dtype=dtype.name, name=name)
            return self._again(share=self.share)
        return self._program(graph)

    def graph_of_trace(self) -> tf.Graph:
        """Returns the graph into which the model is traced."""
        return tf.function(self._trace, autograph=False).get_concrete_function().graph

    def _again(self, *, share: bool) -> Program:
        """Traces the model once more."""
        tracing = dataclasses.replace(self, share=share)
        program = tracing.run()
        self.structure = tracing.structure
        return program

    @property
    def _has_new_metrics(self) -> bool:
        """Whether the trace has made variables of metrics, as a model's first step does; the next trace knows them."""
        return self.mode is not Mode.PREDICT and not all(map(self.table.knows, self.model.metrics_variables))

    def _explained(self, error: Exception) -> CaptureError:
        where = f"layer {self.calls.failed_in!r}" if self.calls.failed_in else f"model {self.model.name!r}"
        if isinstance(error, tf.errors.OperatorNotAllowedInGraphError) or "SymbolicTensor" in str(error):
            return CaptureError(
                f"{where} uses the value of a tensor in Python (if, while, for, int(), numpy()), which a graph "
                f"can't record: use keras.ops.where, keras.ops.cond or keras.ops.while_loop. TensorFlow says: "
                + reason(error).partition(". ")[0]
            )
        if _works(dataclasses.replace(self, share=False, sized=True).graph_of_trace):
            return _takes_static_size(where, error)
        return CaptureError(f"{where} can't be traced: {reason(error)}")

    def _trace(self) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        placeholder = tf.compat.v1.placeholder
        self.inputs = [
            placeholder(
                leaf.dtype, _shape(leaf, sized=self.sized), name="batch_" + re.sub(r"\W+", "_", leaf.name).strip("_")
            )
            for leaf in self.spec.leaves
        ]
        x, y, sample_weight = self.spec.filled(self.inputs)
        self.weight = placeholder("float64", [], name="slice_weight")
        self.number = placeholder("int32", [], name="slice_number")
        self.samples = placeholder("int32", [], name="slice_samples")
        self.values: dict[str, tf.Tensor] = {}
        normalizers, sums = GlobalNormalizers(self.weight), ReplicaSums(self.graph, self.samples)
        scope = TraceScope(self._mapping(), self._of_kind(VariableKind.STATE), self._of_kind(VariableKind.PARAMETER))
        self.unknown = scope.unknown
        with self._standing_in(scope), sums.recording():
            self.loss = None
            self.more_updates: dict[str, tf.Tensor] = {}
            outputs = None
            reads = OptimizerReads(self.model, self.table, updated=self.mode is not Mode.TRAIN)
            scope.provide = reads if self.mode is not Mode.PREDICT else scope.provide
            data = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
            if not self.own:
                outputs = self._trace_model(x, y, sample_weight, normalizers)
            elif self.mode is Mode.PREDICT:
                outputs = predicted(self.model, data)
                self.model_end = number_of_nodes(self.graph)
            else:
                with normalizers.recording():
                    self._trace_own_step(scope, reads, data)
            self.updates = self._updates(scope) | self.more_updates
            results = [*self.updates.values(), *([] if self.loss is None else [self.loss])]
            step = f"{self.mode.value}_step() of " if self.own else ""
            reads.check(step, "its loss, a metric or state", results, also_updated=True)
        self.normalizers, self.peers = tuple(normalizers.found), sums.peers
        tensors = [] if outputs is None else keras.tree.flatten(outputs)
        self.outputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        self.structure = keras.tree.map_structure(lambda _: 0, outputs)

    def _trace_model(self, x: Any, y: Any, sample_weight: Any, normalizers: GlobalNormalizers) -> Any:
        """Traces what Keras' own steps do, and returns the outputs."""
        outputs = self.model(x, training=self.training) if takes_training(self.model) else self.model(x)
        self.model_end = number_of_nodes(self.graph)
        self._check_losses()
        if self.mode is not Mode.PREDICT:
            with normalizers.recording():
                loss = compute_loss(
                    self.model, x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=self.training
                )
            self.loss = self._contribution(loss)
            results = self.model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
            self._warn_of_lost(results)
        return outputs

    def _trace_own_step(self, scope: TraceScope, reads: OptimizerReads, data: Any) -> None:
        """Traces the model's own ``train_step`` or ``test_step``."""
        logs, terms = run_own_step(f"{self.mode.value}_step", scope, reads, data)
        self.model_end = self.calls.end or number_of_nodes(self.graph)
        if self.mode is Mode.TRAIN:
            # A tape differentiates the sum of one number per sample; the slices' sums add up to it.
            parts = [
                tf.reduce_sum(term)
                if term.shape.rank and term.shape[0] is None
                else self._contribution(tf.reduce_sum(term))
                for term in terms
            ]
            self.loss = parts[0] if len(parts) == 1 else tf.add_n(parts)
        if self._has_new_metrics:
            return
        self.logs = TracedLogs(self.mode.value, self.weight, scope, reads, logs)
        self.values |= self.logs.values
        self.initial |= self.logs.values
        self.more_updates = self.logs.updates

    def _warn_of_lost(self, results: dict[str, Any]) -> None:
        """Warns of logs that an overridden ``compute_metrics`` adds: logs come from metrics only."""
        lost = sorted(results.keys() - self.model.get_metrics_result().keys())
        if lost:
            warnings.warn(
                f"compute_metrics() of model {self.model.name!r} returns {', '.join(lost)} beside its metrics; logs "
                f"will lack it: make it a keras.metrics.Metric of the model",
                stacklevel=2,
            )

    def _mapping(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Makes a placeholder for each variable; random seeds are shifted by the number of the slice."""
        seeds = seeds_of(self.model)
        if self.mode is not Mode.PREDICT:
            for metric in self.model.metrics_variables:
                self.table.add(metric, VariableKind.METRIC, "metric/")
        shifted = {id(seed) for seed in seeds}
        metrics = {id(variable) for variable in self.model.metrics_variables}
        own = [*self.model.variables, *self.model.metrics_variables, *seeds]
        variables: dict[str, keras.Variable] = {}
        mapping = []
        for variable in {id(variable): variable for variable in own}.values():
            if id(variable) in metrics and self.mode is Mode.PREDICT:
                # A layer may update its own metric, which isn't kept.
                mapping.append((variable, tf.compat.v1.placeholder(variable.dtype, variable.shape, name="metric")))
            elif self.table.knows(variable):
                variables.setdefault(self.table.name_of(variable), variable)
        self.values |= dict(zip(variables, placeholders_of(variables), strict=True))
        self.initial = {
            name: self._shifted_seed(self.values[name]) if id(variable) in shifted else self.values[name]
            for name, variable in variables.items()
        }
        return mapping + [(variable, self.initial[name]) for name, variable in variables.items()]

    def _of_kind(self, kind: VariableKind) -> set[int]:
        """Returns the ids of the floating-point variables of a kind; layers assign STATE."""
        described = {name: self.table.describe(name) for name in self.values}
        names = [name for name, v in described.items() if v.kind is kind and v.dtype in FLOAT_DTYPES]
        return {id(self.table.keras_variables[name]) for name in names}

    @contextlib.contextmanager
    def _standing_in(self, scope: TraceScope) -> Iterator[None]:
        """Gives variables the values of a scope inside the context, and records and traces calls of layers."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope)
            stack.enter_context(self.calls.recording(self.graph, scope))
            stack.enter_context(functions_traced(scope))
            stack.enter_context(gradients_of_variables(scope))
            stack.enter_context(weighted_means(self.weight))
            for module, name, answer in hardware_questions(gpus=self.gpus):
                stack.enter_context(replaced(module, name, functools.partial(_answered, answer)))
            yield

    def _shifted_seed(self, seed: tf.Tensor) -> tf.Tensor:
        """Returns each slice's own seed; that of the first is the model's, as in training on one device."""
        words = tf.cast(seed, tf.int64)
        shift = tf.stack([tf.cast(self.number, tf.int64) * _SEED_STRIDE, 0])
        limit = tf.constant(2**32 if seed.dtype == tf.uint32 else 2**31, tf.int64)
        shifted = tf.cast((words + shift) % limit, seed.dtype)
        return tf.where(tf.equal(self.number, 0), seed, shifted)

    def _check_losses(self) -> None:
        for loss in self.model.losses:
            shape = tf.convert_to_tensor(loss).shape
            if shape.rank != 0:
                layers = layers_of(self.model)
                name = next((layer.name for layer in layers if adds_loss(layer, loss)), self.model.name)
                raise CaptureError(
                    f"layer {name!r} adds a loss of shape {shape}, which Keras would sum over the batch: give "
                    f"add_loss() one number, the mean over the samples"
                )

    def _contribution(self, loss: tf.Tensor) -> tf.Tensor:
        if loss.shape.rank != 0:
            raise CaptureError(
                f"the loss has shape {loss.shape}, not a scalar: each loss and add_loss() term must be reduced to one "
                f"number"
            )
        return loss * tf.cast(self.weight, loss.dtype)

    def _updates(self, scope: TraceScope) -> dict[str, tf.Tensor]:
        updates = {}
        for name, value in self.values.items():
            variable = self.table.keras_variables[name]
            new = scope.assigned.get(id(variable))
            kind = self.table.describe(name).kind
            if new is None or new is self.initial[name]:
                continue
            new = tf.convert_to_tensor(new, dtype=value.dtype)
            if kind is VariableKind.PARAMETER:
                raise CaptureError(
                    f"trainable variable {variable.path!r} is assigned in the forward pass; make it non-trainable state"
                )
            if kind is VariableKind.STATE and value.dtype.is_floating:
                new = new * tf.cast(self.weight, new.dtype)
            updates[name] = tf.identity(new)
        return updates

    def _program(self, graph: tf.Graph) -> Program:
        gradients = custom_gradients(graph) if self.mode is Mode.TRAIN else []
        tables = tables_of(graph)
        graph_def = _without_captures(graph, tables, self.unknown)
        write_gradients(graph_def, gradients)
        own_gradients(graph_def)
        expanded = self.calls.expanded(graph_def)
        if expanded is None or (tables and self.calls.repeats):  # The host's part is found in the traced graph.
            return self._again(share=False)
        graph_def = expanded.graph
        loss = None if self.loss is None else _ref(self.loss)
        outputs = [expanded.tensors.get(_ref(tensor), _ref(tensor)) for tensor in self.outputs]
        if self.logs is not None:
            self.table.logs[self.mode.value] = StepLogs(graph_def, self.logs.logs, self.logs.sources)
        metrics = metric_names(self.model) | {id(log): log.name for log in self.table.batch_logs.values()}
        variables = [self._variable(name, metrics) for name in self.table.keras_variables]
        present = [variable for variable in variables if variable is not None]
        inputs, example_shapes, host = [_ref(tensor) for tensor in self.inputs], self.spec.sizes, None
        calls = self.calls.calls(expanded.starts)
        paths = _paths_of_nodes(calls)
        if tables or any(leaf.dtype == "string" for leaf in self.spec.leaves):
            wanted = [*map(_ref, self.updates.values()), *outputs, *([] if loss is None else [loss])]
            wanted += [normalizer.of_whole_batch for normalizer in self.normalizers]
            graph_def, inputs, host = split_host_part(
                graph_def, graph, inputs, tables, wanted, lambda position: paths.get(position, self.model.name)
            )
        roles = Roles(
            inputs=tuple(inputs),
            variables=tuple(_with_additivity(Graph(graph_def), present)),
            slice=Slice(_ref(self.weight), _ref(self.number), _ref(self.samples)),
            normalizers=self.normalizers,
            peers=self.peers,
            outputs=tuple(outputs) if self.mode is Mode.PREDICT else (),
            output_shapes=tuple(_static_shape(tensor) for tensor in self.outputs) if self.mode is Mode.PREDICT else (),
            loss=loss,
            calls=calls,
            model_end=expanded.starts[self.model_end],
            example_shapes=example_shapes if host is None else host.device_shapes(example_shapes),
        )
        program = _pruned(graph_def, roles, paths)
        program = program if host is None else CapturedProgram(program.graph, program.roles, host=host)
        vague = any(shape is None or None in shape[1:] for shape in map(_static_shape, self.outputs))
        if self.mode is Mode.PREDICT and not self.training and not self.updates and not vague:
            return program
        return scale_losses(program, outputs)

    def _variable(self, name: str, metrics: Mapping[int, str]) -> Variable | None:
        value, update = self.values.get(name), self.updates.get(name)
        if value is None:
            return None
        described = self.table.describe(name, _ref(value), None if update is None else _ref(update))
        return dataclasses.replace(described, metric=metrics.get(id(self.table.keras_variables[name])))


def _answered(answer: bool, _: Callable[..., Any]) -> Callable[[], bool]:
    """Returns a replacement of a function that takes nothing."""
    return lambda: answer


def _static_shape(tensor: tf.Tensor) -> tuple[int | None, ...] | None:
    return None if tensor.shape.rank is None else tuple(tensor.shape)


def _shape(leaf: Leaf, *, sized: bool) -> Shape:
    """Returns the shape of an array in batches of any size, or of one size."""
    rows = leaf.sizes[0] if leaf.sizes else None
    return (rows or _SOME_SAMPLES, *leaf.shape[1:]) if sized else leaf.shape


def _works(trial: Callable[[], Any]) -> bool:
    try:
        trial()
    except Exception:
        return False
    return True


def _takes_static_size(where: str, error: Exception) -> CaptureError:
    return CaptureError(
        f"{where} takes the number of samples from a static shape (x.shape[0]), where it isn't known, since slices of "
        f"any size run the same graph: take it from keras.ops.shape(x)[0], or let reshape infer it (-1). Keras says: "
        f"{reason(error)}"
    )


def _with_additivity(graph: Graph, variables: list[Variable]) -> Iterator[Variable]:
    metrics = [variable for variable in variables if variable.kind is VariableKind.METRIC]
    running = {variable.value.node for variable in metrics if variable.value is not None}
    for variable in variables:
        if variable.kind is VariableKind.METRIC and variable.update is not None and variable.value is not None:
            additive = is_sum(graph, variable.update, variable.value, running)
            yield dataclasses.replace(variable, additive=additive)
        else:
            yield variable


def _ref(tensor: tf.Tensor) -> Ref:
    return Ref.parse(tensor.name)


# ---- from the traced graph to a self-contained one


def _without_captures(graph: tf.Graph, tables: Container[str], unknown: Sequence[keras.Variable]) -> GraphDef:
    """Returns the traced graph with constants for the tensors that the model holds as Python attributes.

    Args:
        graph: the traced graph.
        tables: placeholders of lookup tables, which stay.
        unknown: variables that the trace has read without knowing them.

    Raises:
        CaptureError: the model reads a variable that it doesn't track.
    """
    graph_def: GraphDef = graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    for external, internal in graph.captures:
        if internal.op.name in tables:
            continue
        if external.dtype in (tf.resource, tf.variant):
            readers = [operation.name for operation in internal.consumers()]
            paths = [own.path for own in unknown if getattr(tensorflow_variable(own), "handle", None) is external]
            raise CaptureError(
                f"the model, its loss or a metric reads the variable {(paths or [internal.op.name])[0]!r} that the "
                f"model doesn't track, in {', '.join(readers[:3])}: make it a keras.Variable that a layer or a "
                f"metric has as an attribute (for random draws, a keras.random.SeedGenerator of one or of a loss)"
            )
        make_constant(nodes[internal.op.name], external.numpy())
    return graph_def


def _paths_of_nodes(calls: Iterable[LayerCall]) -> dict[int, str]:
    """Returns position of a node -> path of the innermost layer call that made it."""
    paths: dict[int, str] = {}
    for call in sorted(calls, key=lambda call: call.start - call.stop):
        paths |= dict.fromkeys(range(call.start, call.stop), call.path)
    return paths


def _pruned(graph_def: GraphDef, roles: Roles, paths: dict[int, str]) -> Program:
    """Returns a program without unused nodes; each node has its position in the order of creation and its layer."""
    graph = Graph(graph_def)
    wanted = [*roles.outputs, *(normalizer.of_whole_batch for normalizer in roles.normalizers)]
    wanted += [variable.update for variable in roles.variables if variable.update is not None]
    wanted += [roles.loss] if roles.loss is not None else []
    kept = graph.ancestors(wanted, control=False) | {ref.node for ref in (*roles.inputs, *roles.scalars)}
    needed = GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in graph_def.node:
        if node.name not in kept:
            continue
        copy = needed.node.add()
        copy.CopyFrom(node)
        copy.device = ""
        inputs = [text for text in node.input if not text.startswith("^") or text[1:] in kept]
        del copy.input[:]
        copy.input.extend(inputs)
        position = graph.position[node.name]
        copy.attr[POSITION_ATTR].i = position
        if position in paths:
            copy.attr[LAYER_ATTR].s = paths[position].encode()
    variables = [
        dataclasses.replace(variable, value=variable.value if variable.value and variable.value.node in kept else None)
        for variable in roles.variables
    ]
    used = [variable for variable in variables if variable.value is not None or variable.update is not None]
    return Program(needed, dataclasses.replace(roles, variables=tuple(used)))
