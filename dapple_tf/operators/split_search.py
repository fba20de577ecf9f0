"""Decides by the simulated makespan which operators to split: lines 2 to 6 of FD-DPS' algorithm 3.

The paper's "fine-grained conditions" are lists of operator types; here `split_layouts` guesses, and the simulator
decides.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.list_scheduler import critical_path, dpos_schedule, fd_dps_schedule, heft_schedule
from dapple_tf.operators.op_graph import OpGraph, PlacementError, PlacementProblem, compile_problem
from dapple_tf.operators.pieces import Pieces
from dapple_tf.operators.simulated_placement import Candidate, judged, ordered_sources, scheduled
from dapple_tf.operators.split_graph import apply_splits
from dapple_tf.operators.split_layouts import Layout, Layouts
from graph_passes.analysis.split_rules import Split, part_name

_HEAVY = 2e-3
"""Share of a device's mean load that makes an operator heavy, so that a region grows from it."""
_LARGE = 12000
"""Operators of a graph from which on only one part for each device is tried."""
_LAUNCHES = 8
"""An operator is also heavy if it takes as long as this many launches."""
_DISCOUNT = 0.4
"""Share of an unsplit operator's time that a guess counts, as others run meanwhile."""
_WORSE = 1.6
"""How much worse than the best guess another's estimate may be for it to be tried."""
_DROPS = 3
"""Number of attempts to leave out a share of the regions."""
_OTHERS = 3
"""Number of placements besides the best one that are returned."""
_MOST_CRITICAL = 8
"""The most operators that OS-DPOS considers."""


class Budget:
    """The search's remaining budget, in visited operators, which is the same on every machine."""

    def __init__(self, visits: float) -> None:
        self.visits = self.total = visits

    def spend(self, visits: float) -> bool:
        """Spends ``visits``; returns False if fewer are left."""
        if visits > self.visits:
            return False
        self.visits -= visits
        return True

    @property
    def spent_share(self) -> float:
        """Share of the budget that is spent."""
        return 1.0 - self.visits / self.total if self.total else 1.0


def placed(
    problem: PlacementProblem, pinned: np.ndarray | None, origin: str, weights: Sequence[float] = (1.0, 0.0)
) -> list[Candidate]:
    """Places a graph's pieces by dynamic critical paths and by ranks, with queues for single operators.

    Args:
        problem: the operators.
        pinned: device of each group, in place of the graph's own.
        origin: how they are found.
        weights: of communication in paths after operators.
    """
    pieces = Pieces.of(problem, pinned)
    candidates = []
    for weight in weights:
        devices = fd_dps_schedule(pieces.problem, weight=weight)[0]
        candidates.append(scheduled(problem, pieces.spread(devices), origin))
    devices = heft_schedule(pieces.problem)[0]
    candidates.append(scheduled(problem, pieces.spread(devices), f"{origin}, by ranks"))
    return candidates


def placed_cost(count: int) -> float:
    """Returns the visits that `placed` and splitting spend on ``count`` operators."""
    return 6.0 * count


def by_batch(base: PlacementProblem) -> Candidate | None:
    """Splits operators on samples by the batch, part k on device k: data parallelism as a placement.

    Each variable stays on one device, which sends it to the others and updates it, and sums over the batch are over all
    of it, so that it is the step that one device would run.

    Returns:
        The better placement of `batch_layouts`; None if no operator can be split into as many parts as there are
        devices.
    """
    layouts = Layouts(base, base.devices)
    tried = (_tried(layouts, layout, None, lambda text: None) for layout in batch_layouts(layouts))
    return min((one.candidate for one in tried if one is not None), key=lambda one: one.rank, default=None)


