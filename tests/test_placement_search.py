"""FD-DPS: formulas taken literally, bounds, memory, splits; its baselines; placements of an average micro-batch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from op_graphs import LAUNCH, Builder, chain_network, random_graph, simulated, topology

from dapple_tf.describe.plan_values import PlanError
from dapple_tf.operators import step_placer
from dapple_tf.operators.fd_dps import _improved_best, fd_dps, on_island
from dapple_tf.operators.list_scheduler import (
    ListScheduler,
    MostCritical,
    by_rank,
    critical_path,
    earliest,
    heft_schedule,
)
from dapple_tf.operators.op_graph import (
    OpGraph,
    OpPlacement,
    PlacementError,
    PlacementProblem,
    Topology,
    compile_problem,
    tails,
)
from dapple_tf.operators.pieces import Pieces
from dapple_tf.operators.simulated_placement import Candidate, judged, placed_by, scheduled, simulate
from dapple_tf.operators.split_search import by_batch, fast_t_candidate
from dapple_tf.operators.step_placer import MICRO_BATCHES, Kinds, place_average_slice, searched
from dapple_tf.tools.evaluation.mp_dps import mp_dps_candidate, predicted_paths
from dapple_tf.tools.evaluation.operator_baselines import data_parallel, single_device
from graph_passes.analysis.split_rules import Split, SplitRule
from graph_passes.ir.graph import BRACKET_ATTR, PHASE_ATTR, GraphDef
from graph_passes.ir.node_kinds import NodeKind

SHAPES = ("layered", "fork_join", "chains", "random")


def heft(graph: OpGraph, links: Topology) -> OpPlacement:
    whole = compile_problem(graph, links)
    return placed_by(judged(whole, *heft_schedule(whole), "HEFT"))


def fast_t(graph: OpGraph, links: Topology) -> OpPlacement:
    whole = compile_problem(graph, links)
    return placed_by(fast_t_candidate(whole, by_batch(whole)))


def mp_dps(graph: OpGraph, links: Topology) -> OpPlacement:
    whole = compile_problem(graph, links)
    return placed_by(mp_dps_candidate(whole, by_batch(whole)))


def devices_of(graph: OpGraph, placement: OpPlacement) -> list[int]:
    return [placement.devices[name] for name in graph.names]


# ---- baselines

SECONDS = [
    (14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10),
    (13, 16, 9), (7, 15, 11), (5, 11, 14), (18, 12, 20), (21, 7, 16),
]  # fmt: skip
TRANSFERS = {
    (1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16, (3, 7): 23,
    (4, 8): 27, (4, 9): 23, (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11, (9, 10): 13,
}  # fmt: skip


def test_heft_finds_its_papers_ranks_and_schedule() -> None:
    """Topcuoglu et al. (2002), figures 2 and 3a and table 3: ten tasks on three processors, 1 byte is sent in 1 s."""
    builder = Builder(3)
    for seconds in SECONDS:
        builder.add("n", seconds, 0.0)
    edges = sorted(TRANSFERS, key=lambda edge: edge[1])
    builder.edges = [(one - 1, other - 1, number, 0) for number, (one, other) in enumerate(edges)]
    builder.sizes = [TRANSFERS[edge] for edge in edges]
    graph = builder.graph()
    problem = compile_problem(graph, topology(3, 1.0, 0.0))
    ranks = [mean + tail for mean, tail in zip(problem.mean_seconds, tails(problem), strict=True)]
    expected = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert ranks == pytest.approx(expected, abs=1e-3)
    scheduler = ListScheduler(problem)
    scheduler.run(by_rank(problem), earliest)
    assert max(scheduler.finish) == 80.0
    assert scheduler.device == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]
    placement = heft(graph, topology(3, 1.0, 0.0))
    assert devices_of(graph, placement) == scheduler.device
    assert placement.seconds == 91.0  # The simulator's links send one tensor after another.


def test_fast_t_keeps_the_critical_path_on_its_fastest_device() -> None:
    builder = Builder(2)
    last = builder.add("A", (2.0, 1.0), 1.0)
    light = [builder.add("Light", (1.0, 1.0), 1.0, (last,)) for _ in range(2)]
    heavy = builder.add("Heavy", (4.0, 3.0), 1.0, (last,))
    builder.add("B", (1.0, 1.0), 1.0, (*light, heavy))
    graph = builder.graph()
    assert critical_path(compile_problem(graph, topology(2, 100.0, 0.0))) == [0, 3, 4]
    assert devices_of(graph, fast_t(graph, topology(2, 100.0, 0.0))) == [1, 0, 0, 1, 1]


def test_os_dpos_and_fd_dps_split_a_long_operator_on_the_critical_path() -> None:
    builder = Builder(2)
    first = builder.add("First", 1e-3, 1e3)
    long = builder.add("Long", 1.0, 1e3, (first,), rules=(SplitRule("channel", 4, (None,), (0,)),))
    builder.add("Last", 1e-3, 1e3, (long,))
    graph, links = builder.graph(), topology(2)
    placement = fast_t(graph, links)
    assert placement.splits == {"Long_1": Split("channel", 2)}
    assert placement.seconds == pytest.approx(0.502, abs=1e-3) == simulated(graph, links, placement).seconds
    assert fd_dps(graph, links).splits == {"Long_1": Split("channel", 2)}
    assert not fd_dps(graph, topology(2, bandwidth=1e3)).splits


def test_predicted_paths_stay_on_a_device_or_pay_for_the_transfer() -> None:
    """Each successor is expected on the device that suits it best."""
    builder = Builder(2)
    first = builder.add("A", 1.0, 10.0)
    second = builder.add("B", (4.0, 1.0), 10.0, (first,))
    builder.add("C", (1.0, 8.0), 0.0, (second,))
    problem = compile_problem(builder.graph(), topology(2, bandwidth=5.0, latency=0.0))
    # Behind B: C there, or on device 0 after 2 s. Behind A: B on device 0 and C, or B on device 1 after 2 s.
    assert predicted_paths(problem) == [[5.0, 4.0], [1.0, 3.0], [0.0, 0.0]]


# ---- data parallelism, where FastT and MP-DPS begin

SAMPLES = SplitRule("batch", 8, (0, None), (0,))


def training_step(devices: int = 2) -> tuple[Builder, int, int]:
    """A variable's read, a convolution of 8 samples, and room for more."""
    builder = Builder(devices, stored={"v": 4e3})
    read = builder.add("Read", 1e-6, 4e3, group="v")
    return builder, read, builder.add("Conv", 1.0, 8e3, (read,), rules=(SplitRule("batch", 8, (None,), (0,)),))


