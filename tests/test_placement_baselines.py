"""Baselines of placements: HEFT by its paper's example, FastT, one device, data parallelism."""

from __future__ import annotations

import numpy as np
import pytest
from op_graphs import LAUNCH, Builder, chain_network, random_graph, topology
from placements import simulate_placement

from dapple_tf.operators.baselines import data_parallel, single_device
from dapple_tf.operators.fast_t import critical_path, fast_t
from dapple_tf.operators.heft import by_rank, heft
from dapple_tf.operators.list_placement import InsertionScheduler, Slots, fits
from dapple_tf.operators.op_graph import OpGraph
from dapple_tf.operators.placement_problem import PlacementError, compile_problem, tails

SECONDS = [
    (14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10),
    (13, 16, 9), (7, 15, 11), (5, 11, 14), (18, 12, 20), (21, 7, 16),
]  # fmt: skip
TRANSFERS = {
    (1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16, (3, 7): 23,
    (4, 8): 27, (4, 9): 23, (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11, (9, 10): 13,
}  # fmt: skip


def example() -> OpGraph:
    """Topcuoglu et al. (2002), figure 2: ten tasks on three processors; 1 byte is sent in 1 s."""
    edges = sorted(TRANSFERS, key=lambda edge: edge[1])
    return OpGraph(
        names=tuple(f"n{i}" for i in range(1, 11)),
        ops=("Task",) * 10,
        seconds=np.array(SECONDS, float),
        edges=np.array([(a - 1, b - 1, number, 0) for number, (a, b) in enumerate(edges)]),
        tensor_bytes=np.array([TRANSFERS[edge] for edge in edges], float),
        groups=np.arange(10),
        pinned=np.full(10, -1),
        stored_bytes=np.zeros(10),
        splits={},
        launch_seconds=np.zeros(3),
        copy_seconds=np.zeros(3),
    )


def test_heft_finds_its_papers_ranks_and_schedule() -> None:
    """Table 3 and figure 3a: a schedule of length 80."""
    graph = example()
    problem = compile_problem(graph, topology(3, 1.0, 0.0))
    ranks = [mean + tail for mean, tail in zip(problem.mean_seconds, tails(problem), strict=True)]
    expected = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert ranks == pytest.approx(expected, abs=1e-3)
    scheduler = InsertionScheduler(problem)
    for op in by_rank(problem):
        scheduler.place(op, min(range(3), key=lambda device: scheduler.earliest(op, device)[1]))
    assert max(scheduler.finish) == 80.0
    assert scheduler.device == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]
    placement = heft(graph, topology(3, 1.0, 0.0))
    assert [placement.devices[name] for name in graph.names] == scheduler.device
    assert placement.seconds == 91.0  # The simulator's links send one tensor after another.


def test_an_operator_takes_the_first_free_time_that_is_long_enough() -> None:
    slots = Slots()
    for start, seconds in ((2.0, 1.0), (5.0, 2.0)):
        slots.take(slots.find(start, seconds), seconds)
    assert [slots.find(0.0, seconds) for seconds in (2.0, 2.5)] == [0.0, 7.0]
    assert [slots.find(ready, 1.0) for ready in (0.5, 1.5, 4.5, 9.0)] == [0.5, 3.0, 7.0, 9.0]
    slots.take(slots.find(0.5, 1.0), 1.0)
    assert [slots.find(0.0, seconds) for seconds in (0.5, 1.0, 2.0, 3.0)] == [0.0, 3.0, 3.0, 7.0]


def test_fast_t_keeps_the_critical_path_on_its_fastest_device() -> None:
    builder = Builder(2)
    last = builder.add("A", (2.0, 1.0), 1.0)
    light = [builder.add("Light", (1.0, 1.0), 1.0, (last,)) for _ in range(2)]
    heavy = builder.add("Heavy", (4.0, 3.0), 1.0, (last,))
    builder.add("B", (1.0, 1.0), 1.0, (*light, heavy))
    graph = builder.graph()
    assert critical_path(compile_problem(graph, topology(2, 100.0, 0.0))) == [0, 3, 4]
    placement = fast_t(graph, topology(2, 100.0, 0.0))
    assert [placement.devices[name] for name in graph.names] == [1, 0, 0, 1, 1]


@pytest.mark.parametrize("place", [heft, fast_t, single_device])
@pytest.mark.parametrize("seed", range(4))
def test_a_baselines_seconds_and_peaks_are_the_simulators(place: object, seed: int) -> None:
    assert callable(place)
    graph = random_graph(40, 3, seed, shape=("layered", "chains")[seed % 2], groups=4, pins=2, uneven=True)
    placement = place(graph, topology(3))
    number = {name: op for op, name in enumerate(graph.names)}
    devices = np.array([placement.devices[name] for name in graph.names])
    seen = simulate_placement(graph, topology(3), devices, np.array([number[name] for name in placement.order]))
    assert placement.seconds == seen.seconds
    assert placement.peak_bytes == tuple(seen.peak_bytes.tolist())
    assert place(graph, topology(3)) == placement
    if place is single_device:
        free = graph.pinned[graph.groups] < 0
        assert len(set(devices[free].tolist())) == 1


def test_a_peak_above_a_limit_doesnt_fit() -> None:
    builder = Builder(1)
    one = builder.add("A", 1.0, 8.0)
    builder.add("B", 1.0, 8.0, (one,))
    assert fits(single_device(builder.graph(), topology(1, memory=8.0)), topology(1, memory=8.0))
    assert not fits(single_device(builder.graph(), topology(1, memory=7.0)), topology(1, memory=7.0))


def test_data_parallelism_divides_samples_and_reduces_gradients() -> None:
    """Without transfers it is V times as fast, but for launches and updates; each gradient is reduced once.

    With a link for each pair of devices the V-ths of a gradient go at once, there and back, and not around a ring.
    """
    graph = chain_network(4, layers=3)
    free, slow = topology(4, bandwidth=1e30, latency=0.0), topology(4, bandwidth=1e9)
    whole = single_device(graph, free).seconds
    step = data_parallel(graph, free)
    kernels = 3 * 4.0 * 3 * 3 * 256 * 256
    assert step.gradient_bytes == kernels
    assert step.reduce_seconds == pytest.approx(0.0, abs=1e-12)
    assert whole / 4 < step.seconds < whole / 4 + graph.count * LAUNCH + 0.05 * whole
    reduced = data_parallel(graph, slow)
    assert reduced.reduce_seconds == pytest.approx(3 * 2 * (10e-6 + kernels / 3 / 4 / 1e9))
    assert reduced.seconds <= step.seconds + reduced.reduce_seconds
    assert reduced.seconds > reduced.reduce_seconds


def test_data_parallelism_needs_operators_with_a_batch() -> None:
    with pytest.raises(PlacementError, match="no operator can be split by batch"):
        data_parallel(random_graph(5, 2, 0), topology(2))
