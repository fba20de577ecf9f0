"""The text format of the DAPPLE planner's layer profiles, which PipeDream's profiler writes, too.

A line for each layer, times in ms and sizes in bytes, of one batch; then an indented line for each edge::

    node1 -- Input -- forward_compute_time=0, backward_compute_time=0, activation_size=[602112; 4004], parameter_size=0
    node2 -- stem -- forward_compute_time=0.08, backward_compute_time=0.1, activation_size=1577088, parameter_size=3456
        node1 -- node2

**What crosses a cut.** The format gives sizes to nodes, not to edges. One size is one tensor that all successors read:
it crosses a cut once. A bracket lists several tensors, and nothing says who reads which. A planner that sends their sum
to every successor overcounts, so here:

* If every successor is a ``__getitem__(i)``, each reads entry i. Entries that no successor selects stay in the layer.
* Otherwise, if there are as many entries as successors, entry i goes along the edge to successor i, in the order of
  layers. Edges with equal entries carry the same tensor: a cell of AmoebaNet lists its one output twice, once for the
  next cell and once for the one after.
* Otherwise one tensor of the total size goes to all successors, which is never too little.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

from dapple_tf.common.data_files import read_text
from dapple_tf.describe.layer_profile import Cost, LayerProfile, ProfileError
from dapple_tf.describe.profile import Profile, Tensor

PUBLISHED = {
    path.stem.rpartition("-pbs-")[0]: path for path in sorted((Path(__file__).parent / "profiles").glob("*-pbs-*.txt"))
}
"""Name, such as ``bert-48``, of each profile that the authors of DAPPLE published -> its file; see docs/profiles.md."""

_SEPARATOR = " -- "
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_STAGE = re.compile(r" -- stage_id=\d+\s*$")  # PipeDream's optimizer adds it
_SELECTION = re.compile(r"__getitem__\((\d{1,3})\)(#\d+)?", re.ASCII)
_MOST_BYTES = 2 * 2**20
"""Largest size of a file; DAPPLE's have at most 35 kB."""
_MOST_SIZES = 100_000
_DIGITS = 40  # of exact arithmetic between text and floats, which have 17


def load_text(
    path: str | os.PathLike[str], *, batch_size: int | None = None, model: str | None = None, device: str = "unknown"
) -> Profile:
    """Reads a profile in the planner's text format from a file; see `parse_text`.

    Args:
        path: the file, or a name in `PUBLISHED`.
        batch_size: samples of the batch that was measured; None for N of a file that is called ``...pbs-N...``.
        model: name of the model; None for the file's stem.
        device: the device on which it was measured.

    Raises:
        ProfileError: the file is wrong; the text names file, line and mistake.
        OSError: the file can't be read.
    """
    path = PUBLISHED.get(os.fspath(path), Path(path))
    text = read_text(path, ProfileError, encoding="utf-8-sig", most_bytes=_MOST_BYTES)
    if batch_size is None:
        named = re.search(r"pbs-(\d{1,6})", path.stem, re.ASCII)
        if named is None:
            raise ProfileError(
                f"{path} isn't JSON, and the text format doesn't say for how many samples it is: give "
                f"--profile_batch_size, or batch_size"
            )
        batch_size = int(named[1])
    return parse_text(
        text, batch_size=batch_size, model=path.stem if model is None else model, device=device, source=os.fspath(path)
    )


