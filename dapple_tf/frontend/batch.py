"""Batches: their structure and shapes, and the check of each batch against earlier ones."""

from __future__ import annotations

import collections
import dataclasses
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.common.keras_private import input_structure
from dapple_tf.errors import DataError, WorkerLostError, reason
from dapple_tf.frontend.on_workers import Address, RemoteArray, address_of

Shape = tuple[int | None, ...]

CANCELLED = tf.errors.AbortedError, tf.errors.CancelledError
"""TensorFlow's errors for devices that waited for one that failed or can't be reached."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Dtype and shape of one array of a batch; None is any length.

    Attributes:
        name: its name in messages.
        dtype: dtype of its elements.
        shape: shape in all batches like this one.
        sizes: shape in one actual batch; None if there is none. Shapes within the model follow from it, so that none
            need be invented. Not compared: batches of other sizes count as equal.
    """

    name: str
    dtype: str
    shape: Shape
    sizes: Shape | None = dataclasses.field(default=None, compare=False, repr=False)

    def accepts(self, shape: Shape) -> bool:
        """Whether an array of this shape fits."""
        return len(shape) == len(self.shape) and all(
            wanted in (None, given) for wanted, given in zip(self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {_shown(self.shape)}"


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The structure, dtypes and shapes of batches.

    Attributes:
        x: structure of the model's inputs with a :class:`Leaf` for each array.
        y: structure of the labels; None if there are none.
        sample_weight: structure of the sample weights; None if there are none.
        uncut: whether batches can't be cut: arrays are empty, or differ in their first axes (nodes and edges).
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    uncut: bool = False

    @functools.cached_property
    def leaves(self) -> list[Leaf]:
        """All arrays in feed order: x, y, sample_weight."""
        return _present((self.x, self.y, self.sample_weight))

    @property
    def sizes(self) -> tuple[Shape, ...]:
        """The shapes of all arrays in one actual batch, None for its samples; empty if there is none."""
        shapes = [leaf.sizes for leaf in self.leaves if leaf.sizes is not None]
        if len(shapes) < len(self.leaves):
            return ()
        return tuple(shape if self.uncut else (None, *shape[1:]) for shape in shapes)

    @functools.cached_property
    def key(self) -> str:
        """A text that is equal for batches of the same structure, dtypes and shapes."""
        return repr((self.x, self.y, self.sample_weight)) + (" uncut" if self.uncut else "")

    def parts(self, samples: int) -> int:
        """Returns the number of parts into which a batch of ``samples`` samples can be cut."""
        return 1 if self.uncut else samples

    def flatten(self, x: Any, y: Any = None, sample_weight: Any = None) -> list[np.ndarray]:
        """Returns the arrays of a batch in feed order.

        Raises:
            DataError: the batch has another structure, dtypes or shapes.
        """
        given = _leaves(x, y, sample_weight)
        if not self.same_structure(given):
            raise DataError(f"this batch has {given}, where {self} is expected")
        for leaf, wanted in zip(given.leaves, self.leaves, strict=True):
            if not wanted.accepts(leaf.shape):
                raise DataError(f"{leaf.name} has shape {_shown(leaf.shape)}, where {_shown(wanted.shape)} is expected")
        return [_as_array(value) for value in _present((x, y, sample_weight))]

    def filled(self, values: Iterable[Any]) -> tuple[Any, Any, Any]:
        """Returns the structures of x, y and sample_weight with these values, in feed order, in place of leaves."""
        rest = iter(values)

        def fill(tree: Any) -> Any:
            return keras.tree.map_structure(lambda leaf: None if leaf is None else next(rest), tree)

        return fill(self.x), fill(self.y), fill(self.sample_weight)

    def plainly_fits(self, x: Any, y: Any, sample_weight: Any) -> bool:
        """Whether a batch of at most one array per part certainly fits; False means unknown.

        Most batches are like that, and like earlier ones, and need no closer check.
        """
        for wanted, given in ((self.x, x), (self.y, y), (self.sample_weight, sample_weight)):
            if wanted is None and given is None:
                continue
            if not isinstance(wanted, Leaf) or type(given) not in (np.ndarray, RemoteArray):
                return False
            if given.dtype.name != wanted.dtype or None in wanted.shape[1:] or given.shape[1:] != wanted.shape[1:]:
                return False
        return True

    def same_structure(self, other: BatchSpec) -> bool:
        """Whether two specs differ in shapes at most, not in structure, dtypes or ranks."""

        def outline(leaf: Leaf | None) -> Any:
            return None if leaf is None else (leaf.dtype, len(leaf.shape))

        ours, theirs = (
            [keras.tree.map_structure(outline, tree) for tree in (spec.x, spec.y, spec.sample_weight)]
            for spec in (self, other)
        )
        return ours == theirs

    def covers(self, other: BatchSpec) -> bool:
        """Whether all batches of another spec fit this one."""
        pairs = zip(self.leaves, other.leaves, strict=False)
        uncut = self.uncut >= other.uncut
        return uncut and self.same_structure(other) and all(own.accepts(given.shape) for own, given in pairs)

    def widened(self, other: BatchSpec) -> BatchSpec:
        """Returns a spec that also covers another of the same structure: axes whose lengths differ become None."""
        wider = [
            dataclasses.replace(
                own, shape=tuple(a if a == b else None for a, b in zip(own.shape, given.shape, strict=True))
            )
            for own, given in zip(self.leaves, other.leaves, strict=True)
        ]
        return BatchSpec(*self.filled(wider), self.uncut or other.uncut)

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves))


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        spec: the spec of this batch and batches like it.
        arrays: its arrays, in feed order: of NumPy, or `RemoteArray`s if they are on workers.
        samples: its number of samples.
    """

    spec: BatchSpec
    arrays: Sequence[Any]
    samples: int

    @property
    def address(self) -> Address | None:
        """Its address on workers; None if it is in this process."""
        return address_of(self.arrays)

    def copied(self) -> Batch:
        """Returns the batch with arrays of its own: the owner of its arrays may fill them with the next one."""
        if self.address is not None:
            return self
        return dataclasses.replace(self, arrays=[np.array(array) for array in self.arrays])


class Batches(Iterator[Batch]):
    """The batches of one pass over the data, each checked against earlier ones.

    Within a pass only the number of samples may change, and the axes that the model or the dataset (by its
    ``element_spec``) leaves open.

    Attributes:
        iterator: the source of the batches: of (x, y, sample_weight) tuples, or x alone.
        spec: the spec that covers the batches so far.
    """

    def __init__(
        self, model: keras.Model, iterator: Iterable[Any], *, known: BatchSpec | None = None, cut: bool = True
    ) -> None:
        """Starts a pass.

        Args:
            model: the model that the batches are for.
            iterator: see above.
            known: spec of an earlier pass, which is used again if the batches fit it.
            cut: whether they are cut into slices, so that all their arrays have one row for each sample.
        """
        self.iterator = iterator
        self.spec = known
        self._model, self._cut = model, cut
        self._items = iter(iterator)
        self._open_axes = _element_shapes(iterator)
        self._count = 0
        self._reader: _Reader | None = None
        self._coming = False  # whether the reader has been asked for the next batch

    def __next__(self) -> Batch:
        """Returns the next batch.

        Raises:
            StopIteration: there is none.
            DataError: it doesn't fit.
        """
        item = self._arrived() if self._coming else self._read()
        if isinstance(item, WorkerLostError) or (isinstance(item, DataError) and isinstance(item.__cause__, CANCELLED)):
            # Only the thread that runs steps goes on after a fault.
            item = self._read()
        if isinstance(item, Exception):
            raise item
        return item

    def prefetch(self) -> None:
        """Reads the next batch in the background; ``next`` then raises its errors.

        Doesn't read ahead if the iterator's position is about to be saved, which would be one batch too far.
        """
        may = getattr(self.iterator, "may_read_ahead", None)
        if not self._coming and (may is None or may()):
            self._reader = self._reader or _Reader()
            self._reader.ask(self._read)
            self._coming = True

    def _arrived(self) -> Batch | Exception:
        assert self._reader is not None
        self._coming = False
        item = self._reader.result()
        if (unmark := getattr(self.iterator, "unmark", None)) is not None:
            unmark()
        return item

    def skip(self) -> bool:
        """Whether the next batch was trained on before a resumption, so that its step is only counted."""
        skip = getattr(self.iterator, "skip", None)
        return skip is not None and bool(skip())

    def _read(self) -> Batch:
        try:
            data = next(self._items)
        except (tf.errors.InvalidArgumentError, tf.errors.UnknownError) as error:
            raise DataError(f"batch {self._count + 1} can't be read: {reason(error)}") from error
        self._count += 1
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(_without_optionals(data))
        known = self.spec is not None and self.spec.plainly_fits(x, y, sample_weight)
        given = self.spec if known else spec_of(self._model, x, y, sample_weight)
        assert given is not None
        # Copies arrays, because their owner may fill them with the next batch while this one is trained on.
        arrays = [np.array(v) if isinstance(v, np.ndarray) else _as_array(v) for v in _present((x, y, sample_weight))]
        samples = _samples(given.leaves, arrays, cut=self._cut)
        if not samples:  # Others aren't like it.
            return Batch(dataclasses.replace(given, uncut=True), arrays, samples)
        if not given.uncut and any(array.shape[0] != samples for array in arrays):
            given, known = dataclasses.replace(spec_of(self._model, x, y, sample_weight), uncut=True), False
        self.spec = given if known else self._fitting(given)
        return Batch(self.spec, arrays, samples)

    def _fitting(self, given: BatchSpec) -> BatchSpec:
        """Returns the spec so far if the batch fits it, else another one at a pass's start or in open axes."""
        if self.spec is None:
            return given
        if self.spec.covers(given):
            return self.spec
        same = self.spec.same_structure(given)
        if self._open_axes is None and same:
            return self.spec.widened(given)
        if self._count == 1:
            return given
        if not same:
            raise DataError(
                f"batch {self._count} has {given}, but the batches before had {self.spec}: feed all batches in the "
                f"same structure, dtypes and ranks"
            )
        self._check_axes(self.spec, given)
        return self.spec.widened(given)

    def _check_axes(self, spec: BatchSpec, given: BatchSpec) -> None:
        shapes = self._open_axes or []
        for index, (known, leaf) in enumerate(zip(spec.leaves, given.leaves, strict=True)):
            may_vary = shapes[index] if index < len(shapes) else leaf.shape
            fits = may_vary is None or all(
                a in (None, b) or c is None for a, b, c in zip(known.shape, leaf.shape, may_vary, strict=True)
            )
            if not fits:
                raise DataError(
                    f"{leaf.name} of batch {self._count} has shape {_shown(leaf.shape)}, but the batches before had "
                    f"{_shown(known.shape)}: leave the axes that vary open (None) in keras.Input or in the dataset's "
                    f"shapes"
                )


