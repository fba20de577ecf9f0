"""Memory that isn't used any more goes back to the kernel."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest
from workers import environment

import dapple_tf as dapple
from dapple_tf.execution import device_session

FREED = """
import os
from dapple_tf.garbage import return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pieces = [bytes(2000) for _ in range(32_000)]  # 64 MB, too small for a mapping each, too large for Python's own pools
del pieces[:-1]  # the last one keeps the C library from giving back what is below it
before = resident()
return_freed_memory()
print(before - resident())
"""


def test_what_has_been_freed_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], env=environment(), capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32_000_000


def test_the_first_run_of_a_step_gives_back_what_building_it_has_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(device_session, "return_freed_memory", lambda: calls.append("returned"))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    pipelined = dapple.transform(model, dapple.Cluster.local(1), dapple.Plan.data_parallel(1, 2))
    for _ in range(2):
        pipelined.train_on_batch(np.ones((2, 4)), np.ones((2, 1)))
    assert calls == ["returned"]
