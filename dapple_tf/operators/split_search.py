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

from dapple_tf.operators.batch_split import batch_layouts
from dapple_tf.operators.dynamic_critical_path import schedule_by_critical_path
from dapple_tf.operators.heft import heft_schedule
from dapple_tf.operators.op_graph import OpGraph
from dapple_tf.operators.placement_candidates import Candidate, Pieces, Variant, ordered_sources, scheduled, variant_of
from dapple_tf.operators.placement_problem import PlacementProblem, tails
from dapple_tf.operators.split_graph import apply_splits
from dapple_tf.operators.split_layouts import Layout, Layouts
from graph_passes.analysis.split_rules import part_name

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
_SHARES_ALONE = (1.0, 0.5, 0.2, 0.05, 0.01)
"""Shares of the splits of single operators that are tried, those that save most."""


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
    variant: Variant, pinned: np.ndarray | None, origin: str, weights: Sequence[float] = (1.0, 0.0)
) -> list[Candidate]:
    """Places a graph's pieces by dynamic critical paths and by ranks, with queues for single operators.

    Args:
        variant: the graph.
        pinned: device of each group, in place of the graph's own.
        origin: how they are found.
        weights: of communication in paths after operators.
    """
    pieces = Pieces.of(variant.problem, pinned)
    candidates = []
    for weight in weights:
        devices = schedule_by_critical_path(pieces.problem, tails(pieces.problem, None, weight))[0]
        candidates.append(scheduled(variant, pieces.spread(devices), origin))
    devices = heft_schedule(pieces.problem)[0]
    candidates.append(scheduled(variant, pieces.spread(devices), f"{origin}, by ranks"))
    return candidates


def placed_cost(count: int) -> float:
    """Returns the visits that `placed` and splitting spend on ``count`` operators."""
    return 6.0 * count


def by_batch(base: Variant) -> Candidate | None:
    """Splits operators on samples by the batch, part k on device k: data parallelism as a placement.

    Each variable stays on one device, which sends it to the others and updates it, and sums over the batch are over all
    of it, so that it is the step that one device would run.

    Returns:
        The better placement of `batch_layouts`; None if no operator can be split into as many parts as there are
        devices.
    """
    layouts = Layouts(base.problem, base.problem.devices)
    tried = (by_layout(base, layouts, layout) for layout in batch_layouts(layouts))
    return min((one for one in tried if one is not None), key=lambda one: one.rank, default=None)


def by_layout(base: Variant, layouts: Layouts, layout: Layout) -> Candidate | None:
    """Splits operators as a layout says, part k on device k, and places the others.

    Args:
        base: the graph without splits.
        layouts: the ways to split its operators.
        layout: one of them.

    Returns:
        The placement; None if nothing is split.
    """
    one = _tried(base, layouts, layout, None, lambda text: None)
    return None if one is None else one.candidate


def split_alone(base: Variant, best: Candidate, tell: Callable[[str], None]) -> Candidate:
    """Splits single operators whose neighbours are whole, as the paper does.

    Operators are ordered by what splitting each by itself saves, with its inputs cut and its output joined, and the
    first of them are split, more or fewer.

    Args:
        base: the graph without splits.
        best: the best placement without splits.
        tell: receives the current activity.

    Returns:
        The best placement, with splits if any pay.
    """
    layouts = Layouts(base.problem, base.problem.devices)
    gains = layouts.alone(1.0)
    for count in sorted({round(share * len(gains)) for share in _SHARES_ALONE}, reverse=True):
        layout = layouts.none()
        for _, op, rule in gains[:count]:
            layout[op] = rule
        one = _tried(base, layouts, layout, None, tell)
        if one is not None and one.candidate.rank < best.rank:
            best = one.candidate
    return best


def split_candidates(base: Variant, best: Candidate, budget: Budget, tell: Callable[[str], None]) -> list[Candidate]:
    """Searches regions of operators to split.

    Args:
        base: the graph without splits.
        best: the best placement so far.
        budget: the remaining visits.
        tell: receives the current activity.

    Returns:
        The best placement, with splits if any pay, then those of the next best layouts that were tried.
    """
    problem = base.problem
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
        one = _tried(base, layouts, layout, budget, tell, first=index == 0)
        if one is None:
            break
        others = heapq.nsmallest(_OTHERS + 1, [*others, one.candidate], key=lambda other: other.rank)
        if one.candidate.rank < best.rank:
            best, tried = one.candidate, one
    if tried is None:
        return [best, *others[:_OTHERS]]
    tried = _without_light_regions(base, tried, budget, tell)
    others = [one for one in others if one is not tried.candidate][:_OTHERS]
    problem = tried.candidate.variant.problem
    if budget.spend(placed_cost(problem.count)):
        # Ranks of single operators, if those of pieces were good enough so far.
        pinned = dataclasses.replace(problem, pinned=tried.pinned.tolist())
        ranked = scheduled(tried.candidate.variant, heft_schedule(pinned)[0], tried.candidate.origin)
        return [min(tried.candidate, ranked, key=lambda one: one.rank), *others]
    return [tried.candidate, *others]


class _Tried(NamedTuple):
    """A tried layout, and its groups' devices with each part on a device of its own."""

    candidate: Candidate
    layouts: Layouts
    layout: Layout
    pinned: np.ndarray


def _without_light_regions(base: Variant, tried: _Tried, budget: Budget, tell: Callable[[str], None]) -> _Tried:
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
            one = _tried(base, layouts, fewer, budget, tell) if fewer != tried.layout else None
            if one is not None and one.candidate.rank < tried.candidate.rank:
                tried = one
                break
        if tried is before:
            return tried
    return tried


def _guesses(layouts: Layouts, heavy: float) -> Iterator[Layout]:
    """Yields layouts to try: regions by batch, by channel, or by both; the most promising first."""
    names = sorted(
        {rule.dimension for rules in layouts.reads.rules for rule in rules},
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
    base: Variant,
    layouts: Layouts,
    layout: Layout,
    budget: Budget | None,
    tell: Callable[[str], None],
    first: bool = False,
) -> _Tried | None:
    """Returns a layout's best placement; None if it splits nothing, or isn't the first and the budget is spent.

    Without a budget it isn't counted.
    """
    problem = base.problem
    splits = layouts.splits(layout)
    if not splits:
        return None
    about = problem.count + len(splits) * (layouts.parts + 1)
    if budget is not None and not budget.spend(2 * placed_cost(about)) and not first:
        return None
    tell(f"splitting {len(splits):,} operators")
    graph = apply_splits(problem.graph, splits)
    variant = variant_of(graph, problem.topology, splits)
    origin = f"{len(splits)} operators in {layouts.parts} parts"
    pinned = _pinned_parts(graph, layouts, layout, problem)
    candidates = placed(variant, pinned, origin, (1.0,))
    best = min(candidates, key=lambda one: one.rank)
    if variant.problem.count <= _LARGE:
        best = ordered_sources(best)
    return _Tried(best, layouts, layout, pinned)


def _pinned_parts(graph: OpGraph, layouts: Layouts, layout: Layout, problem: PlacementProblem) -> np.ndarray:
    """Returns groups' devices, with part k of an operator on device k; on its region's devices if they are fewer."""
    pinned = graph.pinned.copy()
    number = {name: op for op, name in enumerate(graph.names)} if layouts.parts < problem.devices else None
    teams = max(1, problem.devices // layouts.parts)
    names = problem.graph.names
    if number is None:
        parts = {
            part_name(names[op], part): part
            for op, rule in enumerate(layout)
            if rule >= 0
            for part in range(layouts.parts)
        }
    else:
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