class _Reader:
    """A daemon thread that reads batches ahead: reading may take forever, and mustn't keep Python from exiting."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Callable[[], Batch] | None] = queue.SimpleQueue()
        self._items: queue.SimpleQueue[Batch | Exception] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._asked, self._items), name="next-batch", daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def ask(self, read: Callable[[], Batch]) -> None:
        """Begins to read a batch."""
        self._asked.put(read)

    def result(self) -> Batch | Exception:
        """Returns the batch that was asked for, or the error that says why there is none."""
        return self._items.get()


def _serve(asked: queue.SimpleQueue[Callable[[], Batch] | None], items: queue.SimpleQueue[Batch | Exception]) -> None:
    while (read := asked.get()) is not None:
        item: Batch | Exception
        try:
            item = read()
        except StopIteration:
            item = StopIteration()  # The other one holds its frames, and with them the iterator.
        except Exception as error:
            item = error
        items.put(item)
        del read, item  # While it waits, it holds neither the batches nor their reader.


def _samples(leaves: Sequence[Leaf], arrays: Sequence[Any], *, cut: bool) -> int:
    """Returns a batch's number of samples: of rows in its first array, as Keras counts them."""
    if not leaves:
        raise DataError("this batch has no arrays; feed at least one as x")
    counts = {leaf.name: array.shape[0] for leaf, array in zip(leaves, arrays, strict=True)}
    if cut and len(set(counts.values())) > 1:
        text = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise DataError(
            f"the arrays of a batch differ in their number of samples: {text}; a batch that can't be cut into slices "
            f"(a graph, say) takes a plan of one micro-batch and one replica for each stage"
        )
    return int(next(iter(counts.values())))


