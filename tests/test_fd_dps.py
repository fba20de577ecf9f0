"""FD-DPS: its formulas taken literally, its bounds against other placements, memory, groups, splits, speed."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
from conftest import Within
from op_graphs import Builder, chain_network, nasnet_like, random_graph, topology
from placements import simulate_placement

from dapple_tf.describe.plan_values import PlanError
from dapple_tf.operators.baselines import single_device
from dapple_tf.operators.coarsening import coarsen
from dapple_tf.operators.dynamic_critical_path import MostCritical
from dapple_tf.operators.fast_t import fast_t
from dapple_tf.operators.fd_dps import _improved_best, fd_dps
from dapple_tf.operators.heft import heft
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_candidates import scheduled, variant_of
from dapple_tf.operators.placement_problem import PlacementProblem, compile_problem, tails
from dapple_tf.operators.simulated_placement import SimulatedPlacement
from dapple_tf.operators.split_graph import apply_splits
from dapple_tf.operators.split_search import by_batch
from graph_passes.analysis.split_rules import SplitRule


def simulated(graph: OpGraph, links: Topology, placement: OpPlacement) -> SimulatedPlacement:
    """What the simulator says of a placement."""
    split = apply_splits(graph, placement.splits)
    number = {name: op for op, name in enumerate(split.names)}
    devices = np.array([placement.devices[name] for name in split.names])
    return simulate_placement(split, links, devices, np.array([number[name] for name in placement.order]))


# ---- the formulas


def literal_choice(
    problem: PlacementProblem, schedulable: set[int], made: dict[int, float], ended: dict[int, float], first_free: float
) -> tuple[list[int], list[float]]:
    """Formulas 6 to 10 and algorithm 1 written out: EST and LST of all operators, and who may be chosen."""
    n = problem.count
    est, lst = [0.0] * n, [float("inf")] * n
    needs = [{problem.producer[t]: problem.mean_transfer[t] for t in problem.inputs[op]} for op in range(n)]
    for op in range(n):
        if op in ended:
            est[op] = ended[op] - problem.mean_seconds[op]
        elif op in schedulable:
            est[op] = max(made[op], first_free)
        else:
            est[op] = max(est[p] + problem.mean_seconds[p] + transfer for p, transfer in needs[op].items())
    length = max(est[op] + problem.mean_seconds[op] for op in range(n))  # DCPL
    for op in range(n - 1, -1, -1):
        uses = [
            lst[reader] - problem.mean_transfer[tensor]
            for tensor in problem.outputs[op]
            for reader in problem.readers[tensor]
        ]
        lst[op] = min(uses, default=length) - problem.mean_seconds[op]
    critical = [op for op in schedulable if lst[op] - est[op] <= 1e-12]
    scores = [1 / (max(lst[op] - est[op], 0.0) + 1e-9) for op in range(n)]
    return critical, scores


@pytest.mark.parametrize("seed", range(20))
def test_the_most_critical_operator_is_that_of_the_formulas(seed: int) -> None:
    """Operators are placed at random times on random devices; the one that comes next is compared each time."""
    rng = np.random.default_rng(seed)
    graph = random_graph(20, 2, seed, shape=("layered", "chains", "random", "fork_join")[seed % 4], transfer=0.7)
    edges = graph.edges[graph.edges[:, 2] >= 0]
    problem = compile_problem(OpGraph(**{**vars(graph), "edges": edges}), topology(2))
    tail = tails(problem)
    queue = MostCritical([mean + behind for mean, behind in zip(problem.mean_seconds, tail, strict=True)])
    missing = [len(problem.inputs[op]) for op in range(problem.count)]
    made = {op: 0.0 for op in range(problem.count) if not missing[op]}
    for op in made:
        queue.push(op, 0.0)
    schedulable, ended, free = set(made), {}, [0.0, 0.0]
    while schedulable:
        critical, scores = literal_choice(problem, schedulable, made, ended, min(free))
        chosen = queue.pop(min(free))
        assert chosen in schedulable
        assert scores[chosen] == pytest.approx(max(scores[op] for op in schedulable), rel=1e-6)
        assert chosen in critical or not critical
        device = int(rng.integers(2))
        free[device] = max(free[device], made[chosen]) + problem.seconds[chosen][device]
        ended[chosen] = free[device]
        schedulable.discard(chosen)
        for tensor in problem.outputs[chosen]:
            for reader in problem.readers[tensor]:
                made[reader] = max(made.get(reader, 0.0), ended[chosen])
                missing[reader] -= 1
                if not missing[reader]:
                    schedulable.add(reader)
                    queue.push(reader, made[reader])
    assert len(ended) == problem.count


def figure_3() -> OpGraph:
    """Four operators on two devices; 1 byte is sent in 1 s. Only the paths' lengths are known of the figure."""
    builder = Builder(2)
    first = builder.add("o1", (5.0, 9.0), 0.0)
    builder.edges = []
    builder.add("o2", (10.0, 15.0), 5.0)
    builder.add("o3", (20.0, 23.0), 10.0)
    builder.add("o4", (5.0, 9.0), 0.0)
    builder.sizes = [5.0, 5.0, 10.0, 10.0]  # o1 to o2, o2 to o4, o1 to o3, o3 to o4
    builder.edges = [(first, 1, 0, 0), (first, 2, 2, 0), (1, 3, 1, 0), (2, 3, 3, 1)]
    return builder.graph()


