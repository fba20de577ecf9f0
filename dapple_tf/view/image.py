"""Timelines as images: lanes with coloured boxes, transfers, all-reduces and memory, one timeline above another."""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapple_tf.view.time_axis import memory_text, on_one_axis, short_label, shown_unit, step_text, ticks
from dapple_tf.view.timeline import ALL_REDUCE, COLOURS, SEND, TASKS, Lane, MemoryCurve, Span, Timeline, text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths are inches, all font sizes points.
_WIDTH, _MARGIN, _RIGHT = 13.0, 0.25, 1.25
_TITLE, _PANEL_TITLE, _AXIS, _GAP = 0.2, 0.3, 0.28, 0.16
_COMPUTE, _THIN, _MEMORY = 0.27, 0.085, 0.27
_ROW_GAP, _THIN_GAP = 0.07, 0.025
_TICK_LABEL = 0.075
_THINNEST = 0.6
"""Minimum width of a transfer, in points."""
_FONT, _SMALL, _NUMBER = 8.5, 7.0, 7.0
_CHARACTER = 0.62
"""Width of a digit, in font sizes."""
_LONGEST_LABEL = 34
_COLUMNS = 1000
"""Number of moments that a memory curve can show; a measured one has tens of thousands of points."""
_PALEST = 0.5
"""How much paler a device's last stage is drawn than its first."""

_INK, _FAINT, _GRID, _IDLE = "#1f2328", "#6b737c", "#d7dbe0", "#eef0f2"
_MEMORY_FILL, _MEMORY_LINE, _OVER = "#b9c4d3", "#5d6f88", "#d1453b"

_NAMES = {SEND: "transfer", ALL_REDUCE: "all-reduce"}


def draw_timelines(timelines: Sequence[Timeline], path: str | os.PathLike[str], *, title: str | None = None) -> None:
    """Draws timelines one above another on one axis, into an SVG or PNG file.

    Boxes are coloured by kind and have their micro-batch's number if there is room; a device's later
    stages are paler. Bubbles are grey, with their share at the right. Below each device are its sends and
    all-reduces, and below all devices the memory of each, on one scale; memory above a device's limit is red. The same
    timelines give the same file, byte by byte.

    Args:
        timelines: for example planned, simulated and measured. Timelines of different units have separate axes.
        path: ends with ``.svg`` or ``.png``.
        title: heading of the image.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
        ValueError: the suffix is another, or there are no timelines.
        OSError: the file can't be written.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise ValueError(f"timelines are drawn as .svg or .png, but the path is {os.fspath(path)!r}; change its suffix")
    _draw(timelines, title, path, kind[1:])


def timelines_svg(timelines: Sequence[Timeline], *, title: str | None = None) -> str:
    """Returns the same drawing as an SVG element for an HTML page.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
        ValueError: no timelines.
    """
    drawing = io.StringIO()
    _draw(timelines, title, drawing, "svg")
    text = drawing.getvalue()
    return text[text.index("<svg") :]


def _draw(timelines: Sequence[Timeline], title: str | None, target: Path | io.StringIO, kind: str) -> None:
    if not timelines:
        raise ValueError("there are no timelines to draw; give at least one")
    try:
        import matplotlib  # an extra
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "drawing timelines needs matplotlib, which isn't installed; pip install dapple_tf[images]"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's settings for other plots don't change ours
        matplotlib.rc("font", size=_FONT)
        matplotlib.rc("svg", hashsalt="dapple_tf", fonttype="none")
        matplotlib.rc("text", parse_math=False)  # a dollar sign in a title is only that
        figure = _figure(timelines, title)
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(target, format=kind, dpi=150, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row of a panel.

    Attributes:
        device: index of its device.
        lane: the lane that it shows; None for memory.
        top: its upper edge, from the panel's.
        height: its height.
    """

    device: int
    lane: Lane | None
    top: float
    height: float


def _rows(timeline: Timeline) -> list[_Row]:
    """Returns the rows of a panel from top to bottom."""
    rows: list[_Row] = []
    place = _THIN_GAP
    for lane, spans in timeline.lanes.items():
        if lane.row == "compute":
            place += _ROW_GAP * bool(rows)
            rows.append(_Row(lane.device, lane, place, _COMPUTE))
        elif any(span.end > span.start for span in spans):
            rows.append(_Row(lane.device, lane, place, _THIN))
        else:
            continue
        place = rows[-1].top + rows[-1].height + _THIN_GAP
    place += 2 * _ROW_GAP
    for device, curve in timeline.memory.items():
        if curve:
            rows.append(_Row(device, None, place, _MEMORY))
            place += _MEMORY + _ROW_GAP
    return rows


