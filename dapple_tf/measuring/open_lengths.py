"""Lengths for a model's open axes, if no example gives them: one that the model can be computed for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis.slice_shapes import input_shapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, Ref
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import bare_config

logger = logging.getLogger(__name__)

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
