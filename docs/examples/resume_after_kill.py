"""Training that is killed and goes on: with the weights that it would have had, to the last bit.

    python docs/examples/resume_after_kill.py

starts itself as a second process, kills that in the middle of its training, starts it again, and compares the weights
in the end with those of a training that nobody disturbed.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import keras
import numpy as np

import dapple_tf as dapple

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--checkpoints", help="train, with checkpoints in this folder, and go on from the newest")
parser.add_argument("--weights", help="save the weights to this file")
parser.add_argument("--kill_after", type=int, help="have this process killed after this number of steps")
arguments = parser.parse_args()


class KillAfter(keras.callbacks.Callback):
    """Kills this process, as a machine does that loses its power."""

    def on_train_batch_end(self, batch, logs=None):
        """Counts steps."""
        if batch + 1 == arguments.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


def train(checkpoints: str, weights: str) -> None:
    """Trains a small model, from the newest checkpoint if there is one."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(640, 32)).astype("float32")
    y = x[:, :10].argmax(axis=1)
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(64, activation="relu", name=f"hidden_{number}") for number in range(2)]
    model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(10, name="logits")])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plan = dapple.Plan.straight(["hidden_0"], global_batch_size=32, micro_batches=4)
    saving = dapple.Checkpointing(checkpoints, every_steps=5)
    with dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), plan) as pipelined:
        pipelined.fit(x, y, epochs=2, checkpoint=saving, resume=True, callbacks=[KillAfter()], verbose=2)
    model.save_weights(weights)


def run(*flags: str) -> int:
    """Runs this program in a process of its own; returns its exit code."""
    return subprocess.run([sys.executable, __file__, *flags], check=False).returncode


if arguments.checkpoints:
    train(arguments.checkpoints, arguments.weights)
    sys.exit()

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    killed, undisturbed = path / "killed.weights.h5", path / "undisturbed.weights.h5"
    code = run(f"--checkpoints={path / 'killed'}", f"--weights={killed}", "--kill_after=13")
    print(f"killed in step 13 (exit code {code}); going on from {dapple.latest_checkpoint(path / 'killed').name}")
    run(f"--checkpoints={path / 'killed'}", f"--weights={killed}")
    run(f"--checkpoints={path / 'undisturbed'}", f"--weights={undisturbed}")

    def values(file: pathlib.Path) -> list[np.ndarray]:
        """The arrays of a file of weights, by their paths."""
        import h5py

        arrays = {}
        with h5py.File(file) as stored:
            stored.visititems(lambda name, item: arrays.update({name: item[()]} if hasattr(item, "dtype") else {}))
        return [arrays[name] for name in sorted(arrays)]

    pairs = list(zip(values(killed), values(undisturbed), strict=True))
    equal = all(np.array_equal(one, other) for one, other in pairs)
    print(f"{len(pairs)} arrays of weights and slots are {'the same to the last bit' if equal else 'DIFFERENT'}")
    sys.exit(not equal)
