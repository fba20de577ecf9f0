"""Configurations of sessions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from dapple_tf.clusters.server_definition import threads, worker_name
from dapple_tf.describe.cluster import Cluster, ClusterError
from graph_passes.ir.collectives import NCCL, RING
from graph_passes.ir.tensorflow_bridge import bare_config
from graph_passes.ir.tensorflow_private import looked_up_run, prepared_run, process_config

_MAIN_PRIORITY, _SUB_PRIORITY = -1, 0
"""CUDA stream priorities; the lower number is the higher priority. Every GPU with priorities has these two."""


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

    It refuses two members on one GPU, which sub-streams and logical GPUs are. Its sockets would pass by the tunnels of
    TLS.
    """
    if not cluster.has_gpus or cluster.sub_streams or cluster.tls:
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
        configure_gpus(cluster)
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


def configure_gpus(cluster: Cluster) -> None:
    """Makes the two logical devices of each GPU for this process, before anything else uses TensorFlow's GPUs.

        GPU 0, GPU 1   become   GPU:0 on 0, GPU:1 on 1 (main), GPU:2 on 0, GPU:3 on 1 (sub, at a lower priority)

    Streams and allocators are made once in a process: had Keras used a GPU before, its main stream would have the
    default priority, no higher than the sub-stream's, and all of its memory. Nothing is done for a cluster without
    sub-streams on GPUs, or a second time.

    Raises:
        ClusterError: TensorFlow has made this process's devices already, in another way.
    """
    if not cluster.sub_streams or cluster.devices[0].type != "GPU":
        return
    gpus = tf.config.list_physical_devices("GPU")[: cluster.sub_streams]
    if len(gpus) < cluster.sub_streams:
        raise ClusterError(
            f"the cluster has sub-streams of {cluster.sub_streams} GPUs, but this machine has {len(gpus)}"
        )
    try:
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu, configurations in zip(gpus, _logical_gpus(cluster), strict=True):
            tf.config.set_logical_device_configuration(gpu, configurations)
    except RuntimeError as error:
        raise ClusterError(
            f"TensorFlow has made this process's devices already, without the sub-streams of {cluster.sub_streams} "
            f"GPUs: call dapple_tf.clusters.session.configure_gpus(cluster) before a model is built ({error})"
        ) from error


def _logical_gpus(cluster: Cluster) -> list[list[tf.config.LogicalDeviceConfiguration]]:
    """Returns the main and the sub device of each GPU.

    Devices are numbered by their ordinals first, so that the main ones keep their GPUs' numbers: TensorFlow refuses a
    process in which one number means two GPUs, and Keras may have used them already. Priorities, however, are looked up
    by that number in the concatenated lists of all GPUs (`GetPriority` in gpu_device.cc), so that the
    first n priorities are the main devices'.
    """
    count = cluster.sub_streams
    priorities = [_MAIN_PRIORITY] * count + [_SUB_PRIORITY] * count
    gpus = []
    for gpu in range(count):
        sizes = [cluster.devices[device].memory_bytes for device in (gpu, gpu + count)]
        gpus.append(
            [
                tf.config.LogicalDeviceConfiguration(
                    (size or 0) / 2**20, experimental_priority=priority, experimental_device_ordinal=ordinal
                )
                for ordinal, (size, priority) in enumerate(zip(sizes, priorities[2 * gpu :], strict=False))
            ]
        )
    return gpus