def normalised(devices: int = 2) -> OpGraph:
    """A step whose samples are compared with their mean."""
    builder, read, x = training_step(devices)
    mean = builder.add("Mean", 0.1, 4.0, (x,), rules=(SplitRule("batch", 8, (0,), (None,), divisor=8),))
    y = builder.add("Sub", 0.1, 8e3, (x, mean), rules=(SAMPLES,))
    gradient = builder.add("Grad", 0.1, 4e3, (y,), rules=(SplitRule("batch", 8, (0,), (None,)),))
    builder.add("Assign", 0.01, 0.0, (gradient, read), group="v")
    return builder.graph()


def start_of(graph: OpGraph, links: Topology) -> Candidate:
    start = by_batch(compile_problem(graph, links))
    assert start is not None
    return start


def test_all_operators_on_samples_are_split_and_part_k_is_on_device_k() -> None:
    graph, links = normalised(), topology(2)
    start = start_of(graph, links)
    assert start.problem.graph.applied == {name: Split("batch", 2) for name in ("Conv_1", "Mean_2", "Sub_3", "Grad_4")}
    placement = placed_by(start)
    for name in start.problem.graph.applied:
        assert [placement.devices[f"{name}/part{part}"] for part in range(2)] == [0, 1]
    assert placement.devices["Read_0"] == placement.devices["Assign_5"]
    assert placement.seconds == simulated(graph, links, placement).seconds
    assert by_batch(compile_problem(random_graph(5, 2, 0), links)) is None
    assert by_batch(compile_problem(normalised(9), topology(9))) is None  # of 8 samples
    with pytest.raises(PlacementError, match="no operator can be split by batch"):
        data_parallel(random_graph(5, 2, 0), links)


