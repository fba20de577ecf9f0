"""Graphs of operators for tests of placements: random ones, and a training step of a chain of convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology, compile_problem
from dapple_tf.operators.simulated_placement import SimulatedPlacement, simulate
from dapple_tf.operators.split_graph import apply_splits
from graph_passes.analysis.split_rules import SplitRule

LAUNCH = 5e-6
"""Seconds to start an operator, as on a P100."""
Axes = tuple[tuple[int | None, ...], tuple[int | None, ...]]


def topology(count: int, bandwidth: float = 12e9, latency: float = 10e-6, memory: float = np.inf) -> Topology:
    """Like devices, each linked with each."""
    links, delays = np.full((count, count), float(bandwidth)), np.full((count, count), float(latency))
    np.fill_diagonal(links, np.inf)
    np.fill_diagonal(delays, 0.0)
    names = tuple(f"/device:GPU:{i}" for i in range(count))
    return Topology(names, links, delays, np.full(count, float(memory)))


def simulated(graph: OpGraph, links: Topology, placement: OpPlacement) -> SimulatedPlacement:
    """Simulates a placement, whose groups, pins and queue are checked."""
    split = apply_splits(graph, placement.splits)
    number = {name: op for op, name in enumerate(split.names)}
    devices = [placement.devices[name] for name in split.names]
    return simulate(compile_problem(split, links), devices, [number[name] for name in placement.order])


@dataclasses.dataclass
class Builder:
    """Collects operators; each makes one tensor, read by those that name it as an input."""

    devices: int = 2
    names: list[str] = dataclasses.field(default_factory=list)
    ops: list[str] = dataclasses.field(default_factory=list)
    seconds: list[list[float]] = dataclasses.field(default_factory=list)
    sizes: list[float] = dataclasses.field(default_factory=list)
    edges: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    groups: dict[int, str] = dataclasses.field(default_factory=dict)
    pins: dict[str, int] = dataclasses.field(default_factory=dict)
    stored: dict[str, float] = dataclasses.field(default_factory=dict)
    rules: dict[int, tuple[SplitRule, ...]] = dataclasses.field(default_factory=dict)

    def add(
        self,
        op: str,
        seconds: float | Sequence[float],
        size: float,
        inputs: Sequence[int] = (),
        waits: Sequence[int] = (),
        group: str | None = None,
        rules: tuple[SplitRule, ...] = (),
    ) -> int:
        """Adds an operator and returns its number, which is its tensor's number as well."""
        number = len(self.names)
        self.names.append(f"{op}_{number}")
        self.ops.append(op)
        self.seconds.append([seconds] * self.devices if isinstance(seconds, float | int) else list(seconds))
        self.sizes.append(size)
        self.edges += [(one, number, one, position) for position, one in enumerate(inputs)]
        self.edges += [(one, number, -1, -1) for one in waits]
        if group is not None:
            self.groups[number] = group
        if rules:
            self.rules[number] = rules
        return number

    def graph(self) -> OpGraph:
        """The graph of all operators so far."""
        count = len(self.names)
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(self.groups.get(op, f"#{op}"), len(numbers)) for op in range(count)]
        return OpGraph(
            names=tuple(self.names),
            ops=tuple(self.ops),
            seconds=np.array(self.seconds, float).reshape(count, self.devices),
            edges=np.array(self.edges, np.int64).reshape(-1, 4),
            tensor_bytes=np.array(self.sizes, float),
            groups=np.array(groups, np.int64),
            pinned=np.array([self.pins.get(name, -1) for name in numbers], np.int64),
            stored_bytes=np.array([self.stored.get(name, 0.0) for name in numbers]),
            splits=self.rules,
            launch_seconds=np.full(self.devices, LAUNCH),
            copy_seconds=np.full(self.devices, 2 / 5e11),
        )


