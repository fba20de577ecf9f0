"""Files of ``pipelined.dump``: the graph after every pass, the schedule, and drawings of both; no step is run."""

from __future__ import annotations

import html
import logging
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf
from tensorflow.core.util import event_pb2

from dapple_tf.common.progress import Progress
from dapple_tf.common.text import counted
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.dumps.output_folder import filled
from dapple_tf.errors import DataError
from dapple_tf.execution.builds import Build, StepKind, StepSource
from dapple_tf.execution.gpu_check import gpu_text
from dapple_tf.execution.step_builder import complete_step, full_step, training_source, with_compiler
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode, build, capture, check_model
from dapple_tf.frontend.optimizer_checks import check_optimizer
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.measuring.profiled_model import kept_metrics
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.op_graph import placements_report
from dapple_tf.operators.step_placer import StepPlacer
from dapple_tf.schedules.schedule_csv import to_csv
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.files import save_timelines
from dapple_tf.view.graph_svg import graph_svg
from dapple_tf.view.page import graph_page
from dapple_tf.view.step_graph import task_graph
from dapple_tf.view.task_graph import TaskGraph
from dapple_tf.view.timeline import Timeline
from graph_passes.ir.graph import GraphDef, Ref, control_inputs, data_inputs
from graph_passes.ir.program import Program
from graph_passes.ir.tasks import Schedule
from graph_passes.pass_manager import Dump, Dumped, Pass, run_passes, stage_graphs

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1f2328; margin: 2em auto; max-width: 70em; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 1.6em; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: .25em .8em .25em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e3e5e8; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
pre { background: #f3f5f7; padding: .8em; overflow-x: auto; font-size: 12px; }
img { max-width: 100%; border: 1px solid #e3e5e8; }
p.note { color: #57606a; }
"""


class Entry(NamedTuple):
    """A file, or a note in its place.

    Attributes:
        name: its path in the dump; empty for a note alone.
        what: its description, or why it is missing.
        bytes: its size in bytes.
        nodes: number of nodes at a graph's top level.
        functions: number of functions in its library.
    """

    name: str
    what: str
    bytes: int = 0
    nodes: int | None = None
    functions: int | None = None


class Section(NamedTuple):
    """Files that belong together.

    Attributes:
        title: heading of the section.
        entries: entries in reading order.
        picture: path of a picture to show; empty for none.
    """

    title: str
    entries: Sequence[Entry]
    picture: str = ""


def index_page(title: str, text: str, sections: Sequence[Section]) -> str:
    """Returns the HTML page.

    Args:
        title: heading of the page.
        text: preformatted text below it: the plan.
        sections: the files.
    """
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_escaped(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{_escaped(title)}</h1>",
        f"<pre>{_escaped(text)}</pre>",
    ]
    for section in sections:
        parts.append(f"<h2>{_escaped(section.title)}</h2>")
        if section.picture:
            source = html.escape(section.picture, quote=True)
            parts.append(f'<p><a href="{source}"><img src="{source}" alt="task graph"></a></p>')
        parts.append("<table><tr><th>file</th><th>what it is</th><th>size</th><th>nodes</th><th>functions</th></tr>")
        parts += [_row(entry) for entry in section.entries if entry.name]
        parts.append("</table>")
        parts += [f'<p class="note">{_escaped(entry.what)}</p>' for entry in section.entries if not entry.name]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _row(entry: Entry) -> str:
    name = html.escape(entry.name, quote=True)
    numbers = (f"{entry.bytes:,}", *("" if count is None else f"{count:,}" for count in (entry.nodes, entry.functions)))
    cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
    return f'<tr><td><a href="{name}">{name}</a></td><td>{_escaped(entry.what)}</td>{cells}</tr>'


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)


logger = logging.getLogger(__name__)

EVENTS_FOLDER = "tensorboard"
_MOST_DRAWN = 1000
"""Maximum number of nodes of a picture; nobody can read a larger one."""
_TIMELINES = {
    "timeline.html": "the step over time, for a browser",
    "timeline.svg": "the step over time, a picture",
    "timeline.png": "the step over time, a picture",
    "timeline.txt": "the step over time, as text",
    "trace.json": "the step over time, for Perfetto (ui.perfetto.dev) and chrome://tracing",
}
_TITLES = {Mode.TRAIN: "Training", Mode.TEST: "Evaluation", Mode.PREDICT: "Prediction"}


def dump_model(
    directory: str | os.PathLike[str],
    model: keras.Model,
    cluster: Cluster,
    plan: Plan,
    profile: Profile | None = None,
    *,
    spec: BatchSpec | None = None,
    operator_costs: OperatorCosts | None = None,
) -> pathlib.Path:
    """Writes what training a model with a plan would run; no step is run, and the devices needn't exist.

    Args:
        directory: folder to write to. Files of an earlier dump there are replaced, others are left.
        model: a compiled model.
        cluster: the devices, or a description of them.
        plan: stages, devices and schedule.
        profile: costs of the model's layers, for simulated times; None leaves these out.
        spec: structure of the batches; None derives it from the model's inputs and its loss.
        operator_costs: costs of single operators, if the plan places them; None estimates them.

    Returns:
        The directory's first page, ``index.html``.

    Raises:
        DataError: the structure of the batches isn't known.
        FolderError: something else in the directory would be overwritten.
        CaptureError: the model can't be captured.
        PassError: the plan doesn't fit the model.
        PlanError: the plan doesn't fit the cluster.
    """
    plan.validate_on(cluster)
    check_model(model, training=True)
    check_optimizer(model.optimizer, model.trainable_variables)
    passes = StepPasses(with_compiler(plan, model, cluster), cluster)
    return dump(directory, model, passes, [], None, profile, spec=spec, operator_costs=operator_costs)


def dump(
    directory: str | os.PathLike[str],
    model: keras.Model,
    passes: StepPasses,
    sources: Sequence[StepSource],
    table: VariableTable | None,
    profile: Profile | None,
    *,
    spec: BatchSpec | None = None,
    operator_costs: OperatorCosts | None = None,
) -> pathlib.Path:
    """Writes a dump; the model, its values and seeds stay as they are.

    Args:
        directory: folder to write to.
        model: a compiled model.
        passes: passes of its plan.
        sources: sources of the existing steps; training is added if it isn't among them.
        table: variables of the model in these steps.
        profile: costs of the model's layers; None leaves simulated times out.
        spec: structure of training batches; None takes the model's declared inputs.
        operator_costs: costs of single operators, if the plan places them; None estimates them.

    Returns:
        The directory's first page.

    Raises:
        DataError: there is no step, and the structure of the batches isn't known.
        FolderError: something else in the directory would be overwritten.
    """
    notes = []
    wanted = [_written(source) for source in sources]
    if not any(source.built.mode is Mode.TRAIN and source.training for source in sources):
        try:
            known = spec or ExampleBatch.of(model).spec
        except ProfileError as error:
            if not sources:
                raise DataError(
                    f"what the batches of model {model.name!r} look like isn't known yet: train a step first, "
                    f"pipelined.train_on_batch(x, y), and dump then ({error})"
                ) from error
            notes.append("Training isn't here: what its batches look like isn't known before its first step.")
        else:
            wanted.insert(0, lambda writer: writer.training(known))
    started = time.perf_counter()
    placer = passes.placer(operator_costs)
    total = len(wanted) * (passes.pipeline.count + 4) + 1
    with filled(directory) as folder, kept_metrics(model), Progress("writing the dump", total) as bar:
        writer = _Writer(folder, model, passes, placer, table, profile, bar)
        passes.plan.save(folder / "plan.json")
        sections = [Section("Plan", [writer.entry(folder / "plan.json", "the plan, to be loaded by Plan.load")])]
        sections += [make(writer) for make in wanted]
        sections[0] = sections[0]._replace(entries=[*sections[0].entries, *(Entry("", note) for note in notes)])
        page = index_page(f"Dump of model {model.name}", f"{passes.plan}\n\n{passes.cluster}", sections)
        (folder / "index.html").write_text(page, encoding="utf-8")
    logger.info("wrote a dump of model %r to %s in %.1f s", model.name, directory, time.perf_counter() - started)
    return pathlib.Path(directory) / "index.html"


def _written(source: StepSource) -> Callable[[_Writer], Section]:
    """Returns a function that writes one kind of step."""
    return lambda writer: writer.step(source.built.prefix, source)


class _Writer:
    """Writes a dump's files.

    Args:
        folder: folder to write to.
        model: the model.
        passes: passes of its plan.
        placer: places single operators; None if stages run as a whole.
        table: variables of existing steps.
        profile: costs of the model's layers, if known.
        bar: progress bar, updated for each step.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        model: keras.Model,
        passes: StepPasses,
        placer: StepPlacer | None,
        table: VariableTable | None,
        profile: Profile | None,
        bar: Progress,
    ) -> None:
        self.folder, self.model, self.passes, self.placer, self.table = folder, model, passes, placer, table
        self.profile, self.bar = profile, bar

    def entry(self, path: pathlib.Path, what: str, graph: Dumped | None = None) -> Entry:
        """Returns an index entry of a file."""
        name, size = path.relative_to(self.folder).as_posix(), path.stat().st_size
        return Entry(name, what, size) if graph is None else Entry(name, what, size, graph.nodes, graph.functions)

    def training(self, spec: BatchSpec) -> Section:
        """Writes the training step of a model that hasn't been trained; returns its section."""
        table = VariableTable(self.model)
        build(self.model, table, spec)
        return self.step("train_", None, table, spec)

    def step(
        self, prefix: str, source: StepSource | None, table: VariableTable | None = None, spec: BatchSpec | None = None
    ) -> Section:
        """Writes a step, an existing one (``source``) or a training step for a spec's batches; returns its section."""
        mode, training = (Mode.TRAIN, True) if source is None else (source.built.mode, source.training)
        names, batch = (self.table, source.built.spec) if source is not None else (table, spec)
        assert names is not None and batch is not None
        place = self.folder / prefix.removesuffix("_")
        graphs = _Graphs(place, self.folder / EVENTS_FOLDER / place.name, self.bar)
        self.bar.step(f"{place.name}: capturing the model")
        predicts, gpus = mode is Mode.PREDICT, self.passes.gpus
        captured = capture(self.model, names, mode, batch, training=training, predict_step=predicts, gpus=gpus)
        graphs.captured(captured)
        number = self.passes.pipeline.number
        staging = self.passes.stage_passes(mode, prefix, uncut=batch.uncut)
        program = run_passes(captured, staging, first=number(staging[0]), instruments=[graphs])
        if source is None:
            source = training_source(self.model, self.passes, names, batch, program, prefix)
        kind = source.kind or full_step(source, self.passes.plan)
        if self.passes.joins(source.built, kind.samples):
            kind = kind._replace(apart=True)  # A single function would show nothing.
        complete, _ = complete_step(
            self.passes, source.built, kind, source.arrangement, source.holdings, instruments=lambda *_: [graphs]
        )
        step = complete.own_step
        assert step.schedule is not None
        title = f"{_TITLES[mode]}{'' if training == (mode is Mode.TRAIN) else ' of layers in the other mode'}"
        title += f", {counted(kind.samples, 'sample')} ({place.name})"
        shape = " : ".join(map(str, self.passes.plan.replicas))
        whole = (
            f"{self.model.name}: {_TITLES[mode].lower()}, {counted(kind.samples, 'sample')} in "
            f"{counted(len(step.layout.micro_batch_intervals), 'micro-batch')}, {step.schedule.name} on {shape}"
        )
        entries = self._graph(place, whole, task_graph(complete, self.passes.cluster.device_names))
        entries += self._schedule(place, step.schedule)
        if self.placer is not None:
            own, complete = self._operators(place, self.placer, source.built, kind, complete, graphs)
            entries += own
        if report := gpu_text(complete.graph, self.passes.cluster):
            file = place / "gpus.txt"
            file.write_text(report, encoding="utf-8")
            entries.append(self.entry(file, "what the step does on GPUs: copies, and operators without kernels there"))
        if mode is Mode.TRAIN:
            entries += self._timelines(place, whole, step.schedule)
        entries += [self.entry(graph.file, graph.what, graph) for graph in graphs.files.written]
        runs = f"{EVENTS_FOLDER}/{place.name}"
        entries.append(Entry("", f"TensorBoard shows the same graphs: tensorboard --logdir {runs}"))
        picture = place / "graph.svg"
        shown = picture.relative_to(self.folder).as_posix() if picture.exists() else ""
        return Section(title, entries, shown)

    # ---- drawings

    def _graph(self, place: pathlib.Path, title: str, graph: TaskGraph) -> list[Entry]:
        self.bar.step(f"{place.name}: drawing the task graph")
        page, picture = place / "graph.html", place / "graph.svg"
        page.write_text(graph_page(graph, title=title), encoding="utf-8")
        entries = [self.entry(page, f"the task graph, {len(graph.nodes):,} nodes: zoom, filter and click in a browser")]
        if len(graph.nodes) > _MOST_DRAWN:
            return [
                *entries,
                Entry("", f"There is no graph.svg: {len(graph.nodes):,} nodes, drawn are at most {_MOST_DRAWN:,}."),
            ]
        picture.write_text(graph_svg(graph, title=title), encoding="utf-8")
        return [*entries, self.entry(picture, "the same, a picture")]

    def _schedule(self, place: pathlib.Path, schedule: Schedule) -> list[Entry]:
        text, table = place / "schedule.txt", place / "schedule.csv"
        text.write_text(f"{schedule}\n", encoding="utf-8")
        entries = [self.entry(text, f"schedule {schedule.name}: the tasks of each device, in order")]
        try:
            table.write_text(to_csv(schedule), encoding="utf-8")
        except ScheduleError as error:
            return [*entries, Entry("", f"There is no schedule.csv: {error}")]
        return [*entries, self.entry(table, "the same in the form of torch.distributed.pipelining")]

    def _operators(
        self, place: pathlib.Path, placer: StepPlacer, built: Build, kind: StepKind, complete: Program, graphs: _Graphs
    ) -> tuple[list[Entry], Program]:
        """Places a step's operators as in its run, or as they would be placed."""
        known = built.steps.get(kind) or built.placed.get(kind)
        self.bar.step(f"{place.name}: placing operators")
        placed = placer.place(
            complete, built.input_shapes(kind), {}, [graphs], None if known is None else known.placements
        )
        text = place / "operators.txt"
        text.write_text(placements_report(placed.placements, placer.devices), encoding="utf-8")
        return [self.entry(text, "where each operator runs, and in which order")], placed.program

    def _timelines(self, place: pathlib.Path, title: str, schedule: Schedule) -> list[Entry]:
        self.bar.step(f"{place.name}: drawing timelines")
        try:
            step_timelines = timelines(self.passes.plan, self.profile, self.passes.cluster, schedule)
        except (PlanError, ScheduleError) as error:
            logger.warning("timelines are left out of the dump: %s", error)
            return [Entry("", f"There are no timelines: {error}")]
        shown = " and ".join(timeline.name for timeline in step_timelines)
        names = save_timelines(step_timelines, place, title)
        entries = [self.entry(place / name, f"{shown}: {_TIMELINES[name]}") for name in names]
        if "timeline.svg" not in names:
            entries.append(Entry("", "There are no pictures of timelines: matplotlib isn't installed."))
        if self.profile is None:
            entries.append(Entry("", "There is no profile: tasks are taken as equally long, and nothing is simulated."))
        return entries


def timelines(plan: Plan, profile: Profile | None, cluster: Cluster, schedule: Schedule) -> list[Timeline]:
    """Returns a training step as planned and, with a profile, as simulated.

    Raises:
        PlanError: the profile is another model's.
    """
    step_timelines = [planned(plan, profile, cluster, schedule=schedule)]
    if profile is not None:
        step_timelines.append(simulate(plan, profile, cluster, schedule=schedule).drawn())
    return step_timelines


class _Graphs:
    """An instrument that writes each pass's graph, as text and for TensorBoard.

    Attributes:
        files: text files written so far.
    """

    def __init__(self, place: pathlib.Path, runs: pathlib.Path, bar: Progress) -> None:
        self.files = Dump(place)
        self._runs, self._bar = runs, bar

    def captured(self, program: Program) -> None:
        """Writes the graph before the first pass."""
        self.files.graph("00_capture", program.graph, "before the first pass: the model as it was traced")
        write_events(self._runs / "00_capture", program.graph)

    def __call__(self, number: int, item: Pass, program: Program, seconds: float) -> None:
        """Writes the graph after a pass; graphs of stages being built are written together for TensorBoard."""
        self._bar.step(f"{self.files.directory.name}: {item.name}")
        self.files(number, item, program, seconds)
        stages = {f"stage{index}": graph for index, graph in stage_graphs(program).items()}
        graph = together(stages) if stages else program.graph
        write_events(self._runs / f"{number:02d}_{item.name}", graph)


EVENTS = "events.out.tfevents.0.graph"
"""Name of the event file in a run's directory."""


def write_events(directory: pathlib.Path, graph: GraphDef) -> pathlib.Path:
    """Writes a run with a graph; returns its file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / EVENTS
    now = time.time()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for event in (
            event_pb2.Event(wall_time=now, file_version="brain.Event:2"),
            event_pb2.Event(wall_time=now, graph_def=graph.SerializeToString()),
        ):
            writer.write(event.SerializeToString())
    return path


def together(graphs: Mapping[str, GraphDef]) -> GraphDef:
    """Merges graphs into one, each with its nodes under ``name/``; of functions with one name, the first stays."""
    merged = GraphDef()
    functions: set[str] = set()
    gradients: set[str] = set()
    for name, graph in graphs.items():
        merged.versions.CopyFrom(graph.versions)
        for original in graph.node:
            node = merged.node.add()
            node.CopyFrom(original)
            node.name = f"{name}/{original.name}"
            del node.input[:]
            node.input.extend(str(Ref(f"{name}/{ref.node}", ref.output)) for ref in data_inputs(original))
            node.input.extend(f"^{name}/{waited}" for waited in control_inputs(original))
        for function in graph.library.function:
            if function.signature.name not in functions:
                functions.add(function.signature.name)
                merged.library.function.add().CopyFrom(function)
        for gradient in graph.library.gradient:
            if gradient.function_name not in gradients:
                gradients.add(gradient.function_name)
                merged.library.gradient.add().CopyFrom(gradient)
    return merged
