"""Measures the gain of a sub-stream for weight gradients on one device: Out-Of-Order BackProp, section 4.

    python -m tools.evaluation.check_streams                                # a small ResNet on logical CPU devices
    python -m tools.evaluation.check_streams --model=vgg --stages=6 --json=streams.json
    python -m tools.evaluation.check_streams --kind=gpu --memory_gib=16 --xla

Three ways of running the same stages of a model, on the same data, in turns:

    one lane      F and B on one device, as conventional backpropagation (dapple_a)
    two lanes     Bw on a sub-stream, as soon as they are ready (fast_forward with weight_devices)
    joint         Bw on a sub-stream in the regions that algorithm 1 chose by measured speedups

Reported are medians, and medians of each round's time relative to one lane in the same round. A sub-stream gains
only if one task at a time leaves hardware idle: TensorFlow's CPU kernels use all cores
by themselves, so that on CPUs ratios are about 1, and show the cost of switching between lanes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import keras
import numpy as np
from absl import app, flags

import dapple_tf as dapple
from dapple_tf.clusters.session import configure_gpus
from dapple_tf.describe.cluster import Cluster
from dapple_tf.measuring.stream_speedups import even_cuts, measure_speedups, two_stream_plan, with_joint_schedule
from dapple_tf.models.resnet import resnet
from dapple_tf.models.vgg import vgg
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, write_results
from dapple_tf.tools.evaluation.ratios import ratios

FLAGS = flags.FlagValues()

_MODEL = flags.DEFINE_enum("model", "resnet", ["resnet", "vgg"], "Model to run.", flag_values=FLAGS)
_IMAGE = flags.DEFINE_integer("image", 32, "Height and width of the images.", lower_bound=8, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer("width", 16, "Channels of the first group.", lower_bound=1, flag_values=FLAGS)
_STAGES = flags.DEFINE_integer("stages", 8, "Stages, which are the regions.", lower_bound=2, flag_values=FLAGS)
_BATCH = flags.DEFINE_integer("batch", 32, "Global batch size.", lower_bound=1, flag_values=FLAGS)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 1, "Micro-batches.", lower_bound=1, flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer(
    "rounds", 20, "Measured rounds, each of one step of each way.", lower_bound=1, flag_values=FLAGS
)
_KIND = flags.DEFINE_enum("kind", "cpu", ["cpu", "gpu"], "Kind of device.", flag_values=FLAGS)
_MEMORY = flags.DEFINE_float(
    "memory_gib", None, "Memory of the GPU that both streams share, in GiB.", lower_bound=0.1, flag_values=FLAGS
)
_JIT = flags.DEFINE_boolean("xla", False, "Compile tasks with XLA (on GPUs: with command buffers).", flag_values=FLAGS)
_JSON = flags.DEFINE_string("json", None, "JSON file to write the result to.", flag_values=FLAGS)

_WARM_UP = 3
_ONE, _TWO, _JOINT = "one lane", "two lanes", "joint"


def _model() -> keras.Model:
    keras.utils.set_random_seed(0)
    if _MODEL.value == "resnet":
        model = resnet(image=_IMAGE.value, width=_WIDTH.value)
    else:
        model = vgg(image=_IMAGE.value, width=_WIDTH.value, dense=16 * _WIDTH.value)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss)
    return model


def main() -> None:
    """Prints the table."""
    check_output(_JSON.value)
    if _KIND.value == "gpu" and _MEMORY.value is None:
        raise app.UsageError("--kind=gpu needs --memory_gib: two streams share out the GPU's memory")
    memory = None if _MEMORY.value is None else int(_MEMORY.value * 2**30)
    one = Cluster.local(1, memory, kind=_KIND.value)
    two = one.with_sub_streams()
    configure_gpus(two)
    started = time.perf_counter()
    cuts = even_cuts(_model(), _STAGES.value)
    unordered = two_stream_plan(two, cuts, _BATCH.value, _MICRO_BATCHES.value, jit_compile=_JIT.value)
    measured = measure_speedups(_model(), two, unordered)
    jointly = with_joint_schedule(unordered, measured)
    gains = sorted(measured.times.speedup.values())
    print(f"planned in {time.perf_counter() - started:.1f} s; weight_regions {list(jointly.weight_regions or ())}")
    print(
        f"speedups of {len(gains)} pairs, at once over one after the other: {gains[0]:.2f} to {gains[-1]:.2f}, "
        f"median {np.median(gains):.2f}"
    )
    plans = {
        _ONE: (one, dataclasses.replace(unordered, schedule="dapple_a", weight_devices=None)),
        _TWO: (two, dataclasses.replace(unordered, schedule="fast_forward")),
        _JOINT: (two, jointly),
    }
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_BATCH.value, _IMAGE.value, _IMAGE.value, 3)).astype("float32")
    y = rng.integers(0, 10, _BATCH.value)
    models = {name: dapple.transform(_model(), cluster, plan) for name, (cluster, plan) in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in plans}
    names = list(plans)
    for number in range(-_WARM_UP, _ROUNDS.value):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            models[name].train_on_batch(x, y)
            if number >= 0:
                times[name].append(models[name].last_step_seconds)
    results = []
    for name, own in times.items():
        seconds, ratio = statistics.median(own), ratios(own, times[_ONE])
        print(f"{name:<10} {seconds * 1e3:8.2f} ms  ratio {ratio}")
        results.append({"name": name, "seconds": seconds, "ratio": ratio})
    if _JSON.value:
        settings = (_MODEL, _IMAGE, _WIDTH, _BATCH, _MICRO_BATCHES, _ROUNDS, _KIND, _JIT)
        record = {
            **{flag.name: flag.value for flag in settings},
            "cuts": jointly.cuts,
            "weight_regions": jointly.weight_regions,
            "input_grad_seconds": measured.times.input_grad,
            "weight_grad_seconds": measured.times.weight_grad,
            "speedups": [[*pair, speedup] for pair, speedup in sorted(measured.times.speedup.items())],
            "results": results,
        }
        write_results(_JSON.value, "streams", [record])
    for model in models.values():
        model.close()


if __name__ == "__main__":
    command.start(main, FLAGS)
