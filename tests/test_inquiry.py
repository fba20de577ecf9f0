"""Client and workers of other versions don't train together where results could differ."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

import keras
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.network import inquiry
from dapple_tf.network.inquiry import are_versions, own_versions, version_difference
from dapple_tf.tools.hosts import LocalWorkers


def test_own_versions() -> None:
    own = own_versions()
    assert own["dapple_tf"] == dapple.__version__ == importlib.metadata.version("dapple_tf")
    assert own["tensorflow"].startswith(f"{tf.__version__} (v") and own["keras"] == keras.__version__


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # Nothing of these two runs on a worker.
        ({"keras": "3.0.0", "python": "3.12.1"}, None),
        (
            {"dapple_tf": "0.0.1"},
            f"has dapple_tf 0.0.1 where this process has {dapple.__version__}: steps on it can give other results. Use "
            f"the same versions on both, such as by `pip install dapple_tf=={dapple.__version__}` there, and start",
        ),
        ({"tensorflow": f"{tf.__version__} (our own build)"}, f"has TensorFlow {tf.__version__} (our own build) where"),
        (
            {"dapple_tf": "9", "tensorflow": "9"},
            f"`pip install dapple_tf=={dapple.__version__} tensorflow=={tf.__version__}`",
        ),
    ],
)
def test_what_must_be_the_same(change: Mapping[str, str], expected: str | None) -> None:
    difference = version_difference({**own_versions(), **change})
    assert difference is None if expected is None else difference is not None and expected in difference


def test_what_is_no_versions() -> None:
    for value in (None, [], {"dapple_tf": "1"}, {"tensorflow": "1"}, {"dapple_tf": 1, "tensorflow": "1"}):
        assert not are_versions(value)


def test_two_versions_of_this_package_do_not_train_together(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.0.1 and 0.1.0 did, without a word."""
    older = {**own_versions(), "dapple_tf": "0.0.1"}
    monkeypatch.setattr(inquiry, "own_versions", lambda: older)
    address = workers.addresses[0]
    text = rf"worker 0 \({address}\) has dapple_tf {dapple.__version__} where this process has 0\.0\.1: "
    with pytest.raises(dapple.ClusterError, match=text):
        dapple.Cluster.of_servers([address])
    described = dapple.Cluster.of_servers([address], devices_per_server=1)  # asks nobody
    with pytest.raises(dapple.ClusterError, match=text), connected(described):
        pass
