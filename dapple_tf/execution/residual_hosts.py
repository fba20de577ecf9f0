"""In which device's memory residuals wait for their backward tasks."""

from __future__ import annotations

import re

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from graph_passes.ir.kernels import host_of


def residual_hosts(plan: Plan, cluster: Cluster) -> dict[str, str]:
    """Maps each device of the stages that offload to the CPU of its worker in whose memory residuals wait.

    That is the worker's CPU 0; for logical CPU devices, which all have the host's memory, one that no stage uses,
    if there is one, so that allocations on it are apart.
    """
    used = {device for devices in (*plan.devices, *(plan.weight_devices or ())) for device in devices}
    hosts = {}
    for stage in plan.offloading_stages:
        for device in plan.devices[stage]:
            name = cluster.device_names[device]
            idle = [
                cluster.device_names[other]
                for other in cluster.devices_of_worker(cluster.worker_of(device))
                if other not in used and cluster.devices[other].type == "CPU"
            ]
            hosts[name] = idle[0] if idle else host_of(name)
    return hosts


def note_on_hosts(plan: Plan, cluster: Cluster) -> str:
    """Returns a note on devices of stages in whose memory residuals wait; empty if there are none."""
    names = [cluster.device_names[device] for devices in plan.devices for device in devices]
    shared = sorted({host for host in residual_hosts(plan, cluster).values() if host in names})
    if not shared:
        return ""
    return (
        f"residuals wait in the memory of {', '.join(shared)}, which runs tasks, too: all CPU devices of a server have "
        f"the host's memory. With a device that the plan leaves out they would wait there, apart from all tasks"
    )


def more_page_locked(plan: Plan, error: str) -> str:
    """Returns the way out of an error where page-locked memory of hosts is full; empty for other errors."""
    if not plan.offloading_stages or not re.search(r"by allocator \w*host", error):
        return ""
    stages = ", ".join(map(str, plan.offloading_stages))
    return (
        f"; residuals of stages {stages} wait in the page-locked memory of their hosts, which is full: set "
        f"TF_GPU_HOST_MEM_LIMIT_IN_MB (65536 by default) for each process with GPUs, or offload fewer stages"
    )
