"""Snapshots of the devices' variables: taken between two steps, and written by the servers while later steps run.

Each of the devices' servers writes and reads its part of a checkpoint by a graph on its CPU, straight to and from
files; the client only says where the files are.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf
from tensorflow.core.framework import types_pb2

from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.errors import reason
from dapple_tf.variables.device_values import Holding, read_shards
from dapple_tf.variables.stored_values import Session
from graph_passes.ir.graph import AttrValue, Builder, Ref, dtype_attr, dtypes_attr
from graph_passes.ir.kernels import host_of
from graph_passes.ir.outline import FunctionDef, call_node, placeholder
from graph_passes.ir.program import Variable
from graph_passes.ir.storage import assign_function, merge_library, read_function
from graph_passes.ir.tensorflow_bridge import dtype_size, empty_graph

_STRING = types_pb2.DT_STRING


class Snapshot:
    """A snapshot in the servers' memory.

    Attributes:
        shards: shard -> the names of its variables in files.
        writers: shard -> the server that writes it.
    """

    def __init__(self, graph: _SnapshotGraph, session: Session, release: Callable[[], None]) -> None:
        """Describes a snapshot that has been taken."""
        self.shards, self.writers = graph.shards, graph.writers
        self._graph, self._session, self._release = graph, session, release

    def write(self, place: pathlib.Path) -> None:
        """Has the servers write it; may be called in any thread.

        Args:
            place: the directory to write to.

        Raises:
            CheckpointError: a server failed; the text has its reason.
        """
        prefix = self._graph.name
        feed = {f"{prefix}/{node}:0": str(place / shard) for shard, node in self._graph.prefixes.items()}
        try:
            self._session.run([f"{prefix}/{node}" for node in self._graph.write], feed)
        except tf.errors.OpError as error:
            raise CheckpointError(f"the servers can't write to {place}: {reason(error)}") from error
        finally:
            self._release()


class Snapshots:
    """Takes snapshots of a session's variables, one at a time, and restores variables from files."""

    def __init__(self, holdings: Callable[[], Sequence[Holding]], session: Session) -> None:
        """See `StoredValues`."""
        self._holdings, self._session = holdings, session
        self._busy = threading.Lock()  # from when a snapshot is taken until it has been written
        self._graph: tuple[dict[str, str], _SnapshotGraph] | None = None
        self._restoring: tuple[dict[str, tuple[str, str]], _RestoreGraph] | None = None
        self._restorations = 0
        self._arrangements = 0

    def rearrange(self) -> None:
        """Discards the graphs when the holdings have changed, once the last snapshot has been written."""
        self.wait()
        self._graph = self._restoring = None
        self._arrangements += 1

    def take(self, keys: Mapping[str, str]) -> Snapshot:
        """Takes a snapshot, once the previous one has been written.

        Args:
            keys: variable -> its name in files.
        """
        if self._graph is None:
            graph = _SnapshotGraph(f"snapshot{self._arrangements}", self._holdings(), keys)
            self._session.add(graph.graph, graph.name)
            self._graph = (dict(keys), graph)
        known, graph = self._graph
        assert known == keys, "the same variables have other names"
        self._busy.acquire()
        try:
            self._session.run([f"{graph.name}/{node}" for node in graph.take])
        except BaseException:
            self._busy.release()
            raise
        return Snapshot(graph, self._session, self._busy.release)

    def restore(self, path: pathlib.Path, located: Mapping[str, tuple[str, str]]) -> None:
        """Has the servers read variables from files, which are unchanged after an error.

        Args:
            path: directory of the files.
            located: variable -> (name of its tensor bundle there, its name in it). Others stay as they are.

        Raises:
            CheckpointError: a file is damaged, or a server can't read it.
        """
        if self._restoring is None or self._restoring[0] != located:
            self._restorations += 1
            made = _RestoreGraph(f"restore{self._restorations}", self._holdings(), located)
            self._session.add(made.graph, made.name)
            self._restoring = (dict(located), made)
        _, graph = self._restoring
        feed = {f"{graph.name}/{node}:0": str(path / shard) for shard, node in graph.prefixes.items()}
        try:
            self._session.run([f"{graph.name}/{node}" for node in graph.nodes], feed)
        except tf.errors.OpError as error:
            fault = "is damaged" if isinstance(error, tf.errors.DataLossError) else "can't be read by the servers"
            raise CheckpointError(f"checkpoint {path} {fault}: {reason(error)}") from error

    def wait(self) -> None:
        """Waits until no snapshot is left to write."""
        with self._busy:
            pass


