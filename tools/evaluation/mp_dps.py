"""MP-DPS: merged nodes, placed by predicted paths (Zeng et al., CCF Trans. HPC 2022, of the same group as FD-DPS).

Rebuilt from what FD-DPS says of it (section 5.1): it "reduces the search space by merging nodes with computing power
awareness", and "implements optimal scheduling by predicting the path cost in DAG". Our reading: operators that are
cheaper than their transfers are merged with their neighbours, no piece heavier than a share of a device's load; the
cost of the path behind a piece on each device is predicted once, with the best device for each piece behind it, as by
the optimistic cost table of PEFT (Arabnejad, Barbosa: IEEE TPDS 25(3), 2014); a piece goes where its end and the path
behind it are least. All of that is static. Like FastT it begins with data parallelism, and keeps it if it is faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.operators.list_scheduler import ByPriority, ListScheduler
from dapple_tf.operators.op_graph import PlacementProblem
from dapple_tf.operators.pieces import Pieces
from dapple_tf.operators.simulated_placement import Candidate, scheduled


def mp_dps_candidate(base: PlacementProblem, start: Candidate | None) -> Candidate:
    """Returns MP-DPS's placement.

    Args:
        base: the graph without splits.
        start: data parallelism; None begins with the operators as they are.
    """
    problem = base if start is None else start.problem
    pieces = Pieces.of(problem)
    best = scheduled(problem, pieces.spread(placed_pieces(pieces.problem)), "MP-DPS")
    return best if start is None else min(best, start, key=lambda one: one.rank)


def predicted_paths(problem: PlacementProblem) -> list[list[float]]:
    """Returns the predicted cost of the path behind each piece on each device, in seconds: [n][V].

    It is max over successors of min over devices v' of (path behind the successor on v' + its seconds there + the
    transfer to v', 0 on the same device).
    """
    count = problem.devices
    behind = [[0.0] * count for _ in range(problem.count)]
    for op in range(problem.count - 1, -1, -1):
        needs: dict[int, float] = {}
        for tensor in problem.outputs[op]:
            for reader in problem.readers[tensor]:
                needs[reader] = max(needs.get(reader, 0.0), problem.mean_transfer[tensor])
        for waiter in problem.waiters[op]:
            needs.setdefault(waiter, problem.mean_latency)
        row = behind[op]
        for reader, transfer in needs.items():
            there = [path + seconds for path, seconds in zip(behind[reader], problem.seconds[reader], strict=True)]
            elsewhere = min(there) + transfer
            for device, path in enumerate(there):
                row[device] = max(row[device], min(path, elsewhere))
    return behind


def placed_pieces(problem: PlacementProblem) -> list[int]:
    """Returns the pieces' devices."""
    behind = predicted_paths(problem)
    rank = [sum(row) / problem.devices + mean for row, mean in zip(behind, problem.mean_seconds, strict=True)]

    def by_path(scheduler: ListScheduler, op: int, devices: Sequence[int], ends: Sequence[float]) -> int:
        paths = [end + behind[op][device] for device, end in zip(devices, ends, strict=True)]
        return paths.index(min(paths))

    return ListScheduler(problem).run(ByPriority(rank), by_path)[0]
