"""The plots of the reproduction, as SVG files, which are the same if the numbers are."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib import pyplot

from dapple_tf.tools.evaluation.paper_experiments import FIGURE_14_BATCHES, FIGURE_14_DEVICES
from dapple_tf.tools.evaluation.paper_figure_11 import SETTINGS, average
from dapple_tf.tools.evaluation.paper_figures import speedups_14
from dapple_tf.tools.evaluation.paper_models import FIGURE_11, TABLE_4, TABLE_5, TABLE_6, TABLE_7, PaperRow
from dapple_tf.tools.evaluation.paper_verdicts import Results

_COLOURS = ("#1b6ca8", "#7fb2dd", "#d1495b", "#edae49", "#8d99ae", "#5b8c5a", "#333333")
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
        rows = [row for row in TABLE_4 if row.key in results]
        if rows:
            _save(_speedups(rows, results), directory / "speedups.svg")
        rows = [row for row in TABLE_6 if row.key in results]
        if rows:
            _save(_pipedream(rows, results), directory / "pipedream.svg")
        if all(average(results, setting, "A") is not None for setting in SETTINGS):
            _save(_averages(results), directory / "figure11.svg")
        if any(f"figure 14: {model}" in results for model in FIGURE_14_BATCHES):
            _save(_scaling(results), directory / "scaling.svg")
        if "table 5" in results:
            _save(_gpipe(results["table 5"]), directory / "gpipe.svg")
        if all(line.key in results for line in TABLE_7):
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


def _values(rows: Sequence[PaperRow], results: Results, column: str) -> list[float | None]:
    values: list[float | None] = []
    for row in rows:
        record = results[row.key]
        other = record[column]
        values.append(record["single ms"] / other["ms"] if other is not None and other["fits"] else None)
    return values


def _speedups(rows: Sequence[PaperRow], results: Results) -> Any:
    """Draws speedups over one device, a panel for each config."""
    configs = sorted({row.config for row in rows})
    figure, panels = pyplot.subplots(len(configs), 1, figsize=(9, 2.5 * len(configs)), squeeze=False)
    names = {
        "our plan": "ours", "the paper's plan": "paper", "DP overlap": "data parallelism",
        "DP no overlap, all devices": "no overlap", "GPipe": "gpipe",
    }  # fmt: skip
    for axes, config in zip(panels[:, 0], configs, strict=True):
        own = [row for row in rows if row.config == config]
        groups = [(label, _values(own, results, column)) for label, column in names.items()]
        _bars(axes, [f"{row.model}\nGBS {row.batch}" for row in own], groups)
        axes.set_ylabel(f"config {config}: speedup")
        axes.set_ylim(0, 18)
    panels[0, 0].legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    panels[-1, 0].set_xlabel("speedup over one device, of 16; × doesn't fit in memory")
    return figure


def _pipedream(rows: Sequence[PaperRow], results: Results) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 3))
    names = {
        "our plan": "ours", "the paper's plan": "paper", "DP overlap": "data parallelism",
        "PipeDream's plan": "pipedream",
    }  # fmt: skip
    groups = [(label, _values(rows, results, column)) for label, column in names.items()]
    _bars(axes, [f"{row.model}\nGBS {row.batch}" for row in rows], groups)
    axes.set_ylabel("speedup over one device")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.set_xlabel("2 servers of 8, 25 Gbit/s; × doesn't fit in memory")
    return figure


def _averages(results: Results) -> Any:
    figure, axes = pyplot.subplots(figsize=(7.5, 3))
    groups: list[tuple[str, list[float | None]]] = [
        (str(setting), [average(results, setting, config) for config in FIGURE_11]) for setting in SETTINGS
    ]
    groups.append(("paper", list(FIGURE_11.values())))
    _bars(axes, [f"config {config}" for config in FIGURE_11], groups, digits=2)
    axes.set_ylabel("average speedup\nover DP with overlap")
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7)
    return figure


def _scaling(results: Results) -> Any:
    models = [model for model in FIGURE_14_BATCHES if f"figure 14: {model}" in results]
    figure, panels = pyplot.subplots(1, len(models), figsize=(2.6 * len(models), 2.8), squeeze=False)
    names = {
        "our plan": "ours", "DP overlap": "data parallelism", "DP overlap, all devices": "overlap",
        "DP no overlap, all devices": "no overlap",
    }  # fmt: skip
    for axes, model in zip(panels[0], models, strict=True):
        for index, (label, column) in enumerate(names.items()):
            points = speedups_14(results[f"figure 14: {model}"], column)
            if points:
                axes.plot(
                    *zip(*points.items(), strict=True), marker="o", markersize=3, color=_COLOURS[index], label=label
                )
        axes.set_title(f"{model}, GBS {FIGURE_14_BATCHES[model]}", fontsize=9)
        axes.set_xticks(FIGURE_14_DEVICES)
        axes.set_ylim(0, 16)
        axes.set_xlabel("devices")
    panels[0, 0].set_ylabel("speedup over one device")
    panels[0, 0].legend(frameon=False, fontsize=7)
    return figure


def _gpipe(record: Mapping[str, Any]) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    styles = {"gpipe": ("GPipe", _COLOURS[2]), "dapple_a": ("DAPPLE", _COLOURS[0])}
    for schedule, (name, colour) in styles.items():
        for recompute, marker in (("none", "o"), ("boundary", "s")):
            lines = [line for line in TABLE_5 if (line.schedule, line.recompute) == (schedule, recompute)]
            ours = [record[line.key] for line in lines]
            label = name + (" + RC" if recompute != "none" else "")
            for axes, what, paper in (
                (left, "samples/s", [line.throughput for line in lines]),
                (right, "GB", [line.gigabytes for line in lines]),
            ):
                counts = [line.micro_batches for line in lines]
                line_style = "-" if recompute == "none" else "--"
                values = [None if own[what] == "OOM" else own[what] for own in ours]
                _line(axes, counts, values, label, colour, marker, line_style, full=True)
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
    groups: list[tuple[str, list[float | None]]] = [
        ("ours", [float(results[line.key]["layers"]) for line in TABLE_7]),
        ("paper", [float(line.layers) for line in TABLE_7]),
    ]
    _bars(axes, [str(line.devices) for line in TABLE_7], groups, digits=0)
    axes.set_ylabel("encoder layers")
    axes.set_xlabel("V100s of 16 GB")
    axes.legend(loc="upper left", frameon=False)
    return figure
