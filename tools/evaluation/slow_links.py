"""Trains pipelines over slow links, and compares policies with each other and with their simulation. Needs root.

    python -m tools.evaluation.slow_links --work=dense --json=docs/results/slow_links.json
    python -m tools.evaluation.slow_links --hosts=4 --plans=straight,2:2 --transfers=0.5 --schedules=dapple_a,dapple_b
    python -m tools.evaluation.slow_links --hosts=4 --work=units --blocks=16 --micro_batches=4 --transfers=0.05

The hosts are network namespaces with real workers, joined by links with a token bucket filter (`tc tbf`), whose rate is
such that what a stage sends takes --transfers of its forward. The model is equal blocks:

* dense: dense layers, which need a core for each host;
* waits: layers that scale their input; F and Bx of a block wait for --block ms and twice as long without using a core,
  so that two cores carry four workers. All else is real: gradients, transfers, all-reduces, updates;
* units: the same, but F, Bx and Bw of a block wait equally long, as in Out-Of-Order BackProp's figures.

The model is profiled once, links are measured for each rate; then all plans train in turns. "predicted" is the
simulation of the plan with this profile and these links.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import dapple_tf as dapple
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.measuring.links import measure_links
from dapple_tf.schedules.policy import Placement
from dapple_tf.schedules.schedules import POLICIES, policy_of
from dapple_tf.text_table import table
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.hosts import Hosts, HostsError, unavailable

_HOSTS = flags.DEFINE_integer("hosts", 2, "Number of hosts, with one device each.", 2, 8)
_PLANS = flags.DEFINE_list("plans", ["straight"], "straight, or 2:2 on four hosts.")
_TRANSFERS = flags.DEFINE_list("transfers", ["0.05", "0.2", "0.5", "1.0"], "Transfers, of a stage's forward time.")
_SCHEDULES = flags.DEFINE_list(
    "schedules",
    ["gpipe", "dapple_a", "dapple_b", "fast_forward", "modulo", "interleaved", "zb_h1", "zb_h2", "zb_v", "auto"],
    "Names of policies, and auto.",
)
_WORK = flags.DEFINE_enum("work", "waits", ["dense", "waits", "units"], "What blocks do, see above.")
_WIDTH = flags.DEFINE_integer("width", 0, "Width of the blocks; 0 for 2048 if dense, else 65536.", 0, 2**20)
_SKIPS = flags.DEFINE_bool(
    "skips", False, "Let every block read the first one's results, too, and add plans in which stages relay them."
)
_BLOCK = flags.DEFINE_float("block", 15.0, "Milliseconds that F of a block waits.", 0.1, 1e4)
_BLOCKS = flags.DEFINE_integer("blocks", 8, "Number of blocks.", 2, 64)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 8, "Micro-batches of a step.", 1, 64)
_STEPS = flags.DEFINE_integer("steps", 5, "Measured steps of each plan; the median counts.", 1)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers and the machine's facts to.")
_INSIDE = flags.DEFINE_string("inside", None, "Internal: this is the client within the first host; its task's file.")

_MODULE = "tools.evaluation.slow_links"
_UNCOUNTED = 3
"""Steps that warm everything up: predictions leave out the first two."""

_SAMPLES = {"dense": 96, "waits": 4, "units": 4}
"""Samples of a micro-batch."""

_WAITS = {"waits": (1.0, 2.0, 0.0), "units": (1.0, 1.0, 1.0)}
"""How often F, Bx and Bw of a block wait for --block ms."""


# ---- the client within the first host


def run_inside(hosts: Hosts, task: Mapping[str, Any]) -> Any:
    """Runs this program with ``--inside=FILE`` in the first host; returns the result that `inside` writes.

    Args:
        hosts: the hosts, whose addresses the task gets as ``addresses``.
        task: what it is to do, as JSON can have it.

    Raises:
        HostsError: the client failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as directory:
        told, result = pathlib.Path(directory) / "task.json", pathlib.Path(directory) / "result.json"
        told.write_text(json.dumps({**task, "addresses": hosts.addresses, "result": str(result)}))
        program = [sys.executable, "-m", _MODULE, f"--inside={told}", "--verbosity=-2"]
        if code := hosts.run(0, program).returncode:
            raise HostsError(f"the client in host 0 ended with code {code}; see above")
        return json.loads(result.read_text())


