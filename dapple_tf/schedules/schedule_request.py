"""The request for a schedule: the devices of each stage, the micro-batches, the limits and the options."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict, Unpack

from dapple_tf.common.text import counted
from graph_passes.ir.tasks import Phase

Active = Callable[[int, int, int], bool]
"""(stage, micro-batch, replica) -> whether that replica's slice of the micro-batch has any samples."""

TaskSeconds = Sequence[Sequence[float]]
"""For each stage the times of F, Bx and Bw; a whole B takes both of the latter."""


class ScheduleError(ValueError):
    """A schedule can't be made as asked, or isn't a legal one."""


class RequestOptions(TypedDict, total=False):
    """Options of a schedule besides its devices and micro-batches.

    Attributes:
        holds: D of each stage, the number of micro-batches whose activations fit; None is no limit.
        warm_up: K of each stage in place of the policy's, the most micro-batches in flight; at most D.
        reverse_first_k: the backwards of the first k stages are split, and their last micro-batch's Bw moved to the
            end of their devices' orders, stage 0's first (EuroSys'22, algorithm 2).
        task_seconds: for each stage the times of F, Bx and Bw, which determine the gaps; all equal by default.
    """

    holds: Sequence[int] | None
    warm_up: Sequence[int] | None
    reverse_first_k: int
    task_seconds: TaskSeconds | None


class Job(NamedTuple):
    """A task of every replica of a stage: what policies order, alike for all devices of the stage."""

    stage: int
    phase: Phase
    micro_batch: int


Orders = dict[int, list[Job]]
"""Device -> its jobs in order."""


@dataclass(frozen=True)
class ScheduleRequest:
    """A checked request to a policy; `of` makes it.

    Attributes:
        policy: the policy's name, for error texts.
        devices: for each stage, the device index of each of its replicas.
        micro_batches: M.
        holds: D of each stage, the micro-batches whose activations fit; None is no limit.
        warm_up: K of each stage in place of the policy's, at most M; None is the policy's.
        seconds: for each stage the times of F, Bx and Bw.
        reverse_first_k: number of stages whose last micro-batch's Bw come last.
    """

    policy: str
    devices: tuple[tuple[int, ...], ...]
    micro_batches: int
    holds: tuple[int, ...] | None
    warm_up: tuple[int, ...] | None
    seconds: tuple[tuple[float, float, float], ...]
    reverse_first_k: int

    def __post_init__(self) -> None:
        for stage, (most, room) in enumerate(zip(self.warm_up or (), self.holds or (), strict=False)):
            if most > room:
                raise ScheduleError(
                    f"warm_up of stage {stage} is {most}, but its devices hold {counted(room, 'micro-batch')}; lower "
                    f"it to {room}"
                )

    @classmethod
    def of(
        cls, policy: str, devices: Sequence[Sequence[int]], micro_batches: int, **options: Unpack[RequestOptions]
    ) -> ScheduleRequest:
        """Checks arguments and fills in defaults.

        Args:
            policy: the policy's name.
            devices: for each stage, the device index of each of its replicas. A device may stand in several stages.
            micro_batches: M.
            **options: see `RequestOptions`.

        Raises:
            ScheduleError: a number is too small, a K is above D, or a list has another length than there are stages.
        """
        check_count("micro_batches", micro_batches)
        check_devices(devices)
        stages = len(devices)
        holds = _per_stage("holds", options.get("holds"), stages)
        warm_up = _per_stage("warm_up", options.get("warm_up"), stages)
        first_k = options.get("reverse_first_k", 0)
        if not 0 <= first_k <= stages:
            raise ScheduleError(
                f"reverse_first_k is {first_k}; with {counted(stages, 'stage')} it must be from 0 to {stages}"
            )
        return cls(
            policy,
            tuple(map(tuple, devices)),
            micro_batches,
            holds,
            None if warm_up is None else tuple(min(count, micro_batches) for count in warm_up),
            _seconds(options.get("task_seconds"), stages),
            first_k,
        )

    def within(self, holds: Sequence[int] | None, micro_batches: int | None = None) -> ScheduleRequest:
        """Returns the same under a memory limit, and for another number of micro-batches.

        Args:
            holds: D of each stage; None is no limit.
            micro_batches: M; None for the same.

        Raises:
            ScheduleError: a number is too small, there isn't one D for each stage, or a D is below K.
        """
        count = self.micro_batches if micro_batches is None else micro_batches
        check_count("micro_batches", count)
        limits = _per_stage("holds", holds, self.stages)
        warm_up = None if self.warm_up is None else tuple(min(most, count) for most in self.warm_up)
        return replace(self, micro_batches=count, holds=limits, warm_up=warm_up)

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.devices)

    @functools.cached_property
    def groups(self) -> tuple[range, ...]:
        """The runs of consecutive stages with equal device lists."""
        runs = itertools.groupby(range(self.stages), key=lambda stage: self.devices[stage])
        groups = [list(stages) for _, stages in runs]
        return tuple(range(stages[0], stages[-1] + 1) for stages in groups)

    @functools.cached_property
    def stages_of(self) -> dict[int, list[int]]:
        """Device -> its stages."""
        stages_of: dict[int, list[int]] = {}
        for stage, devices in enumerate(self.devices):
            for device in devices:
                stages_of.setdefault(device, []).append(stage)
        return stages_of

    def limit(self, stage: int, wanted: int) -> int:
        """Returns ``wanted`` micro-batches in flight, or what K, D and M allow if that is less."""
        limits = [wanted, self.micro_batches]
        limits += [counts[stage] for counts in (self.holds, self.warm_up) if counts is not None]
        return min(limits)

    def duration(self, job: Job) -> float:
        """Returns the time of a job, in the unit of ``seconds``."""
        forward, input_grad, weight_grad = self.seconds[job.stage]
        if job.phase is Phase.FORWARD:
            return forward
        if job.phase is Phase.BACKWARD:
            return input_grad + weight_grad
        return input_grad if job.phase is Phase.INPUT_GRAD else weight_grad

    def check_straight(self) -> None:
        """Checks that each device stands in one group only.

        Raises:
            ScheduleError: naming the device and two of its stages.
        """
        group_of: dict[int, int] = {}
        for index, group in enumerate(self.groups):
            for device in self.devices[group[0]]:
                if device in group_of:
                    first = self.groups[group_of[device]]
                    raise ScheduleError(
                        f"device {device} stands in stage {first[-1]} on devices {list(self.devices[first[0]])} and in "
                        f"stage {group[0]} on {list(self.devices[group[0]])}, but {self.policy} wants all stages of a "
                        f"device next to each other and with one list of devices; use modulo, interleaved or zb_v, or "
                        f"other devices"
                    )
                group_of[device] = index

    # ---- V-shaped pipelines

    @property
    def is_vee(self) -> bool:
        """Whether the second half of the stages goes back over the devices of the first.

            device   0  1  2  2  1  0
            stage    0  1  2  3  4  5     p = 3 positions

        Consecutive stages with equal devices count as one, so that a position may have several on either way.
        """
        half = self.stages // 2
        if self.stages % 2 or len(self.groups) == 1 or self.devices != self.devices[::-1]:
            return False
        first = [devices for devices, _ in itertools.groupby(self.devices[:half])]
        return sum(map(len, first)) == len({device for devices in first for device in devices})

    def check_vee(self) -> None:
        """Checks that the devices are a V.

        Raises:
            ScheduleError: they aren't.
        """
        if not self.is_vee:
            raise ScheduleError(
                f"{self.policy} wants stages i and {self.stages} - 1 - i on the same devices, such as [[0], [1], [1], "
                f"[0]], and the first half on different ones, but the stages are on {list(map(list, self.devices))}; "
                f"use such a list, or zb_h1, zb_h2 or modulo"
            )

    def ways(self) -> list[range]:
        """Returns the stages of each of the 2p ways of a V: first there, position by position, then back."""
        half = self.stages // 2
        runs = itertools.groupby(range(half), key=lambda stage: self.devices[stage])
        there = [list(stages) for _, stages in runs]
        spans = [(stages[0], stages[-1] + 1) for stages in there]
        back = [(self.stages - stop, self.stages - start) for start, stop in reversed(spans)]
        return [range(start, stop) for start, stop in (*spans, *back)]