def fast_t_candidate(base: PlacementProblem, start: Candidate | None) -> Candidate:
    """Returns FastT's placement (Yi et al., Middleware 2020), named in sections 2.2 and 5.2 of FD-DPS.

    It begins with the graph of data parallelism, whose operators DPOS places and orders. OS-DPOS then takes the whole
    operators on the critical path, the longest first, and splits each where DPOS gets a shorter step with it, until one
    doesn't help. If data parallelism is faster than all of that, FastT goes back to it.

    Args:
        base: the graph without splits.
        start: data parallelism; None begins with the operators as they are.
    """
    best = dpos(base if start is None else start.problem)
    graph, devices = base.graph, base.devices
    number = {name: op for op, name in enumerate(graph.names)}
    for name in _whole_and_critical(best.problem):
        better = best
        for rule in graph.splits[number[name]]:
            parts = min(devices, rule.length)
            if parts > 1:
                splits = {**best.problem.graph.applied, name: Split(rule.dimension, parts)}
                problem = compile_problem(apply_splits(graph, splits), base.topology)
                better = min(better, dpos(problem), key=lambda one: one.rank)
        if better is best:
            break
        best = better
    return best if start is None else min(best, start, key=lambda one: one.rank)


def dpos(problem: PlacementProblem) -> Candidate:
    """Returns the placement and order of DPOS, simulated: without further splits, and without going back."""
    return judged(problem, *dpos_schedule(problem), "FastT")


def _whole_and_critical(problem: PlacementProblem) -> list[str]:
    """Returns the names of operators on the critical path that can be split, the longest first."""
    if problem.devices == 1:
        return []
    free = [
        op
        for op in critical_path(problem)
        if problem.graph.splits.get(op)
        and len(problem.members[problem.group[op]]) == 1
        and problem.pinned[problem.group[op]] < 0
    ]
    longest = sorted(free, key=lambda op: (-problem.mean_seconds[op], op))[:_MOST_CRITICAL]
    return [problem.graph.names[op] for op in longest]


