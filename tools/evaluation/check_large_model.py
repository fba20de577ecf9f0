"""Trains a model of which no process holds more than a part, and reports the memory of each process.

    python -m tools.evaluation.check_large_model --workers=4 --width=3072

The model is made under `dapple_tf.deferred_init`, so that this process never has its parameters; each worker
initialises those of its stage. It is trained, saved, and restored by another trainer of the same model, whose
prediction must be the same as before. Growth is a process' peak beyond its memory before the model was made.
"""

from __future__ import annotations

import pathlib
import re
import sys
import tempfile

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf.tools import command
from dapple_tf.tools.hosts import LocalWorkers

FLAGS = flags.FlagValues()

_WORKERS = flags.DEFINE_integer("workers", 4, "Workers, each with one stage.", lower_bound=2, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer("width", 3072, "Width of the layers.", lower_bound=1, flag_values=FLAGS)
_LAYERS = flags.DEFINE_integer("layers", 3, "Layers of each stage.", lower_bound=1, flag_values=FLAGS)
_STEPS = flags.DEFINE_integer("steps", 3, "Training steps.", lower_bound=1, flag_values=FLAGS)
_BATCH = 16


def make_model(layers: int, width: int) -> keras.Model:
    """Returns dense layers without values."""
    keras.utils.set_random_seed(1)
    with dapple.deferred_init():
        hidden = [keras.layers.Dense(width, activation="tanh", name=f"hidden_{index}") for index in range(layers)]
        model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(1, name="out")])
        model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
    return model


def family(process: int) -> list[int]:
    """Returns a process and its descendants."""
    children = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(own for child in children for own in family(int(child)))]


def memory(process: int, which: str) -> int:
    """Returns the bytes that a process has ("VmRSS") or had at most ("VmHWM")."""
    match = re.search(rf"^{which}:\s+(\d+) kB", pathlib.Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    """Trains, and prints the table."""
    count, per_stage = _WORKERS.value, _LAYERS.value
    cuts = [f"hidden_{stage * per_stage + per_stage - 1}" for stage in range(count - 1)]
    plan = dapple.Plan.straight(cuts, _BATCH, 4)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(_BATCH, 32)).astype("float32"), draw.normal(size=(_BATCH, 1)).astype("float32")
    with LocalWorkers(count, echo=lambda worker, line: None) as workers, tempfile.TemporaryDirectory() as folder:
        cluster = dapple.Cluster.of_servers(workers.addresses)
        dapple.measure_links(cluster, capacity=False, repeats=1)  # TensorFlow's needs without any model.
        own = pathlib.Path("/proc/self").resolve().name
        before = memory(int(own), "VmRSS")
        base = [memory(process.pid, "VmRSS") for process in workers.processes]
        model = make_model(count * per_stage, _WIDTH.value)
        size = 4 * sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
        pipelined = dapple.transform(model, cluster, plan)
        losses = [float(pipelined.train_on_batch(x, y)) for _ in range(_STEPS.value)]
        predicted = pipelined.predict(x, verbose=0)
        pipelined.save_checkpoint(folder)
        pipelined.close(sync=False)
        other = dapple.transform(make_model(count * per_stage, _WIDTH.value), cluster, plan)
        other.train_on_batch(x, y)
        other.restore_checkpoint(folder)
        again = other.predict(x, verbose=0)
        peaks = [max(memory(process, "VmHWM") for process in family(worker.pid)) for worker in workers.processes]
        client = memory(int(own), "VmHWM") - before
        other.close(sync=False)
    mib = 2**20
    sys.stdout.write(f"parameters: {size / mib:.0f} MiB, with momentum {2 * size / mib:.0f} MiB; losses {losses}\n")
    sys.stdout.write("| process | growth (MiB) | of the parameters and momentum |\n|---|---|---|\n")
    for name, grown in [("client", client), *((f"worker {n}", peak - base[n]) for n, peak in enumerate(peaks))]:
        sys.stdout.write(f"| {name} | {grown / mib:.0f} | {grown / (2 * size):.2f} |\n")
    sys.stdout.write("the restored model predicts the same\n" if np.array_equal(predicted, again) else "DIFFERENT\n")
    sys.stdout.flush()
    if not np.array_equal(predicted, again):
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
