"""Profiles on disk: found again, mended, and told apart by all that they depend on."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import keras
import pytest
from profiled import captured, mlp

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import ZERO, LayerProfile
from dapple_tf.describe.profile import Profile
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.profiler import profile, profile_key, write_profile

layers = keras.layers


def small(optimizer: str = "adam") -> keras.Model:
    """One layer: little to measure."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="logits")], name="small")
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def profiled(model: keras.Model, batch_size: Any = 4, **options: Any) -> Profile:
    return profile(model, batch_size, repeats=1, progress=False, **options)


def test_the_cache_is_hit_missed_and_mended(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    first = profiled(model, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stem == first.key
    assert profiled(small(), cache=tmp_path) == first
    monkeypatch.setenv("DAPPLE_CACHE", str(tmp_path))
    assert profiled(model, cache=True) == first
    assert len(list(tmp_path.iterdir())) == 1

    assert profiled(model, 8, cache=tmp_path) != first
    assert profiled(small(optimizer="sgd"), cache=tmp_path).key != first.key
    assert len(list(tmp_path.iterdir())) == 3

    path.write_text('{"format": "dapple_tf.profi')
    with caplog.at_level(logging.WARNING):
        again = profiled(model, cache=tmp_path)
    assert str(path) in caplog.text and "measured again" in caplog.text
    assert again.key == first.key
    assert Profile.load(path) == again


def test_the_key_knows_the_measured_device_rather_than_the_client() -> None:
    """Workers' GPUs were told apart by those of the client."""
    model, program = mlp(), captured(mlp())
    example = ExampleBatch.of(model, None, None, None)
    names = (("GPU", "A100"), ("GPU", "H200"), ("CPU", "H200"), ("GPU", "A100"))
    keys = [
        profile_key(
            model, program, example, [1], Cluster((Device(f"/job:worker/task:0/device:{kind}:0", 0, kind=of),)), 0, 1
        )
        for kind, of in names
    ]
    assert len(set(keys)) == 3 and keys[0] == keys[3]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    one_layer = Profile("m", "cpu", (1,), (LayerProfile("a", ZERO, ZERO),), ())
    with caplog.at_level(logging.WARNING):
        write_profile(tmp_path / "file" / "key.json", one_layer)
    assert "the profile can't be kept" in caplog.text
