"""Notes: where training by slices of a batch differs from plain Keras on the whole batch, and why."""

from __future__ import annotations

import dataclasses
import enum
import logging
from collections.abc import Mapping, Sequence

from graph_passes.analysis.slice_shapes import SAMPLES
from graph_passes.ir.graph import FLOAT_DTYPES, LAYER_ATTR, Graph, Ref
from graph_passes.ir.program import Program, VariableKind
from graph_passes.ir.spreads import Coupling
from graph_passes.ir.tensorflow_bridge import output_dtypes

logger = logging.getLogger(__name__)


class NoteKind(enum.Enum):
    """The kind of a difference; the value names it."""

    COUPLED = "samples together"
    """Samples are compared, normalised or sorted within their slice, not the batch."""
    PAIRS = "samples in pairs"
    """An output has the samples along two axes: each is compared with the others of its slice."""
    BATCH_SIZE = "batch size"
    """Something depends on the number of samples of the slice in a way that doesn't add up over slices."""
    PLACE = "place in the batch"
    """Something depends on a sample's place in the slice."""
    LOSS = "loss"
    """A term of the loss is neither a mean nor a sum over samples."""
    STATE = "state"
    """State that the forward pass updates differs from its update by the whole batch."""
    METRIC = "metric"
    """A metric isn't a sum over samples."""
    UNKNOWN = "unknown"
    """It is unknown what something does with samples."""
    RANDOM = "random draws"
    """Random numbers are drawn for each slice: other ones, of the same distribution."""


@dataclasses.dataclass(frozen=True)
class Note:
    """One reason why a pipelined model differs from plain Keras under its plan.

    Attributes:
        kind: see `NoteKind`.
        layer: path of the layer (``encoder/block_1``), or the name of a loss, a metric or state.
        text: what differs.
        way_out: what to do about it.
        alone: whether it affects only metrics, or state from which no loss is computed.
    """

    kind: NoteKind
    layer: str
    text: str
    way_out: str
    alone: bool = False

    def __str__(self) -> str:
        """Returns one line."""
        return f"{self.layer}: {self.text}; {self.way_out}"

    @property
    def expected(self) -> bool:
        """Whether results are as good as plain Keras', though not equal: other random numbers, say."""
        return self.kind is NoteKind.RANDOM


_TOLD = {
    Coupling.TOGETHER: (
        NoteKind.COUPLED,
        "computes across the samples of each slice, not of the whole batch",
        "plan one slice for its stage (one micro-batch, one replica), or use what treats each sample by itself; with "
        "synchronized=True BatchNormalization needs only one micro-batch",
    ),
    Coupling.MICRO_BATCH: (
        NoteKind.COUPLED,
        "computes across the samples of each micro-batch, not of the whole batch",
        "plan one micro-batch",
    ),
    Coupling.PAIRS: (
        NoteKind.PAIRS,
        "compares each sample with the others of its slice, not of the whole batch: its output has a row and a column "
        "for each sample of the slice, which labels by their place in the batch don't fit",
        "plan one slice for its stage (one micro-batch, one replica)",
    ),
    Coupling.BATCH_SIZE: (
        NoteKind.BATCH_SIZE,
        "depends on the number of samples of a slice",
        "take means or sums over samples, or divide by a constant",
    ),
    Coupling.PLACE: (
        NoteKind.PLACE,
        "depends on the place of a sample in its slice, not in the whole batch",
        "feed the place as an input, or plan one slice for its stage (one micro-batch, one replica)",
    ),
    Coupling.NOT_LINEAR: (
        NoteKind.LOSS,
        "is neither a sum nor a mean over samples: slices' values are averaged",
        "write it as a sum or a mean of values of samples, or plan one slice (one micro-batch, one replica)",
    ),
    Coupling.STATE: (
        NoteKind.STATE,
        "updates state to something else than a sum, a mean or an extreme of samples: floating-point state becomes the "
        "mean of what slices make of it, other state what the first slice makes of it",
        "add up or average floating-point numbers, or plan one slice for its stage (one micro-batch, one replica)",
    ),
    Coupling.METRIC: (
        NoteKind.METRIC,
        "isn't a sum over samples: it sees slices as if they were batches",
        "make its state a sum over samples, or plan one slice (one micro-batch, one replica)",
    ),
    Coupling.DRAWS: (
        NoteKind.RANDOM,
        "draws other random numbers for each slice",
        "a stage of one slice (one micro-batch, one replica) draws Keras' own",
    ),
    Coupling.PYTHON: (
        NoteKind.UNKNOWN,
        "is Python code, which gets each slice by itself; whether it mixes samples can't be told",
        "compare a step with plain Keras by verify(x, y)",
    ),
    Coupling.UNKNOWN: (
        NoteKind.UNKNOWN,
        "what it does with samples can't be told: shapes contradict each other for slices of "
        + ", ".join(str(samples) for pair in SAMPLES for samples in pair)
        + " samples",
        "compare a step with plain Keras by verify(x, y)",
    ),
}
_MIXING = (Coupling.TOGETHER, Coupling.MICRO_BATCH, Coupling.PLACE)
"""Couplings that explain all others in the same layer, except couplings by state."""


