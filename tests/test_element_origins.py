"""What indices belong to is told by data flow, and holds for their values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from programs import FLOAT, INT32, PARAMETER

from graph_passes.analysis.element_origins import ElementOrigins, Origin, Parts
from graph_passes.ir.graph import Builder, GraphDef, Ref, dtype_attr
from graph_passes.ir.program import Program, Roles, Slice, Stage, Value, Variable
from graph_passes.passes.build_backward import Rows, row_sets

LENGTH = 4
Made = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


def traced(made: Made) -> tuple[Program, GraphDef, Ref]:
    """A flat program of one stage that computes indices of batch ids, a variable and the size of the slice."""
    with tf.Graph().as_default() as scope:
        ids = tf.compat.v1.placeholder(tf.int32, [None, LENGTH], name="ids")
        fixed = tf.compat.v1.placeholder(tf.int32, [3], name="fixed")
        samples = tf.compat.v1.placeholder(tf.int32, [], name="samples")
        tf.compat.v1.placeholder(tf.int32, [], name="number")
        tf.compat.v1.placeholder(tf.float64, [], name="weight")
        indices = tf.identity(made(ids, fixed, samples), name="found")
        graph = scope.as_graph_def()
    variable = Variable("fixed", INT32, (3,), PARAMETER, value=Ref("fixed"))
    scalars = Slice(Ref("weight"), Ref("number"), Ref("samples"))
    return Program(graph, Roles((Ref("ids"),), (variable,), scalars)), graph, Ref(indices.op.name)


def origins_and_parts(made: Made) -> tuple[ElementOrigins, Parts]:
    program, graph, ref = traced(made)
    arguments = {Value(Ref(name)): Ref(name) for name in ("ids", "fixed", "samples", "number", "weight")}
    origins = ElementOrigins(program, Stage(0, (), graph=graph, arguments=arguments), graph, [ref])
    return origins, origins.of(ref)


def parts_of(made: Made) -> Parts:
    return origins_and_parts(made)[1]


def origins_of(made: Made) -> list[Origin]:
    return [part.origin for part in parts_of(made)]


def values_of(made: Made, ids: np.ndarray, *more: Ref) -> list[np.ndarray]:
    """What a slice computes: the indices, and other tensors."""
    _, graph, ref = traced(made)
    return computed(graph, ids, ref, *more)


def computed(graph: GraphDef, ids: np.ndarray, *wanted: Ref) -> list[np.ndarray]:
    with tf.Graph().as_default() as scope:
        tf.graph_util.import_graph_def(graph, name="")
        feeds = {"ids:0": ids, "fixed:0": np.array([2, 0, 2]), "samples:0": len(ids)}
        with tf.compat.v1.Session(graph=scope) as session:
            values: list[np.ndarray] = session.run([f"{each.node}:{each.output}" for each in wanted], feeds)
    return values


def larger(array: np.ndarray) -> np.ndarray:
    """TensorFlow finds it as long as something holds it."""
    return array + np.int32(1)


def running(ids: tf.Tensor, axis: int) -> tf.Tensor:
    """Positions of tokens among those of an expert, as floating-point numbers: once taken for samples' own."""
    return tf.cast(tf.cumsum(tf.cast(ids, tf.float32), axis), tf.int32)


def flat(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, [-1])


def with_first(ids: tf.Tensor) -> tf.Tensor:
    return tf.concat([tf.constant([[1, 2, 3, 4]]), ids], 0)


CONSTANT: dict[str, Made] = {
    "constants": lambda ids, fixed, samples: tf.constant([1, 1, 2]),
    "positions": lambda ids, fixed, samples: tf.range(tf.shape(ids)[1]),
    "a variable": lambda ids, fixed, samples: fixed + tf.gather(fixed, [0, 1, 1]),
    "random numbers of a fixed seed": lambda ids, fixed, samples: (
        tf.random.stateless_uniform([4], [1, 2], maxval=9, dtype=tf.int32) * fixed[0]
    ),
}
SAMPLES: dict[str, Made] = {
    "ids": lambda ids, fixed, samples: flat(ids + 1),
    "random numbers of samples": lambda ids, fixed, samples: tf.random.uniform([samples], maxval=9, dtype=tf.int32),
    "two lookups": lambda ids, fixed, samples: tf.concat([flat(ids), ids[:, 0]], 0),
    "a mask": lambda ids, fixed, samples: tf.boolean_mask(ids, ids > 2) + 1,
    "by places in the batch": lambda ids, fixed, samples: tf.gather(flat(ids), tf.range(samples) * 4 + ids[:, 0] % 4),
    "a loop": lambda ids, fixed, samples: tf.map_fn(lambda row: row[:2], ids),
    "python": lambda ids, fixed, samples: tf.numpy_function(larger, [ids], tf.int32),
    "parts by data": lambda ids, fixed, samples: tf.dynamic_partition(flat(ids), flat(ids) % 2, 2)[1],
}
OTHERS: dict[str, tuple[Made, Origin]] = {
    "unique": (lambda ids, fixed, samples: tf.unique(flat(ids))[0], Origin.DISTINCT),
    "unique with constants": (
        lambda ids, fixed, samples: tf.unique(tf.concat([fixed, flat(ids)], 0))[0] + 1,
        Origin.DISTINCT,
    ),
    "largest of the batch": (lambda ids, fixed, samples: tf.reduce_max(ids, 0), Origin.COUPLED),
    "less the largest": (lambda ids, fixed, samples: flat(ids) - tf.reduce_max(ids), Origin.COUPLED),
    "largest of the batch, repeated": (lambda ids, fixed, samples: tf.fill([3], tf.reduce_max(ids)), Origin.COUPLED),
    "unique, gathered": (lambda ids, fixed, samples: tf.gather(fixed, tf.unique(flat(ids))[0] % 3), Origin.COUPLED),
    "pairs of samples": (lambda ids, fixed, samples: ids[:, :1] - tf.transpose(ids[:, :1]), Origin.COUPLED),
    "joined, transposed": (lambda ids, fixed, samples: flat(tf.transpose(with_first(ids))), Origin.COUPLED),
    "joined, by samples": (lambda ids, fixed, samples: flat(with_first(ids)) + samples, Origin.COUPLED),
    "two samples": (lambda ids, fixed, samples: tf.gather(ids, [0, 1]), Origin.COUPLED),
    "unique places": (lambda ids, fixed, samples: tf.unique(tf.range(samples))[0], Origin.PLACES),
    "counts along the batch": (lambda ids, fixed, samples: running(ids, 0), Origin.PLACES),
    "counts within samples": (lambda ids, fixed, samples: running(ids, 1), Origin.SAMPLES),
    "places of samples": (lambda ids, fixed, samples: tf.range(samples), Origin.PLACES),
    "places of a mask": (lambda ids, fixed, samples: tf.where(ids > 2)[:, 0], Origin.PLACES),
    "random numbers": (lambda ids, fixed, samples: tf.random.uniform([4], maxval=9, dtype=tf.int32), Origin.DRAWN),
}
CASES = (
    {name: (made, {Origin.CONSTANT}) for name, made in CONSTANT.items()}
    | {name: (made, {Origin.SAMPLES}) for name, made in SAMPLES.items()}
    | {name: (made, {origin}) for name, (made, origin) in OTHERS.items()}
)


