"""Times and shapes of operators from TensorFlow's step stats: E of FD-DPS, formula 1, end minus start, averaged."""

from __future__ import annotations

import collections
import itertools
import logging
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dapple_tf.operators.op_costs import OperatorCosts, device_kind
from dapple_tf.operators.signatures import OpSignature
from dapple_tf.tracing.kernel_times import is_executors
from graph_passes.ir.tensorflow_bridge import takes_functions

logger = logging.getLogger(__name__)

_KERNELS = re.compile(r"/device:GPU:\d+/(stream:all|memcpy)$")
"""TensorFlow's names of the lists of all kernels, and of all copies, that a GPU ran."""


class _Run(NamedTuple):
    """The run of a node: its device, and its start and end in nanoseconds."""

    device: str
    start: int
    end: int


def add_step_stats(
    costs: OperatorCosts,
    stats: Any,
    signatures: Mapping[str, OpSignature],
    *,
    prefix: str = "",
    speeds: Mapping[str, float] | None = None,
) -> int:
    """Adds the operators' times of one or several traced steps.

    Times mean something if each device ran one operator at a time, and nothing in the first steps, which allocate
    memory and choose algorithms: leave these out. On CPUs a node's time is that of its computation. On GPUs the
    executor's times are those of starting kernels; a node's time is that of its kernels and copies, or of starting
    them if that took longer. A loop or branch that the session has taken apart takes as long as anything inside it
    runs.

    Args:
        costs: receives the times, under the kind of the device that a node ran on.
        stats: TensorFlow's StepStats of a run with ``FULL_TRACE``; or of several runs, of which the median of each
            node's times is added, as often: a mean would include delays of the machine in a single run.
        signatures: node -> what its time depends on, see `operator_signatures`. Other nodes are ignored.
        prefix: prefix of the nodes in the session's graph.
        speeds: name of a device -> `Device.speed`; 1 for missing devices.

    Returns:
        The number of measured operators. Operators on a GPU without reports of its kernels aren't measured.
    """
    steps = [stats] if hasattr(stats, "dev_stats") else list(stats)
    by_node = _times_of_steps(steps, signatures, prefix)
    for name, times in by_node.items():
        speed = 1.0 if speeds is None else speeds.get(times[0].device, 1.0)
        seconds = statistics.median(time.nanoseconds for time in times) * speed / 1e9
        costs.add(signatures[name], device_kind(times[0].device), seconds, times=len(times))
    return len(by_node)


def operator_seconds(
    steps: Iterable[Any], signatures: Mapping[str, OpSignature], *, prefix: str = ""
) -> dict[str, float]:
    """Returns node -> its median time over several traced steps; nodes that didn't run by themselves are missing.

    Args:
        steps: TensorFlow's StepStats of each.
        signatures: node -> what its time depends on. Other nodes are ignored.
        prefix: prefix of the nodes in the session's graph.
    """
    by_node = _times_of_steps(steps, signatures, prefix)
    return {name: statistics.median(time.nanoseconds for time in times) / 1e9 for name, times in by_node.items()}


def _times_of_steps(steps: Iterable[Any], signatures: Mapping[str, OpSignature], prefix: str) -> dict[str, list[_Time]]:
    times: dict[str, list[_Time]] = {}
    for step in steps:
        for name, time in _times(step, signatures, prefix).items():
            times.setdefault(name, []).append(time)
    return times


class _Time(NamedTuple):
    """A node's time on its device."""

    device: str
    nanoseconds: int


def _times(stats: Any, signatures: Mapping[str, OpSignature], prefix: str) -> dict[str, _Time]:
    start = len(prefix) + 1 if prefix else 0
    inside = _Insides(signatures)
    by_operator: dict[str, list[_Run]] = {}
    kernels: collections.Counter[str] = collections.Counter()
    told = False
    for device, node in _nodes(stats):
        if _KERNELS.search(device):
            told = True
            name = inside.operator(_operation(node.node_name)[start:])
            if name is not None:
                kernels[name] += 1000 * (node.op_end_rel_micros - node.op_start_rel_micros)
        elif is_executors(device) and node.node_name.startswith(prefix):
            name = inside.operator(node.node_name[start:])
            if name is not None:
                by_operator.setdefault(name, []).append(_run(device, node))
    on_gpus = [name for name, runs in by_operator.items() if device_kind(runs[0].device) == "GPU"]
    if on_gpus and not told:
        logger.warning(
            "%d operators ran on GPUs, but the trace has no times of kernels, so that they count as not measured; may "
            "this process use CUPTI?",
            len(on_gpus),
        )
        for name in on_gpus:
            del by_operator[name]
    return {name: _Time(runs[0].device, max(_busy(runs), kernels[name])) for name, runs in by_operator.items()}


def _nodes(stats: Any) -> Iterator[tuple[str, Any]]:
    for own in stats.dev_stats:
        for node in own.node_stats:
            yield own.device, node


def _run(device: str, node: Any) -> _Run:
    """Returns the computation alone, without what the executor does before and after."""
    begin = node.all_start_nanos or 1000 * node.all_start_micros
    if node.op_end_rel_nanos:
        return _Run(device, begin + node.op_start_rel_nanos, begin + node.op_end_rel_nanos)
    return _Run(device, begin + 1000 * node.op_start_rel_micros, begin + 1000 * node.op_end_rel_micros)


def _operation(name: str) -> str:
    """Returns the node of a kernel, which may be named ``node:OpType``."""
    return name.partition(":")[0]


def _busy(runs: Iterable[_Run]) -> int:
    """Returns the nanoseconds during which any of these ran."""
    total, reached = 0, 0
    for run in sorted(runs, key=lambda run: run.start):
        total += max(0, run.end - max(run.start, reached))
        reached = max(reached, run.end)
    return total


class _Insides:
    """The operator of a node: itself, or the loop, branch or call in whose place the session has put it."""

    def __init__(self, signatures: Mapping[str, OpSignature]) -> None:
        self._known = signatures
        self._callers = {name for name, made in signatures.items() if takes_functions(made.op)}

    def operator(self, name: str) -> str | None:
        """Returns the operator that a node of the session's graph belongs to; None if none is known."""
        if name in self._known:
            return name
        if not self._callers:
            return None
        scopes = itertools.accumulate(name.split("/"), lambda scope, part: f"{scope}/{part}")
        return next((scope for scope in reversed(list(scopes)) if scope in self._callers), None)
