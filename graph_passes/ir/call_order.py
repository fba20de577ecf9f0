"""The order of calls in a step's top level, and its consequences for the variables that they touch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from graph_passes.ir.graph import Graph
from graph_passes.ir.resource_use import ResourceUse, Use

CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
Resource: TypeAlias = tuple[str, str]
"""Device and name: each device has variables of its own."""


class Touch(NamedTuple):
    """A call's use of one resource.

    Attributes:
        call: the call.
        reads: the nodes of its body that only read it.
        writes: the nodes of its body that may change it.
    """

    call: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes that touch it."""
        return (*self.reads, *self.writes)


class CallOrder:
    """Which calls come before which.

    Attributes:
        topological: all nodes of the top level, producers first.

    Args:
        view: the top level.
        calls: the nodes that count as calls; all calls by default.

    Raises:
        PassError: it has a cycle.
    """

    def __init__(self, view: Graph, calls: Collection[str] | None = None) -> None:
        self._view = view
        self.topological = view.topological()
        self._bit: dict[str, int] = {}
        self._before: dict[str, int] = {}  # node -> the calls before it, as a set of bits
        for name in self.topological:
            mask = 0
            for producer in view.sources(name):
                mask |= self._before[producer] | self._bit.get(producer, 0)
            self._before[name] = mask
            if view.nodes[name].op in CALLS if calls is None else name in calls:
                self._bit[name] = 1 << len(self._bit)

    @property
    def calls(self) -> list[str]:
        """The calls, in order."""
        return list(self._bit)

    def is_before(self, one: str, other: str) -> bool:
        """Returns whether call ``one`` has ended when ``other`` begins."""
        return bool(self._before[other] & self._bit[one])

    def up_to(self, calls: Iterable[str]) -> list[str]:
        """Returns some calls and all those before them, the last first."""
        mask = 0
        for call in calls:
            mask |= self._before[call] | self._bit[call]
        return [call for call in reversed(self.topological) if mask & self._bit.get(call, 0)]

    def touches(self, uses: ResourceUse) -> dict[Resource, list[Touch]]:
        """Maps each resource to the calls that use it, in order."""
        touches: dict[Resource, list[Touch]] = {}
        for name in self.calls:
            node = self._view.nodes[name]
            by_resource: dict[str, list[Use]] = {}
            for use in uses.of_function(node.attr["f"].func.name):
                by_resource.setdefault(use.resource, []).append(use)
            for resource, own in by_resource.items():
                reads, writes = (tuple(use.node for use in own if use.written == written) for written in (False, True))
                touches.setdefault((node.device, resource), []).append(Touch(name, reads, writes))
        return touches

    def conflicts(self, touches: Iterable[Touch]) -> Iterator[tuple[Touch, tuple[str, ...], Touch, tuple[str, ...]]]:
        """Yields the orders to keep between nodes when the calls of one resource are taken apart.

        Each write comes after all uses before it, each use after the write before it. Orders that others imply are left
        out, as are those that the calls don't have.

        Returns:
            Tuples (earlier call, nodes of its body, later call, nodes of its body): each of the later nodes comes after
            each of the earlier ones.
        """
        written: list[Touch] = []
        read: list[Touch] = []
        for touch in touches:
            yield from (
                (one, one.writes, touch, touch.nodes) for one in written if self.is_before(one.call, touch.call)
            )
            if touch.writes:
                yield from (
                    (one, one.reads, touch, touch.writes) for one in read if self.is_before(one.call, touch.call)
                )
                written, read = [touch], []
            else:
                read.append(touch)
