"""Variants of a plan, a cluster and a profile, as `tools.simulate` and `tools.what_if` take them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import dapple_tf as dapple
from dapple_tf.describe.devices import LINKS, ReductionLinks


def changed(plan: dapple.Plan, **changes: Any) -> dapple.Plan:
    """Returns the plan with changed fields.

    Fields that no longer fit are reset: the report always, and with it the K of stages, which the planner has written
    for what micro-batches keep; other K if the schedule, the stages or the number of micro-batches change; a schedule's
    choices for weight gradients if the schedule or the stages change; replicas' shares if their devices change.

    Raises:
        PlanError: as `Plan`.
    """
    different = {name: value for name, value in changes.items() if plan.options[name] != value}
    if not different:
        return plan
    dropped: dict[str, Any] = {}
    if plan.report is not None or different.keys() & {"schedule", "cuts", "devices", "micro_batches"}:
        dropped["warm_up"] = None
    if different.keys() & {"cuts", "devices"}:
        dropped |= {"task_seconds": None, "reverse_first_k": 0, "carried_updates": 0}
        dropped |= {} if isinstance(plan.options["all_reduce"], str) else {"all_reduce": "flat"}
    if "devices" in different:
        dropped["shares"] = None
    return plan.with_options(**(dropped | different))


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Changes of a cluster. None keeps the cluster's value; a number replaces that of all servers.

    Attributes:
        intra_bandwidth: bytes/s between two devices in one server.
        inter_bandwidth: bytes/s between two servers.
        intra_latency: seconds.
        inter_latency: seconds.
        speed: factor by which every device computes faster.

    Raises:
        ClusterError: the speed isn't a number above 0.
    """

    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    intra_latency: float | None = None
    inter_latency: float | None = None
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise dapple.ClusterError(f"speed is {self.speed}; it must be above 0 and finite")

    def of(self, cluster: dapple.Cluster) -> dapple.Cluster:
        """Returns the cluster with these changes; measured all-reduce is dropped where links change.

        Raises:
            ClusterError: a number is out of range.
        """
        links = {name: getattr(self, name) for name in LINKS if getattr(self, name) is not None}
        if not links and self.speed == 1.0:
            return cluster
        changes: dict[str, Any] = dict(links)
        if links:
            changes |= {"reduce_bandwidth": None, "reduce_latency": None, "reductions": ReductionLinks()}
            changes["servers"] = tuple(
                dataclasses.replace(server, **dict.fromkeys(links)) for server in cluster.servers
            )
        changes["devices"] = tuple(
            dataclasses.replace(device, speed=device.speed * self.speed) for device in cluster.devices
        )
        return dataclasses.replace(cluster, **changes)
