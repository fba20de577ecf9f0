"""Timelines for a terminal: a grid of lanes and columns of time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from dapple_tf.common.text import bytes_text
from dapple_tf.view.time_axis import (
    common_unit,
    memory_text,
    on_one_axis,
    short_label,
    shown_unit,
    step_text,
    ticks,
)
from dapple_tf.view.timeline import (
    ALL_REDUCE,
    COLOURS,
    LINK_KINDS,
    SEND,
    TASKS,
    Lane,
    Span,
    Timeline,
    row_of,
    text_colour,
)

_NARROWEST = 60
_FEWEST_COLUMNS = 20
_LONGEST_LABEL = 0.3
"""Maximum length of a label as a part of the width."""
_TICK_EVERY = 9
_GLYPHS = {"F": "░", "B": "█", "Bx": "▓", "Bw": "▒", "accumulate": "+", "apply": "^"}
_OTHER = "%"
_LINES = {SEND: "╌─", ALL_REDUCE: "┅━"}
"""Marks of spans that fill less than half of a column, and more."""
_LINE_NAMES = {SEND: "send", ALL_REDUCE: "all-reduce"}
_LEVELS = "▁▂▃▄▅▆▇█"
_BUBBLE = "·"
_END = "│"


@dataclasses.dataclass(frozen=True)
class _Grid:
    """Columns of time.

    Attributes:
        end: time at which the axis ends.
        columns: number of columns.
        exact: whether every task begins and ends with a column.
    """

    end: float
    columns: int
    exact: bool

    def position(self, time: float) -> float:
        """Converts a time to columns."""
        return time / self.end * self.columns if self.end else 0.0

    def shares(self, start: float, end: float) -> Mapping[int, float]:
        """Returns column -> the part of it that a span of time fills; other columns are missing."""
        first, last = self.position(start), self.position(end)
        if self.exact:
            first, last = round(first), round(last)
        columns = range(max(0, math.floor(first)), min(self.columns, math.ceil(last)))
        return {column: min(last, column + 1) - max(first, column) for column in columns}


def timeline_text(timelines: Sequence[Timeline], *, width: int = 100, colour: bool = False) -> str:
    """Draws timelines one below the other, on one axis.

        planned: 12 F, bubbles 25.0%
                           0 F       5         10    bubble
        device 0: stage 0 │0 1 ····0   2 1   ··2   │ 25.0%
                          │░░░░    ████░░████  ████│
        device 1: stage 1 │··0 0   1 1   2 2   ····│ 25.0%
                          │  ░░████░░████░░████    │

        ░ F  █ B  · bubble  (numbers: micro-batches)

    Each lane has a row of micro-batch numbers, with dots where it computes nothing, and a row of the kinds of tasks.
    Devices of several stages have a row of stage numbers below. If all tasks are multiples of one time and there is
    room, a column is that time or a part of it; otherwise tasks are drawn in proportion, and a column shows what fills
    most of it. Sends and all-reduces follow, thin where they fill less than half of a column; then the memory of each
    device, all on one scale.

    Args:
        timelines: for example planned, simulated and measured. Timelines of different units have separate axes.
        width: characters per line.
        colour: whether to colour tasks by ANSI escape sequences.

    Returns:
        Lines without a newline after the last one; an empty text for no timelines.

    Raises:
        ValueError: ``width`` is too small.
    """
    if width < _NARROWEST:
        raise ValueError(f"width is {width} characters; timelines need at least {_NARROWEST}")
    blocks = [_Block(group, width, colour) for group in on_one_axis(timelines)]
    lines = [line for block in blocks for timeline in block.timelines for line in [*block.drawn(timeline), ""]]
    return "\n".join([*lines, *_legend(timelines, width, colour)]) if lines else ""


class _Block:
    """Timelines that share an axis."""

    def __init__(self, timelines: Sequence[Timeline], width: int, colour: bool) -> None:
        self.timelines, self.colour = timelines, colour
        self.most_bytes = max((peak for timeline in timelines for peak in timeline.peak_bytes.values()), default=0.0)
        labels = [label for timeline in timelines for label in timeline.devices.values()]
        self.label = min(max(map(len, [*labels, "  all-reduce"])), int(_LONGEST_LABEL * width))
        self.tail = max(len(tail) for timeline in timelines for tail in ["bubble", *_tails(timeline)])
        self.grid = _grid(timelines, width - self.label - self.tail - 4)

    def drawn(self, timeline: Timeline) -> list[str]:
        """Returns the lines of a timeline, its title first."""
        lines = [f"{timeline.name}: {step_text(timeline)}", self.axis(timeline)]
        several = len(timeline.devices) > 1
        for lane, spans in timeline.lanes.items():
            if lane.row == "compute":
                lines += self.computing(timeline, lane, spans)
            elif any(span.end > span.start for span in spans):
                name = f"  {_LINE_NAMES[lane.row]}"
                size = bytes_text(sum(span.bytes for span in spans))
                lines.append(self.line(timeline, name, self.covered(spans, *_LINES[lane.row]), size))
        if timeline.memory:
            lines.append("memory" + (f", all from 0 to {bytes_text(self.most_bytes)}" if several else ""))
        for device, curve in timeline.memory.items():
            if curve:
                tail = memory_text(timeline, device)
                lines.append(self.line(timeline, timeline.devices[device], self.levels(timeline, curve), tail))
        return lines

    def axis(self, timeline: Timeline) -> str:
        """Returns the line of the scale."""
        grid = self.grid
        name, size = shown_unit(timeline.unit, grid.end)
        row = [" "] * (grid.columns + 1)
        for number, tick in enumerate(ticks(grid.end / size, 2 + grid.columns // _TICK_EVERY)):
            text = f"{tick:g}" if number else f"0 {name}"
            column = round(grid.position(tick * size))
            if column + len(text) <= len(row) and not any(map(str.strip, row[max(0, column - 1) : column + len(text)])):
                row[column : column + len(text)] = text
        return f"{'':{self.label}}  {''.join(row)} {'bubble' if timeline.bubbles else ''}".rstrip()

    def line(self, timeline: Timeline, label: str, cells: Sequence[str], tail: str = "") -> str:
        """Returns a label, a cell for each column between the start and the end of the step, and a remark."""
        end = min(self.grid.columns, round(self.grid.position(timeline.latency)))
        label = short_label(label, self.label)
        row = f"{label:{self.label}} {_END}{''.join(cells[:end])}{_END}{' ' * (self.grid.columns - end)}"
        return f"{row} {tail}".rstrip()

    def computing(self, timeline: Timeline, lane: Lane, spans: Sequence[Span]) -> list[str]:
        """Returns the rows of a device's computation."""
        columns = self.grid.columns
        shown: list[Span | None] = [None] * columns
        most = [0.0] * columns
        busy = [0.0] * columns
        for span in spans:
            for column, share in self.grid.shares(span.start, span.end).items():
                busy[column] += share
                if share > most[column]:
                    shown[column], most[column] = span, share
        shown = [span if busy[column] >= 0.5 else None for column, span in enumerate(shown)]
        numbers = [_BUBBLE if span is None else " " for span in shown]
        stages = [" "] * columns
        for box, cells in itertools.groupby(range(columns), key=lambda column: shown[column]):
            if box is not None:
                places = list(cells)
                if box.kind in TASKS and box.micro_batch is not None:
                    _write(numbers, places, box.micro_batch)
                _write(stages, places, box.stage)
        boxes = [" " if span is None else _GLYPHS.get(span.kind, _OTHER) for span in shown]
        if self.colour:
            numbers = [_on_colour(text, span) for text, span in zip(numbers, shown, strict=True)]
            boxes = [_in_colour(text, span) for text, span in zip(boxes, shown, strict=True)]
        bubble = timeline.bubbles.get(lane.device)
        lines = [
            self.line(timeline, timeline.devices[lane.device], numbers, "" if bubble is None else f"{bubble:.1%}"),
            self.line(timeline, "", boxes),
        ]
        if len({span.stage for span in spans}) > 1:
            lines.append(self.line(timeline, "  stage", stages))
        return lines

    def covered(self, spans: Sequence[Span], less: str, more: str) -> list[str]:
        """Returns a cell for each column: blank, or whether spans fill less or more than half of it."""
        busy = [0.0] * self.grid.columns
        for span in spans:
            for column, share in self.grid.shares(span.start, span.end).items():
                busy[column] += share
        return [" " if not share else less if share < 0.5 else more for share in busy]

    def levels(self, timeline: Timeline, curve: Sequence[tuple[float, float]]) -> list[str]:
        """Returns a cell for each column: its maximum of memory."""
        columns = self.grid.columns
        end = max(1, min(columns, round(self.grid.position(timeline.latency))))
        most = [0.0] * columns
        for (start, level), (stop, _) in zip(curve, [*curve[1:], (timeline.latency, 0.0)], strict=True):
            first = min(end - 1, int(self.grid.position(start) + 1e-9))  # what rises and falls at the end is also seen
            last = max(first + 1, math.ceil(self.grid.position(stop) - 1e-9))
            for column in range(max(0, first), min(columns, last)):
                most[column] = max(most[column], level)
        top = len(_LEVELS) - 1
        return [_LEVELS[round(level / self.most_bytes * top)] if self.most_bytes else _LEVELS[0] for level in most]


