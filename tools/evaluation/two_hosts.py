"""Measures data-parallel training on two hosts with a slow network, in several ways of hiding the network.

    sudo .venv/bin/python -m tools.evaluation.two_hosts --models=resnet,vgg --rate=auto --json=two_hosts.json

The hosts are network namespaces of this machine, joined by virtual Ethernet devices whose rate is limited by
`tc tbf` (`tools.hosts`). Each runs a worker (`dapple_tf.worker`) on a core of its own. All of it is taken down at the
end, and on errors and Ctrl-C, too. That needs root, `ip` and `tc`.

Variants take turns, so that all see the same changes of the machine's speed. Only steps count during which
other processes leave the machine alone (or else the four least disturbed ones):

* compute: each host trains on its half of the batch by itself; no network.
* all_reduce: only as many bytes as the model has gradients, in the same buckets; no computation.
* conventional: the whole model as one stage; gradients are reduced after the backward pass.
* pieces: the whole model as one stage, whose backward is cut where the chunks of the next variants end (backward_cuts).
* conventional_chunked: the model in chunks, with wait_free=False; shows what chunks cost by themselves.
* wait_free: the model in chunks, each reduced as soon as its gradients are there.
* first_<k>: the same with the weight gradients of the first k chunks put off (reverse_first_k; Out-Of-Order BackProp,
  EuroSys'22, section 5.1).
* first_<k>_carried_<n>: the same, and the n reductions that start last go on during the next step's forward pass
  (carried_updates).

"others" is the maximum number of cores used by other processes during the steps that count; "hidden" is the part of
the all-reduce or of the computation, whichever is shorter, that runs behind the other.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import dapple_tf as dapple
from dapple_tf import text_table
from dapple_tf.clusters.shared_connections import connected, open_session
from dapple_tf.models.resnet import resnet
from dapple_tf.models.vgg import vgg
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.inside_hosts import inside, run_inside
from dapple_tf.tools.evaluation.quiet import undisturbed
from dapple_tf.tools.hosts import Hosts, HostsError, unavailable

_MODELS = flags.DEFINE_list("models", ["resnet", "vgg"], "Models to train: resnet or vgg.")
_RATE = flags.DEFINE_string(
    "rate", "auto", "Mbit/s of the link in each direction; auto: all-reduce takes about --ratio times computation."
)
_RATIO = flags.DEFINE_float("ratio", 1.0, "See --rate.", lower_bound=0.01)
_FIRST = flags.DEFINE_list("first_k", ["0", "4", "7"], "Values of reverse_first_k.")
_CARRIED = flags.DEFINE_list("carried", ["0", "3", "6"], "Values of carried_updates; all pairs with first_k are tried.")
_QUIET = flags.DEFINE_integer("quiet", 10, "Undisturbed steps of each variant to measure.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "Maximum rounds, while waiting for a quiet machine.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 2, "Steps of each variant in a round.", lower_bound=1)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the numbers and the machine's facts to.")
_INSIDE = flags.DEFINE_string("inside", None, "Internal: this is the client within the first host; its task's file.")

_NOISE = 0.1
"""Cores that other processes may use during an undisturbed step."""
_KEY = 2_000_000_000
"""First collective key of `Client.all_reduce`; steps count theirs from 1."""


class Example(NamedTuple):
    """A model to train.

    Attributes:
        make: function that returns the model.
        batch: default global batch size.
        cuts: the last layers of its chunks but the last chunk.
    """

    make: Callable[[], keras.Model]
    batch: int
    cuts: Sequence[str]


_EXAMPLES = {
    "resnet": Example(resnet, 64, [f"block_{number}" for number in range(9)]),
    "vgg": Example(vgg, 256, ["conv_0_0", "pool_0", "conv_1_0", "pool_1", "conv_2_0", "flatten", "dense_0", "dense_1"]),
}


# ---- the two hosts


def run(hosts: Hosts, task: Mapping[str, Any]) -> dict[str, Any]:
    """Runs this program's other half in the first host; returns its result."""
    workers = [process.pid for process in hosts.processes]
    return dict(run_inside(hosts, "tools.evaluation.two_hosts", {**task, "workers": workers}))


