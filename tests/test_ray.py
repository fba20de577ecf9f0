"""Workers on Ray: what is asked of it is told by a stand-in; restarts, ends and training are those of Ray itself."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pathlib
import re
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from fake_session import FakeWorkers
from models_for_tests import assert_same_values, classifier
from workers import PATIENCE, client

import dapple_tf as dapple
from dapple_tf.describe import cluster as cluster_module
from dapple_tf.network import ray_workers
from dapple_tf.network.ray_workers import RayWorkers
from dapple_tf.tools.hosts import environment

CPUS = {"10.0.0.1": {"CPU": 4.0}, "10.0.0.2": {"CPU": 4.0}}
GPUS = {"10.0.0.1": {"CPU": 8.0, "GPU": 2.0}, "10.0.0.2": {"CPU": 8.0, "GPU": 2.0}, "10.0.0.3": {"CPU": 8.0}}


# ---- a stand-in for Ray


class RayError(Exception):
    """Base of Ray's errors."""


class GetTimeoutError(RayError):
    """A result isn't there in time."""


@dataclasses.dataclass(frozen=True)
class InBundle:
    """Where a task or actor is placed."""

    group: Any
    bundle: int


class Group:
    """A placement group; bundle i is on node i, and over again."""

    def __init__(self, bundles: list[dict[str, float]], strategy: str, room: bool) -> None:
        self.bundles, self.strategy, self._room = bundles, strategy, room
        self.removed = False

    def wait(self, seconds: float) -> bool:
        return self._room


class Handle:
    """An actor; its answer is what `answer` gives, or raises."""

    def __init__(self, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        self.arguments, self.options, self.killed = arguments, options, 0
        self.answer: Callable[[], str] = lambda: arguments[1]
        self.address = types.SimpleNamespace(remote=lambda: self.answer)


class FakeRay(types.ModuleType):
    """As much of Ray as is used: nodes, one placement group, and actors whose workers are at the address they're given.

    Attributes:
        group: the placement group that was made last.
        actors: the actors.
    """

    def __init__(self, nodes: dict[str, dict[str, float]], *, room: bool = True) -> None:
        super().__init__("ray")
        self._nodes, self._room, self._here = nodes, room, next(iter(nodes), "")
        self.group: Any = None
        self.actors: list[Handle] = []
        self.connected, self.job = True, "01000000"
        self.exceptions = types.SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
        strategies = types.SimpleNamespace(PlacementGroupSchedulingStrategy=InBundle)
        self.util = types.SimpleNamespace(
            placement_group=self._placed,
            remove_placement_group=lambda group: setattr(group, "removed", True),
            get_node_ip_address=lambda: self._here,
            scheduling_strategies=strategies,
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
        monkeypatch.setitem(sys.modules, "ray", self)
        monkeypatch.setitem(sys.modules, "ray.util", self.util)
        monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", self.util.scheduling_strategies)
        # The addresses of the stand-in's nodes aren't this machine's.
        monkeypatch.setattr(ray_workers, "free_ports", lambda count, host: list(range(17_000, 17_000 + count)))
        return self

    def is_initialized(self) -> bool:
        return self.connected

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: "node", get_job_id=lambda: self.job)

    def nodes(self) -> list[dict[str, Any]]:
        alive = [{"Alive": True, "NodeManagerAddress": host, "Resources": own} for host, own in self._nodes.items()]
        return [*alive, {"Alive": False, "NodeManagerAddress": "10.0.0.9", "Resources": {"CPU": 64.0, "GPU": 8.0}}]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0, "node:10.0.0.1": 1.0}

    def _placed(self, bundles: list[dict[str, float]], strategy: str) -> Group:
        self.group = Group(bundles, strategy, self._room)
        return self.group

    def remote(self, target: Any) -> Any:
        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(remote=lambda *given: self._run(target, options, given))
        )

    def _run(self, target: Any, options: dict[str, Any], arguments: tuple[Any, ...]) -> Any:
        if target is ray_workers._Actor:
            self.actors.append(Handle(arguments, options))
            return self.actors[-1]
        hosts = list(self._nodes)
        self._here = hosts[options["scheduling_strategy"].bundle % len(hosts)]
        answer = target(*arguments)
        return lambda: answer

    def get(self, reference: Callable[[], Any], timeout: float | None = None) -> Any:
        return reference()

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []

    def kill(self, actor: Handle) -> None:
        actor.killed += 1


def failing(error: Exception) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


# ---- what is asked of Ray


