"""Lost workers that answer again are told from those that can't be used, without waiting for any."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from workers import PATIENCE, wait_until

from dapple_tf.clusters.returning import Returning, check_back
from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.errors import ClusterError
from dapple_tf.network.control import Channel
from dapple_tf.network.inquiry import client_name
from dapple_tf.network.versions import own_versions

CPU = {"kind": "CPU", "memory_bytes": 2**30, "hardware": "a processor"}
GPU = {"kind": "GPU", "memory_bytes": 2**30, "hardware": "a GPU"}


def status(*devices: Mapping[str, Any], holder: str | None = None, **versions: str) -> dict[str, Any]:
    return {"devices": list(devices), "holder": holder, "versions": own_versions() | versions}


@contextlib.contextmanager
def listening(answers: dict[str, Any]) -> Iterator[str]:
    """A worker's address, where ``answers["status"]`` is the answer to all questions."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with contextlib.closing(Channel(connection)) as channel:
                        assert channel.receive(PATIENCE)["ask"] == "status"
                        channel.send(answers["status"], PATIENCE)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def cluster(*addresses: str) -> Cluster:
    name = "/job:worker/replica:0/task:{}/device:CPU:0"
    return Cluster(
        tuple(Device(name.format(task), task, kind="a processor") for task in range(len(addresses))),
        addresses=addresses,
    )


def answer(returning: Returning, own: Cluster) -> frozenset[str]:
    """The answer to a question that is asked now."""
    assert not returning.there(own, range(len(own.addresses)))
    wait_until(lambda: not returning._answers.empty())
    return returning.there(own, range(len(own.addresses)))


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return f"127.0.0.1:{held.getsockname()[1]}"


def test_workers_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Why a worker isn't taken is logged once; of one that isn't there nothing is said."""
    answers = [
        *({"status": status(CPU)}, {"status": status(CPU, holder="somebody")}, {"status": status(GPU)}),
        *({"status": status(CPU, tensorflow="1.0")}, {"status": {"error": "busy"}}),
    ]
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        addresses = [stack.enter_context(listening(own)) for own in answers]
        own = cluster(*addresses, free_address())
        returning = Returning(PATIENCE, 0.0)
        assert answer(returning, own) == {addresses[0]}
        texts = sorted(record.getMessage() for record in caplog.records)
        assert len(texts) == 4
        for number, text in enumerate(texts, 1):
            assert text.startswith(f"training goes on without a lost worker: worker {number} ({addresses[number]})")
        assert "in use by another client" in texts[0]
        assert "is back with 1 GPU device (a GPU), but the cluster has 1 CPU device (a processor) of it" in texts[1]
        assert "1.0" in texts[2]
        assert "busy" in texts[3]
        answers[1]["status"] = status(CPU, holder=client_name())  # an older connection of this process's, which hangs
        assert answer(returning, own) == {addresses[0], addresses[1]}
        assert len(caplog.records) == 4


def test_nobody_is_asked_before_it_is_time() -> None:
    answers = {"status": status(CPU)}
    with listening(answers) as address:
        returning = Returning(PATIENCE, 1e6)
        threads = threading.active_count()
        for _ in range(3):
            assert not returning.there(cluster(address), [0])
        assert threading.active_count() == threads


def test_a_question_without_an_answer_holds_nobody_up() -> None:
    """A worker that accepts and says nothing: one question at a time, and steps go on meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        own = cluster(f"127.0.0.1:{silent.getsockname()[1]}")
        returning = Returning(PATIENCE, 0.0)
        threads = threading.active_count()
        assert not returning.there(own, [0])
        wait_until(lambda: threading.active_count() >= threads + 2)  # who asks, and its helper for this worker
        for _ in range(100):
            assert not returning.there(own, [0])
        assert threading.active_count() == threads + 2
        with contextlib.closing(Channel(silent.accept()[0])) as channel:
            assert channel.receive(PATIENCE)["ask"] == "status"
            channel.send(status(CPU), PATIENCE)
            wait_until(lambda: not returning._answers.empty())
        assert returning.there(own, [0]) == {own.addresses[0]}


def devices(kind: str, count: int, hardware: str = "") -> list[Device]:
    name = f"/job:worker/replica:0/task:0/device:{kind}"
    return [Device(f"{name}:{number}", 0, kind=hardware) for number in range(count)]


@pytest.mark.parametrize(
    ("offered", "wanted"),
    [
        pytest.param([CPU, CPU], devices("CPU", 2, "a processor"), id="the same"),
        pytest.param([CPU, CPU], devices("CPU", 1, "a processor"), id="more"),
        pytest.param([GPU], devices("GPU", 1), id="of hardware that wasn't told"),
        pytest.param([GPU], devices("CPU", 1), id="the CPU that each server has"),
    ],
)
def test_devices_that_fit(offered: list[dict[str, Any]], wanted: list[Device]) -> None:
    check_back(0, "10.0.0.1:1", status(*offered), wanted)


@pytest.mark.parametrize(
    ("offered", "wanted", "told"),
    [
        pytest.param(
            *([CPU], devices("CPU", 2, "a processor")),
            r"1 CPU device \(a processor\), but the cluster has 2 CPU devices \(a processor\) of it",
            id="fewer",
        ),
        pytest.param([CPU], devices("GPU", 1), r"1 CPU device \(a processor\), .* 1 GPU device of it", id="no GPU"),
        pytest.param(
            [GPU], devices("GPU", 1, "a faster GPU"), r"1 GPU device \(a GPU\), .* \(a faster GPU\)", id="GPU"
        ),
        pytest.param([GPU], devices("CPU", 1, "a processor"), r"1 GPU device .* 1 CPU device", id="another machine"),
    ],
)
def test_other_devices(offered: list[dict[str, Any]], wanted: list[Device], told: str) -> None:
    with pytest.raises(ClusterError, match=rf"worker 0 \(10\.0\.0\.1:1\) is back with {told}"):
        check_back(0, "10.0.0.1:1", status(*offered), wanted)
