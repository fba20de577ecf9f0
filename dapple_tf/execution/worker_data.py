"""Batches that workers read themselves: iterators on workers' CPUs, and the memory in which batches wait for a step.

    session.run: next(iterator) ─▶ kept under a number     on each worker that reads, while the step before runs
    session.run: the step takes the batch of that number

So the end of the data, a batch's size and errors of the input pipeline are known before a step begins.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.describe.cluster import Cluster
from dapple_tf.errors import DataError, reason
from dapple_tf.execution.device_session import DeviceSession
from dapple_tf.frontend.on_workers import Address, Drawn, OnWorkers, Part, Shape
from graph_passes.ir.batching import Interval
from graph_passes.ir.graph import GraphDef, copied
from graph_passes.ir.kernels import host_of
from graph_passes.ir.program import Layout, TakenBatch
from graph_passes.passes.place_data import joined

logger = logging.getLogger(__name__)

_ALL = 2**31
"""More batches than a round has; datasets multiply it by the sizes of batches."""
_NEEDED = {Drawn.NONE: 0, Drawn.BEGUN: 0, Drawn.FIRST: 1, Drawn.LATER: _ALL}
"""Batches of a round to read until it has drawn its seeds."""


def hosts_of(cluster: Cluster) -> dict[str, str]:
    """Returns device -> the CPU of its worker, on which its batches are read and cut; these CPUs are among them."""
    hosts = {name: host_of(name) for name in cluster.device_names}
    return hosts | {host: host for host in hosts.values()}


def area_of(dtypes: Iterable[str]) -> str:
    """Returns the name of the memory on each worker in which batches of these dtypes wait for their steps."""
    return "_".join(("batches", *dtypes))


@dataclasses.dataclass
class _Reader:
    """One worker's iterator of one dataset, which nodes of the session's graph move.

        keep       makes the dataset, from which all rounds read
        begin      begins a round, and leaves out as many batches as skip:0 is fed
        lengths:0  reads the next batch, and keeps it under the number that number:0 is fed: the lengths of its axes,
                   array by array; -1 alone, and nothing is kept, if the round has ended
        drop       removes the batch of that number
        advance    reads the next batch, if there is one, and keeps nothing

    Attributes:
        host: CPU of the worker.
        name: the name before those of the nodes.
        drawn: when a round of the dataset has drawn its seeds.
        rounds: number of rounds begun.
        next: number of the batch that is read next; None if that isn't known.
    """

    host: str
    name: str
    drawn: Drawn
    rounds: int = 0
    next: int | None = None

    def at(self, node: str) -> str:
        """Returns a node's name in the session's graph."""
        return f"{self.name}/{node}"


@dataclasses.dataclass
class _WaitingBatch:
    """A batch that waits for its step.

    Attributes:
        number: the number under which workers keep it.
        shapes: the shapes of its arrays.
        hosts: CPUs of the workers that have it.
    """

    number: int
    shapes: tuple[Shape, ...]
    hosts: set[str]


class WorkerData:
    """Reads batches on the workers of a session; one thread may read ahead while another one runs steps."""

    def __init__(self, cluster: Cluster, session: DeviceSession, layout: Layout) -> None:
        """Starts without having read anything.

        Args:
            cluster: the devices.
            session: the session on them.
            layout: how a full batch is cut. The workers of the first stage read inputs in any step; they read the first
                batch, before there is one.
        """
        self._cluster, self._session = cluster, session
        hosts = hosts_of(cluster)
        self._hosts = tuple(dict.fromkeys(hosts.values()))
        samples: dict[str, list[Interval]] = {}
        for micro_batch in range(len(layout.micro_batch_intervals)):
            for device, interval in zip(layout.devices[0], layout.slices(0, micro_batch), strict=True):
                samples.setdefault(hosts[device], []).append(interval)
        self._part_of = {host: joined(own) for host, own in samples.items()}  # CPU of a worker -> samples that it reads
        self._parts = sorted(set(self._part_of.values()))
        self._lock = session.reading
        self._numbers = itertools.count()
        self._generation = -1  # of the session in which the following exist
        self._readers: dict[tuple[OnWorkers, str], _Reader] = {}
        self._waiting: dict[Address, _WaitingBatch] = {}
        self._wanted: dict[OnWorkers, tuple[str, ...]] = {}  # CPUs of the workers that are known to read

    @property
    def groups(self) -> int:
        """Number of groups of workers that read the same samples."""
        return len(self._parts)

    # ---- for the runtime

    def follow(self, session: DeviceSession) -> None:
        """Reads in another session from now on, which has the same lock and none of the batches that wait."""
        with self._lock:
            self._session, self._generation = session, -1

    def read(self, address: Address) -> tuple[Shape, ...] | None:
        """Has all workers that read these data read a batch, while steps may run.

        Returns:
            The shapes of its arrays; None if the round has ended before.

        Raises:
            DataError: a worker can't read it, or workers have read different batches.
            WorkerLostError: a worker was lost.
        """
        with self._lock:
            self._follow()
            hosts = self._wanted.setdefault(address.source, self._first(address.source))
            batch = self._waiting.get(address)
            if batch is None:
                self._drop_earlier(address)
                batch = self._waiting[address] = _WaitingBatch(next(self._numbers), (), set())
            if not self._fill(address, batch, hosts):
                del self._waiting[address]
                return None
            return batch.shapes

    def prepare(self, address: Address, taken: TakenBatch | None = None) -> int:
        """Has the workers of a step have its batch; returns the number under which they keep it.

        Args:
            address: the batch.
            taken: how the step takes it; None for workers that are known so far.

        Raises:
            DataError: see `read`; or the workers of several stages read the batch in different parts.
            WorkerLostError: a worker was lost.
        """
        hosts = () if taken is None else tuple(taken.arrays)
        batch, wanted = self._waiting.get(address), self._wanted.get(address.source, ())
        if (
            batch is not None
            and self._generation == self._session.generation
            and batch.hosts.issuperset(hosts or wanted)
        ):
            return batch.number  # without waiting for the batch after it, which is being read
        with self._lock:
            self._follow()
            if taken is not None:
                self._check_parts(taken)
            known = self._wanted.get(address.source, ()) or self._first(address.source)
            self._wanted[address.source] = tuple(dict.fromkeys((*known, *hosts)))
            if self.read(address) is None:
                raise DataError(
                    f"batch {address.number + 1} of round {address.round + 1} isn't there when it is read again: the "
                    f"dataset has changed, or differs between workers"
                )
            return self._waiting[address].number

    def taken(self, address: Address, hosts: Collection[str]) -> None:
        """Notes that a step has taken a batch from the workers with these CPUs."""
        batch = self._waiting.pop(address, None)
        if batch is not None and (left := batch.hosts.difference(hosts)):
            self._drop(address.source, batch.number, left)  # Those workers have no samples of a small batch.

    def forget(self, address: Address) -> None:
        """Notes that it isn't known who has taken a batch: its step has failed."""
        self._waiting.pop(address, None)

    def _first(self, source: OnWorkers) -> tuple[str, ...]:
        """Returns CPUs of workers that together read whole batches in any step."""
        if not source.in_parts:
            return tuple(self._part_of)[:1]
        return tuple({part: host for host, part in reversed(self._part_of.items())}.values())

    def _check_parts(self, taken: TakenBatch) -> None:
        """Checks that all workers of a step read one of the parts into which the first stage's workers cut a batch."""
        for host, part in taken.parts.items():
            if part not in self._parts:
                raise DataError(
                    f"worker {self._hosts.index(host)} needs samples {_samples(part)} of each batch, but the first "
                    f"stage's workers read {' and '.join(map(_samples, self._parts))}: for data in parts, stages "
                    f"that read them need as many replicas, side by side on as many workers; leave out in_parts"
                )
            self._part_of[host] = part

    # ---- reading

    def _follow(self) -> None:
        """Forgets what went with an earlier session."""
        if self._generation != self._session.generation:
            self._readers.clear()
            self._waiting.clear()
            self._generation = self._session.generation

    def _fill(self, address: Address, batch: _WaitingBatch, hosts: Sequence[str]) -> bool:
        """Has workers read a batch that don't have it; returns False if the round has ended before."""
        if not self._agree(address, [host for host in hosts if host not in batch.hosts]):
            self._start_over(address.source)
        readers = [self._reader(address, host) for host in hosts if host not in batch.hosts]
        if not readers:
            return True
        for reader in readers:
            reader.next = None  # as long as it isn't known that all have read
        numbers = {reader.at("number:0"): batch.number for reader in readers}
        try:
            lengths = self._session.run([reader.at("lengths:0") for reader in readers], numbers)
        except tf.errors.OpError as error:
            raise self._explained(error, address, readers) from error
        ended = [reader.host for reader, own in zip(readers, lengths, strict=True) if own[0] < 0]
        if ended:
            others = batch.hosts.union(reader.host for reader in readers).difference(ended)
            if others and not address.source.in_parts:
                raise DataError(
                    f"worker {self._hosts.index(ended[0])} has no batch {address.number + 1}, which worker "
                    f"{min(map(self._hosts.index, others))} has: the data differ between workers"
                )
            self._drop(address.source, batch.number, others)
            return False
        for reader, own in zip(readers, lengths, strict=True):
            reader.next = address.number + 1
            shapes = self._whole(_shapes(own, address.source), reader.host, address)
            if batch.shapes and shapes != batch.shapes:
                raise DataError(
                    f"the arrays of batch {address.number + 1} have shapes {_shown(shapes)} on worker "
                    f"{self._hosts.index(reader.host)}, but {_shown(batch.shapes)} on others: the data differ between "
                    f"workers"
                )
            batch.shapes = shapes
            batch.hosts.add(reader.host)
        return True

    def _whole(self, shapes: tuple[Shape, ...], host: str, address: Address) -> tuple[Shape, ...]:
        """Returns the shapes of a whole batch's arrays, from a worker's part."""
        if not address.source.in_parts:
            return shapes
        part = self._part_of[host]
        wanted, batch = sum(interval.size for interval in part), sum(i.size for part in self._parts for i in part)
        for shape in shapes:
            if shape[0] != wanted:
                raise DataError(
                    f"part {self._parts.index(part)} of batch {address.number + 1} has {shape[0]} samples on worker "
                    f"{self._hosts.index(host)}, whose devices take {wanted} of each {batch}: let the dataset give "
                    f"batches of {wanted}, batch({wanted}, drop_remainder=True)"
                )
        return tuple((batch, *shape[1:]) for shape in shapes)

    def _reader(self, address: Address, host: str) -> _Reader:
        """Returns a worker's iterator, which is right before a batch.

        A dataset draws other random numbers for each round, so that those of the rounds before have been drawn, too.
        """
        reader = self._readers.get((address.source, host))
        if reader is not None and _is_before(reader, address):
            return reader
        try:
            if reader is None or reader.rounds > address.round:
                reader = self._add_reader(address.source, host)
                self._session.run([reader.at("keep")])
                self._readers[address.source, host] = reader
            while reader.rounds < address.round:
                self._repeat(reader, address.source.rounds[reader.rounds])
                reader.rounds += 1
            self._session.run([reader.at("begin")], {reader.at("skip:0"): address.number})
            reader.rounds += 1
        except tf.errors.OpError as error:
            self._readers.pop((address.source, host), None)  # It may have begun a round.
            raise self._explained(error, address, [reader] if reader else []) from error
        reader.next = address.number
        return reader

    def _repeat(self, reader: _Reader, length: int | None) -> None:
        """Has an earlier round, of which ``length`` batches were read, draw the seeds that it drew then."""
        count = min(_NEEDED[reader.drawn], _ALL if length is None else length)
        if count > 1:
            logger.info("worker %d reads round %d again", self._hosts.index(reader.host), reader.rounds + 1)
        self._session.run([reader.at("begin")], {reader.at("skip:0"): max(0, count - 1)})
        if count:
            self._session.run([reader.at("advance")])

    def _agree(self, address: Address, hosts: Sequence[str]) -> bool:
        """Whether workers that read a batch have drawn the same seeds when these have read the rounds before again.

        How many seeds were drawn in a round that wasn't read to its end, by who read ahead in it, isn't known.
        """
        readers = {host: reader for (source, host), reader in self._readers.items() if source is address.source}
        again = [host for host in hosts if host not in readers or not _is_before(readers[host], address)]
        others = [reader for host, reader in readers.items() if host not in again and reader.drawn is Drawn.LATER]
        return not (others and again and any(address.source.rounds[: address.round]))

    def _start_over(self, source: OnWorkers) -> None:
        """Has all workers read data anew, from the first round on."""
        for address, batch in self._waiting.items():
            if address.source is source and batch.hosts:
                self._drop(source, batch.number, batch.hosts)
                batch.hosts.clear()
        self._readers = {key: reader for key, reader in self._readers.items() if key[0] is not source}

    def _explained(self, error: tf.errors.OpError, address: Address, readers: Sequence[_Reader]) -> DataError:
        return DataError(
            f"worker {self._worker(error, readers)} can't read batch {address.number + 1} of round "
            f"{address.round + 1}: {reason(error)}"
        )

    def _worker(self, error: tf.errors.OpError, readers: Sequence[_Reader]) -> str:
        """Returns the number of the worker whose node failed, as far as TensorFlow says."""
        failed = None if error.op is None else error.op.device
        hosts = [reader.host for reader in readers]
        return " or ".join(str(self._hosts.index(host)) for host in hosts if failed == host or failed not in hosts)

    # ---- batches that no step has taken

    def _drop_earlier(self, address: Address) -> None:
        """Removes batches of the data's earlier rounds, which nobody will ask for."""
        for other, batch in list(self._waiting.items()):
            if other.source is address.source and other.round < address.round:
                del self._waiting[other]
                self._drop(other.source, batch.number, batch.hosts)

    def _drop(self, source: OnWorkers, number: int, hosts: Collection[str]) -> None:
        readers = [self._readers[source, host] for host in hosts]
        self._session.run(
            [reader.at("drop") for reader in readers], {reader.at("number:0"): number for reader in readers}
        )

    # ---- graphs

    def _add_reader(self, source: OnWorkers, host: str) -> _Reader:
        """Adds the nodes by which a worker reads to the session's graph, with a dataset of their own."""
        name = f"data{next(self._numbers)}"
        parts = source.parts(self.groups)
        part = parts[self._parts.index(self._part_of[host]) if source.in_parts else 0]
        self._session.add(_reading(part, host, self._cluster.host_device, name), name)
        return _Reader(host, name, part.drawn)


