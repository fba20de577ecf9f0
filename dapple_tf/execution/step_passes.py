"""The passes of a plan: from a captured model to stage functions, and from these to a step.

Nothing here needs a session, so that it works for descriptions of clusters, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence

import keras

from dapple_tf.clusters.session import collective_hint
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.errors import DappleError
from dapple_tf.execution.builds import Build, StepKind
from dapple_tf.execution.worker_data import area_of, hosts_of
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.step_placer import StepPlacer
from dapple_tf.simulation.device_memory import DeviceNeed
from dapple_tf.variables.device_values import Holding, parameters_in_shards
from dapple_tf.variables.parameter_groups import StorageDevices, group_updates
from graph_passes.ir.collectives import AllReduceRules
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.program import Layout, Program, Stage, VariableKind
from graph_passes.ir.storage import bytes_of
from graph_passes.ir.tasks import Phase, Schedule
from graph_passes.pass_manager import After, Before, Pass, Pipeline
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.cut_backward import CutBackward
from graph_passes.passes.flatten import Flatten
from graph_passes.passes.fold_shapes import FoldShapes
from graph_passes.passes.join import Join
from graph_passes.passes.partition import Partition, StageForm
from graph_passes.passes.place_data import PlaceData
from graph_passes.passes.place_operators import PlaceOperators
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.share_values import ShareValues
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.split_operators import SplitOperators
from graph_passes.passes.update import Update


@dataclasses.dataclass(frozen=True)
class StepPasses:
    """The passes of a plan on a cluster.

    Attributes:
        plan: the plan.
        cluster: the cluster, real or a description.
        pipeline: the order of passes, a user's own among them.
    """

    plan: Plan
    cluster: Cluster
    pipeline: Pipeline = dataclasses.field(default_factory=lambda: pipeline())

    def placer(self, costs: OperatorCosts | None) -> StepPlacer | None:
        """Returns the placer of single operators; None if stages run as a whole. Without costs it estimates them."""
        if not self.plan.places_operators:
            return None
        return StepPlacer(self.plan, self.cluster, costs or OperatorCosts(), self.pipeline)

    @property
    def devices(self) -> tuple[tuple[str, ...], ...]:
        """Names of the devices of each stage's replicas."""
        names = self.cluster.device_names
        return tuple(tuple(names[device] for device in replicas) for replicas in self.plan.devices)

    @functools.cached_property
    def on_gpus(self) -> frozenset[int]:
        """The stages that run on GPUs alone."""
        return frozenset(s for s, devices in enumerate(self.plan.working_devices) if self.cluster.all_gpus(devices))

    @property
    def gpus(self) -> bool:
        """Whether all stages run on GPUs."""
        return len(self.on_gpus) == self.plan.num_stages

    def shards(self, stages: Sequence[int]) -> int:
        """Returns the number of shards of a parameter group's slots."""
        if not self.plan.shards:
            return 1
        return len({device for stage in stages for device in self.devices[stage]})

    def updates(self, model: keras.Model, table: VariableTable, program: Program) -> tuple[GroupUpdate, ...]:
        """Returns the optimizer's part for each parameter group; see `group_updates`."""
        plan = self.plan
        dense = "optimizer" in plan.shards
        return group_updates(model, table, program, self.shards, dense=dense, compiled=plan.compiled)

    @property
    def slices(self) -> tuple[int, ...]:
        """For each stage the number of slices of a full batch."""
        return tuple(self.plan.micro_batches * len(replicas) for replicas in self.devices)

    def slice_samples(self, mode: Mode, samples: int) -> tuple[int | None, ...]:
        """Returns for each stage the samples of its slices; None if they differ, or its functions serve any size.

        Training has functions for one size. Evaluation and prediction see batches of many sizes, for which functions of
        any size are made once, but on GPUs, which wait for each shape that they compute. If operators are placed one by
        one, shapes are folded after that.
        """
        every = frozenset(range(len(self.devices)))
        sized = (every if mode is Mode.TRAIN else self.on_gpus) - self.plan.flat_stages
        layout = self.layout(samples)
        slices = [layout.slices_with_samples(stage).values() for stage in range(len(self.devices))]
        sizes = [{interval.size for interval in own} for own in slices]
        return tuple(own.pop() if len(own) == 1 and stage in sized else None for stage, own in enumerate(sizes))

    @functools.cached_property
    def uninterrupted(self) -> frozenset[int]:
        """The stages that run the B of every micro-batch right after its F, as a whole."""
        if self.plan.backward_cuts:
            return frozenset()
        apart = set()
        for tasks in self.plan.order_tasks().orders.values():
            for task, following in itertools.pairwise(tasks):
                if task.phase is Phase.FORWARD and following != dataclasses.replace(task, phase=Phase.BACKWARD):
                    apart.add(task.stage)
        return frozenset(range(len(self.devices))) - apart

    def layout(self, samples: int) -> Layout:
        """Returns how a batch of ``samples`` samples is cut. Evaluation may take larger batches than training."""
        batch, micro_batches = self.plan.global_batch_size, self.plan.micro_batches
        if samples > batch:
            micro_batches, batch = -(-samples * micro_batches // batch), samples
        return Layout(self.devices, samples, batch, micro_batches, self.plan.options["shares"])

    def carried(self, updates: Sequence[GroupUpdate]) -> tuple[tuple[int, ...], ...]:
        """Returns the parameter groups updated during the next step's forward pass, in the order of their reduction."""
        keys = [update.stages for update in updates]
        carried = self.plan.carried(keys, self.plan.order_tasks())
        return tuple(keys[index] for index in carried if not updates[index].apply.slices)

    def assign_stages(self, *, uncut: bool = False) -> AssignStages:
        """Returns the first pass, for full batches, or for ones that can't be cut (``uncut``)."""
        layout = self.layout(1 if uncut else self.plan.global_batch_size)
        return AssignStages(self.plan.cuts, self.plan.backward_cuts, layout)

    def schedule(self, built: Build, layout: Layout, holdings: Sequence[Holding]) -> Schedule:
        """Returns the order of tasks for a batch; ``holdings`` are what devices keep."""
        micro_batches = len(layout.micro_batch_intervals)
        training = built.mode is Mode.TRAIN

        def stored(device: str) -> int:
            return self.stored_bytes(built.program, holdings, device, gradients=True)

        holds = self.holds(built.program, layout, stored) if training else None
        return self.plan.order_tasks(micro_batches, holds=holds, active=layout.active, forward_only=not training)

    @functools.cached_property
    def limited_devices(self) -> Mapping[int, int]:
        """Device -> bytes of memory, for devices whose memory limits micro-batches."""
        if self.plan.places_operators:
            return {}  # A stage's memory is that of several devices, within which its operators are placed.
        devices = {device for replicas in self.plan.devices for device in replicas}
        limits = {device: self.cluster.devices[device].memory_bytes for device in sorted(devices)}
        return {device: limit for device, limit in limits.items() if limit is not None}

    def holds(self, program: Program, layout: Layout, stored: Callable[[str], int]) -> tuple[int, ...] | None:
        """Returns D of each stage, the number of micro-batches whose residuals its devices hold; None without a limit.

        A device that runs several stages holds D micro-batches in each, or in all of them together if the policy limits
        them together (`Policy.shares_room`).

        Args:
            program: a program with stage functions, whose bytes are counted if a device's memory is limited.
            layout: how the batch is cut.
            stored: name of a device -> bytes of variables, optimizer slots and gradients on it.

        Raises:
            DappleError: not even one micro-batch fits.
        """
        if not self.limited_devices:
            return None
        plan = self.plan
        count, shared = len(layout.micro_batch_intervals), plan.policy.shares_room
        first = layout.micro_batch_intervals[0]
        largest = [plan.largest_slices(stage, first) for stage in range(plan.num_stages)]
        held = [count * plan.num_stages if shared else count] * plan.num_stages
        for device, limit in self.limited_devices.items():
            stages = [stage for stage, replicas in enumerate(plan.devices) if device in replicas]
            samples = [largest[stage][plan.devices[stage].index(device)] for stage in stages]
            sizes = [_slice_bytes(program.stages[stage], own) for stage, own in zip(stages, samples, strict=True)]
            kept = stored(self.cluster.device_names[device])
            need = DeviceNeed(kept, sum(sizes), max(sizes), len(stages), max(samples))
            fitting = need.fitting(limit, count, shared=shared)
            if fitting < 1:
                shown = f"stage {stages[0]} needs" if len(stages) == 1 else f"stages {stages} together need"
                raise DappleError(
                    f"{shown} {need.peak(1):,.0f} bytes for variables, gradients and the residuals of one "
                    f"micro-batch, but device {device} has {limit:,}: use more stages, more replicas, smaller "
                    f"micro-batches or recompute='boundary'"
                )
            for stage in stages:
                held[stage] = min(held[stage], fitting)
        return tuple(held)

    def stored_bytes(
        self,
        program: Program,
        holdings: Sequence[Holding],
        device: str,
        *,
        gradients: bool = False,
        placed: StorageDevices = types.MappingProxyType({}),
    ) -> int:
        """Returns the bytes of the variables, optimizer slots and gradient accumulators on a device.

        Args:
            program: the stages.
            holdings: what devices keep.
            device: name of the device.
            gradients: whether to count what only a step needs, too: dense gradients without accumulators, and whole
                parameters of which devices keep shards.
            placed: the devices of variables that were placed one by one.
        """
        stages = [stage for stage in program.stages if device in self.devices[stage.index]]
        kept = [v for holding in holdings if device in holding.devices for v in holding.variables]
        if gradients or self.plan.accumulates():
            accumulators = ((stage.index, v) for stage in program.stages for _, v, _ in stage.gradients)
            kept += [
                v for stage, v in accumulators if device in placed.get((stage, v.storage_name), self.devices[stage])
            ]
        if gradients and (in_shards := parameters_in_shards(holdings)):
            gathered = [name for stage in stages for name in stage.reads if name not in stage.looked_up]
            kept += [program.variables[name] for name in gathered if name in in_shards]
        return bytes_of(kept)

    def stage_passes(self, mode: Mode, prefix: str, *, uncut: bool = False) -> list[Pass]:
        """Returns the passes from the captured graph to stage functions for full batches, named ``prefix...``.

        Args:
            mode: the purpose of the functions.
            prefix: start of their names.
            uncut: whether they are for batches that can't be cut.
        """
        training = mode is Mode.TRAIN
        slices = (1,) * len(self.slices) if uncut else self.slices
        return self.pipeline.placed(
            [
                self.assign_stages(uncut=uncut),
                BuildForward(want_outputs=mode is Mode.PREDICT),
                *([BuildBackward(slices)] if training else ()),
                self._partition(mode, prefix, self.plan.global_batch_size),
            ]
        )

    def _partition(self, mode: Mode, prefix: str, samples: int) -> Partition:
        """Returns the pass that makes the functions, for a batch of ``samples`` samples."""
        training, plan = mode is Mode.TRAIN, self.plan
        sizes = self.slice_samples(mode, samples)
        fused = self.uninterrupted if training and plan.compiled else frozenset()
        # XLA compiles seeds into its kernels, and operators that are placed one by one have hosts of their own.
        on_gpus = frozenset() if plan.compiled else self.on_gpus - plan.flat_stages
        forms = tuple(
            StageForm(
                own.recompute,
                jit_compile=plan.compiled and stage not in plan.spread_stages,
                split=stage in plan.split_backward_stages,
                fuse=stage in fused,
                samples=sizes[stage],
                replicated=len(own.devices) > 1,
                on_gpu=stage in on_gpus,
            )
            for stage, own in enumerate(plan.stages)
        )
        keepers = self.devices if "rows" in plan.shards else None
        return Partition(forms, training, prefix, bool(self.limited_devices), keepers)

    def step_passes(
        self,
        built: Build,
        kind: StepKind,
        schedule: Schedule,
        owners: Mapping[str, Sequence[int]],
        first_key: int = 1,
        *,
        in_shards: frozenset[str] = frozenset(),
    ) -> list[Pass]:
        """Returns the passes from stage functions to a step, which remake the functions first if slices need others.

        Args:
            built: the stage functions.
            kind: the kind of step.
            schedule: the order of its tasks.
            owners: variable -> the stages that keep it.
            first_key: the first of the collective keys.
            in_shards: the parameters of which devices keep shards.
        """
        plan, cluster, layout, mode = self.plan, self.cluster, self.layout(kind.samples), built.mode
        training, joins = mode is Mode.TRAIN, self.joins(built, kind.samples)
        again = self.slice_samples(mode, kind.samples) != self.slice_samples(mode, plan.global_batch_size)
        # Training changes variables, evaluation and prediction do in few models.
        states = (v for v in built.program.roles.variables if v.kind is VariableKind.STATE)
        updates = training or any(v.update is not None for v in states)
        made: list[Pass] = [self._partition(mode, built.prefix, kind.samples)] if again else []
        made.append(Replicate(layout, cluster.host_device, owners, built.prefix, first_key, in_shards))
        if plan.backward_cuts and training:
            made.append(CutBackward(plan.backward_cuts))
        made.append(SplitConcat(plan.relays))
        if updates:
            made.append(Accumulate(plan.accumulates(len(layout.micro_batch_intervals))))
        made.append(OrderTasks(schedule, cluster.device_names))
        if updates:
            own_graph = plan.places_operators or joins
            update = Update(
                built.updates,
                plan.bucket_bytes,
                plan.wait_free,
                want_gradients=training and (kind.apart if own_graph else not kind.carries),
                carried=built.carried if kind.carries else (),
                head=kind.head,
                jit_compile=plan.compiled,
                spread=plan.spread_stages,
                all_reduces=AllReduceRules(
                    collective_hint(cluster),
                    frozenset(number for number, stage in enumerate(plan.stages) if stage.all_reduce == "hierarchical"),
                    {device.name: device.server for device in cluster.devices},
                ),
            )
            made.append(update)
        if kind.on_workers:
            area = area_of(leaf.dtype for leaf in built.spec.leaves)
            made.append(PlaceData(hosts_of(cluster), area, kind.in_parts))
        if joins and not kind.apart:
            made.append(Join(plan.compiled))
        return self.pipeline.placed(made, again=again)

    def joins(self, built: Build, samples: int) -> bool:
        """Whether training steps of this many samples are one function: on one device, with nothing to accumulate.

        With XLA, only if it compiles all stages, F and B together.
        """
        layout, plan = self.layout(samples), self.plan
        devices = {*itertools.chain(*layout.devices)}
        if built.mode is not Mode.TRAIN or len(devices) > 1 or plan.accumulates(len(layout.micro_batch_intervals)):
            return False
        compiled = all(stage.fused is not None for stage in built.program.stages)
        return not plan.places_operators and (compiled or not plan.compiled)


def _slice_bytes(stage: Stage, samples: int) -> int:
    """Returns the bytes that a stage's device keeps of a slice until its last backward task."""
    return max(stage.residual_bytes.at(samples), stage.delayed_bytes.at(samples))


PASSES: tuple[type[Pass], ...] = (
    AssignStages,
    BuildForward,
    BuildBackward,
    Partition,
    Replicate,
    CutBackward,
    SplitConcat,
    Accumulate,
    OrderTasks,
    Update,
    PlaceData,
    Join,
    Flatten,
    FoldShapes,
    ShareValues,
    SplitOperators,
    PlaceOperators,
)
"""All passes, in the order in which they run. Their numbers are their positions here."""
_ENDING = frozenset({Join.name})
"""The passes after which a step has no later ones."""


def pipeline(own: Sequence[After | Before] = ()) -> Pipeline:
    """Returns the order of all passes, a user's own among them.

    Raises:
        PassError: an own pass has an unknown place, isn't a pass, or has another's name.
    """
    return Pipeline(tuple(str(item.name) for item in PASSES), _ENDING, tuple(own))
