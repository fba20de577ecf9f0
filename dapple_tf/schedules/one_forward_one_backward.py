"""The rule of gpipe, dapple_a and dapple_b: K forwards, then one backward and one forward in turn (section 3.2).

The policies differ in the warm-up K of a stage (DAPPLE, sections 3.2 and 5.3), which is also the number of
micro-batches whose activations it holds at its peak:

    policy            K of stage i of S, i from 0   stage 0 of 3, 6 micro-batches
    gpipe             M                             F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
    dapple_a (P_A)    min(S - i, D)                 F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
    dapple_b (P_B)    min(2(S - i) - 1, D)          F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5

M is the number of micro-batches in a step, D the number whose activations fit in a device's memory. Consecutive stages
on the same devices (a group) count as one stage: its forwards run in the order of its stages, its backwards in reverse.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

from dapple_tf.common.text import counted
from dapple_tf.schedules.schedule_request import Job, ScheduleError, ScheduleRequest
from graph_passes.ir.tasks import Phase

Wanted = Callable[[int, int], list[int]]
"""(number of groups, M) -> K of each group, before any limit."""


def all_micro_batches(groups: int, micro_batches: int) -> list[int]:
    """Returns GPipe's K."""
    return [micro_batches] * groups


def p_a(groups: int, micro_batches: int) -> list[int]:
    """Returns K of DAPPLE's policy A."""
    return [groups - i for i in range(groups)]


def p_b(groups: int, micro_batches: int) -> list[int]:
    """Returns K of DAPPLE's policy B."""
    return [2 * (groups - i) - 1 for i in range(groups)]


def warm_up(request: ScheduleRequest, wanted: Wanted) -> list[int]:
    """Returns K of each group: the request's where given, else the wanted one, within the limits.

    The paper has one D. With one per stage a K never exceeds that of the group before: the first backward of group i
    waits for K_(i+1) forwards of group i, which would never come.

    Raises:
        ScheduleError: ``warm_up`` rises from one stage to the next (a deadlock), differs within a group, or is given
            though all micro-batches are wanted; or all are wanted, and a D is below M.
    """
    if request.warm_up is not None:
        _check_explicit(request, request.warm_up, wanted)
        return [request.warm_up[group[0]] for group in request.groups]
    if wanted is all_micro_batches and request.holds is not None:
        for stage, limit in enumerate(request.holds):
            if limit < request.micro_batches:
                raise ScheduleError(
                    f"{request.policy} keeps all {request.micro_batches} micro-batches in flight, but stage {stage} "
                    f"holds {limit}; use dapple_a, at most {counted(limit, 'micro-batch')}, or smaller ones"
                )
    return limited(request, wanted(len(request.groups), request.micro_batches))


def limited(request: ScheduleRequest, wanted: Sequence[int]) -> list[int]:
    """Lowers each group's K to its stages' limit, and to K of the group before."""
    counts = [
        min(request.limit(stage, count) for stage in group) for group, count in zip(request.groups, wanted, strict=True)
    ]
    return list(itertools.accumulate(counts, min))


def one_forward_one_backward(micro_batches: int, warm_up: int) -> Iterator[tuple[Phase, int]]:
    """Yields ``warm_up`` forwards, then backwards and forwards in turn, then the remaining backwards."""
    for micro_batch in range(warm_up):
        yield Phase.FORWARD, micro_batch
    for micro_batch in range(micro_batches):
        yield Phase.BACKWARD, micro_batch
        if micro_batch + warm_up < micro_batches:
            yield Phase.FORWARD, micro_batch + warm_up


def sequence(
    micro_batches: int, stages: range, warm_up: int, split: Collection[int] = (), delayed: Collection[int] = ()
) -> list[Job]:
    """Returns the order of a group with ``warm_up`` as K.

    Args:
        micro_batches: M.
        stages: the group's.
        warm_up: K.
        split: stages with Bx, and Bw right after it, in place of B.
        delayed: stages of ``split`` whose Bw are left out, to be placed elsewhere.
    """
    jobs = []
    for phase, micro_batch in one_forward_one_backward(micro_batches, warm_up):
        if phase is Phase.FORWARD:
            jobs += [Job(stage, phase, micro_batch) for stage in stages]
            continue
        for stage in reversed(stages):
            if stage not in split:
                jobs.append(Job(stage, phase, micro_batch))
                continue
            jobs.append(Job(stage, Phase.INPUT_GRAD, micro_batch))
            if stage not in delayed:
                jobs.append(Job(stage, Phase.WEIGHT_GRAD, micro_batch))
    return jobs


def _check_explicit(request: ScheduleRequest, counts: Sequence[int], wanted: Wanted) -> None:
    if wanted is all_micro_batches:
        raise ScheduleError(
            f"warm_up {list(counts)} is given for {request.policy}, which always runs all {request.micro_batches} "
            f"forwards first; leave it out, or use dapple_a or dapple_b"
        )
    for stage, count in enumerate(counts):
        if stage and count > counts[stage - 1]:
            raise ScheduleError(
                f"warm_up rises from {counts[stage - 1]} at stage {stage - 1} to {count} at stage {stage}, which "
                f"deadlocks: stage {stage} waits for {count} forwards before its first backward, stage {stage - 1} "
                f"gives only {counts[stage - 1]} before it needs that backward. Lower stage {stage} to "
                f"{counts[stage - 1]} or raise stage {stage - 1} to {count}"
            )
        if stage and count < counts[stage - 1] and request.devices[stage] == request.devices[stage - 1]:
            raise ScheduleError(
                f"warm_up falls from {counts[stage - 1]} at stage {stage - 1} to {count} at stage {stage}, but both "
                f"run on devices {list(request.devices[stage])} in one order; give both the same"
            )
