"""Which operators to split: lines 2 to 6 of FD-DPS' algorithm 3.

The paper's "fine-grained conditions" are lists of operator types. Splitting pays if neighbours are split alike, so that
each part reads the corresponding part's result, without joins and transfers between. Two layouts of whole regions do
that: by samples, which is data parallelism, and by weights, columns, then rows. FastT splits single operators besides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from dapple_tf.operators.list_scheduler import critical_path, dpos_schedule, fd_dps_schedule, heft_schedule
from dapple_tf.operators.op_graph import OpGraph, PlacementError, PlacementProblem, compile_problem
from dapple_tf.operators.pieces import Pieces
from dapple_tf.operators.simulated_placement import Candidate, judged, ordered_sources, scheduled
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.analysis.split_rules import FIRST, Cut, Split, SplitRule, part_name

_HEAVY = 2e-3
"""Share of a device's mean load that makes a product heavy, so that a region grows from it."""
_LAUNCHES = 8
"""A product is also heavy if it takes as long as this many launches."""
_LARGE = 12000
"""Operators of a graph from which on the times of reads aren't adjusted before layouts are compared."""
_MOST_CRITICAL = 8
"""The most operators that OS-DPOS considers."""


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


def by_batch(base: PlacementProblem) -> Candidate | None:
    """Splits operators on samples by the batch, part k on device k: data parallelism as a placement.

    Each variable stays on one device, which sends it to the others and updates it, and sums over the batch are over all
    of it, so that it is the step that one device would run.

    Returns:
        The better placement of `batch_layouts`; None if no operator can be split into as many parts as there are
        devices.
    """
    layouts = Layouts(base, base.devices)
    tried = (_tried(layouts, layout) for layout in batch_layouts(layouts))
    return min((one for one in tried if one is not None), key=lambda one: one.rank, default=None)


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


def by_columns(base: PlacementProblem) -> Candidate | None:
    """Splits products by the columns or rows of their weights, part k on device k; None if there are none."""
    heavy = _HEAVY * sum(base.mean_seconds) / base.devices
    launch = float(np.mean(base.graph.launch_seconds))
    layouts = Layouts(base, base.devices)
    return _tried(layouts, layouts.columns_then_rows(min(heavy, _LAUNCHES * launch) if launch > 0 else heavy))


def _tried(layouts: Layouts, layout: Layout) -> Candidate | None:
    """Returns a layout's best placement with part k on device k; None if it splits nothing."""
    problem, splits = layouts.problem, layouts.splits(layout)
    if not splits:
        return None
    parts = compile_problem(apply_splits(problem.graph, splits), problem.topology)
    origin = f"{len(splits)} operators in {layouts.parts} parts"
    candidates = placed(parts, _pinned_parts(parts.graph, layouts, layout), origin, (1.0,))
    best = min(candidates, key=lambda one: one.rank)
    return ordered_sources(best) if parts.count <= _LARGE else best


def _pinned_parts(graph: OpGraph, layouts: Layouts, layout: Layout) -> np.ndarray:
    """Returns groups' devices, with part k of an operator on device k."""
    names, pinned = layouts.problem.graph.names, graph.pinned.copy()
    device_of = {
        part_name(names[op], part): part for op, rule in enumerate(layout) if rule >= 0 for part in range(layouts.parts)
    }
    for op, name in enumerate(graph.names):
        if name in device_of and pinned[graph.groups[op]] < 0:
            pinned[graph.groups[op]] = device_of[name]
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
    fewer = layouts.pruned(everything, staying)
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
    layout, most = [-1] * layouts.problem.count, max(seconds[op] for op in seeds)
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


# ---- layouts: regions of operators that are split alike

Layout = list[int]
"""For each operator the index of the rule by which it is split, -1 for none."""


