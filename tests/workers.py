"""Workers for tests: processes on this machine that lend their devices, and what is to be seen of them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dapple_tf.network.certificates import Authority
from dapple_tf.network.control import PROTOCOL, Channel
from dapple_tf.network.inquiry import own_versions
from dapple_tf.network.worker_process import worker_command
from dapple_tf.tools.hosts import LocalWorkers, end, environment, launch

TESTS = pathlib.Path(__file__).parent
COUNT = 4
"""Workers of one device each, which all tests of a process share; each client gets fresh servers from them."""
STARTS = """
import json, sys
from dapple_tf import worker
from dapple_tf.describe.machine_report import MachineReport

told = MachineReport(json.loads(sys.argv.pop(1)))
worker.report = lambda: told
worker.run()
"""
"""A worker that is told its versions: to ask TensorFlow for them takes three seconds of a core."""
PATIENCE = 60.0
"""Seconds until something that must happen counts as not happening, on a busy machine."""


def quick_command(address: str, devices: int, arguments: Sequence[str] = ()) -> list[str]:
    """The command of a worker that has this process's versions; one of GPUs asks TensorFlow for these."""
    command = worker_command(address, devices, arguments)
    _, module, name, *rest = command
    assert (module, name) == ("-m", "dapple_tf.worker")
    return [sys.executable, "-c", STARTS, json.dumps(dict(own_versions())), *rest] if devices else command


@contextlib.contextmanager
def running_workers() -> Iterator[LocalWorkers]:
    """Workers that say nothing; none is left afterwards, whatever happens."""
    with LocalWorkers(COUNT, echo=lambda *_: None) as workers:
        yield workers


def mend(workers: LocalWorkers) -> None:
    """Starts workers again that the test before has killed, and lets those go on that it has stopped."""
    for number, process in enumerate(workers.processes):
        if process.poll() is not None:
            workers.restart(number)
        workers.cont(number)


def children(process: int) -> list[int]:
    """A worker's processes for its clients."""
    processes = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        fields = _fields(int(entry.name))
        if fields and fields[1] == str(process) and fields[0] not in "ZX":
            processes.append(int(entry.name))
    return processes


def has_ended(process: int) -> bool:
    """Whether a process has ended; whoever started it needn't have asked about it yet."""
    fields = _fields(process)
    return not fields or fields[0] in "ZX"


def _fields(process: int) -> list[str]:
    """State, parent and so on of a process; empty if there is none."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return []


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> float:
    """Waits until something is true; returns how long that took.

    Raises:
        AssertionError: it doesn't become true.
    """
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < seconds, f"not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - started


def secret_of(client: str) -> str:
    """The secret by which a client of these tests gets its lease back."""
    return f"secret of {client}".ljust(32, ".")


def question(ask: str = "status", **fields: Any) -> dict[str, Any]:
    """The first message of a client."""
    return {"protocol": PROTOCOL, "ask": ask, **fields}


def wish(client: str, port: int = 0) -> dict[str, Any]:
    """The first message of a client that wants a lease."""
    return question("lease", client=client, secret=secret_of(client), port=port)


def status(address: str, **fields: Any) -> dict[str, Any]:
    """What a worker says of itself."""
    with contextlib.closing(Channel.connect(address, PATIENCE)) as channel:
        return channel.ask(question(**fields), PATIENCE)


LIGHT_TENSORFLOW = """
class version:
    VERSION = GIT_VERSION = ""

class config:
    get_visible_devices = staticmethod(lambda kind: [])
"""


@pytest.fixture
def _workers_start_fast(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers don't import TensorFlow to tell its version; nobody can train on them."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "tensorflow.py").write_text(LIGHT_TENSORFLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))


@contextlib.contextmanager
def serving(serve: Callable[[socket.socket], object], host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a listener, which deals with one connection after the other; they stay open until the end."""
    with socket.create_server((host, 0), backlog=50) as listener, contextlib.ExitStack() as stack:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = stack.enter_context(listener.accept()[0])
                    with contextlib.suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"{host}:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def client(script: str, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs a script, with these tests and this package in its path; killed in the end."""
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(TESTS), variables["PYTHONPATH"]])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with launch([sys.executable, "-c", script, *arguments], **{**pipes, "env": variables, **options}) as process:
        try:
            yield process
        finally:
            end(process)


def expect(process: subprocess.Popen[str], line: str) -> None:
    """Waits for a client to say something."""
    assert process.stdout is not None and process.stderr is not None
    for said in process.stdout:
        if said.rstrip("\n") == line:
            return
    raise AssertionError(f"the client ended without saying {line!r}: {process.stderr.read()}")


def new_authority() -> Authority:
    """An authority of a test's own; the test is skipped where none can be made."""
    pytest.importorskip("cryptography", reason="needs certificates: cryptography isn't installed (make venv)")
    return Authority.make(days=2)


def new_machine(authority: Authority, directory: pathlib.Path, *names: str, days: int = 1) -> pathlib.Path:
    """A machine's directory with certificates for TLS."""
    authority.write_machine(directory, names, days)
    return directory
