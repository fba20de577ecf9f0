"""The planner's objective: pipeline latency from stage times (DAPPLE, PPoPP'21, sections 4.1 and 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dapple_tf.simulation.activities import reduction_pieces
from dapple_tf.simulation.cost import CostModel


class StageTime(NamedTuple):
    """Seconds of one stage for one micro-batch. A network stage has a transfer's times and no all-reduce.

    Attributes:
        forward: F_s.
        backward: B_s.
        all_reduce: AR(P_s, g_s), with the optimizer's update that follows it.
    """

    forward: float
    backward: float
    all_reduce: float = 0.0


class PipelineLatency(NamedTuple):
    """Seconds of the three phases of a step, and the pivot stage that they were computed with.

    Attributes:
        warm_up: T_w, until the pivot stage has run its first forward.
        steady: T_s.
        ending: T_e, with the all-reduces.
        pivot: Q, the stage with the fewest bubbles.
    """

    warm_up: float
    steady: float
    ending: float
    pivot: int

    @property
    def latency(self) -> float:
        """L = T_w + T_s + T_e."""
        return self.warm_up + self.steady + self.ending


def pivot_stage(stages: Sequence[StageTime], micro_batches: int) -> int:
    """Returns Q, the stage that dominates the steady phase (formula 3 and algorithm 1).

    From the last stage backwards, a stage s takes the place of Q when its own steady phase is longer than that of Q
    with the work between the two: (M - 1) (F_s + B_s) > (M - 1) (F_Q + B_Q) + sum of F + B from s + 1 to Q - 1.
    """
    rounds = micro_batches - 1
    pivot = len(stages) - 1
    between = 0.0
    for index in range(len(stages) - 2, -1, -1):
        own = rounds * (stages[index].forward + stages[index].backward)
        if own > rounds * (stages[pivot].forward + stages[pivot].backward) + between:
            pivot, between = index, 0.0
        else:
            between += stages[index].forward + stages[index].backward
    return pivot


def pipeline_latency(stages: Sequence[StageTime], micro_batches: int) -> PipelineLatency:
    """Returns the phases of L of a pipeline (formulas 1 and 2).

        T_w = sum of F_s for s = 0..Q
        T_s = (M - 1) (F_Q + B_Q)
        T_e = max over s of AR_s + (sum of B_a for a = s..Q  if s <= Q  else  - sum of B_a for a = Q..s)

    Args:
        stages: computation stages and, between them, network stages.
        micro_batches: M.
    """
    pivot = pivot_stage(stages, micro_batches)
    warm_up = sum(stage.forward for stage in stages[: pivot + 1])
    steady = (micro_batches - 1) * (stages[pivot].forward + stages[pivot].backward)
    endings = []
    for index, stage in enumerate(stages):
        low, high = min(index, pivot), max(index, pivot)
        work = sum(other.backward for other in stages[low : high + 1])
        endings.append(stage.all_reduce + (work if index <= pivot else -work))
    return PipelineLatency(warm_up, steady, max(endings), pivot)


def stage_times(costs: CostModel) -> list[StageTime]:
    """Returns the computation stages and the network stages between them, as formula 2 takes them."""
    cluster, plan = costs.cluster, costs.plan
    timed_stages: list[StageTime] = []
    for stage, devices in enumerate(plan.devices):
        if stage:
            timed_stages.append(
                StageTime(*(_transfer_seconds(costs, stage - 1, backward=back) for back in (False, True)))
            )
        cost = costs.stages[stage]
        start = costs.profile.task_seconds
        times = []
        for part in (cost.forward, cost.backward):
            slices = costs.slices(stage, 0)
            times.append(
                max(
                    (start + part.at(costs.profile.timed_samples(interval.size))) / cluster.devices[device].speed
                    for interval, device in zip(slices, devices, strict=True)
                )
            )
        reduced = 0.0  # after the last backward
        for number, item in enumerate(costs.reductions):
            if stage in item.stages:
                end = 0.0
                for share, size in reduction_pieces(costs, number):
                    end = max(end, share * times[1]) + costs.reduction_seconds(item, size)
                reduced += end - times[1]
        timed_stages.append(
            StageTime(times[0], times[1], reduced + max(costs.apply_seconds(stage, d) for d in devices))
        )
    return timed_stages


def _transfer_seconds(costs: CostModel, stage: int, *, backward: bool) -> float:
    """Returns the seconds to send all that crosses the cut after a stage, for one micro-batch: the busiest link's."""
    cluster, plan = costs.cluster, costs.plan
    loads: dict[tuple[str, int], float] = {}
    latency = 0.0
    for producer, consumer in costs.routes:
        if producer > stage or consumer <= stage:
            continue
        ends = (consumer, producer) if backward else (producer, consumer)
        for message in costs.messages(producer, consumer, 0, backward=backward):
            source, target = plan.devices[ends[0]][message.sender], plan.devices[ends[1]][message.receiver]
            link = cluster.link(source, target)
            a, b = cluster.devices[source].server, cluster.devices[target].server
            ports = (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b))
            for port in ports:
                loads[port] = loads.get(port, 0.0) + message.bytes / link.bandwidth
            latency = max(latency, link.latency)
    return max(loads.values(), default=0.0) + latency
