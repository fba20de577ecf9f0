"""Improvement rounds: operators that bound the step move to other devices, as long as that shortens it.

FD-DPS, section 4.3: "After the graph search space update, perform a new round of node optimization scheduling, and
repeat this process until the optimal parallel strategy is found."
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

from dapple_tf.operators.op_graph import DisjointSets, PlacementProblem
from dapple_tf.operators.placement_candidates import Candidate, judged, scheduled
from dapple_tf.operators.simulated_placement import run_in_order

_SLACK = 1e-10
_PATIENCE = 60
"""The most moves in a row without success, of a large graph."""
_PATIENCE_OF_SMALL = 300
"""The same of a graph of at most `_SMALL` operators."""
_SMALL = 2000
_RANDOM_STARTS = 60
"""Random placements of a small graph."""
_KEPT = 6
"""Placements of a small graph that are improved."""
_PAIRED = 700
"""The most ways to place two groups for which pairs of them are moved together."""


def improved(candidate: Candidate, pieces: list[int], evaluations: int) -> Candidate:
    """Moves pieces on the critical path of the simulated step as long as it gets shorter.

    Args:
        candidate: where to start.
        pieces: each operator's piece; all of a piece move together, and with them all of their groups.
        evaluations: the most placements that are simulated.
    """
    mover = _Mover(candidate.variant.problem, pieces)
    best = candidate
    tried: set[tuple[int, int]] = set()
    most = patience = _PATIENCE if candidate.variant.problem.count > _SMALL else _PATIENCE_OF_SMALL
    while evaluations > 0:
        better = None
        for piece, device in mover.moves(best):
            if (piece, device) in tried:
                continue
            tried.add((piece, device))
            devices = mover.moved(best.devices, piece, device)
            if devices is None:
                continue
            evaluations -= 1
            patience -= 1
            one = scheduled(best.variant, devices, best.origin)
            if one.rank < (best.over, best.seconds * (1 - _SLACK)):
                better = one
                break
            if evaluations <= 0 or patience <= 0:
                return best
        if better is None:
            return best
        best = better
        patience = most
        tried.clear()
    return best


class _Mover:
    """Moves pieces, with all operators that are bound to them."""

    def __init__(self, problem: PlacementProblem, pieces: list[int]) -> None:
        self.problem = problem
        sets = DisjointSets(max(pieces, default=-1) + 1)
        for members in problem.members:
            for op in members[1:]:
                sets.union(pieces[op], pieces[members[0]])
        self.block = [sets.find(piece) for piece in pieces]
        self.ops: dict[int, list[int]] = {}
        self.fixed: set[int] = set()
        for op, block in enumerate(self.block):
            self.ops.setdefault(block, []).append(op)
            if problem.pinned[problem.group[op]] >= 0:
                self.fixed.add(block)

    def moved(self, devices: list[int], block: int, device: int) -> list[int] | None:
        """Returns the devices after a block moves to another one; None if it can't move."""
        ops = self.ops[block]
        if block in self.fixed or devices[ops[0]] == device:
            return None
        moved = list(devices)
        for op in ops:
            moved[op] = device
        return moved

    def moves(self, candidate: Candidate) -> list[tuple[int, int]]:
        """Returns blocks on the critical path with devices that they could move to, from the step's end on."""
        problem, devices = self.problem, candidate.devices
        start, finish, _ = run_in_order(problem, devices, candidate.order)
        busy = [0.0] * problem.devices
        for op, device in enumerate(devices):
            busy[device] += finish[op] - start[op]
        idlest = sorted(range(problem.devices), key=lambda device: (busy[device], device))[:2]
        moves: dict[tuple[int, int], None] = {}
        for op, cause, waited in critical_chain(problem, candidate, start, finish):
            if cause < 0:
                continue
            here, there = devices[op], devices[cause]
            if waited and here != there:
                moves[self.block[op], there] = None
                moves[self.block[cause], here] = None
            elif not waited:
                near = {devices[problem.producer[tensor]] for tensor in problem.inputs[op]}
                near |= {devices[reader] for tensor in problem.outputs[op] for reader in problem.readers[tensor]}
                for device in [*sorted(near - {here}), *idlest]:
                    moves[self.block[op], device] = None
                    moves[self.block[cause], device] = None
        return list(moves)


