"""A worker on a machine with a private and a public network: training works inside, and from outside nobody gets in.

        outside ─── public network ─── host 0 ─── private network ─── host 1
    198.51.100.9      198.51.100.1  └─ 10.77.0.1                  10.77.0.2

The outside knows everything: both of host 0's addresses, the ports, and host 0 as its way to the private network.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import require_namespaces

from dapple_tf.tools.hosts import Hosts, Namespace, join

pytestmark = pytest.mark.slow

SERVER_PORT = 2300
PUBLIC, OUTSIDE = "198.51.100.1", "198.51.100.9"

TRAINING = """
import sys
import keras, numpy as np
import dapple_tf as dapple
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="a"), keras.layers.Dense(1, name="b")])
model.compile(keras.optimizers.SGD(0.05), "mse")
x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
cluster = dapple.Cluster.of_servers(sys.argv[1:])
plan = dapple.Plan.manual(["a"], [[0], [1]], micro_batches=2, global_batch_size=16)
pipelined = dapple.transform(model, cluster, plan)
losses = [float(pipelined.train_on_batch(x, x[:, :1])) for _ in range(3)]
assert losses[2] < losses[0], losses
print("trained", flush=True)
sys.stdin.read()  # keeps the workers' servers
"""

KNOCK = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        print(address, "open")
    except TimeoutError:
        print(address, "silent")
    except OSError as error:
        print(address, "closed")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    require_namespaces()
    with Hosts(2, arguments=[f"--server_port={SERVER_PORT}"]) as made:
        yield made


@pytest.fixture(scope="module")
def outside(hosts: Hosts) -> Iterator[Namespace]:
    with Namespace() as made:
        first = hosts.namespaces[0]
        join(first, "eth1", made, "eth0")
        first.call("ip", "addr", "add", f"{PUBLIC}/24", "dev", "eth1")
        made.call("ip", "addr", "add", f"{OUTSIDE}/24", "dev", "eth0")
        made.call("ip", "route", "add", "10.77.0.0/24", "via", PUBLIC)
        yield made


def knock(where: list[str], *addresses: str) -> dict[str, str]:
    """What becomes of connections to these addresses, made in a namespace."""
    done = subprocess.run(
        [*where, sys.executable, "-c", KNOCK, *addresses], capture_output=True, text=True, timeout=60, check=True
    )
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.thorough
def test_training_works_inside_and_nobody_gets_in_from_outside(hosts: Hosts, outside: Namespace) -> None:
    client = hosts.popen(
        1, [sys.executable, "-c", TRAINING, *hosts.addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout is not None and client.stdin is not None
    assert client.stdout.readline() == "trained\n"

    private, public = ([f"{address}:{port}" for port in (2222, SERVER_PORT)] for address in ("10.77.0.1", PUBLIC))
    # The ports are there, for those within, and for host 0 itself.
    for inside in hosts.namespaces:
        assert knock(inside.prefix, *private) == dict.fromkeys(private, "open")
    # The outside does reach the machine: where nothing listens it is told so.
    assert knock(outside.prefix, f"{PUBLIC}:9", "10.77.0.1:9") == {f"{PUBLIC}:9": "closed", "10.77.0.1:9": "closed"}
    answers = knock(outside.prefix, *private, *public)
    assert "open" not in answers.values(), answers

    client.stdin.close()
    assert client.wait(60) == 0


@pytest.mark.thorough
def test_a_public_address_is_refused(hosts: Hosts, outside: Namespace) -> None:
    namespace = hosts.namespaces[0]
    namespace.call("ip", "addr", "add", "9.9.9.9/32", "dev", "eth1")  # One that the whole Internet would reach.
    done = hosts.run(
        0,
        [sys.executable, "-m", "dapple_tf.worker", "--address=9.9.9.9:2223"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    assert done.returncode == 1
    assert "is public" in done.stdout and "--allow_public" in done.stdout
