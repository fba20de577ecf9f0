"""Building step graphs for a model, a cluster and a plan, from the capture to what a session can run."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import keras

from dapple_tf.clusters.session import collective_keys
from dapple_tf.common.keras_private import model_supports_jit
from dapple_tf.common.memory import without_collection
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.errors import CaptureError
from dapple_tf.execution.builds import Build, BuiltStep, Flush, StepKind, StepSource
from dapple_tf.execution.notes import NoteLog, notes_of, pairs
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.execution.terminal import Preparation
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.custom_gradients import check_py_functions
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpPlacement
from dapple_tf.operators.step_placer import PlacedStep, StepPlacer
from dapple_tf.tracing.step_nodes import step_nodes
from dapple_tf.variables.device_values import Holding
from dapple_tf.variables.parameter_groups import Arrangement, whole_tables
from graph_passes.errors import PassError
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.program import Program
from graph_passes.pass_manager import Instrument, Pass, run_passes
from graph_passes.passes.replicate import sum_keys
from graph_passes.passes.update import Update, flush

logger = logging.getLogger(__name__)


class StepBuilder:
    """Builds stage functions once for each mode and structure of batches, and a step of them for each batch size.

    Attributes:
        passes: the passes of the plan on the cluster.
        placer: places single operators; None if stages run as a whole.
        notes: where training differs from plain Keras.
        builds: (mode, structure of batches, whether layers behave as in training) -> its stage functions and steps.
        arrangement: the stages that keep each variable.
        holdings: what devices keep.
    """

    def __init__(
        self,
        model: keras.Model,
        passes: StepPasses,
        table: VariableTable,
        timing: Preparation,
        operator_costs: OperatorCosts | None,
    ) -> None:
        """Starts with nothing built.

        Args:
            model: a compiled model.
            passes: the passes of a plan on a cluster.
            table: names of the model's variables.
            timing: records what is prepared, and its seconds.
            operator_costs: costs of single operators, for a plan that places them; None estimates them.
        """
        self._model, self._plan, self._table, self._timing = model, passes.plan, table, timing
        self.passes, self.placer = passes, passes.placer(operator_costs)
        self.notes = NoteLog(model.name)
        self.builds: dict[tuple[Mode, str, bool], Build] = {}
        self.arrangement = Arrangement()
        self.holdings: Sequence[Holding] = ()
        self._trained_devices = False
        self._numbers = itertools.count()

    # ---- stage functions

    @without_collection
    def build(self, mode: Mode, spec: BatchSpec, training: bool) -> tuple[Build, Arrangement]:
        """Returns stage functions for batches of this structure, and the arrangement of variables for them."""
        start = time.perf_counter()
        model, table = self._model, self._table
        if mode is not Mode.PREDICT:
            with self._timing.part("build losses and metrics"):
                build(model, table, spec)
        with self._timing.part("capture"):
            predicts, gpus = mode is Mode.PREDICT, self.passes.gpus
            captured = capture(model, table, mode, spec, training=training, predict_step=predicts, gpus=gpus)
            if self.placer is not None and captured.roles.peers is not None and max(self._plan.replicas) > 1:
                raise PlanError(
                    f"model {model.name!r} has layers with synchronized=True, which add up over replicas within a "
                    f"stage's computation: not possible where operators are placed one by one. Set "
                    f"synchronized=False, or give each stage one replica"
                )
            check_py_functions(captured.graph, self.passes.cluster.addresses)
        prefix = f"{mode.value}{next(self._numbers)}_"
        slices = (1,) * len(self.passes.slices) if spec.uncut else self.passes.slices
        try:
            passes = self.passes.stage_passes(mode, prefix, uncut=spec.uncut)
            first = self.passes.pipeline.number(passes[0])
            program = run_passes(captured, passes, first=first, instruments=self._timing.of_passes(passes, first))
        except PassError as error:
            why = pairs(captured, slices)
            if not why:
                raise
            raise PassError(f"{error}; {why}") from error
        if mode is Mode.PREDICT and (why := pairs(program, slices)):
            raise CaptureError(f"model {model.name!r} can't predict by slices of a batch: {why}")
        with self._timing.part("capture optimizer"):
            updates = self.passes.updates(model, table, program) if mode is Mode.TRAIN else ()
        built = Build(mode, spec, program, updates, prefix, carried=self.passes.carried(updates))
        if "rows" in self._plan.shards and updates:
            self._tell_whole_tables(program, updates)
        if mode is Mode.TRAIN and training and not spec.uncut:
            self.notes.take(notes_of(program, slices, self._plan.micro_batches))
        arrangement = self.arrangement.extended(program, updates)
        if self.placer is not None:
            arrangement = self._placed(self.placer, built, arrangement)
        logger.info("prepared %s for %s in %.2f s", mode.value, spec, time.perf_counter() - start)
        return built, arrangement

    def _tell_whole_tables(self, program: Program, updates: Sequence[GroupUpdate]) -> None:
        """Logs which tables each device keeps whole though the plan has their rows in shards."""
        reasons = whole_tables(self._table, program, updates)
        for name, why in reasons.items():
            logger.warning("row_shards: each replica keeps all rows of %r: %s", name, why)
        if not reasons and not any(stage.lookups for stage in program.stages):
            logger.warning("row_shards: no stage with several replicas looks up rows of a parameter that is trained")

    def _placed(self, placer: StepPlacer, built: Build, arrangement: Arrangement) -> Arrangement:
        """Places the operators of a full batch's step, and with them variables, on which training decides."""
        carries = bool(built.carried)
        # A step between others touches all variables, those of carried updates included.
        kind = StepKind(self._plan.global_batch_size, carries, head=carries)
        decides = built.mode is Mode.TRAIN and not self._trained_devices
        known = dataclasses.replace(arrangement, storage_devices={}) if decides else arrangement
        placed = built.placed[kind] = self._place(placer, built, kind, known)
        self._trained_devices |= decides
        devices = {**arrangement.storage_devices, **placed.storage_devices}
        return dataclasses.replace(arrangement, storage_devices=devices)

    def _place(self, placer: StepPlacer, built: Build, kind: StepKind, arrangement: Arrangement) -> PlacedStep:
        complete, _ = self._complete(built, kind, arrangement)
        return placer.place(complete, built.input_shapes(kind), arrangement.storage_devices, [self._timing])

    # ---- which devices keep which variables

    def stored_bytes(self, program: Program, device: str) -> int:
        """Returns the bytes of the variables, optimizer slots and gradient accumulators on a device."""
        placed = self.arrangement.storage_devices
        return self.passes.stored_bytes(program, self.holdings, device, placed=placed)

    # ---- steps

    def step(self, built: Build, kind: StepKind) -> BuiltStep:
        """Returns a step, made once, until `leave` forgets it."""
        if kind not in built.steps:
            built.steps[kind] = self._make_step(built, kind)
        return built.steps[kind]

    @without_collection
    def _make_step(self, built: Build, kind: StepKind) -> BuiltStep:
        complete, placements = None, dict[int, OpPlacement]()
        if self.placer is not None:
            placed = built.placed.pop(kind, None) or self._place(self.placer, built, kind, self.arrangement)
            program, placements = placed.program, dict(placed.placements)
        else:
            complete = self._complete(built, kind, self.arrangement)
            program, _ = complete
        if kind.carries and built.flush is None:
            built.flush = self._flush(built, *(complete or self._complete(built, kind, self.arrangement)))
        name = f"{built.prefix}{kind.samples}" + "".join(f"_{told}" for told in kind._fields[1:] if getattr(kind, told))
        return BuiltStep(name, program.own_step, program.graph, step_nodes(program), placements)

    def _flush(self, built: Build, program: Program, passes: Sequence[Pass]) -> Flush:
        """Returns the updates that a complete step carries over, which these passes have made."""
        update = next(item for item in passes if isinstance(item, Update))
        graph, node = flush(update, program, collective_keys())
        if self.placer is not None:
            graph = self.placer.place_flush(graph, node, program, self.arrangement.storage_devices, [self._timing])
        name = f"{built.prefix}flush"
        return Flush(name, graph, f"{name}/{node}")

    @property
    def num_steps(self) -> int:
        """Number of prepared steps."""
        return sum(len(built.steps) for built in self.builds.values())

    def leave(self, names: Collection[str]) -> None:
        """Forgets all steps but the named ones; they are made again when they are needed."""
        for built in self.builds.values():
            built.steps = {kind: step for kind, step in built.steps.items() if step.name in names}

    def _complete(self, built: Build, kind: StepKind, arrangement: Arrangement) -> tuple[Program, list[Pass]]:
        """Returns a complete step of stage functions, and the passes that made it."""
        keys = collective_keys(sum_keys(built.program, self.passes.layout(kind.samples)))
        return complete_step(self.passes, built, kind, arrangement, self.holdings, keys, self._timing.of_passes)

    # ---- looking inside

    @property
    def placements(self) -> Mapping[int, OpPlacement]:
        """Stage -> placement of the operators in the largest training step; empty as long as there is none."""
        by_samples = {
            kind.samples: step.placements
            for built in self.builds.values()
            if built.mode is Mode.TRAIN
            for kind, step in built.steps.items()
        }
        return by_samples[max(by_samples)] if by_samples else {}

    @property
    def sources(self) -> list[StepSource]:
        """The sources of the steps prepared so far, for each mode and structure of batches."""
        return [
            StepSource(built, training, max(built.steps, default=None), self.arrangement, self.holdings)
            for (_, _, training), built in self.builds.items()
        ]


