"""Closing reports of `tools.train`."""

from __future__ import annotations

import pathlib
import statistics
from typing import TYPE_CHECKING, Any

import dapple_tf as dapple
from dapple_tf.common.text import counted
from dapple_tf.models.sources import DataSource

if TYPE_CHECKING:
    import keras


def described(model: keras.Model, data: DataSource, pipelined: dapple.PipelinedModel) -> dict[str, Any]:
    """Returns a description of what was trained, as JSON data."""
    return {
        "model": model.name,
        "parameters": model.count_params(),
        "data": data.name,
        "devices": pipelined.cluster.num_devices,
        "schedule": str(pipelined.plan.schedule),
        "global_batch_size": pipelined.plan.global_batch_size,
    }


def predicted(pipelined: dapple.PipelinedModel, measured: float | None) -> dict[str, float | None]:
    """Returns a step's predicted milliseconds, and the prediction's error relative to ``measured`` seconds."""
    prediction = pipelined.prediction
    if prediction is None:
        return {"predicted_step_ms": None, "prediction_error": None}
    error = None if measured is None else prediction.predicted / measured - 1
    return {"predicted_step_ms": 1e3 * prediction.predicted, "prediction_error": error}


def summary(pipelined: dapple.PipelinedModel, history: Any, seconds: float) -> dict[str, Any]:
    """Returns the final numbers of a training run of ``seconds``, as JSON data."""
    rates = [rate for rate in history.history.get("samples_per_second", ()) if rate == rate]
    measured = None if pipelined.prediction is None else pipelined.prediction.measured
    return {
        "epochs": len(history.epoch),
        "training_seconds": round(seconds, 2),
        "step_ms": None if measured is None else 1e3 * measured,
        **predicted(pipelined, measured),
        "metrics": {
            name: values[-1] for name, values in history.history.items() if values and values[-1] == values[-1]
        },
        "faults": len(pipelined.faults),
        "samples_per_second": statistics.median(rates) if rates else None,
    }


def closing(numbers: dict[str, Any], folder: pathlib.Path) -> str:
    """Returns the closing text of a training or a measurement."""
    rate = numbers["samples_per_second"]
    rates = f", {rate:,.0f} samples/s" if rate else ""
    if "metrics" in numbers:
        losses = [f"{name} {value:.4g}" for name, value in numbers["metrics"].items() if "loss" in name]
        told = f"Trained {numbers['model']} for {counted(numbers['epochs'], 'epoch')}"
        ended = f"; {', '.join(losses)}" if losses else ""
        lines = [f"{told} in {numbers['training_seconds']:.0f} s{rates}{ended}"]
    else:
        quartiles = f"{numbers['lower_quartile_ms']:.4g} to {numbers['upper_quartile_ms']:.4g}"
        lines = [f"Measured {counted(numbers['steps'], 'step')} of {numbers['model']}{rates}; quartiles {quartiles} ms"]
    if numbers["step_ms"] is not None:
        text = f"A step took {numbers['step_ms']:.4g} ms"
        if numbers["predicted_step_ms"] is not None:
            text += f"; {numbers['predicted_step_ms']:.4g} ms were predicted ({numbers['prediction_error']:+.1%})"
        lines.append(text)
    if numbers.get("faults"):
        lines.append(f"Training went on after {counted(numbers['faults'], 'lost worker')}")
    lines.append(f"Everything is in {folder}:")
    notes = {
        "step": "timelines of a step; open step/timeline.html in a browser",
        "logs": f"for tensorboard --logdir={folder / 'logs'}",
        "model.keras": "the trained model",
        "benchmark.json": "step times and what they were measured on",
        "profile.json": "for dapple-plan and dapple-what-if",
        "operators.txt": "where each operator runs",
    }
    names = sorted(path.name for path in folder.iterdir())
    width = max(map(len, names), default=0)
    return "\n".join([*lines, *(f"  {name:<{width}}  {notes.get(name, '')}".rstrip() for name in names)])
