"""Complete step programs for plans of many shapes, made by the passes alone: no session, no Keras optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
from programs import HOST, attention, mlp, owners, sgd_updates, stateful_layers, tied_layers

import dapple_tf as dapple
from dapple_tf.execution.builds import Build
from dapple_tf.execution.step_builder import planned_step
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.variables.parameter_groups import group_updates
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.tasks import reduction_order
from graph_passes.pass_manager import Pass, run_passes
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.assign_stages import AssignStages
from graph_passes.passes.build_backward import BuildBackward
from graph_passes.passes.build_forward import BuildForward
from graph_passes.passes.partition import Partition, StageForm
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.schedule import OrderTasks
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.update import Update


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and the plan by which it becomes a step.

    Attributes:
        model: one of `MODELS`.
        plan: the plan.
        samples: of the batch; None for the plan's.
        head: whether it begins with updates that a step before has left.
    """

    model: str
    plan: dapple.Plan
    samples: int | None = None
    head: bool = False

    def __str__(self) -> str:
        lists = "_".join("".join(map(str, devices)) for devices in self.plan.devices)
        return f"{self.model}-{self.plan.schedule}-{lists}-M{self.plan.micro_batches}"


@functools.cache
def _four_layers(mode: Mode = Mode.TRAIN) -> Program:
    return mlp(4, mode)


MODELS = {
    "mlp": (_four_layers, ("dense_0", "dense_1", "dense_2")),
    "test": (lambda: _four_layers(Mode.TEST), ("dense_0", "dense_1", "dense_2")),
    "predict": (lambda: _four_layers(Mode.PREDICT), ("dense_0", "dense_1", "dense_2")),
    "tied": (lambda: tied_layers(4), ("layer_0", "layer_1", "layer_2")),
    "stateful": (stateful_layers, ("a",)),
    "attention": (attention, ("embed", "attention", "residual")),
}
"""Name -> the program, and where it can be cut."""


@functools.cache
def _staged(model: str, cuts: tuple[str, ...], split: frozenset[int]) -> Program:
    program = MODELS[model][0]()
    training = model not in ("test", "predict")
    backward: list[Pass] = [BuildBackward()] if training else []
    forward = BuildForward(want_outputs=model == "predict")
    forms = [StageForm(split=stage in split) for stage in range(len(cuts) + 1)]
    return run_passes(program, [AssignStages(cuts), forward, *backward, Partition(forms, training=training)])


def device_names(count: int) -> tuple[str, ...]:
    """Names of CPU devices."""
    return tuple(HOST[:-1] + str(index) for index in range(count))


def names_for(plan: dapple.Plan) -> tuple[str, ...]:
    """Names of as many devices as a plan has."""
    used = [device for devices in plan.devices for device in devices]
    return device_names(1 + max(used))


def complete(case: Case) -> Program:
    """The step's program after all passes."""
    plan, names = case.plan, names_for(case.plan)

    def named(devices: Sequence[Sequence[int]]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(names[device] for device in own) for own in devices)

    training = case.model not in ("test", "predict")
    program = _staged(case.model, plan.cuts, plan.split_backward_stages if training else frozenset())
    samples = case.samples or plan.global_batch_size
    layout = Layout(named(plan.devices), samples, plan.global_batch_size, plan.micro_batches)
    count = len(layout.micro_batch_intervals)
    schedule = plan.order_tasks(count, active=layout.active, forward_only=not training)
    kept = owners(program)
    passes: list[Pass] = [Replicate(layout, HOST, kept), SplitConcat()]
    if not training:
        return run_passes(program, [*passes, OrderTasks(schedule, names)], complete=True)
    updates = sgd_updates(program)
    keys = [update.stages for update in updates]
    order = reduction_order(keys, schedule, plan.devices)
    carried = [keys[index] for index in order[len(order) - plan.carried_updates :]]
    update = Update(
        updates,
        plan.bucket_bytes,
        wait_free=plan.wait_free,
        want_gradients=not carried,
        carried=tuple(carried),
        head=case.head,
    )
    passes.append(Accumulate(accumulated=plan.accumulates(count)))
    return run_passes(program, [*passes, OrderTasks(schedule, names), update], complete=True)


def plan(model: str, stages: int, devices: Any, micro_batches: int, batch: int, schedule: str, **options: Any) -> Any:
    """A plan that cuts a model into so many stages."""
    return dapple.Plan.manual(cuts_of(model, stages), devices, micro_batches, batch, schedule, **options)


def cuts_of(model: str, stages: int) -> tuple[str, ...]:
    """Where to cut a model into so many stages."""
    cuts = MODELS[model][1]
    return {1: (), 2: cuts[:1], 3: cuts[:2], 4: cuts}[stages]


def built_of_model(model: keras.Model, passes: StepPasses, table: VariableTable) -> Build:
    """The stage functions and updates of a compiled Keras model, with its own optimizer."""
    spec = ExampleBatch.of(model).spec
    build(model, table, spec)
    captured = capture(model, table, Mode.TRAIN, spec, gpus=passes.gpus)
    program = run_passes(captured, passes.stage_passes(Mode.TRAIN, "train_"))
    updates = group_updates(model, table, program)
    return Build(Mode.TRAIN, spec, program, updates, "train_", carried=passes.carried(updates))


def of_model(model: keras.Model, plan: dapple.Plan, cluster: dapple.Cluster) -> Program:
    """The training step of a compiled Keras model, with its own optimizer."""
    return planned_step(model, plan, cluster, ExampleBatch.of(model).spec)
