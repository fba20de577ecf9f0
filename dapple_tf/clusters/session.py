"""Sessions: their graph, configuration, and prepared runs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

from dapple_tf.clusters.tensorflow_server import threads, worker_name
from dapple_tf.describe.cluster import Cluster
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.collectives import NCCL, RING
from graph_passes.ir.graph import (
    COMPILED_ATTR,
    OWN_ATTRS,
    GraphDef,
    Names,
    all_nodes,
    copied,
    data_inputs,
    dtype_attr,
    make_node,
    shape_attr,
)
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.shared_functions import SharedFunctions
from graph_passes.ir.tensorflow_bridge import bare_config
from graph_passes.ir.tensorflow_private import looked_up_run, prepared_run, process_config

_KEYS = 100_000
"""Minimum number of keys of collective operations for a graph: one for each parameter group, each bucket, and each
part of a bucket in a hierarchical all-reduce."""
_next_key = 1
_keys_lock = threading.Lock()


def collective_keys(more: int = 0) -> int:
    """Returns the first key of a graph with collective operations, unique in this process.

    Servers remember the use of each key.

    Args:
        more: number of keys for sums inside tasks.
    """
    global _next_key
    with _keys_lock:
        first, _next_key = _next_key, _next_key + _KEYS + more
    return first


def collective_hint(cluster: Cluster) -> str:
    """Returns who makes the all-reduces of gradients: NCCL between GPUs, where it can.

    It refuses two members on one GPU, which logical GPUs are. Its sockets would pass by the tunnels of TLS.
    """
    if not cluster.has_gpus or cluster.tls:
        return RING
    here = tf.config.list_physical_devices("GPU") if cluster.real and not cluster.addresses else ()
    divided = any(len(tf.config.get_logical_device_configuration(gpu) or ()) > 1 for gpu in here)
    return RING if divided else NCCL


def session_config(cluster: Cluster) -> tf.compat.v1.ConfigProto:
    """Returns a session's configuration: one executor thread per device, which share the cores.

    Servers have their own threads and devices, see `tensorflow_server.ServerSettings`.
    """
    cpus = sum(device.type == "CPU" for device in cluster.devices)
    gpus = cluster.num_devices - cpus
    # A step's top level is calls of functions, where Grappler finds nothing to do but searches again and again. It
    # still optimizes each function at its first call. It would even drop nodes that are only timed.
    config = bare_config(**({} if gpus or cluster.addresses else {"GPU": 0}))
    if cluster.addresses:
        config.experimental.collective_group_leader = worker_name(0)
        config.isolate_session_state = True  # Sessions on one server mustn't share variables.
        return config
    config.device_count["CPU"] = max(1, cpus)
    config.inter_op_parallelism_threads, config.intra_op_parallelism_threads = threads(cluster.num_devices, cpus)
    if gpus:
        options = config.gpu_options
        options.CopyFrom(process_config().gpu_options)  # One number mustn't mean two GPUs in a process.
        options.allow_growth = True
        logical = options.experimental.virtual_devices
        if all(len(own.memory_limit_mb) < 2 for own in logical):
            options.visible_device_list = ",".join(options.visible_device_list.split(",")[:gpus])
            del logical[gpus:]
    return config


class PreparedRun:
    """Repeated ``Session.run`` of the same nodes, whose names are looked up only once.

    In sessions of this process errors are TensorFlow's own, without the lines that ``Session.run`` adds.
    """

    def __init__(
        self,
        session: Any,
        fetches: Any,
        feeds: Sequence[str],
        options: config_pb2.RunOptions | None = None,
        *,
        remote: bool = False,
    ) -> None:
        """Looks the names up.

        Args:
            session: a ``tf.compat.v1.Session``.
            fetches: a structure of names: of tensors (``name:0``) and of nodes, which return None.
            feeds: names of the placeholders.
            options: options of each run.
            remote: whether the session is one on workers, where TensorFlow ignores the ``collective_graph_key`` of runs
                by ``CallableOptions``.
        """
        self._fetches = fetches
        names = list(dict.fromkeys(tf.nest.flatten(fetches)))
        graph = session.graph
        self._dtypes = [graph.get_tensor_by_name(name).dtype.as_numpy_dtype for name in feeds]
        tensors, nodes = [name for name in names if ":" in name], [name for name in names if ":" not in name]
        self._order = {name: index for index, name in enumerate(tensors)}
        if remote:
            self._run = looked_up_run(session, feeds, tensors, nodes, options)
        else:
            callable_options = config_pb2.CallableOptions(feed=feeds, fetch=tensors, target=nodes, run_options=options)
            self._run = prepared_run(session, callable_options)

    def __call__(self, values: Sequence[Any]) -> Any:
        """Returns the fetched values in the structure of the fetches; ``values`` feed the placeholders."""
        arrays = [np.asarray(value, dtype) for value, dtype in zip(values, self._dtypes, strict=True)]
        fetched = self._run(*arrays)
        order = self._order
        return tf.nest.map_structure(lambda name: fetched[order[name]] if name in order else None, self._fetches)


# ---- graphs

_MANY_CALLS = 50
"""Number of calls of functions in a graph from which on searching through each of them takes noticeable time."""
_MOVING = frozenset(
    {
        "AssignAddVariableOp", "AssignVariableOp", "ConcatV2", "Const", "Fill", "GatherV2", "Identity",
        "ReadVariableOp", "Reshape", "SplitV", "VarHandleOp",
    }
)  # fmt: skip
"""Operators that move values and add to variables: functions of these alone have nothing to fuse."""


class SessionGraph:
    """What a session can run: graphs, each under a name, and their functions, equal ones once.

    Others are added so that TensorFlow prepares them soon; no result depends on how.

    Attributes:
        graph: TensorFlow's graph.
    """

    def __init__(self) -> None:
        self.graph = tf.Graph()
        self._functions = SharedFunctions()

    def add(self, graph: GraphDef, name: str) -> None:
        """Adds nodes under ``name/``, and the functions that are missing; the graph given stays as it is."""
        fresh = copied(graph)
        moving = {function.signature.name for function in fresh.library.function if _only_moves(function)}
        for node in all_nodes(fresh):
            for attr in [attr for attr in node.attr if attr.startswith(OWN_ATTRS)]:
                del node.attr[attr]
        for node in fresh.node:
            if "f" in node.attr:
                # Nobody needs the shapes of calls' results, and TensorFlow would infer them for each call.
                node.attr["_disable_call_shape_inference"].b = True
                if node.op in CALLS and not node.attr["config_proto"].s:
                    node.attr["config_proto"].s = calls_config(node.attr["f"].func.name not in moving)
        self._functions.share(fresh)
        _spare_searching_calls(fresh)
        with self.graph.as_default():
            tf.graph_util.import_graph_def(fresh, name=name)


def _only_moves(function: FunctionDef) -> bool:
    return all(node.op in _MOVING for node in function.node_def)


@functools.cache
def calls_config(optimized: bool) -> bytes:
    """Returns the configuration by which a function is optimized at its first call, serialized.

    Grappler looks at each function twice by default, and once more in another form (TFG). Functions of steps are small
    and have no shapes left to compute: the first look finds everything, operators to fuse above all. What is in memory
    when is the plan's to say: tensors to swap out aren't searched for.

    Args:
        optimized: whether it is looked at at all.
    """
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.disable_meta_optimizer = not optimized
    options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    options.disable_tfg_optimizer = True
    options.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    return config.SerializeToString(deterministic=True)


def _spare_searching_calls(graph: GraphDef) -> None:
    """Adds a reference variable that the nodes which cut the batch come after, and so nearly all calls of functions.

    One of TensorFlow's passes (`EncapsulateSubgraphsPass`) finds the nodes that depend on reference variables. It
    instantiates the function of each call for that, of a thousand calls a thousand times, unless the call depends on
    such a variable anyway. What it finds is for nodes that XLA compiles one by one, and for calls that XLA compiles:
    graphs with these are left as they are.
    """
    calls = [node for node in graph.node if "f" in node.attr]
    fed = {node.name for node in graph.node if node.op == "Placeholder"}
    cuts = [node for node in graph.node if "f" not in node.attr and any(ref.node in fed for ref in data_inputs(node))]
    if len(calls) < _MANY_CALLS or not cuts or any(COMPILED_ATTR in node.attr for node in calls):
        return
    name = Names(node.name for node in graph.node).fresh("reference")
    attrs = {"dtype": dtype_attr(types_pb2.DT_FLOAT), "shape": shape_attr([])}
    graph.node.append(make_node(name, "VariableV2", [], device=cuts[0].device, attrs=attrs))
    for node in cuts:
        if node.device == cuts[0].device:
            node.input.append(f"^{name}")
