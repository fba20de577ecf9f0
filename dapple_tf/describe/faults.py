"""The policy for lost and returning workers."""

from __future__ import annotations

from dataclasses import dataclass

from dapple_tf.errors import DappleError

_ACTIONS = ("raise", "restart", "replan")


@dataclass(frozen=True)
class FaultPolicy:
    """How long to wait for workers, and how to continue without them.

        dapple.transform(model, cluster, plan, faults=dapple.FaultPolicy("restart"))

    Attributes:
        action: ``raise`` raises WorkerLostError. ``restart`` waits for the worker to come back, restores the newest
            safe values (the last checkpoint, or the last ``sync``), repeats the batches since, and continues as if
            nothing had happened. ``replan`` does the same, but continues with the remaining workers if the lost one
            isn't back in time. Between training steps it takes lost workers in again that have come back, if the plan
            gains by them.
        notice_seconds: seconds of silence after which a worker is lost. A worker whose process ends is lost at once.
            Under ``replan``, workers that training goes on without are asked in pauses of this length whether they are
            back; the pauses double while they are soon lost again.
        wait_seconds: seconds to wait for the worker to come back.
        step_seconds: a step that takes longer counts as hung, and so does one that takes ten times as long as the same
            step ever took (and a minute at least); all workers are then restarted.
        replay_steps: number of steps without a sync or checkpoint after which a sync is made; the batches since the
            last one are kept in this process's memory.
        attempts: number of attempts without a successful step in between; a single one after a worker's process was
            killed for lack of memory, as the same step needs as much again.

    Raises:
        DappleError: the action is unknown, or a number is out of range.
    """

    action: str = "raise"
    notice_seconds: float = 10.0
    wait_seconds: float = 300.0
    step_seconds: float = 3600.0
    replay_steps: int = 100
    attempts: int = 5

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise DappleError(f"faults: action is {self.action!r}; use one of {', '.join(_ACTIONS)}")
        for name, least in (("notice_seconds", 1), ("wait_seconds", 0), ("step_seconds", 1)):
            if not least <= getattr(self, name) <= 1e7:
                raise DappleError(f"faults: {name} is {getattr(self, name)}; it must be from {least} s to 10,000,000 s")
        for name in ("replay_steps", "attempts"):
            if getattr(self, name) < 1:
                raise DappleError(f"faults: {name} is {getattr(self, name)}; it must be at least 1")