def test_each_worker_is_an_actor_in_a_bundle_that_ray_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of one node have ports of their own."""
    ray = FakeRay(CPUS).install(monkeypatch)
    workers = RayWorkers(3, 2, strategy="PACK", arguments=["--tls=keys"])
    assert (ray.group.bundles, ray.group.strategy) == ([{"CPU": 2}] * 3, "PACK")
    assert not workers.gpus
    for number, actor in enumerate(ray.actors):
        assert actor.options == {
            "num_cpus": 2,
            "resources": {},
            "max_restarts": -1,
            "scheduling_strategy": InBundle(ray.group, number),
        }
        assert actor.arguments == (number, workers.addresses[number], 2, ["--tls=keys"])
    assert workers.addresses == ("10.0.0.1:17000", "10.0.0.2:17000", "10.0.0.1:17001")


@pytest.mark.parametrize(
    ("nodes", "count", "options", "workers", "gpus"),
    [
        (GPUS, 2, {}, 2, True),
        (GPUS, 3, {}, 3, False),  # Each of a worker's GPUs is on its node.
        (GPUS, 3, {"kind": "gpu"}, 3, True),
        # Without a number, each node that has room gets a worker.
        (GPUS, None, {}, 2, True),
        (CPUS | {"10.0.0.3": {"CPU": 1.0}}, None, {}, 2, False),
    ],
)
def test_gpus_are_used_if_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, nodes: Any, count: int | None, options: dict[str, Any], workers: int, gpus: bool
) -> None:
    ray = FakeRay(nodes).install(monkeypatch)
    assert RayWorkers(count, 2, **options).gpus == gpus
    assert ray.group.bundles == [{"GPU": 2, "CPU": 1} if gpus else {"CPU": 2}] * workers
    # A worker takes the GPUs that Ray lets its process see.
    assert {actor.arguments[2] for actor in ray.actors} == {0 if gpus else 2}


def test_an_actor_asks_for_what_its_bundle_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of CPUs it would ask for one by Ray's default, find none in its bundle, and wait for ever."""
    ray = FakeRay(GPUS).install(monkeypatch)
    RayWorkers(1, 2, resources={"CPU": 0, "memory": 2**30, "fast_disk": 0.5})
    assert ray.group.bundles == [{"GPU": 2, "memory": 2**30, "fast_disk": 0.5}]
    (actor,) = ray.actors
    asked = {"num_cpus": 0, "num_gpus": 2, "memory": 2**30, "resources": {"fast_disk": 0.5}}
    assert {name: actor.options[name] for name in asked} == asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "0 workers were asked for; ask for at least 1"),
        ({"kind": "tpu"}, "unknown kind of device 'tpu'; use one of auto, cpu, gpu"),
        ({"resources": {"CPU": 0}}, "resources={'CPU': 0} leaves a worker nothing to reserve"),
        ({"workers": None, "kind": "gpu"}, "none of Ray's nodes has {'GPU': 1, 'CPU': 1} for a worker; there are 2 n"),
        ({"connected": False}, 'Ray isn\'t connected: call ray.init(address="auto") first'),
        ({"installed": False}, "Ray isn't installed: pip install dapple_tf[ray]"),
        (
            {"workers": 3, "devices_per_worker": 4, "wait_seconds": 7, "room": False},
            "Ray has no room for 3 workers of {'CPU': 4} each (strategy SPREAD) within 7 s: there are 2 nodes: "
            "10.0.0.1 with {'CPU': 4.0}; 10.0.0.2 with {'CPU': 4.0}, of which {'CPU': 1.0} is free; ask for fewer or "
            "smaller ones, or give nodes longer to come by wait_seconds",
        ),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    ray = FakeRay(CPUS, room=options.pop("room", True)).install(monkeypatch)
    ray.connected = options.pop("connected", True)
    if not options.pop("installed", True):
        monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(dapple.ClusterError, match=re.escape(message)):
        dapple.Cluster.from_ray(**{"workers": 2, **options})
    assert ray.group is None or ray.group.removed


def test_a_worker_that_does_not_start_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, errors = FakeRay(CPUS).install(monkeypatch), list[RayError]()

    def run(*arguments: Any) -> Any:
        actor = FakeRay._run(ray, *arguments)
        if len(ray.actors) % 2 == 0:
            actor.answer = failing(errors[-1])
        return actor

    monkeypatch.setattr(ray, "_run", run)
    for error, message in (
        (
            RayError("The actor died.\nTraceback ...\nModuleNotFoundError: No module named 'dapple_tf'\n"),
            r"worker 1 \(10.0.0.2:17000\) can't be used: ModuleNotFoundError: No module named 'dapple_tf' \(Ray's",
        ),
        (GetTimeoutError(), r"worker 1 \(10.0.0.2:17000\) doesn't answer within 240 s"),
    ):
        errors.append(error)
        with pytest.raises(dapple.ClusterError, match=message):
            RayWorkers(2, 1)
        assert ray.group.removed
    assert [actor.killed for actor in ray.actors] == [1] * 4


