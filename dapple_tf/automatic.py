"""Planning a model for the devices that will train it: measures links and layers, then searches."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import keras

from dapple_tf.common.keras_private import tensorflow_variable
from dapple_tf.common.text import gib
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_values import integer
from dapple_tf.describe.profile import Profile
from dapple_tf.frontend.capture import check_model
from dapple_tf.frontend.initialization import initial_of
from dapple_tf.frontend.optimizer_checks import check_optimizer, needs_all_gradients
from dapple_tf.measuring.device_speeds import measure_speeds
from dapple_tf.measuring.example_batch import EXAMPLES, ExampleBatch
from dapple_tf.measuring.links import measure_links
from dapple_tf.measuring.measured_steps import fastest_plan, measure_capacity
from dapple_tf.measuring.profiler import profile
from dapple_tf.measuring.turns import TimeBudget
from dapple_tf.planning.plan_request import WITH_ALL_GRADIENTS, PlanRequest
from dapple_tf.planning.planner import find, rivals
from dapple_tf.simulation.cost import CostModel

logger = logging.getLogger(__name__)

PROFILE_SECONDS = 20.0
"""The default time for a profile in seconds: see `dapple_tf.profile`."""
_FEW_BYTES = 2**24
"""Bytes of a model's values on a GPU of which nobody need be warned: counters, seeds, small models."""
_ANY_PROFILE = Profile("any", "none", (1,), (LayerProfile("layer", Cost(), Cost()),), ())


class Planned(NamedTuple):
    """A plan, with its profile and cluster.

    Attributes:
        plan: the plan.
        profile: the model's profile.
        cluster: the devices and links.
    """

    plan: Plan
    profile: Profile
    cluster: Cluster


def plan_model(
    model: keras.Model,
    cluster: Cluster,
    global_batch_size: int,
    *,
    profiled: Profile | None = None,
    by_trial: bool = False,
    **options: Any,
) -> Planned:
    """Profiles a compiled model on a real cluster and plans it.

    Some things that plans differ by aren't known before they run, such as what sending costs the processors that
    compute; with ``by_trial`` the best plan, data parallelism and one device train some steps.

    Args:
        model: a built and compiled Keras model.
        cluster: real devices; where links are unknown, they and the devices' slowdown of each other are measured; where
            devices are of several classes and all of speed 1, their speeds.
        global_batch_size: samples in one step.
        profiled: a profile to use instead of measuring.
        by_trial: whether the best plan, data parallelism and one device are tried on the devices, and the fastest one
            is taken: see `rivals`.
        options: as for :func:`dapple_tf.plan`; ``x``, ``y`` and ``length`` as
            for :func:`dapple_tf.profile`, and ``profile_seconds``, its ``budget``: 20 s by default, None to measure
            layer by layer in any case.

    Raises:
        CaptureError: the model can't be captured.
        ProfileError: inputs or labels can't be guessed; give ``x`` and ``y``.
        PlanError: a choice doesn't exist, or nothing fits.
    """
    examples = {name: options.pop(name) for name in EXAMPLES if name in options}
    budget = options.pop("profile_seconds", PROFILE_SECONDS)
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0):
        raise PlanError(f"profile_seconds is {budget!r}; give seconds above 0, or None to measure layer by layer")
    # Reports mistakes before minutes of measuring.
    PlanRequest(_ANY_PROFILE if profiled is None else profiled, cluster, global_batch_size, **options)
    global_batch_size = integer("global_batch_size", global_batch_size)
    if by_trial:
        check_model(model, training=True)
        examples = {"x": ExampleBatch.of(model, **examples)}  # for all measurements
    profiled, cluster = measured(model, cluster, global_batch_size, profiled, budget=budget, **examples)
    check_optimizer(model.optimizer, model.trainable_variables)  # It makes the slots, which count below.
    request = PlanRequest(profiled, beside_values(model, cluster), global_batch_size, **options)
    if needs_all_gradients(model.optimizer):  # Its updates can't be left to the next step.
        request = dataclasses.replace(request, only=request.features & WITH_ALL_GRADIENTS)
    if by_trial:
        plans = rivals(request) or [find(request)]  # It says why nothing fits.
        plan = fastest_plan(model, request.cluster, plans, ExampleBatch.of(model, **examples))
    else:
        plan = find(request)
    logger.info("%s", plan)
    return Planned(plan, profiled, cluster)


