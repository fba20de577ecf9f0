"""Plans for the devices that remain when workers are lost, and for more of them when workers come back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from dapple_tf.common.units import ms_text
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.describe.stage_plan import StagePlan
from dapple_tf.errors import DappleError
from dapple_tf.planning.moves import leanest
from dapple_tf.planning.plan_request import LEAST_GAIN, WITH_ALL_GRADIENTS
from dapple_tf.planning.planner import plan_anew
from dapple_tf.schedules.policy import Policy
from dapple_tf.simulation.simulator import simulate


def without_servers(cluster: Cluster, lost: Collection[int]) -> Cluster:
    """Returns the cluster of the remaining workers and their servers, renumbered.

    Args:
        cluster: the cluster before.
        lost: the lost workers.

    Raises:
        DappleError: no worker remains.
    """
    remaining = _remaining(cluster, lost)
    if not remaining:
        raise DappleError("no worker is left")
    left = list(dict.fromkeys(map(cluster.worker_of, remaining)))
    servers = list(dict.fromkeys(cluster.devices[index].server for index in remaining))
    devices = []
    for index in remaining:
        device, worker = cluster.devices[index], cluster.worker_of(index)
        name = device.name.replace(f"/task:{worker}/", f"/task:{left.index(worker)}/")
        devices.append(dataclasses.replace(device, name=name, server=servers.index(device.server)))
    return dataclasses.replace(
        cluster,
        devices=tuple(devices),
        servers=tuple(cluster.servers[server] for server in servers) if cluster.servers else (),
        addresses=tuple(cluster.addresses[worker] for worker in left),
    )


def _remaining(cluster: Cluster, lost: Collection[int]) -> list[int]:
    """Returns the devices of the workers that aren't lost."""
    return [device for device in range(cluster.num_devices) if cluster.worker_of(device) not in lost]


def shrink(plan: Plan, cluster: Cluster, lost: Collection[int]) -> Plan:
    """Returns the same plan on the remaining devices, as `without_servers` numbers them.

        3 stages on servers 0, 1+2, 3   without 1   0, 2, 3
                                        without 3   0, 1+2 with the last two stages

    A stage keeps its other replicas; one without any joins the stage before it, or, if it is the first, the one after.
    A replica that places its operators on several devices is kept if it loses none of them; if all lose some, the stage
    has one replica on what is left.
    Settings that need exactly the planned stages are dropped: weight gradients on devices of their own, carried
    updates, task times, warm-up, and a schedule that doesn't fit the new stages.

    Args:
        plan: a plan for ``cluster``.
        cluster: the cluster before.
        lost: the lost workers.

    Raises:
        DappleError: no device of the plan remains.
    """
    numbers = {device: new for new, device in enumerate(_remaining(cluster, lost))}
    groups = plan.groups
    left_of = [_groups_left(own, numbers) for own in groups]
    if not any(left_of):
        raise DappleError("none of the plan's devices is left")
    all_reduce = {stage.all_reduce for stage in plan.stages}
    common = all_reduce.pop() if len(all_reduce) == 1 else "flat"
    cuts: list[str | None] = []
    kept: list[StagePlan] = []
    modes: list[list[str]] = [[]]
    for number, (stage, replicas) in enumerate(zip(plan.stages, left_of, strict=True)):
        if kept and replicas:
            cuts.append(plan.cuts[number - 1])
            modes.append([])
        modes[-1].append(stage.recompute)
        if not replicas:
            continue  # Without a cut before the next stage that is kept, it joins the one before, if there is one.
        kept.append(stage.of_replicas(replicas))
    stages = tuple(
        dataclasses.replace(stage, cut=cut, recompute=leanest(own), all_reduce=common)
        for stage, cut, own in zip(kept, [*cuts, None], modes, strict=True)
    )

    def made(schedule: str | Policy, reverse_first_k: int) -> Plan:
        return plan.with_stages(
            stages,
            schedule=schedule,
            warm_up=None,
            reverse_first_k=reverse_first_k,
            carried_updates=0,
            reduction_order="completion",
        )

    try:
        return made(plan.schedule, min(plan.reverse_first_k, len(stages)))
    except PlanError:
        return made("dapple_a", 0)  # Some policies need stages that fit each other.


