"""Example batches of any size for a model: from given arrays, or drawn to fit the model's declared inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.keras_private import compiled_loss
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.errors import CaptureError, reason
from dapple_tf.frontend.batch import BatchSpec, Leaf, declared_spec, spec_of
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.own_steps import own_steps
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis.slice_shapes import input_shapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, Ref
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import bare_config

logger = logging.getLogger(__name__)

EXAMPLES = ("x", "y", "sample_weight", "length")
"""The arguments of :func:`dapple_tf.profile` that describe batches."""
_WAY_OUT = "give examples to transform(..., x=..., y=...) or profile(..., x=..., y=...)"


@dataclasses.dataclass(frozen=True)
class ExampleArray:
    """One array of the batches.

    Attributes:
        dtype: its numpy dtype.
        shape: shape of one sample.
        given: samples to repeat; None if numbers are drawn.
        classes: number of values of drawn integers.
        label: whether it is a label.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    given: np.ndarray | None
    classes: int
    label: bool

    def batch(self, samples: int, generator: np.random.Generator) -> np.ndarray:
        """Returns the array for ``samples`` samples."""
        if self.given is not None:
            values = self.given[np.arange(samples) % len(self.given)]
        elif tf.dtypes.as_dtype(self.dtype).is_floating or tf.dtypes.as_dtype(self.dtype).is_complex:
            values = generator.normal(size=(samples, *self.shape))
            # Labels may have to be probabilities.
            values = 1 / (1 + np.exp(-values)) if self.label else values
        else:
            values = generator.integers(0, self.classes, size=(samples, *self.shape))
        return np.asarray(values).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class ExampleBatch:
    """The structure of a model's batches, and arrays to make them from.

    Attributes:
        spec: their structure.
        arrays: their arrays, in feed order.
        guessed: whether there are labels that nobody has given.
    """

    spec: BatchSpec
    arrays: tuple[ExampleArray, ...]
    guessed: bool = False

    @classmethod
    def of(
        cls, model: keras.Model, x: Any = None, y: Any = None, sample_weight: Any = None, *, length: int | None = None
    ) -> ExampleBatch:
        """Makes batches like the given examples; other arrays are drawn.

        Args:
            model: a built and compiled model.
            x: example inputs, any number of samples; None if the model declares its inputs. Or the batches themselves,
                so that several measurements choose a length, and warn of it, once.
            y: example labels; None draws labels for the loss.
            sample_weight: example weights; None for none.
            length: length of all axes that the model leaves open, if x doesn't decide it; None takes one that the model
                can be computed for, and warns of it.

        Raises:
            ProfileError: inputs or labels can't be guessed, or an example has no samples.
        """
        if isinstance(x, ExampleBatch):
            return x
        x_tree = _with_lengths(model, _declared_inputs(model), y, length) if x is None else spec_of(model, x).x
        classes: list[int] | None = None
        if y is None:
            y_tree, classes = guessed_labels(model, x_tree)
        else:
            y_tree = _leaves("y", y) if x is None else spec_of(model, x, y).y
        spec = BatchSpec(x_tree, y_tree, None if sample_weight is None else _leaves("sample_weight", sample_weight))
        given: list[np.ndarray | None] = []
        for tree, example in ((spec.x, x), (spec.y, y), (spec.sample_weight, sample_weight)):
            leaves = _present(tree)
            given += [None] * len(leaves) if example is None else [np.asarray(array) for array in _present(example)]
        for leaf, array in zip(spec.leaves, given, strict=True):
            if array is None and leaf.dtype == "string":
                raise ProfileError(f"{leaf.name} takes strings, which can't be made up: {_WAY_OUT}")
            if array is not None and len(array) < 1:
                raise ProfileError(f"{leaf.name} has no samples; give at least one")
        first = len(_present(spec.x))
        labels = range(first, first + len(_present(spec.y)))
        arrays = [
            ExampleArray(
                dtype=np.dtype(tf.dtypes.as_dtype(leaf.dtype).as_numpy_dtype),
                shape=_sample_shape(leaf, array),
                given=array,
                classes=classes[index - first] if classes is not None and index in labels else 2,
                label=index in labels,
            )
            for index, (leaf, array) in enumerate(zip(spec.leaves, given, strict=True))
        ]
        return cls(spec, tuple(arrays), y is None and y_tree is not None)

    @contextlib.contextmanager
    def told(self, model: keras.Model) -> Iterator[None]:
        """Tells that labels are guessed, in errors of the model's steps, and in a warning if its loss isn't Keras'.

        Raises:
            CaptureError: the model can't be traced.
            ProfileError: its steps fail on the guessed labels.
        """
        labels = f"labels are guessed, {BatchSpec(None, self.spec.y)}"
        try:
            yield
        except (CaptureError, tf.errors.OpError) as error:
            if not self.guessed or isinstance(error, tf.errors.ResourceExhaustedError):
                raise
            capture(model, VariableTable(model), Mode.PREDICT, self.spec)  # fails if labels aren't the reason
            kind = CaptureError if isinstance(error, CaptureError) else ProfileError
            raise kind(f"{reason(error).rstrip('.')}; {labels}: {_WAY_OUT}") from error
        if self.guessed and not _has_kerass_loss(model):
            logger.warning("model %r: %s; if its loss takes others, %s", model.name, labels, _WAY_OUT)

    def batch(self, samples: int) -> list[np.ndarray]:
        """Returns the arrays of a batch, in feed order; the same every time."""
        generator = np.random.default_rng(0)
        return [array.batch(samples, generator) for array in self.arrays]

    def trees(self, samples: int) -> tuple[Any, Any, Any]:
        """Returns the same batch as x, y and sample weights in the structure that the model takes."""
        arrays = iter(self.batch(samples))

        def packed(tree: Any) -> Any:
            if tree is None:
                return None
            return keras.tree.map_structure(lambda leaf: None if leaf is None else next(arrays), tree)

        return packed(self.spec.x), packed(self.spec.y), packed(self.spec.sample_weight)


