"""Starts workers on this machine, to try out a cluster, and runs a command that trains on them.

    dapple-launch --workers=4 -- python docs/examples/train_on_cluster.py
    dapple-launch --workers=2 --devices=2 -- dapple-train --model=gpt --plan=2:2 --cluster=tf_config
    dapple-launch --workers=2 --devices=2

The command behind -- finds the workers' addresses in TF_CONFIG:
`dapple_tf.Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())` is their cluster.
With --tls all connections are encrypted, by a certificate that is made for this run; the command finds it in
DAPPLE_TF_TLS. SIGTERM, SIGHUP and SIGINT are passed on to the command (Ctrl-C in a terminal reaches it anyway). Its
exit code is this program's, or 128 + n if signal n ended it. Without a command, the workers' addresses are printed, and
they serve until Ctrl-C.

The workers' output is shown with their number, such as "[worker 1] ...". They listen on 127.0.0.1 only. When this
program ends, however that happens, the workers and the command end, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NoReturn

from absl import app, flags

from dapple_tf.common.program import run_program
from dapple_tf.errors import ClusterError
from dapple_tf.network.keys import TLS_VARIABLE
from dapple_tf.tools.hosts import HostsError, LocalWorkers, new_keys

_WORKERS = flags.DEFINE_integer("workers", 2, "Number of workers to start.", lower_bound=1, upper_bound=1000)
_DEVICES = flags.DEFINE_integer(
    "devices", 1, "Logical CPU devices of each worker; 0 for all of this machine's GPUs, or for one GPU each.", 0, 1000
)
_MEMORY = flags.DEFINE_integer(
    "memory_bytes", None, "Bytes of memory per device, for planning; by default the real size."
)
_BASE_PORT = flags.DEFINE_integer(
    "base_port", None, "Port of worker 0; the others follow. By default any free ports.", 1, 65_535
)
_TLS = flags.DEFINE_boolean("tls", False, "Connect by mutual TLS, with a certificate that is made for this run.")
_RESTART = flags.DEFINE_boolean("restart", False, "Restart workers that die, at the same address.")

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PAUSE_SECONDS = 0.1


def tf_config(addresses: Sequence[str]) -> str:
    """Returns the TF_CONFIG of a client of these workers."""
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": {"type": "chief", "index": 0}})


def advice(addresses: Sequence[str], tls: str | None = None) -> str:
    """Returns what to write in a program that uses the workers, with the directory of its keys for TLS."""
    keys, variable = ("", "") if tls is None else (f", tls={tls!r}", f" {TLS_VARIABLE}={shlex.quote(tls)}")
    return (
        f"{len(addresses)} workers: {' '.join(addresses)}\n"
        f"  in Python:   cluster = dapple_tf.Cluster.of_servers({list(addresses)!r}{keys})\n"
        f"  or a shell:  export TF_CONFIG={shlex.quote(tf_config(addresses))}{variable}\n"
        f"Ctrl-C ends them.\n"
    )


class Supervisor:
    """Watches workers, and restarts dead ones."""

    def __init__(self, workers: LocalWorkers, restart: bool) -> None:
        self.workers, self.restart = workers, restart
        self.given_up: set[int] = set()

    def look(self) -> None:
        """Checks each worker once."""
        for number, process in enumerate(self.workers.processes):
            if number in self.given_up or process.poll() is None:
                continue
            told = f"worker {number} ({self.workers.addresses[number]}) has ended with code {process.returncode}"
            if self.restart and self.workers.has_served(number):
                _say(f"{told}; it is started again")
                self.workers.restart(number, wait=False)
            else:
                _say(f"{told}; {'before it served' if self.restart else '--restart would start it again'}")
                self.given_up.add(number)

    @property
    def nothing_left(self) -> bool:
        """Whether all workers have ended and none will be restarted."""
        return len(self.given_up) == len(self.workers.processes)


def start(command: Sequence[str], addresses: Sequence[str], tls: str | None = None) -> subprocess.Popen[bytes]:
    """Starts the command on this process's terminal; it finds the workers in TF_CONFIG, and keys for TLS."""
    ending = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    variables = {"TF_CONFIG": tf_config(addresses)} | ({} if tls is None else {TLS_VARIABLE: tls})
    return subprocess.Popen([*ending, *command], env={**os.environ, **variables})


def attend(process: subprocess.Popen[bytes], supervisor: Supervisor) -> int:
    """Waits for the command, passes signals on to it, and returns its exit code."""

    def forward(number: int, _: object) -> None:
        if number != signal.SIGINT or not sys.stdin.isatty():  # Otherwise the terminal has sent it to both.
            process.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    while True:
        try:
            code = process.wait(_PAUSE_SECONDS)
            return 128 - code if code < 0 else code
        except subprocess.TimeoutExpired:
            supervisor.look()


def serve(supervisor: Supervisor, tls: str | None = None) -> int:
    """Serves until a signal comes; fails when no worker is left."""
    sys.stdout.write(advice(supervisor.workers.addresses, tls))
    sys.stdout.flush()
    try:
        while not supervisor.nothing_left:
            time.sleep(_PAUSE_SECONDS)
            supervisor.look()
    except (KeyboardInterrupt, SystemExit):
        return 0
    _say("no worker is left")
    return 1


def ports() -> list[int] | None:
    """Returns the workers' ports by --base_port; None for any free ones."""
    if _BASE_PORT.value is None:
        return None
    last = _BASE_PORT.value + _WORKERS.value - 1
    if last > 65_535:
        raise app.UsageError(
            f"--base_port={_BASE_PORT.value}: {_WORKERS.value} workers would need ports to {last}; they go to 65535"
        )
    return list(range(_BASE_PORT.value, last + 1))


def _say(text: str) -> None:
    sys.stderr.write(f"[launch] {text}\n")
    sys.stderr.flush()


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


def main(argv: list[str]) -> None:
    """Starts the workers and the command, waits, and ends them."""
    command = argv[1:]
    if command and shutil.which(command[0]) is None:
        raise app.UsageError(f"there is no program {command[0]!r}; what follows -- is run as it is, without a shell")
    arguments = [] if _MEMORY.value is None else [f"--memory_bytes={_MEMORY.value}"]
    for number in _FORWARDED:
        signal.signal(number, _leave)
    try:
        with contextlib.ExitStack() as stack:
            tls = new_keys(stack.enter_context(tempfile.TemporaryDirectory()), ["127.0.0.1"]) if _TLS.value else None
            if tls is not None:
                arguments.append(f"--tls={tls}")
            began = time.monotonic()
            workers = stack.enter_context(
                LocalWorkers(_WORKERS.value, _DEVICES.value, ports=ports(), arguments=arguments)
            )
            _say(f"{_WORKERS.value} workers serve after {time.monotonic() - began:.1f} s")
            supervisor = Supervisor(workers, _RESTART.value)
            own = start(command, workers.addresses, tls) if command else None
            code = serve(supervisor, tls) if own is None else attend(own, supervisor)
    except (HostsError, ClusterError) as error:
        sys.exit(f"launch: {error}")
    sys.exit(code)


def run() -> NoReturn:
    """Runs the console command."""
    run_program(main)


if __name__ == "__main__":
    run()