def _is_before(reader: _Reader, address: Address) -> bool:
    return (reader.rounds, reader.next) == (address.round + 1, address.number)


def _reading(part: Part, host: str, client: str, name: str) -> GraphDef:
    """Returns the graph by which a worker reads; the nodes of `_Reader`, and their inputs."""
    dtypes, shapes = [spec.dtype for spec in part.specs], [spec.shape for spec in part.specs]
    raw = tf.raw_ops
    with tf.Graph().as_default() as graph:
        with tf.device(client):
            skip = tf.compat.v1.placeholder(tf.int64, [], name="skip")
            number = tf.compat.v1.placeholder(tf.int64, [], name="number")
        with tf.device(host):
            (made,) = tf.graph_util.import_graph_def(
                _renamed_resources(part.graph, name), return_elements=[part.output], name="dataset"
            )
            dataset = {"key": tf.constant(0, tf.int64), "indices": [0], "dtypes": [tf.variant], "shared_name": name}
            raw.MapStage(values=[made], name="keep", **dataset)
            element = {"output_types": dtypes, "output_shapes": shapes}
            (made_once,) = raw.MapPeek(**dataset)
            rest = raw.SkipDataset(input_dataset=made_once, count=skip, **element)
            iterator = raw.IteratorV2(shared_name=name, container="", **element)
            raw.MakeIterator(dataset=rest, iterator=iterator, name="begin")
            batch = raw.IteratorGetNextAsOptional(iterator=iterator, **element, name="advance")
            fed_dtypes = [dtypes[index] for index in part.order]
            area = area_of(dtype.name for dtype in fed_dtypes)
            memory = {"indices": list(range(len(fed_dtypes))), "dtypes": fed_dtypes, "shared_name": area}

            def keep() -> tf.Tensor:
                components = raw.OptionalGetValue(optional=batch, **element)
                arrays = [components[index] for index in part.order]
                with tf.control_dependencies([raw.MapStage(key=number, values=arrays, **memory)]):
                    return tf.concat([tf.shape(array, tf.int64) for array in arrays], 0)

            there = raw.OptionalHasValue(optional=batch)
            lengths = tf.cond(there, keep, lambda: tf.constant([-1], tf.int64))
            tf.identity(lengths, name="lengths")
            raw.MapUnstage(key=number, name="drop", **memory)
    return graph.as_graph_def()


def _renamed_resources(graph: GraphDef, name: str) -> GraphDef:
    """Returns the graph of a dataset whose state (seeds of its rounds, caches) no other reader has."""
    renamed = copied(graph)
    for node in renamed.node:
        for handle in node.attr["value"].tensor.resource_handle_val if node.op == "Const" else ():
            handle.name = f"{handle.name}/{name}"
    return renamed


def _shapes(lengths: np.ndarray, source: OnWorkers) -> tuple[Shape, ...]:
    """Returns the shapes of a batch's arrays from the lengths of all their axes."""
    ends = np.cumsum([spec.shape.rank for spec in keras.tree.flatten(source.element_spec)])
    return tuple(tuple(int(length) for length in own) for own in np.split(lengths, ends[:-1]))


def _samples(part: Sequence[Interval]) -> str:
    return ", ".join(f"{start} to {stop - 1}" for start, stop in part)


def _shown(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes))
