"""Workers as processes that this one starts: they end with it, and their output is read."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from dapple_tf.errors import ClusterError

ROOT = pathlib.Path(__file__).parents[2]
"""Folder from which Python imports this package."""
START_SECONDS = 120.0
"""Seconds that a worker may take to start: importing TensorFlow is slow where many do it on few cores."""
_LINES = 40
"""Number of a worker's last lines that errors quote."""
_NOISE = ("I0000 00:00:", "WARNING: All log messages before absl::InitializeLog()")
"""Starts of lines that TensorFlow writes before its logging is configured."""

# A process gets its parent's death signal when the *thread* that started it ends: this one ends with the interpreter.
_starter = concurrent.futures.ThreadPoolExecutor(1, "starter")


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns unused TCP ports of an address of this machine.

    None is in the system's range for outgoing connections, so that a restarted worker finds its own port still free.

    Raises:
        ClusterError: there are too few, or the address isn't this machine's.
    """
    ports: list[int] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(15_000, 32_000), 10_000):
            trial = stack.enter_context(socket.socket(family))
            with contextlib.suppress(OSError):
                trial.bind((host, port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise ClusterError(f"{count} free ports of {host} were looked for, but there are only {len(ports)}")


def worker_command(address: str, devices: int, arguments: Sequence[str] = ()) -> list[str]:
    """Returns the command that starts a worker, with its address and devices, and further arguments."""
    return [sys.executable, "-m", "dapple_tf.worker", f"--address={address}", f"--devices={devices}", *arguments]


def launch(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a process in its own group, which is killed when this process dies.

    Args:
        command: what to run.
        options: as for `subprocess.Popen`.
    """
    ending = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    options = {"stdin": subprocess.DEVNULL, "text": True, "start_new_session": True, "env": environment(), **options}
    return _starter.submit(lambda: subprocess.Popen([*ending, *command], **options)).result()


def end(process: subprocess.Popen[Any]) -> None:
    """Kills a process started by `launch`, and its group."""
    send_signal(process, signal.SIGKILL)
    process.wait()


def end_and_close(process: subprocess.Popen[str]) -> None:
    """Kills a process started by `launch`, and its group, and closes its pipes."""
    end(process)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def send_signal(process: subprocess.Popen[Any], number: int) -> None:
    """Sends a signal to a process started by `launch` and to its group; does nothing if it has ended."""
    if process.poll() is None:  # Afterwards its number may be another's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def environment() -> dict[str, str]:
    """Returns an environment in which processes find these packages, wherever they run."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class WorkerProcess:
    """One worker's process, and a thread that reads its output.

    Attributes:
        tail: the last lines that it wrote.
        process: the process.
    """

    def __init__(self, command: Sequence[str], echo: Callable[[str], None]) -> None:
        """Starts it.

        Args:
            command: the command, such as `worker_command`.
            echo: called with each line that it writes, in the thread.
        """
        self.tail: collections.deque[str] = collections.deque(maxlen=_LINES)
        self._echo = echo
        self._heard = threading.Condition()
        self._serving = self._silent = False
        self.process = launch(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
        self._reader = threading.Thread(target=self._read, name="worker-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith(_NOISE):
                    continue
                self.tail.append(line.rstrip("\n"))
                self._echo(line.rstrip("\n"))
                if line.startswith("worker on "):
                    self._tell("_serving")
        self._tell("_silent")

    def _tell(self, what: str) -> None:
        with self._heard:
            setattr(self, what, True)
            self._heard.notify_all()

    def wait_until_serving(self, deadline: float) -> bool:
        """Returns whether it reports that it serves before the deadline."""
        with self._heard:
            self._heard.wait_for(lambda: self._serving or self._silent, timeout=max(0.0, deadline - time.monotonic()))
            return self._serving

    def end(self) -> None:
        """Kills it."""
        end(self.process)
        self._reader.join(5.0)
