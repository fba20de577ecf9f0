"""What the axes of tensors depend on: the batch, lengths that the model leaves open, both, nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from graph_passes.analysis.slice_shapes import Axis, Dependence, SliceShapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Program, Roles, Slice

FIXED, LENGTH, BATCH, BOTH, UNKNOWN = Dependence


def traced(make: Callable[[tf.Tensor], tf.Tensor], length: int | None) -> Program:
    """A program that computes ``y`` of sequences x of vectors of 8; those of the batch at hand have that length."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, None, 8), name="x")
        scalars = [tf.compat.v1.placeholder(tf.int32, [], name=name).op.name for name in ("w", "n", "s")]
        tf.identity(make(x), name="y")
    examples = () if length is None else ((None, length, 8),)
    return Program(graph.as_graph_def(), Roles((Ref("x"),), (), Slice(*map(Ref, scalars)), example_shapes=examples))


def axes(make: Callable[[tf.Tensor], tf.Tensor], length: int | None = 20) -> list[tuple[Dependence, int | None]] | None:
    """What the axes of ``y`` depend on."""
    program = traced(make, length)
    y_axes = SliceShapes.of(program).through_functions(program, [Ref("y")]).axes(Ref("y"))
    return None if y_axes is None else [tuple(axis) for axis in y_axes]


def strided(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv1d(x, np.zeros((3, 8, 4), "float32"), stride=2, padding="VALID")


def test_a_length_is_what_the_arithmetic_of_strides_says() -> None:
    assert axes(strided) == [(BATCH, 1), (LENGTH, 9), (FIXED, 4)]
    assert axes(lambda x: tf.nn.max_pool1d(strided(x), 2, 2, "VALID")) == [(BATCH, 1), (LENGTH, 4), (FIXED, 4)]


@pytest.mark.parametrize("length", [7, 11, 3])
def test_a_length_may_be_a_number_of_samples_that_is_tried(length: int) -> None:
    assert axes(lambda x: x, length) == [(BATCH, 1), (LENGTH, length), (FIXED, 8)]


def test_axes_that_are_merged_depend_on_both() -> None:
    assert axes(lambda x: tf.reshape(strided(x), (-1,))) == [(BOTH, 36)]
    assert axes(lambda x: tf.reshape(x, (-1, 2))) == [(BOTH, 80), (FIXED, 2)]
    assert axes(lambda x: tf.transpose(x, (1, 0, 2))) == [(LENGTH, 20), (BATCH, 1), (FIXED, 8)]


def test_without_a_batch_at_hand_nothing_is_made_up() -> None:
    assert axes(strided, None) == [(BATCH, 1), (UNKNOWN, None), (FIXED, 4)]
    assert axes(lambda x: tf.reshape(x, (-1, 2)), None) == [(UNKNOWN, None), (FIXED, 2)]
    known = SliceShapes.of(traced(strided, None)).lengths_known
    assert not known and SliceShapes.of(traced(strided, 20)).lengths_known


def pairs(x: tf.Tensor) -> tf.Tensor:
    """Pairs of samples, of sequences of 4 at most: for even numbers of samples."""
    return tf.reshape(tf.reduce_sum(x, 1), (tf.shape(x)[0] // 2, 2, 8))


def test_models_that_take_samples_by_twos_are_asked_for_even_numbers() -> None:
    program = traced(lambda x: tf.reshape(pairs(x), (-1, 8)), 4)
    shapes = SliceShapes.of(program)
    assert shapes.samples == (84, 132) and shapes.axes(Ref("y")) == [Axis(BATCH, 1), Axis(FIXED, 8)]
    assert "Reshape" in shapes.contradiction


def test_a_model_for_one_number_of_samples_is_asked_before_what_fixes_it() -> None:
    program = traced(lambda x: tf.reshape(tf.identity(strided(x), name="before"), (5, -1)), 4)
    shapes = SliceShapes.of(program)
    assert shapes.samples is None
    known = shapes.through_functions(program, [Ref("before")]).axes(Ref("before"))
    assert known == [Axis(BATCH, 1), Axis(LENGTH, 1), Axis(FIXED, 4)]
    unknown = shapes.through_functions(program, [Ref("y")]).axes(Ref("y"))
    assert unknown == [Axis(FIXED, 5), Axis(UNKNOWN, None)]


def test_lengths_that_no_batch_may_have_are_refused_with_the_shapes() -> None:
    with pytest.raises(PassError) as caught:
        SliceShapes.of(traced(strided, 2))
    assert str(caught.value) == (
        "node 'conv1d' can't compute Conv2D of tensors of shapes [?,1,2,8], [1,3,8,4]: Negative dimension size caused "
        "by subtracting 3 from 2, for x of shape (?, 2, 8)"
    )
