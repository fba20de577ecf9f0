"""The simulator of placements, by hand and against events written out from the rules, and reports of placements."""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Callable

import numpy as np
import pytest
from op_graphs import Builder, random_graph, topology

from dapple_tf.operators.op_graph import (
    OpGraph,
    OpPlacement,
    PlacementError,
    Topology,
    compile_problem,
    device_name,
    placements_report,
    queue_report,
    tails,
)
from dapple_tf.operators.simulated_placement import SimulatedPlacement, order_by_urgency, simulate
from graph_passes.analysis.split_rules import Split


def simulated(
    builder: Builder, devices: list[int], links: Topology, order: list[int] | None = None
) -> SimulatedPlacement:
    graph = builder.graph()
    return simulate(compile_problem(graph, links), devices, [*range(graph.count)] if order is None else order)


def test_a_tensor_is_sent_once_to_a_device_and_transfers_queue_up_on_a_link() -> None:
    """Latency 1, 1 byte/s: tensors of 2 and 3 bytes from one device to another take 3 and 4 s, one after the other."""
    builder = Builder(2)
    one, two = builder.add("A", 1.0, 2.0), builder.add("B", 1.0, 3.0)
    for inputs in ((one,), (one, two), (two,)):
        builder.add("C", 1.0, 0.0, inputs)
    seen = simulated(builder, [0, 0, 1, 1, 1], topology(2, 1.0, 1.0))
    assert seen.sent == [(0, 0, 1, 1.0, 4.0), (1, 0, 1, 4.0, 8.0)]
    assert seen.start.tolist() == [0.0, 1.0, 4.0, 8.0, 9.0]
    assert seen.seconds == 10.0


def test_an_operator_that_only_waits_learns_of_an_end_a_latency_later() -> None:
    builder = Builder(2)
    one = builder.add("A", 2.0, 5.0)
    builder.add("B", 1.0, 0.0, waits=(one,))
    builder.add("C", 1.0, 0.0, waits=(one,))
    seen = simulated(builder, [0, 0, 1], topology(2, 1.0, 0.5))
    assert seen.start.tolist() == [0.0, 2.0, 2.5] and not seen.sent


def test_memory_is_held_from_start_or_arrival_to_the_end_of_the_last_reader_or_transfer() -> None:
    """Device 0 holds A (8 bytes) while it's sent, and B (4); device 1 the copy and its variables (100 bytes)."""
    builder = Builder(2)
    one = builder.add("A", 1.0, 8.0)
    two = builder.add("B", 1.0, 4.0, (one,))
    builder.add("C", 1.0, 2.0, (two,))
    builder.add("D", 1.0, 16.0, (one,), group="variable")
    builder.stored["variable"] = 100.0
    seen = simulated(builder, [0, 0, 0, 1], topology(2, 4.0, 0.0))
    # Device 0: A 0..3 (transfer 1..3), B 1..3, which C reads until 3; device 1: copy of A 3..4. What nobody reads
    # isn't there.
    assert seen.peak_bytes.tolist() == [12.0, 108.0]
    chain = Builder(1)
    for number in range(4):
        chain.add("A", 1.0, 8.0, range(number)[-1:])
    assert simulated(chain, [0] * 4, topology(1)).peak_bytes.tolist() == [16.0], "the end of one is no part of the next"


@pytest.mark.parametrize(
    ("devices", "order", "text"),
    [
        ([0, 0, 0], [1, 0, 2], "the queue has B_1 at 0 before A_0 at 1, which it needs"),
        ([0, 0, 0], [0, 1, 1], "3 operators are placed and 2 are in the queue, of 3"),
        ([0, 2, 0], [0, 1, 2], "B_1 is on device 2 of 2; take one from 0 to 1"),
        ([0, 0, 1], [0, 1, 2], "operators of group 0, as A_0, are on devices [0, 1]; put them on 0"),
        ([1, 0, 1], [0, 1, 2], "operators of group 0, as A_0, are on devices [1]; put them on 0"),
    ],
)
def test_impossible_placements_are_refused(devices: list[int], order: list[int], text: str) -> None:
    builder = Builder(2, pins={"g": 0})
    one = builder.add("A", 1.0, 0.0, group="g")
    two = builder.add("B", 1.0, 0.0, (one,))
    builder.add("C", 1.0, 0.0, (two,), group="g")
    with pytest.raises(PlacementError, match=re.escape(text)):
        simulated(builder, devices, topology(2), order)
    with pytest.raises(PlacementError, match="3 operators on 2 devices, for 3 operators and 3 devices"):
        simulated(builder, [0, 0, 0], topology(3))