def _declared_inputs(model: keras.Model) -> Any:
    declared = declared_spec(model)
    if declared is None:
        raise ProfileError(f"model {model.name!r} doesn't declare its inputs: {_WAY_OUT}")
    return declared.x


def _present(tree: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(tree) if leaf is not None]


def _leaves(kind: str, tree: Any) -> Any:
    """Returns a leaf for each array of labels or weights."""

    def leaf(array: Any) -> Leaf | None:
        if array is None:
            return None
        value = np.asarray(array)
        shape = (None, *value.shape[1:])
        return Leaf(kind, value.dtype.name, shape, shape)

    return keras.tree.map_structure(leaf, tree)


def _with_lengths(model: keras.Model, x: Any, y: Any, length: int | None) -> Any:
    """Returns the structure of a model's inputs with lengths for open axes, which example labels may decide."""
    spec = BatchSpec(x)
    if all(None not in leaf.shape[1:] for leaf in spec.leaves):
        return keras.tree.map_structure(lambda leaf: dataclasses.replace(leaf, sizes=leaf.shape), x)
    likely = [int(size) for array in _present(y) for size in np.shape(array)[1:]]
    chosen = chosen_length(model, spec, length, likely)

    def sized(leaf: Leaf) -> Leaf:
        sizes = (None, *(chosen if size is None else size for size in leaf.shape[1:]))
        return dataclasses.replace(leaf, sizes=sizes)

    return keras.tree.map_structure(sized, x)


def _sample_shape(leaf: Leaf, array: np.ndarray | None) -> tuple[int, ...]:
    if array is not None:
        return tuple(array.shape[1:])
    unknown = [axis for axis, size in enumerate((leaf.sizes or leaf.shape)[1:], start=1) if size is None]
    if unknown:
        raise ProfileError(
            f"{leaf.name} has shape {leaf.shape}, and how long axis {unknown[0]} is can't be told: {_WAY_OUT}"
        )
    return tuple(size for size in (leaf.sizes or leaf.shape)[1:] if size is not None)


def guessed_labels(model: keras.Model, x: Any) -> tuple[Any, list[int] | None]:
    """Returns the structure of labels that the compiled losses take, and the number of classes of each.

    Both are None for a model that takes no labels.

    Args:
        model: a compiled model.
        x: structure of its inputs.

    Raises:
        ProfileError: the labels can't be derived.
    """
    own_loss = type(model).compute_loss is not keras.Model.compute_loss
    if model.loss is None or (own_loss and compiled_loss(model) is None):
        return None, None

    def outputs(shape_of: Callable[[Leaf], Any]) -> Any:
        inputs = keras.tree.map_structure(lambda leaf: keras.KerasTensor(shape_of(leaf), leaf.dtype), x)
        return model.compute_output_spec(inputs)

    declared = outputs(lambda leaf: leaf.shape)
    flat = keras.tree.flatten(declared)
    losses = None if own_loss else _losses(model.loss, declared)
    if losses is None:
        raise ProfileError(f"the labels that the loss of model {model.name!r} takes can't be guessed: {_WAY_OUT}")
    sized = keras.tree.flatten(outputs(lambda leaf: (None, *(leaf.sizes or leaf.shape)[1:])))
    leaves, classes = [], []
    for index, (output, real, loss) in enumerate(zip(flat, sized, losses, strict=True)):
        sparse = "sparse" in _loss_name(loss)
        name = "y" if len(flat) == 1 else f"y[{index}]"
        stop = -1 if sparse else None
        dtype = "int32" if sparse else keras.config.floatx()
        leaves.append(Leaf(name, dtype, (None, *output.shape[1:stop]), (None, *real.shape[1:stop])))
        classes.append(int(output.shape[-1] or 2) if sparse else 2)
    return keras.tree.pack_sequence_as(declared, leaves), classes


