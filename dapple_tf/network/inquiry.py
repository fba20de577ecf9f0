"""A client's questions to workers, before and when it borrows them, and which versions both must have.

The client captures the model, rewrites its graph and runs the steps; a worker starts TensorFlow's server, which
optimizes the functions of that graph and runs their kernels. So the same step can give other results

* under another TensorFlow: other kernels, other rewrites by Grappler, other all-reduces;
* under another dapple_tf: it divides the worker's cores among devices, on which the order of sums inside kernels
  depends, and both sides must mean the same by the messages that they exchange.

Nothing of Keras or of the user's Python code runs on a worker: layers, losses and metrics are traced in the client, and
graphs with Python functions are refused (`frontend.custom_gradients.check_py_functions`). Workers report the versions
of both all the same, for whoever compares logs.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import importlib.metadata
import os
import platform
import queue
import reprlib
import secrets
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from dapple_tf.errors import ClusterError, PortTakenError, printable
from dapple_tf.network.control import PROTOCOL, Channel, ControlError
from dapple_tf.network.keys import Keys
from dapple_tf.version import VERSION

_RUN = uuid.uuid4().hex[:8]
"""Tells processes with the same number on the same machine apart."""
_KEY = secrets.token_bytes(32)
_REQUIREMENTS = {"dapple_tf": "dapple_tf", "tensorflow": "TensorFlow"}
"""What must be the same on both sides, by its name in messages and for users."""


def client_name() -> str:
    """Returns this process's name for workers; a process that is forked from it has another one."""
    return f"process {os.getpid()} on {socket.gethostname()} (run {_RUN})"


def lease_secret(address: str) -> str:
    """Returns this process's secret for one worker, by which it gets its lease back from a connection that hangs.

    Each worker is told a secret of its own, so that none can use it at the others; a forked process has others.
    """
    return hmac.new(_KEY, f"{os.getpid()} {address}".encode(), "sha256").hexdigest()


def inventory(addresses: Sequence[str], seconds: float, keys: Keys | None = None) -> list[list[dict[str, Any]]]:
    """Asks running workers for kind, memory and hardware of their devices.

    Args:
        addresses: ``host:port`` of each worker.
        seconds: time in which each has to answer.
        keys: this machine's, for TLS.

    Raises:
        ClusterError: a worker isn't there, or two lend the same GPU.
    """
    inventories: dict[int, list[dict[str, Any]]] = {}
    lenders: dict[str, int] = {}

    def ask(task: int) -> None:
        inventories[task] = devices(task, addresses[task], status(task, addresses[task], seconds, keys))

    for_each(ask, len(addresses))
    for task, address in enumerate(addresses):
        for card in filter(None, (device.get("card") for device in inventories[task])):
            first = lenders.setdefault(card, task)
            if first != task:
                raise ClusterError(
                    f"workers {first} ({addresses[first]}) and {task} ({address}) both lend the GPU {printable(card)}: "
                    f"start them with GPUs of their own, --gpus=0 and --gpus=1, say"
                )
    return [inventories[task] for task in range(len(addresses))]


