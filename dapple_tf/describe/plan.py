"""How a model is trained on a cluster: its stages, their devices, the micro-batches and the schedule."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack

from dapple_tf.common.data_files import Decoder, JsonFile, clip, parse_object, read_text, short
from dapple_tf.common.text import counted, table
from dapple_tf.describe.plan_checks import check_batches, check_options, check_stages
from dapple_tf.describe.plan_report import PlanReport, header, parse_report, remarks, rows
from dapple_tf.describe.plan_values import (
    ALL_REDUCE,
    RECOMPUTE_MODES,
    SHARDS,
    PlanError,
    PlanValueError,
    device_lists,
    integer,
    integers,
    layer_names,
    listed,
)
from dapple_tf.describe.stage_plan import StagePlan, checked, stages_of
from dapple_tf.describe.unit_timeline import unit_timeline
from dapple_tf.errors import names_checked
from dapple_tf.schedules import schedules
from dapple_tf.schedules.policies import find_policy, own_policy, reference
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedule_request import ScheduleError, ScheduleRequest
from dapple_tf.view.notebook import Table, notebook_html
from graph_passes.ir.batching import Interval, slice_intervals
from graph_passes.ir.tasks import Schedule, reduction_order

if TYPE_CHECKING:
    from dapple_tf.describe.cluster import Cluster

logger = logging.getLogger(__name__)

__all__ = ["ALL_REDUCE", "RECOMPUTE_MODES", "Plan", "PlanError", "PlanOptions", "StagePlan"]

_FORMAT = "dapple_tf.plan/1"
FD_DPS = "fd_dps"
"""Name of the placement of single operators by `operator_devices`, for `dapple_tf.transform` and programs."""


class PlanOptions(TypedDict, total=False):
    """Options of plans as people write them, in constructors and in files.

    See `Plan`, and `stages_of` for those with an entry for each stage.

    Attributes:
        optimizer_shards: whether `Plan.shards` has ``optimizer``.
        row_shards: whether it has ``rows``.
    """

    recompute: str | Iterable[str]
    jit_compile: bool | None
    warm_up: Iterable[int] | None
    bucket_bytes: int
    reverse_first_k: int
    wait_free: bool
    carried_updates: int
    task_seconds: Iterable[Iterable[float]] | None
    operator_devices: Iterable[Iterable[Iterable[int]]] | Iterable[Iterable[int]] | None
    backward_cuts: Iterable[str]
    all_reduce: str | Iterable[str]
    reduction_order: str
    shares: Iterable[Iterable[int]] | None
    relays: Iterable[int]
    optimizer_shards: bool
    row_shards: bool


_OF_STAGES = frozenset(entry.name for entry in fields(StagePlan)) & frozenset(PlanOptions.__annotations__)
_NOT_IN_OLD_FINGERPRINTS: Mapping[str, object] = {
    "backward_cuts": (),
    "all_reduce": "flat",
    "reduction_order": "completion",
    "shares": None,
    "relays": (),
    "optimizer_shards": False,
    "row_shards": False,
}
"""Options that older plans lack, with the default by which their reports stay valid."""


@dataclass(frozen=True)
class Plan(JsonFile):
    """Stages, their devices and the schedule; checked on construction. Sequences may be given as lists.

    `Plan.manual`, `Plan.straight` and `Plan.data_parallel` make plans of what people write.

    Attributes:
        stages: the S stages, from the model's input on. A device may be in several stages, once in each.
        micro_batches: M, the number of micro-batches in a global batch.
        global_batch_size: samples in one step, over all devices.
        schedule: the name of a built-in policy (`schedules.POLICIES`), your own policy (`schedules.policy.Policy`) or
            its ``module:name`` if that module is imported, or the path of a CSV file with a schedule
            (`schedules.schedule_csv`).
        jit_compile: whether stages are compiled with XLA; those that place their operators on several devices aren't.
            None compiles what ``keras.Model.compile`` does by default: on GPUs
            all models whose layers XLA can compile, but for placed operators.
        warm_up: K of each stage instead of the policy's, the most micro-batches in flight; refused where devices'
            memory holds fewer. Under gpipe and dapple_* it must not rise from a stage to the next. The planner writes
            it where memory is known.
        bucket_bytes: approximate size of the buckets in which gradients are all-reduced, in bytes.
        reverse_first_k: k; the first k stages compute the weight gradients of the last micro-batch after all others,
            those of stage 0 first (Out-Of-Order BackProp, EuroSys'22, algorithm 2).
        wait_free: whether a stage's gradients are all-reduced as soon as they are complete, rather than when its
            devices have run all their tasks.
        carried_updates: number of parameter groups (the last to be reduced) that are reduced and updated during the
            next step's forward pass; each forward stage waits only for its own groups (section 2 of the same paper).
            Anything that reads or changes variables between steps makes these updates first.
        backward_cuts: names of layers within stages: the backward that completes a stage's gradients, its last
            micro-batch's, is cut after them into pieces, so that the gradients of the layers behind a cut are
            all-reduced while the others are computed.
        reduction_order: the order in which carried updates are all-reduced: ``completion`` as their gradients were
            complete, or ``first_layers`` as the next step's forwards wait for them (BytePS's priorities; section 5.1 of
            the same paper). All others are reduced in the order of completion.
        shards: what each of a stage's n replicas keeps and updates only an n-th of, some of `SHARDS`. ``optimizer``:
            the optimizer's slots; gradients are reduce-scattered, and parameters all-gathered. ``rows``: rows of
            embeddings, or of other parameters of which stages need nothing but rows, by indices that depend on the
            batch alone; the rows that a replica looks up come from those that keep them, and the rows of gradients go
            there. Both are for optimizers that update each element by itself.
        report: the planner's expectations and reasons; None for a plan made by hand. Doesn't count in comparisons.

    Raises:
        PlanError: the plan is wrong; the text says what, where, and what to change.
    """

    file_error: ClassVar[type[Exception]] = PlanError
    made_by: ClassVar[str] = "Plan.manual(...) or Plan.load(path)"
    stages: tuple[StagePlan, ...]
    micro_batches: int
    global_batch_size: int
    schedule: str | Policy = "dapple_a"
    jit_compile: bool | None = None
    warm_up: tuple[int, ...] | None = None
    bucket_bytes: int = 32 * 2**20
    reverse_first_k: int = 0
    wait_free: bool = True
    carried_updates: int = 0
    backward_cuts: tuple[str, ...] = ()
    reduction_order: str = "completion"
    shards: tuple[str, ...] = ()
    report: PlanReport | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._normalise()
        check_stages(self)
        check_batches(self)
        check_options(self)

    @classmethod
    @names_checked(*PlanOptions.__annotations__)
    def manual(
        cls,
        cuts: Iterable[str],
        devices: Iterable[Iterable[int]],
        micro_batches: int,
        global_batch_size: int,
        schedule: str | Policy = "dapple_a",
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """Makes a plan as a person writes it: cut after these layers, put each stage on these devices.

            Plan.manual(cuts=["block_3"], devices=[[0, 1, 2], [3]], micro_batches=4, global_batch_size=64)

        Args:
            cuts: S - 1 layer names; stage i ends after the layer ``cuts[i]``, the last stage after the last layer.
            devices: for each of the S stages, the device index of each of its replicas.
            micro_batches: as in `Plan`, like the others.
            global_batch_size: likewise.
            schedule: likewise.
            **options: see `PlanOptions`.

        Raises:
            PlanError: as `Plan`.
        """
        values: dict[str, Any] = dict(options)
        shards = []
        for name, shard in (("optimizer_shards", "optimizer"), ("row_shards", "rows")):
            if not isinstance(wanted := values.pop(name, False), bool):
                raise PlanValueError(f"{name} is {short(wanted)}; it must be True or False")
            shards += [shard] if wanted else []
        stages = stages_of(cuts, devices, **{name: values.pop(name) for name in _OF_STAGES & values.keys()})
        return cls(stages, micro_batches, global_batch_size, schedule, shards=tuple(shards), **values)

    @classmethod
    @names_checked(*PlanOptions.__annotations__)
    def data_parallel(
        cls,
        devices: int | Iterable[int],
        global_batch_size: int,
        micro_batches: int = 1,
        schedule: str | Policy = "dapple_a",
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """Makes a plan with the whole model on each of ``devices`` (a list, or n for the first n).

        With more than one micro-batch, gradients are accumulated over them before they are all-reduced.

        Raises:
            PlanError: as `Plan`.
        """
        replicas = range(devices) if isinstance(devices, int) else devices
        return cls.manual((), [replicas], micro_batches, global_batch_size, schedule, **options)

    @classmethod
    @names_checked(*PlanOptions.__annotations__, "devices")
    def straight(
        cls,
        cuts: Iterable[str],
        global_batch_size: int,
        micro_batches: int,
        schedule: str | Policy = "dapple_a",
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """Makes a pipeline without replication: stage i on device i.

        Raises:
            PlanError: as `Plan`.
        """
        if "devices" in options:
            raise PlanError("Plan.straight puts stage i on device i; choose devices by Plan.manual(cuts, devices, ...)")
        names = layer_names(cuts)
        devices = [[stage] for stage in range(len(names) + 1)]
        return cls.manual(names, devices, micro_batches, global_batch_size, schedule, **options)

    @classmethod
    @names_checked(*PlanOptions.__annotations__)
    def by_operators(cls, devices: int | Iterable[int], global_batch_size: int, **options: Unpack[PlanOptions]) -> Plan:
        """Makes a plan that places the whole model's single operators on ``devices`` (a list, or n for the first n).

        Raises:
            PlanError: as `Plan`.
        """
        (chosen,) = device_lists([range(devices) if isinstance(devices, int) else devices])
        return cls.manual((), [chosen[:1]], 1, global_batch_size, **options | {"operator_devices": ((chosen,),)})

    def with_placed_operators(self, replicas: int | Sequence[int] = 1) -> Plan:
        """Returns a plan whose stages place their operators on the devices that they replicate on here.

            Plan.manual([], [[0, 1, 2, 3]], 1, 8).with_placed_operators(2)   has replicas on devices 0, 1 and on 2, 3

        Args:
            replicas: number of replicas of each stage, or of all stages: groups of consecutive devices of the stage.

        Raises:
            PlanError: a stage's devices can't be divided equally, or the plan has an option that doesn't go with
                placing.
        """
        by_stage = replicas if isinstance(replicas, Sequence) else [replicas] * self.num_stages
        counts = integers("replicas", by_stage)
        if len(counts) != self.num_stages:
            raise PlanError(
                f"replicas has {counted(len(counts), 'number')} for {counted(self.num_stages, 'stage')}; give one for "
                f"each"
            )
        stages = []
        for stage, (devices, count) in enumerate(zip(self.devices, counts, strict=True)):
            if count < 1 or len(devices) % count:
                raise PlanError(
                    f"stage {stage} has {len(devices)} devices, which can't be divided into {count} groups of the same "
                    f"size; choose a number of replicas that divides them"
                )
            size = len(devices) // count
            groups = tuple(devices[first : first + size] for first in range(0, len(devices), size))
            own = tuple(group[0] for group in groups)
            stages.append(replace(self.stages[stage], devices=own, operator_devices=groups, shares=None))
        return replace(self, stages=tuple(stages), report=None)

    def with_stages(self, stages: Sequence[StagePlan], **others: Any) -> Plan:
        """Returns the plan with other stages and fields, without its report and the pieces of the former stages.

        Raises:
            PlanError: as `Plan`.
        """
        return replace(self, stages=tuple(stages), backward_cuts=(), report=None, **others)

    def with_options(self, **options: Any) -> Plan:
        """Returns the plan with other options, `cuts` and `devices` included, and without its report.

        Raises:
            PlanError: as `Plan`.
        """
        return type(self).manual(**{**self.options, **options})

    @functools.cached_property
    def options(self) -> Mapping[str, Any]:
        """All arguments of `manual` that make this plan, in the order of files."""
        shares = [stage.shares or (1,) * len(stage.devices) for stage in self.stages]
        seconds = tuple(stage.task_seconds for stage in self.stages)
        values = vars(self) | {
            "cuts": self.cuts,
            "devices": self.devices,
            "recompute": _one_or_each([stage.recompute for stage in self.stages]),
            "task_seconds": None if None in seconds else seconds,
            "operator_devices": self.operator_devices,
            "all_reduce": _one_or_each([stage.all_reduce for stage in self.stages]),
            "shares": tuple(shares) if any(stage.shares for stage in self.stages) else None,
            "relays": self.relays,
            "optimizer_shards": "optimizer" in self.shards,
            "row_shards": "rows" in self.shards,
        }
        names = ("cuts", "devices", "micro_batches", "global_batch_size", "schedule", *PlanOptions.__annotations__)
        return {name: values[name] for name in names}

    @classmethod
    def load(cls, path: str | os.PathLike[str], schedules: Iterable[Policy] = ()) -> Plan:
        """Reads a plan from a JSON file, which runs no code of the file's and imports nothing.

        Args:
            path: the file.
            schedules: your own policies, one of which the plan may have. A policy needn't be given if its module has
                been imported already, or if it is a CSV file, whose path is relative to the plan's folder.

        Raises:
            PlanError: the file is wrong; the text names it and the mistake.
            OSError: the file can't be read.
        """
        folder = Path(path).parent
        return cls.from_json(read_text(path, PlanError), schedules, source=os.fspath(path), folder=folder)

    @classmethod
    def from_json(
        cls,
        text: str,
        schedules: Iterable[Policy] = (),
        *,
        source: str = "plan",
        folder: str | os.PathLike[str] = ".",
    ) -> Plan:
        """Returns the plan that `to_json` wrote as ``text``; keys whose field has a default may be left out.

        Args:
            text: JSON text.
            schedules: as in `load`.
            source: the text's name in errors.
            folder: the folder to which the path of a schedule's CSV file is relative.

        Raises:
            PlanError: the text isn't JSON or has another format, a key is unknown or missing, a value has the wrong
                type, the schedule isn't known here, or as `Plan`.
        """
        data = parse_object(text, source, PlanError)
        if "format" not in data:
            raise PlanError(f"{source}: key 'format' is missing; a plan has \"format\": {json.dumps(_FORMAT)}")
        decoder = Decoder(PlanError)
        decoder.check_format(data, _FORMAT, source)
        if data.pop("parameter_shards", False):
            raise PlanError(
                f"{source}: parameter_shards is true, and no plan has parameters in shards any more; leave it out: "
                f"optimizer_shards is as fast, and pipelines hold fewer layers with parameters in shards"
            )
        for name in ("weight_devices", "weight_regions"):
            if (given := data.pop(name, None)) is not None and given != data.get("devices"):
                raise PlanError(
                    f"{source}: {name} is given, and Bw no longer run on devices of their own; leave it out, and use "
                    f"fast_forward or zb_h1 if its schedule is joint"
                )
        if data.get("schedule") in ("joint", "dapple_tf.joint:JOINT"):
            raise PlanError(f"{source}: its schedule is joint, which no step runs any more; use fast_forward or zb_h1")
        if (mode := data.get("recompute")) == "offload" or (isinstance(mode, list) and "offload" in mode):
            raise PlanError(
                f"{source}: recompute has 'offload', and residuals no longer wait in the host's memory; use "
                f"'boundary', which keeps less, or 'min_cut'"
            )
        required = ["format", "cuts", "devices", "micro_batches", "global_batch_size"]
        decoder.check_keys(data, required, ["schedule", *PlanOptions.__annotations__, "report"], source)
        del data["format"]
        try:
            report = data.pop("report", None)
            if "schedule" in data:
                data["schedule"] = find_policy(data["schedule"], schedules, Path(folder))
            plan = cls.manual(**data)
            if report is not None:
                plan = replace(plan, report=parse_report(report))
        except ValueError as error:
            raise PlanError(f"{source}: {clip(str(error))}") from error
        if plan.report is not None and plan.report.fingerprint != plan.fingerprint:
            logger.warning("%s has been changed since it was planned: what was expected of it is left out", source)
            plan = replace(plan, report=None)
        return plan

    @property
    def fingerprint(self) -> str:
        """A hash of everything that a plan decides, which shows whether it has been changed."""
        decided = []
        for name, value in self.options.items():
            if name not in _NOT_IN_OLD_FINGERPRINTS or value != _NOT_IN_OLD_FINGERPRINTS[name]:
                decided.append(value)
            if name == "task_seconds":
                decided += [None, None]  # of two options that are gone
        return hashlib.sha256(json.dumps(decided, default=str).encode()).hexdigest()[:16]

    def to_json(self, *, folder: str | os.PathLike[str] | None = None) -> str:
        """Returns the plan as JSON text, a line for each key, from which `from_json` makes an equal plan.

        A user's own policy is written as ``module:name``, as its CSV file's path, or by its name.

        Args:
            folder: the folder to which the path of a CSV file is relative.
        """
        values: dict[str, Any] = {"format": _FORMAT, **self.options}
        values["schedule"] = reference(self.policy, None if folder is None else Path(folder).absolute())
        if self.report is not None:
            values["report"] = asdict(self.report)
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json(folder=Path(path).parent), encoding="utf-8")

    @property
    def policy(self) -> Policy:
        """The scheduling policy that `schedule` stands for."""
        return schedules.policy_of(self.schedule)

    @functools.cached_property
    def request(self) -> ScheduleRequest:
        """The request to the policy, without a memory limit."""
        return ScheduleRequest.of(
            self.policy.name,
            self.devices,
            self.micro_batches,
            warm_up=self.warm_up,
            reverse_first_k=self.reverse_first_k,
            task_seconds=self.options["task_seconds"],
        )

    @functools.cached_property
    def cuts(self) -> tuple[str, ...]:
        """Name of the last layer of each stage but the last."""
        return tuple(stage.cut for stage in self.stages if stage.cut is not None)

    @functools.cached_property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Device index of each replica of each stage."""
        return tuple(stage.devices for stage in self.stages)

    @functools.cached_property
    def operator_devices(self) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
        """Group of devices of each stage's replicas on which operators are placed; None if stages run as a whole."""
        groups = tuple(stage.operator_devices for stage in self.stages if stage.operator_devices is not None)
        return groups or None

    @property
    def places_operators(self) -> bool:
        """Whether stages place their operators one by one, on a group of devices for each replica."""
        return self.operator_devices is not None

    @functools.cached_property
    def groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Devices of each stage's replicas: several where these place their operators, one of the others."""
        return self.operator_devices or tuple(tuple((device,) for device in own) for own in self.devices)

    @functools.cached_property
    def relays(self) -> tuple[int, ...]:
        """Stages that hand on what they read."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.relays)

    @property
    def num_stages(self) -> int:
        """S, the number of stages."""
        return len(self.stages)

    def accumulates(self, micro_batches: int | None = None) -> bool:
        """Whether gradients are added up in accumulators, which one micro-batch doesn't need.

        Gradients that are carried over to the next step have to be kept, however.

        Args:
            micro_batches: number in a step with fewer or more samples than the global batch; None for the plan's.
        """
        count = self.micro_batches if micro_batches is None else micro_batches
        return count > 1 or self.carried_updates > 0

    def carried(self, groups: Sequence[tuple[int, ...]], schedule: Schedule) -> list[int]:
        """Returns which parameter groups are updated during the next step's forward, in the order of their reduction.

        Args:
            groups: the stages of each group.
            schedule: the step's order of tasks.

        Returns:
            Positions in ``groups``.
        """
        order = reduction_order(groups, schedule, self.devices) if self.carried_updates else []
        last = order[-self.carried_updates :]
        return sorted(last, key=groups.__getitem__) if self.reduction_order == "first_layers" else last

    @property
    def working_devices(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the devices that compute its tasks, or their single operators."""
        return tuple(tuple(itertools.chain(*groups)) for groups in self.groups)

    @property
    def compiled(self) -> bool:
        """Whether XLA compiles stages; `transform` decides for plans that leave it open."""
        return bool(self.jit_compile)

    @property
    def spread_stages(self) -> frozenset[int]:
        """The stages whose replicas place their operators on several devices."""
        return frozenset(stage for stage, groups in enumerate(self.groups) if len(groups[0]) > 1)

    @property
    def flat_stages(self) -> frozenset[int]:
        """Stages with operator placement: none, or all that XLA doesn't compile."""
        if not self.places_operators:
            return frozenset()
        return self.spread_stages if self.compiled else frozenset(range(self.num_stages))

    @property
    def cuts_batches(self) -> bool:
        """Whether some stage has several slices of a batch: micro-batches, or replicas."""
        return self.micro_batches > 1 or max(self.replicas) > 1

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of replicas of each stage."""
        return tuple(map(len, self.devices))

    def slices(self, stage: int, micro_batch: Interval) -> tuple[Interval, ...]:
        """Returns the samples of each replica of a stage in a micro-batch."""
        own = self.stages[stage]
        return slice_intervals(micro_batch, len(own.devices), own.shares)

    def largest_slices(self, stage: int, micro_batch: Interval) -> tuple[int, ...]:
        """Returns the most samples of each replica of a stage: the same for all if all stages cut evenly."""
        sizes = [part.size for part in self.slices(stage, micro_batch)]
        return tuple(sizes) if any(own.shares for own in self.stages) else (max(sizes),) * len(sizes)

    def warm_up_counts(self) -> tuple[int, ...]:
        """Returns K of each stage (`schedules.in_flight_limits`) without a memory limit."""
        return schedules.in_flight_limits(self.policy, self.request)

    def order_tasks(
        self,
        micro_batches: int | None = None,
        *,
        holds: Sequence[int] | None = None,
        active: schedules.Active | None = None,
        forward_only: bool = False,
    ) -> Schedule:
        """Returns the order of tasks on every device, checked.

        Args:
            micro_batches: number in a step with fewer or more samples than the global batch; None for the plan's.
            holds: for each stage the number of micro-batches that fit; None for no limit.
            active: (stage, micro-batch, replica) -> whether there is such a slice; None for all.
            forward_only: whether there are forward tasks only, for evaluation.

        Raises:
            ScheduleError: as `schedules.order_tasks`.
        """
        request = self.request.within(holds, micro_batches)
        made = schedules.order_tasks(self.policy, request, active=active, forward_only=forward_only)
        schedules.validate(
            made,
            self.devices,
            request.micro_batches,
            holds=holds,
            active=active,
            forward_only=forward_only,
        )
        return made

    @functools.cached_property
    def split_backward_stages(self) -> frozenset[int]:
        """The stages whose backward tasks are split into Bx and Bw."""
        return self.order_tasks(1).split

    def device_labels(self) -> dict[int, str]:
        """Returns device -> its work, such as ``device 3: stages 1.r0, 2.r0``, in the order of stages."""
        works_of: dict[int, list[str]] = {}
        for stage, devices in enumerate(self.devices):
            for replica, device in enumerate(devices):
                works_of.setdefault(device, []).append(f"{stage}" + (f".r{replica}" if len(devices) > 1 else ""))
        for stage, groups in enumerate(self.groups):
            for replica, group in enumerate(groups):
                for device in group[1:]:
                    text = f"{stage}" + (f".r{replica}" if len(groups) > 1 else "") + " (operators)"
                    works_of.setdefault(device, []).append(text)
        return {
            device: f"device {device}: stage{'s' * (len(works) > 1)} {', '.join(works)}"
            for device, works in works_of.items()
        }

    def validate_on(self, cluster: Cluster) -> None:
        """Checks that the cluster has every device of the plan, and devices of one type for a stage's replicas.

        Raises:
            PlanError: a device doesn't exist, or isn't of the type (CPU, GPU) of its like; the text names it and its
                stage.
        """
        count = cluster.num_devices
        for stage, groups in enumerate(self.groups):
            for device in itertools.chain(*groups):
                if device >= count:
                    numbers = "(0)" if count == 1 else f"(0 to {count - 1})"
                    raise PlanError(
                        f"plan puts stage {stage} on device {device}, but the cluster has {count} "
                        f"device{'s' if count > 1 else ''} {numbers}; choose one of these or use a larger cluster"
                    )
            for place, like in enumerate(zip(*groups, strict=True)):
                types = {device: cluster.devices[device].type for device in like}
                if len(set(types.values())) > 1:
                    where = f"place {place} in the groups of " if place else ""
                    shown = ", ".join(f"device {device} ({own})" for device, own in types.items())
                    raise PlanError(
                        f"{where}stage {stage} has unlike devices: {shown}. All replicas run the same operators; give "
                        f"it devices of one type"
                    )

    def __str__(self) -> str:
        return "\n".join([header(self), table(rows(self)), *remarks(self)])

    def _repr_html_(self) -> str:
        """Returns the plan for a notebook: its stages, and its timeline by `unit_timeline`."""
        return notebook_html(header(self), [Table("", rows(self))], [unit_timeline(self)], remarks(self))

    def _normalise(self) -> None:
        """Turns lists into tuples and number-like values into ints, and refuses all others."""
        try:
            object.__setattr__(self, "schedule", own_policy(self.schedule))
        except ScheduleError as error:
            raise PlanValueError(str(error)) from error
        object.__setattr__(self, "stages", checked(self.stages))
        object.__setattr__(self, "backward_cuts", layer_names(self.backward_cuts, "backward_cuts"))
        for name in ("micro_batches", "global_batch_size", "bucket_bytes", "reverse_first_k", "carried_updates"):
            object.__setattr__(self, name, integer(name, getattr(self, name)))
        if self.warm_up is not None:
            object.__setattr__(self, "warm_up", integers("warm_up", self.warm_up))
        if self.report is not None and len(self.report.stages) != self.num_stages:
            raise PlanError(f"the report is about {len(self.report.stages)} stages, the plan has {self.num_stages}")
        for name in ("jit_compile", "wait_free"):
            if not isinstance(getattr(self, name), bool) and (name, getattr(self, name)) != ("jit_compile", None):
                raise PlanValueError(f"{name} is {short(getattr(self, name))}; it must be True or False")
        wanted = listed("shards", self.shards, "['optimizer']")
        if any(shard not in SHARDS for shard in wanted):
            raise PlanValueError(f"shards is {short(self.shards)}; use some of {', '.join(SHARDS)}")
        object.__setattr__(self, "shards", tuple(shard for shard in SHARDS if shard in wanted))


def _one_or_each(names: Sequence[str]) -> str | tuple[str, ...]:
    return names[0] if len(set(names)) == 1 else tuple(names)
