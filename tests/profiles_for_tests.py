"""Profiles and measured steps made by hand, for the tests of what compares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Tensor
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.tracing.step_parts import StepParts, part_of, step_parts
from dapple_tf.tracing.step_profile import simulated_tasks
from dapple_tf.tracing.step_trace import MeasuredStep
from dapple_tf.view.timeline import Timeline

MS = 1e-3


def profile_of(*times: tuple[float, float], names: Sequence[str] = ("first", "second", "logits")) -> dapple.Profile:
    """Layers with these milliseconds of forward and backward for one sample, of a model such as `classifier`."""
    layers = [
        LayerProfile(name, Cost(0, forward * MS), Cost(0, backward * MS))
        for name, (forward, backward) in zip(names, times, strict=True)
    ]
    tensors = tuple(Tensor(index, (index + 1,), Cost(0, 24)) for index in range(len(layers) - 1))
    return dapple.Profile("classifier", "test", (1, 2), tuple(layers), tensors)


def measured_as(simulation: Simulation, factors: Mapping[int, float] | None = None, host: float = 0.0) -> MeasuredStep:
    """A step that went as simulated, but that tasks of some stages took so many times as long.

    Args:
        simulation: what was simulated.
        factors: stage -> how many times as long; 1 for others.
        host: seconds before the first device began, and after the last one ended.
    """
    step = simulation.drawn("measured")
    factors = factors or {}
    tasks = {task: seconds * factors.get(task.stage, 1.0) for task, seconds in simulated_tasks(simulation).items()}
    end = max(span.end for span in step.spans) + host
    spans = tuple(span._replace(start=span.start + host, end=span.end + host) for span in step.spans)
    latency = end + host
    parts: dict[int, StepParts] = {}
    for device in step.devices:
        own = [(part_of(s.kind), (s.start, s.end)) for s in spans if s.device == device and s.kind != "send"]
        parts[device] = step_parts(own, (host, end), latency)
    return MeasuredStep(
        Timeline("measured", latency, spans, step.devices, step.memory, samples=step.samples), parts, tasks
    )