# ---- what runs in the first host


class Client:
    """Trains one model in all variants on the two servers."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task
        self.example = _EXAMPLES[task["model"]]
        self.batch: int = task["batch"]
        self.cluster = dapple.Cluster.of_servers(task["addresses"])
        self._threads = concurrent.futures.ThreadPoolExecutor(2)
        draw = np.random.default_rng(0)
        shape = self._model().input_shape[1:]
        self.x = draw.normal(size=(self.batch, *shape)).astype("float32")
        self.y = draw.integers(0, 10, self.batch)

    def _model(self) -> keras.Model:
        keras.utils.set_random_seed(1)
        model = self.example.make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), loss)
        return model

    def _trainer(self, plan: dapple.Plan) -> Any:
        return dapple.transform(self._model(), self.cluster, plan)

    def compute(self) -> Callable[[], float]:
        """Returns a function that runs a step of both hosts at once, without a network."""
        half = self.batch // 2
        trainers = [self._trainer(dapple.Plan.data_parallel([host], half)) for host in range(2)]
        x, y = self.x[:half], self.y[:half]
        for trainer in trainers:
            trainer.train_on_batch(x, y)

        def step() -> float:
            waiting = [self._threads.submit(trainer.train_on_batch, x, y) for trainer in trainers]
            for future in waiting:
                future.result()
            return max(trainer.last_step_seconds for trainer in trainers)

        return step

    def all_reduce(self) -> Callable[[], float]:
        """Returns a function that reduces as many bytes as the model has gradients, bucket by bucket."""
        size = self.gradient_bytes // 4
        most = max(1, self.task["bucket_bytes"] // 4)
        graph = tf.Graph()
        with graph.as_default():
            ends = []
            for device in self.cluster.device_names:
                with tf.device(device):
                    one = tf.compat.v1.placeholder_with_default(np.float32(1), ())
                    last: list[tf.Operation] = []
                    for number, start in enumerate(range(0, size, most)):
                        vector = tf.fill((min(most, size - start),), one)
                        with tf.control_dependencies(last):
                            reduced = tf.raw_ops.CollectiveReduceV2(
                                input=vector,
                                group_size=2,
                                group_key=_KEY,
                                instance_key=_KEY + number,
                                ordering_token=[],
                                merge_op="Add",
                                final_op="Id",
                            )
                        last = [reduced.op]
                    ends += last
            done = tf.group(*ends)
        session = open_session(self.cluster, graph)

        def step() -> float:
            started = time.perf_counter()
            session.run(done)
            return time.perf_counter() - started

        return step

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return 4 * sum(int(np.prod(variable.shape)) for variable in self._model().trainable_variables)

    def plans(self) -> Iterator[tuple[str, dapple.Plan]]:
        """Yields the variants that train on both hosts."""
        bucket = self.task["bucket_bytes"]
        yield "conventional", dapple.Plan.data_parallel(2, self.batch, wait_free=False, bucket_bytes=bucket)
        cuts = self.example.cuts
        yield "pieces", dapple.Plan.data_parallel(2, self.batch, backward_cuts=tuple(cuts), bucket_bytes=bucket)
        chunks = [[0, 1]] * (len(cuts) + 1)

        def chunked(wait_free: bool, k: int = 0, carried: int = 0) -> dapple.Plan:
            return dapple.Plan.manual(
                cuts,
                chunks,
                1,
                self.batch,
                wait_free=wait_free,
                reverse_first_k=k,
                carried_updates=carried,
                bucket_bytes=bucket,
            )

        yield "conventional_chunked", chunked(False)
        yield "wait_free", chunked(True)
        for k, carried in itertools.product(self.task["first_k"], self.task["carried"]):
            if k or carried:
                name = f"first_{k}" + f"_carried_{carried}" * bool(carried)
                yield name, chunked(True, min(k, len(chunks)), carried)

    def measure(self) -> dict[str, Any]:
        """Measures all variants in turns."""
        losses: dict[str, list[float]] = {}
        steps: dict[str, Callable[[], float]] = {"compute": self.compute(), "all_reduce": self.all_reduce()}
        failed: dict[str, str] = {}

        def training(name: str, plan: dapple.Plan) -> Callable[[], float]:
            trainer = self._trainer(plan)
            losses[name] = []

            def step() -> float:
                losses[name].append(float(trainer.train_on_batch(self.x, self.y)))
                return float(trainer.last_step_seconds)

            for _ in range(3):  # It warms up.
                step()
            return step

        for name, plan in self.plans():
            command.say(f"{self.task['model']}: preparing {name}")
            try:
                steps[name] = training(name, plan)
            except (dapple.DappleError, ValueError, AssertionError, LookupError) as error:
                failed[name] = f"{type(error).__name__}: {error}"
                command.say(f"{name} is left out: {failed[name]}")
                losses.pop(name, None)
        samples = self._samples(steps)
        first = next(iter(losses.values()))
        apart = max(abs(a - b) / abs(b) for other in losses.values() for a, b in zip(other, first, strict=True))
        return {
            "samples": samples,
            "failed": failed,
            "losses": first,
            "losses_apart": apart,
            "gradient_bytes": self.gradient_bytes,
            "chunks": len(self.example.cuts) + 1,
        }

    def _samples(self, steps: Mapping[str, Callable[[], float]]) -> dict[str, list[tuple[float, float]]]:
        """Measures variants in turns; returns seconds of each step, and cores that other processes used meanwhile."""
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for number in range(1, self.task["rounds"] + 1):
            for name, step in steps.items():
                for _ in range(self.task["steps"]):
                    with self._noise() as noise:
                        seconds = step()
                    samples[name].append((seconds, noise[0]))
            quiet = {
                name: sum(noise <= self.task["noise"] for _, noise in measured) for name, measured in samples.items()
            }
            least = min(quiet, key=lambda name: quiet[name])
            command.say(
                f"{self.task['model']}: round {number}, {quiet[least]} of {self.task['quiet']} undisturbed steps of "
                f"{least}; conventional {samples['conventional'][-1][0] * 1e3:.0f} ms"
            )
            if quiet[least] >= self.task["quiet"]:
                break
        return samples

    def compute_seconds(self) -> dict[str, Any]:
        """Returns the processor time of a host's step without network, for --rate=auto, hardly disturbed by others."""
        step = self.compute()
        seconds = []
        for _ in range(8):
            before = [_cpu_seconds(server) for server in self.task["workers"]]
            step()
            seconds.append(max(_cpu_seconds(s) - b for s, b in zip(self.task["workers"], before, strict=True)))
        return {"seconds": statistics.median(seconds), "gradient_bytes": self.gradient_bytes}

    @contextlib.contextmanager
    def _noise(self) -> Iterator[list[float]]:
        """Yields a list that afterwards has the number of cores that other processes used meanwhile."""
        noise: list[float] = []
        before, started = _others(self.task["workers"]), time.perf_counter()
        yield noise
        noise.append((_others(self.task["workers"]) - before) / (time.perf_counter() - started))


