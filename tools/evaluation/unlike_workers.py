"""Measures data-parallel training on two workers of unlike speed, with equal slices and with slices by speed.

    python -m tools.evaluation.unlike_workers --json=unlike_workers.json

Each worker runs on a core of its own; busy loops share the second one's. Speeds are measured (`dapple.measure_speeds`),
the model is profiled on the first worker, and shares follow from both, as in the planner. Then steps of both plans take
turns, so that both see the same changes of the machine's speed; what counts is the median over rounds of the ratio of
their times within a round, of rounds during which other processes leave the machine alone (or else the least disturbed
ones). Predictions are those of the simulator, with measured links.

Before that, a data-parallel step on 2 + 2 devices of speeds 1 and 0.5 is emulated (`dapple.emulate`), and compared with
its work divided by the speed of all devices together.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Profile
from dapple_tf.models.resnet import resnet
from dapple_tf.models.vgg import vgg
from dapple_tf.planning.shares import with_shares
from dapple_tf.text_table import table
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.quiet import quietest, with_noise
from dapple_tf.tools.evaluation.ratios import quartiles, ratios
from dapple_tf.tools.hosts import HostsError, LocalWorkers, end, launch
from graph_passes.ir.batching import Interval

FLAGS = flags.FlagValues()

_MODEL = flags.DEFINE_enum("model", "vgg", ["resnet", "vgg"], "The model to train.", flag_values=FLAGS)
_BATCH = flags.DEFINE_integer("batch", 96, "Global batch size.", lower_bound=4, flag_values=FLAGS)
_BUSY = flags.DEFINE_integer(
    "busy", 1, "Busy loops that share the second worker's core.", lower_bound=0, flag_values=FLAGS
)
_QUIET = flags.DEFINE_integer("quiet", 10, "Undisturbed rounds to measure.", lower_bound=1, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 40, "Maximum rounds, while waiting for a quiet machine.", lower_bound=1, flag_values=FLAGS
)
_NOISE = flags.DEFINE_float(
    "noise", 0.1, "Cores that other processes may use in an undisturbed round.", lower_bound=0, flag_values=FLAGS
)
_TRIES = flags.DEFINE_integer(
    "tries", 5, "Maximum measurements of speeds, while waiting for a quiet machine.", lower_bound=1, flag_values=FLAGS
)
_CORES = flags.DEFINE_list(
    "cores", None, "The cores of the two workers; by default the first two of this process.", flag_values=FLAGS
)
_NICE = flags.DEFINE_integer(
    "nice",
    0,
    "Niceness of this program's session and of those of workers and busy loops (/proc/<pid>/autogroup), below 0 on a "
    "machine that does other things; needs root, and a session of its own (setsid).",
    -20,
    19,
    flag_values=FLAGS,
)
_JSON = flags.DEFINE_string(
    "json", None, "JSON file to write the numbers and the machine's facts to.", flag_values=FLAGS
)

_MODELS: Mapping[str, Callable[[], keras.Model]] = {"resnet": resnet, "vgg": vgg}
_SCALE = 8.0
"""Wall-clock seconds of an emulated second: the executor's lateness counts less in longer steps."""
_BUSY_LOOP = "while True: pass"
_WARM_UP = 3
_FEWEST = 5
"""Minimum number of rounds that count."""

Row = dict[str, Any]


# ---- emulated