# ---- while they run


def test_a_worker_on_another_node_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(CPUS).install(monkeypatch)
    workers = RayWorkers(3, 1)
    first, second, third = workers.addresses
    ray.actors[1].answer = lambda: "10.0.0.3:20000"
    ray.actors[2].answer = failing(RayError("the actor is restarting"))
    assert workers.located([first, second, third]) == (first, "10.0.0.3:20000", third)
    # One that is gone for a while stays where it was last; a cluster may have a part of the workers.
    ray.actors[1].answer = failing(RayError("the actor is restarting"))
    assert workers.located([third, second]) == (third, "10.0.0.3:20000")
    ray.actors[0].answer = failing(AssertionError("an actor was asked after its end"))
    ray.job = "02000000"  # After Ray's shutdown, its actors are those of an earlier connection.
    assert workers.located([first]) == (first,)
    workers.close()
    assert not any(actor.killed for actor in ray.actors)
    assert workers.located([first]) == (first,)


def test_workers_end_once_and_by_the_process_that_started_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(CPUS).install(monkeypatch)
    workers = RayWorkers(2, 1)
    process = os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: process + 1)
        RayWorkers(1, 1)  # of the forked process
        ray_workers._remove(ray, ray.group, ray.actors, process, ray_workers._session(ray))
    assert [actor.killed for actor in ray.actors[:2]] == [0, 0]
    workers.close()
    workers.close()
    assert [actor.killed for actor in ray.actors[:2]] == [1, 1]


class Child:
    """A worker's process that serves, and ends when it is told."""

    command: Sequence[str] = ()
    serves = True

    def __init__(self, command: Sequence[str], echo: Callable[[str], None]) -> None:
        Child.command = command
        self.tail, self.ended = ["no such flag"], threading.Event()
        self.process = types.SimpleNamespace(wait=self.ended.wait, returncode=1)

    def wait_until_serving(self, deadline: float) -> bool:
        return Child.serves

    def end(self) -> None:
        self.ended.set()


@pytest.mark.parametrize(
    ("here", "address"),
    [("10.0.0.1", "10.0.0.1:17003"), ("fd00::2", "[fd00::2]:17000")],
)
def test_an_actor_serves_at_its_address_or_at_one_of_its_new_node(
    monkeypatch: pytest.MonkeyPatch, here: str, address: str
) -> None:
    FakeRay({here: {}}).install(monkeypatch)
    monkeypatch.setattr(ray_workers, "WorkerProcess", Child)
    left = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: left.set() if code == 1 else None)
    actor = ray_workers._Actor(3, "10.0.0.1:17003", 2, ["--tls=keys"])
    assert actor.address() == address and repr(actor) == "worker 3"
    assert Child.command[2:] == ["dapple_tf.worker", f"--address={address}", "--devices=2", "--tls=keys"]
    assert not left.is_set()
    actor._worker.end()
    assert left.wait(PATIENCE)  # Ray starts it again.
    monkeypatch.setattr(Child, "serves", False)
    with pytest.raises(dapple.ClusterError, match="ended with code 1; it said: no such flag"):
        ray_workers._Actor(0, "10.0.0.1:17000", 1, [])


# ---- the cluster


def answering(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """Workers that have devices of these kinds."""
    devices = [{"kind": kind, "memory_bytes": 2**30, "hardware": ""} for kind in kinds]
    monkeypatch.setattr(cluster_module, "inventory", lambda addresses, seconds, keys: [devices for _ in addresses])


def test_the_cluster_is_that_of_its_workers_and_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(CPUS).install(monkeypatch)
    answering(monkeypatch, "CPU", "CPU")
    cluster = dapple.Cluster.from_ray(2, devices_per_worker=2)
    assert cluster == dapple.Cluster.of_servers(cluster.addresses)
    assert cluster.addresses == ("10.0.0.1:17000", "10.0.0.2:17000") == cluster.located()
    derived = dataclasses.replace(cluster, inter_bandwidth=1e9)
    del cluster
    gc.collect()
    assert not ray.group.removed
    del derived
    gc.collect()
    assert ray.group.removed


def test_gpus_that_tensorflow_does_not_find_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(GPUS).install(monkeypatch)
    answering(monkeypatch, "CPU")
    text = r"worker 0 \(10.0.0.1:17000\) was to have 2 devices of kind GPU, but has CPU: does TensorFlow find"
    with pytest.raises(dapple.ClusterError, match=text):
        dapple.Cluster.from_ray(2, devices_per_worker=2)
    assert ray.group.removed


def test_keys_are_taken_from_the_same_folder_on_all_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    ray = FakeRay(CPUS).install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dapple.ClusterError, match="is missing; a directory for TLS has"):
        dapple.Cluster.from_ray(2, tls="keys")
    assert ray.actors[0].arguments[3] == [f"--tls={tmp_path / 'keys'}"]