def critical_chain(
    problem: PlacementProblem, candidate: Candidate, start: list[float], finish: list[float]
) -> list[tuple[int, int, bool]]:
    """Returns what bounds the step, from its end: (operator, the one it waited for or -1, whether for its data).

    The last is false if it waited for its device.
    """
    devices = candidate.devices
    last = [-1] * problem.devices
    before = [-1] * problem.count
    for op in candidate.order:
        before[op] = last[devices[op]]
        last[devices[op]] = op
    op = max(range(problem.count), key=lambda one: (finish[one], -one), default=-1)
    chain = []
    while op >= 0:
        earlier = before[op]
        if earlier >= 0 and finish[earlier] >= start[op] * (1 - _SLACK):
            chain.append((op, earlier, False))
            op = earlier
            continue
        cause, latest = -1, -1.0
        here = devices[op]
        for tensor in problem.inputs[op]:
            other = problem.producer[tensor]
            arrival = finish[other]
            if devices[other] != here:
                there = devices[other]
                arrival += problem.latency[there][here] + problem.size[tensor] * problem.per_byte[there][here]
            if arrival > latest:
                cause, latest = other, arrival
        for other in problem.waits[op]:
            arrival = finish[other] + problem.latency[devices[other]][here]
            if arrival > latest:
                cause, latest = other, arrival
        chain.append((op, cause, True))
        op = cause
    return chain


def polished(starts: Sequence[Candidate], evaluations: int) -> Candidate:
    """Returns a small graph's best placement: tries all assignments if they are few, and moves from the best.

    Args:
        starts: placements to start from, of one graph.
        evaluations: the approximate limit of simulated placements.
    """
    variant = starts[0].variant
    problem = variant.problem
    groups = [members for group, members in enumerate(problem.members) if members and problem.pinned[group] < 0]
    fixed = [max(problem.pinned[group], 0) for group in problem.group]
    count = problem.devices
    if count ** len(groups) <= evaluations:
        assignments: Iterable[Sequence[int]] = itertools.product(range(count), repeat=len(groups))
    else:
        drawn = random.Random(0)
        assignments = [[drawn.randrange(count) for _ in groups] for _ in range(_RANDOM_STARTS)]
    candidates = list(starts)
    for chosen in assignments:
        devices = list(fixed)
        for members, device in zip(groups, chosen, strict=True):
            for op in members:
                devices[op] = device
        candidates.append(scheduled(variant, devices, "search of a small graph"))
    candidates = sorted(candidates, key=lambda one: one.rank)[:_KEPT]
    needs = [{*(problem.producer[t] for t in problem.inputs[op]), *problem.waits[op]} for op in range(problem.count)]
    moves = [(members,) for members in groups]
    pairs = list(itertools.combinations(groups, 2))
    if len(pairs) * count**2 > _PAIRED:
        pairs = []
    return min(
        (_moved(one, [*moves, *pairs], needs, evaluations // _KEPT) for one in candidates), key=lambda one: one.rank
    )


def _moved(
    candidate: Candidate, moves: list[tuple[list[int], ...]], needs: list[set[int]], evaluations: int
) -> Candidate:
    """Moves groups to other devices, alone and in pairs, and operators within Q, as long as that helps."""
    best = candidate
    problem, variant = best.variant.problem, best.variant
    while evaluations > 0:
        for groups in moves:
            if evaluations <= 0:
                return best
            devices = list(best.devices)
            one = best
            for chosen in itertools.product(range(problem.devices), repeat=len(groups)):
                for members, device in zip(groups, chosen, strict=True):
                    for op in members:
                        devices[op] = device
                if devices == best.devices:
                    continue
                evaluations -= 2
                one = min(
                    one,
                    scheduled(variant, list(devices), best.origin),
                    judged(variant, list(devices), best.order, best.origin),
                    key=lambda other: other.rank,
                )
            if one.rank < (best.over, best.seconds * (1 - _SLACK)):
                best = one
                break
        else:
            for order in _reordered(best.order, needs):
                evaluations -= 1
                one = judged(variant, best.devices, order, best.origin)
                if one.rank < (best.over, best.seconds * (1 - _SLACK)):
                    best = one
                    break
            else:
                return best
    return best


def _reordered(order: list[int], needs: list[set[int]]) -> list[list[int]]:
    """Returns the queues in which one operator is at another position."""
    queues = []
    for index, op in enumerate(order):
        rest = order[:index] + order[index + 1 :]
        for place in range(index - 1, -1, -1):
            if order[place] in needs[op]:
                break
            queues.append([*rest[:place], op, *rest[place:]])
        for place in range(index + 1, len(order)):
            if op in needs[order[place]]:
                break
            if place > index + 1:
                queues.append([*rest[:place], op, *rest[place:]])
    return queues
