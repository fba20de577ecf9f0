"""Compares all-reduces with what was planned for them, between two hosts of two devices each. Needs root.

    python -m tools.evaluation.check_reductions --rates=100,400
    python -m tools.evaluation.check_reductions --json=docs/results/reductions.json

The hosts are network namespaces with a core each, joined by a link of --rate Mbit/s. Their links are measured by
`dapple_tf.measure_links`; then all-reduces of --mib are timed as steps make them, flat and hierarchical in turns, and
compared with what `dapple_tf.simulation.all_reduce` predicts from the measured links. Sizes above --bucket_mib go in
several buckets.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from absl import app, flags

import dapple_tf as dapple
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.describe.plan import ALL_REDUCE, Plan
from dapple_tf.measuring.links import all_reduces, measure_links
from dapple_tf.simulation.all_reduce import all_reduce_time
from dapple_tf.text_table import table
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.inside_hosts import inside, run_inside
from dapple_tf.tools.hosts import Hosts, HostsError, unavailable

_RATES = flags.DEFINE_list("rates", ["100", "400"], "Mbit/s of the link in each direction, one table each.")
_MIB = flags.DEFINE_list("mib", ["0.25", "1", "4", "16"], "Sizes of the all-reduces in MiB.")
_BUCKET = flags.DEFINE_float(
    "bucket_mib", Plan.bucket_bytes / 2**20, "Size of the buckets of an all-reduce in MiB.", lower_bound=0.001
)
_HOSTS = flags.DEFINE_integer("hosts", 2, "Number of hosts.", 2, 8)
_DEVICES = flags.DEFINE_integer("devices", 2, "Devices of each host.", 1, 8)
_REPEATS = flags.DEFINE_integer(
    "repeats", 9, "Number of times that each is measured; the median counts.", lower_bound=1
)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers and the machine's facts to.")
_INSIDE = flags.DEFINE_string("inside", None, "Internal: this is the client in the first host, and its task's file.")


def _measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """Measures links and all-reduces; runs in the first host."""
    cluster = dapple.Cluster.of_servers(task["addresses"])
    everyone = range(cluster.num_devices)
    rows = []
    with connected(cluster):
        measured = measure_links(cluster, repeats=task["repeats"], capacity=False)
        members = Counter(device.server for device in measured.devices)
        for size in task["sizes"]:
            count = math.ceil(size / task["bucket"])
            floats = [size // count // 4] * count
            with (
                all_reduces(cluster, everyone, floats) as flat,
                all_reduces(cluster, everyone, floats, by_server=True) as hierarchical,
            ):
                runs = dict(zip(ALL_REDUCE, (flat, hierarchical), strict=True))
                times: dict[str, list[float]] = {name: [] for name in ALL_REDUCE}
                for turn in range(task["repeats"] + 2):
                    for name, run in runs.items():
                        seconds = run()
                        if turn > 1:  # the first ones prepare
                            times[name].append(seconds)
            rows += [
                {
                    "bytes": size,
                    "buckets": count,
                    "algorithm": name,
                    "planned": all_reduce_time(measured, members, name).seconds(size, task["bucket"]),
                    "measured": own,
                }
                for name, own in times.items()
            ]
    links = {name: link._asdict() for name, link in measured.reductions.links.items()}
    return {"links": links, "error": measured.reductions.error, "rows": rows}


def run(rate: float) -> dict[str, Any]:
    """Measures on fresh hosts with links of this many Mbit/s."""
    cores = sorted(os.sched_getaffinity(0))
    task = {
        "sizes": [int(float(mib) * 2**20) // 4 * 4 for mib in _MIB.value],
        "bucket": int(_BUCKET.value * 2**20),
        "repeats": _REPEATS.value,
    }
    with Hosts(_HOSTS.value, _DEVICES.value, cores=[cores[n % len(cores)] for n in range(_HOSTS.value)]) as hosts:
        hosts.limit(rate)
        measured = run_inside(hosts, "tools.evaluation.check_reductions", task)
    return {"rate_mbit": rate, "hosts": _HOSTS.value, "devices": _DEVICES.value, **measured}


def text(result: Mapping[str, Any]) -> str:
    """Returns one link's numbers for people."""
    rows = [("MiB", "buckets", "all-reduce", "planned ms", "measured ms", "least", "most", "planned / measured")]
    for row in result["rows"]:
        measured = statistics.median(row["measured"])
        rows.append(
            (
                f"{row['bytes'] / 2**20:g}",
                str(row["buckets"]),
                row["algorithm"],
                f"{row['planned'] * 1e3:.1f}",
                *(f"{value * 1e3:.1f}" for value in (measured, min(row["measured"]), max(row["measured"]))),
                f"{row['planned'] / measured:.3f}",
            )
        )
    head = (
        f"{result['hosts']} hosts x {result['devices']} devices, link of {result['rate_mbit']:g} Mbit/s; lines fit "
        f"their own times to {result['error']:.1%}"
    )
    return f"{head}\n{table(rows, left=0)}\n"


def main(argv: list[str]) -> None:
    """Sets hosts up, measures, and takes them down."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    if _INSIDE.value is not None:
        inside(_INSIDE.value, _measure)
    check_output(_JSON.value)
    for flag, values in (("rates", _RATES.value), ("mib", _MIB.value)):
        for value in values:
            good = value.replace(".", "", 1).isdigit() and 0 < float(value) < 1e6
            command.check(good, f"--{flag} has {value!r}; give numbers above 0")
    if reason := unavailable():
        raise app.UsageError(f"{reason}; run this with sudo, on a machine that allows network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    for rate in _RATES.value:
        try:
            results.append(run(float(rate)))
        except HostsError as error:
            sys.exit(str(error))
        sys.stdout.write(text(results[-1]) + "\n")
        sys.stdout.flush()
        if _JSON.value:
            write_results(_JSON.value, "reductions", results)


if __name__ == "__main__":
    app.run(main)