@pytest.mark.parametrize(("seconds", "split"), [(0.8, {"Conv_6"}), (1.1 * LAUNCH, set())])
def test_operators_that_the_batch_isnt_linked_with_are_split_where_that_pays(seconds: float, split: set[str]) -> None:
    """Vectors of channels were cut, too, which made the graphs that opponents begin with up to 7 % slower."""
    builder, read, x = training_step()
    mean = builder.add("Mean", 0.1, 32.0, (x,), rules=(SplitRule("batch", 8, (0,), (None,), divisor=8),))
    scale = builder.add("Rsqrt", 1.1 * LAUNCH, 32.0, (mean,), rules=(SplitRule("batch", 8, (0,), (0,)),))
    y = builder.add("Mul", 0.1, 8e3, (x, scale), rules=(SAMPLES,))
    order = builder.add("Sort", 0.1, 8e3, (y,))
    z = builder.add("Conv", seconds, 8e3, (order, read), rules=(SAMPLES,))
    loss = builder.add("Loss", 0.1, 4.0, (z,))
    gradient = builder.add("Grad", 0.1, 4e3, (y, loss), rules=(SplitRule("batch", 8, (0, None), (None,)),))
    builder.add("Assign", 0.01, 0.0, (gradient, read), group="v")
    splits = start_of(builder.graph(), topology(2)).problem.graph.applied
    assert splits.keys() == {"Conv_1", "Mean_2", "Mul_4", "Grad_8"} | split


def test_a_variables_rows_are_no_samples() -> None:
    """Operators linked with a heavy update were cut by columns: tensor parallelism, up to 1.5 times as slow."""
    builder = Builder(2)
    read = builder.add("Read", 1e-6, 4e3, group="v")
    columns = SplitRule("channel", 8, (None, 1), (1,))
    x = builder.add("MatMul", 0.5, 8e3, (read,), rules=(SplitRule("batch", 8, (None, 0), (0,)), columns))
    rows = SplitRule("batch", 8, (0, 0), (None,))
    gradient = builder.add("Grad", 0.5, 4e3, (x,), rules=(rows, SplitRule("channel", 8, (1, None), (1,))))
    own = tuple(SplitRule(name, 8, (axis,), (axis,)) for axis, name in enumerate(("batch", "channel")))
    update = builder.add("Square", 1.0, 4e3, (gradient,), rules=own)
    builder.add("Assign", 0.01, 0.0, (update, read), group="v")
    splits = start_of(builder.graph(), topology(2)).problem.graph.applied
    assert splits == {name: Split("batch", 2) for name in ("MatMul_1", "Grad_2")}


def test_sums_over_the_batch_are_exchanged_unless_replicas_have_their_own() -> None:
    graph, links = normalised(), topology(2, bandwidth=1e6, latency=1e-3)
    same, own = data_parallel(graph, links), data_parallel(graph, links, own_statistics=True)
    assert same.seconds - own.seconds == pytest.approx(1e-3 + 4 / 1e6 + LAUNCH + 4 * 2 / 5e11)


def test_data_parallelism_divides_samples_and_reduces_gradients() -> None:
    """Without transfers it is V times as fast, but for launches and updates; each gradient is reduced once.

    With a link for each pair of devices the V-ths of a gradient go at once, there and back, and not around a ring.
    """
    graph = chain_network(4, layers=3)
    free, slow = topology(4, bandwidth=1e30, latency=0.0), topology(4, bandwidth=1e9)
    whole = single_device(graph, free).seconds
    step = data_parallel(graph, free)
    kernels = 3 * 4.0 * 3 * 3 * 256 * 256
    assert step.reduce_seconds == pytest.approx(0.0, abs=1e-12)
    assert whole / 4 < step.seconds < whole / 4 + graph.count * LAUNCH + 0.05 * whole
    reduced = data_parallel(graph, slow)
    assert reduced.reduce_seconds == pytest.approx(3 * 2 * (10e-6 + kernels / 3 / 4 / 1e9))
    assert reduced.reduce_seconds < reduced.seconds <= step.seconds + reduced.reduce_seconds
    bucketed = data_parallel(graph, topology(4, latency=1.0))
    assert bucketed.reduce_seconds == pytest.approx(2.0, abs=0.01), "one all-reduce of all gradients"


# ---- the formulas of FD-DPS


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