def literal(graph: OpGraph, links: Topology, devices: list[int], order: list[int]) -> list[float]:
    """Ends of the operators, by events: everything that happens, in the order of time."""
    place = {op: index for index, op in enumerate(order)}
    queues = {v: [op for op in order if devices[op] == v] for v in range(links.count)}
    there: set[tuple[str, int, int]] = set()
    waiting: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
    busy_links: set[tuple[int, int]] = set()
    running: set[int] = set()
    ended = [-1.0] * graph.count
    events: list[tuple[float, int, tuple[str, int, int, int]]] = []
    edges = [tuple(edge) for edge in graph.edges.tolist()]

    def needs(op: int) -> list[tuple[str, int, int]]:
        return [("t", t, devices[op]) if t >= 0 else ("o", p, devices[op]) for p, c, t, _ in edges if c == op]

    def push(time: float, event: tuple[str, int, int, int]) -> None:
        heapq.heappush(events, (time, len(events), event))

    now = 0.0
    while True:
        for v, queue in queues.items():
            if queue and v not in running and all(one in there for one in needs(queue[0])):
                op = queue.pop(0)
                running.add(v)
                push(now + graph.seconds[op, v], ("end", op, v, v))
        for link, queue_ in waiting.items():
            if queue_ and link not in busy_links:
                _, _, tensor = heapq.heappop(queue_)
                busy_links.add(link)
                push(now + links.seconds(graph.tensor_bytes[tensor], *link), ("sent", tensor, *link))
        if not events:
            return ended
        now = events[0][0]
        while events and events[0][0] == now:
            kind, what, source, target = heapq.heappop(events)[2]
            if kind == "end":
                ended[what] = now
                running.discard(source)
                there.add(("o", what, source))
                sends = set()
                for p, c, t, _ in edges:
                    if p == what and t >= 0:
                        there.add(("t", t, source))
                        if devices[c] != source:
                            sends.add((t, devices[c]))
                    elif p == what and devices[c] != source:
                        push(now + links.latency[source, devices[c]], ("known", what, source, devices[c]))
                for t, v in sends:
                    heapq.heappush(waiting.setdefault((source, v), []), (now, place[what], t))
            elif kind == "sent":
                busy_links.discard((source, target))
                there.add(("t", what, target))
            else:
                there.add(("o", what, target))


@pytest.mark.parametrize("seed", range(16))
def test_one_pass_sees_what_events_show(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = ("layered", "fork_join", "chains", "random")[seed % 4]
    graph = random_graph(24, 3, seed, shape, transfer=float(rng.choice([0.1, 1.0, 4.0])), uneven=bool(seed % 2))
    links = topology(3, latency=1e-4)
    devices = rng.integers(0, 3, graph.count).tolist()
    problem = compile_problem(graph, links)
    order, start, finish, _ = order_by_urgency(
        problem, devices, tails(problem) if seed % 3 else rng.random(24).tolist()
    )
    seen = simulate(problem, devices, order)
    assert seen.finish.tolist() == pytest.approx(literal(graph, links, devices, order), rel=1e-9)
    assert seen.finish.tolist() == pytest.approx(finish, rel=1e-9)
    assert seen.start.tolist() == pytest.approx(start, rel=1e-9)
    # In another order as well, where devices wait though they have something to do.
    order = np.lexsort((rng.random(graph.count), np.arange(graph.count) // 4)).tolist()
    known = {op: index for index, op in enumerate(order)}
    if all(known[p] < known[c] for p, c, _, _ in graph.edges.tolist()):
        seen = simulate(problem, devices, order)
        assert seen.finish.tolist() == pytest.approx(literal(graph, links, devices, order), rel=1e-9)


# ---- reports

PLACEMENT = OpPlacement(
    devices={"a/part0": 0, "a/part1": 1, "b": 1, "read": 1},
    order=("read", "a/part1", "a/part0", "b"),
    splits={"a": Split("batch", 2)},
    seconds=0.0123456,
    peak_bytes=(3 * 2**20, 100.0),
)


def test_reports_tell_devices_splits_and_queues(golden: Callable[[str, str], None]) -> None:
    other, nothing = OpPlacement({"a": 0}, ("a",), {}, 0.5, (8.0,)), OpPlacement({}, (), {}, 0.0, (0.0,))
    splits = {f"op{number}": Split("batch", 2) for number in range(12)} | {"d": Split("channel", 4)}
    ops = {f"op{number}": f"Type{min(number, 9)}" for number in range(12)} | {"d": "Conv2D"}
    names = ("/job:localhost/replica:0/task:0/device:CPU:10", "/job:worker/replica:0/task:1/device:GPU:0")
    named = dataclasses.replace(PLACEMENT, splits=splits, ops=ops, device_names=names)
    devices = [device_name(named, device) for device in (0, 1)]
    texts = [
        placements_report({1: PLACEMENT, 0: other}, [[[3]], [[1, 2], [4, 5]]]),
        f"on {devices}: {named}\n{queue_report(named)}",
        f"{nothing}\n{queue_report(nothing)}",
    ]
    golden("placements.txt", "\n".join(texts))
