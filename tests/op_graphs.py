"""Graphs of operators for tests of placements: random ones, and training steps like those of networks of cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dapple_tf.operators.op_graph import OpGraph, Topology
from graph_passes.analysis.split_rules import SplitRule

LAUNCH = 5e-6
"""Seconds to start an operator, as on a P100."""


def topology(count: int, bandwidth: float = 12e9, latency: float = 10e-6, memory: float = np.inf) -> Topology:
    """Like devices, each linked with each."""
    links, delays = np.full((count, count), float(bandwidth)), np.full((count, count), float(latency))
    np.fill_diagonal(links, np.inf)
    np.fill_diagonal(delays, 0.0)
    names = tuple(f"/device:GPU:{i}" for i in range(count))
    return Topology(names, links, delays, np.full(count, float(memory)))


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
        """Add an operator and return its number, which is its tensor's number as well."""
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
        """The graph of what was added."""
        count = len(self.names)
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(self.groups.get(op, f"#{op}"), len(numbers)) for op in range(count)]
        pinned, stored = np.full(len(numbers), -1, np.int64), np.zeros(len(numbers))
        for name, number in numbers.items():
            pinned[number], stored[number] = self.pins.get(name, -1), self.stored.get(name, 0.0)
        return OpGraph(
            names=tuple(self.names),
            ops=tuple(self.ops),
            seconds=np.array(self.seconds, float).reshape(count, self.devices),
            edges=np.array(self.edges, np.int64).reshape(-1, 4),
            tensor_bytes=np.array(self.sizes, float),
            groups=np.array(groups, np.int64),
            pinned=pinned,
            stored_bytes=stored,
            splits=self.rules,
            launch_seconds=np.full(self.devices, LAUNCH),
            copy_seconds=np.full(self.devices, 2 / 5e11),
        )


def random_graph(
    count: int,
    devices: int,
    seed: int,
    *,
    shape: str = "layered",
    transfer: float = 1.0,
    bandwidth: float = 12e9,
    groups: int = 0,
    pins: int = 0,
    uneven: bool = False,
) -> OpGraph:
    """A random graph.

    Args:
        count: operators.
        devices: V.
        seed: of the generator.
        shape: ``layered``, ``fork_join``, ``chains`` or ``random``.
        transfer: mean seconds of a transfer at ``bandwidth``, by the mean seconds of an operator.
        bandwidth: bytes/s.
        groups: colocation groups, of two to three operators each.
        pins: how many of them are pinned.
        uneven: whether operators take different times on different devices.
    """
    rng = np.random.default_rng(seed)
    builder = Builder(devices)
    mean = 1e-3
    members = {}
    for group in range(groups):
        for op in rng.choice(count, size=min(count, int(rng.integers(2, 4))), replace=False).tolist():
            members.setdefault(op, f"group{group}")
    width = max(2, round(count**0.5))
    for op in range(count):
        if shape == "layered":
            layer = op // width
            earlier = list(range(max(0, (layer - 1) * width), layer * width))
            inputs = (
                rng.choice(earlier, size=min(len(earlier), int(rng.integers(1, 4))), replace=False) if layer else []
            )
        elif shape == "fork_join":
            place = op % (width + 2)
            first = op - place
            if place == 0:
                inputs = [op - 1] if op else []
            elif place <= width:
                inputs = [first]
            else:
                inputs = list(range(first + 1, op))
        elif shape == "chains":
            inputs = [op - width] if op >= width else []
            if op >= width and rng.random() < 0.2:
                inputs.append(int(rng.integers(0, op - width + 1)))
        else:
            inputs = [one for one in range(max(0, op - 6), op) if rng.random() < 0.35]
        seconds = mean * rng.exponential(1.0) if rng.random() < 0.8 else mean * 0.01
        speeds = seconds * rng.uniform(0.5, 2.0, devices) if uneven else np.full(devices, seconds)
        size = transfer * mean * bandwidth * rng.exponential(1.0)
        chosen = sorted({int(one) for one in inputs})
        waits = chosen[:1] if len(chosen) > 2 and rng.random() < 0.3 else []
        builder.add(
            "Op", speeds.tolist(), float(size), [one for one in chosen if one not in waits], waits, members.get(op)
        )
    builder.pins = {f"group{group}": int(rng.integers(devices)) for group in range(pins)}
    return builder.graph()


_BY_BATCH = {"batch": 0, "channel": 3}


def _alike(shape: tuple[int, ...], inputs: Sequence[tuple[int, ...]]) -> tuple[SplitRule, ...]:
    """Rules of an elementwise operator on [B, H, W, C] whose inputs have this shape or [C]."""
    batch = tuple(0 if len(one) == 4 else None for one in inputs)
    channel = tuple(len(one) - 1 if one else None for one in inputs)
    return (SplitRule("batch", shape[0], batch, (0,)), SplitRule("channel", shape[3], channel, (3,)))


