"""All-reduces of a plan: the faster algorithm on its links, and backwards cut so that they start early."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import ALL_REDUCE, Plan, PlanError
from dapple_tf.describe.plan_checks import refused
from dapple_tf.describe.profile import Profile
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Trial, tried


def fastest_reductions(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """Returns the plan with the ``all_reduce`` that is the fastest for each stage's gradients.

    Args:
        plan: the plan; its report is dropped.
        profile: its layers' costs.
        cluster: the devices, and the links as they are described or were measured (`dapple_tf.measure_links`).

    Raises:
        PlanError: the plan doesn't fit the cluster, or cuts after layers that the profile lacks.
    """
    return with_fastest_reductions(CostModel(dataclasses.replace(plan, report=None), profile, cluster)).plan


def with_fastest_reductions(costs: CostModel, algorithms: Sequence[str] = ALL_REDUCE) -> CostModel:
    """Returns the costs of the same plan with the fastest of these all-reduces for each stage, the first of equal ones.

    Parameters that several stages read go by the first of these, so that what is reduced for it together decides.
    """
    plan = costs.plan
    seconds: dict[int, dict[str, float]] = {}
    # Inside one server there is one way.
    for reduction in costs.reductions if len(algorithms) > 1 and costs.cluster.num_servers > 1 else ():
        own = seconds.setdefault(min(reduction.stages), dict.fromkeys(algorithms, 0.0))
        for algorithm in algorithms:
            own[algorithm] += costs.reduction_seconds(reduction, algorithm=algorithm)
    fastest = [
        min(algorithms, key=lambda name: seconds[stage][name]) if stage in seconds else algorithms[0]
        for stage in range(plan.num_stages)
    ]
    return costs if fastest == [stage.all_reduce for stage in plan.stages] else costs.reducing(fastest)


_MOST_PIECES = 8
"""The most pieces of a backward."""
_PLACES = 32
"""The most places within a stage at which cuts are considered."""
_LEAST_GAIN = 0.002
"""The least fraction of a stage's time in a step that its cuts must gain."""