def _losses(loss: Any, outputs: Any) -> list[Any] | None:
    """Returns the loss of each output; None if they can't be assigned."""
    flat = keras.tree.flatten(outputs)
    if isinstance(loss, Mapping):
        if isinstance(outputs, Mapping):
            # Keras flattens a dict in the order of its sorted keys.
            return [loss.get(name) for name in sorted(outputs)] if len(flat) == len(outputs) else None
        return list(loss.values()) if len(loss) == len(flat) == 1 else None
    if isinstance(loss, (list, tuple)):
        return list(loss) if len(loss) == len(flat) else None
    return [loss] * len(flat)


def _has_kerass_loss(model: keras.Model) -> bool:
    """Whether all losses are Keras' own, which take labels like the outputs or like classes."""
    losses = [getattr(loss, "fn", loss) for loss in keras.tree.flatten(model.loss) if loss is not None]
    modules = (getattr(loss, "__module__", "") for loss in losses if not isinstance(loss, str))
    return not own_steps(model) and all(module.partition(".")[0] == "keras" for module in modules)


def _loss_name(loss: Any) -> str:
    if isinstance(loss, str):
        return loss.lower()
    function = getattr(loss, "fn", loss)
    return f"{type(loss).__name__} {getattr(function, '__name__', '')}".lower()


# ---- lengths for a model's open axes, if no example gives them: one that the model can be computed for


_LENGTHS = (128, 64, 32, 16, 8, 4, 2, 256, 512, 1024, 2048)
"""Lengths to try, in this order: some models have fewer than 128 positions, others need larger images."""


def chosen_length(model: keras.Model, spec: BatchSpec, told: int | None = None, likely: Sequence[int] = ()) -> int:
    """Returns the length for all open axes of a model's inputs; a warning names it.

    Args:
        model: a built model.
        spec: its inputs.
        told: the length to take; None tries some, by computing the model's outputs for one sample of zeros.
        likely: lengths to try first.

    Raises:
        ProfileError: the model can't be computed for that length, or for any tried one.
    """
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    graph, samples = Graph(program.graph), program.roles.slice.samples
    declared = input_shapes(graph, program.roles, 1)
    reasons = {}
    for length in dict.fromkeys((*likely, *_LENGTHS)) if told is None else (told,):
        shapes = {name: [length if size is None else size for size in shape] for name, shape in declared.items()}
        try:
            infer_shapes(program.graph, shapes, {samples: 1})
        except PassError as error:
            reasons[length] = str(error)
            continue
        reason = _why_not_run(program.graph, shapes, {samples: 1}, program.roles.outputs)
        if reason:
            reasons[length] = reason
        elif told is None:
            logger.warning(
                "model %r leaves lengths open; its profile takes them for %d: give example inputs of typical lengths "
                "(x=...), or length=..., for others",
                model.name,
                length,
            )
            return length
        else:
            return length
    length, why = next(iter(reasons.items()))
    raise ProfileError(
        f"model {model.name!r} leaves lengths open and can't be computed for {'length' if told else 'lengths'} "
        f"{', '.join(map(str, reasons))}: give example inputs of typical lengths, x=... ({length}: {why})"
    )


def _why_not_run(
    graph: GraphDef, placeholders: Mapping[str, Sequence[int | None]], values: Mapping[Ref, int], wanted: Sequence[Ref]
) -> str:
    """Runs a graph on zeros, and returns the reason if that fails; None if it works.

    Some shapes are checked only in a run, such as that of a table of positions whose rows are looked up.

    Args:
        graph: a flat graph.
        placeholders: shapes of placeholders; others (parameters, say) have fixed ones.
        values: values of scalar placeholders.
        wanted: tensors to compute.
    """
    config = bare_config(GPU=0)
    config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    given: dict[str, tf.Tensor] = {}
    with tf.Graph().as_default() as scope:
        for node in graph.node:
            if node.op == "Placeholder":
                dtype = tf.dtypes.as_dtype(node.attr["dtype"].type)
                size = placeholders.get(node.name) or [dim.size for dim in node.attr["shape"].shape.dim]
                given[f"{node.name}:0"] = tf.fill(size, tf.cast(values.get(Ref(node.name), 0), dtype))
        results = [f"{ref.node}:{ref.output}" for ref in wanted]
        tensors = tf.graph_util.import_graph_def(graph, input_map=given, return_elements=results, name="run")
        try:
            with tf.compat.v1.Session(graph=scope, config=config) as session:
                session.run([tensor.op for tensor in tensors])
        except tf.errors.OpError as error:
            return str(error.message).partition("\n")[0]
    return ""
