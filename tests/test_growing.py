"""When a runtime that goes on without workers takes them in again."""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Collection
from typing import Any

import pytest
from hardware import cluster_of

import dapple_tf as dapple
from dapple_tf.clusters import shared_connections
from dapple_tf.describe.cluster import Cluster
from dapple_tf.execution import growing
from dapple_tf.execution.growing import Growing
from dapple_tf.planning.replanning import Deployment, Growth, Replanner


class Counting(Replanner):
    """Counts how often it is asked for a larger deployment."""

    asked = 0

    def growth(self, *arguments: Any) -> Growth | None:
        type(self).asked += 1
        return super().growth(*arguments)


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses of workers that can be used; the pauses before they are asked go to `pauses`."""
    addresses: set[str] = set()

    class Returning:
        def __init__(self, seconds: float, pause: float) -> None:
            pauses.append(pause)

        def there(self, cluster: Cluster, tasks: Collection[int]) -> frozenset[str]:
            return addresses & {cluster.addresses[task] for task in tasks}

    pauses.clear()
    Counting.asked = 0
    monkeypatch.setattr(growing, "Returning", Returning)
    return addresses


pauses: list[float] = []


def deployment(count: int, devices: int | None = None) -> Deployment:
    addresses = tuple(f"10.0.0.{number + 1}:1" for number in range(count))
    cluster = dataclasses.replace(cluster_of(*[1] * count), addresses=addresses)
    return Deployment(cluster, dapple.Plan.manual([], [range(devices or count)], 1, 12))


def test_workers_without_a_gain_are_told_once(there: set[str], caplog: pytest.LogCaptureFixture) -> None:
    own = Growing(10.0)
    own.left(deployment(3, devices=2))
    there.add("10.0.0.3:1")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert own.growth(deployment(2), Counting(None)) is None
    assert Counting.asked == 1
    (record,) = caplog.records
    assert record.getMessage() == "workers 10.0.0.3:1 are back, but the plan gains nothing by them"
    there.add("10.0.0.2:1")
    own.left(deployment(2))
    assert own.growth(deployment(1), Counting(None)) is not None


def test_pauses_grow_with_faults_in_a_row(there: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that a worker comes back costs the preparation of steps; a fault days later isn't one of a row."""
    now = [0.0]
    monkeypatch.setattr(growing, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    own = Growing(10.0)
    for _ in range(3):
        own.left(deployment(3))
        now[0] += 50
    assert pauses == [10, 20, 40]
    own.put_off()
    assert pauses[-1] == 80
    now[0] += 1e6
    own.left(deployment(3))
    assert pauses[-1] == 10
    for _ in range(20):
        own.put_off()
    assert pauses[-1] == 3600
    patient = Growing(1e5)
    patient.left(deployment(3))
    patient.put_off()
    assert pauses[-2:] == [1e5, 1e5]


@pytest.mark.parametrize(
    ("held", "users", "lost", "grows"),
    [
        pytest.param(2, 1, False, True, id="its own connection"),
        pytest.param(2, 2, False, False, id="shared with another model"),
        pytest.param(3, 1, True, True, id="a lost one that is replaced"),
        pytest.param(3, 1, False, False, id="another model's of the same workers"),
        pytest.param(4, 1, True, False, id="another model's of more workers"),
    ],
)
def test_workers_of_other_models_in_this_process(
    there: set[str], monkeypatch: pytest.MonkeyPatch, held: int, users: int, lost: bool, grows: bool
) -> None:
    other = types.SimpleNamespace(users=users, lost=RuntimeError() if lost else None)
    monkeypatch.setattr(shared_connections, "_connections", {deployment(held).cluster.addresses: other})
    own = Growing(10.0)
    own.left(deployment(3))
    there.add("10.0.0.3:1")
    assert (own.growth(deployment(2), Counting(None)) is not None) == grows
