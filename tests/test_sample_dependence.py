"""How tensors of a slice relate to those of the whole batch, and their axes to the batch and to open lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from graph_passes.analysis.sample_dependence import SampleDependence, sample_dependence
from graph_passes.analysis.slice_shapes import Axis, Dependence, SliceShapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Program, Roles, Slice, Variable, VariableKind
from graph_passes.ir.spreads import Coupling, Spread, degree_of


def program_of(function: Callable[[Any, Any], Any]) -> Program:
    """A function of 5 features ``x`` of each sample and a variable ``w`` of 5; the result is called ``result``."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 5], name="x")
        w = tf.compat.v1.placeholder(tf.float32, [5], name="w")
        scalars = [
            tf.compat.v1.placeholder(dtype, [], name=name)
            for name, dtype in Slice.__annotations__.items()
            for dtype in [tf.float64 if name == "weight" else tf.int32]
        ]
        tf.identity(function(x, w), name="result")
    variable = Variable("w", tf.float32.as_datatype_enum, (5,), VariableKind.PARAMETER, Ref("w"))
    roles = Roles((Ref("x"),), (variable,), Slice(*(Ref(scalar.op.name) for scalar in scalars)))
    return Program(graph.as_graph_def(), roles)


def scalar(name: str) -> Any:
    """One of the slice's scalars, inside such a function."""
    return tf.compat.v1.get_default_graph().get_tensor_by_name(f"{name}:0")


def behind_a_loop(x: Any, w: Any) -> Any:
    """The features of all samples, [5, samples]; TensorFlow's own inference doesn't know how many samples."""
    return tf.map_fn(tf.tanh, tf.transpose(x) * w[:, None])


def behind_python(x: Any, w: Any) -> Any:
    """The same as the samples, of which nobody but Python knows how many."""
    return tf.ensure_shape(tf.numpy_function(lambda a: a, [x * w], tf.float32), [None, 5])


def mean_by_size(x: Any) -> Any:
    """As Keras' losses compute it where a shape isn't known: it was taken for a sum there."""
    return tf.reduce_sum(x) / tf.cast(tf.reduce_prod(tf.shape(x)), x.dtype)


LOSS = frozenset({"result", "part"})


def interpreted(function: Callable[[Any, Any], Any], loss_nodes: frozenset[str] = frozenset()) -> SampleDependence:
    """Interprets a function of 5 features of each sample and a variable of 5; the result is called ``result``."""
    dependence = sample_dependence(program_of(function), loss_nodes)
    assert dependence is not None
    return dependence


SPREADS: dict[str, tuple[Callable[[Any, Any], Any], Spread]] = {
    "samples": (lambda x, w: tf.tanh(x) * w, Spread(0, varies=True, known=False)),
    "a sum": (lambda x, w: tf.reduce_sum(x), Spread(varies=True, degree=1)),
    "a mean": (lambda x, w: tf.reduce_mean(x * w), Spread(varies=True, known=False)),
    "a sum over a number": (
        lambda x, w: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
        Spread(varies=True),
    ),
    "a sum over a number from a list of sizes": (
        lambda x, w: tf.reduce_sum(x) / tf.cast(tf.gather(tf.concat([[5], tf.shape(x)[:1]], 0), 1), tf.float32),
        Spread(varies=True),
    ),
    "a mean behind a loop": (lambda x, w: mean_by_size(behind_a_loop(x, w)), Spread(varies=True, known=False)),
    "a mean behind Python code": (lambda x, w: mean_by_size(behind_python(x, w)), Spread(varies=True, known=False)),
    "the largest": (lambda x, w: tf.reduce_max(x), Spread(varies=True, linear=False, extreme="Max")),
    "twice the largest": (lambda x, w: 2.0 * tf.reduce_max(x), Spread(varies=True, linear=False, extreme="Max")),
    "two batches, looked up by place": (
        lambda x, w: tf.gather(tf.concat([x, x + 1], 0), tf.range(2 * tf.shape(x)[0])),
        Spread(0, outer=2, varies=True),
    ),
    "the first of two batches": (
        lambda x, w: tf.concat([x, x + 1], 0)[: tf.shape(x)[0]],
        Spread(0, varies=True),
    ),
    "how often a value is there": (
        lambda x, w: tf.unique_with_counts(x[:, 0]).count,
        Spread(0, outer=None, varies=True, partial=True),
    ),
    "a number of chosen samples": (
        lambda x, w: tf.size(tf.boolean_mask(x[:, 0], x[:, 0] > 0)),
        Spread(varies=True, degree=1),
    ),
    "sums in a table": (
        lambda x, w: tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0], tf.int32), 7),
        Spread(varies=True, degree=1),
    ),
    "features before samples": (lambda x, w: tf.reshape(tf.transpose(x), [-1]), Spread(0, outer=5, varies=True)),
    "two batches, some of repeated samples": (
        lambda x, w: tf.concat([tf.repeat(x, 2, 0), x], 0),
        Spread(0, outer=None, varies=True),
    ),
    "rows where data say": (
        lambda x, w: tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0], tf.int32), 2 * tf.shape(x)[0]),
        Spread(0, outer=None, varies=True),
    ),
    "pairs of samples": (lambda x, w: tf.matmul(x, x, transpose_b=True), Spread(0, varies=True)),
    "the slice's weight": (lambda x, w: scalar("weight"), Spread(degree=1, known=False)),
}