@pytest.mark.parametrize("seed", range(8))
def test_the_most_critical_operator_is_that_of_the_formulas(seed: int) -> None:
    """Operators are placed at random times on random devices; the one that comes next is compared each time."""
    rng = np.random.default_rng(seed)
    graph = random_graph(20, 2, seed, SHAPES[seed % 4], transfer=0.7)
    graph = dataclasses.replace(graph, edges=graph.edges[graph.edges[:, 2] >= 0])
    problem = compile_problem(graph, topology(2))
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


def test_critical_paths_of_figure_3_are_53_and_35_long() -> None:
    """Whichever of o2 and o3 goes to the other device is on the critical path; FD-DPS sends o2, as the paper does.

    Only the paths' lengths are known of the figure; 1 byte is sent in 1 s.
    """
    builder = Builder(2)
    for seconds in ((5.0, 9.0), (10.0, 15.0), (20.0, 23.0), (5.0, 9.0)):
        builder.add("o", seconds, 0.0)
    builder.sizes = [5.0, 5.0, 10.0, 10.0]  # o1 to o2, o2 to o4, o1 to o3, o3 to o4
    builder.edges = [(0, 1, 0, 0), (0, 2, 2, 0), (1, 3, 1, 0), (2, 3, 3, 1)]
    graph, links = builder.graph(), topology(2, 1.0, 0.0)
    problem = compile_problem(graph, links)
    assert [simulate(problem, devices, range(4)).seconds for devices in ([0, 0, 1, 0], [0, 1, 0, 0])] == [53.0, 35.0]
    placement = fd_dps(graph, links)
    assert (placement.seconds, devices_of(graph, placement)) == (35.0, [0, 1, 0, 0])


# ---- against other placements


@pytest.mark.parametrize(
    ("shape", "devices", "transfer"),
    [("layered", 2, 1.0), ("fork_join", 3, 100.0), ("chains", 4, 0.1), ("random", 8, 3.0), ("network", 4, 1.0)],
)
def test_fd_dps_is_never_slower_than_its_rivals_and_all_tell_what_is_simulated(
    shape: str, devices: int, transfer: float
) -> None:
    for count, seed in ((12, 0), (70, 1)):
        graph, links = chain_network(devices, layers=3), topology(devices, bandwidth=1e9)
        if shape != "network":
            links = topology(devices)
            graph = random_graph(
                count, devices, seed, shape, transfer=transfer, groups=3 * seed, pins=seed, uneven=seed == 1
            )
        placements = [place(graph, links) for place in (fd_dps, fast_t, heft, single_device, mp_dps)]
        for placement in placements:
            seen = simulated(graph, links, placement)
            assert (placement.seconds, placement.peak_bytes) == (seen.seconds, tuple(seen.peak_bytes.tolist()))
        assert placements[0].seconds <= min(other.seconds for other in placements) * (1 + 1e-12), (count, seed)
        assert placements[0] == fd_dps(graph, links)
        free = graph.pinned[graph.groups] < 0
        assert len(set(np.array(devices_of(graph, placements[3]))[free].tolist())) == 1
        if shape == "network":
            start = start_of(graph, links)
            assert max(one.seconds for one in (placements[0], placements[1], placements[4])) <= start.seconds
            return


def optimum(graph: OpGraph, links: Topology) -> float:
    """The shortest makespan of all assignments and queues."""
    problem = compile_problem(graph, links)
    ranges = [range(links.count) if pin < 0 else [pin] for pin in graph.pinned.tolist()]
    orders = [
        order
        for order in itertools.permutations(range(graph.count))
        if all(order.index(p) < order.index(c) for p, c, _, _ in graph.edges.tolist())
    ]
    return min(
        simulate(problem, [places[group] for group in graph.groups.tolist()], order).seconds
        for places in itertools.product(*ranges)
        for order in orders
    )


@pytest.mark.parametrize("seed", range(8))
def test_small_graphs_are_within_5_percent_of_the_optimum(seed: int) -> None:
    groups, transfer = seed % 3, (0.05, 0.5, 2.0)[seed % 3]
    graph = random_graph(
        6, 2, seed, SHAPES[seed % 4], transfer=transfer, groups=groups, pins=groups // 2, uneven=seed > 3
    )
    assert fd_dps(graph, topology(2)).seconds <= 1.05 * optimum(graph, topology(2))