def _figure(timelines: Sequence[Timeline], title: str | None) -> Figure:
    from matplotlib.figure import Figure

    groups = on_one_axis(timelines)
    panels = [_Panel(timeline, group) for group in groups for timeline in group]
    top = _MARGIN / 2 + _TITLE
    height = top + sum(panel.height for panel in panels) + _GAP * (len(panels) - 1) + _MARGIN / 2
    labels = [_short(label) for timeline in timelines for label in timeline.devices.values()]
    left = _MARGIN + max(map(len, [*labels, "all-reduce"])) * _CHARACTER * _FONT / 72
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    if title is not None:
        figure.text(
            _MARGIN / _WIDTH, 1 - _MARGIN / 2 / height, title, size=_FONT + 3, weight="bold", va="top", color=_INK
        )
    place = top
    for panel in panels:
        size = (left / _WIDTH, 0.0, (_WIDTH - left - _RIGHT) / _WIDTH, panel.body / height)
        bottom = 1 - (place + _PANEL_TITLE + panel.body) / height
        panel.draw(figure.add_axes((size[0], bottom, size[2], size[3])), (_WIDTH - left - _RIGHT) * 72)
        place += panel.height + _GAP
    _legend(figure, timelines, height)
    return figure


class _Panel:
    """One timeline."""

    def __init__(self, timeline: Timeline, group: Sequence[Timeline]) -> None:
        self.timeline = timeline
        self.end = max(other.latency for other in group) or 1.0
        peaks = [peak for other in group for peak in other.peak_bytes.values()]
        self.most_bytes = max(peaks, default=0.0) or 1.0
        self.rows = _rows(timeline)
        self.body = max((row.top + row.height for row in self.rows), default=0.0) + _ROW_GAP
        self.height = _PANEL_TITLE + self.body + _AXIS

    def draw(self, axes: Axes, points: float) -> None:
        """Draws the timeline into axes that are ``points`` points wide."""
        timeline = self.timeline
        axes.set_xlim(0, self.end)
        axes.set_ylim(self.body, 0)
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(_GRID)
        name, size = shown_unit(timeline.unit, self.end)
        marks = ticks(self.end / size, 13)
        axes.set_xticks([mark * size for mark in marks], [f"{mark:g}" for mark in marks])
        axes.tick_params(axis="x", colors=_FAINT, labelsize=_SMALL, length=2, color=_GRID)
        axes.grid(axis="x", color=_GRID, linewidth=0.5, zorder=0.5)
        axes.set_axisbelow(True)
        place = 1.016, -_TICK_LABEL / self.body
        axes.text(*place, name, transform=axes.transAxes, size=_SMALL, color=_FAINT, ha="left", va="top")
        axes.set_title(f"{timeline.name}: {step_text(timeline)}", loc="left", size=_FONT + 0.5, color=_INK, pad=5)
        self.labels(axes)
        compute = [row for row in self.rows if row.lane is not None and row.lane.row == "compute"]
        _boxes(axes, [(0.0, timeline.latency, row) for row in compute], _IDLE, "none", 0.0, 1)
        self.spans(axes, points)
        for row in self.rows:
            if row.lane is None:
                self.memory(axes, row)
        if timeline.latency < self.end:
            axes.axvline(timeline.latency, color=_FAINT, linewidth=0.8, linestyle=(0, (3, 2)), zorder=3)

    def labels(self, axes: Axes) -> None:
        """Draws the labels left and right of the rows."""
        timeline = self.timeline
        axes.set_yticks([])
        heads = set()
        for row in self.rows:
            middle = row.top + row.height / 2
            size, colour = _FONT, _INK
            label, share = _short(timeline.devices[row.device]), ""
            if row.lane is None:
                share, head = memory_text(timeline, row.device), "memory"
                label = label.split(":")[0]
            elif row.lane.row == "compute":
                share, head = (f"{timeline.bubbles[row.device]:.1%}", "bubble") if timeline.bubbles else ("", "")
            else:
                label, head = f"{_NAMES[row.lane.row]}s", ""
                size, colour = _SMALL - 1.5, _FAINT
            ends: dict[str, Any] = {"va": "center", "color": colour, "transform": axes.get_yaxis_transform()}
            axes.text(-0.006, middle, label, size=size, ha="right", **ends)
            axes.text(1.006, middle, share, size=_SMALL, ha="left", **ends)
            if head and head not in heads:
                heads.add(head)
                place = row.top - 0.02
                ends |= {"va": "bottom", "color": _FAINT}
                axes.text(1.006, place, head, size=_SMALL - 0.5, ha="left", **ends)

    def spans(self, axes: Axes, points: float) -> None:
        """Draws all boxes, with numbers in wide ones."""
        timeline = self.timeline
        scale = points / self.end
        boxes: dict[str, list[tuple[float, float, _Row]]] = {}
        widths = []
        for row in self.rows:
            if row.lane is None:
                continue
            spans = timeline.lanes[row.lane]
            stages = sorted({span.stage for span in spans}) if row.lane.row == "compute" else []
            for span in spans:
                colour = _shade(span, stages)
                boxes.setdefault(colour, []).append((span.start, span.end, row))
                width = (span.end - span.start) * scale
                widths.append(width)
                number = str(span.micro_batch) if span.kind in TASKS and span.micro_batch is not None else ""
                if number and width >= len(number) * _CHARACTER * _NUMBER + 1:
                    axes.text(
                        (span.start + span.end) / 2,
                        row.top + row.height / 2,
                        number,
                        size=_NUMBER,
                        color=text_colour(colour),
                        ha="center",
                        va="center_baseline",
                        zorder=4,
                    )
        line = 0.5 if widths and sorted(widths)[len(widths) // 2] > 3 else 0.0
        for colour, coloured in boxes.items():
            _boxes(axes, [box for box in coloured if box[2].height == _COMPUTE], colour, "white", line)
            _boxes(axes, [box for box in coloured if box[2].height == _THIN], colour, colour, _THINNEST)

    def memory(self, axes: Axes, row: _Row) -> None:
        """Draws a device's memory over time."""
        timeline = self.timeline
        curve = _coarse(timeline.memory[row.device], timeline.latency)
        bottom = row.top + row.height

        def height(level: float) -> float:
            return bottom - level / self.most_bytes * row.height

        times = [time for time, _ in curve] + [timeline.latency]
        heights = [height(level) for _, level in curve]
        heights.append(heights[-1])
        axes.fill_between(times, heights, bottom, step="post", color=_MEMORY_FILL, linewidth=0, zorder=2)
        limit = timeline.limits.get(row.device)
        if limit is not None and limit <= self.most_bytes:
            over = [min(place, height(limit)) for place in heights]
            axes.fill_between(times, over, height(limit), step="post", color=_OVER, linewidth=0, zorder=2)
            axes.plot([0, self.end], [height(limit)] * 2, color=_OVER, linewidth=0.8, linestyle=(0, (4, 2)), zorder=3)
        axes.plot(times, heights, drawstyle="steps-post", color=_MEMORY_LINE, linewidth=0.8, zorder=3)
        axes.plot([0, timeline.latency], [bottom] * 2, color=_GRID, linewidth=0.6, zorder=1)


def _coarse(curve: MemoryCurve, latency: float) -> MemoryCurve:
    """Returns a curve with no more points than can be shown: for each column, its maximum."""
    if len(curve) <= _COLUMNS or latency <= 0:
        return curve
    levels: dict[int, float] = {}
    level = curve[0][1]
    for time, following in curve:
        column = max(0, math.floor(time / latency * _COLUMNS))
        levels[column] = max(levels.get(column, level), following)  # Memory in use before also counts in this column.
        level = following
        levels[column + 1] = level
    return tuple((min(1.0, column / _COLUMNS) * latency, level) for column, level in levels.items())


def _boxes(
    axes: Axes, boxes: Sequence[tuple[float, float, _Row]], colour: str, edge: str, line: float, order: float = 2
) -> None:
    """Draws boxes of one colour at once."""
    from matplotlib.collections import PolyCollection

    corners = [
        [(start, row.top), (end, row.top), (end, row.top + row.height), (start, row.top + row.height)]
        for start, end, row in boxes
    ]
    made = PolyCollection(corners, facecolors=colour, edgecolors=edge, linewidths=line, zorder=order)
    axes.add_collection(made, autolim=False)


def _shade(span: Span, stages: Sequence[int]) -> str:
    """Returns the colour of a span; paler for the later stages of a device."""
    colour = COLOURS.get(span.kind, COLOURS["other"])
    if len(stages) < 2:
        return colour
    return _pale(colour, _PALEST * stages.index(span.stage) / (len(stages) - 1))


def _pale(colour: str, part: float) -> str:
    """Returns a colour mixed with white in the proportion ``part``."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * part):02x}" for channel in channels)


def _short(label: str) -> str:
    return short_label(label, _LONGEST_LABEL)


def _kinds(timelines: Sequence[Timeline]) -> Iterator[str]:
    """Yields the kinds that are drawn, in the order of the palette; kinds without a colour of their own share one."""
    kinds = {span.kind for timeline in timelines for span in timeline.spans if span.end > span.start}
    yield from (kind for kind in COLOURS if kind in kinds)
    yield from ["other"] if kinds - COLOURS.keys() else []


def _hosts_several(timeline: Timeline) -> bool:
    lanes = timeline.lanes.items()
    return any(lane.row == "compute" and len({span.stage for span in spans}) > 1 for lane, spans in lanes)


def _legend(figure: Figure, timelines: Sequence[Timeline], height: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=COLOURS[kind], label=_NAMES.get(kind, kind)) for kind in _kinds(timelines)]
    handles.append(Patch(facecolor=_IDLE, label="bubble"))
    if any(_hosts_several(timeline) for timeline in timelines):
        handles.append(Patch(facecolor=_pale(COLOURS["F"], _PALEST), label="paler: a device's later stages"))
    figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(1 - _MARGIN / _WIDTH, 1 - _MARGIN / 2 / height),
        borderaxespad=0,
        borderpad=0,
        ncols=len(handles),
        frameon=False,
        fontsize=_SMALL + 0.5,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.2,
        handletextpad=0.5,
        labelcolor=_INK,
    )