def test_training_goes_on_with_a_worker_that_ray_has_started_on_another_node() -> None:
    """Its cluster keeps the address by which Ray's workers are told apart, here of one that is taken in later."""
    x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
    y = np.random.default_rng(1).integers(0, 3, size=24)
    present: dict[str, str] = {}
    own = types.SimpleNamespace(located=lambda addresses: tuple(present.get(one, one) for one in addresses))

    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        return classifier(optimizer=keras.optimizers.SGD(0.05))

    with FakeWorkers(3).used() as workers:
        first, second, third = workers.cluster.addresses
        cluster = dapple.Cluster.of_servers([first, second], devices_per_server=1)
        cluster = dataclasses.replace(cluster, ray_workers=own)
        faults = dapple.FaultPolicy("replan", notice_seconds=1.0, wait_seconds=0.0)
        plain = build()
        pipelined = dapple.transform(build(), cluster, dapple.Plan.manual([], [[0, 1]], 1, 6), faults=faults)
        for step in range(5):
            if step == 2:
                workers.kill(1)
            if step == 3:
                present[second] = third
            for model in (plain, pipelined):
                model.train_on_batch(x[6 * (step % 4) :][:6], y[6 * (step % 4) :][:6])
        (record,) = pipelined.faults
        assert record.without == (second,)
        assert [growth.added for growth in pipelined.growths] == [(second,)]
        assert pipelined.cluster.addresses == (first, second)
        assert pipelined.cluster.located() == (first, third)
        pipelined.close()
    assert_same_values(pipelined.model, plain)


# ---- Ray itself

PROGRAM = """
import json, os, signal, subprocess
import keras, numpy as np, ray
from models_for_tests import classifier, values
from workers import has_ended, wait_until
import dapple_tf as dapple

def build():
    keras.utils.set_random_seed(3)
    return classifier(optimizer=keras.optimizers.Adam(0.05), metrics=["accuracy"])

def worker_at(address):
    return int(subprocess.check_output(["pgrep", "-o", "-f", f"dapple_tf[.]worker --address={address}"]))

x = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
y = np.random.default_rng(1).integers(0, 3, size=24)
plain = build()
ray.init(num_cpus=2, include_dashboard=False)
cluster = dapple.Cluster.from_ray(workers=2)
plan = dapple.Plan.manual(["first"], [[0], [1]], 2, 6)
faults = dapple.FaultPolicy("restart", notice_seconds=5, wait_seconds=200)
pipelined = dapple.transform(build(), cluster, plan, faults=faults)
for step in range(4):
    if step == 2:
        os.kill(worker_at(cluster.addresses[1]), signal.SIGKILL)
    part = slice(6 * step, 6 * step + 6)
    plain.train_on_batch(x[part], y[part])
    pipelined.train_on_batch(x[part], y[part])
pipelined.close()
stayed = cluster.located() == cluster.addresses
ends = [worker_at(address) for address in cluster.addresses]
cluster.close()
for process in ends:
    wait_until(lambda: has_ended(process))
wait_until(lambda: ray.available_resources().get("CPU") == 2.0)
differences = [float(np.abs(a - b).max()) for a, b in zip(values(pipelined.model), values(plain), strict=True)]
print("told", json.dumps([len(pipelined.faults), stayed, max(differences)]), flush=True)
"""


def test_ray_starts_workers_again_and_training_equals_plain_keras() -> None:
    pytest.importorskip("ray", reason="needs Ray: ray isn't installed (pip install dapple_tf[ray])")
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).parent), variables["PYTHONPATH"]])
    # Names of sockets are short: this folder's isn't pytest's, which would be too long.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        variables |= {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        with client(PROGRAM, env=variables) as process:
            out, err = process.communicate(timeout=5 * PATIENCE)
    assert process.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("told ")]
    faults, stayed, differs = json.loads(line.removeprefix("told "))
    assert faults == 1 and stayed and differs < 1e-5
