"""Servers by TensorFlow's library alone: what they are told, and what is said where there is no such library."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import pathlib

import pytest
from tensorflow.core.protobuf import cluster_pb2, config_pb2, tensorflow_server_pb2

from dapple_tf.clusters import tensorflow_server
from dapple_tf.clusters.tensorflow_server import LibraryError, Server, ServerSettings, load, serialized
from dapple_tf.errors import ClusterError
from dapple_tf.tools.hosts import free_ports


@pytest.mark.parametrize("settings", [ServerSettings(), ServerSettings(300, 2, 301, 2, 200)])
def test_definitions_are_tensorflow_s_messages(settings: ServerSettings) -> None:
    addresses = {"worker": [f"host{number}.a-long-domain:{2222 + number}" for number in range(200)], "client": ["c:1"]}
    config = config_pb2.ConfigProto(
        device_count={"CPU": settings.cpus, "GPU": settings.gpus},
        inter_op_parallelism_threads=settings.inter_op,
        intra_op_parallelism_threads=settings.intra_op,
    )
    if settings.leader is not None:
        config.gpu_options.allow_growth = True
        config.experimental.collective_group_leader = f"/job:worker/replica:0/task:{settings.leader}"
    jobs = [cluster_pb2.JobDef(name=job, tasks=dict(enumerate(of_job))) for job, of_job in sorted(addresses.items())]
    expected = tensorflow_server_pb2.ServerDef(
        cluster=cluster_pb2.ClusterDef(job=jobs),
        job_name="worker",
        task_index=150,
        default_session_config=config,
        protocol="grpc",
    )
    assert tensorflow_server_pb2.ServerDef.FromString(serialized(addresses, "worker", 150, settings)) == expected


def test_settings_of_workers() -> None:
    cores = len(os.sched_getaffinity(0))
    assert ServerSettings.of_worker(3, 0) == ServerSettings(3, 0, max(4, cores), max(1, cores // 3), 0)
    assert ServerSettings.of_worker(0, 2, 5) == ServerSettings(1, 2, max(3, cores), 0, 5)


def test_errors_of_the_library_are_told() -> None:
    port = free_ports(1)[0]
    with pytest.raises(LibraryError, match="Could not parse provided bytes"):
        Server(b"no message")
    with pytest.raises(LibraryError, match=r"Job .client. was not defined"):
        Server(serialized({"worker": [f"127.0.0.1:{port}"]}, "client", 0, ServerSettings()))


def test_libraries_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """One that is elsewhere is that of the package: some distributions have it beside other libraries."""
    load.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(tensorflow_server, "_LIBRARY", "libtensorflow_framework.so.2")
        with pytest.raises(ClusterError, match=r"can't be loaded from .*TF_NewServer"):
            load()
    package = importlib.machinery.ModuleSpec("tensorflow", None, origin=str(tmp_path / "__init__.py"))
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: package)
        assert isinstance(load(), ctypes.CDLL)
        load.cache_clear()
        patch.setattr(tensorflow_server, "_LIBRARY", "libno-such.so")
        text = r"TensorFlow's library libno-such.so can't be loaded from .*: cannot open"
        with pytest.raises(ClusterError, match=text):
            load()
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ClusterError, match="TensorFlow isn't installed"):
            load()


def test_extensions_are_loaded_by_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("TF_USE_MODULAR_FILESYSTEM", raising=False)
    monkeypatch.setattr(tensorflow_server, "_site_packages", lambda: iter([str(tmp_path)]))
    package = tmp_path / "tensorflow"
    assert not tensorflow_server._has_extensions(package)
    (tmp_path / "tensorflow-plugins").mkdir()
    assert tensorflow_server._has_extensions(package)
    (tmp_path / "tensorflow-plugins").rmdir()
    for variable, value in (("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "a.so"), ("TF_USE_MODULAR_FILESYSTEM", "1")):
        with monkeypatch.context() as context:
            context.setenv(variable, value)
            assert tensorflow_server._has_extensions(package)