def test_rounds_go_on_where_layouts_of_more_operators_are_ahead() -> None:
    """They ended there, as a round of a larger graph is dearer, and what they had found was dropped."""
    graph, links = chain_network(4, layers=4), topology(4)
    whole = compile_problem(graph, links)
    alone, parts = scheduled(whole, [0] * graph.count, "one device"), start_of(graph, links)
    assert parts.seconds < 0.3 * alone.seconds
    assert parts.problem.count > 2 * graph.count
    visits = 30 * graph.count / 0.05 + 1  # a first round of 10 simulations of the whole operators
    best = _improved_best([alone], [parts, parts._replace(origin="again")], [], visits)
    assert best.rank <= parts.rank


def test_one_device_runs_everything_and_no_operators_take_no_time() -> None:
    graph = random_graph(20, 1, 0)
    placement = fd_dps(graph, topology(1))
    assert placement.seconds == pytest.approx(graph.seconds.sum())
    assert set(placement.devices.values()) == {0}
    assert fd_dps(Builder(2).graph(), topology(2)) == OpPlacement({}, (), {}, 0.0, (0.0, 0.0))


def test_a_chain_is_split_like_data_parallelism_but_not_where_links_are_slow() -> None:
    graph, total = chain_network(4, layers=4), chain_network(4, layers=4).seconds[:, 0].sum()
    placement = fd_dps(graph, topology(4))
    assert {split.parts for split in placement.splits.values()} == {4}
    assert total / 4 < placement.seconds < 0.4 * total
    whole = fd_dps(dataclasses.replace(graph, splits={}), topology(4))
    assert whole.seconds <= total and not whole.splits
    alone = fd_dps(chain_network(2, layers=3), topology(2, bandwidth=1e6))
    assert not alone.splits and alone.seconds == pytest.approx(chain_network(2, layers=3).seconds[:, 0].sum())


def test_operators_of_a_group_with_others_arent_split() -> None:
    builder = Builder(2)
    builder.add("Heavy", 1.0, 1.0, group="state", rules=(SplitRule("batch", 8, (), (0,)),))
    builder.add("Other", 1.0, 1.0, group="state")
    assert not fd_dps(builder.graph(), topology(2)).splits


# ---- memory


@pytest.mark.parametrize("bandwidth", [12e9, 1e9])
def test_limits_of_memory_are_kept(bandwidth: float) -> None:
    """Two forward chains whose tensors the backward chains read."""
    builder = Builder(2)
    for _ in range(2):
        held = [builder.add("F", 1e-3, 1e6)]
        for _ in range(10):
            held.append(builder.add("F", 1e-3, 1e6, held[-1:]))
        last = held.pop()
        for one in reversed(held):
            last = builder.add("B", 1e-3, 1e6, (last, one))
        builder.add("End", 1e-3, 0.0, (last,))
    graph = builder.graph()
    limit = 0.7 * max(single_device(graph, topology(2)).peak_bytes)
    placement = fd_dps(graph, topology(2, bandwidth, memory=limit))
    assert max(placement.peak_bytes) <= limit
    assert tuple(simulated(graph, topology(2, bandwidth), placement).peak_bytes.tolist()) == placement.peak_bytes


def test_variables_are_shared_out_where_they_dont_fit_one_device() -> None:
    builder = Builder(3)
    for number in range(6):
        builder.add("Read", 1e-3, 1.0, group=f"variable{number}")
        builder.stored[f"variable{number}"] = 100.0
    placement = fd_dps(builder.graph(), topology(3, bandwidth=1.0, memory=250.0))
    assert sorted(placement.peak_bytes) == [200.0, 200.0, 200.0]
    with pytest.raises(PlanError, match=r"GPU:\d needs \d+ bytes and has 50: use more devices or a smaller"):
        fd_dps(builder.graph(), topology(3, memory=50.0))


# ---- pieces


@pytest.mark.parametrize("seed", range(4))
def test_pieces_keep_the_order_groups_and_time(seed: int) -> None:
    graph = random_graph(120, 3, seed, SHAPES[seed], groups=6, pins=2)
    problem = compile_problem(graph, topology(3))
    pieces = Pieces.of(problem)  # which checks that pieces are numbered in a topological order
    coarse = pieces.problem.graph
    assert coarse.count < graph.count
    assert coarse.seconds.sum() == pytest.approx(graph.seconds.sum())
    assert coarse.stored_bytes.sum() == graph.stored_bytes.sum()
    for members, pin in zip(problem.members, problem.pinned, strict=True):
        (group,) = {int(coarse.groups[pieces.piece[op]]) for op in members}
        assert pin < 0 or coarse.pinned[group] == pin


