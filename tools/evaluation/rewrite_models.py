"""Rewrites full-size models into pipelines of 16 and 32 devices without running them, and reports the cost.

    python -m tools.evaluation.rewrite_models --json=models.json
    python -m tools.evaluation.rewrite_models --models=bert:48,resnet:50 --devices=32

Each model is built under `dapple.deferred_init`, so that no parameter has a value, captured, cut evenly by parameters
and rewritten by all passes into the complete graph of a training step; devices are a description. Each has its own
process, one at a time. Per number of devices there are three plans: a straight pipeline (or, for a model with fewer
layers than devices, the longest one whose stages have equal numbers of replicas), one of eight replicated stages, and
data parallelism.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

import dapple_tf as dapple
from dapple_tf.execution.builds import Build, StepKind
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.layer_cuts import LayerStages, layer_stages
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.garbage import without_collection
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.models.registry import MODELS, find_model
from dapple_tf.models.sources import ModelSource
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import check_output, markdown, rows_apart, write_results
from dapple_tf.tools.shapes import devices_of, even_cuts
from dapple_tf.variables.parameter_groups import group_updates, holdings, optimizer_variables, readers_of
from graph_passes.ir.graph import GraphDef
from graph_passes.ir.program import Program
from graph_passes.pass_manager import Pass, run_passes

FLAGS = flags.FlagValues()

_SMALL = ("tiny", "mobile", "v3_small", "gpt", "bert", "vgg", "resnet")
"""Small variants, and families by themselves, whose usual size is small."""
FULL_SIZE = tuple(name for name in MODELS if name.rpartition(":")[2] not in _SMALL)
"""The models of the papers."""
KINDS = ("straight", "replicated", "data_parallel")

_MODELS = flags.DEFINE_list("models", list(FULL_SIZE), "Models to rewrite.", flag_values=FLAGS)
_DEVICES = flags.DEFINE_list("devices", ["16", "32"], "Numbers of devices.", flag_values=FLAGS)
_KINDS = flags.DEFINE_list("plans", list(KINDS), f"Kinds of plans, of {', '.join(KINDS)}.", flag_values=FLAGS)
_SCHEDULE = flags.DEFINE_string("schedule", "dapple_a", "Name of the schedule.", flag_values=FLAGS)
_JSON = flags.DEFINE_string(
    "json",
    None,
    "JSON file to write the numbers to; those of other models and plans there stay.",
    flag_values=FLAGS,
)
_CHILD = flags.DEFINE_bool("child", False, "Internal: this process rewrites one model.", flag_values=FLAGS)

_REPLICATED_STAGES = 8
_REPLICATED_MICRO_BATCHES = 16
_MIB = 2**20
_Made = TypeVar("_Made")


@dataclasses.dataclass
class Parts:
    """Times of the parts of the work.

    Attributes:
        seconds: name -> wall-clock seconds.
        processor_seconds: name -> seconds of a core, on which other programs have less influence.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    processor_seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def timed(self, name: str, make: Callable[[], _Made]) -> _Made:
        """Runs and times one part."""
        clock, processor = time.perf_counter(), time.process_time()
        try:
            return make()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - clock
            self.processor_seconds[name] = self.processor_seconds.get(name, 0.0) + time.process_time() - processor


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of a step's graph.

    Attributes:
        nodes: number of nodes at its top level.
        functions: number of functions in its library.
        function_nodes: number of nodes in these functions.
        bytes: size of its GraphDef, at most 2 GB.
    """

    nodes: int
    functions: int
    function_nodes: int
    bytes: int

    @classmethod
    def of(cls, graph: GraphDef) -> Size:
        """Measures a graph."""
        functions = graph.library.function
        return cls(len(graph.node), len(functions), sum(len(each.node_def) for each in functions), graph.ByteSize())


@dataclasses.dataclass(frozen=True)
class Captured:
    """A captured model that isn't cut yet.

    Attributes:
        model: the model, without values.
        spec: structure of its batches.
        table: its variables.
        program: flat graph of its training step.
        layers: layers that can be cut apart.
    """

    model: Any
    spec: BatchSpec
    table: VariableTable
    program: Program
    layers: LayerStages

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(math.prod(variable.shape) for variable in self.model.trainable_variables)


@without_collection
def captured(source: ModelSource, parts: Parts) -> Captured:
    """Builds a model without values, and captures it."""
    with dapple.deferred_init():
        model = parts.timed("model", source.build)
        spec, table = ExampleBatch.of(model).spec, VariableTable(model)
        parts.timed("losses, metrics, slots", lambda: build(model, table, spec))
        program = parts.timed("capture", lambda: capture(model, table, Mode.TRAIN, spec))
        inference = parts.timed("capture of inference", lambda: capture(model, table, Mode.PREDICT, BatchSpec(spec.x)))
    layers = parts.timed("legal cuts", lambda: layer_stages(model, program, inference))
    return Captured(model, spec, table, program, layers)


def described(devices: int) -> dapple.Cluster:
    """Returns a description of servers with at most eight devices each."""
    servers = [{"devices": min(8, devices - first)} for first in range(0, devices, 8)]
    return dapple.Cluster.from_json(json.dumps({"format": "dapple_tf.cluster/1", "servers": servers}))


def replicas_of(kind: str, devices: int, layers: int) -> tuple[int, ...] | None:
    """Returns the replicas of each stage; None if the model has too few layers."""
    if kind == "data_parallel":
        return (devices,)
    most = devices if kind == "straight" else min(_REPLICATED_STAGES, devices // 2)
    while kind == "straight" and (most > layers or devices % most):
        most -= 1
    return (devices // most,) * most if 2 <= most <= layers else None


def plan_of(original: Captured, kind: str, devices: int, schedule: str) -> dapple.Plan | None:
    """Returns an even plan of a kind, with a sample for each replica and micro-batch; None if there is none."""
    replicas = replicas_of(kind, devices, len(original.layers.names))
    if replicas is None:
        return None
    if len(replicas) == 1:
        return dapple.Plan.data_parallel(devices, devices, schedule=schedule)
    cuts = even_cuts(original.model.name, original.layers, original.table, replicas)
    micro_batches = len(replicas) if replicas[0] == 1 else _REPLICATED_MICRO_BATCHES
    return dapple.Plan.manual(cuts, devices_of(replicas), micro_batches, micro_batches * replicas[0], schedule)


@without_collection
def rewritten(original: Captured, plan: dapple.Plan, cluster: dapple.Cluster, parts: Parts) -> Program:
    """Returns the complete training step of a model with a plan, by the passes of real training."""
    passes = StepPasses(plan, cluster)

    def run(program: Program, chosen: Sequence[Pass], first: int, *, complete: bool = False) -> Program:
        for number, item in enumerate(chosen, start=first):
            last = item is chosen[-1]
            rewrite = functools.partial(run_passes, program, [item], first=number, complete=complete and last)
            program = parts.timed(item.name, rewrite)
        return program

    program = run(original.program, passes.stage_passes(Mode.TRAIN, "train_"), 1)
    with dapple.deferred_init():
        updates = parts.timed(
            "capture of the optimizer", lambda: group_updates(original.model, original.table, program)
        )
    owners = readers_of(program)
    built = Build(Mode.TRAIN, original.spec, program, updates, "train_", carried=passes.carried(updates))
    held = holdings(original.table, owners, optimizer_variables(updates), passes.devices)
    kind = StepKind(plan.global_batch_size)
    schedule = parts.timed("order of tasks", lambda: passes.schedule(built, passes.layout(kind.samples), held))
    chosen = passes.step_passes(built, kind, schedule, owners)
    return run(program, chosen, passes.pipeline.number(chosen[0]), complete=True)


def rows_of(
    name: str, source: ModelSource, devices: Sequence[int], kinds: Sequence[str], schedule: str
) -> Iterator[dict[str, Any]]:
    """Rewrites a model with each of its plans; yields a row for each."""
    shared = Parts()
    original = captured(source, shared)
    size = Size.of(original.program.graph)
    seen = set()
    for count in devices:
        for kind in kinds:
            plan = plan_of(original, kind, count, schedule)
            if plan is None or plan.devices in seen:
                continue
            seen.add(plan.devices)
            parts = Parts()
            step = rewritten(original, plan, described(count), parts)
            yield {
                "model": name,
                "parameters": original.parameters,
                "layers": len(original.layers.names),
                "captured_nodes": size.nodes + size.function_nodes,
                "plan": kind,
                "devices": count,
                "stages": plan.num_stages,
                "replicas": count // plan.num_stages,
                "micro_batches": plan.micro_batches,
                "schedule": schedule,
                "model_parts": dataclasses.asdict(shared),
                "plan_parts": dataclasses.asdict(parts),
                "step": dataclasses.asdict(Size.of(step.graph)),
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }


# ---- showing

_HEADS = (
    "model", "parameters (M)", "layers", "stages x replicas", "M", "build (s)", "capture (s)", "cuts (s)",
    "passes (s)", "top-level nodes", "functions", "their nodes", "GraphDef (MiB)", "peak memory (MiB)",
)  # fmt: skip


def _sum(parts: Mapping[str, Mapping[str, float]], *names: str) -> float:
    seconds = parts["processor_seconds"]
    return sum(seconds.values()) if not names else sum(seconds.get(name, 0.0) for name in names)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows for people, as Markdown. Seconds are of one core."""
    cells: list[tuple[str, ...]] = [_HEADS]
    for row in rows:
        own, step = row["model_parts"], row["step"]
        cells.append(
            (
                row["model"],
                f"{row['parameters'] / 1e6:.1f}",
                str(row["layers"]),
                f"{row['stages']} x {row['replicas']}",
                str(row["micro_batches"]),
                f"{_sum(own, 'model'):.1f}",
                f"{_sum(own, 'losses, metrics, slots', 'capture'):.1f}",
                f"{_sum(own, 'capture of inference', 'legal cuts'):.1f}",
                f"{_sum(row['plan_parts']):.1f}",
                f"{step['nodes']:,}",
                f"{step['functions']:,}",
                f"{step['function_nodes']:,}",
                f"{step['bytes'] / _MIB:.1f}",
                f"{row['peak_bytes'] / _MIB:.0f}",
            )
        )
    return markdown(cells)


