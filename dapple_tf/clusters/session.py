"""Configurations of sessions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from dapple_tf.clusters.server_definition import threads, worker_name
from dapple_tf.describe.cluster import Cluster
from graph_passes.ir.collectives import NCCL, RING
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

    Servers have their own threads and devices, see `server_definition.ServerSettings`.
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