@pytest.mark.parametrize("name", CASES)
def test_what_indices_belong_to_follows_from_data_flow_and_holds_for_their_values(name: str) -> None:
    """Of a batch, and of its two slices."""
    made, origins = CASES[name]
    parts = parts_of(made)
    assert {part.origin for part in parts} == origins
    ids = np.random.default_rng(0).integers(0, 8, (5, LENGTH))
    whole, first, second = (
        np.split(values[0], np.cumsum([part.size for part in values[1:]])[:-1])
        for values in (values_of(made, part, *(part.tensor for part in parts)) for part in (ids, ids[:2], ids[2:]))
    )
    for part, batch, one, other in zip(parts, whole, first, second, strict=True):
        if part.origin is Origin.CONSTANT:
            np.testing.assert_array_equal(one, batch)
            np.testing.assert_array_equal(other, batch)
        elif part.origin is Origin.SAMPLES and "random" not in name:
            np.testing.assert_array_equal(np.sort([*one.flat, *other.flat]), np.sort(batch, None))
        elif part.origin is Origin.DISTINCT and part.tensor == part.root:
            assert len(np.unique(batch)) == len(batch)


def test_parts_of_a_concatenation_are_told_apart_through_maps_and_shapes() -> None:
    def made(ids: tf.Tensor, fixed: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        joined = tf.concat([tf.constant([[1, 2, 3, 4]] * 2), ids, tf.range(4)[None]], 0)
        return flat(tf.where(joined < 0, joined + 9, joined))

    assert origins_of(made) == [Origin.CONSTANT, Origin.SAMPLES, Origin.CONSTANT]
    ids = np.arange(12).reshape(3, 4)
    indices, *parts = values_of(made, ids, *(part.tensor for part in parts_of(made)))
    assert [part.size for part in parts] == [8, 12, 4] and indices.size == 24


@pytest.mark.parametrize("from_end", [False, True])
def test_rows_of_different_indices_become_all_rows(from_end: bool) -> None:
    """Of the indices that count from the end too, if there may be such ones."""

    def made(ids: tf.Tensor, fixed: tf.Tensor, samples: tf.Tensor) -> tf.Tensor:
        different = tf.unique(flat(ids))[0]
        return tf.where(different < 0, different + 9, different) if from_end else different

    program, graph, ref = traced(made)
    builder = Builder(graph)
    values = builder.add("values", "Cast", [ref], SrcT=dtype_attr(INT32), DstT=dtype_attr(FLOAT))
    column = builder.add("column", "Reshape", [values, builder.const([-1, 1], INT32)], T=dtype_attr(FLOAT))
    arguments = {Value(Ref(name)): Ref(name) for name in ("ids", "fixed", "samples", "number", "weight")}
    table = Variable("table", FLOAT, (9, 1), PARAMETER)
    rows = Rows(column, ref)
    sets = row_sets(program, Stage(0, (), graph=graph, arguments=arguments), graph, {table: rows})[table]
    assert sets.own is None and sets.shared is not None and not sets.undecided
    ids = np.array([[1, 3, 3, 8], [2, 3, 1, 5]])
    ids[0, 1:3] -= 9 * from_end  # it is looked up by both of its numbers
    before, after = (computed(graph, ids, *each) for each in (rows, sets.shared))
    dense = [np.bincount(indices, each[:, 0], 9) for each, indices in (before, after)]
    np.testing.assert_array_equal(*dense)
    assert after[1].tolist() == [*range(9)] * (1 + from_end)