def emulated(speeds: Sequence[float] = (1.0, 1.0, 0.5, 0.5), samples: int = 48) -> list[Row]:
    """Emulates data parallelism with equal shares, and with shares by speed; returns a row for each."""
    layers = tuple(LayerProfile(f"layer{index}", Cost(0.0, 1e-3), Cost(0.0, 2e-3)) for index in range(4))
    profile = Profile("even", "written by hand", (1, 2), layers, ())
    devices = tuple(dapple.Device(f"d{index}", index // 2, speed=speed) for index, speed in enumerate(speeds))
    cluster = dapple.Cluster(devices, real=False)
    work = samples * sum((layer.forward + layer.backward).per_sample for layer in layers)
    equal = dapple.Plan.data_parallel(len(speeds), samples)
    rows = []
    for name, plan in (("equal", equal), ("by speed", with_shares(equal, profile, cluster))):
        step = dapple.emulate(plan, profile, cluster, scale=_SCALE)
        rows.append(
            {
                "what": f"emulated, {name} slices",
                "slices": _slices(plan),
                "step_ms": step.latency * 1e3,
                "simulated_ms": step.simulated.latency * 1e3,
                "least_ms": work / sum(speeds) * 1e3,
            }
        )
    return rows


def _slices(plan: dapple.Plan) -> str:
    return "+".join(str(part.size) for part in plan.slices(0, Interval(0, plan.global_batch_size)))


# ---- real


@contextlib.contextmanager
def busy(core: int, count: int) -> Iterator[list[int]]:
    """Keeps a core busy with loops; yields their processes."""
    loops = [launch(["taskset", "-c", str(core), sys.executable, "-c", _BUSY_LOOP]) for _ in range(count)]
    try:
        yield [loop.pid for loop in loops]
    finally:
        for loop in loops:
            end(loop)


class Training:
    """A model trained by two plans on two workers."""

    def __init__(self, cluster: dapple.Cluster) -> None:
        self.batch = _BATCH.value
        draw = np.random.default_rng(0)
        model = self._model()
        self.x = draw.normal(size=(self.batch, *model.input_shape[1:])).astype("float32")
        self.y = draw.integers(0, 10, self.batch)
        sizes = sorted({max(1, self.batch // part) for part in (6, 3, 2)})
        command.say("profiling")
        self.profile = dapple.profile(model, sizes, cluster=cluster, cache=False, budget=30.0)
        command.say("measuring speeds and links")

        def speeds() -> dapple.Cluster:
            return dapple.measure_speeds(cluster, model, samples=sizes[1], each_server=True)

        with_speeds, noise = quietest(speeds, _NOISE.value, _TRIES.value)
        command.say(f"others used {noise:.2f} cores meanwhile; {with_speeds}")
        self.cluster = dapple.measure_links(with_speeds, capacity=False)

    def _model(self) -> keras.Model:
        keras.utils.set_random_seed(1)
        model = _MODELS[_MODEL.value]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-2, momentum=0.9), loss)
        return model

    def plans(self) -> dict[str, dapple.Plan]:
        """Returns the plans by name."""
        equal = dapple.Plan.data_parallel(2, self.batch)
        return {"equal": equal, "by speed": with_shares(equal, self.profile, self.cluster)}

    def measure(self) -> list[Row]:
        """Trains by all plans in turns; returns a row for each."""
        plans = self.plans()
        trainers = {name: dapple.transform(self._model(), self.cluster, plan) for name, plan in plans.items()}
        losses: dict[str, list[float]] = {name: [] for name in plans}
        rounds: list[tuple[dict[str, float], float]] = []

        def one_round() -> dict[str, float]:
            times = {}
            for name in list(plans)[:: 1 if len(rounds) % 2 == 0 else -1]:
                losses[name].append(float(trainers[name].train_on_batch(self.x, self.y)))
                times[name] = float(trainers[name].last_step_seconds)
            return times

        for _ in range(_WARM_UP):
            one_round()
        for number in range(_ROUNDS.value):
            rounds.append(with_noise(one_round))
            quiet = sum(noise <= _NOISE.value for _, noise in rounds)
            command.say(f"round {number + 1}: others used {rounds[-1][1]:.2f} cores; {quiet} of {_QUIET.value} quiet")
            if quiet >= _QUIET.value:
                break
        counted = sorted(rounds, key=lambda entry: entry[1])[: max(_FEWEST, quiet)]
        seconds = {name: [times[name] for times, _ in counted] for name in plans}
        apart = max(abs(a - b) / abs(a) for a, b in zip(*losses.values(), strict=True))
        rows = []
        for name, plan in plans.items():
            rows.append(
                {
                    "what": f"{_MODEL.value}, {name} slices",
                    "slices": _slices(plan),
                    "step_ms": quartiles([1e3 * value for value in seconds[name]]),
                    "simulated_ms": dapple.simulate(plan, self.profile, self.cluster).latency * 1e3,
                    "speedup": ratios(seconds["equal"], seconds[name]),
                    "speed": self.cluster.devices[1].speed,
                    "speed_spread": self.cluster.devices[1].speed_spread,
                    "losses_apart": apart,
                    "busy_loops": _BUSY.value,
                    "rounds": len(counted),
                    "noise_cores": max(noise for _, noise in counted),
                }
            )
        for trainer in trainers.values():
            trainer.close()
        return rows


def _cores() -> list[int]:
    own = sorted(os.sched_getaffinity(0))
    cores = own[:2] if _CORES.value is None else [int(core) for core in _CORES.value if core.isdigit()]
    good = len(cores) == 2 and set(cores) <= set(own)
    command.check(good, f"--cores needs two of {','.join(map(str, own))}: a core for each worker")
    return cores


def _set_niceness(processes: Sequence[int]) -> None:
    for process in processes if _NICE.value else ():
        pathlib.Path(f"/proc/{process}/autogroup").write_text(str(_NICE.value))


def real() -> list[Row]:
    """Starts the workers, and measures on them."""
    cores = _cores()
    with (
        LocalWorkers(2, cores=cores, echo=lambda number, line: None) as workers,
        busy(cores[1], _BUSY.value) as loops,
    ):
        _set_niceness([*loops, *(worker.pid for worker in workers.processes)])
        cluster = dapple.Cluster.of_servers(workers.addresses)
        with connected(cluster):
            return Training(cluster).measure()


def shown(rows: Sequence[Row]) -> str:
    """Returns the rows for people."""
    titles = ("", "slices", "step ms", "simulated", "work / speed", "speed-up")
    lines = [titles]
    for row in rows:
        step, speedup, least = row["step_ms"], row.get("speedup"), row.get("least_ms")
        told = f"{step:.1f}" if isinstance(step, float) else f"{step.median:.0f} ({step.low:.0f} to {step.high:.0f})"
        lines.append(
            (
                row["what"],
                row["slices"],
                told,
                f"{row['simulated_ms']:.1f}",
                "" if least is None else f"{least:.1f}",
                "" if speedup is None else str(speedup),
            )
        )
    text = table(lines, left=1)
    trained = next((row for row in rows if "speed" in row), None)
    if trained is not None:
        text += (
            f"\nspeed of the second worker: {trained['speed']:.3f} (+- {trained['speed_spread']:.3f}), beside "
            f"{trained['busy_loops']} busy loops; losses agree to {trained['losses_apart']:.1e}; "
            f"{trained['rounds']} rounds, others used at most {trained['noise_cores']:.2f} cores"
        )
    return text + "\n"


def main() -> None:
    """Emulates, measures, and shows the results."""
    check_output(_JSON.value)
    command.check(shutil.which("taskset") is not None, "`taskset` isn't installed; it comes with util-linux")
    _cores()
    _set_niceness([os.getpid()])
    rows = emulated()
    sys.stdout.write(shown(rows) + "\n")
    try:
        trained = real()
    except (HostsError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
    sys.stdout.write(shown(trained))
    if _JSON.value:
        write_results(_JSON.value, "unlike_workers", [*rows, *trained])


if __name__ == "__main__":
    command.start(main, FLAGS)