def inside(path: str, work: Callable[[Mapping[str, Any]], Any]) -> NoReturn:
    """Does the task of a file, writes its result, and ends the process.

    Args:
        path: the file that `run_inside` has written.
        work: task -> result, as JSON can have it.
    """
    task = json.loads(pathlib.Path(path).read_text())
    try:
        pathlib.Path(task["result"]).write_text(json.dumps(work(task)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # After a failed collective, sessions may wait forever to be closed.
    os._exit(0)


# ---- models and plans


def waited(after: tf.Tensor, seconds: float) -> tf.Tensor:
    """Returns zero when ``seconds`` have passed since ``after`` was computed, without using a core."""
    first = tf.reshape(after, [-1])[:1]
    kinds = {"output_types": [first.dtype], "output_shapes": [[1]]}
    elements = tf.raw_ops.TensorDataset(components=[first], output_shapes=[[1]])
    # A data set of one element is asked twice, the second time for its end.
    asleep = tf.raw_ops.SleepDataset(input_dataset=elements, sleep_microseconds=int(seconds * 1e6 / 2), **kinds)
    (element,) = tf.raw_ops.DatasetToSingleElement(dataset=asleep, **kinds)
    return tf.reduce_sum(element) * 0.0


class Waiting(keras.layers.Layer):
    """Scales its input by trained weights; F, Bx and Bw wait so many seconds."""

    def __init__(self, forward: float, input_gradient: float, weight_gradient: float, **options: Any) -> None:
        super().__init__(**options)
        self.forward, self.input_gradient, self.weight_gradient = forward, input_gradient, weight_gradient

    def build(self, shape: Sequence[int | None]) -> None:
        """Makes the weights."""
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, inputs: Any) -> Any:
        """Returns the scaled inputs, later."""

        @tf.custom_gradient
        def scaled(x: tf.Tensor, scale: tf.Tensor) -> Any:
            def gradients(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                weights = tf.reduce_sum(upstream * x, 0)
                if self.weight_gradient:
                    weights += waited(upstream, self.weight_gradient)
                return upstream * scale + waited(upstream, self.input_gradient), weights

            return x * scale + waited(x, self.forward), gradients

        return scaled(inputs, tf.convert_to_tensor(self.scale))


def model_of(task: Mapping[str, Any]) -> keras.Model:
    """Returns a compiled model of equal blocks."""
    keras.utils.set_random_seed(1)
    layers: list[keras.layers.Layer] = []
    for number in range(task["blocks"]):
        if task["work"] == "dense":
            layers.append(keras.layers.Dense(task["width"], activation="relu", name=f"block_{number}"))
        else:
            waits = (times * task["seconds"] for times in _WAITS[task["work"]])
            layers.append(Waiting(*waits, name=f"block_{number}"))
    # Labels come from the client in the first host: wide ones would take more of the link than the stages do.
    layers.append(keras.layers.Dense(1, name="output"))
    inputs = keras.Input((task["width"],))
    first = last = layers[0](inputs)
    for number, layer in enumerate(layers[1:], 1):
        reads_first = task["skips"] and 1 < number < len(layers) - 1
        last = layer(keras.layers.Add(name=f"add_{number}")([last, first]) if reads_first else last)
    model = keras.Model(inputs, last)
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    return model


def plan_of(schedule: str, shape: str, task: Mapping[str, Any], *, relayed: bool = False) -> dapple.Plan:
    """Returns the plan of a shape under a policy, with as many stages on each device as it needs.

    When ``relayed``, stages hand on what they read.
    """
    hosts, blocks = task["hosts"], task["blocks"]
    groups = [[host] for host in range(hosts)] if shape == "straight" else [[0, 1], [2, 3]]
    placements = policy_of(schedule).planning.placements
    if task["work"] == "units" and schedule == "modulo":
        groups *= blocks // len(groups)  # Out-Of-Order BackProp's modulo allocation: block by block.
    elif Placement.STRAIGHT not in placements:
        groups = groups + (groups[::-1] if Placement.VEE in placements else groups)
    ends = [blocks * (stage + 1) // len(groups) for stage in range(len(groups) - 1)]
    count = task["micro_batches"]
    relays = tuple(range(1, len(groups) - 1)) if relayed else ()
    cuts = [f"block_{end - 1}" for end in ends]
    return dapple.Plan.manual(cuts, groups, count, count * task["samples"], schedule, relays=relays)


def plans_of(profile: dapple.Profile, cluster: dapple.Cluster, task: Mapping[str, Any]) -> dict[str, dapple.Plan]:
    """Returns the plans of all schedules."""
    plans = {}
    for name in task["schedules"]:
        if name != "auto":
            plans[name] = plan_of(name, task["shape"], task)
            if task["skips"] and len(plans[name].devices) > 2:
                plans[f"{name}, relays"] = plan_of(name, task["shape"], task, relayed=True)
            continue
        count = task["micro_batches"]
        plans[name] = dapple.plan(profile, cluster, count * task["samples"], micro_batches=count, schedule="auto")
    return plans


def _batch(task: Mapping[str, Any], samples: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(samples, width)).astype("float32") for width in (task["width"], 1))
    return x, y


def _profiled(task: Mapping[str, Any]) -> dict[str, Any]:
    """Profiles the model; runs in the first host."""
    samples = task["samples"]
    x, y = _batch(task, samples)
    cluster = dapple.Cluster.of_servers(task["addresses"])
    with connected(cluster):
        # Replicas have a part of a micro-batch.
        sizes = sorted({samples // 4, samples // 2, samples})
        profile = dapple.profile(model_of(task), sizes, cluster=cluster, x=x, y=y, cache=False)
    return {"profile": profile.to_json(), "forward": sum(layer.forward.at(samples) for layer in profile.layers)}


def _measure(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Trains and measures; runs in the first host."""
    count = task["micro_batches"]
    batch = count * task["samples"]
    x, y = _batch(task, batch)
    profile = dapple.Profile.from_json(task["profile"])
    rows = []
    cluster = dapple.Cluster.of_servers(task["addresses"])
    with connected(cluster):
        cluster = measure_links(cluster, repeats=5, capacity=False)
        plans = plans_of(profile, cluster, task)
        # Models of their own: trainers of one model would send each other its values between their steps.
        trainers = {
            name: dapple.transform(model_of(task), cluster, plan, profile=profile) for name, plan in plans.items()
        }
        for _ in range(task["steps"] + _UNCOUNTED):
            for trainer in trainers.values():
                trainer.train_on_batch(x, y)
        for name, trainer in trainers.items():
            prediction = trainer.prediction
            assert prediction is not None
            plan = plans[name]
            rows.append(
                {
                    "schedule": name,
                    "plan": f"{plan.schedule} {':'.join(map(str, plan.replicas))}",
                    "predicted": prediction.predicted,
                    "steps": list(prediction.steps),
                }
            )
            trainer.close()
    return rows


def _task() -> dict[str, Any]:
    work = _WORK.value
    return {
        "hosts": _HOSTS.value,
        "work": work,
        "blocks": _BLOCKS.value,
        "width": _WIDTH.value or (2048 if work == "dense" else 65536),
        "seconds": _BLOCK.value / 1e3,
        "samples": _SAMPLES[work],
        "skips": _SKIPS.value,
        "micro_batches": _MICRO_BATCHES.value,
        "schedules": _SCHEDULES.value,
        "steps": _STEPS.value,
    }


def run(shape: str, transfers: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Measures all policies with plans of a shape, with transfers of these parts of a stage's forward."""
    task = {**_task(), "shape": shape}
    stages = _HOSTS.value if shape == "straight" else 2
    cores = sorted(os.sched_getaffinity(0))
    with Hosts(_HOSTS.value, cores=[cores[host % len(cores)] for host in range(_HOSTS.value)]) as hosts:
        profiled = run_inside(hosts, {**task, "what": "profile"})
        size = 4 * task["width"] * task["samples"]
        for transfer in transfers:
            rate = size * 8 / 1e6 / (transfer * profiled["forward"] / stages)
            command.say(f"{shape}, transfers of {transfer:g}: {size / 2**20:.2f} MiB at {rate:.0f} Mbit/s")
            hosts.limit(rate)
            rows = run_inside(hosts, {**task, "what": "measure", "profile": profiled["profile"]})
            yield {
                **{"hosts": _HOSTS.value, "work": _WORK.value, "skips": _SKIPS.value},
                **{"plan": shape, "blocks": _BLOCKS.value, "micro_batches": _MICRO_BATCHES.value},
                **{"block_seconds": _BLOCK.value / 1e3, "transfer": transfer},
                **{"rate_mbit": rate, "message_bytes": size, "rows": rows},
            }


def _name() -> str:
    units = f"_units_{_BLOCKS.value}_{_MICRO_BATCHES.value}" if _WORK.value == "units" else ""
    return f"slow_links_{_HOSTS.value}_hosts{'_skips' if _SKIPS.value else ''}{units}"


def text(result: Mapping[str, Any]) -> str:
    """Returns the numbers of one size of transfers for people."""
    medians = {row["schedule"]: statistics.median(row["steps"]) for row in result["rows"]}
    base = medians.get("dapple_a", min(medians.values()))
    rows = [("schedule", "plan", "predicted ms", "measured ms", "least", "most", "error", "dapple_a / this")]
    for row in result["rows"]:
        measured = medians[row["schedule"]]
        rows.append(
            (
                *(row["schedule"], row["plan"], f"{row['predicted'] * 1e3:.0f}"),
                *(f"{value * 1e3:.0f}" for value in (measured, min(row["steps"]), max(row["steps"]))),
                f"{row['predicted'] / measured - 1:+.1%}",
                f"{base / measured:.3f}",
            )
        )
    head = (
        f"{result['hosts']} hosts, {result['work']}, {result['plan']}: transfers of {result['transfer']:g} of a "
        f"forward, {result['message_bytes'] / 2**20:.2f} MiB at {result['rate_mbit']:.0f} Mbit/s"
    )
    return f"{head}\n{table(rows, left=2)}\n"


def main(argv: list[str]) -> None:
    """Sets hosts up, measures, and takes them down."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    if _INSIDE.value is not None:
        inside(_INSIDE.value, lambda task: _profiled(task) if task["what"] == "profile" else _measure(task))
    check_output(_JSON.value)
    command.check_choices(_SCHEDULES, (*POLICIES, "auto"))
    command.check_choices(_PLANS, ("straight", "2:2"))
    command.check(_HOSTS.value == 4 or "2:2" not in _PLANS.value, f"--plans=2:2 needs --hosts=4, not {_HOSTS.value}")
    for value in _TRANSFERS.value:
        good = value.replace(".", "", 1).isdigit() and 0 < float(value) < 100
        command.check(good, f"--transfers has {value!r}; give numbers above 0")
    if reason := unavailable():
        raise app.UsageError(f"{reason}; run this with sudo, on a machine that allows network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    for shape in _PLANS.value:
        try:
            for result in run(shape, [float(value) for value in _TRANSFERS.value]):
                results.append(result)
                sys.stdout.write(text(result) + "\n")
                sys.stdout.flush()
                if _JSON.value:
                    write_results(_JSON.value, _name(), results)
        except HostsError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    app.run(main)