def parse_text(
    text: str, *, batch_size: int, model: str, device: str = "unknown", source: str = "profile text"
) -> Profile:
    """Returns the profile that ``text`` describes.

    Layers are in a topological order as near to the order of the file as the edges allow. They are named by their
    descriptions (by node ids if these are empty); the second of equal ones is called ``description#2``, and so on.
    A layer is assumed to keep the tensors that it passes on, because the format doesn't say. A gradient flows back if
    the producer or a layer before it has parameters.

    Args:
        text: node lines and edge lines, see the module.
        batch_size: samples of the batch that times and sizes are for (``pbs-N`` in the names of DAPPLE's files). All
            but parameters are taken to grow in proportion to it.
        model: name of the model.
        device: the device on which it was measured, which the format doesn't say.
        source: the text's name in errors, which also give the line's number.

    Raises:
        ProfileError: a line, field or number is malformed, a node occurs twice, an edge names an unknown node, or the
            edges form a cycle.
    """
    _check_samples("batch_size", batch_size)
    nodes, edges = _read(text, source)
    if not nodes:
        raise ProfileError(f"{source}: no line describes a node; give 'nodeN -- description -- {_FIELDS[0]}=..., ...'")
    order = _ordered(nodes, edges, source)
    index = {node: position for position, node in enumerate(order)}
    successors: list[set[int]] = [set() for _ in order]
    for first, second in edges:
        successors[index[first]].add(index[second])
    names = _unique([nodes[node].description or node for node in order])
    learns = [round(nodes[node].parameters) > 0 for node in order]
    layers, tensors = [], []
    for position, node in enumerate(nodes[node] for node in order):
        consumers = sorted(successors[position])
        if learns[position]:
            for consumer in consumers:
                learns[consumer] = True
        tensor_sizes, unread = _distributed(node.activations, {consumer: names[consumer] for consumer in consumers})
        output = _per_sample(sum(tensor_sizes.values(), start=unread), batch_size)
        tensors += [
            Tensor(position, readers, _per_sample(size, batch_size), learns[position])
            for readers, size in tensor_sizes.items()
        ]
        layers.append(
            LayerProfile(
                name=names[position],
                forward=_per_sample(node.forward, batch_size * 1000),
                backward=_per_sample(node.backward, batch_size * 1000),
                residual_bytes=output,
                output_bytes=output,
                parameter_bytes=round(node.parameters),
            )
        )
    return Profile(model, device, (batch_size,), tuple(layers), tuple(tensors))


def to_text(profile: Profile, samples: int | None = None) -> str:
    """Returns ``profile`` in the planner's text format, for a batch of ``samples`` (its first batch size if None).

    `parse_text` makes an equal profile of the text if the format can hold it: one batch size, no fixed costs, and
    nothing beyond layers and tensors. Otherwise the text holds forward and backward times, tensors and parameters;
    shared parameters are at the first layer that uses them. If the format can't say which tensors a layer reads, they
    all go to all readers of the producer: never too little crosses a cut.

    Raises:
        ProfileError: ``samples`` isn't a whole number of at least 1.
    """
    samples = profile.batch_sizes[0] if samples is None else samples
    _check_samples("samples", samples)
    parameters = [layer.parameter_bytes for layer in profile.layers]
    for group in profile.shared:
        parameters[group.layers[0]] += group.parameter_bytes
    produced: list[list[Tensor]] = [[] for _ in profile.layers]
    for tensor in profile.tensors:
        produced[tensor.producer].append(tensor)
    lines, edges = [], []
    for position, layer in enumerate(profile.layers):
        readers = sorted({consumer for tensor in produced[position] for consumer in tensor.consumers})
        edges += [f"\tnode{position + 1} -- node{reader + 1}" for reader in readers]
        names = {reader: profile.layers[reader].name for reader in readers}
        sizes = _listed_sizes(produced[position], layer.output_bytes, names, samples)
        values = (
            _text(_exact(layer.forward, samples) * 1000, samples * 1000),
            _text(_exact(layer.backward, samples) * 1000, samples * 1000),
            sizes[0] if len(sizes) == 1 else f"[{'; '.join(sizes)}]",
            str(parameters[position]),
        )
        fields = ", ".join(f"{field}={value}" for field, value in zip(_FIELDS, values, strict=True))
        name = re.sub(r"[\r\n]+", " ", layer.name).strip()
        lines.append(_SEPARATOR.join((f"node{position + 1}", name, fields)))
    return "\n".join([*lines, *edges]) + "\n"


# ---- reading lines


@dataclasses.dataclass(frozen=True)
class _Node:
    """One node line, in ms and bytes per batch."""

    description: str
    forward: Decimal
    backward: Decimal
    activations: tuple[Decimal, ...]
    parameters: Decimal


