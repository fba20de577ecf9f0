"""Guesses which operators to split: layouts for whole regions of operators that are split alike.

Splitting pays if neighbours are split alike, so that each part reads the corresponding part's result, without joins and
transfers between. A region grows from a heavy operator over its neighbours along the axis on which they agree
(FD-DPS, section 4.1, splits single operators; light ones are split here for the sake of the heavy ones around them).
Then another split, or none, is tried for every operator in turn and kept if it is cheaper given its neighbours: by the
time of a part, and of joins, cuts and transfers at the borders. The simulated makespan decides which guess is best, if
any.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Set as AbstractSet

import numpy as np

from dapple_tf.operators.op_graph import PlacementProblem
from graph_passes.analysis.split_rules import FIRST, Cut, Split, SplitRule

_SWEEPS = 4
"""The most times that each operator's split is reconsidered."""
_DEAR = 64
"""Number of tensors whose readers are reconsidered together."""
_COMBINATIONS = 125
"""The most ways to split all readers of a tensor for which they are reconsidered together."""


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

    def none(self) -> Layout:
        """Returns the layout without splits."""
        return [-1] * self.problem.count

    def grown(self, layout: Layout, dimension: str, least: float) -> Layout:
        """Grows regions from operators of ``least`` seconds that can be split along a dimension, heaviest first."""
        layout = list(layout)
        seconds = self.problem.mean_seconds
        seeds = [op for op in self._splittable() if seconds[op] >= least]
        for seed in sorted(seeds, key=lambda op: (-seconds[op], op)):
            if layout[seed] < 0:
                rule = self.rule(seed, dimension)
                if rule >= 0:
                    self.grow(layout, seed, rule)
        return layout

    def columns_then_rows(self, least: float) -> Layout:
        """Splits products and linked operators by the weights' columns, in the program's order.

        A product that reads what such a product makes is then split by the rows of its weights, and adds the parts'
        results: Megatron's pairs (Shoeybi et al., 2019, section 3), as far as the tensors between are cut alike. The
        backwards follow by the tensors of the forwards that they read.

        Args:
            least: seconds of a product from which regions begin.
        """
        layout = self.none()
        for seed in self._splittable():
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

    def refined(self, layout: Layout, discount: float = 1.0, *, together: bool = True) -> Layout:
        """Changes the split of single operators as long as that is cheaper.

        Args:
            layout: where to start.
            discount: share of an unsplit operator's seconds that count, as others run meanwhile.
            together: whether the readers of one tensor are changed together as well.
        """
        layout = list(layout)
        ops = self._splittable()
        changed = set(ops)
        for sweep in range(_SWEEPS):
            order = ops if sweep % 2 == 0 else ops[::-1]
            again: set[int] = set()
            for op in order:
                if op not in changed:
                    continue
                old = layout[op]
                best, least = old, self._cost_around(layout, op, discount)
                for rule in range(-1, len(self.rules[op])):
                    if rule != old:
                        layout[op] = rule
                        cost = self._cost_around(layout, op, discount)
                        if cost < least - 1e-12:
                            best, least = rule, cost
                layout[op] = best
                if best != old:
                    again |= self._around(op)
            if together:
                again |= self._together(layout, discount)
            if not again:
                break
            changed = again
        return layout

    def _together(self, layout: Layout, discount: float) -> set[int]:
        """Changes the readers of each of the most expensive tensors together, where each alone would gain nothing.

        For example, a large variable is sent whole as long as one of its readers reads it whole.
        """
        costs = [(self._tensor_cost(layout, tensor), -tensor) for tensor in range(len(self.problem.size))]
        again: set[int] = set()
        for cost, negative in heapq.nlargest(_DEAR, costs):
            ops = sorted({op for op, _ in self.readers[-negative] if self.rules[op]})
            choices = [range(-1, len(self.rules[op])) for op in ops]
            if cost <= 0 or len(ops) < 2 or math.prod(map(len, choices)) > _COMBINATIONS:
                continue
            tensors = {tensor for op in ops for tensor, _ in self.inputs[op]}
            tensors |= {tensor for op in ops for tensor in self.problem.outputs[op]}
            old = tuple(layout[op] for op in ops)
            best, least = old, np.inf
            for rules in (old, *itertools.product(*choices)):
                for op, rule in zip(ops, rules, strict=True):
                    layout[op] = rule
                total = sum(self._op_cost(op, layout[op], discount) for op in ops)
                total += sum(self._tensor_cost(layout, tensor) for tensor in tensors)
                if total < least - 1e-12:
                    best, least = rules, total
            for op, rule in zip(ops, best, strict=True):
                layout[op] = rule
            if best != old:
                again |= {other for op in ops for other in self._around(op)}
        return again

    def pruned(self, layout: Layout, discount: float = 1.0, staying: AbstractSet[int] = frozenset()) -> Layout:
        """Drops the regions that cost more, as a whole, than they save; the lightest are tried first.

        Args:
            layout: the regions.
            discount: see `refined`.
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
                own = sum(self._op_cost(op, layout[op], discount) for op in region)
                costs.append(own + sum(self._tensor_cost(layout, tensor) for tensor in tensors))
            if costs[0] <= costs[1]:
                for op in region:
                    layout[op] = -1
        return layout

    def cost(self, layout: Layout, discount: float = 1.0) -> float:
        """Returns the seconds of all operators in sequence, with transfers between them: what `refined` reduces."""
        total = sum(self._op_cost(op, layout[op], discount) for op in range(self.problem.count))
        return total + sum(self._tensor_cost(layout, tensor) for tensor in range(len(self.problem.size)))

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

    def _splittable(self) -> list[int]:
        return [op for op, rules in enumerate(self.rules) if rules]

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

    def _around(self, op: int) -> set[int]:
        problem = self.problem
        around = {op}
        for tensor, _ in self.inputs[op]:
            if self.rules[problem.producer[tensor]]:
                around.add(problem.producer[tensor])
            if len(self.readers[tensor]) <= 16:
                around |= {reader for reader, _ in self.readers[tensor] if self.rules[reader]}
        for tensor in problem.outputs[op]:
            around |= {reader for reader, _ in self.readers[tensor] if self.rules[reader]}
        return around

    def _cost_around(self, layout: Layout, op: int, discount: float) -> float:
        cost = self._op_cost(op, layout[op], discount)
        for tensor, _ in self.inputs[op]:
            cost += self._tensor_cost(layout, tensor)
        for tensor in self.problem.outputs[op]:
            cost += self._tensor_cost(layout, tensor)
        return cost

    def _op_cost(self, op: int, rule: int, discount: float) -> float:
        seconds = self.problem.mean_seconds[op]
        if rule < 0:
            return discount * seconds
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
