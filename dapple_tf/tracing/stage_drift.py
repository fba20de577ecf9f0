"""Comparison of the times of stages and devices with their predictions."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
from collections.abc import Mapping

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.plan_reasons import shape
from dapple_tf.planning.plan_request import LEAST_GAIN
from dapple_tf.planning.planner import plan_anew
from dapple_tf.planning.shares import with_shares
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.simulation.simulator import run
from dapple_tf.tracing.step_profile import grouped, simulated_tasks
from graph_passes.ir.tasks import Task

logger = logging.getLogger(__name__)

TOLERANCE = 0.2
"""Relative difference from which on a stage is off its prediction."""
_SMALLEST = 0.5e-3
"""Seconds of a stage per micro-batch below which there is no warning: starting tasks is a good part of these, and
varies with the load of the machine."""
_MOST_DEVICES = 16
"""The most devices for which the planner searches while a model trains: one to four seconds."""


class StageDrift:
    """Compares measured steps with a simulated one, stage by stage, and warns.

    A stage's time is that of one micro-batch: the sum of the medians of its F and B, or F, Bx and Bw. Simulated times
    include the slowdown by other tasks on shared cores. A warning takes two steps in a row,
    since anything may slow down a single step. A stage is warned of again only after it
    has been near its prediction.

    If some replicas of a stage are off and others aren't, or the other way, it is their devices that are faster or
    slower than expected: each of these is warned of with the speed that was seen, and with the gain of a plan for these
    speeds. Devices that share cores are an exception: they slow each other down more or less than simulated, which
    neither a new profile nor another plan mends. Their stages are only logged, at level INFO.

    Attributes:
        predicted: stage -> predicted seconds.
        off: stages that have been warned of.
        suspected: stages that were off in the last step without a warning so far.
        off_devices: devices that have been warned of.
        suspected_devices: devices that were off in the last step without a warning so far.
    """

    def __init__(self, simulation: Simulation) -> None:
        tasks = simulated_tasks(simulation)
        self.predicted = stage_seconds(tasks)
        self.off: set[int] = set()
        self.suspected: set[int] = set()
        self.off_devices: set[int] = set()
        self.suspected_devices: set[int] = set()
        self._simulation = simulation
        self._tasks = tasks

    @property
    def suspects(self) -> bool:
        """Whether a stage or a device was off in the last step without a warning so far."""
        return bool(self.suspected or self.suspected_devices)

    def check(self, tasks: Mapping[Task, float]) -> list[str]:
        """Checks one measured step, and logs its warnings.

        Args:
            tasks: seconds of each task, corrected for tracing.

        Returns:
            The warnings.
        """
        warnings = []
        measured = stage_seconds(tasks)
        factors, uneven = self._slowness(tasks)
        off = {
            stage
            for stage, seconds in measured.items()
            if stage not in uneven and _is_off(seconds, self.predicted.get(stage, 0.0))
        }
        for stage in sorted(off & self.suspected):
            seconds, expected = measured[stage], self.predicted[stage]
            text = (
                f"stage {stage} takes {seconds * 1e3:.3g} ms for a micro-batch, {abs(seconds / expected - 1):.0%} "
                f"{'more' if seconds > expected else 'less'} than the {expected * 1e3:.3g} ms that were predicted: "
            )
            if self._shares_cores(stage):
                logger.info("%sits devices share cores", text)
                continue
            warnings.append(f"{text}profile the model again (dapple.profile(..., cache=False)) and make a new plan")
            logger.warning("%s", warnings[-1])
        for stage in sorted(self.off - off):
            logger.info("stage %d takes the time that was predicted again", stage)
        self.off = (self.off & off) | (off & self.suspected)
        self.suspected = off - self.off
        return warnings + self._check_devices(factors)

    def _shares_cores(self, stage: int) -> bool:
        """Returns whether devices of a stage share cores with others."""
        cluster = self._simulation.costs.cluster
        servers = {cluster.devices[device].server for device in self._simulation.costs.plan.working_devices[stage]}
        return any(map(cluster.shares_cores, servers))

    def _slowness(self, tasks: Mapping[Task, float]) -> tuple[dict[int, float], set[int]]:
        """Returns device -> factor by which it is slower than predicted, and the stages whose devices aren't so alike.

        There are the devices that are off, of these stages only.
        """
        factors: dict[int, list[float]] = {}
        uneven = set()
        ratios = _task_ratios(tasks, self._tasks)
        for stage, devices in enumerate(self._simulation.costs.plan.devices):
            own = {
                device: statistics.median(ratios[stage, replica])
                for replica, device in enumerate(devices)
                if (stage, replica) in ratios
            }
            if not own or self._shares_cores(stage) or max(own.values()) <= (1 + TOLERANCE) * min(own.values()):
                continue
            if min(own.values()) > 1 + TOLERANCE or max(own.values()) < 1 - TOLERANCE:
                continue  # The prediction is wrong for all of them: that isn't a matter of one device.
            expected = self.predicted[stage]
            off = {device: ratio for device, ratio in own.items() if _is_off(ratio * expected, expected)}
            if off:
                uneven.add(stage)
            for device, ratio in off.items():
                factors.setdefault(device, []).append(ratio)
        return {device: statistics.fmean(own) for device, own in factors.items()}, uneven

    def _check_devices(self, factors: Mapping[int, float]) -> list[str]:
        """Checks devices by how many times slower than predicted they are, and logs warnings."""
        devices = self._simulation.costs.cluster.devices
        warnings = []
        for device in sorted(factors.keys() & self.suspected_devices):
            expected = devices[device].speed
            warnings.append(
                f"device {device} computes at speed {expected / factors[device]:.3g}, where {expected:.3g} was "
                f"expected: its tasks take {factors[device]:.3g} times as long as predicted"
            )
        if warnings:
            warnings.append(self._advice({device: 1 / factor for device, factor in factors.items() if factor}))
        for warning in warnings:
            logger.warning("%s", warning)
        for device in sorted(self.off_devices - factors.keys()):
            logger.info("device %d computes as fast as was expected again", device)
        self.off_devices = (self.off_devices & factors.keys()) | (factors.keys() & self.suspected_devices)
        self.suspected_devices = factors.keys() - self.off_devices
        return warnings

    def _advice(self, speeds: Mapping[int, float]) -> str:
        """Says what a new plan would gain at these speeds, multiples of the expected ones."""
        plan, latency, present = _fastest_plan(self._simulation, speeds)
        gain = 1 - latency / present
        told = f"at the speeds that were seen, this plan takes {present * 1e3:.3g} ms"
        if gain < LEAST_GAIN:
            return f"{told}, and no new plan is at least {LEAST_GAIN:.0%} faster"
        return (
            f"{told}; a new plan takes {latency * 1e3:.3g} ms, {gain:.0%} less ({shape(plan)}, "
            f"{'unequal' if any(stage.shares for stage in plan.stages) else 'equal'} shares): measure speeds again "
            f"(dapple.measure_speeds(cluster, model, each_server=True)) and plan for them"
        )


def _is_off(seconds: float, expected: float) -> bool:
    return expected > 0 and max(seconds, expected) >= _SMALLEST and abs(seconds - expected) > TOLERANCE * expected


def stage_seconds(tasks: Mapping[Task, float]) -> dict[int, float]:
    """Returns stage -> seconds per micro-batch: medians over micro-batches and replicas, summed over phases."""
    seconds: dict[int, float] = {}
    for (stage, _), times in sorted(grouped(tasks).items()):
        seconds[stage] = seconds.get(stage, 0.0) + statistics.median(times)
    return seconds


def _task_ratios(measured: Mapping[Task, float], predicted: Mapping[Task, float]) -> dict[tuple[int, int], list[float]]:
    """Returns (stage, replica) -> measured seconds of each of its tasks / predicted ones."""
    ratios: dict[tuple[int, int], list[float]] = {}
    for task, seconds in measured.items():
        if predicted.get(task, 0.0) > 0:
            ratios.setdefault((task.stage, task.replica), []).append(seconds / predicted[task])
    return ratios


def _fastest_plan(simulation: Simulation, factors: Mapping[int, float]) -> tuple[Plan, float, float]:
    """Returns the fastest plan at other speeds, its latency, and the present plan's.

    Candidates are the present plan, the same with other shares, and the result of DAPPLE's planner.

    Args:
        simulation: the present plan's step at the expected speeds.
        factors: device -> its speed as a multiple of the expected one; 1 for others.
    """
    costs = simulation.costs
    cluster = _at_speeds(costs.cluster, factors)
    plan = dataclasses.replace(costs.plan, report=None)
    plans = [with_shares(dataclasses.replace(plan, backward_cuts=()), costs.profile, cluster)]
    if plan.backward_cuts:
        plans.append(with_shares(plan, costs.profile, cluster))
    if cluster.num_devices <= _MOST_DEVICES and not plan.places_operators:
        plans.append(plan_anew(plan, costs.profile, cluster))
    present = run(CostModel(plan, costs.profile, cluster)).latency
    timed = [(plan, present)]
    for other in plans:
        with contextlib.suppress(PlanError):  # It doesn't fit in memory.
            timed.append((other, run(CostModel(other, costs.profile, cluster)).latency))
    return *min(timed, key=lambda timing: timing[1]), present


def _at_speeds(cluster: Cluster, factors: Mapping[int, float]) -> Cluster:
    devices = tuple(
        dataclasses.replace(device, speed=device.speed * factors.get(index, 1.0))
        for index, device in enumerate(cluster.devices)
    )
    return dataclasses.replace(cluster, devices=devices)