def spec_of(model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None) -> BatchSpec:
    """Returns the spec of a batch. Axes are open if the model leaves them open, or as long as such an axis in labels.

    An axis of labels that is fixed in the model's outputs isn't open, even if an open axis happens to be as long.

    Raises:
        DataError: an array can't be cut into slices, or x doesn't have the shape that the model declares.
    """
    given = _leaves(x, y, sample_weight)
    declared = _declared_shapes(model, x)
    inputs = getattr(model, "inputs", None) or ()
    takes_strings = not inputs or any(tensor.dtype == "string" for tensor in inputs)
    open_lengths: set[int | None] = set()

    def opened(leaf: Leaf | None) -> Leaf | None:
        if leaf is None:
            return None
        if leaf.dtype == "string" and not takes_strings:
            raise DataError(_not_numbers(leaf.name, leaf.dtype))
        wanted = declared.get(leaf.name)
        if wanted is None or len(wanted) != len(leaf.shape):
            return leaf
        if any(a not in (None, b) for a, b in zip(wanted[1:], leaf.shape[1:], strict=True)):
            raise DataError(
                f"{leaf.name} has shape {_shown(leaf.shape)}, but the model's input has "
                f"{_shown((None, *wanted[1:]))}: feed arrays of that shape"
            )
        open_lengths.update(b for a, b in zip(wanted[1:], leaf.shape[1:], strict=True) if a is None)
        return dataclasses.replace(leaf, shape=(None, *wanted[1:]))

    def alike(leaf: Leaf | None) -> Leaf | None:
        if leaf is None:
            return None
        return dataclasses.replace(leaf, shape=tuple(None if size in open_lengths else size for size in leaf.shape))

    def label(leaf: Leaf | None) -> Leaf | None:
        open_leaf = alike(leaf)
        outputs = [tensor.shape for tensor in getattr(model, "outputs", None) or ()]
        if leaf is None or open_leaf is None:
            return None
        matching = [shape for shape in outputs if len(shape) == len(leaf.shape)]
        fixed = {axis for axis, sizes in enumerate(zip(*matching, strict=True)) if set(sizes) == {leaf.shape[axis]}}
        shape = tuple(leaf.shape[axis] if axis in fixed else size for axis, size in enumerate(open_leaf.shape))
        return dataclasses.replace(open_leaf, shape=shape)

    x_spec = keras.tree.map_structure(opened, given.x)
    return BatchSpec(
        x_spec, keras.tree.map_structure(label, given.y), keras.tree.map_structure(alike, given.sample_weight)
    )


