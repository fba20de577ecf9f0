"""What-if questions and their answers: a plan with changes, on a cluster with changes, simulated."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

import dapple_tf as dapple
from dapple_tf.common.data_files import short
from dapple_tf.describe.plan import RECOMPUTE_MODES
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedules import POLICIES, policy_of
from dapple_tf.tools import command
from dapple_tf.tools.variants import Hardware, changed
from dapple_tf.view.page import timeline_data
from dapple_tf.view.timeline import Timeline

MOST_SLICES = 8192
"""Maximum slices of micro-batches in a question, over all stages and replicas: about a second of simulation."""
MOST_SLICES_OF_SEVERAL = 1024
"""The same for schedules that try several others: their number grows with that of stages."""

_LAST = "(last)"
_HARDWARE = tuple(field.name for field in dataclasses.fields(Hardware))
_MOST_STAGES = 1000


class QuestionError(ValueError):
    """A question that can't be understood or is too large; the text says why."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A what-if question: changes of a plan and of its cluster.

    Attributes:
        cuts: layers after which stages end.
        devices: device numbers of each stage.
        micro_batches: per step.
        global_batch_size: samples per step.
        schedule: name of the schedule, or a policy of one's own.
        recompute: recomputation mode, or one for each stage.
        hardware: how the cluster is changed.
    """

    cuts: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...]
    micro_batches: int
    global_batch_size: int
    schedule: str | Policy
    recompute: str | tuple[str, ...]
    hardware: Hardware = dataclasses.field(default_factory=Hardware)

    @classmethod
    def of(cls, plan: dapple.Plan) -> Question:
        """Returns the question that changes nothing in a plan."""
        names = ("cuts", "devices", "micro_batches", "global_batch_size", "schedule", "recompute")
        return cls(**{name: plan.options[name] for name in names})

    @classmethod
    def parse(cls, data: object, own: Policy | None = None) -> Question:
        """Parses the question that a page asks as JSON data, which may name a policy of one's own.

        Raises:
            QuestionError: the data aren't a question.
        """
        names = {"stages", "micro_batches", "global_batch_size", "schedule", "recompute", *_HARDWARE}
        if not isinstance(data, dict) or set(data) != names:
            raise QuestionError(f"the question is {short(data)}; it must be an object of {', '.join(sorted(names))}")
        cuts, devices = parse_stages(data["stages"])
        numbers = {name: _whole(name, data[name]) for name in ("micro_batches", "global_batch_size")}
        schedules = {name: name for name in POLICIES} | ({} if own is None else {own.name: own})
        if data["schedule"] not in tuple(schedules):
            raise QuestionError(f"schedule is {short(data['schedule'])}; use one of {', '.join(schedules)}")
        modes = tuple(data["recompute"].split(",")) if isinstance(data["recompute"], str) else (data["recompute"],)
        for mode in modes:
            if mode not in RECOMPUTE_MODES:
                raise QuestionError(f"recompute is {short(mode)}; use one of {', '.join(RECOMPUTE_MODES)}")
        given = {name: _amount(name, data[name]) for name in _HARDWARE}
        speed = given.pop("speed")
        try:
            hardware = Hardware(**given, speed=1.0 if speed is None else speed)
        except dapple.ClusterError as error:
            raise QuestionError(str(error)) from error
        return cls(
            cuts,
            devices,
            **numbers,
            schedule=schedules[data["schedule"]],
            recompute=modes[0] if len(modes) == 1 else modes,
            hardware=hardware,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON data that `parse` takes."""
        return {
            "stages": stages_text(self.cuts, self.devices),
            "micro_batches": self.micro_batches,
            "global_batch_size": self.global_batch_size,
            "schedule": str(self.schedule),
            "recompute": _modes_text(self.recompute),
            **dataclasses.asdict(self.hardware),
        }

    def check_size(self) -> None:
        """Checks that simulating the question doesn't take too long.

        Raises:
            QuestionError: it does; the text has the size and the limit.
        """
        replicas = sum(map(len, self.devices))
        slices = self.micro_batches * replicas
        several = policy_of(self.schedule).planning.list_runs_per_stage > 0
        most = MOST_SLICES_OF_SEVERAL if several else MOST_SLICES
        if slices > most:
            tool = shlex.join(command.line("simulate"))
            raise QuestionError(
                f"{self.micro_batches} micro-batches on {replicas} replicas of stages are {slices:,} slices; this page "
                f"simulates up to {most:,} under {self.schedule}: use fewer micro-batches, or {tool}"
            )

    def plan(self, start: dapple.Plan) -> dapple.Plan:
        """Returns the plan that is asked about, made from the original one.

        Raises:
            PlanError: the plan contradicts itself.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name != "hardware"]
        changes = {name: getattr(self, name) for name in names}
        return changed(start, **changes)


def _modes_text(recompute: str | tuple[str, ...]) -> str:
    """Returns recomputation modes as flags and pages have them: ``none``, or ``boundary,none`` for two stages."""
    return recompute if isinstance(recompute, str) else ",".join(recompute)


def stages_text(cuts: tuple[str, ...], devices: tuple[tuple[int, ...], ...]) -> str:
    """Returns a line for each stage: its last layer, and its devices: ``block_2: 0-2``."""
    names = [*cuts, _LAST]
    return "\n".join(f"{name}: {_ranges(numbers)}" for name, numbers in zip(names, devices, strict=True))


def parse_stages(text: object) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Returns the cuts and devices of each stage from the lines of `stages_text`.

    Raises:
        QuestionError: a line is wrong; the text names it.
    """
    if not isinstance(text, str):
        raise QuestionError(f"stages is {short(text)}; it must be a text")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not 0 < len(lines) <= _MOST_STAGES:
        raise QuestionError(f"there are {len(lines)} stages; write a line for each, such as 'block_2: 0-2'")
    names, devices = [], []
    for number, line in enumerate(lines):
        name, colon, numbers = line.rpartition(":")
        if not colon or not name.strip():
            raise QuestionError(
                f"stage {number} is {short(line)}; write its last layer, a colon and its devices, such as "
                f"'block_2: 0-2'"
            )
        names.append(name.strip())
        devices.append(_devices(number, numbers))
    for number, name in enumerate(names[:-1]):
        if name == _LAST:
            raise QuestionError(f"stage {number} goes to the {_LAST} layer, but it isn't the last stage")
    if names[-1] != _LAST:
        raise QuestionError(f"the last stage is {short(lines[-1])}; write '{_LAST}: ' and its devices")
    return tuple(names[:-1]), tuple(devices)


