"""The plots of the reproduction, as SVG files, which are the same if the numbers are."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib import pyplot

from dapple_tf.tools.evaluation.paper_claims import Results, average_speedups
from dapple_tf.tools.evaluation.paper_experiments import Outcome, RowResult
from dapple_tf.tools.evaluation.paper_models import FIGURE_11, TABLE_5

_COLOURS = ("#1b6ca8", "#7fb2dd", "#d1495b", "#edae49", "#8d99ae", "#5b8c5a")
_SETTINGS: Any = {
    "svg.hashsalt": "dapple",
    "svg.fonttype": "path",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
}


def draw(results: Results, directory: pathlib.Path) -> None:
    """Draws all plots that have results."""
    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_SETTINGS):
        rows = [row for row in results.rows if row.row.table == 4]
        if rows:
            _save(_speedups(rows), directory / "speedups.svg")
        rows = [row for row in results.rows if row.row.table == 6]
        if rows:
            _save(_pipedream(rows), directory / "pipedream.svg")
        if average_speedups(results.hybrids):
            _save(_averages(results), directory / "figure11.svg")
        if results.table_5:
            _save(_gpipe(results), directory / "gpipe.svg")
        if results.table_7:
            _save(_largest(results), directory / "largest_bert.svg")


def _save(figure: Any, path: pathlib.Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _bars(
    axes: Any, names: Sequence[str], groups: Sequence[tuple[str, Sequence[float | None]]], digits: int = 1
) -> None:
    """Draws a group of bars for each name; a missing value is a cross."""
    width = 0.84 / len(groups)
    for index, (label, values) in enumerate(groups):
        places = [place + (index - (len(groups) - 1) / 2) * width for place in range(len(names))]
        heights = [value or 0.0 for value in values]
        axes.bar(places, heights, width * 0.92, label=label, color=_COLOURS[index % len(_COLOURS)])
        for place, value in zip(places, values, strict=True):
            text = "×" if value is None else f"{value:.{digits}f}"
            axes.annotate(text, (place, value or 0.0), (0, 1), textcoords="offset points", ha="center", fontsize=6)
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)


def _values(rows: Sequence[RowResult], outcomes: Sequence[Outcome | None]) -> list[float | None]:
    return [
        row.speedup(outcome) if outcome is not None and outcome.fits else None
        for row, outcome in zip(rows, outcomes, strict=True)
    ]


def _speedups(rows: Sequence[RowResult]) -> Any:
    """Draws figure 11: speedups over one device, a panel for each config."""
    configs = sorted({row.row.config for row in rows})
    figure, panels = pyplot.subplots(len(configs), 1, figsize=(9, 2.5 * len(configs)), squeeze=False)
    for axes, config in zip(panels[:, 0], configs, strict=True):
        own = [row for row in rows if row.row.config == config]
        groups = [
            ("our plan", _values(own, [row.ours for row in own])),
            ("the paper's plan", _values(own, [row.paper for row in own])),
            ("DP overlap", _values(own, [row.overlap for row in own])),
            ("DP no overlap", _values(own, [row.no_overlap for row in own])),
            ("GPipe", _values(own, [row.gpipe for row in own])),
        ]
        _bars(axes, [f"{row.row.model}\nGBS {row.row.batch}" for row in own], groups)
        axes.set_ylabel(f"config {config}: speedup")
        axes.set_ylim(0, 18)
    panels[0, 0].legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    panels[-1, 0].set_xlabel("speedup over one device, of 16; × doesn't fit in memory")
    return figure


def _pipedream(rows: Sequence[RowResult]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 3))
    groups = [
        ("our plan", _values(rows, [row.ours for row in rows])),
        ("the paper's plan", _values(rows, [row.paper for row in rows])),
        ("DP overlap", _values(rows, [row.overlap for row in rows])),
        ("PipeDream's plan", _values(rows, [row.pipedream for row in rows])),
    ]
    _bars(axes, [f"{row.row.model}\nGBS {row.row.batch}" for row in rows], groups)
    axes.set_ylabel("speedup over one device")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.set_xlabel("2 servers of 8, 25 Gbit/s; × doesn't fit in memory")
    return figure


def _averages(results: Results) -> Any:
    figure, axes = pyplot.subplots(figsize=(6, 3))
    averages = average_speedups(results.hybrids)
    configs = list(FIGURE_11)
    groups: list[tuple[str, list[float | None]]] = [
        (variant, [averages.get((variant, config)) for config in configs])
        for variant in dict.fromkeys(variant for variant, _ in averages)
        if variant != "GBS 128"
    ]
    groups.append(("paper", list(FIGURE_11.values())))
    if any(variant == "flat ring" for variant, _ in groups):  # the same in B and C, which have one device per server
        usual = dict(groups)["Table 4's GBS"]
        groups = [
            (name, [value or usual[i] for i, value in enumerate(values)] if name == "flat ring" else values)
            for name, values in groups
        ]
    names = {"Table 4's GBS": "hierarchical all-reduce", "flat ring": "flat ring"}
    _bars(axes, [f"config {config}" for config in configs], [(names.get(n, n), v) for n, v in groups], digits=2)
    axes.set_ylabel("average speedup\nover DP with overlap")
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def _gpipe(results: Results) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    styles = {"gpipe": ("GPipe", _COLOURS[2]), "dapple_a": ("DAPPLE", _COLOURS[0])}
    for schedule, (name, colour) in styles.items():
        for recompute, marker in (("none", "o"), ("boundary", "s")):
            lines = [
                line
                for line in results.table_5
                if (line.measured.schedule, line.measured.recompute) == (schedule, recompute)
            ]
            label = name + (" + RC" if recompute != "none" else "")
            for axes, ours, paper in (
                (left, [line.throughput for line in lines], [line.measured.throughput for line in lines]),
                (right, [line.memory and line.memory / 1e9 for line in lines], [x.measured.gigabytes for x in lines]),
            ):
                counts = [line.measured.micro_batches for line in lines]
                line_style = "-" if recompute == "none" else "--"
                _line(axes, counts, ours, label, colour, marker, line_style, full=True)
                _line(axes, counts, paper, None, colour, marker, ":", full=False)
    left.set_ylabel("samples/s")
    right.set_ylabel("average peak memory, GB")
    right.set_ylim(0, 16)
    left.set_ylim(0, 12)
    for axes in (left, right):
        axes.set_xlabel("micro-batches M")
        axes.set_xticks(sorted({line.micro_batches for line in TABLE_5}))
    left.legend(loc="lower right", frameon=False, title="filled: simulated, hollow: paper")
    return figure


def _line(
    axes: Any, counts: Sequence[int], values: Sequence[float | None], label: str | None, colour: str, marker: str,
    style: str, *, full: bool,
) -> None:  # fmt: skip
    points = [(count, value) for count, value in zip(counts, values, strict=True) if value]
    if points:
        fill = colour if full else "none"
        axes.plot(*zip(*points, strict=True), style, marker=marker, color=colour, label=label, markerfacecolor=fill)


def _largest(results: Results) -> Any:
    figure, axes = pyplot.subplots(figsize=(5, 3))
    lines = results.table_7
    groups: list[tuple[str, list[float | None]]] = [
        ("ours", [float(line.layers) for line in lines]),
        ("paper", [float(line.paper.layers) for line in lines]),
    ]
    _bars(axes, [str(line.paper.devices) for line in lines], groups, digits=0)
    axes.set_ylabel("encoder layers")
    axes.set_xlabel("V100s of 16 GB")
    axes.legend(loc="upper left", frameon=False)
    return figure
