"""Workers that Ray places, keeps and starts again: each is the child process of an actor.

    placement group:  bundle 0 ─ actor ─ python -m dapple_tf.worker --address=10.0.0.1:17211
                      bundle 1 ─ actor ─ python -m dapple_tf.worker --address=10.0.0.2:29100

Actor and worker end together. Ray then starts the actor again, and that the worker: at the same address as long as its
node lives. When the node has gone, Ray waits for another one that has room, where the worker has another address;
`RayWorkers.located` knows it. All of them end with `RayWorkers.close`, when nothing refers to the object any more, and
with this process.

Ray itself (extra `ray`) is imported when workers are asked for. The actors need this package on their nodes, in the
environment of Ray's own workers.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from dapple_tf.common.text import counted
from dapple_tf.errors import ClusterError
from dapple_tf.network.control import join_address, split_address
from dapple_tf.network.worker_process import START_SECONDS, WorkerProcess, free_ports, worker_command

_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_KINDS = ("auto", "cpu", "gpu")
_ANSWER_SECONDS = 2.0
"""Maximum seconds for asking actors where their workers are."""
_ENDLESS = -1
"""Ray's `max_restarts` for as many as it takes."""
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resource of a bundle -> the option by which an actor asks for it; others are in its option `resources`.

Without the first, Ray gives an actor that asks for anything else a CPU, which its bundle may not have."""


class RayWorkers:
    """Workers in a placement group of their own.

    Attributes:
        addresses: ``host:port`` at which each worker began.
        gpus: whether their devices are GPUs.
    """

    def __init__(
        self,
        count: int | None,
        devices: int,
        *,
        kind: str = "auto",
        resources: Mapping[str, float] | None = None,
        strategy: str = "SPREAD",
        wait_seconds: float = 60.0,
        arguments: Sequence[str] = (),
    ) -> None:
        """Places workers and waits until all of them serve.

        Args:
            count: number of workers; None for one on each node that has what a worker needs.
            devices: devices of each worker.
            kind: "gpu", "cpu" (logical CPU devices), or "auto": GPUs if Ray's nodes have enough of them.
            resources: what each worker reserves of its node's resources, in Ray's words, beside or in place of one CPU
                for each CPU device, or one GPU for each GPU and one CPU.
            strategy: Ray's strategy for placing the bundles.
            wait_seconds: seconds in which there must be room for all.
            arguments: further arguments of each worker.

        Raises:
            ClusterError: an argument is wrong, Ray isn't there or has no room, or a worker doesn't start.
        """
        _check(count, devices, kind, resources, strategy, wait_seconds)
        ray = _connected()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self.gpus = gpus = kind == "gpu" or (kind == "auto" and _has_gpus(nodes, count, devices))
        bundle = {**({"GPU": devices, "CPU": 1} if gpus else {"CPU": devices}), **(resources or {})}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        if not bundle:
            raise ClusterError(
                f"resources={dict(resources or {})} leaves a worker nothing to reserve; give it some CPUs"
            )
        if count is None:
            count = sum(_holds(node["Resources"], bundle) for node in nodes)
            if not count:
                raise ClusterError(f"none of Ray's nodes has {bundle} for a worker; there are {_told(nodes)}")
        group = ray.util.placement_group([bundle] * count, strategy=strategy)
        actors: list[Any] = []
        self._actors = actors
        self._session = _session(ray)
        self._end = weakref.finalize(self, _remove, ray, group, actors, os.getpid(), self._session)
        self._end.atexit = False  # Ray does it, and a process that is forked from this one mustn't.
        try:
            if not group.wait(wait_seconds):
                raise ClusterError(
                    f"Ray has no room for {count} workers of {bundle} each (strategy {strategy}) within "
                    f"{wait_seconds:g} s: there are {_told(nodes)}, of which {_plain(ray.available_resources())} is "
                    f"free; ask for fewer or smaller ones, or give nodes longer to come by wait_seconds"
                )
            self.addresses = _chosen(ray, group, count)
            own = {"num_cpus": 0.0} | {_OPTIONS[name]: amount for name, amount in bundle.items() if name in _OPTIONS}
            rest = {name: amount for name, amount in bundle.items() if name not in _OPTIONS}
            remote = ray.remote(_Actor)
            for number, address in enumerate(self.addresses):
                options = {**own, "resources": rest, "max_restarts": _ENDLESS, **_in_bundle(ray, group, number)}
                actors.append(remote.options(**options).remote(number, address, 0 if gpus else devices, arguments))
            starting = [actor.address.remote() for actor in actors]
            for number, address in enumerate(starting):
                _result(ray, address, f"worker {number} ({self.addresses[number]})", 2 * START_SECONDS)
        except BaseException:
            self.close()
            raise
        self._present = list(self.addresses)

    def located(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Returns where workers are now, or were last, by the addresses at which they began."""
        ray = _library()
        if self._end.alive and _session(ray) == self._session:
            answers = [actor.address.remote() for actor in self._actors]
            ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_SECONDS)
            for number, answer in enumerate(answers):
                if answer in ready:
                    with contextlib.suppress(ray.exceptions.RayError):  # It isn't back yet.
                        self._present[number] = ray.get(answer)
        present = dict(zip(self.addresses, self._present, strict=True))
        return tuple(present[address] for address in addresses)

    def close(self) -> None:
        """Ends the workers, and gives back what they had reserved."""
        self._end()