# ---- islands: more devices behind slow links never make a placement slower


def servers(*sizes: int, slower: float = 1e-2) -> Topology:
    """Devices of several servers, with links between these that are so much slower than those inside."""
    whole = topology(sum(sizes))
    server = np.repeat(np.arange(len(sizes)), sizes)
    between = server[:, None] != server[None, :]
    return dataclasses.replace(whole, bandwidth=np.where(between, slower * 12e9, whole.bandwidth))


def test_operators_that_are_pinned_elsewhere_cant_move_to_an_island() -> None:
    builder = Builder(4, pins={"w": 3})
    builder.add("Read", 1.0, 8.0, group="w")
    assert on_island(builder.graph(), servers(2, 2), (0, 1)) is None
    own = on_island(builder.graph(), servers(2, 2), (2, 3))
    assert own is not None
    assert own[0].pinned.tolist() == [1]
    assert own[1].names == ("/device:GPU:2", "/device:GPU:3")


def test_a_second_server_behind_a_slow_link_isnt_slower_than_the_first_alone() -> None:
    graph, links = chain_network(4, layers=3), servers(2, 2)
    alone, both = fd_dps(chain_network(2, layers=3), topology(2), effort=0.5), fd_dps(graph, links)
    assert both.seconds <= alone.seconds
    assert both.seconds == simulated(graph, links, both).seconds


# ---- an average micro-batch: operators that run once in a step count less

KINDS = {"Read": NodeKind.READ, "F": NodeKind.FORWARD, "B": NodeKind.BACKWARD, "Apply": NodeKind.APPLY}


def with_kinds(builder: Builder) -> tuple[OpGraph, Kinds]:
    graph = builder.graph()
    return graph, {name: KINDS[op] for name, op in zip(graph.names, graph.ops, strict=True)}


def step(apply_seconds: float = 1e-3) -> tuple[OpGraph, Kinds]:
    """Two variables, each read by one of two parallel forwards and updated after its backward."""
    builder = Builder(2, stored={"v0": 8e6, "v1": 8e6})
    begin = builder.add("F", 1e-4, 1e6)
    ends = []
    for group in ("v0", "v1"):
        variable = builder.add("Read", 1e-6, 8e6, group=group)
        middle = builder.add("F", 1e-3, 1e6, (begin, variable))
        gradient = builder.add("B", 2e-3, 8e6, (middle, variable))
        ends.append(builder.add("Apply", apply_seconds, 1e3, (gradient,), group=group))
    builder.add("Apply", 1e-6, 0.0, ends)
    return with_kinds(builder)


class Searched:
    """Stands in place of `fd_dps`: placements that are given come first; keeps what was asked."""

    def __init__(self, patch: pytest.MonkeyPatch, *first: OpPlacement) -> None:
        self.first, self.graphs = list(first), list[OpGraph]()
        patch.setattr(step_placer, "fd_dps", self)

    def __call__(self, graph: OpGraph, links: Topology, **options: Any) -> OpPlacement:
        self.graphs.append(graph)
        return self.first.pop(0) if self.first else fd_dps(graph, links, **options)


def on_first(graph: OpGraph, *others: str) -> OpPlacement:
    """All operators on device 0, but some on device 1."""
    devices = dict.fromkeys(graph.names, 0) | dict.fromkeys(others, 1)
    return OpPlacement(devices, graph.names, {}, 1.0, (0.0, 0.0))


def test_operators_that_run_once_count_by_the_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, kinds = step(4e-3)
    search, shares = Searched(monkeypatch), list[float]()
    placement = place_average_slice(graph, topology(2), kinds)
    average, staying = search.graphs
    assert np.array_equal(staying.seconds, average.seconds)
    once = np.array([op in ("Read", "Apply") for op in graph.ops])
    for now, before in ((average.seconds, graph.seconds), (average.tensor_bytes, graph.tensor_bytes)):
        assert np.allclose(now[once], before[once] / MICRO_BATCHES)
        assert np.array_equal(now[~once], before[~once])
    assert placement.seconds >= 1e-4 + 1e-3 + 2e-3 + 4e-3, "of a whole step, not of the average"
    place_average_slice(graph, topology(2), kinds, progress=lambda text, share: shares.append(share))
    assert shares == sorted(shares) and min(shares) < 0.5 <= max(shares) <= 1.0
    with pytest.raises(PlanError):
        place_average_slice(graph, topology(2, memory=1e6), kinds)


