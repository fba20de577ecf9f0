"""A step's graph on GPUs, checked before TensorFlow sees it, and told as a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dapple_tf.common.text import table
from dapple_tf.describe.cluster import Cluster
from dapple_tf.errors import DappleError
from graph_passes.analysis.device_kernels import (
    REFUSED,
    SHARED,
    UNORDERED,
    VARIABLE,
    GpuReport,
    gpu_report,
    label,
    on_gpu,
)
from graph_passes.ir.graph import PHASE_ATTR, STAGE_ATTR, GraphDef, NodeDef, dtype_name, layer_or_node
from graph_passes.ir.kernels import GPU, PASSED, kernel_dtypes, kernel_of, knows_gpus
from graph_passes.ir.tensorflow_bridge import attribute


def check_kernels(graph: GraphDef) -> None:
    """Checks that GPUs have kernels for all nodes that a graph puts on them.

    Raises:
        DappleError: one has none, or makes a variable that several GPUs of a process would share.
    """
    if not knows_gpus() or not any(_lacking(graph)):
        return
    report = gpu_report(graph)
    for kind, why in ((REFUSED, _why_refused), (SHARED, _why_shared)):
        nodes = [node for finding, node in report.first.items() if finding.kind == kind]
        if nodes:
            more = f" (likewise {', '.join(sorted({label(node) for node in nodes[1:]}))})" if nodes[1:] else ""
            raise DappleError(why(nodes[0]) + more)


def _lacking(graph: GraphDef) -> Iterator[NodeDef]:
    """Returns nodes that may lack a kernel: on GPUs, or making variables in functions."""
    within = (node for function in graph.library.function for node in function.node_def if node.op == VARIABLE)
    for node in itertools.chain((node for node in graph.node if on_gpu(node.device)), within):
        if node.op not in PASSED and kernel_of(node, GPU) is None:
            yield node


def _why_refused(node: NodeDef) -> str:
    lacking, known = _dtypes(node)
    marks = [f"stage {node.attr[STAGE_ATTR].i}"] if STAGE_ATTR in node.attr else []
    marks += [node.attr[PHASE_ATTR].s.decode()] if PHASE_ATTR in node.attr else []
    where = f" ({', '.join(marks)})" if marks else ""
    cast = f"cast to one of {', '.join(known)} before" if known else "use another operator"
    return (
        f"{layer_or_node(node)}{where} is to run {node.op} on {node.device}, for which TensorFlow has no GPU kernel"
        f"{f' of {lacking}' if known else ''}: {cast}, or run it on processors"
    )


def _dtypes(node: NodeDef) -> tuple[str, list[str]]:
    """Returns the dtype of a node for which GPUs have no kernel, and those for which they have one."""
    for name in node.attr:
        dtype, known = attribute(node, name).type, kernel_dtypes(node.op, GPU, name)
        if dtype and known and dtype not in known:
            return dtype_name(dtype), [dtype_name(other) for other in known]
    return "", []


def _why_shared(node: NodeDef) -> str:
    dtype, name = dtype_name(node.attr["dtype"].type), node.attr["shared_name"].s.decode()
    return (
        f"variable {name!r} is {dtype}, which TensorFlow keeps in the host's memory, once for all GPUs of a process: "
        f"replicas would change each other's. Make it int64 or float32"
    )


def gpu_text(graph: GraphDef, cluster: Cluster) -> str:
    """Returns a table of what a step does on a cluster's GPUs; empty for a cluster without."""
    if not cluster.has_gpus:
        return ""
    if not knows_gpus():
        return "On GPUs: unknown, as the TensorFlow of this process has no kernels for them.\n"
    return _table(gpu_report(graph))


def _table(report: GpuReport) -> str:
    """One row for each part of the step and kind of finding, with what comes most often."""
    rows = [("on GPUs", "part of the step", "number", "most often", "first in")]
    counts = sorted(report.counts.items(), key=lambda item: item[0].order)
    for (_, _), group in itertools.groupby(counts, key=lambda item: item[0].order):
        several = list(group)
        finding, _ = max(several, key=lambda item: item[1])
        total = sum(count for _, count in several)
        rows.append((finding.kind, finding.part, str(total), finding.what, layer_or_node(report.first[finding])))
    runs = "" if report.of(REFUSED, SHARED, UNORDERED) else "All operators have kernels there, in one order.\n"
    return f"{runs}{table(rows) if rows[1:] else ''}".rstrip() + "\n"