def check_count(name: str, count: int) -> None:
    """Checks that a number is at least 1."""
    if count < 1:
        raise ScheduleError(f"{name} is {count}; it must be at least 1")


def check_per_stage(name: str, counts: Sequence[int], stages: int) -> None:
    """Checks that there is a number of at least 1 for each stage."""
    if len(counts) != stages:
        raise ScheduleError(f"{name} has {len(counts)} entries for {counted(stages, 'stage')}; give one for each stage")
    for stage, count in enumerate(counts):
        if count < 1:
            raise ScheduleError(f"{name} of stage {stage} is {count}; it must be at least 1")


def _per_stage(name: str, counts: Sequence[int] | None, stages: int) -> tuple[int, ...] | None:
    if counts is None:
        return None
    check_per_stage(name, counts, stages)
    return tuple(counts)


def check_devices(devices: Sequence[Sequence[int]]) -> None:
    """Checks that each stage has devices, and each at most once."""
    check_count("number of stages", len(devices))
    for stage, replicas in enumerate(devices):
        if not replicas:
            raise ScheduleError(f"stage {stage} has no devices; give it at least one")
        _check_once(f"stage {stage}", replicas)


def _check_once(where: str, devices: Sequence[int]) -> None:
    seen: set[int] = set()
    for device in devices:
        if device in seen:
            raise ScheduleError(f"device {device} stands twice, in {where}; a device runs one replica of a stage")
        seen.add(device)


def _seconds(task_seconds: TaskSeconds | None, stages: int) -> tuple[tuple[float, float, float], ...]:
    if task_seconds is None:
        return ((1.0, 1.0, 1.0),) * stages
    if len(task_seconds) != stages:
        raise ScheduleError(
            f"task_seconds has {len(task_seconds)} entries for {counted(stages, 'stage')}; give one for each"
        )
    seconds = []
    for stage, times in enumerate(task_seconds):
        if len(times) != 3 or not all(0 <= time < math.inf for time in times):
            raise ScheduleError(
                f"task_seconds of stage {stage} is {list(times)}; give the times of F, Bx and Bw, such as [1, 1, 1]"
            )
        seconds.append((float(times[0]), float(times[1]), float(times[2])))
    return tuple(seconds)
