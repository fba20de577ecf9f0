"""What is done about workers that are lost."""

from __future__ import annotations

from dataclasses import dataclass

from dapple_tf.errors import DappleError

_ACTIONS = ("raise", "restart", "replan")


@dataclass(frozen=True)
class FaultPolicy:
    """How patient to be with workers, and how to go on without them.

        dapple.transform(model, cluster, plan, faults=dapple.FaultPolicy("restart"))

    Attributes:
        action: ``raise`` raises WorkerLostError. ``restart`` waits for the worker to be back, restores the newest
            values that are safe (the last checkpoint, or the last ``sync``), trains again on the batches since, and
            goes on as if nothing had happened. ``replan`` does the same, but goes on with the workers that are left
            when it isn't back in time.
        notice_seconds: a worker that is silent for so long is lost. One whose process ends is at once.
        wait_seconds: how long to wait for it to be back.
        step_seconds: a step that takes longer counts as hung, and so does one that takes ten times as long as the same
            step ever took (and a minute at least); all workers are started anew then.
        replay_steps: a sync is made after so many steps without one, and without a checkpoint: the batches since are
            kept in this process's memory.
        attempts: how often to try without a step in between that succeeds.

    Raises:
        DappleError: an unknown action, or a number out of range.
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
