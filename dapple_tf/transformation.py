"""``transform``: from a compiled Keras model to a pipelined one, with a plan or by finding one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras

from dapple_tf.automatic import beside_values, plan_model
from dapple_tf.clusters.membership import wait_for_workers
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.faults import FaultPolicy
from dapple_tf.describe.plan import FD_DPS, Plan
from dapple_tf.describe.plan_values import integer
from dapple_tf.describe.profile import Profile
from dapple_tf.errors import names_checked
from dapple_tf.execution.builds import PREPARED_STEPS
from dapple_tf.execution.step_builder import with_compiler
from dapple_tf.front.argument_checks import check_combination, check_passes, check_profile
from dapple_tf.frontend.capture import build_from, check_model
from dapple_tf.measuring.example_batch import EXAMPLES
from dapple_tf.measuring.operator_profiler import measured_operators
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.planning.planner import plan as find_plan
from dapple_tf.trainer import PipelinedModel
from graph_passes.pass_manager import After, Before


@names_checked(*inspect.signature(find_plan).parameters, *EXAMPLES, "profile_seconds")
def transform(
    model: keras.Model,
    cluster: Cluster,
    plan: Plan | None = None,
    *,
    global_batch_size: int | None = None,
    profile: Profile | None = None,
    placement: str | None = None,
    operator_costs: OperatorCosts | None = None,
    by_trial: bool = False,
    on_non_finite_loss: str = "continue",
    faults: FaultPolicy | None = None,
    passes: Sequence[After | Before] = (),
    prepared_steps: int = PREPARED_STEPS,
    **planning: Any,
) -> PipelinedModel:
    """Makes a pipelined, data-parallel trainer of a compiled Keras model.

    Without a plan, the model is profiled on the cluster's devices and planned first; ``print(pipelined.plan)`` shows
    the plan and the reasons for it, ``pipelined.prediction`` how well the prediction holds once steps have run.

    Args:
        model: a compiled Keras model, which is built, or gets its variables from ``x`` here; it isn't modified
            otherwise, and gets the trained values by ``sync``.
        cluster: the devices.
        plan: stages, replicas, micro-batches and schedule; None finds one.
        global_batch_size: samples in one step, if there is no plan.
        profile: the cost of the model's layers, to plan from or to compare a given plan with; None measures it if a
            plan has to be found.
        placement: ``fd_dps`` places single operators by dynamic critical paths, and splits heavy ones (Zeng et al.,
            Mathematics 2022, 10, 4788): those of the whole model over all devices of the cluster; with a plan, those of
            each stage over the devices that the plan has for its replicas. For models with parallel branches rather
            than a chain of layers. None runs stages as a whole, unless the plan has ``operator_devices``
            (docs/operators.md).
        operator_costs: the cost of single operators, if they are placed; None measures it.
        by_trial: if there is no plan, the best plan, data parallelism and one device train some steps on the devices,
            with values of their own, and the fastest one is taken. What no prediction knows counts then, such as what
            sending costs processors that compute, too.
        on_non_finite_loss: ``continue`` goes on when a loss is NaN or infinite, as Keras does: TerminateOnNaN may end
            ``fit``, and LossScaleOptimizer leaves such steps out. ``stop`` raises NonFiniteLossError at once, and the
            model has the values of its last ``sync``.
        faults: what to do when a worker of a cluster is lost, or isn't there yet; None raises WorkerLostError.
        passes: your own passes, each ``After(name, item)`` or ``Before(name, item)`` one of the pipeline's: they are
            verified, timed and dumped like the others (docs/extending.md).
        prepared_steps: number of steps that stay prepared: one for each batch size in training, evaluation and
            prediction, and some more (traced ones, say). When another one is needed, those that ran least often are
            left out until the next time, which bounds memory and the time that a new size takes; the devices have all
            values twice meanwhile. Raise it for data of more sizes that come again and again.
        planning: the choices of the search, as for :func:`dapple_tf.plan`: all policies and features by default,
            updates during the next step's forward only where the optimizer allows that; ``only`` narrows it. And
            example data (``x``, ``y``, ``sample_weight``, ``length``), as for :func:`dapple_tf.profile`; with a plan
            only ``x`` has a use, for a model that isn't built.
            ``profile_seconds`` is its ``budget``: 20 s by default, in which operators of large models are measured
            instead of layers; more is worth it for runs of hours; None measures layer by layer.

    Raises:
        CaptureError: the model isn't built or compiled, or has a setting that slices don't allow. A model that can't be
            traced is refused by the search for a plan, or with the first batch.
        ClusterError: a worker isn't there.
        PlanError: the plan doesn't fit the cluster, or none fits its memory.
        ProfileError: the profile is of another model, or the model's inputs or labels can't be guessed for measuring;
            give ``x`` and ``y``.
        TypeError: an argument has the wrong class, is unknown, or means nothing beside the others.
        PassError: a cut names no layer or leaves a stage empty, or a pass is placed beside one that doesn't exist.
    """
    Cluster.check("cluster", cluster)
    if plan is not None:
        Plan.check("plan", plan)
    if profile is not None:
        Profile.check("profile", profile)
    if operator_costs is not None:
        OperatorCosts.check("operator_costs", operator_costs)
    if not isinstance(faults, FaultPolicy | None):
        raise TypeError(f"faults is {faults!r:.60}; give a dapple_tf.FaultPolicy")
    check_profile(profile, model)
    check_passes(passes)
    examples = {name: planning.pop(name) for name in EXAMPLES if name in planning}
    check_combination(cluster, plan, global_batch_size, placement, operator_costs, by_trial, planning)
    build_from(model, examples.get("x"))
    wait_for_workers(cluster, faults or FaultPolicy())
    if plan is None and placement is None:
        check_model(model, training=True)
        batch = integer("global_batch_size", global_batch_size)
        options = {**examples, **planning}
        plan, profile, cluster = plan_model(model, cluster, batch, profiled=profile, by_trial=by_trial, **options)
    else:
        beside_values(model, cluster)
        plan = plan or Plan.by_operators(cluster.num_devices, integer("global_batch_size", global_batch_size))
        if placement == FD_DPS and not plan.places_operators:
            plan = plan.with_placed_operators()
    plan = with_compiler(plan, model, cluster)
    if plan.places_operators:
        operator_costs, cluster = measured_operators(model, cluster, plan, operator_costs, **examples)
    return PipelinedModel(
        model,
        cluster,
        plan,
        profile,
        on_non_finite_loss=on_non_finite_loss,
        faults=faults,
        operator_costs=operator_costs,
        passes=passes,
        prepared_steps=prepared_steps,
    )
