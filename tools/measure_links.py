"""Measures the links between workers, and writes a description of the cluster to plan for.

    python -m dapple_tf.tools.measure_links --addresses=10.0.0.1:2222,10.0.0.2:2222 --out=cluster.json
    python -m dapple_tf.tools.measure_links --local=2
    python -m dapple_tf.tools.measure_links --local=4 --workers_per_server=2

Without either flag the workers are those in TF_CONFIG. Shows the cluster as its workers report it (servers, devices,
memory), and the speed of links within servers, between every two servers, and of all-reduce over all devices.
`dapple_tf.Cluster.load("cluster.json")` reads the description; plans can be made for it when the workers are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping

import tensorflow as tf
from absl import app, flags

from dapple_tf.clusters.shared_connections import connected
from dapple_tf.common.text import table
from dapple_tf.describe.cluster import Cluster, Link
from dapple_tf.measuring.device_speeds import measure_speeds
from dapple_tf.measuring.links import measure_between_servers, measure_links
from dapple_tf.tools import command
from dapple_tf.tools.hosts import HostsError, LocalWorkers
from dapple_tf.tools.model_flags import define_workers_per_server

FLAGS = flags.FlagValues()

_ADDRESSES = flags.DEFINE_list(
    "addresses", None, "host:port of each worker; by default those of TF_CONFIG.", flag_values=FLAGS
)
_LOCAL = flags.DEFINE_integer(
    "local", None, "Number of workers to start on this machine and measure.", 1, 1000, flag_values=FLAGS
)
_DEVICES = flags.DEFINE_integer(
    "devices", 1, "Logical CPU devices of each worker that --local starts.", 0, 1000, flag_values=FLAGS
)
_WORKERS_PER_SERVER = define_workers_per_server(FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file to write the description to.", flag_values=FLAGS)
_LARGE = flags.DEFINE_float(
    "mib", 4.0, "Size of the large message in MiB; the small one has 4 KiB.", 0.01, 1024.0, flag_values=FLAGS
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 5, "Number of measurements of each time; the median counts.", lower_bound=1, flag_values=FLAGS
)
_CAPACITY = flags.DEFINE_boolean(
    "capacity",
    True,
    "Also measure how many devices' worth of compute each server provides when all of them are busy.",
    flag_values=FLAGS,
)

_REDUCTIONS = {
    "ring": "ring through all devices",
    "inside": "ring within a server",
    "between": "ring between servers",
    "exchange": "scatter and gather in servers",
}
"""Link of `ReductionLinks` -> its description."""
_SPEEDS = flags.DEFINE_boolean(
    "speeds",
    False,
    "Also measure the speed of each worker's devices, by products of matrices on one of them.",
    flag_values=FLAGS,
)

Pairs = Mapping[tuple[int, int], Link]


def topology(cluster: Cluster) -> str:
    """Returns the cluster's servers, and their workers with their devices."""
    rows = []
    for worker, address in enumerate(cluster.addresses):
        devices = [cluster.devices[device] for device in cluster.devices_of_worker(worker)]
        kinds = sorted({device.name.rsplit(":", 2)[1] for device in devices})
        memories = [device.memory_bytes for device in devices]
        known = [memory for memory in memories if memory is not None]
        memory = f"{min(known) / 2**30:.1f} GiB" if known else "unknown"
        rows.append([str(devices[0].server), address, f"{len(devices)} {'/'.join(kinds)}", memory])
    return table([["server", "address", "devices", "memory of each"], *rows], left=1) + "\n"