# ---- graphs


class _SnapshotGraph:
    """Nodes that take a snapshot of all variables, and nodes that write it to files.

    A snapshot is a list of tensors in the server's memory (a staging area), not a copy: reading a variable gives its
    buffer, and TensorFlow's updates, even in-place ones, don't overwrite a buffer that someone else holds. On CPUs a
    snapshot thus costs no time, and memory only for variables that are updated before they are written; from GPUs,
    variables are copied to their server's memory. Shards of variables are joined in the memory of
    the server that writes them, so that files don't tell that there were any.

    Attributes:
        name: the graph's name within the session's graph; the prefix of its functions' names.
        graph: the nodes.
        take: nodes that take the snapshot, and drop an earlier unwritten one.
        write: nodes that write the snapshot and drop it.
        prefixes: shard -> placeholder of the path of its files.
        writers: shard -> server that writes it.
        shards: shard -> the names of its variables in files.
    """

    def __init__(self, name: str, holdings: Sequence[Holding], keys: Mapping[str, str]) -> None:
        """Assigns each variable to its keeper with least to write.

        Args:
            name: see above.
            holdings: what devices keep.
            keys: variable -> its name in files. Other variables aren't written.
        """
        self.name, self.graph = name, empty_graph()
        self.take: list[str] = []
        self.write: list[str] = []
        self.prefixes: dict[str, str] = {}
        self.writers: dict[str, str] = {}
        self.shards: dict[str, tuple[str, ...]] = {}
        builder = Builder(self.graph)
        functions: list[FunctionDef] = []
        for number, (host, devices) in enumerate(_shared_out(holdings, keys).items()):
            shard = f"shard-{number}"
            values: list[Ref] = []
            variables: list[Variable] = []
            for index, (places, own) in enumerate(devices.items()):
                if len(places) > 1:
                    joined, called = read_shards(builder, f"{name}_{shard}_read{index}", places, own, host)
                    values += joined
                    functions += called
                else:
                    read = read_function(f"{name}_{shard}_read{index}", own)
                    functions.append(read)
                    node = builder.append(call_node(f"{shard}/read{index}", read, [], device=places[0])).node
                    values += [Ref(node, output) for output in range(len(own))]
                variables += own
            dtypes = dtypes_attr([variable.dtype for variable in variables])
            area = {"dtypes": dtypes, "shared_name": f"dapple_{name}_{shard}", "capacity": 0, "memory_limit": 0}
            clear = builder.add(f"{shard}/clear", "StageClear", device=host, **area)
            self.take.append(
                builder.add(f"{shard}/take", "Stage", values, control=[clear.node], device=host, **area).node
            )
            staged = builder.add(f"{shard}/taken", "Unstage", device=host, **area)
            place = builder.append(placeholder(f"{shard}/prefix", _STRING))
            self.shards[shard] = tuple(keys[variable.name] for variable in variables)
            inputs = [
                place,
                _strings(builder, f"{shard}/keys", self.shards[shard], host),
                _strings(builder, f"{shard}/slices", [""] * len(variables), host),
                *(Ref(staged.node, output) for output in range(len(variables))),
            ]
            self.write.append(builder.add(f"{shard}/write", "SaveV2", inputs, device=host, dtypes=dtypes).node)
            self.prefixes[shard], self.writers[shard] = place.node, host
        merge_library(self.graph, functions)