def test_critical_paths_of_figure_3_are_53_and_35_long() -> None:
    """Whichever of o2 and o3 goes to the other device is on the critical path; FD-DPS sends o2, as the paper does."""
    graph, links = figure_3(), topology(2, 1.0, 0.0)
    lengths = {
        devices: simulate_placement(graph, links, np.array(devices), np.arange(4)).seconds
        for devices in ((0, 0, 1, 0), (0, 1, 0, 0))
    }
    assert lengths == {(0, 0, 1, 0): 53.0, (0, 1, 0, 0): 35.0}
    placement = fd_dps(graph, links)
    assert placement.seconds == 35.0
    assert placement.devices == {"o1_0": 0, "o2_1": 1, "o3_2": 0, "o4_3": 0}


# ---- against other placements


@pytest.mark.few(5)
@pytest.mark.slow
@pytest.mark.parametrize("shape", ["layered", "fork_join", "chains", "random"])
@pytest.mark.parametrize(("devices", "transfer"), [(2, 1.0), (3, 100.0), (4, 0.1), (8, 0.0), (8, 3.0)])
def test_fd_dps_is_never_slower_than_fast_t_heft_and_one_device(shape: str, devices: int, transfer: float) -> None:
    for count, seed in ((12, 0), (70, 1), (150, 2)):
        graph = random_graph(
            count, devices, seed, shape=shape, transfer=transfer, groups=3 * seed, pins=seed, uneven=seed == 1
        )
        links = topology(devices)
        placement = fd_dps(graph, links)
        others = [place(graph, links).seconds for place in (fast_t, heft, single_device)]
        assert placement.seconds <= min(others) * (1 + 1e-12), (count, seed, others)
        seen = simulated(graph, links, placement)  # which checks groups, pins and the queue
        assert (placement.seconds, placement.peak_bytes) == (seen.seconds, tuple(seen.peak_bytes.tolist()))
        assert placement == fd_dps(graph, links)


def test_rounds_go_on_where_layouts_of_more_operators_are_ahead() -> None:
    """They ended there, as a round of a larger graph is dearer, and what they had found was dropped."""
    graph, links = chain_network(4, layers=4), topology(4)
    whole = variant_of(graph, links, {})
    alone, parts = scheduled(whole, [0] * graph.count, "one device"), by_batch(whole)
    assert parts is not None and parts.seconds < 0.3 * alone.seconds
    assert parts.variant.problem.count > 2 * graph.count
    visits = 30 * graph.count / 0.05 + 1  # a first round of 10 simulations of the whole operators
    best = _improved_best([alone], [parts, parts._replace(origin="again")], [], visits)
    assert best.rank <= parts.rank


def test_one_device_runs_everything() -> None:
    graph = random_graph(20, 1, 0)
    placement = fd_dps(graph, topology(1))
    assert placement.seconds == pytest.approx(graph.seconds.sum())
    assert set(placement.devices.values()) == {0}


def test_a_graph_without_operators_takes_no_time() -> None:
    assert fd_dps(Builder(2).graph(), topology(2)) == OpPlacement({}, (), {}, 0.0, (0.0, 0.0))


@pytest.mark.thorough
@pytest.mark.slow
def test_networks_of_cells_gain_over_one_device_and_with_splits_over_fast_t() -> None:
    """FastT begins with data parallelism's graph, so that operators alone gain over one device only."""
    graph, links = nasnet_like(4, cells=1), topology(4)
    told: list[tuple[str, float]] = []
    static = fast_t(graph, links).seconds
    whole = fd_dps(graph, links, splits="none")
    placement = fd_dps(graph, links, progress=lambda text, share: told.append((text, share)))
    assert not whole.splits
    assert whole.seconds < 0.8 * single_device(graph, links).seconds
    assert placement.splits
    assert placement.seconds < 0.8 * static
    assert placement.seconds == simulated(graph, links, placement).seconds
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert gc.isenabled()


