"""What shards save and cost: `Plan.optimizer_shards`, and `Plan.parameter_shards` besides. Needs root but for --rates=.

    python -m tools.evaluation.bench_shards --rates=200,1000 --json=docs/results/shards.json

Measured: data parallelism over hosts of one device each, with everything on each, the optimizer's slots in shards, and
parameters, too, a step of each in turns. Hosts are network namespaces with real workers, joined by links that `tc tbf`
limits to --rates Mbit/s. Memory is the peak of a device by allocation records of a traced step, on top of what it keeps
between steps. "predicted" is the simulation by a profile of the model and the measured links.

Simulated: the largest BERT on eight V100s of 16 GB, as in DAPPLE's Table 7, in pipelines of fewer stages with replicas.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import app, flags

import dapple_tf as dapple
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.measuring.links import measure_links
from dapple_tf.simulation.cost import CostModel
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, numbers, write_results
from dapple_tf.tools.evaluation.inside_hosts import inside, run_inside
from dapple_tf.tools.evaluation.paper_experiments import encoder_layers, largest_bert
from dapple_tf.tools.evaluation.shards_report import WAYS, measured_table, simulated_table
from dapple_tf.tools.hosts import Hosts, HostsError, unavailable

_HOSTS = flags.DEFINE_list("hosts", ["2", "4"], "Numbers of hosts, with one device each.")
_RATES = flags.DEFINE_list("rates", ["200", "1000"], "Mbit/s of links in each direction; none for no measurements.")
_WIDTH = flags.DEFINE_integer("width", 1024, "Width of the eight dense layers.", 8, 8192)
_SAMPLES = flags.DEFINE_integer("samples", 64, "Samples of each replica.", 1, 8192)
_STEPS = flags.DEFINE_integer("steps", 9, "Measured steps of each way.", 3)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers and the machine's facts to.")
_INSIDE = flags.DEFINE_string("inside", None, "Internal: this is the client within the first host; its task's file.")

_MODULE = "tools.evaluation.bench_shards"
_UNCOUNTED = 3
"""Steps that warm everything up."""
_DEVICES = 8
"""Devices of the simulated pipelines."""


def model_of(width: int) -> keras.Model:
    """Returns a compiled model of eight dense layers with Adam, whose slots are twice as large as its parameters."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation="relu", name=f"dense_{number}") for number in range(8)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1, name="output")])
    model.compile(keras.optimizers.Adam(1e-9), "mse")
    return model


def _measure(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trains in all ways and measures; runs in the first host."""
    width, hosts = task["width"], len(task["addresses"])
    batch = task["samples"] * hosts
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(batch, columns)).astype("float32") for columns in (width, 1))
    cluster = dapple.Cluster.of_servers(task["addresses"])
    with connected(cluster):
        cluster = measure_links(cluster, repeats=5, capacity=False)
        samples = sorted({task["samples"], max(1, task["samples"] // 2)})
        profile = dapple.profile(model_of(width), samples, cluster=cluster, x=x, y=y, cache=False)
        # Models of their own: trainers of one model would send each other its values between their steps.
        trainers = {
            way: dapple.transform(
                model_of(width),
                cluster,
                dapple.Plan.data_parallel(hosts, batch, optimizer_shards=slots, parameter_shards=parameters),
                profile=profile,
            )
            for way, (slots, parameters) in WAYS.items()
        }
        for _ in range(task["steps"] + _UNCOUNTED):
            for trainer in trainers.values():
                trainer.train_on_batch(x, y)
        rows = []
        for way, trainer in trainers.items():
            prediction = trainer.prediction
            assert prediction is not None
            traced = trainer.profile_step(x, y, warm_up=0, train=True)
            rows.append(
                {
                    "way": way,
                    "predicted": prediction.predicted,
                    "steps": list(prediction.steps)[-task["steps"] :],
                    "peak_bytes": max(traced.peak_bytes.values()),
                }
            )
        for trainer in trainers.values():
            trainer.close()
    return rows


def measured(hosts_count: int, rates: list[float]) -> Iterator[dict[str, Any]]:
    """Yields what was measured on fresh hosts for each rate of links in Mbit/s."""
    task = {"width": _WIDTH.value, "samples": _SAMPLES.value, "steps": _STEPS.value}
    cores = sorted(os.sched_getaffinity(0))
    parameters = model_of(task["width"]).count_params() * 4
    with Hosts(hosts_count, cores=[cores[host % len(cores)] for host in range(hosts_count)]) as hosts:
        for rate in rates:
            command.say(f"{hosts_count} hosts, {parameters / 1e6:.1f} MB of gradients over {rate:g} Mbit/s")
            hosts.limit(rate)
            rows = run_inside(hosts, _MODULE, task)
            yield {"hosts": hosts_count, "rate_mbit": rate, "parameter_bytes": parameters, "rows": rows}


REPLICAS = (1, 2, 4, 8)
"""Replicas of each stage of the simulated pipelines."""


def simulated(counts: Sequence[int] = REPLICAS) -> list[dict[str, Any]]:
    """Returns the largest BERT on eight V100s in pipelines with replicas, with all on each and with shards."""
    rows = []
    for replicas in counts:
        whole = largest_bert(_DEVICES, 1, replicas)
        rows.append(_row(whole, replicas, "none", None))
        for way, (slots, parameters) in WAYS.items():
            if replicas > 1 and slots:
                same = dataclasses.replace(whole.plan, optimizer_shards=slots, parameter_shards=parameters)
                slower = _seconds(CostModel(same, whole.profile, whole.cluster)) / _seconds(whole)
                larger = largest_bert(_DEVICES, 1, replicas, optimizer_shards=slots, parameter_shards=parameters)
                rows.append(_row(larger, replicas, way, slower))
    return rows


def _row(costs: CostModel, replicas: int, way: str, slower: float | None) -> dict[str, Any]:
    return {
        "stages": _DEVICES // replicas,
        "replicas": replicas,
        "way": way,
        "layers": encoder_layers(costs),
        "billion_parameters": costs.profile.parameter_bytes / 4e9,
        "samples_per_s": costs.plan.global_batch_size / _seconds(costs),
        "same_model": slower,
    }


def _seconds(costs: CostModel) -> float:
    return dapple.simulate(costs.plan, costs.profile, costs.cluster).latency


def main(argv: list[str]) -> None:
    """Simulates, then sets hosts up, measures, and takes them down."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    if _INSIDE.value is not None:
        inside(_INSIDE.value, _measure)
    check_output(_JSON.value)
    for value in _RATES.value:
        good = value.replace(".", "", 1).isdigit() and float(value) > 0
        command.check(good, f"--rates has {value!r}; give numbers above 0")
    counts = numbers("hosts", _HOSTS.value)
    command.check(all(2 <= count <= 8 for count in counts), f"--hosts has {counts}; give numbers from 2 to 8")
    rates = [float(value) for value in _RATES.value]
    if rates and (reason := unavailable()):
        raise app.UsageError(f"{reason}; run this with sudo, on a machine that allows network namespaces, or --rates=")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    records = simulated()
    print(simulated_table(records))
    if _JSON.value:
        write_results(_JSON.value, "simulated", records, kind="simulated")
    for count in counts if rates else ():
        results: list[dict[str, Any]] = []
        try:
            for result in measured(count, rates):
                results.append(result)
                print(measured_table([result]), flush=True)
                if _JSON.value:
                    write_results(_JSON.value, f"measured, {count} hosts", results)
        except HostsError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
