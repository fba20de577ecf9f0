"""The number of micro-batches whose residuals fit into the devices' memory."""

from __future__ import annotations

from collections.abc import Callable

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.errors import DappleError
from dapple_tf.simulation.device_memory import DeviceNeed
from graph_passes.ir.program import Layout, Program, Stage


def limited_devices(plan: Plan, cluster: Cluster) -> dict[int, int]:
    """Returns device -> bytes of memory, for devices whose memory limits micro-batches."""
    if plan.places_operators:
        return {}  # A stage's memory is that of several devices, within which its operators are placed.
    devices = {device for replicas in plan.devices for device in replicas}
    limits = {device: cluster.devices[device].memory_bytes for device in sorted(devices)}
    return {device: limit for device, limit in limits.items() if limit is not None}


def residuals_held(
    plan: Plan, cluster: Cluster, program: Program, layout: Layout, stored_bytes: Callable[[str], int]
) -> tuple[int, ...] | None:
    """Returns D of each stage, the number of micro-batches whose residuals its devices hold; None without a limit.

    A device that runs several stages holds D micro-batches in each, or in all of them together if the policy limits
    them together (`Policy.shares_room`).

    Args:
        plan: the plan.
        cluster: the devices.
        program: a program with stage functions, whose bytes are counted if a device's memory is limited.
        layout: how the batch is cut.
        stored_bytes: name of a device -> bytes of variables, optimizer slots and gradients on it.

    Raises:
        DappleError: not even one micro-batch fits.
    """
    known = limited_devices(plan, cluster)
    if not known:
        return None
    count, shared = len(layout.micro_batch_intervals), plan.policy.shares_room
    first = layout.micro_batch_intervals[0]
    largest = [plan.largest_slices(stage, first) for stage in range(plan.num_stages)]
    held = [count * plan.num_stages if shared else count] * plan.num_stages
    for device, limit in known.items():
        stages = [stage for stage, replicas in enumerate(plan.devices) if device in replicas]
        samples = [largest[stage][plan.devices[stage].index(device)] for stage in stages]
        sizes = [_slice_bytes(program.stages[stage], own) for stage, own in zip(stages, samples, strict=True)]
        stored = stored_bytes(cluster.device_names[device])
        need = DeviceNeed(stored, sum(sizes), max(sizes), len(stages), max(samples))
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


def _slice_bytes(stage: Stage, samples: int) -> int:
    """Returns the bytes that a stage's device keeps of a slice until its last backward task."""
    return max(stage.residual_bytes.at(samples), stage.delayed_bytes.at(samples))
