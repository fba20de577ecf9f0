"""All private parts of Keras that are used here, as they are in Keras 3.8 to 3.15."""

from __future__ import annotations

import collections
import contextlib
import importlib
import itertools
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
from keras.src.applications import mobilenet_v3, nasnet, resnet
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.variables import get_autocast_scope
from keras.src.backend.tensorflow import nn as tensorflow_nn
from keras.src.models.functional import Functional
from keras.src.trainers.compile_utils import CompileMetrics
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable, train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.trainer import Trainer, model_supports_jit
from keras.src.utils.python_utils import pythonify_logs as python_logs

__all__ = [
    "ArrayDataAdapter",
    "CompileMetrics",
    "DataAdapter",
    "Makeup",
    "PyDatasetAdapter",
    "adds_loss",
    "attributes_of_calls",
    "autocast_dtype",
    "build_for",
    "can_convert_arrays",
    "check_compiled",
    "checks_by_keras",
    "compile_arguments",
    "compiled_loss",
    "compiled_metrics",
    "compute_loss",
    "dataset_of",
    "decays",
    "functional_graph",
    "get_data_adapter",
    "hardware_questions",
    "inherit_arguments",
    "inherited_arguments",
    "initialize",
    "inner_optimizer",
    "input_structure",
    "inverted_residual_block",
    "is_cast",
    "is_current",
    "items_of",
    "layers_of",
    "learning_rate_of",
    "loss_tracker",
    "mobilenet_v3",
    "model_supports_jit",
    "name_of_call",
    "names_from_start",
    "names_in_logs",
    "nasnet_cell",
    "nodes_in_order",
    "output_structure",
    "parameters_of",
    "plain_on_batch",
    "python_logs",
    "recompiled",
    "resnet",
    "restricted",
    "seeds_of",
    "sliceable_arrays",
    "slots_by_parameter",
    "standardized",
    "takes_training",
    "tensorflow_variable",
    "told_whether_finite",
    "train_validation_split",
]

_COUNTERS = "object_name_uids"
"""The attribute in which Keras counts the names that it has given."""


def layers_of(model: keras.Model, **options: bool) -> list[Any]:
    """Returns a model and all layers in it, however deep.

    Args:
        model: the model, or a layer.
        options: ``include_self`` and ``recursive``, both True by default.
    """
    return list(model._flatten_layers(**options))


def items_of(model: keras.Model) -> list[Any]:
    """Returns `layers_of` a model, and the operations of functional models among them."""
    return [item for layer in layers_of(model) for item in (layer, *getattr(layer, "operations", ()))]


def seeds_of(model: keras.Model) -> list[Any]:
    """Returns the states of all seed generators that layers, metrics and losses hold, each once."""
    generators = [own for layer in layers_of(model) for own in getattr(layer, "_seed_generators", ())]
    pending = [own for own in (model, *model.metrics, *compile_arguments(model)) if hasattr(own, "__dict__")]
    seen = set[int]()
    while pending:  # Keras doesn't track what metrics and losses hold.
        holder = pending.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for own in vars(holder).values():
            generators += [own] if isinstance(own, keras.random.SeedGenerator) else []
            pending += [own] if isinstance(own, (keras.losses.Loss, keras.metrics.Metric)) else []
    return list({id(own.state): own.state for own in generators}.values())


def name_of_call(item: Any) -> str:
    """Returns the name of the method that computes a layer or an operation."""
    return "call" if getattr(item, "quantization_mode", None) is None else "quantized_call"


_NOT_READ = """
    _auto_config _build_shapes_dict _call_context_args _call_has_context_arg _call_signature _called _inbound_nodes
    _input_spec _layers _lock _loss_ids _losses _losses_override _metrics _non_trainable_variables _outbound_nodes
    _parent_path _path _saved_model_arg_spec _saved_model_inputs_spec _seed_generators _tracked _tracker
    _trainable_variables activity_regularizer build built call call_signature_parameters name quantize seed
"""
_BOOKKEEPING = frozenset(_NOT_READ.split())
"""Attributes of layers that ``call`` of Keras' own layers doesn't read, or that have what others have, too.

Activity regularizers are for what calls ``call``; seeds are in generators.
"""


def attributes_of_calls(layer: Any) -> list[tuple[str, Any]]:
    """Returns names and values of the attributes on which a call of one of Keras' own layers may depend."""
    own = vars(layer).items()
    return [(name, value) for name, value in own if name not in _BOOKKEEPING and not name.startswith("_self_")]


def autocast_dtype() -> str | None:
    """Returns the dtype in which layers read variables now; None for each variable's own."""
    scope = get_autocast_scope()
    return None if scope is None else scope.dtype


def is_cast(variable: keras.Variable) -> bool:
    """Returns whether layers read a variable in `autocast_dtype`."""
    return bool(variable._autocast)


