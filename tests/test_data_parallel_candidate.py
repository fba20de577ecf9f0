"""Data parallelism as a placement, where FastT and MP-DPS begin, and which FD-DPS is never slower than."""

from __future__ import annotations

import numpy as np
import pytest
from op_graphs import LAUNCH, Builder, chain_network, random_graph, topology
from placements import simulate_placement

from dapple_tf.operators.baselines import data_parallel, single_device
from dapple_tf.operators.fast_t import dpos, fast_t, fast_t_candidate
from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_candidates import placed_by, variant_of
from dapple_tf.operators.placement_problem import compile_problem
from dapple_tf.operators.split_graph import apply_splits
from dapple_tf.operators.split_layouts import Layouts
from dapple_tf.operators.split_search import by_batch
from dapple_tf.tools.evaluation.mp_dps import mp_dps, predicted_paths
from graph_passes.analysis.split_rules import Split, SplitRule


def normalised(devices: int = 2) -> OpGraph:
    """A step whose samples are compared with their mean, with one variable."""
    builder = Builder(devices)
    read = builder.add("Read", 1e-6, 4e3, group="v")
    builder.stored["v"] = 4e3
    x = builder.add("Conv", 1.0, 8e3, (read,), rules=(SplitRule("batch", 8, (None,), (0,)),))
    mean = builder.add("Mean", 0.1, 4.0, (x,), rules=(SplitRule("batch", 8, (0,), (None,), divisor=8),))
    y = builder.add("Sub", 0.1, 8e3, (x, mean), rules=(SplitRule("batch", 8, (0, None), (0,)),))
    gradient = builder.add("Grad", 0.1, 4e3, (y,), rules=(SplitRule("batch", 8, (0,), (None,)),))
    builder.add("Assign", 0.01, 0.0, (gradient, read), group="v")
    return builder.graph()


def simulated(graph: OpGraph, links: Topology, placement: OpPlacement) -> float:
    split = apply_splits(graph, placement.splits)
    number = {name: op for op, name in enumerate(split.names)}
    devices = np.array([placement.devices[name] for name in split.names])
    return simulate_placement(split, links, devices, np.array([number[name] for name in placement.order])).seconds


def test_all_operators_on_samples_are_split_and_part_k_is_on_device_k() -> None:
    graph, links = normalised(), topology(2)
    start = by_batch(variant_of(graph, links, {}))
    assert start is not None
    assert start.variant.splits == {name: Split("batch", 2) for name in ("Conv_1", "Mean_2", "Sub_3", "Grad_4")}
    placement = placed_by(start)
    for name in start.variant.splits:
        assert [placement.devices[f"{name}/part{part}"] for part in range(2)] == [0, 1]
    assert placement.devices["Read_0"] == placement.devices["Assign_5"]
    assert placement.seconds == simulated(graph, links, placement)


def test_nothing_is_data_parallel_without_a_batch() -> None:
    assert by_batch(variant_of(random_graph(5, 2, 0), topology(2), {})) is None
    assert by_batch(variant_of(normalised(9), topology(9), {})) is None  # of 8 samples


def interrupted(behind_seconds: float) -> OpGraph:
    """A step with an operator that can't be split, a vector of as many channels as there are samples between others."""
    builder = Builder(2)
    read = builder.add("Read", 1e-6, 4e3, group="v")
    builder.stored["v"] = 4e3
    samples = SplitRule("batch", 8, (0, None), (0,))
    x = builder.add("Conv", 1.0, 8e3, (read,), rules=(SplitRule("batch", 8, (None,), (0,)),))
    mean = builder.add("Mean", 0.1, 32.0, (x,), rules=(SplitRule("batch", 8, (0,), (None,), divisor=8),))
    scale = builder.add("Rsqrt", 1.1 * LAUNCH, 32.0, (mean,), rules=(SplitRule("batch", 8, (0,), (0,)),))
    y = builder.add("Mul", 0.1, 8e3, (x, scale), rules=(samples,))
    order = builder.add("Sort", 0.1, 8e3, (y,))
    z = builder.add("Conv", behind_seconds, 8e3, (order, read), rules=(samples,))
    loss = builder.add("Loss", 0.1, 4.0, (z,))
    gradient = builder.add("Grad", 0.1, 4e3, (y, loss), rules=(SplitRule("batch", 8, (0, None), (None,)),))
    builder.add("Assign", 0.01, 0.0, (gradient, read), group="v")
    return builder.graph()


def test_what_the_batch_isnt_linked_with_is_split_where_that_pays() -> None:
    """Vectors of channels were cut, too, which made the graphs that opponents begin with up to 7 % slower."""
    links = topology(2)
    for seconds, split in ((0.8, {"Conv_6"}), (1.1 * LAUNCH, set())):
        start = by_batch(variant_of(interrupted(seconds), links, {}))
        assert start is not None
        assert start.variant.splits.keys() == {"Conv_1", "Mean_2", "Mul_4", "Grad_8"} | split


def updating() -> OpGraph:
    """A step of a fed batch whose heaviest operator updates a variable of as many rows as there are samples."""
    builder = Builder(2)
    read = builder.add("Read", 1e-6, 4e3, group="v")
    builder.stored["v"] = 4e3
    columns = SplitRule("channel", 8, (None, 1), (1,))
    x = builder.add("MatMul", 0.5, 8e3, (read,), rules=(SplitRule("batch", 8, (None, 0), (0,)), columns))
    rows = SplitRule("batch", 8, (0, 0), (None,))
    gradient = builder.add("Grad", 0.5, 4e3, (x,), rules=(rows, SplitRule("channel", 8, (1, None), (1,))))
    own = tuple(SplitRule(name, 8, (axis,), (axis,)) for axis, name in enumerate(("batch", "channel")))
    update = builder.add("Square", 1.0, 4e3, (gradient,), rules=own)
    builder.add("Assign", 0.01, 0.0, (update, read), group="v")
    return builder.graph()