class CellNetwork:
    """A training step of a network of cells, made layer by layer with its gradients.

    Args:
        devices: V.
        batch: samples.
        flops: FLOP/s of a device.
        memory_bandwidth: bytes/s of a device's memory.
    """

    def __init__(self, devices: int, batch: int = 16, flops: float = 8e12, memory_bandwidth: float = 5e11) -> None:
        self.builder = Builder(devices)
        self.batch, self.flops, self.memory_bandwidth = batch, flops, memory_bandwidth
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.tape: list[tuple[str, int, tuple[int, ...]]] = []
        self.variables: dict[int, str] = {}

    def op(
        self,
        kind: str,
        shape: tuple[int, ...],
        inputs: Sequence[int],
        flops: float = 0.0,
        rules: tuple[SplitRule, ...] = (),
        group: str | None = None,
    ) -> int:
        """An operator whose time is that of a roofline."""
        size = 4.0 * float(np.prod(shape)) if shape else 4.0
        moved = size + sum(4.0 * float(np.prod(self.shapes[one])) for one in inputs)
        seconds = LAUNCH + max(flops / self.flops, moved / self.memory_bandwidth)
        number = self.builder.add(kind, seconds, size, inputs, group=group, rules=rules)
        self.shapes[number] = shape
        return number

    def variable(self, shape: tuple[int, ...]) -> int:
        """A variable's read."""
        name = f"variable{len(self.variables)}"
        read = self.op("ReadVariableOp", shape, [], group=name)
        self.builder.stored[name] = 4.0 * float(np.prod(shape))
        self.variables[read] = name
        return read

    def simple(self, kind: str, *inputs: int) -> int:
        """An elementwise operator."""
        shape = self.shapes[inputs[0]]
        rules = _alike(shape, [self.shapes[one] for one in inputs]) if len(shape) == 4 else ()
        number = self.op(kind, shape, inputs, rules=rules)
        self.tape.append((kind, number, inputs))
        return number

    def conv(self, x: int, channels: int, size: int, stride: int = 1) -> int:
        """A convolution [B, H, W, C] -> [B, H / stride, W / stride, channels]."""
        _, height, width, depth = self.shapes[x]
        kernel = self.variable((size, size, depth, channels))
        shape = (self.batch, -(-height // stride), -(-width // stride), channels)
        flops = 2.0 * float(np.prod(shape)) * size * size * depth
        rules = (SplitRule("batch", self.batch, (0, None), (0,)), SplitRule("channel", channels, (None, 3), (3,)))
        number = self.op("Conv2D", shape, [x, kernel], flops, rules)
        self.tape.append(("Conv2D", number, (x, kernel)))
        return number

    def depthwise(self, x: int, size: int, stride: int = 1) -> int:
        """A depthwise convolution."""
        _, height, width, depth = self.shapes[x]
        kernel = self.variable((size, size, depth, 1))
        shape = (self.batch, -(-height // stride), -(-width // stride), depth)
        flops = 20.0 * float(np.prod(shape)) * size * size  # a tenth of the peak is usual
        rules = (SplitRule("batch", self.batch, (0, None), (0,)), SplitRule("channel", depth, (3, 2), (3,)))
        number = self.op("DepthwiseConv2dNative", shape, [x, kernel], flops, rules)
        self.tape.append(("DepthwiseConv2dNative", number, (x, kernel)))
        return number

    def norm(self, x: int) -> int:
        """Batch normalization with its statistics, as nine operators."""
        channels = (self.shapes[x][3],)
        gamma, beta = self.variable(channels), self.variable(channels)
        by_channel = (SplitRule("channel", channels[0], (3,), (0,)),)
        mean = self.op("Mean", channels, [x], rules=by_channel)
        self.tape.append(("Mean", mean, (x,)))
        difference = self.simple("SquaredDifference", x, mean)
        variance = self.op("Mean", channels, [difference], rules=by_channel)
        self.tape.append(("Mean", variance, (difference,)))
        scale = self.simple("Mul", self.simple("Rsqrt", variance), gamma)
        shift = self.simple("Sub", beta, self.simple("Mul", mean, scale))
        for value in (mean, variance):
            name = f"moving{len(self.builder.names)}"
            old = self.op("ReadVariableOp", channels, [], group=name)
            step = self.op("Mul", channels, [self.op("Sub", channels, [old, value])])
            self.op("AssignSubVariableOp", channels, [step], group=name)
        return self.simple("AddV2", self.simple("Mul", x, scale), shift)

    def separable(self, x: int, channels: int, size: int, stride: int = 1) -> int:
        """NASNet's separable block: twice ReLU, depthwise, pointwise, normalization."""
        for step in (stride, 1):
            x = self.norm(self.conv(self.depthwise(self.simple("Relu", x), size, step), channels, 1))
        return x

    def concat(self, *inputs: int) -> int:
        """A concatenation along channels."""
        shapes = [self.shapes[one] for one in inputs]
        shape = (*shapes[0][:3], sum(one[3] for one in shapes))
        number = self.op("ConcatV2", shape, inputs, rules=(SplitRule("batch", shape[0], (0,) * len(inputs), (0,)),))
        self.tape.append(("ConcatV2", number, inputs))
        return number

    def finish(self) -> OpGraph:
        """Loss, gradients and updates."""
        last = self.tape[-1][1]
        gradients: dict[int, list[int]] = {last: [self.op("LossGrad", self.shapes[last], [last])]}
        for kind, number, inputs in reversed(self.tape):
            if number not in gradients:
                continue
            dy = self._sum(gradients.pop(number))
            for position, one in enumerate(inputs):
                gradients.setdefault(one, []).append(self._gradient(kind, number, inputs, position, dy))
        for read, name in self.variables.items():
            if read in gradients:
                gradient = self._sum(gradients[read])
                shape = self.shapes[read]
                slot = self.op("ReadVariableOp", shape, [], group=name)
                step = self.op("Mul", shape, [self.op("AddV2", shape, [self.op("Mul", shape, [slot]), gradient])])
                self.op("AssignVariableOp", shape, [step], group=name)
                self.op("AssignSubVariableOp", shape, [step, read], group=name)
        return self.builder.graph()

    def _sum(self, gradients: list[int]) -> int:
        if len(gradients) == 1:
            return gradients[0]
        shape = self.shapes[gradients[0]]
        rules = _alike(shape, [shape] * len(gradients)) if len(shape) == 4 else ()
        return self.op("AddN", shape, gradients, rules=rules)

    def _gradient(self, kind: str, number: int, inputs: tuple[int, ...], position: int, dy: int) -> int:
        one = inputs[position]
        shape, out = self.shapes[one], self.shapes[number]
        if kind in ("Conv2D", "DepthwiseConv2dNative"):
            x, kernel = inputs
            deep = kind == "Conv2D"
            size = self.shapes[kernel]
            flops = (2.0 * size[2] if deep else 20.0) * float(np.prod(out)) * size[0] * size[1]
            batch, depth = shape[0], shape[3] if position == 0 else size[3 if deep else 2]
            if position == 0:
                rules = (
                    SplitRule("batch", batch, (None, 0), (0,)),
                    SplitRule("channel", depth, (2, None if deep else 3), (3,)),
                )
                return self.op(f"{kind}BackpropInput", shape, [kernel, dy], flops, rules)
            rules = (
                SplitRule("batch", self.batch, (0, 0), (None,)),
                SplitRule("channel", depth, (None, 3) if deep else (3, 3), (3 if deep else 2,)),
            )
            return self.op(f"{kind}BackpropFilter", shape, [x, dy], flops, rules)
        if len(shape) < len(out):
            reads = [dy, *(other for other in inputs if other != one)]
            rules = (
                SplitRule("batch", out[0], tuple(0 if len(self.shapes[r]) == 4 else None for r in reads), (None,)),
                SplitRule("channel", out[3], tuple(len(self.shapes[r]) - 1 for r in reads), (0,)),
            )
            return self.op("Sum", shape, reads, rules=rules)
        if kind == "ConcatV2":
            return self.op("Slice", shape, [dy], rules=(SplitRule("batch", shape[0], (0,), (0,)),))
        if kind == "Mean":
            rules = (SplitRule("channel", shape[3], (0,), (3,)),)
            return self.op("Tile", shape, [dy], rules=rules)
        reads = [dy] if kind in ("AddV2", "Sub") else [dy, *inputs]
        rules = _alike(shape, [self.shapes[r] for r in reads]) if len(shape) == 4 else ()
        return self.op(f"{kind}Grad", shape, reads, rules=rules)


def nasnet_like(devices: int, cells: int = 18, filters: int = 168, size: int = 42, batch: int = 16) -> OpGraph:
    """A training step of a network like NASNet: cells of five blocks with two branches, reductions at thirds."""
    net = CellNetwork(devices, batch)
    image = net.op("Image", (batch, size, size, 96), [])
    before, x = image, image
    for cell in range(cells):
        stride = 2 if cell and cell % max(1, cells // 3) == 0 else 1
        filters *= stride
        skipped = net.shapes[before][1] != net.shapes[x][1]
        old = net.norm(net.conv(net.simple("Relu", before), filters, 1, 2 if skipped else 1))
        now = net.norm(net.conv(net.simple("Relu", x), filters, 1))
        blocks = []
        for left, right, sizes in (
            (now, old, (5, 3)),
            (old, old, (5, 3)),
            (now, old, (3, 0)),
            (old, old, (3, 3)),
            (now, now, (3, 0)),
        ):
            one = net.separable(left, filters, sizes[0], stride)
            if sizes[1]:
                other = net.separable(right, filters, sizes[1], stride)
            elif stride == 1:
                other = right
            else:
                other = net.norm(net.conv(right, filters, 1, stride))
            blocks.append(net.simple("AddV2", one, other))
        before, x = x, net.concat(*blocks)
    return net.finish()


def chain_network(devices: int, layers: int = 13, channels: int = 256, size: int = 56, batch: int = 32) -> OpGraph:
    """A training step of a chain of convolutions, without normalization."""
    net = CellNetwork(devices, batch)
    x = net.op("Image", (batch, size, size, channels), [])
    for _ in range(layers):
        x = net.simple("Relu", net.conv(x, channels, 3))
    return net.finish()