def main() -> None:
    """Rewrites the models of the flags, and prints the table."""
    command.check(bool(_MODELS.value and _DEVICES.value), "--models or --devices is empty")
    command.check(
        all(count.isascii() and count.isdigit() and int(count) > 1 for count in _DEVICES.value),
        f"--devices={','.join(_DEVICES.value)}: need whole numbers of at least 2 with commas between them",
    )
    command.check_choices(_KINDS, KINDS)
    sources = {name: find_model(name) for name in _MODELS.value}
    if _CHILD.value:
        ((name, source),) = sources.items()
        logging.getLogger("dapple_tf").setLevel(logging.WARNING)
        for row in rows_of(name, source, [*map(int, _DEVICES.value)], _KINDS.value, _SCHEDULE.value):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        return
    check_output(_JSON.value)
    began, rows, failed = time.monotonic(), list[dict[str, Any]](), list[str]()
    options = [
        f"--devices={','.join(_DEVICES.value)}",
        f"--plans={','.join(_KINDS.value)}",
        f"--schedule={_SCHEDULE.value}",
    ]
    for name in sources:
        command.say(name, began)
        own: list[dict[str, Any]] = []
        try:
            for row in rows_apart("tools.evaluation.rewrite_models", "--child", f"--models={name}", *options):
                command.say(f"  {row['stages']} x {row['replicas']}: {row['step']['nodes']:,} nodes", began)
                own.append(row)
        except RuntimeError as error:
            failed.append(str(error))
            command.say(str(error), began)
        rows += own
        for kind in _KINDS.value if _JSON.value else ():
            if of_kind := [row for row in own if row["plan"] == kind]:
                write_results(_JSON.value, f"rewrite_models {name} {kind}", of_kind)
    sys.stdout.write(table(rows) + "\n")
    if failed:
        sys.stdout.write("FAILED: " + "; ".join(failed) + "\n")
        sys.exit(1)


if __name__ == "__main__":
    command.start(main, FLAGS)
