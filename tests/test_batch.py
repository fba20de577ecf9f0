"""Specs of batches, and passes over data in which each batch is checked against those before it."""

from __future__ import annotations

import collections
import gc
import re
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.errors import DataError
from dapple_tf.frontend.batch import Batches, BatchSpec, Leaf, declared_spec, spec_of

layers = keras.layers


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype="float32").reshape(shape)


def functional(*shapes: tuple[int | None, ...], names: tuple[str, ...] = ("a", "b")) -> keras.Model:
    """A model with inputs of these shapes, given as a list, or alone."""
    inputs = [keras.Input(shape, name=name) for shape, name in zip(shapes, names, strict=False)]
    outputs = [layers.GlobalAveragePooling1D()(x) if len(x.shape) == 3 else x for x in inputs]
    return keras.Model(inputs if len(inputs) > 1 else inputs[0], outputs)


class Undeclared(keras.Model):
    def call(self, x: Any) -> Any:
        return x


@pytest.fixture(scope="module")
def free() -> keras.Model:
    return Undeclared()


@pytest.fixture(scope="module")
def sequences() -> keras.Model:
    """Takes (batch, any, 3)."""
    return functional((None, 3))


# --- specs


def test_spec_names_every_array_and_keeps_the_structure(free: keras.Model) -> None:
    x = {"tokens": floats(5, 2), "more": (floats(5, 3), floats(5, 1).astype("int32"))}
    spec = spec_of(free, x, floats(5), [None, floats(5)])
    assert str(spec) == (
        "x['more'][0] float32 (?, 3), x['more'][1] int32 (?, 1), x['tokens'] float32 (?, 2), y float32 (?,), "
        "sample_weight[1] float32 (?,)"
    )
    assert spec.x["tokens"] == Leaf("x['tokens']", "float32", (None, 2))
    assert spec.sample_weight[0] is None
    assert spec.key == spec_of(free, x, floats(2), [None, floats(2)]).key
    assert spec.key != spec_of(free, x, floats(2), [floats(2), None]).key


def test_arrays_come_in_the_order_of_the_leaves(free: keras.Model) -> None:
    x = {"b": floats(2, 1), "a": floats(2, 3)}
    spec = spec_of(free, x, tf.constant([1, 2]))
    arrays = spec.flatten(x, tf.constant([1, 2]))
    assert [array.shape for array in arrays] == [(2, 3), (2, 1), (2,)]
    assert all(isinstance(array, np.ndarray) for array in arrays)
    with pytest.raises(
        DataError, match=re.escape("this batch has x float32 (?, 3), where x['a'] float32 (?, 3), x['b']")
    ):
        spec.flatten(floats(2, 3))
    with pytest.raises(DataError, match=re.escape("x['a'] has shape (?, 4), where (?, 3) is expected")):
        spec.flatten({"a": floats(2, 4), "b": floats(2, 1)}, tf.constant([1, 2]))


def test_axes_that_the_model_leaves_open_are_open(sequences: keras.Model) -> None:
    """In labels and weights too, where their length is that of an open axis."""
    spec = spec_of(sequences, floats(2, 5, 3), floats(2, 5), floats(2, 4))
    assert str(spec) == "x float32 (?, ?, 3), y float32 (?, ?), sample_weight float32 (?, 4)"
    assert declared_spec(sequences) == BatchSpec(spec.x)
    assert declared_spec(Undeclared()) is None
    with pytest.raises(DataError, match=re.escape("x has shape (?, 5, 4), but the model's input has (?, ?, 3)")):
        spec_of(sequences, floats(2, 5, 4))


def test_labels_are_as_wide_as_the_output_also_where_the_data_happen_to_be_as_long(sequences: keras.Model) -> None:
    """A batch of sequences of 3 steps, and 3 numbers for each: only the sequences' length may change."""
    spec = spec_of(sequences, floats(2, 3, 3), floats(2, 3))
    assert str(spec) == "x float32 (?, ?, 3), y float32 (?, 3)"


def test_declared_shapes_are_found_by_name() -> None:
    """Inputs of a list may be given as a dict, in another order, with more than the model needs."""
    model = functional((None, 3), (2,), names=("z", "a"))
    given = {"a": floats(4, 2), "z": floats(4, 6, 3), "unused": floats(4, 9)}
    assert str(spec_of(model, given)) == ("x['a'] float32 (?, 2), x['unused'] float32 (?, 9), x['z'] float32 (?, ?, 3)")
    assert str(spec_of(model, [given["z"], given["a"]])) == "x[0] float32 (?, ?, 3), x[1] float32 (?, 2)"
    assert str(declared_spec(model)) == "x[0] float32 (?, ?, 3), x[1] float32 (?, 2)"


def test_specs_cover_and_widen(free: keras.Model) -> None:
    short, long = spec_of(free, floats(2, 3, 4), floats(2)), spec_of(free, floats(2, 5, 4), floats(2))
    assert short.same_structure(long) and not short.covers(long)
    wide = short.widened(long)
    assert str(wide) == "x float32 (?, ?, 4), y float32 (?,)"
    assert wide.covers(short) and wide.covers(long) and not short.covers(wide)
    for other in (
        spec_of(free, floats(2, 3), floats(2)),
        spec_of(free, floats(2, 3, 4)),
        spec_of(free, [floats(2, 3, 4)], floats(2)),
        spec_of(free, floats(2, 3, 4), floats(2).astype("int32")),
    ):
        assert not short.same_structure(other) and not short.covers(other)


# --- passes


