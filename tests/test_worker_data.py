"""Batches read on workers: their order follows from their addresses, whatever was read before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.execution.device_session import DeviceSession
from dapple_tf.execution.worker_data import WorkerData
from dapple_tf.frontend.dataset_graphs import Drawn
from dapple_tf.frontend.on_workers import Address, OnWorkers, Round
from dapple_tf.models.sources import untuned
from graph_passes.ir.program import Layout

Batch = list[int]
Make = Callable[[], tf.data.Dataset]


def numbers(first: int = 0, count: int = 10) -> tf.data.Dataset:
    return tf.data.Dataset.range(first, first + count)


def shuffled(first: int = 0, seed: int = 1, count: int = 10) -> tf.data.Dataset:
    return numbers(first, count).shuffle(10, seed=seed)


def nested(number: tf.Tensor) -> tf.data.Dataset:
    return numbers(count=3).map(lambda n: n + 10 * number).shuffle(3, seed=2)


def read_twice() -> tf.data.Dataset:
    once = shuffled()
    return once.skip(3).concatenate(once.take(3))


def in_a_function() -> tf.data.Dataset:
    once = shuffled()
    return numbers(count=2).flat_map(lambda number: once)


def paired() -> tf.data.Dataset:
    once = shuffled()
    return tf.data.Dataset.zip((once, once)).map(lambda one, other: 100 * one + other)


DATASETS: dict[str, tuple[Make, Drawn]] = {
    "in_order": (numbers, Drawn.NONE),
    "one_order": (lambda: numbers().shuffle(10, seed=1, reshuffle_each_iteration=False).repeat(2), Drawn.NONE),
    "in_functions": (lambda: numbers(count=4).interleave(nested, cycle_length=2), Drawn.NONE),
    "shuffled": (shuffled, Drawn.BEGUN),
    "mapped": (lambda: shuffled().filter(lambda n: n > 2).map(lambda n: 2 * n, num_parallel_calls=2), Drawn.BEGUN),
    "files": (lambda: shuffled(count=4).interleave(nested, cycle_length=2), Drawn.BEGUN),
    "parallel_files": (
        lambda: shuffled(count=4).interleave(nested, cycle_length=2, num_parallel_calls=2, deterministic=True),
        Drawn.BEGUN,
    ),
    "windows": (lambda: shuffled().window(3).flat_map(lambda window: window), Drawn.BEGUN),
    "scan": (lambda: shuffled().scan(np.int64(0), lambda state, n: (state + n, state + n)), Drawn.BEGUN),
    "groups": (
        lambda: shuffled().group_by_window(lambda n: n % 3, lambda key, own: own.batch(4), 5).unbatch(),
        Drawn.BEGUN,
    ),
    "random": (lambda: tf.data.Dataset.random(3, rerandomize_each_iteration=True).take(10), Drawn.BEGUN),
    "zip": (
        lambda: tf.data.Dataset.zip((shuffled(), shuffled())).map(lambda one, other: 100 * one + other),
        Drawn.BEGUN,
    ),
    "cached_before": (lambda: numbers().cache().shuffle(10, seed=1), Drawn.BEGUN),
    "files_and_samples": (
        lambda: shuffled(count=4).interleave(nested, cycle_length=2).shuffle(5, seed=2),
        Drawn.FIRST,
    ),
    "repeated": (lambda: shuffled().repeat(2), Drawn.LATER),
    "cached": (lambda: shuffled().cache(), Drawn.LATER),
    "concatenated": (lambda: shuffled().concatenate(shuffled(100)), Drawn.LATER),
    "mixed": (
        lambda: tf.data.Dataset.sample_from_datasets([shuffled(), shuffled(100).shuffle(3, seed=2)], seed=3),
        Drawn.LATER,
    ),
    "cut": (lambda: shuffled().repeat().take(13), Drawn.LATER),
    "read_twice": (read_twice, Drawn.LATER),
    "read_in_a_function": (in_a_function, Drawn.LATER),
    "paired": (paired, Drawn.BEGUN),
}


def batches(make: Make) -> Make:
    return lambda: untuned(make().batch(4))


class Reading:
    """The data of one worker, in a session of this process."""

    def __init__(self, source: OnWorkers) -> None:
        cluster = dapple.Cluster.local(1, kind="cpu")
        self.source = source
        self.session = DeviceSession(cluster, dapple.FaultPolicy())
        self.data = WorkerData(cluster, self.session, Layout((tuple(cluster.device_names),), 4, 4, 1))

    def read(self, address: Address) -> Batch | None:
        """Reads a batch, and takes it as a step does."""
        if self.data.read(address) is None:
            return None
        number = self.data.prepare(address)
        (reader,) = self.data._readers.values()
        batch = self.session.run(f"{reader.drop}:0", {reader.number: number})
        self.data.taken(address, [reader.host])
        return [int(value) for value in batch]

    def round(self, most: int | None = None, start: int = 0) -> list[Batch]:
        """Reads the next round, to its end or at most some batches of it."""
        taken: list[Batch] = []

        def read(address: Address) -> list[tuple[int, ...]] | None:
            batch = self.read(address)
            if batch is None:
                return None
            taken.append(batch)
            return [(len(batch),)]

        for count, _ in enumerate(Round(self.source, read, start), start=1):
            if count == most:
                break
        return taken


@pytest.fixture
def reading() -> Iterator[Callable[[OnWorkers], Reading]]:
    opened: list[Reading] = []

    def open_(source: OnWorkers) -> Reading:
        opened.append(Reading(source))
        return opened[-1]

    yield open_
    for own in opened:
        own.session.close()


@pytest.mark.parametrize("name", DATASETS)
def test_a_new_reader_goes_on_as_the_one_before(name: str, reading: Callable[[OnWorkers], Reading]) -> None:
    """A run that is resumed, or goes on after a fault, gets the orders of an undisturbed one in later epochs, too.

    Iterators of some datasets draw seeds when they are read: of two shuffles, one within a repetition, before a cache.
    """
    make = batches(DATASETS[name][0])
    plain = make()
    expected = [[batch.numpy().tolist() for batch in plain] for _ in range(4)]
    source = dapple.on_workers(make)
    one = reading(source)
    assert [one.round() for _ in range(2)] == expected[:2]
    assert reading(source).round(start=1) == expected[2][1:]
    assert reading(source).round() == expected[3]


@pytest.mark.parametrize("name", DATASETS)
def test_it_is_known_when_seeds_are_drawn(name: str) -> None:
    """Earlier rounds are read again only as far as that takes."""
    make, drawn = DATASETS[name]
    (part,) = dapple.on_workers(batches(make)).parts(1)
    assert part.drawn is drawn


def test_rounds_that_were_not_read_to_their_ends_are_read_as_far(reading: Callable[[OnWorkers], Reading]) -> None:
    make = batches(lambda: shuffled().repeat(3))
    plain = make()
    for _ in zip(range(2), plain, strict=False):
        pass
    expected = [batch.numpy().tolist() for batch in plain]
    source = dapple.on_workers(make)
    reading(source).round(most=2)
    assert reading(source).round() == expected


def test_a_dataset_that_is_read_twice_is_one_node() -> None:
    once = shuffled()
    (part,) = dapple.on_workers(tf.data.Dataset.zip((once, once)).map(lambda one, other: one).batch(4)).parts(1)
    assert [node.op for node in part.graph.node].count("ShuffleDatasetV3") == 1
