"""FD-DPS: adaptive placement of operators by dynamic critical paths (Zeng et al., Mathematics 2022, 10, 4788)."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dapple_tf.common.memory import without_collection
from dapple_tf.describe.plan_values import PlanError
from dapple_tf.operators.list_scheduler import fd_dps_schedule, heft_schedule
from dapple_tf.operators.op_graph import DisjointSets, OpGraph, OpPlacement, PlacementProblem, Topology, compile_problem
from dapple_tf.operators.pieces import Pieces
from dapple_tf.operators.simulated_placement import (
    Candidate,
    judged,
    ordered_sources,
    placed_by,
    run_in_order,
    scheduled,
    simulate,
)
from dapple_tf.operators.split_search import Budget, by_batch, fast_t_candidate, placed, split_candidates

_LOGGER = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Receives the current activity, and the share of the search that is over."""

_VISITS = 3.2e6
"""Approximate limit of operators that the search visits: some 20 s on one core."""
_VISITS_EACH = 4000
"""The same for each operator of a small graph."""
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of the devices' memory that placing may use, since the simulated peak may exceed its count."""
_LARGE = 40000
"""Operators from which on the times of reads are adjusted only once."""
_CLOSE = 1.03
"""Ratio of steps up to which the best placement before other splits is improved, too."""
_PROMISING = 1.3
"""Ratio of steps up to which other layouts' placements are tried, too."""
_TRIAL = 0.05
"""Share of the work for improving that each placement gets in the first of the rounds that decide between several."""
_TRIAL_EVALUATIONS = 10
"""The fewest placements of the best layout that are simulated in the first round: large graphs have no rounds."""
_MUCH_SLOWER = 0.5
"""Links with less than this share of the fastest one's bandwidth separate islands."""
_ISLAND_EFFORT = 0.5
"""Share of the work for placing on the devices that have fast links among them."""
_SMALL = 60
"""Operators of a graph up to which every move is tried."""
_SINGLE = 2000
"""Operators of a graph up to which single ones are moved, too, after pieces of several."""


def fd_dps(
    graph: OpGraph,
    topology: Topology,
    *,
    effort: float = 1.0,
    progress: Progress | None = None,
) -> OpPlacement:
    """Places the operators of a step so that the simulated step is short.

    It is never slower than `heft` and one device, nor than data parallelism as a placement (`by_batch`) and
    `fast_t_candidate`.

    Args:
        graph: its operators.
        topology: the devices.
        effort: share of the usual work that improving may take.
        progress: receives the current activity, and the share of the search that is over.

    Raises:
        PlacementError: the graph isn't for this topology.
        PlanError: no placement found fits the devices' memory.
    """
    tell = progress or (lambda text, share: None)
    island = largest_island(topology)
    alone = on_island(graph, topology, island) if len(island) < topology.count else None
    if alone is None:
        return _placed(graph, topology, effort, tell)
    everywhere = _placed(graph, topology, effort, lambda text, share: tell(text, 0.6 * share))
    try:
        within = _placed(
            *alone, _ISLAND_EFFORT * effort, lambda text, share: tell(f"{text}, fast links", 0.6 + 0.4 * share)
        )
    except PlanError as error:
        _LOGGER.info("devices %s alone: %s", island, error)
        return everywhere
    return off_island(within, topology, island) if within.seconds < everywhere.seconds else everywhere


def _placed(graph: OpGraph, topology: Topology, effort: float, progress: Progress) -> OpPlacement:
    best = _search(graph, topology, effort, progress)
    _LOGGER.info("placed %d operators: %.4g s, from %s", best.problem.count, best.seconds, best.origin)
    return placed_by(best)


