"""Training on workers gives what plain Keras gives: on four of one device each, and on two hosts of two devices.

The hosts are network namespaces; the client runs in a third one, or within the first host, as a process that goes
through all cases and says how each has ended. What rounds differently wherever it runs (mixed precision) is held to the
bits of the same plan on this process's own devices, too.

    python tests/test_equivalence_cluster.py 10.77.0.1:2222 10.77.0.2:2222 - cnn-02_13-M3-dapple_a
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
from selection import sampled
from zoo import ZOO

import dapple_tf as dapple
from dapple_tf.tools.hosts import Hosts, LocalWorkers, Namespace, end, join, launch

Devices = Sequence[Sequence[int]]

CASE_SECONDS = 60.0
"""What a case may take on a busy machine."""


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    devices: Devices
    micro_batches: int = 3
    schedule: str = "dapple_a"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lists = "_".join("".join(map(str, devices)) for devices in self.devices)
        parts = [self.model, lists, f"M{self.micro_batches}", self.schedule]
        return "-".join([*parts, *(f"{key}={value}" for key, value in self.options.items())])

    @property
    def plan(self) -> dapple.Plan:
        cuts = ZOO[self.model].cuts_for(len(self.devices))
        return dapple.Plan.manual(
            cuts, self.devices, self.micro_batches, SAMPLES, schedule=self.schedule, **self.options
        )


STRAIGHT: Devices = [[0], [1], [2], [3]]
EVERYWHERE: Devices = [[0, 1, 2, 3]]
CARRIED = {"reverse_first_k": 3, "carried_updates": 2}

CASES = [
    Case("cnn", [[0, 1, 2], [3]], options={"recompute": "min_cut"}),
    Case("tied", [[0, 1], [2, 3]], 4, "dapple_b", {"recompute": "boundary"}),
    Case("multi_output", [[0], [1, 2, 3]], schedule="gpipe"),
    Case("branches", EVERYWHERE),
    Case("multi_output", EVERYWHERE * 4, 2, options={"reverse_first_k": 3}),
    Case("tied", STRAIGHT, 4, "zb_h1"),
    Case("branches", [[0, 1], [2], [3]], schedule="fast_forward", options={"recompute": "boundary"}),
    Case("branches", [[0, 1], [2, 3], [0, 1], [2, 3]], schedule="modulo"),
    Case("multi_output", [[0, 1], [0, 1], [2, 3], [2, 3]], 2, options=CARRIED),
    Case("cnn", [[0, 1], [2, 3]], options={"jit_compile": True}),
    Case("cnn", EVERYWHERE, 1),
    Case("transformer", [[0, 1], [2, 3]], 4, "zb_h1"),
    Case("lstm", [[0, 1], [2, 3]], 2, "dapple_b"),
    Case("branches", [[0], [1], [1], [0]], 4, "zb_v"),
    Case("tied", [[0, 1], [2, 3], [0, 1], [2, 3]], schedule="interleaved", options={"recompute": "min_cut"}),
    Case("branches", EVERYWHERE * 4, 1, options=CARRIED),
    Case("cnn", [[0, 1, 2], [3]], options={"optimizer_shards": True}),
    Case("tied", [[0, 1], [2, 3]], 4, options={"optimizer_shards": True}),
    Case("multi_output", EVERYWHERE, 2, options={"optimizer_shards": True, "carried_updates": 1}),
    Case("branches", [[0, 1], [2]], options={"weight_devices": [[1, 2], [3]]}),
    Case("tied", STRAIGHT, 4, "zb_h2", {"jit_compile": True}),
    Case("multi_output", [[0, 1], [2, 3]], schedule="fast_forward_b", options={"wait_free": False}),
    Case("transformer", [[0, 1, 2], [3]], schedule="fast_forward", options={"jit_compile": True}),
    Case("branches", STRAIGHT, 4, "zb_h1", {"relays": (1, 2)}),
    Case("branches", [[0], [1, 2], [3]], 4, options={"relays": (1,)}),
    Case("transformer", [[0, 1], [2, 3]], 6, "gpipe", {"recompute": "offload"}),
]
# Two hosts: devices 0 and 1 are on the first, 2 and 3 on the second. The client is on a third one, or on the first.
ACROSS = [
    Case("cnn", [[0, 2], [1, 3]]),
    Case("branches", [[0], [1, 2, 3]], schedule="gpipe"),
    Case("tied", [[1, 2], [0, 3]], 4, "dapple_b"),
    Case("tied", STRAIGHT, 4, "zb_h1", {"recompute": "boundary"}),
    Case("branches", EVERYWHERE, options={"jit_compile": True}),
    Case("multi_output", [[0, 2], [0, 2], [1, 3], [1, 3]], 2, "fast_forward", {"reverse_first_k": 3}),
]
ACROSS_FROM_HOST = [
    Case("transformer", [[0, 1], [2, 3]], 4, "dapple_b"),
    Case("lstm", [[0, 3], [1, 2]], 2, "gpipe"),
    Case("branches", [[0, 2], [1, 3], [0, 2], [1, 3]], schedule="modulo"),
    Case("multi_output", [[0, 2]] * 4, 2, options=CARRIED),
    Case("cnn", [[0, 1, 2], [3]], options={"recompute": "min_cut"}),
]


def check(case: Case, cluster: dapple.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64()
    assert_equal_training(ZOO[case.model], cluster, case.plan, reference(case.model), monkeypatch, steps=2)


# ---- four workers


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(CASES, 3), ids=str)
def test_four_workers_train_as_plain_keras(case: Case, workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, dapple.Cluster.of_servers(workers.addresses), monkeypatch)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Variables, as `assert_equal_training` returns them; logs up to the order in which TensorFlow adds slices' losses.

    Grappler makes one sum of several where all are on one device, as they are not on a cluster.
    """
    for own, other in zip(actual[0], expected[0], strict=True):
        assert own == pytest.approx(other, rel=1e-6, abs=0)
    for own, other in zip(actual[1], expected[1], strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "policy"),
    sampled(
        [
            (Case("tied", [[0, 1], [2], [3]], schedule="zb_h1"), "mixed_float16"),
            (Case("cnn", [[0, 1], [2, 3]]), "mixed_bfloat16"),
            (Case("tied", EVERYWHERE), "mixed_bfloat16"),
            (Case("lstm", [[0, 1], [2, 3]]), "mixed_float16"),
            (Case("cnn", [[0, 1], [2, 3]], options={"jit_compile": True}), "mixed_bfloat16"),
        ],
        5,
    ),
    ids=str,
)
def test_mixed_precision_gives_the_bits_of_local_devices(
    case: Case, policy: str, workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    keras.config.set_dtype_policy(policy)
    plain = reference(case.model)
    tolerance = TOLERANCE[policy.removeprefix("mixed_")]
    if case.plan.jit_compile:
        tolerance *= 2  # XLA rounds at other places: plain Keras differs from itself by 5e-2 with and without it.
    local, remote = (
        assert_equal_training(ZOO[case.model], cluster, case.plan, plain, monkeypatch, steps=2, tolerance=tolerance)
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

    def outcomes(self, place: Namespace, cases: Sequence[Case]) -> dict[str, str]:
        """How cases have ended for a client in a namespace: empty where all is well, or the error."""
        command = [*place.prefix, sys.executable, __file__, *self.addresses, "-", *map(str, cases)]
        with launch(command, stdout=subprocess.PIPE) as process:
            try:
                output, _ = process.communicate(timeout=60 + CASE_SECONDS * len(cases))
            except subprocess.TimeoutExpired:
                end(process)
                output, _ = process.communicate()
            finally:
                end(process)
        return dict(json.loads(line) for line in output.splitlines() if line.startswith("["))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """How the cases that are to be tested have ended: `ACROSS` for a third host, the others for the first one."""
    require_namespaces()
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and "outcomes" in item.fixturenames
    ]
    by_case: dict[str, str] = {}
    with HostsAndClient() as hosts:
        for place, cases in ((hosts.client, ACROSS), (hosts.namespaces[0], ACROSS_FROM_HOST)):
            if chosen := [case for case in cases if case in wanted]:
                by_case |= hosts.outcomes(place, chosen)
    return by_case


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", [*sampled(ACROSS, 3), *sampled(ACROSS_FROM_HOST, 3)], ids=str)
def test_two_hosts_train_as_plain_keras(case: Case, outcomes: dict[str, str]) -> None:
    assert outcomes.get(str(case), "the client ended before it came to this case") == ""


def main(arguments: Sequence[str]) -> None:
    """Within a host: trains by each of the named cases, and says how that has ended."""
    split = arguments.index("-")
    addresses, wanted = arguments[:split], arguments[split + 1 :]
    cluster = dapple.Cluster.of_servers(addresses)
    assert cluster.num_devices == 4 and cluster.num_servers == 2
    cases = {str(case): case for case in (*ACROSS, *ACROSS_FROM_HOST)}
    for name in wanted:
        outcome = ""
        try:
            with pytest.MonkeyPatch.context() as monkeypatch:
                check(cases[name], cluster, monkeypatch)
        except Exception:
            outcome = traceback.format_exc()
        sys.stdout.write(json.dumps([name, outcome]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
