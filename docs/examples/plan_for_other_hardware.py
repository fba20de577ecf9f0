"""Plans training on machines that one doesn't have: a model's layers are measured here, the cluster is a description.

    python docs/examples/plan_for_other_hardware.py --global_batch_size=256

prints what the planner finds for two servers of four devices with a slow network between them, how much of the step is
bubbles, and what the same machines would do with data parallelism.
"""

import argparse
import json

import keras

import dapple_tf as dapple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--global_batch_size", type=int, default=256)
parser.add_argument("--folder", help="save profile.json, cluster.json and plan.json here, for dapple-simulate")
arguments = parser.parse_args()

hidden = [keras.layers.Dense(512, activation="gelu", name=f"hidden_{number}") for number in range(8)]
model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(10, name="logits")])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

# Seconds and bytes of each layer at two batch sizes, on this machine; faster devices have a "speed" above 1.
profile = dapple.profile(model, batch_size=[4, 16])

gigabyte = 2**30
description = {
    "format": "dapple_tf.cluster/1",
    "servers": [{"devices": 4, "memory_bytes": 16 * gigabyte}, {"devices": 4, "memory_bytes": 16 * gigabyte}],
    "intra_bandwidth": 130e9,  # bytes/s between two devices of a server
    "inter_bandwidth": 1.25e9,  # and between servers: 10 Gbit/s
    "intra_latency": 5e-6,
    "inter_latency": 3e-5,
}
cluster = dapple.Cluster.from_json(json.dumps(description))

plan = dapple.plan(profile, cluster, global_batch_size=arguments.global_batch_size)
print(plan)
print("\nthe step in the simulator:")
print(dapple.simulate(plan, profile, cluster))

replicas = dapple.Plan.data_parallel(cluster.num_devices, arguments.global_batch_size)
slower = dapple.simulate(replicas, profile, cluster).latency / dapple.simulate(plan, profile, cluster).latency
print(f"\ndata parallelism with one all-reduce at the end takes {slower:.2f} times as long")

if arguments.folder:
    for name, thing in (("profile", profile), ("cluster", cluster), ("plan", plan)):
        thing.save(f"{arguments.folder}/{name}.json")