@without_collection
def _search(graph: OpGraph, topology: Topology, effort: float, progress: Progress) -> Candidate:
    progress("static priorities", 0.0)
    base = compile_problem(graph, topology)
    problem = base
    budget = Budget(effort * min(_VISITS, _VISITS_EACH * problem.count))
    alike = _alike(graph, topology)
    candidates = []
    start = by_batch(base) if topology.count > 1 else None
    static = fast_t_candidate(base, start)
    for one in (static, judged(base, *heft_schedule(problem), "HEFT")):
        candidates += [one, scheduled(one.problem, one.devices, one.origin)]
    for device in range(topology.count):
        alone = [device if problem.pinned[group] < 0 else problem.pinned[group] for group in problem.group]
        candidates.append(judged(base, alone, list(range(problem.count)), "one device"))
        if alike:
            break
    progress("dynamic critical paths", 0.2)
    candidates += placed(base, None, "dynamic critical paths")
    budget.spend(30 * problem.count)
    best = min(candidates, key=lambda one: one.rank)
    if start is not None:
        best = min([best, start, *placed(start.problem, None, "data parallelism's graph")], key=lambda one: one.rank)
    simpler = best
    others: list[Candidate] = []
    if topology.count > 1:
        best, *others = split_candidates(
            base, best, budget, lambda text: progress(text, 0.3 + 0.4 * budget.spent_share)
        )
    progress("improvement", 0.75)
    if best.over > 0:
        best = min([best, *_within_memory(best.problem)], key=lambda one: one.rank)
    if best.over > 0 and best.problem is not base:
        best = min([best, *_within_memory(base)], key=lambda one: one.rank)
    if best.over > 0:
        raise PlanError(_too_much(best))
    finalists = [best]
    if simpler.problem is not best.problem and simpler.over == 0 and simpler.seconds <= _CLOSE * best.seconds:
        finalists.append(simpler)
    promising = [one for one in others if one.over == 0 and one.seconds <= _PROMISING * best.seconds]
    best = _improved_best(finalists, promising, candidates, budget.visits)
    progress("done", 1.0)
    return best


def _improved_best(
    finalists: list[Candidate], promising: list[Candidate], candidates: list[Candidate], visits: float
) -> Candidate:
    """Improves placements by successive halving: all of them a little, the better half twice as much, and so on.

    Which layout is best often shows only when its operators have moved: what is split by heads and columns waits for
    sums at first, until single operators are where their neighbours are.
    """
    ways, trial = finalists, _TRIAL * visits
    if trial >= _TRIAL_EVALUATIONS * _cost_of_evaluation(finalists[0]):
        ways = [*finalists, *promising]
        while len(ways) > 1:
            ways = sorted((_after_rounds(one, trial) for one in ways), key=lambda one: one.rank)
            ways = ways[: (len(ways) + 1) // 2]
            trial *= 2
    return min((_finished(one, candidates, visits / len(ways)) for one in ways), key=lambda one: one.rank)


def _cost_of_evaluation(candidate: Candidate) -> int:
    """Returns the visits that simulating one placement of its graph takes."""
    return max(1, 3 * candidate.problem.count)


def _finished(candidate: Candidate, candidates: list[Candidate], visits: float) -> Candidate:
    """Improves a placement within a number of visited operators; in a small graph, tries every move."""
    best = _after_rounds(candidate, visits)
    if best.problem.count <= _SMALL:
        best = polished([best, *(one for one in candidates if one.problem is best.problem)], 3000)
    return best


def _after_rounds(candidate: Candidate, visits: float) -> Candidate:
    """Orders a placement's reads and moves pieces, then operators, each within a number of visited operators."""
    problem = candidate.problem
    best = ordered_sources(candidate, 2 if problem.count <= _LARGE else 1)
    pieces = Pieces.of(problem)
    evaluations = int(visits / _cost_of_evaluation(candidate))
    best = improved(best, pieces.piece, evaluations)
    if problem.count <= _SINGLE:
        best = improved(best, list(range(problem.count)), evaluations)
    return best


def _alike(graph: OpGraph, topology: Topology) -> bool:
    """Returns whether it makes no difference which device runs everything."""
    seconds, memory = graph.seconds, topology.memory_bytes
    same = bool((seconds == seconds[:, :1]).all() and (memory == memory[0]).all())
    return same and not (graph.pinned >= 0).any()


def _within_memory(problem: PlacementProblem) -> list[Candidate]:
    """Returns placements within falling shares of the devices' limits, until one fits."""
    problem = problem
    pieces = Pieces.of(problem)
    program = list(range(problem.count))
    candidates: list[Candidate] = []
    for share in _SHARES:
        limits = [share * limit for limit in problem.topology.memory_bytes.tolist()]
        origin = f"dynamic critical paths within {share:.0%} of the memory"
        for as_numbered in (False, True):
            devices = pieces.spread(fd_dps_schedule(pieces.problem, limits=limits, as_numbered=as_numbered)[0])
            # The program's order holds little at once.
            candidates += [scheduled(problem, devices, origin), judged(problem, devices, program, origin)]
        if min(one.over for one in candidates) == 0:
            break
    return candidates


def _too_much(best: Candidate) -> str:
    problem = best.problem
    peaks = simulate(problem, best.devices, best.order).peak_bytes.tolist()
    limits = problem.topology.memory_bytes.tolist()
    lacking = ", ".join(
        f"{name} needs {peak:,.0f} bytes and has {limit:,.0f}"
        for name, peak, limit in zip(problem.topology.names, peaks, limits, strict=True)
        if peak > limit
    )
    return (
        f"no placement of the {problem.count} operators was found that fits the devices' memory; in the best one "
        f"{lacking}: use more devices or a smaller global_batch_size"
    )


# ---- improvement: operators that bound the step move to other devices, as long as that shortens it
#
# Section 4.3: "After the graph search space update, perform a new round of node optimization scheduling, and repeat
# this process until the optimal parallel strategy is found."

_SLACK = 1e-10
_PATIENCE = 60
"""The most moves in a row without success, of a large graph."""
_PATIENCE_OF_SMALL = 300
"""The same of a graph of at most `_SINGLE` operators."""
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
    mover = _Mover(candidate.problem, pieces)
    best = candidate
    tried: set[tuple[int, int]] = set()
    most = patience = _PATIENCE if candidate.problem.count > _SINGLE else _PATIENCE_OF_SMALL
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
            one = scheduled(best.problem, devices, best.origin)
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
    problem = starts[0].problem
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
        candidates.append(scheduled(problem, devices, "search of a small graph"))
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
    problem = best.problem
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
                    scheduled(problem, list(devices), best.origin),
                    judged(problem, list(devices), best.order, best.origin),
                    key=lambda other: other.rank,
                )
            if one.rank < (best.over, best.seconds * (1 - _SLACK)):
                best = one
                break
        else:
            for order in _reordered(best.order, needs):
                evaluations -= 1
                one = judged(problem, best.devices, order, best.origin)
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