def links(cluster: Cluster, between: Pairs) -> str:
    """Returns the measurements as a text."""
    rows = [[f"{one} - {other}", *_speed(link)] for (one, other), link in between.items()]
    if cluster.intra_bandwidth is not None and cluster.intra_latency is not None:
        rows.append(["within a server", *_speed(Link(cluster.intra_bandwidth, cluster.intra_latency))])
    rows += [[_REDUCTIONS[name], *_speed(link)] for name, link in cluster.reductions.links.items()]
    told = (
        table([["link", "MB/s", "Mbit/s", "latency ms"], *rows], left=1) + "\n"
        if rows
        else "One device has no links.\n"
    )
    if cluster.reductions.error is not None:
        told += f"all-reduces differ from these lines by at most {cluster.reductions.error:.1%}\n"
    capacities = [cluster.capacity(server) for server in range(cluster.num_servers)]
    if _CAPACITY.value and cluster.num_devices > cluster.num_servers:
        told += (
            "compute of all devices at once: " + ", ".join(f"{capacity:.2f}" for capacity in capacities) + " devices\n"
        )
    if _SPEEDS.value:
        firsts = [cluster.devices[cluster.devices_of_worker(worker)[0]] for worker in range(len(cluster.addresses))]
        speeds = ", ".join(f"{own.speed:.3g} +- {own.speed_spread:.2g}" for own in firsts)
        told += f"speed of each worker's first device: {speeds}\n"
    return told


def _speed(link: Link) -> list[str]:
    return [f"{link.bandwidth / 1e6:,.1f}", f"{link.bandwidth * 8 / 1e6:,.0f}", f"{link.latency * 1e3:.3f}"]


def measure(cluster: Cluster) -> tuple[Cluster, dict[tuple[int, int], Link]]:
    """Returns the cluster with its measured links, and the link between each pair of servers."""
    terminal = sys.stderr.isatty()
    large = max(4096 + 4, int(_LARGE.value * 2**20))

    def progress(one: int, other: int) -> None:
        if terminal:
            sys.stderr.write(f"\rmeasuring servers {one} - {other} of {cluster.num_servers}  ")

    with connected(cluster):  # All of it on one lease.
        between = measure_between_servers(cluster, large=large, repeats=_REPEATS.value, progress=progress)
        measured = measure_links(
            cluster, large=large, repeats=_REPEATS.value, capacity=_CAPACITY.value, between=between or None
        )
        if _SPEEDS.value:
            measured = measure_speeds(measured, each_server=True)
    if terminal:
        sys.stderr.write("\r" + " " * 60 + "\r")
    return measured, between


def _cluster(stack: contextlib.ExitStack) -> Cluster:
    count = _WORKERS_PER_SERVER.value
    workers = _workers(stack)
    if count == 1:
        return workers
    with command.blamed(f"--workers_per_server={count}"):
        return workers.with_workers_per_server(count)


def _workers(stack: contextlib.ExitStack) -> Cluster:
    if _LOCAL.value is not None:
        workers = stack.enter_context(LocalWorkers(_LOCAL.value, _DEVICES.value, echo=lambda number, line: None))
        return Cluster.of_servers(workers.addresses)
    if _ADDRESSES.value is not None:
        return Cluster.of_servers(_ADDRESSES.value)
    if "TF_CONFIG" not in os.environ:
        raise app.UsageError("which workers? Give --addresses=host:port,..., or --local=N, or set TF_CONFIG")
    return Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())


def main() -> None:
    """Measures and prints."""
    if _LOCAL.value is not None and _ADDRESSES.value is not None:
        raise app.UsageError("--addresses and --local exclude each other")
    if _OUT.value and not pathlib.Path(_OUT.value).absolute().parent.is_dir():
        raise app.UsageError(f"--out={_OUT.value}: no such folder")
    try:
        with contextlib.ExitStack() as stack:
            cluster = _cluster(stack)
            sys.stdout.write(topology(cluster) + "\n")
            sys.stdout.flush()
            measured, between = measure(cluster)
            sys.stdout.write(links(measured, between))
    except HostsError as error:
        raise app.UsageError(str(error)) from error
    if _OUT.value:
        # Only the devices' numbers matter there; addresses are for those who use the cluster now.
        dataclasses.replace(measured, addresses=()).save(_OUT.value)
        sys.stdout.write(f"written to {_OUT.value}; dapple_tf.Cluster.load reads it\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