def declared_spec(model: keras.Model) -> BatchSpec | None:
    """Returns the spec that a model declares by its inputs; None if it declares none (a subclassed model)."""
    if not getattr(model, "inputs", None):
        return None
    structure = input_structure(model)
    if structure is None:
        structure = model.inputs[0] if len(model.inputs) == 1 else list(model.inputs)
    leaves = [
        Leaf(name, keras.backend.standardize_dtype(tensor.dtype), (None, *tensor.shape[1:]))
        for name, tensor in _named("x", structure)
    ]
    return BatchSpec(keras.tree.pack_sequence_as(structure, leaves))


def _declared_shapes(model: keras.Model, x: Any) -> dict[str, Shape]:
    """Returns the shapes that a model declares for its inputs, by their names in x."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return {}
    structure = input_structure(model)
    if isinstance(x, Mapping) and not isinstance(structure, Mapping):
        return {f"x[{tensor.name!r}]": tuple(tensor.shape) for tensor in inputs}
    if isinstance(x, Mapping):
        return {name: tuple(tensor.shape) for name, tensor in _named("x", structure)}
    return {name: tuple(tensor.shape) for (name, _), tensor in zip(_named("x", x), inputs, strict=False)}


def _leaves(x: Any, y: Any, sample_weight: Any) -> BatchSpec:
    """Returns the spec of one batch, with its actual lengths."""

    def structure(kind: str, tree: Any) -> Any:
        if tree is None:
            return None
        leaves = [None if value is None else _leaf(name, value) for name, value in _named(kind, tree)]
        return keras.tree.pack_sequence_as(tree, leaves)

    return BatchSpec(structure("x", x), structure("y", y), structure("sample_weight", sample_weight))


def _leaf(name: str, value: Any) -> Leaf:
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise DataError(
            f"{name} is a {type(value).__name__}, which can't be cut into slices; make it dense "
            f"({'to_tensor()' if isinstance(value, tf.RaggedTensor) else 'tf.sparse.to_dense()'})"
        )
    array = value if isinstance(value, (tf.Tensor, np.ndarray, RemoteArray)) else np.asarray(value)
    if array.ndim == 0:
        raise DataError(
            f"{name} is a scalar; each array of a batch needs the batch as its first axis: are the data batched "
            f"(dataset.batch(...))?"
        )
    try:
        dtype = tf.dtypes.as_dtype(array.dtype)
    except TypeError:
        dtype = tf.string
    of_inputs = name == "x" or name.startswith("x[")  # the client computes what a model does with strings
    numbers = dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex
    if not numbers and not (of_inputs and dtype == tf.string):
        raise DataError(_not_numbers(name, array.dtype.name))
    rows, *others = map(int, array.shape)
    return Leaf(name, dtype.name, (None, *others), (rows, *others))


def _not_numbers(name: str, dtype: str) -> str:
    return f"{name} has dtype {dtype}, which can't be fed to the devices; turn it into numbers in the input pipeline"


def _named(kind: str, tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a structure in Keras' order, with names such as ``x['tokens']`` or ``y[0]``."""
    if isinstance(tree, Mapping):
        keys = tree if isinstance(tree, collections.OrderedDict) else sorted(tree)
        return [pair for key in keys for pair in _named(f"{kind}[{key!r}]", tree[key])]
    if isinstance(tree, (list, tuple)):
        return [pair for index, value in enumerate(tree) for pair in _named(f"{kind}[{index}]", value)]
    return [(kind, tree)]


def _as_array(value: Any) -> Any:
    if isinstance(value, RemoteArray):
        return value
    return np.asarray(value.numpy() if isinstance(value, tf.Tensor) else value)


def _present(trees: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(trees) if leaf is not None]


def _without_optionals(data: Any) -> Any:
    """Returns a batch in which absent parts are None; Keras wraps them in Optionals."""
    if isinstance(data, tuple) and all(part is None or type(part) is np.ndarray for part in data):
        return data
    return keras.tree.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)


def _element_shapes(iterator: Any) -> list[Shape | None] | None:
    """Returns the shapes that a dataset's iterator declares, if any, in feed order (None for an unknown rank)."""
    spec = getattr(iterator, "element_spec", None)
    if spec is None:
        return None
    parts = keras.utils.unpack_x_y_sample_weight(spec)
    tensors = [leaf for leaf in _present(parts) if not isinstance(leaf, tf.OptionalSpec)]
    shapes = [getattr(leaf, "shape", tf.TensorShape(None)) for leaf in tensors]
    return [None if shape.rank is None else tuple(shape.as_list()) for shape in shapes]


def _shown(shape: Shape) -> str:
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return f"({sizes},)" if len(shape) == 1 else f"({sizes})"