def beside_values(model: keras.Model, cluster: Cluster) -> Cluster:
    """Returns a cluster with GPU memory less the model's own values.

    Warns once of GPUs that keep many.
    """
    names = {device.name for device in cluster.devices if device.type == "GPU"}
    sizes: collections.Counter[str] = collections.Counter()
    optimizer = getattr(model, "optimizer", None)
    for variable in [*model.variables, *(optimizer.variables if optimizer else ())] if names else ():
        if initial_of(variable) is None and (held := tensorflow_variable(variable)).device in names:
            sizes[held.device] += held.shape.num_elements() * held.dtype.size
    for name, size in sizes.items():
        if size > _FEW_BYTES:
            _warn_once(
                f"model {model.name!r} keeps {gib(size)} of values on {name.rpartition('device:')[2]}, beside those "
                f'that steps use there: build it under tf.device("CPU:0"), or, where this machine\'s memory is too '
                f"small, dapple_tf.deferred_init()"
            )
    devices = tuple(
        device
        if device.memory_bytes is None
        else dataclasses.replace(device, memory_bytes=max(1, device.memory_bytes - sizes[device.name]))
        for device in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices)


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def measured(
    model: keras.Model,
    cluster: Cluster,
    global_batch_size: int,
    profiled: Profile | None = None,
    *,
    budget: float | None = PROFILE_SECONDS,
    **examples: Any,
) -> tuple[Profile, Cluster]:
    """Measures a model's profile on a real cluster, the cluster's links, and the speeds of unlike devices.

    Args:
        model: a built and compiled Keras model.
        cluster: real devices; known links aren't measured.
        global_batch_size: samples in one step, which determine the sizes of the profiled slices.
        profiled: a profile to use instead of measuring.
        budget: seconds for the profile, as for :func:`dapple_tf.profile`.
        examples: ``x``, ``y``, ``sample_weight`` and ``length`` as for :func:`dapple_tf.profile`.

    Raises:
        CaptureError: the model can't be captured.
        ProfileError: inputs or labels can't be guessed; give ``x`` and ``y``.
    """
    unknown = cluster.real and cluster.num_devices > 1 and cluster.intra_bandwidth is None
    unlike = cluster.real and _unlike(cluster)
    if unknown or unlike or profiled is None:
        check_model(model, training=True)
        examples = {"x": ExampleBatch.of(model, **examples)}
    by_model = unknown
    if profiled is None:
        time_budget = TimeBudget(budget, afterwards=("shared cores",) if unknown else ())
        sizes = slice_sizes(global_batch_size, cluster.num_devices)
        profiled = profile(model, sizes, cluster=cluster, budget=time_budget, **examples)
        by_model = unknown and not profiled.estimated and time_budget.allows("shared cores")
    if unlike:
        samples = profiled.batch_sizes[len(profiled.batch_sizes) // 2]
        names = cluster.device_names
        reference = names.index(profiled.device) if profiled.device in names else 0
        timed = model if _fits_everywhere(profiled, cluster, samples) else None
        cluster = measure_speeds(cluster, timed, samples=samples, reference=reference, **examples)
    if unknown:
        # Matrix products measure the devices' slowdown of each other if steps of the model take too long.
        cluster = measure_links(cluster, capacity=not by_model)
    if by_model:
        cluster = measure_capacity(model, cluster, profiled, **examples)
    return profiled, cluster


def _unlike(cluster: Cluster) -> bool:
    """Returns whether a cluster has several classes of devices, of which nobody has told or measured the speeds."""
    told = any(device.speed != 1.0 or device.speed_spread for device in cluster.devices)
    return len(cluster.device_classes) > 1 and not told


def _fits_everywhere(profiled: Profile, cluster: Cluster, samples: int) -> bool:
    """Returns whether a device of each class has the memory for two slices of the whole model."""
    for members in cluster.device_classes:
        plan = Plan.data_parallel(members[:1], 2 * samples, 2)
        if min(CostModel(plan, profiled, cluster).holds or (2,)) < 2:
            logger.info("device %d hasn't the memory for the model: matrices measure the speed of devices", members[0])
            return False
    return True


def slice_sizes(global_batch_size: int, devices: int) -> tuple[int, ...]:
    """Returns likely slice sizes of plans: from several micro-batches on all devices to few micro-batches on one."""
    sizes = (global_batch_size // (4 * devices), global_batch_size // devices, global_batch_size // 2)
    return tuple(sorted({max(1, size) for size in sizes}))