def test_a_chain_is_split_by_batch_and_placed_like_data_parallelism() -> None:
    graph, links = chain_network(4, layers=4), topology(4)
    placement = fd_dps(graph, links)
    total = graph.seconds[:, 0].sum()
    assert {split.parts for split in placement.splits.values()} == {4}
    assert total / 4 < placement.seconds < 0.4 * total
    assert fd_dps(graph, links, splits="none").seconds <= total


def test_nothing_is_split_where_links_are_slow() -> None:
    graph, links = chain_network(2, layers=3), topology(2, bandwidth=1e6)
    placement = fd_dps(graph, links)
    assert not placement.splits
    assert placement.seconds == pytest.approx(single_device(graph, links).seconds)


def test_operators_of_a_group_with_others_arent_split() -> None:
    builder = Builder(2)
    rule = SplitRule("batch", 8, (), (0,))
    builder.add("Heavy", 1.0, 1.0, group="state", rules=(rule,))
    builder.add("Other", 1.0, 1.0, group="state")
    assert not fd_dps(builder.graph(), topology(2)).splits


# ---- memory


def chains_of(activations: int, devices: int, size: float = 1e6) -> OpGraph:
    """Two forward chains whose tensors the backward chains read."""
    builder = Builder(devices)
    for _ in range(2):
        held = []
        last = builder.add("F", 1e-3, size)
        for _ in range(activations):
            held.append(last)
            last = builder.add("F", 1e-3, size, (last,))
        for one in reversed(held):
            last = builder.add("B", 1e-3, size, (last, one))
        builder.add("End", 1e-3, 0.0, (last,))
    return builder.graph()


def test_limits_of_memory_are_kept() -> None:
    graph = chains_of(10, 2)
    whole = max(single_device(graph, topology(2)).peak_bytes)
    limit = 0.7 * whole
    for bandwidth in (12e9, 1e9):
        links = topology(2, bandwidth, memory=limit)
        placement = fd_dps(graph, links)
        assert max(placement.peak_bytes) <= limit
        assert tuple(simulated(graph, links, placement).peak_bytes.tolist()) == placement.peak_bytes


def test_variables_are_shared_out_where_they_dont_fit_one_device() -> None:
    builder = Builder(3)
    for number in range(6):
        builder.add("Read", 1e-3, 1.0, group=f"variable{number}")
        builder.stored[f"variable{number}"] = 100.0
    placement = fd_dps(builder.graph(), topology(3, bandwidth=1.0, memory=250.0))
    assert sorted(placement.peak_bytes) == [200.0, 200.0, 200.0]


def test_what_fits_nowhere_is_refused_with_both_numbers() -> None:
    builder = Builder(2)
    one = builder.add("A", 1.0, 600.0, group="variable")
    builder.add("B", 1.0, 1.0, (one,))
    builder.stored["variable"] = 1e6
    with pytest.raises(PlanError, match=r"GPU:\d needs 1,000,600 bytes and has 500,000: use more devices or a smaller"):
        fd_dps(builder.graph(), topology(2, memory=5e5))


# ---- pieces


@pytest.mark.parametrize("seed", range(8))
def test_pieces_keep_the_order_groups_and_time(seed: int) -> None:
    graph = random_graph(120, 3, seed, shape=("layered", "chains", "random", "fork_join")[seed % 4], groups=6, pins=2)
    problem = compile_problem(graph, topology(3))
    coarse = coarsen(problem)
    compile_problem(coarse.graph, topology(3))  # which checks that pieces are numbered in a topological order
    assert coarse.graph.count < graph.count
    assert coarse.graph.seconds.sum() == pytest.approx(graph.seconds.sum())
    assert coarse.graph.stored_bytes.sum() == graph.stored_bytes.sum()
    for members, pin in zip(problem.members, problem.pinned, strict=True):
        groups = {int(coarse.graph.groups[coarse.piece[op]]) for op in members}
        assert len(groups) == 1
        assert pin < 0 or coarse.graph.pinned[groups.pop()] == pin


def test_a_chain_becomes_few_pieces() -> None:
    builder = Builder(2)
    last = builder.add("A", 1e-3, 1e3)
    for _ in range(199):
        last = builder.add("A", 1e-3, 1e3, (last,))
    coarse = coarsen(compile_problem(builder.graph(), topology(2)))
    assert 40 <= coarse.graph.count <= 60
    assert [a + 1 == b for a, b in itertools.pairwise(sorted(set(coarse.piece.tolist())))]


@pytest.mark.thorough
def test_a_network_of_18_cells_is_placed_on_8_devices_in_half_a_minute_of_one_core(within: Within) -> None:
    """About 24,000 operators; more of them take in proportion."""
    graph, links = nasnet_like(8), topology(8)
    with within(30):
        placement = fd_dps(graph, links)
    with within(10):
        seen = simulated(graph, links, placement)
    assert placement.seconds == seen.seconds
    assert placement.seconds < 0.8 * fast_t(graph, links).seconds
