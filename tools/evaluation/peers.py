"""Processes that train in step with each other, by other means than ours: each line on stdin is a number of steps.

Each writes a line when it is ready, and answers with one when its steps are done; the text is up to the process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from dapple_tf.tools.hosts import end_and_close, environment, launch


class PeersError(RuntimeError):
    """A process didn't answer; the text has the end of its stderr."""


class Peers:
    """Processes that run until the stack is closed.

    Attributes:
        answers: last line that each has answered.
    """

    def __init__(self, stack: contextlib.ExitStack, commands: Sequence[Sequence[str]]) -> None:
        """Starts the processes, and waits until they are ready.

        Args:
            stack: ends them when it is closed.
            commands: command of each.

        Raises:
            PeersError: one ended before that.
        """
        self.answers: list[str] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        pipe = subprocess.PIPE
        for command in commands:
            errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (the stack closes it)
            stack.enter_context(errors)
            started = launch(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment())
            stack.callback(end_and_close, started)
            self._processes.append(started)
            self._errors.append(errors)
        self._listen()

    @property
    def processes(self) -> list[int]:
        """The id of each process."""
        return [process.pid for process in self._processes]

    def __call__(self, steps: int) -> float:
        """Runs ``steps`` steps of all; returns the seconds.

        Raises:
            PeersError: one ended instead.
        """
        started = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # It has ended, which `_listen` reports.
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
        self._listen()
        return time.perf_counter() - started

    def _listen(self) -> None:
        self.answers = []
        for process, errors in zip(self._processes, self._errors, strict=True):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                errors.seek(0)
                told = "".join(errors.readlines()[-12:]).strip() or "nothing"
                raise PeersError(f"a process ended with code {code} instead of an answer; it said: {told}")
            self.answers.append(line.rstrip("\n"))


def pinned(index: int) -> list[str]:
    """Returns the start of a command that pins a process to one of this process's cores, by the process' number."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[index % len(cores)])]