class Layouts:
    """Layouts of a graph whose operators are split into a number of parts.

    Attributes:
        inputs: of each operator: (tensor, argument).
        readers: of each tensor: (operator, argument).
        rules: of each operator, the ways to split it; none for those that are bound to others.
        output: which output of its producer each tensor is.

    Args:
        problem: the operators.
        parts: number of parts.
    """

    def __init__(self, problem: PlacementProblem, parts: int) -> None:
        self.problem, self.parts = problem, parts
        graph = problem.graph
        self.inputs: list[list[tuple[int, int]]] = [[] for _ in range(graph.count)]
        self.readers: list[list[tuple[int, int]]] = [[] for _ in problem.size]
        for _, consumer, tensor, argument in graph.edges[graph.edges[:, 2] >= 0].tolist():
            self.inputs[consumer].append((tensor, argument))
            self.readers[tensor].append((consumer, argument))
        free = [len(problem.members[group]) == 1 and problem.pinned[group] < 0 for group in problem.group]
        self.rules: list[tuple[SplitRule, ...]] = [()] * graph.count
        for op, rules in graph.splits.items():
            if free[op]:
                self.rules[op] = tuple(rule for rule in rules if rule.length >= parts)
        self.output = [0] * len(problem.size) if graph.tensor_outputs is None else graph.tensor_outputs.tolist()
        self.launch = float(np.mean(graph.launch_seconds))
        self.copy = float(np.mean(graph.copy_seconds))
        off = ~np.eye(problem.devices, dtype=bool)
        self.rate = float(np.array(problem.per_byte)[off].mean()) if problem.devices > 1 else 0.0
        # The parts' inputs and outputs for each operator and rule.
        self.input_cuts: list[list[tuple[Cut | None, ...]]] = []
        self.output_cuts: list[list[tuple[Cut | None, ...]]] = []
        known: dict[int, tuple[tuple[Cut | None, ...], tuple[Cut | None, ...]]] = {}
        for rules in self.rules:
            cuts = []
            for rule in rules:
                if id(rule) not in known:
                    known[id(rule)] = (
                        tuple(rule.input_cut(argument, parts) for argument in range(len(rule.input_axes))),
                        tuple(rule.output_cut(output, parts) for output in range(len(rule.output_axes))),
                    )
                cuts.append(known[id(rule)])
            self.input_cuts.append([one for one, _ in cuts])
            self.output_cuts.append([other for _, other in cuts])

    def columns_then_rows(self, least: float) -> Layout:
        """Splits products and linked operators by the weights' columns, in the program's order.

        A product that reads what such a product makes is then split by the rows of its weights, and adds the parts'
        results: Megatron's pairs (Shoeybi et al., 2019, section 3), as far as the tensors between are cut alike. The
        backwards follow by the tensors of the forwards that they read.

        Args:
            least: seconds of a product from which regions begin.
        """
        layout = [-1] * self.problem.count
        for seed in range(self.problem.count):
            if layout[seed] < 0 and self.problem.mean_seconds[seed] >= least:
                rule = self._by_columns(seed)
                if rule >= 0:
                    self.grow(layout, seed, rule)
        return layout

    def _by_columns(self, op: int) -> int:
        """Returns a product's rule by which parts have a share of a variable each and read all else whole; -1 if none.

        A product is what can also be split into parts that are added, and what its rules cut are its factors. Factors
        that no operator makes, such as a fed batch, are no variables.
        """
        rules = self.rules[op]
        if not any(None in rule.output_axes for rule in rules):
            return -1
        cuts = [{argument for argument, axis in enumerate(rule.input_axes) if axis is not None} for rule in rules]
        variables = {argument for tensor, argument in self.inputs[op] if self._is_variable(tensor)}
        if not variables or variables >= set().union(*cuts):
            return -1
        for index, (rule, cut) in enumerate(zip(rules, cuts, strict=True)):
            if cut == variables and None not in rule.output_axes:
                return index
        return -1

    def _is_variable(self, tensor: int) -> bool:
        """Returns whether a tensor is a variable's value, in whatever shape and type."""
        problem, graph = self.problem, self.problem.graph
        while True:
            producer = problem.producer[tensor]
            if producer < 0 or len(self.inputs[producer]) > 1:
                return False
            if not self.inputs[producer]:
                return bool(graph.stored_bytes[graph.groups[producer]] > 0)
            tensor, argument = self.inputs[producer][0]
            # A sum, or what has elements for each of something else: a product of a variable and a fed batch.
            if any(
                None in rule.output_axes or rule.input_axes[argument] is None for rule in graph.splits.get(producer, ())
            ):
                return False

    def grow(self, layout: Layout, seed: int, rule: int) -> list[int]:
        """Splits an operator and all that are linked with it by tensors that are cut alike; returns them."""
        problem = self.problem
        layout[seed] = rule
        region = [seed]
        queue = deque(region)
        while queue:
            op = queue.popleft()
            mine = layout[op]
            for tensor in problem.outputs[op]:
                cut = self.output_cuts[op][mine][self.output[tensor]]
                if cut is None or cut.axis == FIRST:
                    continue
                for reader, argument in self.readers[tensor]:
                    if layout[reader] < 0:
                        match = self._reading(reader, argument, cut)
                        if match >= 0:
                            layout[reader] = match
                            region.append(reader)
                            queue.append(reader)
            for tensor, argument in self.inputs[op]:
                cuts = self.input_cuts[op][mine]
                cut = cuts[argument] if argument < len(cuts) else None
                producer = problem.producer[tensor]
                if cut is None or cut.axis == FIRST or layout[producer] >= 0:
                    continue
                match = self._making(producer, self.output[tensor], cut)
                if match >= 0:
                    layout[producer] = match
                    region.append(producer)
                    queue.append(producer)
        return region

    def pruned(self, layout: Layout, staying: AbstractSet[int]) -> Layout:
        """Drops the regions that cost more, as a whole, than they save; the lightest are tried first.

        Args:
            layout: the regions.
            staying: operators whose regions stay.
        """
        layout = list(layout)
        for region in reversed(self.regions(layout)):
            if not staying.isdisjoint(region):
                continue
            tensors = {tensor for op in region for tensor, _ in self.inputs[op]}
            tensors |= {tensor for op in region for tensor in self.problem.outputs[op]}
            rules = [layout[op] for op in region]
            costs = []
            for chosen in ([-1] * len(region), rules):
                for op, rule in zip(region, chosen, strict=True):
                    layout[op] = rule
                own = sum(self._op_cost(op, layout[op]) for op in region)
                costs.append(own + sum(self._tensor_cost(layout, tensor) for tensor in tensors))
            if costs[0] <= costs[1]:
                for op in region:
                    layout[op] = -1
        return layout

    def regions(self, layout: Layout) -> list[list[int]]:
        """Groups split operators that are linked by tensors that are cut alike; heaviest first."""
        problem = self.problem
        seen = [rule < 0 for rule in layout]
        regions = []
        for start in range(self.problem.count):
            if seen[start]:
                continue
            seen[start] = True
            region = [start]
            for op in region:
                for tensor in problem.outputs[op]:
                    cut = self.output_cuts[op][layout[op]][self.output[tensor]]
                    for reader, argument in self.readers[tensor]:
                        if not seen[reader] and cut is not None and self._cut_of(layout, reader, argument) == cut:
                            seen[reader] = True
                            region.append(reader)
                for tensor, argument in self.inputs[op]:
                    producer = problem.producer[tensor]
                    cut = self._cut_of(layout, op, argument)
                    if seen[producer] or cut is None:
                        continue
                    if self.output_cuts[producer][layout[producer]][self.output[tensor]] == cut:
                        seen[producer] = True
                        region.append(producer)
            regions.append(region)
        seconds = self.problem.mean_seconds
        return sorted(regions, key=lambda region: (-sum(seconds[op] for op in region), region[0]))

    def splits(self, layout: Layout) -> dict[str, Split]:
        """Returns a layout as splits for `apply_splits`."""
        names, rules = self.problem.graph.names, self.rules
        return {names[op]: Split(rules[op][rule].dimension, self.parts) for op, rule in enumerate(layout) if rule >= 0}

    def rule(self, op: int, dimension: str) -> int:
        """Returns the index of an operator's rule for a dimension; -1 without one."""
        return next((i for i, rule in enumerate(self.rules[op]) if rule.dimension == dimension), -1)

    def _reading(self, op: int, argument: int, cut: Cut) -> int:
        for index, cuts in enumerate(self.input_cuts[op]):
            if argument < len(cuts) and cuts[argument] == cut:
                return index
        return -1

    def _making(self, op: int, output: int, cut: Cut) -> int:
        for index, cuts in enumerate(self.output_cuts[op]):
            if cuts[output] == cut:
                return index
        return -1

    def _cut_of(self, layout: Layout, op: int, argument: int) -> Cut | None:
        rule = layout[op]
        if rule < 0:
            return None
        cuts = self.input_cuts[op][rule]
        return cuts[argument] if argument < len(cuts) else None

    def _op_cost(self, op: int, rule: int) -> float:
        seconds = self.problem.mean_seconds[op]
        if rule < 0:
            return seconds
        launch = min(self.launch, seconds)
        return launch + (seconds - launch) / self.parts

    def _tensor_cost(self, layout: Layout, tensor: int) -> float:
        """Returns the seconds of joining, cutting and sending a tensor."""
        problem, parts = self.problem, self.parts
        producer = problem.producer[tensor]
        if producer < 0:
            return 0.0
        size = self.problem.size[tensor]
        latency, rate = self.problem.mean_latency, self.rate
        rule = layout[producer]
        made = None if rule < 0 else self.output_cuts[producer][rule][self.output[tensor]]
        whole = broadcast = False
        cuts: set[Cut] = set()
        for reader, argument in self.readers[tensor]:
            if layout[reader] < 0:
                whole = True
                continue
            if argument in self.rules[reader][layout[reader]].shape_inputs:
                continue
            cut = self._cut_of(layout, reader, argument)
            if cut is None or cut.axis == FIRST:
                if made is None or cut != made:
                    broadcast = True
            elif cut != made:
                cuts.add(cut)
        if not (whole or broadcast or cuts):
            return 0.0
        cost = 0.0
        if rule >= 0:
            if made is None:
                cost += latency + size * rate + self.launch + parts * size * self.copy
            elif made.axis != FIRST:
                cost += latency + size * rate / parts + self.launch + size * self.copy
        if broadcast:
            cost += latency + size * rate
        for _ in cuts:
            cost += self.launch + size * self.copy + latency + size * rate / parts
        return cost