def random_graph(
    count: int,
    devices: int,
    seed: int,
    shape: str = "layered",
    *,
    transfer: float = 1.0,
    groups: int = 0,
    pins: int = 0,
    uneven: bool = False,
) -> OpGraph:
    """A random graph, ``layered``, of ``fork_join`` or ``chains``, or ``random``.

    Args:
        count: operators.
        devices: V.
        seed: of the generator.
        shape: see above.
        transfer: mean seconds of a transfer at 12 GB/s, by the mean seconds of an operator.
        groups: colocation groups, of two to three operators each.
        pins: how many of them are pinned.
        uneven: whether operators take different times on different devices.
    """
    rng = np.random.default_rng(seed)
    builder = Builder(devices)
    members = {}
    for group in range(groups):
        for op in rng.choice(count, size=min(count, int(rng.integers(2, 4))), replace=False).tolist():
            members.setdefault(op, f"group{group}")
    width = max(2, round(count**0.5))
    for op in range(count):
        first = op - op % width
        inputs: list[int] = []
        if shape == "layered" and first:
            inputs = rng.choice(range(first - width, first), size=min(width, int(rng.integers(1, 4))), replace=False)
        elif shape == "fork_join":
            first, place = op - op % (width + 2), op % (width + 2)
            ends = {0: range(max(0, op - 1), op), width + 1: range(first + 1, op)}
            inputs = [*ends.get(place, [first])]
        elif shape == "chains" and op >= width:
            inputs = [op - width] + [int(rng.integers(0, op - width + 1))] * (rng.random() < 0.2)
        elif shape == "random":
            inputs = [one for one in range(max(0, op - 6), op) if rng.random() < 0.35]
        seconds = 1e-3 * rng.exponential(1.0) if rng.random() < 0.8 else 1e-5
        speeds = seconds * rng.uniform(0.5, 2.0, devices) if uneven else np.full(devices, seconds)
        size = transfer * 12e6 * rng.exponential(1.0)
        chosen = sorted({int(one) for one in inputs})
        waits = chosen[:1] if len(chosen) > 2 and rng.random() < 0.3 else []
        builder.add("Op", speeds.tolist(), size, [one for one in chosen if one not in waits], waits, members.get(op))
    builder.pins = {f"group{group}": int(rng.integers(devices)) for group in range(pins)}
    return builder.graph()


def chain_network(devices: int, layers: int) -> OpGraph:
    """A training step of a chain of convolutions on devices of 8 TFLOP/s whose memory has 500 GB/s."""
    builder = Builder(devices)
    lengths = {"batch": 32, "channel": 256}
    tensor, kernel, flops = 4.0 * 32 * 56 * 56 * 256, 4.0 * 3 * 3 * 256 * 256, 2.0 * 32 * 56 * 56 * 3 * 3 * 256 * 256

    def add(op: str, size: float, inputs: Sequence[int] = (), group: str | None = None, **cuts: Axes) -> int:
        moved = size + sum(builder.sizes[one] for one in inputs)
        rules = tuple(SplitRule(dimension, lengths[dimension], *axes) for dimension, axes in cuts.items())
        seconds = LAUNCH + max(flops / 8e12 if "Conv" in op else 0.0, moved / 5e11)
        return builder.add(op, seconds, size, inputs, group=group, rules=rules)

    def elementwise(op: str, *inputs: int) -> int:
        count = len(inputs)
        return add(op, tensor, inputs, batch=((0,) * count, (0,)), channel=((3,) * count, (3,)))

    x = add("Image", tensor)
    forwards, gradients = [], []
    for layer in range(layers):
        name = f"variable{layer}"
        builder.stored[name] = kernel
        read = add("ReadVariableOp", kernel, group=name)
        y = add("Conv2D", tensor, (x, read), batch=((0, None), (0,)), channel=((None, 3), (3,)))
        forwards.append((name, x, read, y))
        x = elementwise("Relu", y)
    dy = add("LossGrad", tensor, (x,))
    for name, x, read, y in reversed(forwards):
        dy = elementwise("ReluGrad", dy, y)
        axes: dict[str, Axes] = {"batch": ((0, 0), (None,)), "channel": ((None, 3), (3,))}
        gradients.append((name, read, add("Conv2DBackpropFilter", kernel, (x, dy), **axes)))
        dy = add("Conv2DBackpropInput", tensor, (read, dy), batch=((None, 0), (0,)), channel=((2, None), (3,)))
    for name, read, gradient in gradients:
        slot = add("Mul", kernel, (add("ReadVariableOp", kernel, group=name),))
        step = add("Mul", kernel, (add("AddV2", kernel, (slot, gradient)),))
        add("AssignVariableOp", kernel, (step,), group=name)
        add("AssignSubVariableOp", kernel, (step, read), group=name)
    return builder.graph()
