"""Measures the gain of a sub-stream for weight gradients on one device: Out-Of-Order BackProp, section 4.

    python -m tools.evaluation.check_streams                                 # DenseNet-121, k = 12, on CPU cores
    python -m tools.evaluation.check_streams --model=mobilenet --batch=32 --json=streams.json
    python -m tools.evaluation.check_streams --kind=gpu --memory_gib=16 --xla

Ways of training the same model on the same data, in turns:

    whole         the whole model is one stage, as with plain Keras: TensorFlow's executor runs whatever is ready
    one lane      F and B of each stage on one device, as conventional backpropagation (dapple_a)
    two lanes     Bw on a sub-stream, as soon as they are ready (fast_forward with weight_devices)
    joint         Bw on a sub-stream in the regions that algorithm 1 chose by measured speedups

On CPUs each is tried with operators that use all cores and with operators of one core each, on which several run at
once ("a core each"): these are two processes, since the threads that operators share are of a process. With several
micro-batches (``--micro_batches``) weight gradients also run beside the next micro-batch's forward. That gains at least
what running them beside the next step's would, where a layer's forward waits for its update.

Reported are medians of each round's time relative to the whole model, on all cores, in the same round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import dapple_tf as dapple
from dapple_tf.clusters.session import configure_gpus
from dapple_tf.describe.cluster import Cluster
from dapple_tf.joint.stream_speedups import even_cuts, measure_speedups, two_stream_plan, with_joint_schedule
from dapple_tf.models.densenet import densenet
from dapple_tf.models.mobilenet import mobilenet_v3
from dapple_tf.models.resnet import resnet
from dapple_tf.models.vgg import vgg
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.peers import Peers
from dapple_tf.tools.evaluation.quiet import with_noise
from dapple_tf.tools.evaluation.ratios import ratios

FLAGS = flags.FlagValues()

_MODELS: Mapping[str, Callable[[int], keras.Model]] = {
    "densenet": lambda image: densenet(image=image, classes=100, growth=12),
    "mobilenet": lambda image: mobilenet_v3(image=image, classes=100, alpha=0.25, dropout=0.0),
    "resnet": lambda image: resnet(image=image, width=16),
    "vgg": lambda image: vgg(image=image, width=16, dense=256),
}
"""DenseNet-121 with k = 12 and MobileNetV3 with alpha = 0.25 gain most in the paper; the others are small."""

_MODEL = flags.DEFINE_enum("model", "densenet", [*_MODELS], "Model to run.", flag_values=FLAGS)
_IMAGE = flags.DEFINE_integer("image", 32, "Height and width of the images.", lower_bound=8, flag_values=FLAGS)
_STAGES = flags.DEFINE_integer("stages", 8, "Stages, which are the regions.", lower_bound=2, flag_values=FLAGS)
_BATCH = flags.DEFINE_integer("batch", 8, "Global batch size.", lower_bound=1, flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 1, "Micro-batches.", lower_bound=1, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 20, "Measured rounds, each of one turn of each way.", lower_bound=1, flag_values=FLAGS
)
_STEPS = flags.DEFINE_integer("steps", 3, "Steps of a turn.", lower_bound=1, flag_values=FLAGS)
_KIND = flags.DEFINE_enum("kind", "cpu", ["cpu", "gpu"], "Kind of device.", flag_values=FLAGS)
_MEMORY = flags.DEFINE_float(
    "memory_gib", None, "Memory of the GPU that both streams share, in GiB.", lower_bound=0.1, flag_values=FLAGS
)
_JIT = flags.DEFINE_boolean("xla", False, "Compile tasks with XLA (on GPUs: with command buffers).", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the result to.", flag_values=FLAGS)
_PEER = flags.DEFINE_integer(
    "peer",
    None,
    "Run as a process of the benchmark, with this number of threads for operators; 0 is TensorFlow's choice.",
    flag_values=FLAGS,
)

_WARM_UP = 3
"""Rounds that don't count."""
_WHOLE, _ONE, _TWO, _JOINT = "whole", "one lane", "two lanes", "joint"


def _model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = _MODELS[_MODEL.value](_IMAGE.value)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