# ---- without a session: the devices needn't exist


def with_compiler(plan: Plan, model: keras.Model, cluster: Cluster) -> Plan:
    """Returns a plan that compiles stages where Keras compiles models by default: on GPUs, if XLA can."""
    decided = plan.jit_compile is not None or plan.places_operators
    if decided or not cluster.all_gpus(itertools.chain(*plan.devices)):
        return plan
    return dataclasses.replace(plan, jit_compile=model_supports_jit(model))


def planned_step(
    model: keras.Model, plan: Plan, cluster: Cluster, spec: BatchSpec, operator_costs: OperatorCosts | None = None
) -> Program:
    """Returns the training step of a compiled model for full batches; no step is run.

    Args:
        model: the model.
        plan: stages, devices and schedule.
        cluster: the devices, or a description of them.
        spec: structure of the batches.
        operator_costs: costs of single operators, if the plan places them; None estimates them.
    """
    plan = with_compiler(plan, model, cluster)
    passes, table = StepPasses(plan, cluster), VariableTable(model)
    build(model, table, spec)
    captured = capture(model, table, Mode.TRAIN, spec, gpus=passes.gpus)
    program = run_passes(captured, passes.stage_passes(Mode.TRAIN, "train_", uncut=spec.uncut))
    source = training_source(model, passes, table, spec, program)
    kind = full_step(source, plan)
    complete, _ = complete_step(passes, source.built, kind, source.arrangement, source.holdings)
    placer = passes.placer(operator_costs)
    return complete if placer is None else placer.place(complete, source.built.input_shapes(kind), {}).program