def is_current(scope: keras.StatelessScope) -> bool:
    """Returns whether layers read and assign the values of this scope now, not of an inner one."""
    return get_stateless_scope() is scope


def inherited_arguments() -> dict[str, Any]:
    """Returns what layers get that are called without an argument such as ``training``, inside the layer at hand."""
    context = global_state.get_global_attribute("current_call_ctx")
    return {} if context is None else {name: value for name, value in vars(context).items() if name != "entry_layer"}


def inherit_arguments(values: Mapping[str, Any]) -> None:
    """Sets what layers inherit from now on, as calls of layers do."""
    vars(global_state.get_global_attribute("current_call_ctx")).update(values)


_LISTS = ("_trainable_variables", "_non_trainable_variables", "_seed_generators", "_layers", "_metrics")
"""What a layer consists of."""
_OWN_LISTS = operator.itemgetter(*_LISTS)
_TRAINS, _TRAINABLE = operator.itemgetter("_trainable"), operator.attrgetter("trainable")
_COMPILED = ("_loss_tracker", "_compile_metrics", "_compile_loss")


class Makeup:
    """What a model consists of: shows at low cost whether its variables, trainable variables and metrics are the same.

    For each of these lists Keras goes through all layers, and through each as often as it is deep.

    Attributes:
        metrics: the model's metrics.
    """

    def __init__(self, model: keras.Model) -> None:
        """Remembers what the model consists of now."""
        self._model = model
        layers = layers_of(model)
        parts = [vars(layer) for layer in layers]
        # Only Keras' own lists follow from these parts.
        self._plain = all(_has_plain_lists(type(layer)) for layer in layers) and all(
            name in own for own in parts for name in (*_LISTS, "_trainable")
        )
        self._parts = parts
        self._compiled = [own for own in parts if _COMPILED[0] in own]
        self.metrics: list[Any] = list(model.metrics)
        self._before = self._identities()

    @property
    def changed(self) -> bool:
        """Whether some of these lists may have changed since."""
        return bool(self._identities()[0] != self._before[0])

    def _identities(self) -> tuple[list[Any], Any]:
        """Returns identities of all parts, and the parts, which keeps others from getting the same identities."""
        model = self._model
        if not self._plain:
            alive = [*model.variables, None, *model.trainable_variables, None, *model.metrics]
            return list(map(id, alive)), alive
        flat = itertools.chain.from_iterable
        lists = list(flat(map(_OWN_LISTS, self._parts)))
        alive = list(flat(lists))
        alive += [seeds.state for seeds in flat(lists[2::5])]
        for own in self._compiled:
            compiled = [own.get(name) for name in _COMPILED]
            alive += [*compiled, *getattr(compiled[-1], "metrics", ())]
        flags = map(_TRAINABLE, flat(lists[0::5] + lists[1::5]))
        return [*map(len, lists), *map(id, alive), *flags, *map(_TRAINS, self._parts)], alive


def _has_plain_lists(kind: type[keras.layers.Layer]) -> bool:
    """Whether instances of a class compute their variables and metrics as Keras' own layers and models do."""
    layer = keras.layers.Layer
    own = all(getattr(kind, name) is getattr(layer, name) for name in ("variables", "trainable_variables", "trainable"))
    return own and kind.metrics in (layer.metrics, Trainer.metrics)


# ---- what compile() leaves


def check_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras' error for a model that isn't compiled."""
    model._assert_compile_called(method)


def plain_on_batch(model: keras.Model, method: str) -> bool:
    """Whether a model has Keras' own ``train_on_batch`` or ``test_on_batch``, which call nothing else of the user's."""
    names = (method, "reset_metrics", "_flatten_metrics_in_order", "_assert_compile_called", "_maybe_symbolic_build")
    kind, own = type(model), vars(model)
    return all(name not in own and getattr(kind, name, None) is getattr(keras.Model, name, 0) for name in names)


def compiled_loss(model: keras.Model) -> Any:
    """Returns the compiled loss; None if there is none."""
    return model._compile_loss


def compiled_metrics(model: keras.Model) -> Any:
    """Returns the compiled metrics; None if there are none."""
    return model._compile_metrics


def compile_arguments(model: keras.Model) -> list[Any]:
    """Returns the losses and metrics that `compile` got, but for names."""
    loss, metrics = model._compile_loss, model._compile_metrics
    arguments = [] if loss is None else [loss._user_loss]
    arguments += [] if metrics is None else [metrics._user_metrics, metrics._user_weighted_metrics]
    return [item for item in keras.tree.flatten(arguments) if item is not None and not isinstance(item, str)]


def names_in_logs(model: keras.Model) -> dict[int, str]:
    """Returns id of a compiled metric -> its name in logs, with the output's before it if there are several."""
    compiled = model._compile_metrics
    if compiled is None or not compiled.built:
        return {}
    lists = [*compiled._flat_metrics, *compiled._flat_weighted_metrics]
    return {
        id(metric): f"{own.output_name}_{metric.name}" if own.output_name else str(metric.name)
        for own in lists
        if own is not None
        for metric in own.metrics
    }


