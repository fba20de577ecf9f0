"""The planner's objective: pipeline latency from stage times (DAPPLE, PPoPP'21, sections 4.1 and 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
    """Q, the stage that dominates the steady phase (formula 3 and algorithm 1).

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
    """L of a pipeline (formulas 1 and 2).

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
