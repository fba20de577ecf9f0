"""The passes that a plan asks for: from a captured model to stage functions, and from these to a step.

Nothing here needs a session, so that it serves descriptions of clusters, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.execution.builds import Build, Kind
from dapple_tf.execution.memory_limits import residuals_held
from dapple_tf.frontend.capture import Mode
from dapple_tf.variables.device_values import Holding
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.program import Layout, Program, VariableKind
from graph_passes.ir.storage import bytes_of
from graph_passes.ir.tasks import Phase, Schedule, reduction_order
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.join import Join
from graph_passes.passes.partition import Partition
from graph_passes.passes.replicate import Replicate, sum_keys
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.update import Update

if TYPE_CHECKING:
    from graph_passes.pass_manager import Pass


def first_step_pass(passes: Sequence[Pass]) -> int:
    """Number of the first of the passes that `StepPasses.step_passes` gives."""
    return 4 if isinstance(passes[0], Partition) else 5


@dataclasses.dataclass(frozen=True)
class StepPasses:
    """The passes of a plan on a cluster.

    Attributes:
        plan: the plan.
        cluster: the cluster, real or a description.
    """

    plan: Plan
    cluster: Cluster

    @property
    def devices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the devices of each stage's replicas."""
        return self._names(self.plan.devices)

    @property
    def homes(self) -> tuple[tuple[str, ...], ...]:
        """Names of the devices that keep the variables of each stage's replicas."""
        return self._names(self.plan.devices if self.plan.weight_devices is None else self.plan.weight_devices)

    def _names(self, devices: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
        names = self.cluster.device_names
        return tuple(tuple(names[device] for device in replicas) for replicas in devices)

    @property
    def slices(self) -> tuple[int, ...]:
        """For each stage the number of slices of a full batch."""
        return tuple(self.plan.micro_batches * len(replicas) for replicas in self.devices)

    def slice_samples(self, mode: Mode, samples: int) -> tuple[int | None, ...]:
        """For each stage the samples of its slices of a batch, where all have as many and functions are made for them.

        They are in training: evaluation and prediction see batches of many sizes, for which functions of any size are
        made once. Where operators are placed one by one, shapes are folded after that.
        """
        if mode is not Mode.TRAIN or self.plan.operator_devices is not None:
            return ()
        layout = self.layout(samples)
        sizes = [
            {
                interval.size
                for micro_batch in range(len(layout.micro_batch_intervals))
                for interval in layout.slices(stage, micro_batch)
                if interval.size
            }
            for stage in range(len(self.devices))
        ]
        return tuple(found.pop() if len(found) == 1 else None for found in sizes)

    def _partition(self, mode: Mode, prefix: str, samples: int) -> Partition:
        """Pass 4 for batches of so many samples."""
        plan = self.plan
        training = mode is Mode.TRAIN
        sizes = self.slice_samples(mode, samples)
        fuse = self._uninterrupted if training and plan.jit_compile else frozenset()
        replicas = [len(devices) for devices in plan.devices]
        return Partition(plan.recompute, plan.jit_compile, training, prefix, plan.split_stages, fuse, sizes, replicas)

    @functools.cached_property
    def _uninterrupted(self) -> frozenset[int]:
        """The stages that run the B of every micro-batch right after its F."""
        apart = set()
        for tasks in self.plan.order_tasks().orders.values():
            for task, following in itertools.pairwise(tasks):
                if task.phase is Phase.FORWARD and following != dataclasses.replace(task, phase=Phase.BACKWARD):
                    apart.add(task.stage)
        return frozenset(range(len(self.devices))) - apart

    def layout(self, samples: int) -> Layout:
        """How a batch of ``samples`` samples is cut. Evaluation may take larger batches than training."""
        batch, micro_batches = self.plan.global_batch_size, self.plan.micro_batches
        if samples > batch:
            micro_batches, batch = -(-samples * micro_batches // batch), samples
        homes = None if self.plan.weight_devices is None else self.homes
        return Layout(self.devices, samples, batch, micro_batches, homes)

    def carried(self, updates: Sequence[GroupUpdate]) -> tuple[tuple[int, ...], ...]:
        """The parameter groups that are updated during the next step's forward, in the order of their reduction."""
        count = self.plan.carried_updates
        if not count or not updates:
            return ()
        keys = [update.stages for update in updates]
        order = reduction_order(keys, self.plan.order_tasks(), self.plan.weight_devices or self.plan.devices)
        return tuple(keys[index] for index in order[-count:] if not updates[index].apply.slices)

    def schedule(self, built: Build, layout: Layout, holdings: Sequence[Holding]) -> Schedule:
        """The order of tasks for a batch; ``holdings`` are what devices keep."""
        micro_batches = len(layout.micro_batch_intervals)
        training = built.mode is Mode.TRAIN
        holds = self.holds(built, layout, holdings) if training else None
        return self.plan.order_tasks(micro_batches, holds=holds, active=layout.active, forward_only=not training)

    def holds(self, built: Build, layout: Layout, holdings: Sequence[Holding]) -> tuple[int, ...] | None:
        """D of each stage, see `residuals_held`."""

        def stored(device: str) -> int:
            return self.stored_bytes(built.program, holdings, device, gradients=True)

        return residuals_held(self.plan, self.cluster, built.program, layout, stored)

    def stored_bytes(
        self, program: Program, holdings: Sequence[Holding], device: str, *, gradients: bool = False
    ) -> int:
        """Bytes of the variables, optimizer slots and gradient accumulators on a device.

        Args:
            program: the stages.
            holdings: what devices keep.
            device: which.
            gradients: count dense gradients also where they have no accumulators, as a step needs them at its end.
        """
        stages = [stage for stage in program.stages if device in self.homes[stage.index]]
        kept = [v for holding in holdings if device in holding.devices for v in holding.variables]
        if gradients or self.plan.accumulates():
            kept += [v for stage in stages for _, v, _ in stage.gradients]
        return bytes_of(kept)

    def stage_passes(self, mode: Mode, prefix: str) -> list[Pass]:
        """Passes 1 to 4: from the captured graph to stage functions for full batches, named ``prefix...``."""
        training = mode is Mode.TRAIN
        return [
            AssignStages(self.plan.cuts),
            BuildForward(want_outputs=mode is Mode.PREDICT),
            *([BuildBackward(self.slices)] if training else []),
            self._partition(mode, prefix, self.plan.global_batch_size),
        ]

    def step_passes(
        self, built: Build, kind: Kind, schedule: Schedule, hosts: Mapping[str, Sequence[int]], first_key: int = 1
    ) -> list[Pass]:
        """Passes 5 to 9, or 10: from stage functions to a step; pass 4 before them, if its slices need others.

        Args:
            built: the stage functions.
            kind: which step.
            schedule: the order of its tasks.
            hosts: variable -> the stages that keep it.
            first_key: the first of the collective keys.
        """
        order = OrderTasks(schedule, self.cluster.device_names)
        layout = self.layout(kind.samples)
        replicate = Replicate(layout, self.cluster.host_device, hosts, built.prefix, first_key)
        if built.mode is not Mode.TRAIN and not _assigns(built.program):
            return [replicate, SplitConcat(), order]
        full = self.plan.global_batch_size
        differs = self.slice_samples(built.mode, kind.samples) != self.slice_samples(built.mode, full)
        again = [self._partition(built.mode, built.prefix, kind.samples)] if differs else []
        joins = self.joins(built, kind.samples)
        update = Update(
            built.updates,
            hosts,
            self.cluster.host_device,
            self.plan.bucket_bytes,
            first_key + sum_keys(built.program, layout),
            built.prefix,
            self.plan.wait_free,
            want_gradients=built.mode is Mode.TRAIN
            and (kind.apart if self.plan.operator_devices is not None or joins else not kind.carries),
            carried=built.carried if kind.carries else (),
            head=kind.head,
            jit_compile=self.plan.jit_compile,
            accumulated=self.plan.accumulates(len(layout.micro_batch_intervals)),
        )
        accumulate = Accumulate(built.prefix, update.accumulated)
        joined = f"{built.prefix}joined_of{kind.samples}"
        join = [Join(joined, self.plan.jit_compile)] if joins and not kind.apart else []
        return [*again, replicate, SplitConcat(), accumulate, order, update, *join]

    def joins(self, built: Build, samples: int) -> bool:
        """Whether training steps of so many samples are one function: on one device, with nothing to accumulate.

        With XLA only if it compiles all stages, F and B together.
        """
        layout, plan = self.layout(samples), self.plan
        devices = {*itertools.chain(*layout.devices, *layout.homes)}
        if built.mode is not Mode.TRAIN or len(devices) > 1 or plan.accumulates(len(layout.micro_batch_intervals)):
            return False
        compiled = all(stage.fused is not None for stage in built.program.stages)
        return plan.operator_devices is None and (compiled or not plan.jit_compile)


def _assigns(program: Program) -> bool:
    """Whether layers assign state of their own: in training most models do, in evaluation and prediction few."""
    return any(v.kind is VariableKind.STATE and v.update is not None for v in program.roles.variables)