def test_datasets_say_which_axes_vary(free: keras.Model) -> None:
    def dataset(shape: list[int | None], *lengths: int) -> Any:
        spec = tf.TensorSpec(shape, tf.float32)
        return iter(tf.data.Dataset.from_generator(lambda: (floats(2, n, 4) for n in lengths), output_signature=spec))

    batches = Batches(free, dataset([None, None, 4], 3, 5, 3))
    assert [str(batch.spec) for batch in batches] == ["x float32 (?, 3, 4)"] + 2 * ["x float32 (?, ?, 4)"]
    known = batches.spec
    # The next pass over such data knows from its first batch on; data that don't vary are what they are.
    assert next(Batches(free, dataset([None, None, 4], 3), known=known)).spec is known
    fixed = spec_of(free, floats(2, 9, 4))
    assert str(next(Batches(free, dataset([None, 3, 4], 3), known=fixed)).spec) == "x float32 (?, 3, 4)"
    unknown = Batches(free, iter(tf.data.Dataset.from_tensors(floats(2, 3, 4)).map(_forget_shape)))
    assert next(unknown).samples == 2


def _forget_shape(x: Any) -> Any:
    return tf.numpy_function(lambda array: array, [x], tf.float32)


class Claims(list[Any]):
    """Batches whose shapes aren't what they claim."""

    element_spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None]))


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ((floats(2, 4), floats(2)), "x of batch 2 has shape (?, 4), but the batches before had (?, 3): leave the axes"),
        (
            (floats(2, 3).astype("float64"), floats(2)),
            "batch 2 has x float64 (?, 3), y float32 (?,), but the batches before had x float32 (?, 3), y float32 (?,)",
        ),
        ((floats(2, 3),), "batch 2 has x float32 (?, 3), but the batches before had x float32 (?, 3), y"),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_batches_that_change_are_refused(free: keras.Model, second: Any, text: str) -> None:
    batches = Batches(free, Claims([(floats(2, 3), floats(2)), second]))
    next(batches)
    with pytest.raises(DataError, match=re.escape(text)):
        next(batches)


def test_absent_parts(free: keras.Model) -> None:
    empty = tf.experimental.Optional.empty(None)
    batch = next(Batches(free, [(floats(2, 3), empty, floats(2))]))
    assert str(batch.spec) == "x float32 (?, 3), sample_weight float32 (?,)"
    assert batch.spec.y is None
    with pytest.raises(DataError, match="this batch has no arrays; feed at least one as x"):
        next(Batches(free, [(None, None)]))


def test_names_of_an_ordered_dict_go_with_its_arrays() -> None:
    """Keras sorts the names of a dict, and keeps the order of an ``OrderedDict``."""
    inputs = {name: keras.Input((size,), name=name) for name, size in (("a", 2), ("b", 3))}
    model = keras.Model(inputs, inputs)
    spec = spec_of(model, collections.OrderedDict([("b", floats(4, 3)), ("a", floats(4, 2))]))
    assert {name: (leaf.name, leaf.shape) for name, leaf in spec.x.items()} == {
        "a": ("x['a']", (None, 2)),
        "b": ("x['b']", (None, 3)),
    }


# ---- The next batch is read while a step runs: not too early, not too many, and mistakes are told in their turn


def small_model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    model.compile("sgd", "mse")
    return model


def pair(samples: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((samples, 2), "float32"), np.zeros((samples, 1), "float32")


def test_one_thread_reads_all_batches_of_a_pass_once_and_ends_with_it() -> None:
    """Each batch had a thread of its own, whose start took longer than reading a small batch."""
    readers = []

    def items() -> Iterator[Any]:
        for _ in range(4):
            readers.append(threading.current_thread())
            yield pair()

    batches = Batches(small_model(), items())
    next(batches)
    for _ in range(2):
        batches.prefetch()
        batches.prefetch()  # One is under way already.
        next(batches)
    assert [batch.samples for batch in batches] == [4]
    here = threading.current_thread()
    reader = readers[1]
    assert readers == [here, reader, reader, here] and reader is not here
    del batches
    gc.collect()
    reader.join(timeout=60)
    assert not reader.is_alive()


def test_an_array_that_is_filled_again_and_again() -> None:
    x, y = pair()

    def items() -> Iterator[Any]:
        for number in range(3):
            x.fill(number)
            yield x, y

    batches = Batches(small_model(), items())
    first = next(batches)
    batches.prefetch()
    second = next(batches)
    assert [float(batch.arrays[0][0, 0]) for batch in (first, second)] == [0, 1]


def test_the_end_of_the_data_and_mistakes_are_told_when_the_batch_is_asked_for() -> None:
    def breaks() -> Iterator[Any]:
        yield pair()
        raise RuntimeError("the disk is gone")

    wrong = iter([pair(), (pair()[0], pair(3)[1])])
    cases: list[tuple[Iterator[Any], type[Exception], str]] = [
        (wrong, DataError, "x has 4, y has 3"),
        (iter([pair()]), StopIteration, ""),
        (breaks(), RuntimeError, "the disk is gone"),
    ]
    for items, error, text in cases:
        batches = Batches(small_model(), items)
        next(batches)
        batches.prefetch()
        with pytest.raises(error, match=text or None):
            next(batches)


def test_no_more_is_read_than_the_steps_of_an_epoch() -> None:
    given = []

    class Data(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            given.append(index)
            return pair()

    model = small_model()
    pipelined = dapple.transform(model, dapple.Cluster.local(1, kind="cpu"), dapple.Plan.data_parallel(1, 4))
    ahead = []

    class Told(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            coming = [batches._coming for batches in pipelined._passes.values()]
            ahead.append(coming)

    pipelined.fit(Data(), epochs=2, steps_per_epoch=3, verbose=0, callbacks=[Told()])
    assert ahead == [[True], [True], [False]] * 2
    pipelined.train_on_batch(*pair())
    pipelined.close()
