"""Trains models on one to four workers with operators placed by FD-DPS and by other ways, beside their predictions.

    python -m tools.evaluation.operator_workers --rates=0,200 --json=docs/results/operator_workers.json
    python -m tools.evaluation.operator_workers --hosts=4 --models=towers --json=docs/results/operator_workers.json

Needs root. Hosts are network namespaces with real workers; two have a core each, four half a core each (a control
group's quota), so that each has a speed of its own. Links are as fast as virtual Ethernet (--rates=0) or limited by
`tc tbf`. The ways take turns:

* single: the whole model on one worker;
* data_parallel: a replica on each, gradients reduced while the backward runs, where that gains;
* stages: one on each, equally long, four micro-batches;
* planned: what `dapple.plan` finds with everything;
* fd_dps: operators placed by FD-DPS.

"predicted" is the simulation by profiles and links that were measured just before: of layers for the first four, of
operators for the last.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from absl import app, flags

import dapple_tf as dapple
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.measuring.links import measure_links
from dapple_tf.planning.stage_cuts import balanced
from dapple_tf.text_table import table
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.inside_hosts import inside, run_inside
from dapple_tf.tools.evaluation.tower_models import MODELS, model_of
from dapple_tf.tools.hosts import Hosts, HostsError, unavailable

_HOSTS = flags.DEFINE_integer("hosts", 2, "Number of hosts: 2 of a core each, or 4 of half a core.", 2, 4)
_MODELS = flags.DEFINE_list("models", ["inception", "towers", "wide_towers"], "Models to train.")
_RATES = flags.DEFINE_list("rates", ["0", "1000", "200"], "Mbit/s of the links; 0 doesn't limit them.")
_STEPS = flags.DEFINE_integer("steps", 7, "Measured steps of each way; the median counts.", 1)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers and the machine's facts to.")
_INSIDE = flags.DEFINE_string("inside", None, "Internal: this is the client within the first host; its task's file.")

_MODULE = "tools.evaluation.operator_workers"
_UNCOUNTED = 3
"""Steps that warm everything up: predictions leave out the first two."""
_MICRO_BATCHES = 4


def plans_of(profile: dapple.Profile, cluster: dapple.Cluster, batch: int) -> dict[str, dapple.Plan]:
    """Returns the plans of all ways."""
    devices = cluster.num_devices
    times = [sum(part.at(batch) for part in (layer.forward, layer.backward)) for layer in profile.layers]
    cuts = [profile.layers[end - 1].name for end in balanced(times, devices)]
    replicated = dapple.Plan.data_parallel(devices, batch)
    return {
        "single": dapple.Plan.data_parallel(1, batch),
        "data_parallel": dapple.reduced_early(replicated, profile, cluster),
        "stages": dapple.Plan.straight(cuts, batch, _MICRO_BATCHES, "dapple_b"),
        "planned": dapple.plan(profile, cluster, batch, schedule="auto"),
        "fd_dps": dapple.Plan.by_operators(devices, batch),
    }


def _profiled(task: Mapping[str, Any]) -> dict[str, Any]:
    """Profiles layers and operators of the model; runs in the first host."""
    cluster = dapple.Cluster.of_servers(task["addresses"])
    model, x, y = model_of(task["model"])
    batch = len(x)
    sizes = sorted({batch // _MICRO_BATCHES, batch // cluster.num_devices, batch})
    with connected(cluster):
        profile = dapple.profile(model, sizes, cluster=cluster, x=x, y=y, cache=False, budget=120.0)
        everywhere = dapple.Plan.by_operators(cluster.num_devices, batch)
        costs = dapple.profile_operators(model, cluster, everywhere, x=x, y=y)
        costs.save(task["costs"])
    return {"profile": profile.to_json()}


def _measure(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trains and measures; runs in the first host."""
    profile = dapple.Profile.from_json(task["profile"])
    costs = dapple.OperatorCosts.load(task["costs"])
    _, x, y = model_of(task["model"])
    cluster = dapple.Cluster.of_servers(task["addresses"])
    rows: list[dict[str, Any]] = []
    with connected(cluster):
        cluster = measure_links(cluster, repeats=5, capacity=False)
        trainers: dict[str, dapple.PipelinedModel] = {}
        for name, plan in plans_of(profile, cluster, len(x)).items():
            command.say(f"{task['model']}: preparing {name}")
            # Models of their own: trainers of one model would send each other its values between their steps.
            given: dict[str, Any] = {"operator_costs": costs} if plan.operator_devices else {"profile": profile}
            trainers[name] = dapple.transform(model_of(task["model"])[0], cluster, plan, **given)
        steps: dict[str, list[float]] = {name: [] for name in trainers}
        for _ in range(task["steps"] + _UNCOUNTED):
            for name, trainer in trainers.items():
                trainer.train_on_batch(x, y)
                steps[name].append(trainer.last_step_seconds)
        for name, trainer in trainers.items():
            plan, used = trainer.plan, None
            if name == "fd_dps":
                placement = trainer.placement[0]
                predicted, used = placement.seconds, len(set(placement.devices.values()))
                text = f"{used} devices, {len(placement.splits)} splits"
            else:
                assert trainer.prediction is not None
                predicted = trainer.prediction.predicted
                text = f"{plan.schedule} {':'.join(map(str, plan.replicas))} M={plan.micro_batches}"
            rows.append({"way": name, "plan": text, "predicted": predicted, "steps": steps[name][_UNCOUNTED:]})
            trainer.close()
    return rows


