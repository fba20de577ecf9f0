"""Tunnels by TLS between TensorFlow's servers, which listen on the loopback device alone.

Each process with a server has a process of relays beside it (`relay.py`), and its own view of the cluster: its own
server at its true port, and the others where the tunnels to them begin.

    client's    {"client": ["127.77.0.1:5000"], "worker": ["127.77.0.1:5101", "127.77.0.1:5102"]}
    worker 0's  {"client": ["127.77.0.1:6100"], "worker": ["127.77.0.1:6000", "127.77.0.1:6101"]}
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import dapple_tf.network.relay as relay_program
from dapple_tf.errors import ClusterError, PortTakenError
from dapple_tf.network.control import join_address
from dapple_tf.network.keys import Keys
from dapple_tf.network.relay import LOOPBACK


class Tunnels:
    """The tunnels of one server; they end with this process, or when they are closed.

    Attributes:
        cluster: the cluster as this server sees it: job -> address of each task.
        server_port: port of `LOOPBACK` that this server must use.
    """

    def __init__(
        self,
        keys: Keys,
        hosts: Sequence[str],
        port: int,
        cluster: Mapping[str, Sequence[str]],
        fingerprints: Mapping[str, Sequence[str]],
        own: tuple[str, int],
        *,
        all_interfaces: bool = False,
        silence: float = 0.0,
    ) -> None:
        """Starts the relays.

        Args:
            keys: this machine's.
            hosts: its addresses at which the others reach it.
            port: the port there.
            cluster: the relays: job -> "host:port" of each task.
            fingerprints: those of their certificates.
            own: job and task of the server here.
            all_interfaces: whether the others reach it at all of the machine's addresses.
            silence: seconds for which a link may be down without being broken off, if they are more than 50.

        Raises:
            PortTakenError: the port is taken.
            ClusterError: the address isn't this machine's.
        """
        with socket.socket() as trial:
            trial.bind((LOOPBACK, 0))
            self.server_port = int(trial.getsockname()[1])
        others = [
            (job, task, address, fingerprints[job][task])
            for job, addresses in cluster.items()
            for task, address in enumerate(addresses)
            if (job, task) != own
        ]
        order = {
            "directory": str(keys.directory),
            "files": dict(keys.files),
            "hosts": list(hosts),
            "port": port,
            "all_interfaces": all_interfaces,
            "server_port": self.server_port,
            "known": [known for *_, known in others],
            "silence": silence,
            "ends": [(address, known) for *_, address, known in others],
        }
        self._process = _start()
        try:
            ports = self._ask(order)
        except BaseException:
            self.close()
            raise
        views = {job: [join_address(LOOPBACK, self.server_port)] * len(tasks) for job, tasks in cluster.items()}
        for (job, task, *_), end in zip(others, ports, strict=True):
            views[job][task] = join_address(LOOPBACK, end)
        self.cluster: Mapping[str, Sequence[str]] = views

    @property
    def alive(self) -> bool:
        """Whether the relays are still there."""
        return self._process.poll() is None

    def drop(self) -> None:
        """Drops all connections, such as those to servers that are no longer there."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # They are no longer `alive`, and their connections neither.
            self._process.stdin.write(b"drop\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends the relays."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, order: Mapping[str, object]) -> list[int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"the relays of the tunnels ended at once, with code {self._process.wait()}; their process has said why"
            ) from error
        if "error" in answer:
            raise (PortTakenError if answer["taken"] else ClusterError)(answer["error"])
        return list(answer["ports"])


def _start() -> subprocess.Popen[bytes]:
    """Starts the process, which finds this package where this one has it, whatever the working directory is."""
    root = str(Path(relay_program.__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", relay_program.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