def _groups_left(groups: Sequence[Sequence[int]], numbers: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Returns replica -> its devices' new numbers, for replicas that lose none.

    If all lose some, the remaining devices are those of one replica.
    """
    whole = {
        replica: tuple(numbers[device] for device in group)
        for replica, group in enumerate(groups)
        if all(device in numbers for device in group)
    }
    left = tuple(numbers[device] for group in groups for device in group if device in numbers)
    return whole or ({0: left} if left else {})


# ---- deployments


class Deployment(NamedTuple):
    """A plan, and the cluster that it is for."""

    cluster: Cluster
    plan: Plan


class Growth(NamedTuple):
    """A deployment on more workers than at present.

    Attributes:
        deployment: the deployment.
        added: addresses of the workers that are taken in.
        present: simulated seconds of the present plan's step, infinite if it doesn't fit the devices' memory by the
            profile; None if they can't be predicted.
        latency: those of the deployment's.
    """

    deployment: Deployment
    added: tuple[str, ...]
    present: float | None = None
    latency: float | None = None

    @property
    def gain(self) -> str:
        """The gain, for messages."""
        if self.present is None or self.latency is None:
            return "the gain isn't predicted"
        if math.isinf(self.present):
            return "by the profile, the present plan doesn't fit the devices' memory"
        return f"a step is predicted to take {ms_text(self.latency)} ms instead of {ms_text(self.present)} ms"


@dataclasses.dataclass(frozen=True)
class Replanner:
    """Plans anew when workers are lost, and when they come back.

    Attributes:
        profile: costs of the model's layers; None shrinks plans.
        needs_all_gradients: whether the optimizer needs all gradients before its first update, so that no updates can
            be carried into the next step.
    """

    profile: Profile | None
    needs_all_gradients: bool = False

    def without(
        self, deployment: Deployment, lost: Collection[int], former: Mapping[tuple[str, ...], Deployment]
    ) -> Deployment:
        """Returns the deployment on the remaining servers.

        A plan that was in use on exactly these is taken again. Otherwise there is a new one if there is a profile. The
        plan is shrunk if there is none, if it places single operators, and if no new one fits in memory.

        Args:
            deployment: the deployment.
            lost: the workers that are lost.
            former: earlier deployments by their workers' addresses.

        Raises:
            DappleError: no server is left, or none of those that the plan uses.
        """
        cluster = without_servers(deployment.cluster, lost)
        known = former.get(cluster.addresses)
        if known is not None and not (known.plan.carried_updates and self.needs_all_gradients):
            return known
        plan = deployment.plan
        if self.profile is not None and not plan.places_operators:
            only = WITH_ALL_GRADIENTS if self.needs_all_gradients else None
            with contextlib.suppress(PlanError):
                return Deployment(cluster, plan_anew(plan, self.profile, cluster, only))
        return Deployment(cluster, shrink(plan, deployment.cluster, lost))

    def growth(
        self,
        present: Deployment,
        former: Mapping[tuple[str, ...], Deployment],
        there: Collection[str],
    ) -> Growth | None:
        """Returns a deployment on present and returned workers, or None without a gain.

        The plan is that of `without`. With a profile, the simulated step must be faster than the present one by
        `LEAST_GAIN`. Without one, and for plans that place single operators, more devices must work than at present.

        Args:
            present: the present deployment.
            former: earlier deployments by their workers' addresses, the first one on all workers.
            there: addresses of the workers that have come back.
        """
        full = next(iter(former.values()))
        present_addresses = set(present.cluster.addresses)
        usable = present_addresses | set(there)
        away = [task for task, address in enumerate(full.cluster.addresses) if address not in usable]
        added = tuple(own for own in full.cluster.addresses if own in usable and own not in present_addresses)
        if not added:
            return None
        try:
            larger = self.without(full, away, former)
        except DappleError:  # None of the devices of the plan for all workers is there.
            return None
        if self.profile is None or larger.plan.places_operators:
            return Growth(larger, added) if _num_working(larger.plan) > _num_working(present.plan) else None
        before, after = self._latency(present), self._latency(larger)
        return Growth(larger, added, before, after) if after < (1 - LEAST_GAIN) * before else None

    def _latency(self, deployment: Deployment) -> float:
        """Returns the simulated seconds of a step; infinite if it doesn't fit in memory by the profile."""
        assert self.profile is not None
        try:
            simulation = simulate(deployment.plan, self.profile, deployment.cluster)
        except PlanError:
            return math.inf
        return simulation.latency if simulation.fits else math.inf


def _num_working(plan: Plan) -> int:
    return len({device for replicas in plan.working_devices for device in replicas})