def _cpu_seconds(process: int) -> float:
    """Returns the processor time of a process and its children so far: a worker's server is a child of it."""
    try:
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # It has ended meanwhile.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(_cpu_seconds, map(int, children)))


def _others(workers: Sequence[int]) -> float:
    """Returns the processor time so far of this machine's processes other than the workers and this one."""
    with open("/proc/stat") as lines:
        user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, next(lines).split()[1:9])
    total = (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
    return total - sum(map(_cpu_seconds, (*workers, os.getpid())))


def _work(task: Mapping[str, Any]) -> Any:
    client = Client(task)
    with connected(client.cluster):
        return client.measure() if task["what"] == "measure" else client.compute_seconds()


# ---- the whole


def measure(name: str, rate: float | None) -> dict[str, Any]:
    """Measures one model on fresh hosts; ``rate`` None for auto. Returns the client's result, and the settings."""
    batch = _EXAMPLES[name].batch
    task = {
        "model": name,
        "batch": batch,
        "bucket_bytes": 4 * 2**20,
        "first_k": [int(k) for k in _FIRST.value],
        "carried": [int(count) for count in _CARRIED.value],
        "quiet": _QUIET.value,
        "rounds": _ROUNDS.value,
        "noise": _NOISE,
        "steps": _STEPS.value,
    }
    with Hosts(2, cores=sorted(os.sched_getaffinity(0))[:2]) as hosts:
        if rate is None:
            command.say(f"{name}: measuring computation without a network")
            result = run(hosts, {**task, "what": "compute"})
            rate = result["gradient_bytes"] * 8 / result["seconds"] / 1e6 / _RATIO.value
        command.say(f"{name}: global batch {batch}, link of {rate:.0f} Mbit/s")
        hosts.limit(rate)
        return {**task, "rate_mbit": rate, **run(hosts, {**task, "what": "measure"})}


def table(result: Mapping[str, Any]) -> str:
    """Returns a model's numbers for people."""
    seconds, noise = {}, {}
    for name, steps in result["samples"].items():
        seconds[name], noise[name] = np.array(undisturbed(steps, result["noise"])).T
    typical = {name: float(np.median(times)) for name, times in seconds.items()}
    compute, all_reduce = typical["compute"], typical["all_reduce"]
    rows = [("variant", "steps", "median ms", "min", "max", "others", "speed-up", "hidden")]
    for name, times in seconds.items():
        trained = name not in ("compute", "all_reduce")
        rows.append(
            (
                name,
                str(len(times)),
                *(f"{value * 1e3:.0f}" for value in (typical[name], times.min(), times.max())),
                f"{noise[name].max():.2f}",
                f"{typical['conventional'] / typical[name]:.3f}" if trained else "",
                f"{(compute + all_reduce - typical[name]) / min(compute, all_reduce):.0%}" if trained else "",
            )
        )
    lines = text_table.table(rows, left=1).splitlines()
    size = result["gradient_bytes"]
    head = (
        f"{result['model']}: global batch {result['batch']}, {result['chunks']} chunks, {size / 1e6:.1f} MB of "
        f"gradients, link of {result['rate_mbit']:.0f} Mbit/s (all-reduce gets "
        f"{size * 8 / all_reduce / 1e6:.0f}); losses agree to {result['losses_apart']:.1e}"
    )
    lines += [f"{name} is left out: {why}" for name, why in result["failed"].items()]
    return "\n".join([head, *lines])


def _rate() -> float | None:
    if _RATE.value == "auto":
        return None
    try:
        rate = float(_RATE.value)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e6:
        raise app.UsageError(f"--rate={_RATE.value}: give a number of Mbit/s above 0, or auto")
    return rate


def _check() -> None:
    command.check_choices(_MODELS, _EXAMPLES)
    for flag, values in (("first_k", _FIRST.value), ("carried", _CARRIED.value)):
        for value in values:
            if not value.isdigit():
                raise app.UsageError(f"--{flag} has {value!r}; give whole numbers from 0")
    check_output(_JSON.value)
    if reason := unavailable():
        raise app.UsageError(f"{reason}; run this with sudo, on a machine that allows network namespaces")
    if shutil.which("taskset") is None:
        raise app.UsageError("`taskset` isn't installed; it comes with util-linux")
    if len(os.sched_getaffinity(0)) < 2:
        raise app.UsageError("two hosts need a core each, and this process may use only one")


def main(argv: list[str]) -> None:
    """Sets hosts up, measures, and takes them down."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; see --help")
    if _INSIDE.value is not None:
        inside(_INSIDE.value, _work)
    _check()
    rate = _rate()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    for name in _MODELS.value:
        try:
            results.append(measure(name, rate))
        except HostsError as error:
            sys.exit(f"{name}: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
        sys.stdout.write(table(results[-1]) + "\n\n")
        sys.stdout.flush()
        if _JSON.value:
            write_results(_JSON.value, "two_hosts", results)


if __name__ == "__main__":
    app.run(main)
