"""Classes of like devices, and the speed that each of them is measured to have."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from hardware import two_on_each_machine

import dapple_tf as dapple
from dapple_tf import automatic
from dapple_tf.measuring import device_speeds
from dapple_tf.measuring.device_speeds import measure_speeds
from dapple_tf.tools.hosts import LocalWorkers

GPU = "/job:worker/replica:0/task:{}/device:GPU:{}"


def gpus(*kinds: tuple[int, str, int | None]) -> dapple.Cluster:
    """Devices by server, kind and GiB."""
    devices = [
        dapple.Device(GPU.format(server, number), server, None if size is None else size * 2**30, kind=kind)
        for number, (server, kind, size) in enumerate(kinds)
    ]
    return dapple.Cluster(tuple(devices))


def unlike(count: int = 3) -> dapple.Cluster:
    """Local devices, of which the last is said to be of another kind."""
    local = dapple.Cluster.local(count, kind="cpu")
    last = dataclasses.replace(local.devices[-1], kind="other")
    return dataclasses.replace(local, devices=(*local.devices[:-1], last))


@pytest.fixture
def cluster(workers: LocalWorkers) -> dapple.Cluster:
    """Two workers."""
    return dapple.Cluster.of_servers(workers.addresses[:2])


def mlp() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="first"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def with_times(monkeypatch: pytest.MonkeyPatch, *times: Sequence[float]) -> None:
    """Lets devices take these seconds in their turns."""

    def in_turns(seconds: Sequence[Callable[[], float]], *_: Any, **__: Any) -> list[list[float]]:
        assert len(seconds) == len(times)
        assert all(own() >= 0 for own in seconds)
        return [list(own) for own in times]

    monkeypatch.setattr(device_speeds, "in_turns", in_turns)


def test_classes_are_of_one_kind_and_about_the_same_memory() -> None:
    cluster = gpus(
        (0, "H200", 139), (0, "A100", 40), (1, "A100", 79), (1, "H200", 138), (2, "A100", 80), (3, "H200", 139)
    )
    assert cluster.device_classes == ((0, 3, 5), (1,), (2, 4))
    assert dapple.Cluster.local(3, kind="cpu").device_classes == ((0, 1, 2),)
    assert gpus((0, "", None), (1, "", 80)).device_classes == ((0, 1),)


@pytest.mark.parametrize("model", [None, mlp])
def test_a_class_has_the_median_of_its_ratios(
    model: Callable[[], keras.Model] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_times(monkeypatch, [1.0, 2.0, 1.0, 1.0, 1.0], [2.0, 4.0, 2.5, 1.25, 2.0])
    own = None if model is None else model()
    before = [] if own is None else [np.array(value) for value in own.get_weights()]
    with caplog.at_level(logging.INFO, device_speeds.__name__):
        measured = measure_speeds(unlike(), own)
    assert [device.speed for device in measured.devices] == [1.0, 1.0, 0.5]
    assert measured.devices[2].speed_spread == pytest.approx(0.0)
    assert "device 2 (other) computes 0.5 times (+- 0) as fast as device 0" in caplog.text
    assert "device 2: other: speed 0.5" in str(measured) and "devices 0 1: " in str(measured)
    if own is not None:
        assert all(np.array_equal(old, new) for old, new in zip(before, own.get_weights(), strict=True))


def test_workers_of_one_server_are_measured_each_by_itself() -> None:
    """A server's second worker, on slower cores, had the speed of the first one."""
    own = two_on_each_machine(4).with_workers_per_server(2)
    groups = device_speeds._groups(own, each_server=True)
    assert groups == [(0,), (1,), (2,), (3,)] and device_speeds._groups(own, each_server=False) == [(0, 1, 2, 3)]


def test_real_measurements_are_above_0() -> None:
    measured = measure_speeds(unlike(2), mlp(), rounds=1)
    assert measured.devices[0].speed == 1.0
    assert measured.devices[1].speed > 0


def test_numbers_out_of_range() -> None:
    with pytest.raises(dapple.ClusterError, match="reference is 3; it must be a whole number, 0 to 2"):
        measure_speeds(unlike(), reference=3)


# ---- in transform


@pytest.mark.parametrize("told", [False, True])
def test_transform_measures_unlike_devices_unless_their_speeds_are_told(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_times(monkeypatch, [1.0] * 3, [4.0] * 3)
    cluster = dataclasses.replace(unlike(), intra_bandwidth=1e12, intra_latency=0.0)
    if told:
        last = dataclasses.replace(cluster.devices[2], speed=0.5)
        cluster = dataclasses.replace(cluster, devices=(*cluster.devices[:2], last))
    _, planned = automatic.measured(mlp(), cluster, 24, budget=0.01)
    assert [device.speed for device in planned.devices] == [1.0, 1.0, 0.5 if told else 0.25]