def _read(text: str, source: str) -> tuple[Mapping[str, _Node], Sequence[tuple[str, str]]]:
    """Returns nodes by id, in the order of the file, and the edges between them."""
    if len(text) > _MOST_BYTES:
        raise ProfileError(f"{source} is longer than {_MOST_BYTES:,} characters, the most that is read")
    if text.count(";") > _MOST_SIZES:
        raise ProfileError(f"{source}: activation_size lists more than {_MOST_SIZES:,} tensors, the most that are read")
    nodes: dict[str, _Node] = {}
    lines: dict[str, int] = {}
    edges: list[tuple[str, str, int]] = []
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        where = f"{source}:{number}"
        if not line.strip():
            continue
        if line[0].isspace():
            ends = line.strip().split(_SEPARATOR)
            if len(ends) != 2:
                raise ProfileError(
                    f"{where}: {_short(line.strip())} is indented, but no edge 'nodeA -- nodeB'; don't indent nodes"
                )
            edges.append((ends[0].strip(), ends[1].strip(), number))
            continue
        node, described = _node(line, where)
        if node in nodes:
            raise ProfileError(f"{where}: {_short(node)} is described a second time, after line {lines[node]}")
        nodes[node], lines[node] = described, number
    for first, second, number in edges:
        for end in (first, second):
            if end not in nodes:
                raise ProfileError(
                    f"{source}:{number}: an edge names {_short(end)}, which no line describes; add a line for it"
                )
    return nodes, [(first, second) for first, second, _ in edges]


def _node(line: str, where: str) -> tuple[str, _Node]:
    head, separator, values = _STAGE.sub("", line).rpartition(_SEPARATOR)
    node, second, description = head.partition(" --")
    if not (separator and second and node.strip()):
        raise ProfileError(
            f"{where}: {_short(line)} isn't 'nodeN -- description -- {_FIELDS[0]}=..., ...'; edges are indented"
        )
    fields: dict[str, str] = {}
    for part in values.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in _FIELDS:
            raise ProfileError(f"{where}: {_short(part.strip())} isn't one of the fields {', '.join(_FIELDS)}")
        if key in fields:
            raise ProfileError(f"{where}: {key} is given twice, as {_short(fields[key])} and {_short(value)}")
        fields[key] = value
    for key in _FIELDS:
        if key not in fields:
            raise ProfileError(f"{where}: {key} is missing")
    forward, backward, parameters = (_parsed(fields[_FIELDS[i]], _FIELDS[i], where) for i in (0, 1, 3))
    sizes = fields["activation_size"]
    entries = sizes[1:-1].split(";") if sizes[:1] == "[" and sizes[-1:] == "]" else [sizes]
    activations = tuple(_parsed(entry.strip(), "activation_size", where) for entry in entries)
    return node.strip(), _Node(description.strip(), forward, backward, activations, parameters)


def _parsed(text: str, field: str, where: str) -> Decimal:
    if not _NUMBER.fullmatch(text):
        raise ProfileError(f"{where}: {field} is {_short(text)}; it must be a number")
    value = float(text)
    if not 0 <= value < 1e30:
        raise ProfileError(f"{where}: {field} is {_short(text)}; it must be at least 0 and below 1e30")
    return Decimal(text) if value else Decimal(0)  # the exponent of a zero may be beyond Decimal


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


# ---- the graph


def _ordered(nodes: Mapping[str, _Node], edges: Sequence[tuple[str, str]], source: str) -> list[str]:
    """Returns the nodes in topological order, each as early as its place in the file allows."""
    import networkx as nx  # half a second, and only this needs it

    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(edges)
    positions = {node: position for position, node in enumerate(nodes)}
    try:
        return list(nx.lexicographical_topological_sort(graph, key=positions.__getitem__))
    except nx.NetworkXUnfeasible as error:
        cycle = [first for first, _ in nx.find_cycle(graph)]
        shown = cycle if len(cycle) <= 12 else [*cycle[:12], f"... ({len(cycle)} nodes)"]
        raise ProfileError(
            f"{source}: the edges form a cycle: {_SEPARATOR.join([*shown, cycle[0]])}; remove one of them"
        ) from error


def _unique(names: Sequence[str]) -> list[str]:
    counts = Counter(names)
    taken = {name for name, count in counts.items() if count == 1}
    numbers: Counter[str] = Counter()
    distinct = []
    for name in names:
        unique = name
        if counts[name] > 1:
            while True:
                numbers[name] += 1
                unique = name if numbers[name] == 1 else f"{name}#{numbers[name]}"
                if unique not in taken:
                    break
            taken.add(unique)
        distinct.append(unique)
    return distinct