def _shared_out(
    holdings: Sequence[Holding], keys: Mapping[str, str]
) -> dict[str, dict[tuple[str, ...], list[Variable]]]:
    """Returns server -> device, or all devices with shards -> the variables that the server writes and reads there."""
    kept: dict[str, tuple[Variable, tuple[str, ...]]] = {}
    for holding in holdings:
        for variable in holding.variables:
            if variable.name in keys:
                kept.setdefault(variable.name, (variable, holding.devices))  # Counters are equal in all groups.
    shares: dict[str, dict[tuple[str, ...], list[Variable]]] = {}
    load = {host_of(device): 0 for _, devices in kept.values() for device in devices}
    for variable, devices in sorted(kept.values(), key=lambda item: _bytes(item[0]), reverse=True):
        device = min(devices, key=lambda name: load[host_of(name)])
        load[host_of(device)] += _bytes(variable)
        places = (device,) if variable.shards == 1 else devices
        shares.setdefault(host_of(device), {}).setdefault(places, []).append(variable)
    return {host: shares[host] for host in load if host in shares}


def _bytes(variable: Variable) -> int:
    size = dtype_size(variable.dtype)
    for length in variable.shape:
        size *= length
    return size


class _RestoreGraph:
    """Nodes that read variables from files and assign them on every device that keeps them.

    Each server reads what its own devices need. Nothing is assigned before all servers have read everything, so a
    damaged file leaves the variables unchanged.

    Attributes:
        name: name of the graph.
        graph: the nodes.
        nodes: the nodes to run.
        prefixes: shard -> placeholder of the path of its files.
    """

    def __init__(self, name: str, holdings: Sequence[Holding], located: Mapping[str, tuple[str, str]]) -> None:
        """Makes the nodes.

        Args:
            name: name of the graph, and prefix of its functions' names.
            holdings: what devices keep.
            located: variable -> (shard, its name there). Other variables stay unchanged.
        """
        self.name = name
        self.graph = empty_graph()
        self.prefixes: dict[str, str] = {}
        builder = Builder(self.graph)
        for shard in sorted({shard for shard, _ in located.values()}):
            self.prefixes[shard] = builder.append(placeholder(f"{shard}/prefix", _STRING)).node
        read: dict[tuple[str, str], Ref] = {}  # (server, variable) -> its value there
        needed: dict[str, dict[str, dict[str, Variable]]] = {}
        for holding in holdings:
            for server in dict.fromkeys(map(host_of, holding.devices)):
                for variable in holding.variables:
                    if variable.name in located:
                        shard = located[variable.name][0]
                        needed.setdefault(server, {}).setdefault(shard, {})[variable.name] = variable
        reads: list[str] = []
        for index, (server, shards) in enumerate(needed.items()):
            for shard, variables in shards.items():
                inputs = [
                    Ref(self.prefixes[shard]),
                    _strings(builder, f"server{index}/keys", [located[name][1] for name in variables], server),
                    _strings(builder, f"server{index}/slices", [""] * len(variables), server),
                ]
                dtypes = dtypes_attr([variable.dtype for variable in variables.values()])
                node = builder.add(f"server{index}/{shard}", "RestoreV2", inputs, device=server, dtypes=dtypes).node
                reads.append(node)
                read |= {(server, name): Ref(node, output) for output, name in enumerate(variables)}
        barrier = builder.add("all_read", "NoOp", control=reads, device=next(iter(needed), "")).node
        functions: list[FunctionDef] = []
        self.nodes = [barrier]
        for holding in holdings:
            own = [variable for variable in holding.variables if variable.name in located]
            function = assign_function(f"{holding.label}_{name}", own)
            functions.append(function)
            for replica, device in enumerate(holding.devices):
                values = [read[host_of(device), variable.name] for variable in own]
                values += holding.number(builder, device) if own else []
                label = f"{holding.label}/replica{replica}"
                call = call_node(label, function, values, device=device, control=[barrier])
                self.nodes.append(builder.append(call).node)
        merge_library(self.graph, functions)


def _strings(builder: Builder, name: str, values: Sequence[str], device: str) -> Ref:
    """Returns a constant vector of strings."""
    constant = AttrValue()
    constant.tensor.dtype = _STRING
    constant.tensor.tensor_shape.dim.add(size=len(values))
    constant.tensor.string_val.extend(value.encode() for value in values)
    return builder.add(name, "Const", device=device, dtype=dtype_attr(_STRING), value=constant)