def notes_of(program: Program, slices: Sequence[int], micro_batches: int = 1) -> tuple[Note, ...]:
    """Returns the notes of a captured training step.

    Args:
        program: the program after ``assign_stages``, with its flat graph.
        slices: for each stage the number of slices of a batch; a stage with one computes what plain Keras does.
        micro_batches: number of micro-batches of a batch.
    """
    flat = Graph(program.flat or program.graph)
    sliced = {name for name in flat.nodes if slices[program.node_stage.get(name, len(slices) - 1)] > 1}
    notes: dict[tuple[NoteKind, str], Note] = {}
    told = [
        (name, coupling)
        for name, coupling in program.couplings
        if name in sliced or (coupling is Coupling.UNKNOWN and max(slices) > 1)
    ]
    if micro_batches == 1:
        told = [(name, coupling) for name, coupling in told if coupling is not Coupling.MICRO_BATCH]
    results = [ref for ref in (program.roles.loss, *program.roles.outputs) if ref is not None and ref.node in flat]
    direct = flat.ancestors(results, control=False)
    for_state = (*_MIXING, Coupling.BATCH_SIZE)
    told = [(name, Coupling.STATE if name not in direct and own in for_state else own) for name, own in told]
    names = _names(program, flat)
    places = {name: _place(names, flat, name) for name, _ in told}
    causes: dict[str, list[Coupling]] = {}
    for name, coupling in told:
        causes.setdefault(places[name], []).append(coupling)
    reaching = _reaching(program, flat, direct)
    widely = {place for name, place in places.items() if name in reaching}
    for place, couplings in causes.items():
        mixing = next((coupling for coupling in couplings if coupling in _MIXING), None)
        mixing = Coupling.PAIRS if Coupling.PAIRS in couplings else mixing
        if mixing is not None:
            couplings = [mixing, *(coupling for coupling in couplings if coupling is Coupling.STATE)]
        for coupling in couplings:
            kind, text, way_out = _TOLD[coupling]
            notes.setdefault((kind, place), Note(kind, place, text, way_out, place not in widely))
    kind, text, way_out = _TOLD[Coupling.DRAWS]
    for layer, alone in _drawing(program, flat, sliced, names, reaching).items():
        notes.setdefault((kind, layer), Note(kind, layer, text, way_out, alone))
    return tuple(notes.values())


def _reaching(program: Program, flat: Graph, direct: set[str]) -> set[str]:
    """Returns the nodes that the loss depends on, in this step or by state in the next."""
    reaching = set(direct)
    roles = program.roles
    kept = [(v.value.node, v.update) for v in roles.variables if v.kind is VariableKind.STATE and v.value and v.update]
    while states := [update for value, update in kept if value in reaching and update.node not in reaching]:
        reaching |= flat.ancestors(states, control=False)
    return reaching


def pairs(program: Program, slices: Sequence[int]) -> str:
    """Returns why slices don't work for an output that compares each sample with all others; empty if there is none.

    Args:
        program: a captured program, before or after ``assign_stages``.
        slices: for each stage the number of slices of a batch.
    """
    flat = Graph(program.flat or program.graph)
    for name, coupling in program.couplings:
        if coupling is Coupling.PAIRS and slices[program.node_stage.get(name, len(slices) - 1)] > 1:
            _, text, way_out = _TOLD[coupling]
            return f"layer {_place({}, flat, name)!r} {text}; {way_out}"
    return ""