def _selections(names: Mapping[int, str]) -> dict[int, int] | None:
    """Returns for each reader the index of the tensor that it selects; None if a reader takes more than one."""
    matches = {reader: _SELECTION.fullmatch(name) for reader, name in names.items()}
    if not all(matches.values()):
        return None
    return {reader: int(match[1]) for reader, match in matches.items() if match}


def _distributed(
    entries: Sequence[Decimal], names: Mapping[int, str]
) -> tuple[dict[tuple[int, ...], Decimal], Decimal]:
    """Returns readers -> size of each of a layer's tensors, given the readers' names, and the bytes that none reads."""
    with localcontext(prec=_DIGITS):
        total = sum(entries, start=Decimal(0))
        chosen = _selections(names)
        selected = chosen is not None and max(chosen.values(), default=-1) < len(entries)
        carried: dict[int, tuple[object, Decimal]]  # by reader: what identifies its tensor, and the size
        if chosen is not None and selected:
            carried = {reader: (entry, entries[entry]) for reader, entry in chosen.items()}
        elif len(entries) == len(names):
            carried = {reader: (size, size) for reader, size in zip(names, entries, strict=True)}
        else:
            carried = dict.fromkeys(names, (None, total))
        readers: dict[tuple[object, Decimal], list[int]] = {}
        for reader, tensor in carried.items():
            readers.setdefault(tensor, []).append(reader)
        sizes = {tuple(group): size for (_, size), group in readers.items()}
        return sizes, total - sum(sizes.values()) if selected else Decimal(0)


def _listed_sizes(tensors: Sequence[Tensor], output: Cost, names: Mapping[int, str], samples: int) -> list[str]:
    """Returns the sizes to write for a layer, so that `_distributed` finds these tensors, or more."""
    total = _exact(output, samples)
    if not tensors:
        return [_text(total, samples)]
    sizes = {tensor.consumers: _exact(tensor.bytes, samples) for tensor in tensors}
    read = sum((_exact(tensor.bytes, samples) for tensor in tensors), start=Fraction(0))
    partition = sum(len(tensor.consumers) for tensor in tensors) == len(names)
    same = len(tensors) == 1 and tensors[0].bytes == output
    if not same and partition:
        chosen = _selections(names)
        if chosen is None and len(set(sizes.values())) == len(sizes) > 1:
            size_of = {reader: size for readers, size in sizes.items() for reader in readers}
            return [_text(size_of[reader], samples) for reader in names]
        entries = {readers: {chosen[reader] for reader in readers} for readers in sizes} if chosen else {}
        if entries and len(entries) == sum(map(len, entries.values())) == len(set().union(*entries.values())):
            return list(_by_entry({min(entries[readers]): size for readers, size in sizes.items()}, total, samples))
    return [_text(read, samples)]


def _by_entry(sizes: Mapping[int, Fraction], total: Fraction, samples: int) -> Iterator[str]:
    """Yields sizes of a layer's entries: of tensors, and the rest of its output."""
    texts = {entry: _text(size, samples) for entry, size in sizes.items()}
    rest = total - sum(map(Fraction, texts.values()))
    used = sum(map(Decimal, texts.values()), start=Decimal(0))
    missing = rest > 0 and _per_sample(used, samples) != Cost(0.0, float(total / samples))
    for entry in range(max(texts) + 1 + missing):
        if entry in texts:
            yield texts[entry]
        else:
            yield _text(rest, samples) if missing else "0"
            missing = False


# ---- numbers


def _per_sample(value: Decimal, divisor: int) -> Cost:
    with localcontext(prec=_DIGITS):
        return Cost(0.0, float(value / divisor))


def _exact(cost: Cost, samples: int) -> Fraction:
    """Returns the cost of a slice, without rounding."""
    return Fraction(cost.fixed) + Fraction(cost.per_sample) * samples


def _text(value: Fraction, divisor: int) -> str:
    """Returns ``value`` with the fewest digits from which `_per_sample` gets the same float."""
    target = float(value / divisor)
    with localcontext(prec=_DIGITS):
        exact = Decimal(value.numerator) / value.denominator
    for digits in range(1, 18):
        text = f"{exact:.{digits}g}"
        if _per_sample(Decimal(text), divisor).per_sample == target:
            break
    return f"{Decimal(text):f}" if 1e-9 < target < 1e17 else text


def _check_samples(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProfileError(f"{name} is {value!r}; it must be a whole number of at least 1")
