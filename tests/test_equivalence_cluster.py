"""Training on workers gives what plain Keras gives: on four of one device each, and on two hosts of two devices.

The hosts are network namespaces; the client runs in a third one, or within the first host, as a process that goes
through all cases and says how each has ended. Plans are those of test_random_plans.py. What rounds differently wherever
it runs (mixed precision) is held to the bits of the same plan on this process's own devices.

    python tests/test_equivalence_cluster.py 10.77.0.1:2222 10.77.0.2:2222 - 854
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from conftest import require_namespaces
from equivalence import TOLERANCE, assert_equal_training, use_float64
from references import SAMPLES, reference
from test_random_plans import chosen, trained_orders
from zoo import ZOO

import dapple_tf as dapple
from dapple_tf.tools.hosts import Hosts, LocalWorkers, Namespace, end, join, launch

CASE_SECONDS = 60.0
"""What a case may take on a busy machine."""
CASES = {drawn.seed: drawn for drawn in chosen() if drawn.cluster.num_devices <= 4 and not drawn.plan.compiled}
"""Plans for four devices, by their seeds: with and without relays, shards, and other options."""


def check(seed: int, cluster: dapple.Cluster) -> None:
    use_float64()
    links = {"intra_bandwidth": 1e10, "inter_bandwidth": 1e10, "intra_latency": 1e-6, "inter_latency": 1e-6}
    trained_orders(CASES[seed], dataclasses.replace(cluster, **links))


# ---- four workers


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*CASES][::4])
def test_four_workers_train_as_plain_keras(seed: int, workers: LocalWorkers) -> None:
    check(seed, dapple.Cluster.of_servers(workers.addresses))


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Variables, as `assert_equal_training` returns them; logs up to the order in which TensorFlow adds slices' losses.

    Grappler makes one sum of several where all are on one device, as they are not on a cluster.
    """
    for own, other in zip(actual[0], expected[0], strict=True):
        assert own == pytest.approx(other, rel=1e-6, abs=0)
    for own, other in zip(actual[1], expected[1], strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "jit_compile"), [("mixed_float16", False), ("mixed_bfloat16", True)])
def test_mixed_precision_gives_the_bits_of_local_devices(
    policy: str, jit_compile: bool, workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras.config.set_dtype_policy(policy)
    # XLA rounds at other places: plain Keras differs from itself by 5e-2 with and without it.
    tolerance = TOLERANCE[policy.removeprefix("mixed_")] * (2 if jit_compile else 1)
    cuts = ZOO["cnn"].cuts_for(2)
    plan = dapple.Plan.manual(cuts, [[0, 1], [2, 3]], 3, SAMPLES, jit_compile=jit_compile)
    plain = reference("cnn")
    local, remote = (
        assert_equal_training(ZOO["cnn"], cluster, plan, plain, monkeypatch, steps=2, tolerance=tolerance)
        for cluster in (dapple.Cluster.local(4, kind="cpu"), dapple.Cluster.of_servers(workers.addresses))
    )
    assert_same_bits(remote, local)


# ---- two hosts


class HostsAndClient(Hosts):
    """Two hosts of two devices, and one more without a worker."""

    def __init__(self) -> None:
        super().__init__(2, devices=2, echo=lambda *_: None)
        self.client = Namespace()

    def _set_up(self, stack: contextlib.ExitStack) -> None:
        super()._set_up(stack)
        stack.enter_context(self.client)
        join(self.client, "eth0", self._switch, "client")
        self._switch.call("ip", "link", "set", "client", "master", "bridge")
        self.client.call("ip", "addr", "add", "10.77.0.200/24", "dev", "eth0")

    def outcomes(self, place: Namespace, seeds: Sequence[int]) -> dict[str, str]:
        """How cases have ended for a client in a namespace: empty where all is well, or the error."""
        command = [*place.prefix, sys.executable, __file__, *self.addresses, "-", *map(str, seeds)]
        with launch(command, stdout=subprocess.PIPE) as process:
            try:
                output, _ = process.communicate(timeout=60 + CASE_SECONDS * len(seeds))
            except subprocess.TimeoutExpired:
                end(process)
                output, _ = process.communicate()
            finally:
                end(process)
        return dict(json.loads(line) for line in output.splitlines() if line.startswith("["))


ACROSS = [*CASES][1::4]
FROM_HOST = ACROSS[::2]
"""Cases trained from the first host, in place of a third one."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """How the cases have ended."""
    require_namespaces()
    with HostsAndClient() as hosts:
        others = [seed for seed in ACROSS if seed not in FROM_HOST]
        return hosts.outcomes(hosts.client, others) | hosts.outcomes(hosts.namespaces[0], FROM_HOST)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("seed", ACROSS)
def test_two_hosts_train_as_plain_keras(seed: int, outcomes: dict[str, str]) -> None:
    assert outcomes.get(str(seed), "the client ended before it came to this case") == ""


def main(arguments: Sequence[str]) -> None:
    """Within a host: trains by each of the plans with these seeds, and says how that has ended."""
    split = arguments.index("-")
    cluster = dapple.Cluster.of_servers(arguments[:split])
    assert cluster.num_devices == 4 and cluster.num_servers == 2
    for seed in arguments[split + 1 :]:
        outcome = ""
        try:
            check(int(seed), cluster)
        except Exception:
            outcome = traceback.format_exc()
        sys.stdout.write(json.dumps([seed, outcome]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
