"""Training steps as a plan has them, made without a session: the devices needn't exist."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import keras

from dapple_tf.common.keras_private import model_supports_jit
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.execution.builds import Build, StepKind, StepSource
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.variables.device_values import parameters_in_shards
from dapple_tf.variables.parameter_groups import holdings, optimizer_variables, readers_of, stored_in_shards
from graph_passes.ir.program import Program
from graph_passes.pass_manager import Instrument, run_passes


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
    complete = complete_step(passes, source, kind)
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
    updates, owners = passes.updates(model, table, program), readers_of(program)
    variables, in_shards = optimizer_variables(updates), stored_in_shards(updates)
    held = holdings(table, owners, variables, passes.devices, in_shards=in_shards)
    built = Build(Mode.TRAIN, spec, program, updates, prefix, carried=passes.carried(updates))
    return StepSource(built, True, None, owners, held)


def full_step(source: StepSource, plan: Plan) -> StepKind:
    """Returns the kind of a step between two others, for a full batch."""
    carries = bool(source.built.carried)
    return StepKind(source.built.spec.parts(plan.global_batch_size), carries, carries)


def complete_step(
    passes: StepPasses, source: StepSource, kind: StepKind, instruments: Sequence[Instrument] = ()
) -> Program:
    """Returns a step after all passes, except placement of single operators."""
    built = source.built
    schedule = passes.schedule(built, passes.layout(kind.samples), source.holdings)
    in_shards = parameters_in_shards(source.holdings)
    chosen = passes.step_passes(built, kind, schedule, source.owners, in_shards=in_shards)
    first = passes.pipeline.number(chosen[0])
    return run_passes(built.program, chosen, first=first, instruments=instruments, complete=True)
