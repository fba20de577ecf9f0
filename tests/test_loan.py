"""A worker whose connection is held up isn't lost as long as it gives signs of life on others."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from conftest import require_namespaces
from workers import PATIENCE, expect

from dapple_tf.clusters.loan import Loan
from dapple_tf.network.control import Channel, ControlError, SilentError
from dapple_tf.tools.hosts import Hosts

SECONDS = 1.0


@contextlib.contextmanager
def lent(pulse: Callable[[], Mapping[str, Any] | None]) -> Iterator[tuple[Loan, Channel]]:
    """A loan whose worker answers on new connections only; and the worker's end of its own connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        ours = stack.enter_context(contextlib.closing(Channel.connect(address, PATIENCE)))
        theirs = stack.enter_context(contextlib.closing(Channel(listening.accept()[0])))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    channel = stack.enter_context(contextlib.closing(Channel(connection)))
                    assert channel.receive(PATIENCE)["ask"] == "pulse"
                    if (answer := pulse()) is not None:
                        channel.send(answer, PATIENCE)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Loan(0, address, ours, 1, "127.0.0.1"), theirs
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_worker_that_answers_on_a_new_connection() -> None:
    with lent(lambda: {"age": 0.0}) as (loan, theirs):
        asked = time.monotonic()
        assert asked < loan.ping(1, SECONDS) < time.monotonic()
        loan.ping(2, SECONDS)
        # What was held up arrives in the end, and isn't taken for the answer to a later question.
        for number in (1, 2, 3):
            theirs.send({"pong": number}, PATIENCE)
        asked = time.monotonic()
        assert loan.ping(3, PATIENCE) >= asked


@pytest.mark.parametrize("answer", [{"pong": 1}, {"error": "no"}], ids=["pongs once more", "an error"])
def test_a_worker_that_says_something_else(answer: Mapping[str, Any]) -> None:
    """Without end, too: old pongs were read on and on, while nobody noticed that the worker was lost."""
    with lent(lambda: None) as (loan, theirs):
        theirs.send({"pong": 1}, PATIENCE)
        loan.ping(1, SECONDS)
        for _ in range(1000):
            theirs.send(answer, PATIENCE)
        with pytest.raises(ControlError, match=f"was asked for 'pong' and said {re.escape(repr(answer))}"):
            loan.ping(2, PATIENCE)


@pytest.mark.parametrize("answer", [None, {"age": 100.0}, {"age": "0"}, {}], ids=["none", "old", "garbled", "empty"])
def test_a_worker_without_a_sign_of_life(answer: Mapping[str, Any] | None) -> None:
    with lent(lambda: answer) as (loan, _), pytest.raises(SilentError, match="doesn't answer within 1 s"):
        loan.ping(1, SECONDS)


def test_a_worker_that_has_forgotten_its_client() -> None:
    with (
        lent(lambda: {"error": "isn't lent to this process any more"}) as (loan, _),
        pytest.raises(ControlError, match="isn't lent to this process any more"),
    ):
        loan.ping(1, 10 * SECONDS)


TRAINING = """
import sys, threading
import keras, numpy as np
import dapple_tf as dapple

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="a"), keras.layers.Dense(1, name="b")])
model.compile(keras.optimizers.SGD(0.05), "mse")
x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
cluster = dapple.Cluster.of_servers(sys.argv[1:])
plan = dapple.Plan.manual(["a"], [[0], [1]], micro_batches=2, global_batch_size=16)
pipelined = dapple.transform(model, cluster, plan, faults=dapple.FaultPolicy(notice_seconds=10))
pipelined.train_on_batch(x, x[:, :1])
joined = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), joined.set()), daemon=True).start()
print("running", flush=True)
while not joined.is_set():
    pipelined.train_on_batch(x, x[:, :1])
for step in range(100):
    pipelined.train_on_batch(x, x[:, :1])
assert pipelined.lost is None
print("went on", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_link_that_is_down_for_less_than_the_time_to_notice() -> None:
    """TCP sent the ping again only after 12.6 s, as it doubles its pauses: a worker was lost that was there."""
    require_namespaces()
    with Hosts(2, echo=lambda *_: None) as hosts:
        client = hosts.popen(
            0,
            [sys.executable, "-c", TRAINING, *hosts.addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert client.stdin is not None
        expect(client, "running")
        hosts.cut(1)
        time.sleep(8.0)  # The break itself.
        hosts.join(1)
        client.stdin.write("\n")
        client.stdin.close()
        expect(client, "went on")
        assert client.wait(PATIENCE) == 0