def test_a_placement_that_only_an_average_leaves_room_for_isnt_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, kinds = step()
    limit = 1.01 * max(fd_dps(graph, topology(2)).peak_bytes)
    search = Searched(monkeypatch, on_first(graph), on_first(graph))
    placement = place_average_slice(graph, topology(2, memory=limit), kinds)
    assert search.graphs[2] is graph
    assert max(placement.peak_bytes) <= limit


def test_variables_stay_where_they_are_if_that_shortens_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products were placed apart from their variables, which had to be sent before anything could run."""
    graph, kinds = step()
    numbers = [op for op, kind in enumerate(graph.ops) if kind == "Read"]
    of_second = [graph.names[op] for op in np.flatnonzero(graph.groups == graph.groups[numbers[1]])]
    # The first product reads its variable from the other device.
    Searched(monkeypatch, on_first(graph, *of_second, graph.names[numbers[0] + 1]))
    devices = place_average_slice(graph, topology(2), kinds).devices
    for op in numbers:
        assert devices[graph.names[op]] == devices[graph.names[op + 1]]


def test_variables_that_fit_no_device_together_are_placed_apart() -> None:
    """The search with readers on their variables' device failed, and with it that whose placement fits."""
    builder = Builder(2, stored={"v0": 24e6, "v1": 24e6})
    variables = [builder.add("Read", 1e-6, 8e6, group=group) for group in ("v0", "v1")]
    middle = builder.add("F", 1e-3, 1e3, variables)
    gradient = builder.add("B", 1e-3, 8e6, (middle,))
    for group in ("v0", "v1"):
        builder.add("Apply", 1e-3, 1e3, (gradient,), group=group)
    graph, kinds = with_kinds(builder)
    placement = place_average_slice(graph, topology(2, memory=45e6), kinds)
    assert set(devices_of(graph, placement)[:2]) == {0, 1}
    assert max(placement.peak_bytes) <= 45e6


def test_of_two_placements_the_one_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the faster one had no room in a whole step, a search for a whole step replaced both."""
    graph, kinds = step()
    apart = fd_dps(dataclasses.replace(graph, splits={}), topology(2))
    assert set(apart.devices.values()) == {0, 1}
    search = Searched(monkeypatch, on_first(graph), apart)
    links = topology(2, latency=1.0, memory=1.1 * max(apart.peak_bytes))  # One device is faster, and has no room.
    placement = place_average_slice(graph, links, kinds)
    assert len(search.graphs) == 2 and placement.devices == apart.devices


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (
            "in; f0 F in; f1 F f0; entry B in ^f1; b0 B entry; b1 B b0 f0",
            {"in": [], "f0": ["in"], "f1": ["f0"], "b0": ["^f1"], "b1": ["b0", "f0"]},
        ),
        # Only the constants waited, which no device runs: a loss's backward began whenever it liked.
        (
            "scale_const F; f F scale_const; one_const B; b0 B one_const scale_const; b1 B b0 one_const; entry",
            {
                "scale_const": [], "f": ["scale_const"], "one_const": [],
                "b0": ["one_const", "scale_const", "^f"], "b1": ["b0", "one_const"],
            },
        ),
    ],
)  # fmt: skip
def test_a_backward_waits_for_the_forward(nodes: str, expected: dict[str, list[str]]) -> None:
    """Operators of a backward that need nothing of the forward seemed to fill the gaps that a placement left in it."""
    graph = GraphDef()
    for name, *inputs in map(str.split, nodes.split("; ")):
        kind = KINDS.get(inputs[0]) if inputs else None
        node = graph.node.add(
            name=name, op="Const" if "const" in name else "Mul", input=inputs if kind is None else inputs[1:]
        )
        if kind is not None:
            node.attr[PHASE_ATTR].s = kind.text.encode()
        if name == "entry":
            node.attr[BRACKET_ATTR].b = True
    assert {node.name: list(node.input) for node in searched(graph).node} == expected
