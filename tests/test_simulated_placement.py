"""The simulator of placements: by hand, and against one by events that is written out from the rules."""

from __future__ import annotations

import heapq
import re

import numpy as np
import pytest
from op_graphs import Builder, random_graph, topology
from placements import simulate_placement

from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.placement_problem import PlacementError, compile_problem, tails
from dapple_tf.operators.queue_order import order_by_urgency
from dapple_tf.operators.simulated_placement import SimulatedPlacement


def simulated(
    builder: Builder, devices: list[int], links: Topology, order: list[int] | None = None
) -> SimulatedPlacement:
    graph = builder.graph()
    return simulate_placement(graph, links, np.array(devices), np.array(range(graph.count) if order is None else order))


def test_a_device_runs_one_operator_at_a_time_in_the_order_of_the_queue() -> None:
    builder = Builder(1)
    for seconds in (3.0, 1.0, 2.0):
        builder.add("Op", seconds, 0.0)
    seen = simulated(builder, [0, 0, 0], topology(1), [1, 2, 0])
    assert seen.start.tolist() == [3.0, 0.0, 1.0]
    assert seen.finish.tolist() == [6.0, 1.0, 3.0]
    assert seen.seconds == 6.0
    assert seen.busy_seconds.tolist() == [6.0]


def test_a_tensor_is_sent_once_to_a_device_and_transfers_queue_up_on_a_link() -> None:
    """Latency 1, 1 byte/s: tensors of 2 and 3 bytes from one device to another take 3 and 4 s, one after the other."""
    builder = Builder(2)
    one, two = builder.add("A", 1.0, 2.0), builder.add("B", 1.0, 3.0)
    for inputs in ((one,), (one, two), (two,)):
        builder.add("C", 1.0, 0.0, inputs)
    seen = simulated(builder, [0, 0, 1, 1, 1], topology(2, 1.0, 1.0))
    assert [tuple(transfer) for transfer in seen.transfers] == [(0, 0, 1, 1.0, 4.0), (1, 0, 1, 4.0, 8.0)]
    assert seen.start.tolist() == [0.0, 1.0, 4.0, 8.0, 9.0]
    assert seen.sent_bytes.tolist() == [[0.0, 5.0], [0.0, 0.0]]


def test_links_in_both_directions_and_to_several_devices_dont_disturb_each_other() -> None:
    builder = Builder(3)
    one, two = builder.add("A", 1.0, 2.0), builder.add("B", 1.0, 2.0)
    builder.add("C", 1.0, 0.0, (one,))
    builder.add("D", 1.0, 0.0, (one,))
    builder.add("E", 1.0, 0.0, (two,))
    seen = simulated(builder, [0, 1, 1, 2, 0], topology(3, 1.0, 0.0))
    assert [transfer.arrival for transfer in seen.transfers] == [3.0, 3.0, 3.0]


def test_who_only_waits_knows_of_an_end_a_latency_later() -> None:
    builder = Builder(2)
    one = builder.add("A", 2.0, 5.0)
    builder.add("B", 1.0, 0.0, waits=(one,))
    builder.add("C", 1.0, 0.0, waits=(one,))
    seen = simulated(builder, [0, 0, 1], topology(2, 1.0, 0.5))
    assert seen.start.tolist() == [0.0, 2.0, 2.5]
    assert not seen.transfers


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


def test_memory_that_ends_at_a_moment_is_free_for_what_starts_then() -> None:
    builder = Builder(1)
    last = builder.add("A", 1.0, 8.0)
    for _ in range(3):
        last = builder.add("B", 1.0, 8.0, (last,))
    assert simulated(builder, [0] * 4, topology(1)).peak_bytes.tolist() == [16.0]


@pytest.mark.parametrize(
    ("devices", "order", "text"),
    [
        ([0, 0, 0], [1, 0, 2], "the queue has B_1 at 0 before A_0 at 1, which it needs"),
        ([0, 0, 0], [0, 1, 1], "3 operators are placed and 2 are in the queue, of 3"),
        ([0, 2, 0], [0, 1, 2], "B_1 is on device 2 of 2; take one from 0 to 1"),
        ([0, 0, 1], [0, 1, 2], "operators of group 0, as A_0, are on devices [0, 1]; put them on one device"),
    ],
)
def test_what_cant_be_is_refused(devices: list[int], order: list[int], text: str) -> None:
    builder = Builder(2)
    one = builder.add("A", 1.0, 0.0, group="g")
    two = builder.add("B", 1.0, 0.0, (one,))
    builder.add("C", 1.0, 0.0, (two,), group="g")
    with pytest.raises(PlacementError, match=re.escape(text)):
        simulated(builder, devices, topology(2), order)


def test_a_group_has_to_be_where_it_is_pinned() -> None:
    builder = Builder(2)
    builder.add("A", 1.0, 0.0, group="g")
    builder.pins["g"] = 1
    with pytest.raises(PlacementError, match="put them on 1"):
        simulated(builder, [0], topology(2))
    assert simulated(builder, [1], topology(2)).seconds == 1.0


def test_costs_for_other_devices_are_refused() -> None:
    builder = Builder(2)
    builder.add("A", 1.0, 0.0)
    with pytest.raises(PlacementError, match="1 operators on 2 devices, for 1 operators and 3 devices"):
        simulated(builder, [0], topology(3))


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


@pytest.mark.parametrize("seed", range(30))
def test_one_pass_sees_what_events_show(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = ("layered", "fork_join", "chains", "random")[seed % 4]
    graph = random_graph(24, 3, seed, shape=shape, transfer=float(rng.choice([0.1, 1.0, 4.0])), uneven=bool(seed % 2))
    links = topology(3, latency=1e-4)
    devices = rng.integers(0, 3, graph.count).tolist()
    problem = compile_problem(graph, links)
    urgency = tails(problem) if seed % 3 else rng.random(graph.count).tolist()
    order, start, finish = order_by_urgency(problem, devices, urgency)
    seen = simulate_placement(graph, links, np.array(devices), np.array(order))
    assert seen.finish.tolist() == pytest.approx(literal(graph, links, devices, order), rel=1e-9)
    assert seen.finish.tolist() == pytest.approx(finish, rel=1e-9)
    assert seen.start.tolist() == pytest.approx(start, rel=1e-9)
    # In another order as well, where devices wait though they have something to do.
    order = np.lexsort((rng.random(graph.count), np.arange(graph.count) // 4)).tolist()
    known = {op: index for index, op in enumerate(order)}
    if all(known[p] < known[c] for p, c, _, _ in graph.edges.tolist()):
        seen = simulate_placement(graph, links, np.array(devices), np.array(order))
        assert seen.finish.tolist() == pytest.approx(literal(graph, links, devices, order), rel=1e-9)