def shifted(x: Any, w: Any) -> Any:
    """In each round values go from one variable of a loop to the next: it takes ten to reach the last."""
    first = (0, x, *[tf.ones_like(x)] * 10)
    return tf.while_loop(lambda i, *v: i < 12, lambda i, *v: (i + 1, v[0], *v[:-1]), first)[-1]


def of_seven(x: Any) -> Any:
    """Takes only seven samples."""
    return tf.ensure_shape(tf.ensure_shape(x, [7, 5]) * 2, [None, 5])


def summed_over_replicas(x: Any) -> Any:
    """A sum over the slices of a micro-batch."""
    return tf.raw_ops.CollectiveReduceV2(
        input=tf.reduce_sum(x), group_size=2, group_key=1, instance_key=1, ordering_token=[], merge_op="Add",
        final_op="Id",
    )  # fmt: skip


COUPLED: dict[str, tuple[Callable[[Any, Any], Any], set[Coupling]]] = {
    "every sample from the first": (lambda x, w: x[::1], set()),
    "the first of two batches": (lambda x, w: tf.concat([x, x + 1], 0)[: tf.shape(x)[0]], set()),
    "pairs of samples": (lambda x, w: tf.matmul(x, x, transpose_b=True), {Coupling.TOGETHER}),
    "two batches taken for one": (lambda x, w: tf.reshape(tf.concat([x, x], 0), [-1, 10]), {Coupling.TOGETHER}),
    "two orders": (lambda x, w: tf.repeat(x, 2, 0) + tf.tile(x, [2, 1]), {Coupling.TOGETHER}),
    "of a micro-batch": (lambda x, w: tf.sqrt(tf.sqrt(summed_over_replicas(x))), {Coupling.MICRO_BATCH}),
    "Python code": (behind_python, {Coupling.PYTHON}),
    "a grid for all numbers at hand": (
        lambda x, w: tf.quantization.quantize_and_dequantize_v2(x, -1.0, 1.0, range_given=False),
        {Coupling.TOGETHER},
    ),
    "a grid that is given": (
        lambda x, w: tf.quantization.quantize_and_dequantize_v2(x, -1.0, 1.0, range_given=True),
        set(),
    ),
    "a long way in a loop": (shifted, {Coupling.UNKNOWN}),
    "a branch of seven samples": (lambda x, w: tf.cond(w[0] > 0, lambda: of_seven(x), lambda: x), {Coupling.UNKNOWN}),
    "a loop of seven samples": (
        lambda x, w: tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, of_seven(v)), (0, x))[1],
        {Coupling.UNKNOWN},
    ),
}


@pytest.mark.parametrize("case", SPREADS)
def test_spreads_follow_from_data_flow(case: str) -> None:
    function, expected = SPREADS[case]
    assert interpreted(function).spreads[Ref("result")] == expected


@pytest.mark.parametrize("case", COUPLED)
def test_what_couples_samples_is_told(case: str) -> None:
    function, expected = COUPLED[case]
    assert {coupling for _, coupling in interpreted(function).couplings} == expected


def test_a_loss_reads_statistics_of_inputs_of_the_whole_batch() -> None:
    def masked_mean(x: Any, w: Any) -> Any:
        return tf.divide(tf.reduce_sum(x * w), tf.reduce_sum(x), name="part")

    in_loss = interpreted(masked_mean, LOSS)
    assert [(whole.node, whole.argument) for whole in in_loss.wholes] == [("part", 1)]
    assert in_loss.spreads[Ref("result")] == Spread(varies=True, degree=1, known=False)
    assert not in_loss.couplings
    in_model = interpreted(masked_mean)
    assert not in_model.wholes
    assert list(in_model.couplings) == [("part", Coupling.TOGETHER)]


def test_a_branch_with_a_sum_over_samples_is_a_coupling() -> None:
    """It was taken for a constant, and the sum in it for a mean, without a word."""

    def guarded(x: Any, w: Any) -> Any:
        total = tf.reduce_sum(x * w)
        return tf.cond(total > 0, lambda: tf.sqrt(total), lambda: 0 * total, name="part")

    assert ("part", Coupling.NOT_LINEAR) in interpreted(guarded, LOSS).couplings


@pytest.mark.parametrize(
    ("few", "many", "degree"),
    [
        ([3.0, 0.0], [3.0, 0.0], 0),
        ([3.0, np.nan], [6.0, np.nan], 1),
        ([8.0], [4.0 * (1 + 1e-12)], -1),
        ([3.0], [3.0 * (1 + 1e-6)], None),
        ([1.0, 2.0], [1.0, np.inf], None),
        ([np.inf], [np.inf], 0),
        ([3.0], [-np.inf], None),
        ([1.0], [1.0, 1.0], None),
    ],
)
def test_the_power_that_a_value_grows_with(few: list[float], many: list[float], degree: int | None) -> None:
    """Nothing finite is near infinity."""
    assert degree_of(np.array(few), np.array(many), 2.0) == degree


# ---- what the axes of tensors depend on: the batch, lengths that the model leaves open, both, nothing

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


def test_a_loss_does_not_read_a_length_behind_a_loop_of_the_whole_batch() -> None:
    def share(x: tf.Tensor) -> tf.Tensor:
        length = tf.shape(tf.map_fn(tf.tanh, x))[1]
        return tf.divide(tf.reduce_sum(x), tf.reduce_sum(x) * tf.cast(length, tf.float32), name="part")

    dependence = sample_dependence(traced(share, 20), frozenset({"part", "y"}))
    assert dependence is not None and not dependence.wholes


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