def reduced_early(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """Returns the plan with the ``backward_cuts`` with which its step is the shortest, none if they gain nothing.

        layers     0 1 2 3 4 5 6 7   the last backward of the stage: 7 6 5 | 4 3 2 | 1 0
        devices    [0, 1]            all-reduces:                          of 5-7    of 2-4   of 0-1

    More pieces make the all-reduce start earlier, and the last one shorter, but each piece and each all-reduce takes a
    fixed time besides. Whether only the first stages are cut, or all, is chosen by simulation.

    Args:
        plan: the plan; its own ``backward_cuts`` and report are dropped.
        profile: its layers' costs.
        cluster: the devices and links. Stages on servers whose devices share their cores aren't cut: there all-reduces
            compete with backwards.

    Raises:
        PlanError: the plan doesn't fit the cluster, or cuts after layers that the profile lacks.
    """
    Plan.check("plan", plan)
    bare = dataclasses.replace(plan, backward_cuts=(), report=None)
    if refused(plan, "backward_cuts"):
        return bare
    costs = CostModel(bare, profile, cluster)
    whole = tried(costs)
    simulations = [trial.simulation for trial in (whole, *cut_trials(costs, whole)) if trial.simulation is not None]
    return min(simulations, key=lambda simulation: simulation.latency).costs.plan


def cut_trials(costs: CostModel, whole: Trial) -> Iterator[Trial]:
    """Yields simulations of a plan with its last backwards cut (`early_reductions`), where that fits in memory.

    Args:
        costs: the plan's costs.
        whole: its simulation.
    """
    for plan in early_reductions(costs):
        try:
            yield whole.with_cuts(CostModel(plan, costs.profile, costs.cluster))
        except PlanError:
            continue  # reductions during backwards need memory for both


def early_reductions(costs: CostModel) -> Iterator[Plan]:
    """Yields a plan with ``backward_cuts`` in its first 1, 2, 4 ... and all stages.

    Cuts of later stages may do harm: on a busy link their all-reduces delay what is sent to earlier stages.
    """
    cuts: list[str] = []
    count = 0
    for stage in () if refused(costs.plan, "backward_cuts") else range(len(costs.stages)):
        own = _cuts(costs, stage)
        cuts += own
        count += bool(own)
        if own and count & (count - 1) == 0:
            yield dataclasses.replace(costs.plan, backward_cuts=tuple(cuts))
    if count & (count - 1):
        yield dataclasses.replace(costs.plan, backward_cuts=tuple(cuts))


def competes(cluster: Cluster, devices: Sequence[int]) -> bool:
    """Returns whether all-reduces on these devices compete with their tasks for cores."""
    servers = {cluster.devices[device].server for device in devices}
    return any(map(cluster.shares_cores, servers))


def _cuts(costs: CostModel, stage: int) -> list[str]:
    """Returns the layers after which a stage's last backward is cut, in order."""
    reduction = next((item for item in costs.reductions if item.stages == (stage,)), None)
    first, stop = costs.stages[stage].layers
    if reduction is None or stop - first < 2 or competes(costs.cluster, reduction.devices):
        return []
    # From the last layer to the first: backwards and gradients.
    times, sizes = costs.layer_backwards(stage)[::-1], costs.layer_gradients(stage)[::-1]
    ends = _places(times, sizes)
    passed = np.concatenate([[0.0], np.cumsum(times)])[[0, *ends]]
    reduced = np.concatenate([[0.0], np.cumsum(sizes)])[[0, *ends]]
    sent = np.array(
        [[costs.reduction_seconds(reduction, end - begin) for end in reduced] for begin in reduced]
    )  # [from, to]
    pieces = _best(passed, sent, costs.profile.task_seconds)
    # Places count layers from the stage's end; a cut is named by the layer before it.
    chosen = [stop - ends[place - 1] for place in pieces if ends[place - 1] < stop - first]
    gain = sum(times) + sent[0, -1] - _end(passed, sent, pieces, costs.profile.task_seconds)
    share = len(costs.micro_batches) * sum(times) * 1.5 + sent[0, -1]
    return [costs.profile.layers[place - 1].name for place in sorted(chosen)] if gain > _LEAST_GAIN * share else []


def _places(times: Sequence[float], sizes: Sequence[float]) -> list[int]:
    """Returns positions after which a row of layers may be cut: evenly over time and bytes.

    The last is that after which all gradients are complete.
    """
    whole_time, whole_size = sum(times) or 1.0, sum(sizes) or 1.0
    at = np.cumsum(np.array(times) / whole_time + np.array(sizes) / whole_size) / 2
    useful = [place for place in range(1, len(times)) if sizes[place - 1]]
    if len(useful) >= _PLACES:
        marks = np.linspace(0, 1, _PLACES + 1)[1:-1]
        useful = sorted({min(useful, key=lambda place: abs(at[place - 1] - mark)) for mark in marks})
    return [*useful, len(times)] if sizes[-1] else useful


_Floats = npt.NDArray[np.float64]


def _best(passed: _Floats, sent: _Floats, overhead: float) -> list[int]:
    """Returns the ends of the pieces with which the last all-reduce ends first; the fewest on a tie.

    Args:
        passed: seconds of backward until each place, 0 for the first.
        sent: from one place to another, the seconds of the all-reduce of the gradients between them.
        overhead: seconds of each piece but the first.

    Returns:
        Positions in ``passed``, the last place at the end.
    """
    places = len(passed)
    legal = np.triu(np.ones((places, places), bool), 1)
    finish = np.full(places, np.inf)
    finish[0] = -np.inf
    ended: list[_Floats] = [finish]
    for count in range(_MOST_PIECES):
        ready = passed + count * overhead
        ends = np.where(legal, np.maximum(ended[-1][:, None], ready[None, :]) + sent, np.inf)
        if count:
            ends[0] = np.inf
        ended.append(ends.min(axis=0))
    best = min(range(1, len(ended)), key=lambda count: (round(float(ended[count][-1]), 12), count))
    pieces = [places - 1]
    for count in range(best, 1, -1):
        ready = passed[pieces[0]] + (count - 1) * overhead
        ends_here = np.maximum(ended[count - 1], ready) + sent[:, pieces[0]]
        ends_here[pieces[0] :] = np.inf
        ends_here[0] = np.inf
        pieces.insert(0, int(np.argmin(ends_here)))
    return pieces


def _end(passed: _Floats, sent: _Floats, pieces: Sequence[int], overhead: float) -> float:
    """Returns when the last all-reduce ends, from the start of the backward."""
    end = 0.0
    for number, (before, place) in enumerate(itertools.pairwise([0, *pieces])):
        end = max(end, passed[place] + number * overhead) + sent[before, place]
    return float(end)
