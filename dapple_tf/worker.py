"""A TensorFlow server, whose devices a model can be trained on from another process.

    python -m dapple_tf.worker --addresses=10.0.0.1:2222,10.0.0.2:2222 --task=0

starts the first of two servers; the second is started on its machine with the same addresses and --task=1. Training
runs in a process of its own, on `dapple_tf.Cluster.of_servers(["10.0.0.1:2222", "10.0.0.2:2222"])`.

TensorFlow's gRPC has neither authentication nor encryption: whoever reaches the port can run any graph, read and write
files included. The server listens on all interfaces of its machine, whatever its address (TensorFlow offers no choice).
So use private addresses only, and keep the port from everyone else by a firewall or a network namespace.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import tensorflow as tf
from absl import app, flags

from dapple_tf.cluster import ClusterError, check_addresses
from dapple_tf.session import server_config

_ADDRESSES = flags.DEFINE_list("addresses", [], "host:port of every server, in the same order on all of them")
_TASK = flags.DEFINE_integer("task", None, "which of the addresses is this server's, from 0")
_DEVICES = flags.DEFINE_integer("devices", 1, "logical CPU devices of this server")


def server(addresses: Sequence[str], task: int, devices: int = 1) -> tf.distribute.Server:
    """Starts a server in this process; it stops when the process ends.

    Args:
        addresses: "host:port" of every server.
        task: which of them is this one.
        devices: logical CPU devices, which share this process's cores.

    Raises:
        ClusterError: addresses that can't be, a task that isn't one of them, no devices, or a port that is taken.
    """
    check_addresses(addresses)
    if not 0 <= task < len(addresses):
        raise ClusterError(f"task is {task}; with {len(addresses)} addresses it must be 0 to {len(addresses) - 1}")
    if devices < 1:
        raise ClusterError(f"devices is {devices}; a server has at least 1")
    config = server_config(devices)
    try:
        return tf.distribute.Server({"worker": list(addresses)}, job_name="worker", task_index=task, config=config)
    except tf.errors.UnknownError as error:
        raise ClusterError(f"no server can be started on {addresses[task]}: is its port taken? ({error})") from error


def main(argv: list[str]) -> None:
    """Serves until the process is ended."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    if _TASK.value is None:
        raise app.UsageError("--task is missing: which of the addresses is this server's?")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for join() to return.
    try:
        started = server(_ADDRESSES.value, _TASK.value, _DEVICES.value)
    except ClusterError as error:
        raise app.UsageError(str(error)) from error
    sys.stdout.write(f"serving {_DEVICES.value} devices on {_ADDRESSES.value[_TASK.value]} (process {os.getpid()})\n")
    sys.stdout.flush()
    started.join()


if __name__ == "__main__":
    app.run(main)
