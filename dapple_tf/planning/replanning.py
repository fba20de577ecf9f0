"""Plans for the devices that remain when workers are lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.errors import DappleError
from dapple_tf.schedules.policy import Policy


def without_servers(cluster: Cluster, lost: Collection[int]) -> Cluster:
    """Returns the cluster of the remaining servers, renumbered.

    Raises:
        DappleError: no server remains.
    """
    left = [server for server in range(cluster.num_servers) if server not in lost]
    if not left:
        raise DappleError("no worker is left")
    devices = []
    for number, server in enumerate(left):
        for index in cluster.devices_of(server):
            device = cluster.devices[index]
            name = device.name.replace(f"/task:{server}/", f"/task:{number}/")
            devices.append(dataclasses.replace(device, name=name, server=number))
    return dataclasses.replace(
        cluster,
        devices=tuple(devices),
        servers=tuple(cluster.servers[server] for server in left) if cluster.servers else (),
        addresses=tuple(cluster.addresses[server] for server in left),
    )


def shrink(plan: Plan, cluster: Cluster, lost: Collection[int]) -> Plan:
    """Returns the same plan on the remaining devices, as `without_servers` numbers them.

        3 stages on servers 0, 1+2, 3   without 1   0, 2, 3
                                        without 3   0, 1+2 with the last two stages

    A stage keeps its other replicas; one without any joins the stage before it, or, if it is the first, the one after.
    Settings that need exactly the planned stages are dropped: weight gradients on devices of their own, carried
    updates, task times, warm-up, and a schedule that doesn't fit the new stages.

    Args:
        plan: a plan for ``cluster``.
        cluster: the cluster before.
        lost: the lost servers.

    Raises:
        DappleError: no device of the plan remains.
    """
    left = [server for server in range(cluster.num_servers) if server not in lost]
    numbers = {device: new for new, device in enumerate(d for server in left for d in cluster.devices_of(server))}
    devices = [tuple(numbers[d] for d in replicas if d in numbers) for replicas in plan.working_devices]
    if not any(devices):
        raise DappleError("none of the plan's devices is left")
    cuts: list[str] = []
    kept: list[tuple[int, ...]] = []
    shares: list[tuple[int, ...]] = []
    for stage, replicas in enumerate(devices):
        if not replicas:
            continue  # Without a cut before the next stage that is kept, it joins the one before, if there is one.
        if kept:
            cuts.append(plan.cuts[stage - 1])
        kept.append(replicas)
        if plan.shares is not None:
            own = zip(plan.devices[stage], plan.shares[stage], strict=True)
            shares.append(tuple(share for device, share in own if device in numbers))

    all_reduce = plan.all_reduce if isinstance(plan.all_reduce, str) else "flat"
    placed = None if plan.operator_devices is None else tuple(kept)

    def made(schedule: str | Policy, reverse_first_k: int) -> Plan:
        return Plan.manual(
            cuts,
            kept if placed is None else [own[:1] for own in kept],
            plan.micro_batches,
            plan.global_batch_size,
            schedule,
            recompute=plan.recompute,
            jit_compile=plan.jit_compile,
            wait_free=plan.wait_free,
            reverse_first_k=reverse_first_k,
            bucket_bytes=plan.bucket_bytes,
            all_reduce=all_reduce,
            operator_devices=placed,
            shares=tuple(shares) or None,
        )

    try:
        return made(plan.schedule, min(plan.reverse_first_k, len(kept)))
    except PlanError:
        return made("dapple_a", 0)  # Some policies need stages that fit each other.