def _devices(stage: int, text: str) -> tuple[int, ...]:
    """Returns the device numbers of ``0-2 5`` or ``0, 1, 2``."""
    devices: list[int] = []
    for part in re.split(r"[,\s]+", text.strip()):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII)
        if match is None:
            raise QuestionError(f"the devices of stage {stage} are {short(text.strip())}; write numbers, such as 0-2 5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MOST_SLICES:
            raise QuestionError(f"the devices of stage {stage} have {part}; write the smaller number first")
        devices += range(first, last + 1)
        if len(devices) > MOST_SLICES:
            raise QuestionError(f"stage {stage} has more than {MOST_SLICES:,} devices")
    return tuple(devices)


def _ranges(numbers: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _whole(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= 10**9:
        raise QuestionError(f"{name} is {short(value)}; it must be a whole number from 1 on")
    return value


def _amount(name: str, value: object) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= 1e30 or math.isnan(value):  # type: ignore[operator, arg-type]
        raise QuestionError(f"{name} is {short(value)}; it must be a number from 0 on, or nothing for the cluster's")
    return float(value)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class Desk:
    """Answers questions about one model on one cluster.

    Attributes:
        profile: the model's profile.
        cluster: the cluster, unless a question changes it.
        plan: what questions change.
        sources: flags of `tools.simulate` that name the profile and the cluster.
        plan_path: the plan's file; None if the plan isn't in a file.
    """

    profile: dapple.Profile
    cluster: dapple.Cluster
    plan: dapple.Plan
    sources: tuple[str, ...] = ()
    plan_path: str | None = None

    def answer(self, data: Mapping[str, object]) -> dict[str, Any]:
        """Returns the answer to a page's request.

        Args:
            data: names of cases, such as ``base`` and ``what if``, and their questions.

        Returns:
            ``cases``: for each case its name and either ``error`` or ``numbers``, ``plan`` (JSON text) and ``command``.
            ``timelines``: those of cases without an error, as returned by `dapple_tf.view.page.timeline_data`.

        Raises:
            QuestionError: there are none, or more than two.
        """
        if not 1 <= len(data) <= 2:
            raise QuestionError(f"there are {len(data)} cases; ask about one or two")
        cases: list[dict[str, Any]] = []
        timelines: list[Timeline] = []
        for name, asked in data.items():
            try:
                own = self.plan.schedule
                question = Question.parse(asked, own if isinstance(own, Policy) else None)
                question.check_size()
                step = self._step(question)
            except (QuestionError, dapple.PlanError, dapple.ClusterError) as error:
                cases.append({"name": name, "error": str(error)})
                continue
            plan = step.costs.plan
            cases.append(
                {
                    "name": name,
                    "numbers": numbers_of(step),
                    "plan": plan.to_json(),
                    "command": self.command(question, plan),
                }
            )
            timelines.append(step.drawn(name))
        drawn = timeline_data(timelines) if timelines else {"timelines": []}
        return {"cases": cases, **drawn}

    @functools.lru_cache(maxsize=8)  # noqa: B019  # A desk lives as long as its server.
    def _step(self, question: Question) -> dapple.Simulation:
        cluster = question.hardware.of(self.cluster)
        return dapple.simulate(question.plan(self.plan), self.profile, cluster)

    def command(self, question: Question, plan: dapple.Plan) -> str:
        """Returns the command that simulates a question's step; changed stages are read from a saved ``plan.json``."""
        arguments = []
        if self.plan_path is not None and (plan.cuts, plan.devices) == (self.plan.cuts, self.plan.devices):
            arguments.append(f"--plan={self.plan_path}")
            for name in ("micro_batches", "global_batch_size", "schedule", "recompute"):
                if (value := plan.options[name]) != self.plan.options[name]:
                    arguments.append(f"--{name}={_modes_text(value) if name == 'recompute' else value}")
        else:
            arguments.append("--plan=plan.json")
        arguments += self.sources
        nothing = Hardware()
        for name in _HARDWARE:
            if (value := getattr(question.hardware, name)) != getattr(nothing, name):
                arguments.append(f"--{name}={value:g}" if float(f"{value:g}") == value else f"--{name}={value!r}")
        return shlex.join([*command.line("simulate"), *arguments])


def numbers_of(step: dapple.Simulation) -> dict[str, Any]:
    """Returns what a page shows of a step, as JSON data: seconds, bytes, and shares from 0 to 1."""
    peaks = step.peak_bytes
    device = max(peaks, key=lambda device: peaks[device])
    return {
        "latency": step.latency,
        "throughput": step.throughput if math.isfinite(step.throughput) else None,
        "bubble": sum(step.idle.values()) / len(step.idle),
        "peak_bytes": peaks[device],
        "peak_device": device,
        "limit": step.costs.cluster.devices[device].memory_bytes,
        "fits": step.fits,
        "samples": step.costs.plan.global_batch_size,
    }
