"""XLA's programs in a folder: a second run reads them in place of compiling, as docs/tools.md says."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

TRAINING = """
import dataclasses, hashlib
import keras, numpy as np
import dapple_tf as dapple

keras.utils.set_random_seed(0)
images = keras.Input((8, 8, 3))
x = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3, name="cut")(images))
x = keras.layers.Dropout(0.3, seed=3)(keras.layers.Flatten()(x))
model = keras.Model(images, keras.layers.Dense(5)(x))
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
plan = dapple.Plan.manual(["cut"], [[0], [1]], micro_batches=2, global_batch_size=8, jit_compile=True)
pipelined = dapple.transform(model, dapple.Cluster.local(2, kind="cpu"), plan)
draw = np.random.default_rng(0)
x, y = draw.random((8, 8, 8, 3), np.float32), draw.integers(0, 5, 8)
losses = [float(pipelined.train_on_batch(x, y)) for _ in range(3)]
pipelined.sync()
values = b"".join(np.asarray(variable).tobytes() for variable in (*model.variables, *model.optimizer.variables))
print([loss.hex() for loss in losses], hashlib.sha256(values).hexdigest())
"""


def trained(folder: pathlib.Path | None) -> str:
    """What training in a process of its own tells: losses, and a digest of all values, bit for bit."""
    flags = "" if folder is None else f"--tf_xla_persistent_cache_directory={folder}"
    line = [sys.executable, "-c", TRAINING]
    return subprocess.run(
        line, env=os.environ | {"TF_XLA_FLAGS": flags}, stdout=subprocess.PIPE, check=True, text=True
    ).stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_kept_programs_train_bit_for_bit(tmp_path: pathlib.Path) -> None:
    """A second run compiles nothing that the first one did: names in its graph don't differ from run to run."""
    first = trained(tmp_path)
    programs = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(programs) >= 4  # forward and backward of two stages
    assert trained(tmp_path) == first == trained(None)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == programs
