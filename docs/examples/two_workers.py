"""Two stages on two workers with a core each, beside data parallelism, one worker, and plain Keras on both cores.

python docs/examples/two_workers.py
"""

import statistics
import sys
import time

import keras
import numpy as np

import dapple_tf as dapple
from dapple_tf.tools.hosts import LocalWorkers

width = int(sys.argv[1]) if sys.argv[1:] else 2048
x = np.random.default_rng(0).normal(size=(256, width)).astype("float32")
y = x[:, :10].argmax(axis=1)


def build() -> keras.Model:
    """Eight wide layers, untrained."""
    hidden = [keras.layers.Dense(width, activation="relu", name=f"hidden_{i}") for i in range(8)]
    model = keras.Sequential([keras.Input((width,)), *hidden, keras.layers.Dense(10, name="logits")])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


with LocalWorkers(2, cores=[0, 1]) as workers:
    cluster = dapple.Cluster.of_servers(workers.addresses)
    planned = dapple.transform(build(), cluster, global_batch_size=256, schedule="zb_h1")
    print(planned.plan)
    replicas = [dapple.transform(build(), cluster, dapple.Plan.data_parallel(n, 256)) for n in (2, 1)]
    models = [planned, *replicas, build()]
    names = ("the plan", "data parallelism", "one worker", "plain Keras")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(28):  # in turns; the first three prepare
        for name, model in zip(names, models, strict=True):
            began = time.perf_counter()
            model.train_on_batch(x, y)
            seconds[name].append(time.perf_counter() - began)
for name, steps in seconds.items():
    print(f"{name:17} {statistics.median(steps[3:]) * 1e3:7.1f} ms a step, {min(steps) * 1e3:7.1f} at best")
