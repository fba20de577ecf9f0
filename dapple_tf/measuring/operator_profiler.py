"""Measures the times of single operators of a model's training step: FD-DPS, definition 3."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import keras

from dapple_tf.common.progress import Progress
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.execution.builds import StepKind
from dapple_tf.execution.elastic import Log
from dapple_tf.execution.engine import Engine
from dapple_tf.frontend.capture import Mode, check_model
from dapple_tf.frontend.metrics import RunningMetrics
from dapple_tf.frontend.optimizer_checks import check_optimizer
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.links import measure_links
from dapple_tf.measuring.measured_operators import node_times
from dapple_tf.measuring.profiler import kept_metrics
from dapple_tf.operators.build_op_graph import operator_signatures
from dapple_tf.operators.op_costs import OperatorCosts, device_kind
from graph_passes.ir.batching import Interval

logger = logging.getLogger(__name__)

_WARM_UP = 2
"""Number of steps that aren't measured: the first ones allocate, and fill caches."""
_STEPS = 5


def measured_operators(
    model: keras.Model, cluster: Cluster, plan: Plan, costs: OperatorCosts | None = None, **examples: Any
) -> tuple[OperatorCosts, Cluster]:
    """Returns the operators' costs on a real cluster, and the cluster with its links.

    Args:
        model: a built and compiled Keras model.
        cluster: real devices; known links aren't measured.
        plan: a plan that places operators.
        costs: operators' costs to use instead of measuring.
        examples: ``x``, ``y``, ``sample_weight`` and ``length`` as for `profile_operators`.

    Raises:
        CaptureError: the model can't be captured.
        ProfileError: inputs or labels can't be guessed; give ``x`` and ``y``.
        PlanError: the cluster lacks a device of the plan, or the model doesn't fit the devices' memory.
    """
    plan.validate_on(cluster)
    if cluster.real and cluster.num_devices > 1 and cluster.intra_bandwidth is None:
        cluster = measure_links(cluster, capacity=False)
    if costs is None:
        costs = profile_operators(model, cluster, plan, **examples)
    return costs, cluster


def profile_operators(
    model: keras.Model,
    cluster: Cluster,
    plan: Plan,
    *,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    length: int | None = None,
    steps: int = _STEPS,
    costs: OperatorCosts | None = None,
) -> OperatorCosts:
    """Measures the operators of a model's training step on each kind of device that a plan places them on.

    A step runs with everything on one device of each kind; if the model is too large for that, on all devices of
    the plan. The model and its optimizer keep their values: a copy on the device is trained.

    Args:
        model: a built and compiled Keras model.
        cluster: real devices.
        plan: a plan that places operators; its largest slices are measured.
        x: example inputs, any number of samples. Needed for a model that doesn't declare its inputs.
        y: example labels; drawn for the loss by default.
        sample_weight: example weights; none by default.
        length: length of axes that the model leaves open, if x isn't given; see :func:`dapple_tf.profile`.
        steps: number of steps to average.
        costs: costs to add to; None begins with estimates only.

    Raises:
        ProfileError: the cluster has no real devices, or inputs or labels can't be guessed; give ``x`` and ``y``.
        CaptureError: the model isn't built or compiled, or can't be captured.
        PlanError: the plan doesn't place operators or doesn't fit the cluster, or the model not the devices' memory.
    """
    Cluster.check("cluster", cluster)
    Plan.check("plan", plan)
    if not cluster.real:
        raise ProfileError("this cluster is a description without real devices: it can be planned for, not measured")
    if not plan.places_operators:
        raise PlanError(
            "this plan runs its stages as a whole: measure operators for Plan.by_operators(...) or "
            "plan.with_placed_operators()"
        )
    plan.validate_on(cluster)
    check_model(model, training=True)
    check_optimizer(model.optimizer, model.trainable_variables)
    measured = OperatorCosts() if costs is None else costs
    example = ExampleBatch.of(model, x, y, sample_weight, length=length)
    micro_batch = Interval(0, -(-plan.global_batch_size // plan.micro_batches))
    samples = max(part.size for stage in range(plan.num_stages) for part in plan.slices(stage, micro_batch))
    chosen = {
        (device_kind(cluster.device_names[device]), cluster.devices[device].speed): device
        for devices in reversed(plan.working_devices)
        for device in reversed(devices)
    }
    every = [device for groups in plan.groups for device in groups[0]]
    bar = Progress("measuring operators", len(chosen) * (steps + _WARM_UP))
    with example.told(model), kept_metrics(model), bar:
        for device in chosen.values():
            try:
                _measure(model, cluster, [device], samples, example, measured, steps, bar)
            except PlanError as error:
                logger.info("not measured on device %d alone: %s", device, error)
                _measure(model, cluster, every, samples, example, measured, steps, bar)
                break
    logger.info("measured %d kinds of operators of model %r", measured.count, model.name)
    return measured


def _measure(
    model: keras.Model,
    cluster: Cluster,
    devices: list[int],
    samples: int,
    example: ExampleBatch,
    costs: OperatorCosts,
    steps: int,
    bar: Progress,
) -> None:
    plan = Plan.by_operators(devices, samples)
    arrays = example.batch(samples)
    with contextlib.closing(Engine(model, cluster, plan, Log(FaultPolicy()), costs)) as engine:
        engine.builder.notes.quiet = True
        built = engine.prepare(Mode.TRAIN, example.spec)
        step = built.placed[StepKind(samples)]
        signatures = operator_signatures(step.flat.program.graph, step.flat.shapes)
        metrics = RunningMetrics(model, engine.table).feeds()
        traces = []
        for number in range(_WARM_UP + steps):
            bar.step("warming up" if number < _WARM_UP else "measuring")
            traced = engine.run(Mode.TRAIN, example.spec, arrays, metrics=metrics, trace=True).traced
            assert traced is not None
            traces.append(traced)
        stats = [traced.stats for traced in traces[_WARM_UP:]]
        speeds = {cluster.device_names[device]: cluster.devices[device].speed for device in devices}
        for name, (device, seconds, times) in node_times(stats, signatures, traces[0].prefix).items():
            costs.add(signatures[name], device_kind(device), seconds * speeds.get(device, 1.0), times=times)
