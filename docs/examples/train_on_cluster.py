"""Trains a small model on the workers that TF_CONFIG names.

    dapple-launch --workers=2 -- python docs/examples/train_on_cluster.py

runs it on two workers of this machine; docs/cluster.md says how to start workers on several machines. The model goes
through them as a pipeline; without ``--pipeline``, the planner measures model and workers and decides.
"""

import argparse
import logging

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--pipeline", action="store_true", help="one stage on each worker, instead of what the planner finds"
)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--model", help="save the trained model to this file, such as model.keras")
arguments = parser.parse_args()
logging.basicConfig(level=logging.INFO)

# Before the model: it would take the memory of GPUs that a worker on this machine lends.
cluster = dapple.Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())

draw = np.random.default_rng(0)
x = draw.normal(size=(2048, 32)).astype("float32")
y = x[:, :10].argmax(axis=1)

keras.utils.set_random_seed(0)
hidden = [keras.layers.Dense(64, activation="relu", name=f"hidden_{number}") for number in range(4)]
model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(10, name="logits")])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

print(f"{cluster.num_devices} devices on {cluster.num_servers} workers: {', '.join(cluster.addresses)}")
plan = None
if arguments.pipeline:
    stages = min(cluster.num_servers, len(hidden) + 1)
    cuts = [layer.name for layer in hidden[: stages - 1]]
    devices = [list(cluster.devices_of(server)) for server in range(stages)]
    plan = dapple.Plan.manual(cuts, devices, micro_batches=4, global_batch_size=64)

with dapple.transform(model, cluster, plan, global_batch_size=64) as pipelined:
    print(pipelined.plan)
    pipelined.fit(x, y, batch_size=64, epochs=arguments.epochs, verbose=2)
    pipelined.evaluate(x, y, batch_size=64, verbose=2)
if arguments.model:
    model.save(arguments.model)