def split_candidates(
    base: PlacementProblem, best: Candidate, budget: Budget, tell: Callable[[str], None]
) -> list[Candidate]:
    """Searches regions of operators to split.

    Args:
        base: the graph without splits.
        best: the best placement so far.
        budget: the remaining visits.
        tell: receives the current activity.

    Returns:
        The best placement, with splits if any pay, then those of the next best layouts that were tried.
    """
    problem = base
    heavy = _HEAVY * sum(problem.mean_seconds) / problem.devices
    launch = float(np.mean(problem.graph.launch_seconds))
    if launch > 0:
        heavy = min(heavy, _LAUNCHES * launch)
    guesses: list[tuple[float, Layouts, Layout]] = []
    for parts in sorted({problem.devices, max(2, problem.devices // 2), 2}, reverse=True):
        if parts < problem.devices and problem.count > _LARGE:
            break
        layouts = Layouts(problem, parts)
        seen: set[tuple[int, ...]] = set()
        for layout in itertools.islice(_guesses(layouts, heavy), None if problem.count <= 3 * _LARGE else 1):
            if tuple(layout) not in seen and max(layout, default=-1) >= 0:
                seen.add(tuple(layout))
                guesses.append((layouts.cost(layout), layouts, layout))
    guesses.sort(key=lambda guess: guess[0])
    tried: _Tried | None = None
    others: list[Candidate] = []
    for index, (cost, layouts, layout) in enumerate(guesses):
        if cost > _WORSE * guesses[0][0]:
            break
        one = _tried(layouts, layout, budget, tell, first=index == 0)
        if one is None:
            break
        others = heapq.nsmallest(_OTHERS + 1, [*others, one.candidate], key=lambda other: other.rank)
        if one.candidate.rank < best.rank:
            best, tried = one.candidate, one
    if tried is None:
        return [best, *others[:_OTHERS]]
    tried = _without_light_regions(tried, budget, tell)
    others = [one for one in others if one is not tried.candidate][:_OTHERS]
    problem = tried.candidate.problem
    if budget.spend(placed_cost(problem.count)):
        # Ranks of single operators, if those of pieces were good enough so far.
        pinned = dataclasses.replace(problem, pinned=tried.pinned.tolist())
        ranked = scheduled(tried.candidate.problem, heft_schedule(pinned)[0], tried.candidate.origin)
        return [min(tried.candidate, ranked, key=lambda one: one.rank), *others]
    return [tried.candidate, *others]


class _Tried(NamedTuple):
    """A tried layout, and its groups' devices with each part on a device of its own."""

    candidate: Candidate
    layouts: Layouts
    layout: Layout
    pinned: np.ndarray


def _without_light_regions(tried: _Tried, budget: Budget, tell: Callable[[str], None]) -> _Tried:
    """Drops the lighter half of the regions, or that half's heavier half, as long as that helps."""
    for _ in range(_DROPS):
        layouts = tried.layouts
        regions = layouts.regions(tried.layout)
        if len(regions) < 2:
            return tried
        before = tried
        for start, stop in ((len(regions) // 2, len(regions)), (len(regions) // 4, len(regions) // 2)):
            fewer = list(tried.layout)
            for region in regions[start:stop]:
                for op in region:
                    fewer[op] = -1
            one = _tried(layouts, fewer, budget, tell) if fewer != tried.layout else None
            if one is not None and one.candidate.rank < tried.candidate.rank:
                tried = one
                break
        if tried is before:
            return tried
    return tried


def _guesses(layouts: Layouts, heavy: float) -> Iterator[Layout]:
    """Yields layouts to try: regions by batch, by channel, or by both; the most promising first."""
    names = sorted(
        {rule.dimension for rules in layouts.rules for rule in rules},
        key=lambda name: (name != "batch", name != "channel", name),
    )
    if not names:
        return
    none = layouts.none()
    by_batch = everything = layouts.grown(none, names[0], heavy)
    for name in names[1:]:
        everything = layouts.grown(everything, name, heavy)
    mixed = layouts.refined(everything)
    yield mixed
    yield layouts.pruned(mixed)
    batch = layouts.refined(by_batch)
    yield batch
    yield layouts.pruned(batch)
    yield layouts.refined(by_batch, together=False)
    if len(names) > 1:
        yield layouts.refined(layouts.grown(layouts.grown(none, names[1], heavy), names[0], heavy))
    yield layouts.refined(everything, _DISCOUNT)
    yield layouts.columns_then_rows(heavy)


def _tried(
    layouts: Layouts,
    layout: Layout,
    budget: Budget | None,
    tell: Callable[[str], None],
    first: bool = False,
) -> _Tried | None:
    """Returns a layout's best placement; None if it splits nothing, or isn't the first and the budget is spent.

    Without a budget it isn't counted.
    """
    problem, splits = layouts.problem, layouts.splits(layout)
    if not splits:
        return None
    about = problem.count + len(splits) * (layouts.parts + 1)
    if budget is not None and not budget.spend(2 * placed_cost(about)) and not first:
        return None
    tell(f"splitting {len(splits):,} operators")
    parts = compile_problem(apply_splits(problem.graph, splits), problem.topology)
    origin = f"{len(splits)} operators in {layouts.parts} parts"
    pinned = _pinned_parts(parts.graph, layouts, layout)
    candidates = placed(parts, pinned, origin, (1.0,))
    best = min(candidates, key=lambda one: one.rank)
    if parts.count <= _LARGE:
        best = ordered_sources(best)
    return _Tried(best, layouts, layout, pinned)


def _pinned_parts(graph: OpGraph, layouts: Layouts, layout: Layout) -> np.ndarray:
    """Returns groups' devices, with part k of an operator on device k; on its region's devices if they are fewer."""
    problem, pinned = layouts.problem, graph.pinned.copy()
    teams = max(1, problem.devices // layouts.parts)
    names = problem.graph.names
    parts = {}
    for index, region in enumerate(layouts.regions(layout)):
        first = index % teams * layouts.parts
        for op in region:
            for part in range(layouts.parts):
                parts[part_name(names[op], part)] = first + part
    for op, name in enumerate(graph.names):
        device = parts.get(name)
        if device is not None and pinned[graph.groups[op]] < 0:
            pinned[graph.groups[op]] = device
    _spread_variables(graph, pinned)
    return pinned


def _spread_variables(graph: OpGraph, pinned: np.ndarray) -> None:
    """Distributes variables that parts on several devices read, so that devices send equal amounts.

    The largest go first, each to the device that has the least.
    """
    edges = graph.edges[graph.edges[:, 2] >= 0]
    group, place = graph.groups[edges[:, 0]], pinned[graph.groups[edges[:, 1]]]
    read = (graph.stored_bytes[group] > 0) & (pinned[group] < 0) & (place >= 0)
    pairs = np.unique(np.column_stack((group[read], place[read])), axis=0)
    groups, counts = np.unique(pairs[:, 0], return_counts=True)
    held = [0.0] * len(graph.launch_seconds)
    for one in sorted(groups[counts > 1].tolist(), key=lambda one: (-graph.stored_bytes[one], one)):
        device = min(range(len(held)), key=lambda v: (held[v], v))
        pinned[one] = device
        held[device] += graph.stored_bytes[one]


# ---- data parallelism as a split: operators that work on samples are split by the batch


def batch_layouts(layouts: Layouts) -> list[Layout]:
    """Returns the layouts by which operators on samples may be split by the batch; none if none of them can be.

    The last one splits all `samples_operators` that have a rule for it. Some of these compute with vectors of channels,
    of which each replica needs all: where that makes a difference, another layout, the first, splits regions that
    aren't linked with the heaviest operator only where that seems cheaper.
    """
    try:
        linked = _linked_with_heaviest(layouts)
    except PlacementError:
        return []
    between = _between(layouts.problem, linked)
    everything = [layouts.rule(op, "batch") if between[op] else -1 for op in range(layouts.problem.count)]
    staying = {op for op, rule in enumerate(linked) if rule >= 0 and rule == everything[op]}
    fewer = layouts.pruned(everything, staying=staying)
    return [everything] if fewer == everything else [fewer, everything]


def samples_operators(problem: PlacementProblem) -> np.ndarray:
    """Returns which operators work on samples: bool [n].

    These are the operators that can be split by batch together with the heaviest one that works on samples, and all
    between them.

    Raises:
        PlacementError: there are none.
    """
    return _between(problem, _linked_with_heaviest(Layouts(problem, 2)))


def _linked_with_heaviest(layouts: Layouts) -> Layout:
    """Splits the heaviest operator on samples by batch, with operators of equally cut tensors."""
    seeds = [op for op in range(layouts.problem.count) if layouts.rule(op, "batch") >= 0]
    if not seeds:
        raise PlacementError(
            "no operator can be split by batch, so the step can't be data-parallel; give the graph's operators "
            "their splits"
        )
    from_batch = _from_fed_batch(layouts)
    # The rows of a variable, of its gradient and of its update are called a batch, too.
    seeds = [op for op in seeds if from_batch[op]] or seeds
    seconds = layouts.problem.mean_seconds
    layout, most = layouts.none(), max(seconds[op] for op in seeds)
    for op in seeds:
        if layout[op] < 0 and seconds[op] == most:
            layouts.grow(layout, op, layouts.rule(op, "batch"))
    return layout


def _from_fed_batch(layouts: Layouts) -> list[bool]:
    """Returns the operators that need fed values, other than by sums over the batch."""
    problem = layouts.problem
    needing = [False] * problem.count
    for op in range(problem.count):
        rule = layouts.rule(op, "batch")
        if rule >= 0:
            computed = {argument for _, argument in layouts.inputs[op]}
            cut = {argument for argument, axis in enumerate(layouts.rules[op][rule].input_axes) if axis is not None}
            needing[op] = not cut <= computed  # No operator computes what is fed.
        for tensor, _ in layouts.inputs[op]:
            producer = problem.producer[tensor]
            needing[op] |= needing[producer] and not _sums_over_batch(layouts, producer)
    return needing


def _sums_over_batch(layouts: Layouts, op: int) -> bool:
    rule = layouts.rule(op, "batch")
    return rule >= 0 and all(axis is None for axis in layouts.rules[op][rule].output_axes)


def _between(problem: PlacementProblem, layout: Layout) -> np.ndarray:
    """Returns which operators are split, or both need and are needed by some that are: bool [n]."""
    inside = np.array(layout) >= 0
    before, behind = inside.copy(), inside.copy()
    for op in range(problem.count):
        needs = [*(problem.producer[tensor] for tensor in problem.inputs[op]), *problem.waits[op]]
        before[op] |= bool(before[needs].any())
    for op in range(problem.count - 1, -1, -1):
        uses = [*(reader for tensor in problem.outputs[op] for reader in problem.readers[tensor]), *problem.waiters[op]]
        behind[op] |= bool(behind[uses].any())
    return np.asarray(before & behind)
