"""Examining a model under a plan before there is data: errors, and where it differs from plain Keras."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

import keras

from dapple_tf.common.garbage import without_collection
from dapple_tf.common.keras_private import compiled_loss, fresh_loss, items_of, output_structure, replaced_compilation
from dapple_tf.common.progress import Progress
from dapple_tf.errors import reason
from dapple_tf.execution.notes import Note, notes_of
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.batch import BatchSpec, declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.functional import cuts_are_safe
from dapple_tf.frontend.own_steps import own_steps
from dapple_tf.frontend.py_functions import check_py_functions, may_have_py_functions
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import labels_of_outputs
from graph_passes.analysis.slice_shapes import LengthsUnknownError
from graph_passes.ir.program import LayerCall, Program
from graph_passes.pass_manager import run_passes
from graph_passes.passes.assign_stages import find_call

logger = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds before anything is shown."""


def check_cuts(model: keras.Model, passes: StepPasses) -> None:
    """Finds errors in cuts, and code that workers lack, before there is data.

    For a model without declared inputs it finds unknown names only. It assumes nothing about lengths that the model
    leaves open: errors that depend on them show with the first batch.

    Args:
        model: a built model.
        passes: the passes of the plan with the cuts.

    Raises:
        CaptureError: the model can't be traced, or runs Python code that workers don't have.
        PassError: a cut names no layer, leaves a stage empty, or a tensor can't be sent over it.
    """
    cuts, asked = passes.plan.cuts, bool(passes.cluster.addresses) and may_have_py_functions(model)
    if not asked and cuts_are_safe(model, cuts):
        return
    spec = declared_spec(model)
    if spec is not None:
        _assigned(capture(model, VariableTable(model), Mode.PREDICT, spec, gpus=passes.gpus), passes)
        return
    layers = items_of(model)
    names = dict.fromkeys(layer.name for layer in layers if layer is not model)
    for cut in cuts:
        path, _, _ = cut.partition("#")
        if path.rpartition("/")[2] not in names:
            find_call(path, [LayerCall(name, 0, 1) for name in names])


@without_collection
def examine(model: keras.Model, passes: StepPasses) -> tuple[Note, ...] | None:
    """Returns the notes of a training step that follow from the inputs that a model declares.

    The step is captured, not run, with its loss if the model's outputs suggest labels. Compiled metrics are left out:
    Keras chooses some of them ("accuracy") by the first labels that it sees, which mustn't be guessed ones.

    Returns:
        The notes; None if they depend on a batch: the model declares no inputs, has its own ``train_step``, or leaves
        lengths open that decide what each stage holds.

    Raises:
        CaptureError, PassError: as for `check_cuts`.
    """
    spec = declared_spec(model)
    if spec is None or own_steps(model):
        check_cuts(model, passes)
        return None
    with Progress("examining the model", delay=_PATIENCE) as bar:
        bar.step("what computes across samples")
        with _loss_for_guessed_labels(model, spec) as labeled:
            if labeled is not None:
                try:
                    return _notes(capture(model, VariableTable(model), Mode.TRAIN, labeled, gpus=passes.gpus), passes)
                except Exception as error:  # The loss may take other labels, which the first batch brings.
                    logger.debug("the loss of model %r isn't known without labels: %s", model.name, reason(error))
        captured = capture(model, VariableTable(model), Mode.PREDICT, spec, training=True, gpus=passes.gpus)
        return _notes(captured, passes)


def _notes(program: Program, passes: StepPasses) -> tuple[Note, ...] | None:
    assigned = _assigned(program, passes)
    if assigned is None and min(passes.slices) == 1:
        return None
    return notes_of(assigned or program, passes.slices, passes.plan.micro_batches)


def _assigned(program: Program, passes: StepPasses) -> Program | None:
    """Returns a captured program with its stages; None if these depend on lengths that only the first batch has."""
    check_py_functions(program.graph, passes.cluster.addresses)
    try:
        return run_passes(program, [passes.assign_stages()])
    except LengthsUnknownError:
        return None


@contextlib.contextmanager
def _loss_for_guessed_labels(model: keras.Model, spec: BatchSpec) -> Iterator[BatchSpec | None]:
    """Gives the model a loss for labels that its outputs suggest, and no metrics; yields None if they suggest none."""
    loss, labels = None, None
    if compiled_loss(model) is not None:
        outputs = output_structure(model)
        guessed = labels_of_outputs(model, outputs, outputs)
        if guessed is None:
            yield None
            return
        labels = guessed[0]
        loss = fresh_loss(model)
        tensors = keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype), labels)
        try:
            loss.build(tensors, outputs)
        except (TypeError, ValueError, KeyError) as error:
            logger.debug("the loss of model %r can't be made for labels %s: %s", model.name, labels, reason(error))
            yield None
            return
    with replaced_compilation(model, loss, None):
        yield dataclasses.replace(spec, y=labels)