def training_source(
    model: keras.Model,
    passes: StepPasses,
    table: VariableTable,
    spec: BatchSpec,
    program: Program,
    prefix: str = "train_",
) -> StepSource:
    """Returns the parts of training steps, from a program with stage functions whose names begin with ``prefix``."""
    updates = passes.updates(model, table, program)
    arrangement = Arrangement().extended(program, updates)
    built = Build(Mode.TRAIN, spec, program, updates, prefix, carried=passes.carried(updates))
    return StepSource(built, True, None, arrangement, arrangement.holdings(table, passes.devices))


def full_step(source: StepSource, plan: Plan) -> StepKind:
    """Returns the kind of a step between two others, for a full batch."""
    carries = bool(source.built.carried)
    return StepKind(source.built.spec.parts(plan.global_batch_size), carries, carries)


def complete_step(
    passes: StepPasses,
    built: Build,
    kind: StepKind,
    arrangement: Arrangement,
    holdings: Sequence[Holding],
    first_key: int = 1,
    instruments: Callable[[Sequence[Pass], int], Sequence[Instrument]] = lambda *_: (),
) -> tuple[Program, list[Pass]]:
    """Returns a step after all passes but placement of single operators, and the passes that made it.

    Args:
        passes: the passes of the plan.
        built: the stage functions.
        kind: the kind of step.
        arrangement: the stages that keep each variable.
        holdings: what devices keep.
        first_key: the first of the collective keys.
        instruments: passes and the first one's number -> what watches them.
    """
    schedule = passes.schedule(built, passes.layout(kind.samples), holdings)
    chosen = passes.step_passes(built, kind, schedule, arrangement.owners, first_key, in_shards=arrangement.in_shards)
    first = passes.pipeline.number(chosen[0])
    watching = instruments(chosen, first)
    return run_passes(built.program, chosen, first=first, instruments=watching, complete=True), chosen
