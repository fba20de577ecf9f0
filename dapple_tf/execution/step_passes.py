"""The passes of a plan: from a captured model to stage functions, and from these to a step.

Nothing here needs a session, so that it works for descriptions of clusters, too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras

from dapple_tf.clusters.session import collective_hint
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.execution.builds import Build, StepKind
from dapple_tf.execution.memory_limits import limited_devices, residuals_held
from dapple_tf.execution.worker_data import area_of, hosts_of
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.step_placer import StepPlacer
from dapple_tf.variables.device_values import Holding, parameters_in_shards
from dapple_tf.variables.parameter_groups import group_updates
from graph_passes.ir.collectives import AllReduceRules
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.program import Layout, Program, VariableKind
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

        holds = residuals_held(self.plan, self.cluster, built.program, layout, stored) if training else None
        return self.plan.order_tasks(micro_batches, holds=holds, active=layout.active, forward_only=not training)

    def stored_bytes(
        self, program: Program, holdings: Sequence[Holding], device: str, *, gradients: bool = False
    ) -> int:
        """Returns the bytes of the variables, optimizer slots and gradient accumulators on a device.

        Args:
            program: the stages.
            holdings: what devices keep.
            device: name of the device.
            gradients: whether to count what only a step needs, too: dense gradients without accumulators, and whole
                parameters of which devices keep shards.
        """
        stages = [stage for stage in program.stages if device in self.devices[stage.index]]
        kept = [v for holding in holdings if device in holding.devices for v in holding.variables]
        if gradients or self.plan.accumulates():
            kept += [v for stage in stages for _, v, _ in stage.gradients]
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
        asked = StagesAsked(self, mode, prefix, uncut)
        made = [slot.stage(asked) for slot in PASSES if slot.stage is not None]
        return self.pipeline.placed(item for item in made if item is not None)

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
        asked = StepAsked(self, built, kind, schedule, owners, first_key, in_shards)
        made = [item for slot in PASSES if slot.step is not None and (item := slot.step(asked)) is not None]
        return self.pipeline.placed(made, again=not isinstance(made[0], Replicate))

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


class StagesAsked(NamedTuple):
    """The request for stage functions.

    Attributes:
        passes: the passes of the plan.
        mode: the purpose of the functions.
        prefix: start of their names.
        uncut: whether they are for batches that can't be cut.
    """

    passes: StepPasses
    mode: Mode
    prefix: str
    uncut: bool = False

    @property
    def training(self) -> bool:
        """Whether there are gradients."""
        return self.mode is Mode.TRAIN

    @property
    def slices(self) -> tuple[int, ...]:
        """For each stage the number of slices of a full batch."""
        return (1,) * len(self.passes.slices) if self.uncut else self.passes.slices

    def partition(self, samples: int | None = None) -> Partition:
        """Returns the pass that makes the functions, for a batch of ``samples`` samples or a full one."""
        passes, plan = self.passes, self.passes.plan
        sizes = passes.slice_samples(self.mode, plan.global_batch_size if samples is None else samples)
        fused = passes.uninterrupted if self.training and plan.compiled else frozenset()
        # XLA compiles seeds into its kernels, and operators that are placed one by one have hosts of their own.
        on_gpus = frozenset() if plan.compiled else passes.on_gpus - plan.flat_stages
        forms = tuple(
            StageForm(
                own.recompute,
                jit_compile=plan.compiled and stage not in plan.spread_stages,
                split=stage in plan.split_stages,
                fuse=stage in fused,
                samples=sizes[stage],
                replicated=len(own.devices) > 1,
                on_gpu=stage in on_gpus,
            )
            for stage, own in enumerate(plan.stages)
        )
        counted = bool(limited_devices(plan, passes.cluster))
        keepers = passes.devices if "rows" in plan.shards else None
        return Partition(forms, self.training, self.prefix, counted, keepers)


class StepAsked(NamedTuple):
    """The request for a step; see `StepPasses.step_passes`."""

    passes: StepPasses
    built: Build
    kind: StepKind
    schedule: Schedule
    owners: Mapping[str, Sequence[int]]
    first_key: int
    in_shards: frozenset[str]

    @property
    def _layout(self) -> Layout:
        return self.passes.layout(self.kind.samples)

    @property
    def _updates(self) -> bool:
        """Whether the step changes variables: training does, evaluation and prediction in few models."""
        variables = self.built.program.roles.variables
        assigned = any(v.kind is VariableKind.STATE and v.update is not None for v in variables)
        return self.built.mode is Mode.TRAIN or assigned

    @property
    def _accumulates(self) -> bool:
        return self.passes.plan.accumulates(len(self._layout.micro_batch_intervals))

    @property
    def _joins(self) -> bool:
        return self.passes.joins(self.built, self.kind.samples)

    def partition(self) -> Partition | None:
        """Returns the pass for other stage functions if slices differ in size from a full batch's, else None."""
        passes, mode = self.passes, self.built.mode
        full = passes.slice_samples(mode, passes.plan.global_batch_size)
        if passes.slice_samples(mode, self.kind.samples) == full:
            return None
        return StagesAsked(passes, mode, self.built.prefix).partition(self.kind.samples)

    def replicate(self) -> Replicate:
        """Returns the first pass of a step."""
        return Replicate(
            self._layout,
            self.passes.cluster.host_device,
            self.owners,
            self.built.prefix,
            self.first_key,
            self.in_shards,
            self.passes.plan.bucket_bytes,
        )

    def cut_backward(self) -> CutBackward | None:
        """Returns the pass that cuts the last backwards into pieces."""
        cuts = self.passes.plan.backward_cuts
        return CutBackward(cuts) if cuts and self.built.mode is Mode.TRAIN else None

    def accumulate(self) -> Accumulate | None:
        """Returns the pass that sums over micro-batches."""
        return Accumulate(self._accumulates) if self._updates else None

    def order(self) -> OrderTasks:
        """Returns the pass for the schedule."""
        return OrderTasks(self.schedule, self.passes.cluster.device_names)

    def update(self) -> Update | None:
        """Returns the pass for reduction and optimizer."""
        if not self._updates:
            return None
        built, kind, plan, cluster = self.built, self.kind, self.passes.plan, self.passes.cluster
        apart = plan.places_operators or self._joins
        return Update(
            built.updates,
            plan.bucket_bytes,
            plan.wait_free,
            want_gradients=built.mode is Mode.TRAIN and (kind.apart if apart else not kind.carries),
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

    def place_data(self) -> PlaceData | None:
        """Returns the pass that has workers take batches that they have read."""
        if not self.kind.on_workers:
            return None
        return PlaceData(
            hosts_of(self.passes.cluster), area_of(leaf.dtype for leaf in self.built.spec.leaves), self.kind.in_parts
        )

    def join(self) -> Join | None:
        """Returns the pass that makes one function of the whole step."""
        return Join(self.passes.plan.compiled) if self._joins and not self.kind.apart else None


class Slot(NamedTuple):
    """A pass in its place.

    Attributes:
        pass_type: the pass's class.
        stage: makes it for stage functions, or returns None if these don't need it. None for a pass of steps.
        step: the same for a step. None for a pass of stage functions, and for the passes that `StepPlacer` makes from
            what it finds out between them.
        ends: whether a step with this pass has no later ones.
    """

    pass_type: type[Pass]
    stage: Callable[[StagesAsked], Pass | None] | None = None
    step: Callable[[StepAsked], Pass | None] | None = None
    ends: bool = False

    @property
    def name(self) -> str:
        """The pass's name."""
        return str(self.pass_type.name)


PASSES: tuple[Slot, ...] = (
    Slot(AssignStages, stage=lambda asked: asked.passes.assign_stages(uncut=asked.uncut)),
    Slot(BuildForward, stage=lambda asked: BuildForward(want_outputs=asked.mode is Mode.PREDICT)),
    Slot(BuildBackward, stage=lambda asked: BuildBackward(asked.slices) if asked.training else None),
    Slot(Partition, stage=StagesAsked.partition, step=StepAsked.partition),
    Slot(Replicate, step=StepAsked.replicate),
    Slot(CutBackward, step=StepAsked.cut_backward),
    Slot(SplitConcat, step=lambda asked: SplitConcat(asked.passes.plan.relays)),
    Slot(Accumulate, step=StepAsked.accumulate),
    Slot(OrderTasks, step=StepAsked.order),
    Slot(Update, step=StepAsked.update),
    Slot(PlaceData, step=StepAsked.place_data),
    Slot(Join, step=StepAsked.join, ends=True),
    Slot(Flatten),
    Slot(FoldShapes),
    Slot(ShareValues),
    Slot(SplitOperators),
    Slot(PlaceOperators),
)
"""All passes, in the order in which they run. Their numbers are their positions here."""


def pipeline(own: Sequence[After | Before] = ()) -> Pipeline:
    """Returns the order of all passes, a user's own among them.

    Raises:
        PassError: an own pass has an unknown place, isn't a pass, or has another's name.
    """
    names = {slot.name: slot.ends for slot in PASSES}
    return Pipeline(tuple(names), frozenset(name for name, ends in names.items() if ends), tuple(own))
