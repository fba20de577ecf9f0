"""FD-DPS's experiments (Mathematics 2022, 10, 4788, section 5): placements of its models' operators, simulated."""

from __future__ import annotations

import functools
import math

import dapple_tf as dapple
from dapple_tf.describe.devices import Link
from dapple_tf.operators.build_op_graph import build_op_graph
from dapple_tf.operators.fd_dps import fd_dps, largest_island, on_island
from dapple_tf.operators.list_scheduler import fd_dps_schedule, heft_schedule
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology, compile_problem
from dapple_tf.operators.pieces import Pieces
from dapple_tf.operators.simulated_placement import judged, placed_by, scheduled
from dapple_tf.operators.split_search import by_batch, fast_t_candidate
from dapple_tf.tools.evaluation.mp_dps import mp_dps_candidate, placed_pieces
from dapple_tf.tools.evaluation.operator_baselines import data_parallel, parents_device, single_device
from dapple_tf.tools.evaluation.operator_models import flat_step, flatten_step, wide_towers
from dapple_tf.tools.evaluation.paper_models import gpus
from dapple_tf.tools.evaluation.results import Record

DOCKERS = (1e9, 3e9, 6e9)
"""Bytes/s between the two dockers of figure 4; the paper has no measured number."""
SAMPLES = (16, 256, 4096)
"""Batches of the towers."""


def cluster_of(devices: int, dockers: int = 1, between: float = DOCKERS[1]) -> dapple.Cluster:
    """Returns P100s on one server, in one or several dockers with so many bytes/s between them."""
    return gpus(dockers, devices // dockers, Link(12e9, 10e-6), Link(between, 50e-6))


_step = functools.lru_cache(maxsize=1)(flat_step)


def op_graph(model: str, cluster: dapple.Cluster) -> tuple[OpGraph, Topology]:
    """Returns the operators of a model's step with P100-like costs, and the devices."""
    (step, shapes), topology = _step(model), Topology.of(cluster)
    return build_op_graph(step, topology, OperatorCosts.p100(), shapes), topology


def run_published(model: str, devices: int) -> Record:
    """Returns the seconds of each algorithm as published; see `published_steps`."""
    return published_steps(model, cluster_of(devices))


def run_dockers(model: str, devices: int) -> Record:
    """Returns the same in two dockers, by the rate of the link between them in GB/s."""
    return {f"{rate / 1e9:g}": published_steps(model, cluster_of(devices, 2, rate)) for rate in DOCKERS}


def published_steps(model: str, cluster: dapple.Cluster) -> Record:
    """Returns the seconds of each algorithm as published, on data parallelism's graph.

    No algorithm goes back to data parallelism, none tries other candidates or improves its result. FD-DPS has its own
    queue, beside FastT (DPOS and OS-DPOS) and HEFT with theirs; and pieces of operators with a queue by path, as
    MP-DPS has.
    """
    base = compile_problem(*op_graph(model, cluster))
    start = by_batch(base)
    assert start is not None, model
    problem, never = start.problem, start._replace(over=math.inf)
    pieces = Pieces.of(problem)
    by_path = fd_dps_schedule(pieces.problem)[0]
    seconds = {
        "graph": start,
        "FD-DPS": judged(problem, *fd_dps_schedule(problem), "published"),
        "FD-DPS, algorithm 2": judged(problem, *fd_dps_schedule(problem, parents_device(problem)), "published"),
        "FastT": fast_t_candidate(base, never),
        "HEFT": judged(problem, *heft_schedule(problem), "HEFT"),
        "FD-DPS, pieces": scheduled(problem, pieces.spread(by_path), "pieces"),
        "MP-DPS, pieces": scheduled(problem, pieces.spread(placed_pieces(pieces.problem)), "MP-DPS"),
    }
    return {name: candidate.seconds for name, candidate in seconds.items()}


def run_harder(model: str, devices: int, dockers: int = 1) -> Record:
    """Returns the seconds of whole searches, of which opponents go back to data parallelism's graph if it is faster.

    With two dockers each may also use one alone, as FD-DPS tries itself.
    """
    graph, topology = op_graph(model, cluster_of(devices, dockers))
    record = _opponents(graph, topology)
    if dockers > 1:
        alone = on_island(graph, topology, largest_island(topology))
        assert alone is not None, "nothing is pinned"
        within = _opponents(*alone)
        record = {name: min(seconds, within[name]) for name, seconds in record.items()}
    found = fd_dps(graph, topology)
    record |= {"FD-DPS": found.seconds, "fits": _fits(found, topology), "operators": graph.count}
    single = single_device(graph, topology)
    return record | {"single": single.seconds, "single fits": _fits(single, topology)}


def _fits(placement: OpPlacement, topology: Topology) -> bool:
    """Returns whether every device's peak is within its limit: M_v < C of FD-DPS' formula 4."""
    return all(peak <= limit for peak, limit in zip(placement.peak_bytes, topology.memory_bytes.tolist(), strict=True))


def _opponents(graph: OpGraph, topology: Topology) -> Record:
    base = compile_problem(graph, topology)
    start = by_batch(base)
    assert start is not None, "all of the paper's models have batches"
    steps = [data_parallel(graph, topology, own_statistics=own) for own in (False, True)]
    return {
        "data parallelism": min(step.seconds for step in steps),
        "graph": start.seconds,
        "FastT": fast_t_candidate(base, start).seconds,
        "MP-DPS": mp_dps_candidate(base, start).seconds,
    }


# ---- where it pays


def run_towers(samples: int) -> Record:
    """Returns the seconds of four towers of dense layers on two and four P100s.

    More samples make the towers' work longer, while the bytes of gradients stay the same.
    """
    step, shapes = flatten_step(wide_towers(), samples)
    record: Record = {}
    for devices in (2, 4):
        topology = Topology.of(cluster_of(devices))
        graph = build_op_graph(step, topology, OperatorCosts.p100(), shapes)
        start = by_batch(compile_problem(graph, topology))
        graphs: list[OpPlacement] = [] if start is None else [placed_by(start)]
        parallel = min([data_parallel(graph, topology).seconds, *(one.seconds for one in graphs)])
        ways = {"single": single_device(graph, topology).seconds, "data parallelism": parallel}
        record[str(devices)] = {**ways, "FD-DPS": fd_dps(graph, topology).seconds}
    return record