# ---- devices with fast links among them: placing everything on one such island may beat using all devices


def largest_island(topology: Topology) -> tuple[int, ...]:
    """Returns the largest set of devices with fast links, in order; the first of equal ones, all if links are alike.

    4 devices in each of 2 servers, with slower links between these   becomes   0, 1, 2, 3
    """
    bandwidth = topology.bandwidth
    apart = bandwidth[~np.eye(topology.count, dtype=bool)]
    everywhere = tuple(range(topology.count))
    if not apart.size or not np.isfinite(apart).all():
        return everywhere
    fast = np.minimum(bandwidth, bandwidth.T) >= _MUCH_SLOWER * apart.max()
    largest: tuple[int, ...] = ()
    left = set(everywhere)
    while left:
        island, pending = set[int](), [min(left)]
        while pending:
            device = pending.pop()
            if device in left:
                left.remove(device)
                island.add(device)
                pending += np.flatnonzero(fast[device]).tolist()
        largest = max(largest, tuple(sorted(island)), key=len)
    return largest


def on_island(graph: OpGraph, topology: Topology, island: tuple[int, ...]) -> tuple[OpGraph, Topology] | None:
    """Returns the same operators for these devices only; None if some are pinned elsewhere."""
    number = {device: index for index, device in enumerate(island)}
    if any(device >= 0 and device not in number for device in graph.pinned.tolist()):
        return None
    chosen = list(island)
    pinned = np.array([number.get(device, -1) for device in graph.pinned.tolist()], np.int64)
    own = dataclasses.replace(
        graph,
        seconds=graph.seconds[:, chosen],
        pinned=pinned,
        launch_seconds=graph.launch_seconds[chosen],
        copy_seconds=graph.copy_seconds[chosen],
    )
    links = np.ix_(chosen, chosen)
    names = tuple(topology.names[device] for device in chosen)
    return own, Topology(names, topology.bandwidth[links], topology.latency[links], topology.memory_bytes[chosen])


def off_island(placement: OpPlacement, topology: Topology, island: tuple[int, ...]) -> OpPlacement:
    """Renumbers a placement on an island by the numbers of all devices."""
    peaks = [0.0] * topology.count
    for device, peak in zip(island, placement.peak_bytes, strict=True):
        peaks[device] = peak
    devices = {name: island[device] for name, device in placement.devices.items()}
    return dataclasses.replace(placement, devices=devices, peak_bytes=tuple(peaks))