def devices(task: int, address: str, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the devices that a worker's answer names.

    Raises:
        ClusterError: it names none, or garbles them.
    """
    entries = answer.get("devices")
    if not isinstance(entries, list) or not entries or not all(map(_is_device, entries)):
        raise ClusterError(f"worker {task} ({address}) {garbled(answer, 'devices')}")
    return entries


def _is_device(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("kind") in ("CPU", "GPU")
        and type(entry.get("memory_bytes")) is int
        and entry["memory_bytes"] > 0
        and all(isinstance(entry.get(name, ""), str) for name in ("hardware", "card"))
    )


def garbled(answer: Mapping[str, Any], name: str) -> str:
    """Returns an error's text about an incomplete answer."""
    return f"answers {reprlib.repr(answer)}, which lacks {name!r} or garbles it; is it a worker of this version?"


def reachable(addresses: Sequence[str], seconds: float, keys: Keys | None = None) -> list[bool]:
    """Returns whether each worker answers within ``seconds``, and is free for this process."""
    free: dict[int, bool] = {}

    def ask(task: int) -> None:
        try:
            free[task] = status(task, addresses[task], seconds, keys).get("holder") in (None, client_name())
        except ClusterError:
            free[task] = False

    for_each(ask, len(addresses))
    return [free[task] for task in range(len(addresses))]


def status(task: int, address: str, seconds: float, keys: Keys | None) -> dict[str, Any]:
    """Returns a worker's devices, versions and holder; see `hello`."""
    channel, answer = hello(task, address, {"ask": "status", "secret": lease_secret(address)}, seconds, keys)
    channel.close()
    return answer


def hello(
    task: int, address: str, question: Mapping[str, Any], seconds: float, keys: Keys | None = None
) -> tuple[Channel, dict[str, Any]]:
    """Connects to a worker and asks a question; returns the connection, which stays open, and the answer.

    Raises:
        ClusterError: the worker isn't there, refuses, or has other versions with which results could differ.
    """
    channel = None
    try:
        channel = Channel.connect(address, seconds, keys)
        answer = accepted(task, address, channel.ask({"protocol": PROTOCOL, **question}, seconds))
        _check_versions(task, address, answer)
        return channel, answer
    except ControlError as error:
        if channel is not None:
            channel.close()
        advice = (
            f"is `python -m dapple_tf.worker --address={address}` running there, without --tls?"
            if keys is None
            else f"is `python -m dapple_tf.worker --address={address} --tls=...` running there, with a certificate of "
            f"the same authority as the one in {keys.directory}?"
        )
        raise ClusterError(f"worker {task} ({address}) {error}; {advice}") from error
    except ClusterError:
        assert channel is not None
        channel.close()
        raise


def _check_versions(task: int, address: str, answer: Mapping[str, Any]) -> None:
    versions = answer.get("versions")
    if not are_versions(versions):
        raise ClusterError(f"worker {task} ({address}) {garbled(answer, 'versions')}")
    if difference := version_difference(versions):
        raise ClusterError(f"worker {task} ({address}) {difference}")


def accepted(task: int, address: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns a worker's answer unless it is an error.

    Raises:
        PortTakenError: the worker's server got no port.
        ClusterError: it is another error.
    """
    if "error" in answer:
        kind = PortTakenError if answer.get("taken") is True else ClusterError
        raise kind(f"worker {task} ({address}): {answer['error']}")
    return answer


def for_each(function: Callable[[int], object], count: int) -> None:
    """Calls a function with 0 ... count - 1, in up to 64 threads; raises the first one's error once all have ended.

    Ctrl-C, or Python's end, doesn't wait for calls that have begun.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    errors: dict[int, BaseException] = {}

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                index = waiting.get_nowait()
                try:
                    function(index)
                except BaseException as error:
                    errors[index] = error

    for index in range(count):
        waiting.put(index)
    threads = [threading.Thread(target=work, name="ask", daemon=True) for _ in range(min(64, count))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.get_nowait()
        errors.clear()  # An error's frames would keep it, and all that they hold.


# ---- versions


@functools.cache
def own_versions() -> Mapping[str, str]:
    """Returns the versions that this process runs with; imports TensorFlow.

    TensorFlow's includes the commit that it was built from: a build of one's own may have the number of a release.
    """
    import tensorflow as tf  # heavy, and a description of a cluster doesn't need it

    return {
        "dapple_tf": VERSION,
        "tensorflow": f"{tf.version.VERSION} ({tf.version.GIT_VERSION})",
        "keras": importlib.metadata.version("keras"),
        "python": platform.python_version(),
    }


def version_difference(theirs: Mapping[str, str]) -> str | None:
    """Returns an error's text if results could differ between these versions and this process's.

    Args:
        theirs: a worker's versions.
    """
    own = own_versions()
    unlike = {name: told for name, told in _REQUIREMENTS.items() if theirs[name] != own[name]}
    if not unlike:
        return None
    differences = " and ".join(
        f"{told} {theirs[name]} where this process has {own[name]}" for name, told in unlike.items()
    )
    requirements = " ".join(f"{name}=={own[name].partition(' ')[0]}" for name in unlike)
    return (
        f"has {differences}: steps on it can give other results. Use the same versions on both, such as by "
        f"`pip install {requirements}` there, and start the worker again"
    )


def are_versions(value: object) -> TypeGuard[Mapping[str, str]]:
    """Returns whether a message's value has the versions that are compared."""
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in _REQUIREMENTS)
