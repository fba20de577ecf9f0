"""The task graph of a step, as in figure 10 of the DAPPLE paper: devices as lanes, tasks and what connects them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class TensorText(NamedTuple):
    """A tensor's description.

    Attributes:
        name: its meaning: ``block_1/Relu``, ``gradient(block_1/Relu)``.
        dtype: its dtype: ``float32``.
        shape: its shape: ``[8, 32]``; empty if it isn't known.
        bytes: its bytes; None if they aren't known.
    """

    name: str
    dtype: str
    shape: str
    bytes: float | None


class TaskNode(NamedTuple):
    """A node of the drawing.

    Attributes:
        name: name of the node in the step's graph.
        label: short text: ``1F0``, ``AllReduce 0``, ``concat``.
        kind: ``F``, ``B``, ``Bx``, ``Bw``, ``metrics``, ``read``, ``split``, ``concat``, ``relay``,
            ``accumulate``, ``all_reduce``, ``apply`` or ``other``.
        device: index of its device; None for the host.
        stage: its stage; None if it belongs to no stage.
        micro_batch: its micro-batch; None if it comes once in a step.
        replica: its replica; None if there is none.
        column: its column on its lane, from the left: after everything that it waits for.
        layers: names of the layers whose work it does.
        outputs: its results.
        stands_for: number of the step's nodes that it stands for.
    """

    name: str
    label: str
    kind: str
    device: int | None
    stage: int | None
    micro_batch: int | None
    replica: int | None
    column: int
    layers: tuple[str, ...] = ()
    outputs: tuple[TensorText, ...] = ()
    stands_for: int = 1


class TaskEdge(NamedTuple):
    """An edge of the drawing.

    Attributes:
        source: position of a node.
        target: position of the node that waits for it.
        control: whether it only orders (dotted red) and carries no tensor.
        tensors: names of the tensors that it carries.
        bytes: of these tensors; None if they aren't known.
    """

    source: int
    target: int
    control: bool
    tensors: tuple[str, ...] = ()
    bytes: float | None = None


@dataclasses.dataclass(frozen=True)
class TaskGraph:
    """The nodes and edges of a step.

    Attributes:
        nodes: nodes by device, then by column.
        edges: edges between positions of nodes.
        devices: index of a device -> its label, in the order of the lanes; the host's lane comes first.
    """

    nodes: tuple[TaskNode, ...]
    edges: tuple[TaskEdge, ...]
    devices: Mapping[int, str]


def longest_paths(count: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Returns, for each node, the number of edges on the longest path to it.

    Raises:
        ValueError: there is a cycle.
    """
    columns, waiting = [0] * count, [0] * count
    followers: list[list[int]] = [[] for _ in range(count)]
    for source, target in dict.fromkeys(pairs):
        followers[source].append(target)
        waiting[target] += 1
    ready = [index for index in range(count) if not waiting[index]]
    done = 0
    while ready:
        index = ready.pop()
        done += 1
        for follower in followers[index]:
            columns[follower] = max(columns[follower], columns[index] + 1)
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    if done < count:
        raise ValueError(f"{count - done} of {count} tasks wait for each other in a circle")
    return columns
