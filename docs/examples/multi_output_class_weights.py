"""A model with two outputs, one of which has a rare class: class weights become sample weights.

    python docs/examples/multi_output_class_weights.py

Keras takes ``class_weight`` only of models with one output; with several, each output gets its own sample weights,
which do the same. `fit` reports the loss and the metrics of each as plain Keras does.
"""

import argparse

import keras
import numpy as np

import dapple_tf as dapple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
arguments = parser.parse_args()

draw = np.random.default_rng(0)
x = draw.normal(size=(1024, 16)).astype("float32")
labels = {"kind": (x[:, 0] > 1.2).astype("int32"), "shade": x[:, 1:5].argmax(axis=1)}  # one kind in nine is 1

keras.utils.set_random_seed(0)
features = keras.Input((16,))
hidden = keras.layers.Dense(64, activation="relu", name="hidden_0")(features)
kind = keras.layers.Dense(2, name="kind")(hidden)
hidden = keras.layers.Dense(64, activation="relu", name="hidden_1")(hidden)
shade = keras.layers.Dense(4, name="shade")(hidden)
model = keras.Model(features, {"kind": kind, "shade": shade})
losses = {name: keras.losses.SparseCategoricalCrossentropy(from_logits=True) for name in labels}
model.compile(keras.optimizers.Adam(3e-3), losses, metrics={name: ["accuracy"] for name in labels})


def class_weights(classes: np.ndarray) -> np.ndarray:
    """The weight of each sample, so that all classes count the same."""
    counts = np.bincount(classes)
    return (len(classes) / (len(counts) * counts))[classes].astype("float32")


weights = {name: class_weights(classes) for name, classes in labels.items()}

# Two replicas of the first stage, one of the second.
plan = dapple.Plan.manual(["hidden_0"], [[0, 1], [2]], micro_batches=4, global_batch_size=64)
with dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), plan) as pipelined:
    pipelined.fit(x, labels, sample_weight=weights, epochs=arguments.epochs, verbose=2)
    predicted = pipelined.predict(x, verbose=0)
found = predicted["kind"].argmax(axis=1)[labels["kind"] == 1].mean()
print(f"of the rare kind {found:.0%} are found")