@contextlib.contextmanager
def recompiled(model: keras.Model) -> Iterator[None]:
    """Replaces a model's losses and metrics by ones that aren't built for any structure of labels, in the context."""
    loss, metrics = model._compile_loss, model._compile_metrics
    before = {"_compile_loss": loss, "_compile_metrics": metrics}
    fresh_loss = loss and type(loss)(loss._user_loss, loss._user_loss_weights, loss.reduction, loss.output_names)
    fresh = metrics and type(metrics)(
        metrics._user_metrics, metrics._user_weighted_metrics, output_names=metrics.output_names
    )
    vars(model).update(_compile_loss=fresh_loss, _compile_metrics=fresh)
    try:
        yield
    finally:
        vars(model).update(before)


def compute_loss(model: keras.Model, **arguments: Any) -> Any:
    """Returns a batch's loss, layers' losses included; like ``keras.Model.compute_loss``, which lacks ``training``."""
    return model._compute_loss(**arguments)


def build_for(model: keras.Model, batch: Any) -> None:
    """Builds losses and metrics for a batch of ``keras.KerasTensor``."""
    model._symbolic_build(data_batch=batch)


def adds_loss(layer: keras.layers.Layer, loss: Any) -> bool:
    """Whether this layer added a loss."""
    return id(loss) in layer._loss_ids


def loss_tracker(model: keras.Model) -> Any:
    """Returns the metric of the mean loss; None if there is none."""
    return getattr(model, "_loss_tracker", None)


def takes_training(model: keras.Model) -> bool:
    """Whether a model's ``call`` takes ``training``."""
    return bool(getattr(model, "_call_has_training_arg", True))


# ---- functional models


def functional_graph(model: keras.Model) -> Any:
    """Returns the functional graph that a model's call runs; None if the call does something else."""
    graph = getattr(model, "_functional", model)  # Sequential keeps one
    own_call = type(model).call not in (keras.Sequential.call, Functional.call)
    return None if own_call or not hasattr(graph, "_nodes_by_depth") else graph


def input_structure(model: keras.Model) -> Any:
    """Returns the inputs that a functional model was made with, in their structure; None for another model."""
    return getattr(model, "_inputs_struct", None)


def output_structure(model: keras.Model) -> Any:
    """Returns the result of a functional or sequential model's call as symbolic tensors: of a single output, itself."""
    outputs = getattr(model, "_functional", model)._outputs_struct
    return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs


def nodes_in_order(graph: Any) -> list[Any]:
    """Returns the calls of operations in a functional graph, inputs included, in calling order."""
    return [node for depth in sorted(graph._nodes_by_depth, reverse=True) for node in graph._nodes_by_depth[depth]]


# ---- variables and optimizers


def tensorflow_variable(variable: keras.Variable) -> Any:
    """Returns TensorFlow's variable behind Keras'; None as long as it has no value."""
    return variable._value


def initialize(variable: keras.Variable) -> None:
    """Initializes a variable that was made within a trace, which Keras deferred."""
    pending = global_state.get_global_attribute("uninitialized_variables", [])
    pending[:] = [other for other in pending if other is not variable]
    variable._deferred_initialize()


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that has the slots: the one that a ``LossScaleOptimizer`` wraps, or itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def parameters_of(optimizer: Any) -> list[keras.Variable]:
    """Returns the variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def slots_by_parameter(optimizer: Any) -> Iterator[tuple[str, keras.Variable, keras.Variable]]:
    """Yields (name of a list of slots, slot, its parameter) for each of the optimizer's lists of slots by parameter."""
    parameters = optimizer._trainable_variables
    for name, own in vars(optimizer).items():
        if name != "_variables" and isinstance(own, list) and len(own) == len(parameters) and own is not parameters:
            for slot, parameter in zip(own, parameters, strict=True):
                if isinstance(slot, keras.Variable) and slot is not parameter:
                    yield name, slot, parameter


def decays(optimizer: Any, variable: keras.Variable) -> bool:
    """Returns whether an optimizer with weight decay applies it to a variable.

    Keras asks by TensorFlow's variable, whose name has the layer's in it, and remembers the answer in the optimizer.
    """
    return bool(optimizer._use_weight_decay(variable.value))


def learning_rate_of(optimizer: Any) -> Any:
    """Returns what ``learning_rate`` was set to: a variable, or a schedule."""
    return getattr(optimizer, "_learning_rate", None)