def _names(program: Program, flat: Graph) -> dict[str, str]:
    """Returns names of nodes outside of layers: of the layer whose state they assign, or of the metric they serve."""
    variables = program.roles.variables
    others = [v.update for v in variables if v.kind is not VariableKind.METRIC]
    results = [ref for ref in (program.roles.loss, *program.roles.outputs, *others) if ref is not None]
    needed = flat.ancestors(results, control=False)
    names: dict[str, str] = {}
    for variable in variables:
        pending = [variable.update] if variable.kind is VariableKind.METRIC and variable.update is not None else []
        while pending:
            name = pending.pop().node
            if name not in needed and name not in names:
                names[name] = variable.metric or variable.name.removeprefix("metric/")
                pending += flat.inputs(name)
        if variable.kind is VariableKind.STATE and variable.update is not None:
            names[variable.update.node] = _layer(flat, variable.update) or variable.name
    return names


def _layer(flat: Graph, ref: Ref) -> str:
    """Returns the layer that has computed a tensor; empty if there is none."""
    while LAYER_ATTR not in flat.nodes[ref.node].attr:
        inputs = flat.inputs(ref.node)
        if not inputs:
            return ""
        ref = inputs[0]
    return str(flat.nodes[ref.node].attr[LAYER_ATTR].s.decode())


def _place(names: Mapping[str, str], flat: Graph, name: str) -> str:
    """Returns the layer of a node, or else its name by `_names`, or ``loss``."""
    node = flat.nodes[name]
    return node.attr[LAYER_ATTR].s.decode() if LAYER_ATTR in node.attr else names.get(name, "loss")


def _drawing(
    program: Program, flat: Graph, sliced: set[str], names: Mapping[str, str], reaching: set[str]
) -> dict[str, bool]:
    """Returns the paths of layers that draw, and whether no loss is computed from that.

    They draw where the slice's number first becomes a floating-point number.
    """
    shifted = {program.roles.slice.number.node}
    layers: dict[str, bool] = {}
    for node in flat:
        if not any(ref.node in shifted for ref in flat.inputs(node.name)):
            continue
        if FLOAT_DTYPES.intersection(output_dtypes(node)):
            if node.name in sliced:
                place = _place(names, flat, node.name)
                layers[place] = layers.get(place, True) and node.name not in reaching
        else:
            shifted.add(node.name)
    return layers


def summary(notes: Sequence[Note], model: str) -> str:
    """Returns a heading and a line for each kind of note."""
    kinds: Mapping[NoteKind, list[Note]] = {kind: [note for note in notes if note.kind is kind] for kind in NoteKind}
    lines = [f"model {model!r} under this plan differs from plain Keras (pipelined.notes tells it layer by layer):"]
    for own in filter(None, kinds.values()):
        layers = ", ".join(dict.fromkeys(note.layer for note in own[:3])) + (", ..." if len(own) > 3 else "")
        lines.append(f"  {layers}: {own[0].text}; {own[0].way_out}")
    return "\n".join(lines)


class NoteLog:
    """The notes of a model's training under its plan, each of which is logged once.

    Attributes:
        latest: the notes of the latest training step; None before the first.
        quiet: whether nothing is logged, for steps that only measure or compare.
    """

    def __init__(self, model: str) -> None:
        """Args: model: its name."""
        self._model = model
        self.latest: tuple[Note, ...] | None = None
        self.quiet = False
        self._told: set[tuple[NoteKind, str]] = set()

    def take(self, notes: tuple[Note, ...]) -> None:
        """Records the notes of a training step, and logs new ones."""
        new = [note for note in notes if (note.kind, note.layer) not in self._told]
        self.latest = notes
        if new and not self.quiet:
            self._told |= {(note.kind, note.layer) for note in new}
            level = logging.INFO if all(note.expected for note in new) else logging.WARNING
            logger.log(level, "%s", summary(new, self._model))
