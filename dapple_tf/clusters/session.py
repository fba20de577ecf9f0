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
from graph_passes.ir.tensorflow_private import looked_up_run, prepared_run

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
    gpus = any("device:GPU" in name for name in cluster.device_names)
    if not gpus or cluster.sub_streams or cluster.tls:
        return RING
    here = tf.config.list_physical_devices("GPU") if cluster.real and not cluster.addresses else ()
    divided = any(len(tf.config.get_logical_device_configuration(gpu) or ()) > 1 for gpu in here)
    return RING if divided else NCCL


def session_config(cluster: Cluster) -> tf.compat.v1.ConfigProto:
    """Returns a session's configuration: one executor thread per device, which share the cores.

    Servers have their own threads and devices, see `server_definition.ServerSettings`.
    """
    config = tf.compat.v1.ConfigProto(allow_soft_placement=False)
    # A step's top level is calls of functions, where Grappler finds nothing to do but searches again and again. It
    # still optimizes each function at its first call. It would even drop nodes that are only timed.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    if cluster.addresses:
        config.experimental.collective_group_leader = worker_name(0)
        config.isolate_session_state = True  # Sessions on one server mustn't share variables.
        return config
    cpus = sum("device:CPU" in device.name for device in cluster.devices)
    config.device_count["CPU"] = max(1, cpus)
    config.inter_op_parallelism_threads, config.intra_op_parallelism_threads = threads(cluster.num_devices, cpus)
    config.gpu_options.allow_growth = True
    if _has_gpu_streams(cluster):
        _split_gpus(config.gpu_options, cluster)
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

    Streams and allocators are made once in a process. If Keras has used a GPU before the first session, its main
    stream has the default priority, no higher than the sub-stream's, and its memory isn't shared. Calling this
    before models are built makes both right. Nothing is done for a cluster without sub-streams on GPUs.

    Raises:
        RuntimeError: TensorFlow has been initialized already.
    """
    if not _has_gpu_streams(cluster):
        return
    gpus = tf.config.list_physical_devices("GPU")[: cluster.sub_streams]
    tf.config.set_visible_devices(gpus, "GPU")
    for gpu, made in zip(gpus, _logical_gpus(cluster), strict=True):
        configurations = [
            tf.config.LogicalDeviceConfiguration(
                size, experimental_priority=priority, experimental_device_ordinal=ordinal
            )
            for size, priority, ordinal in made
        ]
        tf.config.set_logical_device_configuration(gpu, configurations)


def _has_gpu_streams(cluster: Cluster) -> bool:
    return cluster.sub_streams > 0 and "device:GPU" in cluster.devices[0].name


def _split_gpus(options: tf.compat.v1.GPUOptions, cluster: Cluster) -> None:
    """Makes two logical devices of each GPU: its main stream and, at a lower priority, its sub-stream.

    GPU 0, GPU 1   become   GPU:0 on 0, GPU:1 on 1 (main), GPU:2 on 0, GPU:3 on 1 (sub)
    """
    options.visible_device_list = ",".join(map(str, range(cluster.sub_streams)))
    for made in _logical_gpus(cluster):
        sizes, priorities, ordinals = zip(*made, strict=True)
        options.experimental.virtual_devices.add(memory_limit_mb=sizes, priority=priorities, device_ordinal=ordinals)


def _logical_gpus(cluster: Cluster) -> list[list[tuple[float, int, int]]]:
    """Returns, for each GPU, (MiB, priority, ordinal) of its main and its sub device.

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
                ((size or 0) / 2**20, priority, ordinal)
                for ordinal, (size, priority) in enumerate(zip(sizes, priorities[2 * gpu :], strict=False))
            ]
        )
    return gpus
