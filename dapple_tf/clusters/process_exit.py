"""How the processes of a worker for its clients have ended: by themselves, by a signal, for lack of memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from dapple_tf.common.units import bytes_text

_COUNTS = Path("/proc/vmstat")


class ProcessExit(NamedTuple):
    """The end of a process.

    Attributes:
        text: how it ended.
        out_of_memory: whether the kernel killed it for lack of memory, as far as can be known.
    """

    text: str
    out_of_memory: bool = False

    @classmethod
    def of(cls, status: int, largest_bytes: int, kills: int) -> Self:
        """Describes a process that has ended.

        Args:
            status: as `os.wait4` gives it.
            largest_bytes: the most memory that it had.
            kills: number of processes that the kernel killed for lack of memory meanwhile.
        """
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return cls(f"its process ended with code {code}")
        name = _signal_name(-code)
        if -code != signal.SIGKILL or not kills:
            return cls(f"its process was ended by {name}")
        return cls(
            f"its process was ended by {name} when the kernel killed {kills} for lack of memory; it had up to "
            f"{bytes_text(largest_bytes)}",
            out_of_memory=True,
        )

    @classmethod
    def parsed(cls, answer: Mapping[str, Any]) -> Self | None:
        """Returns the end in a worker's answer; None if there is none."""
        text, out_of_memory = answer.get("ended"), answer.get("out_of_memory")
        return cls(text, out_of_memory) if isinstance(text, str) and isinstance(out_of_memory, bool) else None

    def message(self) -> dict[str, Any]:
        """Returns a worker's answer, the inverse of `parsed`."""
        return {"ended": self.text, "out_of_memory": self.out_of_memory}


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def memory_kills() -> int:
    """Returns the number of processes that this machine's kernel has killed for lack of memory; 0 if it doesn't say."""
    with contextlib.suppress(OSError):
        for line in _COUNTS.read_text(encoding="ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