@contextlib.contextmanager
def restricted(optimizer: Any, positions: Sequence[int], *, clips: bool) -> Iterator[None]:
    """Restricts an optimizer to some of its parameters inside the context.

    Otherwise Keras updates moving averages and resets gradient accumulators for all variables, whichever it is given.

    Args:
        optimizer: a built optimizer.
        positions: positions of the parameters that it keeps.
        clips: whether it still clips by the global norm.
    """
    state = vars(optimizer)
    names = ("_trainable_variables", "_model_variables_moving_average", "_accumulated_gradients", "global_clipnorm")
    kept = {name: state.get(name) for name in names}
    state["_trainable_variables"] = [optimizer._trainable_variables[position] for position in positions]
    if optimizer.use_ema:
        averages = optimizer._model_variables_moving_average
        state["_model_variables_moving_average"] = [averages[position] for position in positions]
    if optimizer.gradient_accumulation_steps:
        state["_accumulated_gradients"] = [
            slot if position in positions else None for position, slot in enumerate(optimizer._accumulated_gradients)
        ]
    if not clips:
        state["global_clipnorm"] = None
    try:
        yield
    finally:
        state.update({name: value for name, value in kept.items() if value is not None})


def checks_by_keras(optimizer: keras.optimizers.LossScaleOptimizer) -> bool:
    """Returns whether loss scaling looks for gradients that aren't finite by Keras' own method."""
    own = "check_finite" in vars(optimizer)
    return not own and type(optimizer).check_finite is keras.optimizers.LossScaleOptimizer.check_finite


@contextlib.contextmanager
def told_whether_finite(optimizer: keras.optimizers.LossScaleOptimizer, finite: Any) -> Iterator[None]:
    """Tells loss scaling, inside the context, whether all gradients are finite, so that it doesn't look at them.

    Args:
        optimizer: the optimizer.
        finite: whether they are, a scalar tensor.
    """
    vars(optimizer)["check_finite"] = lambda gradients: finite
    try:
        yield
    finally:
        del vars(optimizer)["check_finite"]


# ---- data adapters


class OwnAdapter(DataAdapter):
    """A data adapter whose batches Keras needn't know the sizes of."""

    @property
    def batch_size(self) -> None:
        """Not used by Keras here."""
        return None

    @property
    def has_partial_batch(self) -> None:
        """Not used by Keras here."""
        return None

    @property
    def partial_batch_size(self) -> None:
        """Not used by Keras here."""
        return None


def sliceable_arrays(adapter: ArrayDataAdapter) -> tuple[int, Any]:
    """Returns the number of samples of arrays, and the arrays in a form that NumPy's indices can slice."""
    return adapter._num_samples, convert_to_sliceable(adapter._inputs, target_backend="numpy")


def standardized(adapter: PyDatasetAdapter, batch: Any) -> Any:
    """Returns a batch of a ``keras.utils.PyDataset`` as its adapter gives it: x, y and weights, of the right types."""
    return adapter._standardize_batch(batch)


def dataset_of(adapter: PyDatasetAdapter, signature: Any) -> tuple[Any, Any]:
    """Returns an adapter's ``tf.data.Dataset`` and its signature; a known signature saves reading a batch for it."""
    adapter._output_signature = signature
    return adapter.get_tf_dataset(), adapter._output_signature


# ---- hardware


def hardware_questions(*, gpus: bool) -> Iterator[tuple[types.ModuleType, str, bool]]:
    """Yields Keras' questions about this process's hardware, by which it chooses cuDNN and layouts of images.

    Args:
        gpus: whether there are GPUs.

    Yields:
        Module, name of its function, and the function's result.
    """
    # The package has a function of this module's name.
    yield importlib.import_module("keras.src.backend.tensorflow.rnn"), "_is_gpu_available", gpus
    if hasattr(tensorflow_nn, "_cpu_only"):  # since Keras 3.12
        yield tensorflow_nn, "_cpu_only", not gpus


# ---- parts of keras.applications

inverted_residual_block = mobilenet_v3._inverted_res_block


def nasnet_cell(kind: str) -> Any:
    """Returns the function that makes a cell of NASNet-A: ``normal`` or ``reduction``."""
    return nasnet._normal_a_cell if kind == "normal" else nasnet._reduction_a_cell


# ---- names


@contextlib.contextmanager
def names_from_start() -> Iterator[None]:
    """Numbers unnamed layers from the start inside the context: ``re_lu``, ``re_lu_1``, whatever exists already.

    keras.applications leaves many layers unnamed. Plans and profiles name layers, and would otherwise fit only the
    first model of a process.
    """
    before = global_state.get_global_attribute(_COUNTERS)
    global_state.set_global_attribute(_COUNTERS, collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTERS, before)