class _Actor:
    """An actor with a worker as its child process. When one of them ends, the other does."""

    def __init__(self, number: int, address: str, devices: int, arguments: Sequence[str]) -> None:
        """Starts the worker.

        Args:
            number: the worker's number, for what Ray logs.
            address: the worker's address; on another node than this address's, the worker gets a new one.
            devices: number of logical CPU devices; 0 for the GPUs that Ray lets this process see.
            arguments: further arguments of the worker.

        Raises:
            ClusterError: it doesn't start.
        """
        self._number, self._address = number, address
        host = _own_host()
        if host != split_address(address)[0]:
            self._address = join_address(host, free_ports(1, host)[0])
        self._worker = WorkerProcess(worker_command(self._address, devices, arguments), _to_stderr)
        if not self._worker.wait_until_serving(time.monotonic() + START_SECONDS):
            self._worker.end()
            said = "\n".join(self._worker.tail) or "nothing"
            raise ClusterError(
                f"it didn't start within {START_SECONDS:.0f} s, or ended with code {self._worker.process.returncode}; "
                f"it said: {said}"
            )
        threading.Thread(target=self._end_with_worker, name="worker-end", daemon=True).start()

    def __repr__(self) -> str:
        return f"worker {self._number}"  # before each line that Ray shows of it

    def address(self) -> str:
        """Returns where the worker serves."""
        return self._address

    def _end_with_worker(self) -> None:
        self._worker.process.wait()
        os._exit(1)  # Ray starts an actor again whose process ends by itself, but none that is asked to end.


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _own_host() -> str:
    """Returns this node's address, in Ray's network."""
    return str(_library().util.get_node_ip_address())


def _offer(count: int) -> tuple[str, list[int]]:
    """Returns a node's address and free ports there."""
    host = _own_host()
    return host, free_ports(count, host)


def _chosen(ray: Any, group: Any, count: int) -> tuple[str, ...]:
    """Returns an address for each bundle of a group: its node's, and a port that is free there."""
    remote = ray.remote(_offer)
    offers = [remote.options(num_cpus=0, **_in_bundle(ray, group, number)).remote(count) for number in range(count)]
    addresses: list[str] = []
    for number, offer in enumerate(offers):
        host, ports = _result(ray, offer, f"the node for worker {number}", START_SECONDS)
        offered = (join_address(host, port) for port in ports)
        addresses.append(next(address for address in offered if address not in addresses))
    return tuple(addresses)


def _in_bundle(ray: Any, group: Any, number: int) -> dict[str, Any]:
    """Returns the option that places a task or an actor in a bundle of a group."""
    strategies = ray.util.scheduling_strategies
    return {"scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(group, number)}


def _result(ray: Any, reference: Any, what: str, seconds: float) -> Any:
    """Returns what a task gives.

    Raises:
        ClusterError: it fails; the text is the last line of Ray's, which is the error in the task.
    """
    try:
        return ray.get(reference, timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(f"{what} doesn't answer within {seconds:g} s; see Ray's log for why") from error
    except ray.exceptions.RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ClusterError(
            f"{what} can't be used: {lines[-1] if lines else type(error).__name__} (Ray's nodes need dapple_tf and "
            f"TensorFlow in the environment of Ray's workers)"
        ) from error


def _session(ray: Any) -> tuple[str, str] | None:
    """Returns what tells this process's connection to Ray from earlier ones, which took their actors with them."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


def _remove(ray: Any, group: Any, actors: Sequence[Any], process: int, session: tuple[str, str] | None) -> None:
    """Ends actors and removes their group, unless this process was forked from theirs, or Ray has done it."""
    if os.getpid() == process and _session(ray) == session:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _library() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ClusterError("Ray isn't installed: pip install dapple_tf[ray]") from error
    return ray


def _connected() -> Any:
    """Returns the library, which this process has connected to a cluster.

    Raises:
        ClusterError: it isn't installed, or not connected.
    """
    ray = _library()
    if not ray.is_initialized():
        raise ClusterError(
            'Ray isn\'t connected: call ray.init(address="auto") first on a machine of a Ray cluster, or ray.init() to '
            "start one on this machine"
        )
    return ray


def _check(
    count: int | None,
    devices: int,
    kind: str,
    resources: Mapping[str, float] | None,
    strategy: str,
    wait_seconds: float,
) -> None:
    for what, number in (("workers", count), ("devices of each worker", devices)):
        if number is not None and number < 1:
            raise ClusterError(f"{number} {what} were asked for; ask for at least 1")
    for name, value, known in (("kind of device", kind, _KINDS), ("strategy", strategy, _STRATEGIES)):
        if value not in known:
            raise ClusterError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
    for name, amount in (resources or {}).items():
        if amount < 0:
            raise ClusterError(f"resources has {name!r}: {amount}; it must be at least 0")
    if wait_seconds <= 0:
        raise ClusterError(f"wait_seconds is {wait_seconds}; it must be above 0")


def _holds(resources: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in bundle.items())


def _has_gpus(nodes: Sequence[Mapping[str, Any]], count: int | None, devices: int) -> bool:
    """Returns whether nodes have GPUs for this many workers, or for one if ``count`` is None."""
    fitting = [int(node["Resources"].get("GPU", 0)) // devices for node in nodes]
    return sum(fitting) >= (1 if count is None else count)


def _told(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Returns nodes with their resources, except the nodes' own names."""
    texts = [f"{node['NodeManagerAddress']} with {_plain(node['Resources'])}" for node in nodes]
    return f"{counted(len(nodes), 'node')}: {'; '.join(texts)}"


def _plain(resources: Mapping[str, float]) -> dict[str, float]:
    """Returns resources that aren't Ray's own marks of nodes and placement groups."""
    marks = ("node:", "bundle_group", "object_store_memory")
    return {name: amount for name, amount in resources.items() if not name.startswith(marks) and "_group_" not in name}
