"""Trains a model by a plan of stages and placed operators together, and by the best plan of each level alone.

    python -m tools.evaluation.combined_workers --json=docs/results/combined_workers.json

Needs root. Two hosts are network namespaces with a link between them that `tc tbf` limits to --rate. Each device is a
worker of its own with --share of a core's time (a control group's quota); workers of one namespace are one server of
the cluster, and reach each other over its loopback device, which isn't limited. The model is a chain of blocks of
parallel branches, which a pipeline's stages can't divide but groups of devices can, and the batch is small, so that
there are few micro-batches and replicas.

Links and the times of operators, measured just before, are what all ways are planned by, layers as the sum of their
operators:

* single: the whole model on one device;
* data_parallel: replicas without stages, the fastest number of them and of micro-batches by simulation;
* stages: the best that `dapple.plan` finds without placed operators, with all its schedules and features;
* operators_on_a_host: FD-DPS' placement of all operators on the devices of one host;
* operators: FD-DPS' placement on all devices, or on those of a host if that is faster by its own simulation;
* combined: what the planner finds with groups of devices, too;
* groups: the best plan of at least two stages that are all on groups, if the planner has found something else.

What `transform(by_trial=True)` would take is found, too, by trials of its own. The ways take turns. All train from the
same values by the same batch, and their losses are compared after each step.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.automatic import plan_model
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.describe.plan import PlanError
from dapple_tf.measuring.group_profiler import GroupProfiler
from dapple_tf.measuring.links import measure_links
from dapple_tf.planning.group_search import several_on_groups, with_groups
from dapple_tf.planning.plan_reasons import shape
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import find
from dapple_tf.simulation.simulator import simulate
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.combined import estimated_profile
from dapple_tf.tools.evaluation.combined_workers_report import text
from dapple_tf.tools.evaluation.inside_hosts import inside, run_inside
from dapple_tf.tools.evaluation.quiet import with_noise
from dapple_tf.tools.hosts import Hosts, HostsError, unavailable

FLAGS = flags.FlagValues()

_DEVICES = flags.DEFINE_integer("devices", 2, "Devices of each host.", 2, 8, flag_values=FLAGS)
_SHARE = flags.DEFINE_float("share", 0.25, "Cores' time of each device.", 0.05, 1.0, flag_values=FLAGS)
_RATE = flags.DEFINE_float("rate", 50.0, "Mbit/s of the link between the hosts.", 1.0, 1e6, flag_values=FLAGS)
_BATCH = flags.DEFINE_integer("batch", 2, "Samples of a step.", 1, flag_values=FLAGS)
_BLOCKS = flags.DEFINE_integer("blocks", 2, "Blocks of the model, one after the other.", 2, flag_values=FLAGS)
_BRANCHES = flags.DEFINE_integer("branches", 2, "Parallel branches of a block.", 1, flag_values=FLAGS)
_TOKENS = flags.DEFINE_integer("tokens", 256, "Tokens of a sample.", 1, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer("width", 256, "Numbers of a token between blocks.", 1, flag_values=FLAGS)
_HIDDEN = flags.DEFINE_integer("hidden", 2560, "Numbers of a token within branches.", 1, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer(
    "rounds",
    9,
    "Measured steps of each way; medians and quartiles are reported. 0 only profiles and plans.",
    0,
    flag_values=FLAGS,
)
_PROFILES = flags.DEFINE_string(
    "profiles",
    None,
    "Folder in which the profiles of layers and operators are kept, and from which they are taken.",
    flag_values=FLAGS,
)
_JSON = flags.DEFINE_string(
    "json", None, "JSON file to write the numbers and the machine's facts to.", flag_values=FLAGS
)
_INSIDE = flags.DEFINE_string(
    "inside", None, "Internal: this is the client within the first host; its task's file.", flag_values=FLAGS
)

_MODULE = "tools.evaluation.combined_workers"
_HOSTS = 2
_UNCOUNTED = 3
"""Steps that warm everything up."""
_PROFILED_STEPS = 10
"""Steps of which times of operators are means."""


class Branches(keras.layers.Layer):
    """Parallel branches of two dense layers each, which are added to the input: one layer, which no stage divides."""

    def __init__(self, branches: int, hidden: int, **options: Any) -> None:
        super().__init__(**options)
        self.branches, self.hidden = branches, hidden

    def build(self, shape: Sequence[int | None]) -> None:
        """Makes the weights."""
        width = shape[-1]
        assert width is not None
        sizes = ((width, self.hidden), (self.hidden, width))
        self.kernels = [
            [self.add_weight(shape=size, name=f"kernel_{branch}_{number}") for number, size in enumerate(sizes)]
            for branch in range(self.branches)
        ]

    def call(self, inputs: Any) -> Any:
        """Returns the sum of the inputs and of what the branches make of them."""
        ends = [inputs]
        for first, second in self.kernels:
            ends.append(keras.ops.matmul(keras.ops.relu(keras.ops.matmul(inputs, first)), second))
        return sum(ends[1:], start=ends[0])


def branched(task: Mapping[str, Any]) -> keras.Model:
    """Returns a compiled chain of blocks of parallel branches, with the same values each time.

    Args:
        task: ``blocks``, ``branches``, ``tokens``, ``width`` and ``hidden``, see the flags.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((task["tokens"], task["width"]))
    for block in range(task["blocks"]):
        x = Branches(task["branches"], task["hidden"], name=f"block_{block}")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pooled")(x)
    model = keras.Model(inputs, keras.layers.Dense(10, name="logits")(x), name="branched")
    model.compile(keras.optimizers.SGD(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def batch_of(task: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a batch of random numbers, and its labels."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(task["batch"], task["tokens"], task["width"])).astype("float32")
    return x, draw.integers(0, 10, task["batch"])


def fastest_data_parallel(
    profile: dapple.Profile, cluster: dapple.Cluster, batch: int
) -> tuple[dapple.Plan, float] | None:
    """Returns data parallelism without stages: the fastest number of replicas, micro-batches and reductions.

    Returns:
        The plan and its simulated seconds; None where the batch has no two samples, or nothing fits.
    """
    choices: list[tuple[float, int, dapple.Plan]] = []
    for devices in range(2, cluster.num_devices + 1):
        for count in range(1, batch // devices + 1):
            for algorithm in ("flat", "hierarchical"):
                if batch % count == 0:
                    plan = dapple.Plan.data_parallel(devices, batch, micro_batches=count, all_reduce=algorithm)
                    try:
                        early = dapple.reduced_early(plan, profile, cluster)
                        choices.append((simulate(early, profile, cluster).latency, len(choices), early))
                    except PlanError:
                        continue  # It doesn't fit.
    if not choices:
        return None
    seconds, _, best = min(choices)
    return best, seconds


def ways_of(
    profile: dapple.Profile, cluster: dapple.Cluster, batch: int, groups: GroupProfiler
) -> dict[str, tuple[dapple.Plan, float]]:
    """Returns the plan of each way, and its simulated seconds."""
    single = dapple.Plan.data_parallel(1, batch)
    ways = {"single": (single, simulate(single, profile, cluster).latency)}
    if (parallel := fastest_data_parallel(profile, cluster, batch)) is not None:
        ways["data_parallel"] = parallel
    stages = dapple.plan(profile, cluster, batch, schedule="auto")
    assert stages.report is not None
    ways["stages"] = stages, stages.report.latency
    for name, devices in (("operators_on_a_host", cluster.devices_of(0)), ("operators", range(cluster.num_devices))):
        ways[name] = dapple.Plan.by_operators(devices, batch), groups.whole_seconds(cluster, batch, [*devices])
    request = PlanRequest.of(groups.pieces(), cluster, batch, schedule="auto")
    combined = find(request, groups.searched)
    assert combined.report is not None
    ways["combined"] = combined, combined.report.latency
    if not several_on_groups(combined):
        several = with_groups(request, None, groups.searched, several_on_groups)
        if several is not None:
            ways["groups"] = several.plan, several.latency
    return ways


def described(plan: dapple.Plan) -> str:
    """Returns a plan in a few words."""
    if plan.operator_devices is not None and plan.num_stages == 1 and len(plan.operator_devices[0]) == 1:
        return f"operators on {len(plan.operator_devices[0][0])} devices"
    return f"{shape(plan)}, {plan.schedule}"


def _train(task: Mapping[str, Any]) -> dict[str, Any]:
    """Profiles, plans, trains and measures; runs in the first host."""
    os.nice(-10)  # Devices have their quotas whatever else runs here; the client's messages are on their way, too.
    batch, (x, y) = task["batch"], batch_of(task)
    cluster = dapple.Cluster.of_servers(task["addresses"]).with_workers_per_server(task["devices"])
    with connected(cluster):
        command.say("measuring links")
        cluster = measure_links(cluster, repeats=5, capacity=False)
        command.say(str(cluster))
        sizes = tuple(sorted({1, batch}))
        model = branched(task)
        profile, costs = _profiled(model, cluster, sizes, task)
        command.say("planning")
        groups = GroupProfiler(model, profile, cluster, costs, sizes, x=x, y=y)
        ways = ways_of(profile, cluster, batch, groups)
        for name, (plan, seconds) in ways.items():
            command.say(f"{name}: {described(plan)}, {seconds * 1e3:.0f} ms expected")
        if not task["rounds"]:
            return {"rows": []}
        command.say("trying the best plan of each kind")
        tried = plan_model(
            model, cluster, batch, profiled=profile, operator_groups=True, operator_costs=costs, by_trial=True,
            schedule="auto", x=x, y=y,
        ).plan  # fmt: skip
        trainers: dict[str, Any] = {}
        for name, (plan, _) in ways.items():
            command.say(f"preparing {name}")
            options: dict[str, Any] = {"operator_costs": costs} if plan.operator_devices else {}
            trainers[name] = dapple.transform(branched(task), cluster, plan, **options)
        times, losses, others = _turns(trainers, x, y, task)
        rows = [
            {
                **{"way": name, "plan": described(plan), "predicted_s": seconds, "steps_s": times[name]},
                **{"losses": losses[name], "placed_s": [one.seconds for one in trainers[name].placement.values()]},
            }
            for name, (plan, seconds) in ways.items()
        ]
        for trainer in trainers.values():
            trainer.close()
    same = [name for name, (plan, _) in ways.items() if plan == tried]
    return {
        **{"rows": rows, "others_cores": others, "links": _links(cluster)},
        **{"by_trial": described(tried), "by_trial_ways": same},
    }


def _profiled(
    model: keras.Model, cluster: dapple.Cluster, sizes: Sequence[int], task: Mapping[str, Any]
) -> tuple[dapple.Profile, dapple.OperatorCosts]:
    """Measures operators on slices of these sizes, or takes what a former run has measured; layers consist of them."""
    folder = None if task["profiles"] is None else pathlib.Path(task["profiles"])
    if folder is not None and (folder / "costs.json").exists():
        return dapple.Profile.load(folder / "profile.json"), dapple.OperatorCosts.load(folder / "costs.json")
    x, y = batch_of(task)
    costs: dapple.OperatorCosts | None = None
    for samples in sizes:
        command.say(f"measuring operators, {samples} samples")
        everywhere = dapple.Plan.by_operators(cluster.num_devices, samples)
        costs = dapple.profile_operators(model, cluster, everywhere, x=x, y=y, steps=_PROFILED_STEPS, costs=costs)
    assert costs is not None
    # Of the same operators: layers measured as a whole would be other times for the same work.
    profile = estimated_profile(model, (sizes[0], sizes[-1]), cluster.device_names[0], costs)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        profile.save(folder / "profile.json")
        costs.save(folder / "costs.json")
    return profile, costs


def _turns(
    trainers: Mapping[str, Any], x: np.ndarray, y: np.ndarray, task: Mapping[str, Any]
) -> tuple[dict[str, list[float]], dict[str, list[float]], list[float]]:
    """Trains in turns, in an order that is reversed from round to round.

    Returns:
        Seconds of each way's measured steps; its losses of all steps; the cores that other processes used in each
        measured round.
    """
    times: dict[str, list[float]] = {name: [] for name in trainers}
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    others = []

    def one_round(number: int) -> Callable[[], None]:
        def run() -> None:
            for name in list(trainers)[:: 1 if number % 2 == 0 else -1]:
                losses[name].append(float(trainers[name].train_on_batch(x, y)))
                times[name].append(trainers[name].last_step_seconds)

        return run

    for number in range(task["rounds"] + _UNCOUNTED):
        _, noise = with_noise(one_round(number), task["workers"])
        others.append(noise)
        shown = ", ".join(f"{name} {own[-1] * 1e3:.0f}" for name, own in times.items())
        command.say(f"round {number}: {shown} ms; others used {noise:.2f} cores")
    return {name: own[_UNCOUNTED:] for name, own in times.items()}, losses, others[_UNCOUNTED:]


def _links(cluster: dapple.Cluster) -> dict[str, float | None]:
    return {
        f"{kind}_{part}": getattr(cluster, f"{kind}_{part}")
        for kind in ("intra", "inter")
        for part in ("bandwidth", "latency")
    }


def run() -> dict[str, Any]:
    """Sets hosts up, measures, and takes them down; returns a record."""
    cores = sorted(os.sched_getaffinity(0))
    task = {
        **{"devices": _DEVICES.value, "share": _SHARE.value, "rate_mbit": _RATE.value, "batch": _BATCH.value},
        **{"blocks": _BLOCKS.value, "branches": _BRANCHES.value, "tokens": _TOKENS.value},
        **{"width": _WIDTH.value, "hidden": _HIDDEN.value, "rounds": _ROUNDS.value},
    }
    profiles = None if _PROFILES.value is None else os.path.abspath(_PROFILES.value)
    count = _HOSTS * _DEVICES.value
    with Hosts(
        _HOSTS,
        workers=_DEVICES.value,
        cores=[cores[worker * len(cores) // _DEVICES.value % len(cores)] for worker in range(count)],
        share=_SHARE.value,
    ) as hosts:
        hosts.limit(_RATE.value)
        workers = [process.pid for process in hosts.processes]
        return {
            **task,
            "hosts": _HOSTS,
            **run_inside(hosts, _MODULE, {**task, "workers": workers, "profiles": profiles}),
        }


def _name() -> str:
    """Returns the name under which results are stored: those of other settings stay."""
    return f"combined_workers_{_HOSTS}x{_DEVICES.value}_{_RATE.value:g}_{_BRANCHES.value}_branches"


def main() -> None:
    """Measures one setting."""
    if _INSIDE.value is not None:
        inside(_INSIDE.value, _train)
    check_output(_JSON.value)
    reason = unavailable()
    command.check(not reason, f"{reason}; run this with sudo, on a machine that allows network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        record = run()
    except HostsError as error:
        sys.exit(str(error))
    if not record["rows"]:
        return
    print(text(record))
    if _JSON.value:
        write_results(_JSON.value, _name(), [record])


if __name__ == "__main__":
    command.start(main, FLAGS)