def test_a_variables_rows_are_no_samples() -> None:
    """What is linked with a heavy update was cut by columns: tensor parallelism, up to 1.5 times as slow."""
    start = by_batch(variant_of(updating(), topology(2), {}))
    assert start is not None
    assert start.variant.splits == {name: Split("batch", 2) for name in ("MatMul_1", "Grad_2")}


def test_sums_over_the_batch_are_exchanged_unless_replicas_have_their_own() -> None:
    graph, links = normalised(), topology(2, bandwidth=1e6, latency=1e-3)
    same, own = data_parallel(graph, links), data_parallel(graph, links, own_statistics=True)
    assert same.statistics_seconds == pytest.approx(1e-3 + 4 / 1e6 + LAUNCH + 4 * 2 / 5e11)
    assert own.statistics_seconds == 0
    assert same.seconds - own.seconds == pytest.approx(same.statistics_seconds)
    assert same.gradient_bytes == own.gradient_bytes == 4e3


def test_gradients_are_added_as_fast_as_other_sums() -> None:
    graph, links = normalised(), topology(2, bandwidth=1e30, latency=0.0)
    compute = 2 * LAUNCH + (1.3 - 4 * LAUNCH) / 2 + 2 * LAUNCH + 0.01 + 1e-6
    assert data_parallel(graph, links).compute_seconds == pytest.approx(compute + LAUNCH + 0.5 * 4e3 * 2 / 5e11)


def test_gradients_are_reduced_in_buckets_where_that_is_faster() -> None:
    graph = chain_network(4, layers=3)
    assert data_parallel(graph, topology(4, latency=1.0)).reduce_seconds == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize(("devices", "bandwidth"), [(2, 12e9), (4, 1e9), (4, 1e8), (8, 12e9)])
def test_fd_dps_is_never_slower_than_data_parallelism_fast_t_and_mp_dps(devices: int, bandwidth: float) -> None:
    graph, links = chain_network(devices, layers=3), topology(devices, bandwidth)
    start = by_batch(variant_of(graph, links, {}))
    assert start is not None
    placement = fd_dps(graph, links)
    others = [start.seconds, *(place(graph, links).seconds for place in (fast_t, mp_dps, single_device))]
    assert placement.seconds <= min(others) * (1 + 1e-12)
    assert fd_dps(graph, links, splits="batch").seconds <= start.seconds * (1 + 1e-12)
    assert placement.seconds == simulated(graph, links, placement)


def test_the_graph_of_data_parallelism_gets_no_other_splits() -> None:
    graph, links = chain_network(2, layers=3), topology(2)
    start = by_batch(variant_of(graph, links, {}))
    assert start is not None
    assert fd_dps(graph, links, splits="batch").splits in ({}, start.variant.splits)
    assert fd_dps(graph, links, splits="none").splits == {}


def test_fast_t_and_mp_dps_go_back_to_data_parallelism() -> None:
    graph, links = chain_network(2, layers=3), topology(2, bandwidth=2e9)
    base = variant_of(graph, links, {})
    start = by_batch(base)
    assert start is not None
    alone = dpos(start.variant)
    assert fast_t(graph, links).seconds == min(start.seconds, alone.seconds, fast_t(graph, links).seconds)
    for place in (fast_t, mp_dps):
        placement = place(graph, links)
        assert placement.seconds <= start.seconds
        assert placement.seconds == simulated(graph, links, placement)
        assert place(graph, links) == placement


def heavy() -> OpGraph:
    """A long operator on the critical path, which can be split by channels only."""
    builder = Builder(2)
    first = builder.add("First", 1e-3, 1e3)
    long = builder.add("Long", 1.0, 1e3, (first,), rules=(SplitRule("channel", 4, (None,), (0,)),))
    builder.add("Last", 1e-3, 1e3, (long,))
    return builder.graph()


def test_os_dpos_splits_the_longest_operator_on_the_critical_path() -> None:
    graph, links = heavy(), topology(2)
    placement = fast_t(graph, links)
    assert placement.splits == {"Long_1": Split("channel", 2)}
    assert placement.seconds == pytest.approx(0.502, abs=1e-3)
    assert placement.seconds == simulated(graph, links, placement)
    assert not fast_t_candidate(variant_of(graph, links, {}), None, split=False).variant.splits


def test_single_operators_are_split_where_that_pays() -> None:
    graph, links = heavy(), topology(2)
    assert Layouts(compile_problem(graph, links), 2).alone(1.0)[0][1:] == (1, 0)
    assert fd_dps(graph, links, splits="alone").splits == {"Long_1": Split("channel", 2)}
    assert not fd_dps(graph, topology(2, bandwidth=1e3), splits="alone").splits


def test_predicted_paths_stay_on_a_device_or_pay_for_the_transfer() -> None:
    """Each successor is expected on the device that suits it best."""
    builder = Builder(2)
    first = builder.add("A", 1.0, 10.0)
    second = builder.add("B", (4.0, 1.0), 10.0, (first,))
    builder.add("C", (1.0, 8.0), 0.0, (second,))
    problem = compile_problem(builder.graph(), topology(2, bandwidth=5.0, latency=0.0))
    # Behind B: C there, or on device 0 after 2 s. Behind A: B on device 0 and C, or B on device 1 after 2 s.
    assert predicted_paths(problem) == [[5.0, 4.0], [1.0, 3.0], [0.0, 0.0]]
