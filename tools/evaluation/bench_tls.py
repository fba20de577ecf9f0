"""Measures what TLS costs: the throughput of a link by tunnels against a bare one, and training steps with and without.

    python -m tools.evaluation.bench_tls

Everything runs on this machine. The bare link is a connection of the loopback device between two processes, the
tunnelled one has two processes of relays in between; both send one way. Steps are those of two stages on two workers,
whose activations of --width numbers per sample cross the link; with and without TLS take turns. Needs dapple_tf[tls].
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pathlib
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

from absl import app, flags

from dapple_tf.network.control import split_address
from dapple_tf.network.keys import Keys
from dapple_tf.network.relay import LOOPBACK
from dapple_tf.network.tunnels import Tunnels
from dapple_tf.tools.hosts import LocalWorkers, free_ports, new_keys

_MIB = flags.DEFINE_integer("mib", 1024, "MiB that each measurement of a link sends.", 1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Number of measurements of each kind.", 1)
_STEPS = flags.DEFINE_integer("steps", 20, "Number of steps of one measurement.", 1)
_WIDTH = flags.DEFINE_integer("width", 1024, "Numbers per sample that go from stage to stage.", 1)
_BATCH = flags.DEFINE_integer("batch", 1024, "Samples of a step.", 4)

_CHUNK = 1 << 20


def _send(address: tuple[str, int], mib: int) -> None:
    chunk = bytes(_CHUNK)
    with socket.create_connection(address) as connection:
        for _ in range(mib):
            connection.sendall(chunk)
        connection.recv(1)


def throughput(listener: socket.socket, address: tuple[str, int], mib: int) -> float:
    """Returns MiB/s from another process that connects to ``address``, whose connection arrives at ``listener``."""
    sender = multiprocessing.get_context("spawn").Process(target=_send, args=(address, mib))
    sender.start()
    connection, _ = listener.accept()
    buffer = bytearray(_CHUNK)
    with connection:
        left = mib * _CHUNK - connection.recv_into(buffer)
        began = time.perf_counter()
        while left:
            left -= connection.recv_into(buffer)
        seconds = time.perf_counter() - began
        connection.sendall(b"x")
    sender.join()
    return mib / seconds


@contextlib.contextmanager
def tunnelled(folder: pathlib.Path) -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    """A listener, and the address at the other end of tunnels to it."""
    keys = Keys(folder)
    ports = free_ports(2)
    cluster = {"client": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    prints = {"client": [keys.fingerprint], "worker": [keys.fingerprint]}
    with contextlib.ExitStack() as stack:
        client = Tunnels(keys, ["127.0.0.1"], ports[0], cluster, prints, ("client", 0))
        stack.callback(client.close)
        worker = Tunnels(keys, ["127.0.0.1"], ports[1], cluster, prints, ("worker", 0))
        stack.callback(worker.close)
        listener = stack.enter_context(socket.create_server((LOOPBACK, worker.server_port)))
        yield listener, split_address(client.cluster["worker"][0])


def step_seconds(addresses: list[str], tls: str | None) -> list[float]:
    """Returns the seconds of each step on two workers."""
    import keras
    import numpy as np

    import dapple_tf as dapple

    keras.utils.set_random_seed(0)
    width = _WIDTH.value
    layers = [keras.layers.Dense(width, "relu", name="a"), keras.layers.Dense(16, name="b")]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(_BATCH.value, 64)).astype("float32")
    y = x[:, :16]
    cluster = dapple.Cluster.of_servers(addresses, tls=tls)
    plan = dapple.Plan.manual(["a"], [[0], [1]], micro_batches=4, global_batch_size=_BATCH.value)
    pipelined = dapple.transform(model, cluster, plan)
    try:
        for _ in range(3):
            pipelined.train_on_batch(x, y)
        seconds = []
        for _ in range(_STEPS.value):
            began = time.perf_counter()
            pipelined.train_on_batch(x, y)
            seconds.append(time.perf_counter() - began)
        return seconds
    finally:
        pipelined.close()


def report(name: str, unit: str, bare: list[float], secured: list[float]) -> None:
    """Prints medians, ranges, and their ratio."""
    for told, values in (("bare", bare), ("TLS", secured)):
        low, middle, high = min(values), statistics.median(values), max(values)
        sys.stdout.write(f"{name}, {told}: median {middle:.4g} {unit} ({low:.4g} to {high:.4g})\n")
    sys.stdout.write(f"{name}: TLS / bare {statistics.median(secured) / statistics.median(bare):.3f}\n")
    sys.stdout.flush()


def main(argv: list[str]) -> None:
    """Measures links, then steps."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(new_keys(stack.enter_context(tempfile.TemporaryDirectory()), ["127.0.0.1"]))
        bare, secured = [], []
        with tunnelled(folder) as (end, address), socket.create_server(("127.0.0.1", 0)) as listener:
            for _ in range(_REPEATS.value):
                bare.append(throughput(listener, listener.getsockname(), _MIB.value))
                secured.append(throughput(end, address, _MIB.value))
        report("link", "MiB/s", bare, secured)

        def quiet(*_: object) -> None:
            """Workers say nothing."""

        plain = stack.enter_context(LocalWorkers(2, echo=quiet))
        locked = stack.enter_context(LocalWorkers(2, arguments=[f"--tls={folder}"], echo=quiet))
        bare_steps, secured_steps = [], []
        for _ in range(_REPEATS.value):
            bare_steps.append(statistics.median(step_seconds(plain.addresses, None)) * 1e3)
            secured_steps.append(statistics.median(step_seconds(locked.addresses, str(folder))) * 1e3)
        sent = _BATCH.value * _WIDTH.value * 4 / 2**20
        report(f"step that sends {sent:.3g} MiB forward and as much backward", "ms", bare_steps, secured_steps)


if __name__ == "__main__":
    app.run(main)