class _Ways:
    """The ways of one process.

    Attributes:
        facts: what was measured for the plans.
    """

    def __init__(self) -> None:
        memory = None if _MEMORY.value is None else int(_MEMORY.value * 2**30)
        one = Cluster.local(1, memory, kind=_KIND.value)
        two = one.with_sub_streams()
        configure_gpus(two)
        cuts = even_cuts(_model(), _STAGES.value)
        ready = two_stream_plan(two, cuts, _BATCH.value, _MICRO_BATCHES.value, jit_compile=_JIT.value)
        measured = measure_speedups(_model(), two, ready, progress=False)
        jointly = with_joint_schedule(ready, measured)
        lane = dataclasses.replace(ready, schedule="dapple_a", weight_devices=None)
        plans = {
            _WHOLE: (one, dataclasses.replace(lane, cuts=(), devices=((0,),))),
            _ONE: (one, lane),
            _TWO: (two, dataclasses.replace(ready, schedule="fast_forward")),
            _JOINT: (two, jointly),
        }
        self.facts: dict[str, Any] = {
            "cuts": jointly.cuts,
            "weight_regions": jointly.weight_regions,
            "input_grad_seconds": measured.times.input_grad,
            "weight_grad_seconds": measured.times.weight_grad,
            "speedups": [[*pair, speedup] for pair, speedup in sorted(measured.times.speedup.items())],
        }
        rng = np.random.default_rng(0)
        self._batch = (
            rng.normal(size=(_BATCH.value, _IMAGE.value, _IMAGE.value, 3)).astype("float32"),
            rng.integers(0, 10, _BATCH.value),
        )
        self._models = {name: dapple.transform(_model(), cluster, plan) for name, (cluster, plan) in plans.items()}
        self._round = 0

    def round(self, steps: int) -> dict[str, float]:
        """Runs a turn of each way; returns the median of its steps' seconds."""
        seconds = {}
        names = list(self._models)
        self._round += 1
        for name in names[:: 1 if self._round % 2 else -1]:
            own = []
            for _ in range(steps):
                self._models[name].train_on_batch(*self._batch)
                own.append(self._models[name].last_step_seconds)
            seconds[name] = statistics.median(own)
        return seconds


def _serve(threads: int) -> None:
    """Builds the ways and answers each line on stdin with a round of as many steps."""
    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    ways = _Ways()
    print(json.dumps(ways.facts), flush=True)
    for line in sys.stdin:
        print(json.dumps(ways.round(int(line))), flush=True)


def main() -> None:
    """Prints the table."""
    if _PEER.value is not None:
        _serve(_PEER.value)
        return
    check_output(_JSON.value)
    if _KIND.value == "gpu" and _MEMORY.value is None:
        raise app.UsageError("--kind=gpu needs --memory_gib: two streams share out the GPU's memory")
    cores = len(os.sched_getaffinity(0))
    threads = {"": 0} if _KIND.value == "gpu" else {"all cores": cores, "a core each": 1}
    settings = (_MODEL, _IMAGE, _STAGES, _BATCH, _MICRO_BATCHES, _KIND, _JIT)
    with contextlib.ExitStack() as stack:
        peers: list[Peers] = []
        facts: dict[str, Any] = {}
        started = time.perf_counter()
        for where, number in threads.items():
            line = [sys.executable, "-m", "tools.evaluation.check_streams", f"--peer={number}"]
            line += [f"--{flag.name}={flag.value}" for flag in (*settings, _MEMORY) if flag.value is not None]
            peers.append(Peers(stack, [line], greeted=True))
            facts[where] = json.loads(peers[-1].answers[0])
        print(f"built in {time.perf_counter() - started:.0f} s")
        for where, own in facts.items():
            _print_facts(where, own)
        times, others = _take_turns(dict(zip(threads, peers, strict=True)))
    base = times[next(iter(threads)), _WHOLE]
    rows = []
    for (where, name), own in times.items():
        seconds, ratio = statistics.median(own), ratios(own, base)
        print(f"{where:<12} {name:<10} {seconds * 1e3:8.2f} ms  ratio {ratio}")
        rows.append({"operators": where, "name": name, "seconds": seconds, "ratio": ratio})
    print(f"other processes used {others:.2f} cores")
    if _JSON.value:
        record = {**{flag.name: flag.value for flag in settings}, "measured": facts, "others": others, "results": rows}
        write_results(_JSON.value, "streams", [record])


def _print_facts(where: str, facts: Mapping[str, Any]) -> None:
    gains = sorted(speedup for *_, speedup in facts["speedups"])
    shown = [f"{1e3 * sum(facts[key]):.1f}" for key in ("input_grad_seconds", "weight_grad_seconds")]
    print(
        f"{where}: Bx take {shown[0]} ms and Bw {shown[1]} ms; speedups of {len(gains)} pairs, at once over one after "
        f"the other: {gains[0]:.2f} to {gains[-1]:.2f}, median {np.median(gains):.2f}; weight_regions "
        f"{facts['weight_regions']}"
    )


def _take_turns(peers: Mapping[str, Peers]) -> tuple[dict[tuple[str, str], list[float]], float]:
    """Returns the seconds of each way in each round, and the cores that other processes used meanwhile."""
    times: dict[tuple[str, str], list[float]] = {}

    def rounds() -> None:
        for number in range(-_WARM_UP, _ROUNDS.value):
            for where in list(peers)[:: 1 if number % 2 == 0 else -1]:
                peers[where](_STEPS.value)
                for name, seconds in json.loads(peers[where].answers[0]).items():
                    if number >= 0:
                        times.setdefault((where, name), []).append(seconds)

    _, others = with_noise(rounds)
    order = [(where, name) for where in peers for name in (_WHOLE, _ONE, _TWO, _JOINT)]
    return {way: times[way] for way in order}, others


if __name__ == "__main__":
    command.start(main, FLAGS)