def _grid(timelines: Sequence[Timeline], room: int) -> _Grid:
    """Returns columns for timelines: a whole number per common unit of time, or as many as there is room for."""
    end = max(timeline.latency for timeline in timelines)
    times = [time for timeline in timelines for span in timeline.spans for time in (span.start, span.end)]
    unit = common_unit([*times, *(timeline.latency for timeline in timelines)], room)
    if unit is None or any(timeline.latency and not timeline.spans for timeline in timelines):
        return _Grid(end, room, False)
    count = round(end / unit)
    digits = max((len(str(span.micro_batch or 0)) for timeline in timelines for span in timeline.spans), default=1)
    lengths = (round((span.end - span.start) / unit) for timeline in timelines for span in timeline.spans)
    shortest = min((length for length in lengths if length), default=1)
    least = math.ceil(_FEWEST_COLUMNS / count)
    wanted = (math.ceil((digits + 1) / shortest), math.ceil(digits / shortest), 1)  # with room for whole numbers
    cells = next(cells for cells in wanted if cells * count <= room)
    return _Grid(end, count * max(cells, min(least, room // count)), True)


def _write(cells: list[str], places: Sequence[int], number: int) -> None:
    """Writes a number from the left into neighbouring cells; its last digits if there isn't room for all."""
    text = str(number)[-len(places) :]
    cells[places[0] : places[0] + len(text)] = text


def _tails(timeline: Timeline) -> list[str]:
    """Returns the texts at the ends of lines, to measure their width."""
    sums = [bytes_text(sum(s.bytes for s in spans)) for lane, spans in timeline.lanes.items() if lane.row != "compute"]
    return [*sums, *(memory_text(timeline, device) for device, curve in timeline.memory.items() if curve)]


def _legend(timelines: Sequence[Timeline], width: int, colour: bool) -> list[str]:
    """Returns the legend of the marks that occur."""
    examples = {span.kind: span for timeline in timelines for span in timeline.spans}
    marks = [(glyph, kind, examples.get(kind)) for kind, glyph in _GLYPHS.items() if kind in examples]
    if others := sorted(examples.keys() - _GLYPHS.keys() - LINK_KINDS):
        marks.append((_OTHER, ", ".join(others), None))
    rows = set(map(row_of, examples.values()))
    marks += [(_LINES[row][1], name, None) for row, name in _LINE_NAMES.items() if row in rows]
    marks += [(_BUBBLE, "bubble", None), ("", "(numbers: micro-batches)", None)]
    lines, length = [""], 0
    for glyph, name, span in marks:
        gap = 2 if length else 0
        needed = len(f"{glyph} {name}".strip())
        if length + gap + needed > width:
            lines, length, gap = [*lines, ""], 0, 0
        mark = _in_colour(glyph, span) if colour else glyph
        lines[-1] += " " * gap + f"{mark} {name}".strip()
        length += gap + needed
    return lines


def _rgb(colour: str) -> str:
    return ";".join(str(int(colour[start : start + 2], 16)) for start in (1, 3, 5))


def _in_colour(text: str, span: Span | None) -> str:
    if span is None:
        return text
    return f"\x1b[38;2;{_rgb(COLOURS.get(span.kind, COLOURS['other']))}m{text}\x1b[0m"


def _on_colour(text: str, span: Span | None) -> str:
    if span is None:
        return text
    colour = COLOURS.get(span.kind, COLOURS["other"])
    return f"\x1b[48;2;{_rgb(colour)};38;2;{_rgb(text_colour(colour))}m{text}\x1b[0m"