def run(name: str, rates: list[float]) -> Iterator[dict[str, Any]]:
    """Measures a model at these rates of links, in Mbit/s; 0 doesn't limit them."""
    count = _HOSTS.value
    usable = sorted(os.sched_getaffinity(0))
    cores = [usable[host * len(usable) // count] for host in range(count)]
    share = min(1.0, len(usable) / count)
    with (
        tempfile.TemporaryDirectory() as directory,
        Hosts(count, cores=cores, share=None if share == 1 else share) as hosts,
    ):
        costs = os.path.join(directory, "costs.json")
        task = {"model": name, "steps": _STEPS.value, "costs": costs}
        profiled = run_inside(hosts, _MODULE, {**task, "what": "profile"})
        for rate in rates:
            command.say(f"{name}: links of {rate:g} Mbit/s" if rate else f"{name}: links without a limit")
            hosts.limit(rate or None)
            rows = run_inside(hosts, _MODULE, {**task, "what": "measure", "profile": profiled["profile"]})
            yield {"model": name, "hosts": count, "cores": share, "rate_mbit": rate, "rows": rows}


def text(result: Mapping[str, Any]) -> str:
    """Returns the numbers of a model at one rate for people."""
    medians = {row["way"]: statistics.median(row["steps"]) for row in result["rows"]}
    rows = [("way", "plan", "predicted ms", "measured ms", "least", "most", "error", "single / this")]
    for row in result["rows"]:
        measured = medians[row["way"]]
        times = row["predicted"], measured, min(row["steps"]), max(row["steps"])
        error, gain = row["predicted"] / measured - 1, medians["single"] / measured
        rows.append((row["way"], row["plan"], *(f"{time * 1e3:.0f}" for time in times), f"{error:+.1%}", f"{gain:.3f}"))
    link = f"links of {result['rate_mbit']:g} Mbit/s" if result["rate_mbit"] else "links without a limit"
    return f"{result['model']}, {result['hosts']} hosts of {result['cores']:g} cores, {link}\n{table(rows, left=2)}\n"


def _benchmark() -> str:
    """Returns the name under which results are stored: those of other models stay."""
    return f"operator_workers_{_HOSTS.value}_hosts_{'_'.join(_MODELS.value)}"


def main(argv: list[str]) -> None:
    """Sets hosts up, measures, and takes them down."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    if _INSIDE.value is not None:
        inside(_INSIDE.value, lambda task: _profiled(task) if task["what"] == "profile" else _measure(task))
    check_output(_JSON.value)
    command.check_choices(_MODELS, MODELS)
    for value in _RATES.value:
        good = value.replace(".", "", 1).isdigit() and float(value) < 1e6
        command.check(good, f"--rates has {value!r}; give Mbit/s, or 0 for no limit")
    if reason := unavailable():
        raise app.UsageError(f"{reason}; run this with sudo, on a machine that allows network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    for name in _MODELS.value:
        try:
            for result in run(name, [float(value) for value in _RATES.value]):
                results.append(result)
                sys.stdout.write(text(result) + "\n")
                sys.stdout.flush()
                if _JSON.value:
                    write_results(_JSON.value, _benchmark(), results)
        except HostsError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
