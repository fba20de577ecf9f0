"""A simulated step from a state that was kept on: what differs only after that isn't simulated from the start."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from typing import TYPE_CHECKING

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulated_reductions import Reductions

if TYPE_CHECKING:
    from dapple_tf.simulation.simulated_step import SimulatedStep


def resumed(saved: SimulatedStep, costs: CostModel) -> SimulatedStep:
    """Returns a copy of a state that goes on with costs that differ by ``backward_cuts`` only.

    Args:
        saved: the state of a step before all tasks that complete gradients (`SimulatedStep.keep`).
        costs: the other costs.
    """
    other = copied(saved)
    other.costs, other.reductions = costs, Reductions(costs, other.schedule)
    other.seconds = other.seconds.copy()
    for number in other.ends:
        task, device = other.tasks[number], other.device_of[number]
        assert task is not None
        other.seconds[number] = costs.seconds(task, device)
    other.rest = {}
    return other


def copied(step: SimulatedStep) -> SimulatedStep:
    """Returns a copy of a state, without the progress of reductions."""
    other = copy.copy(step)
    names = ("position", "free", "last", "spans", "ports", "port_free", "port_last", "routes")
    for name in (*names, "waiting", "arrived", "complete"):
        setattr(other, name, copy.copy(getattr(step, name)))
    other.relays, other.lookups = step.relays.copied(), step.lookups.copied()
    other.updates = {device: deque(waiting) for device, waiting in step.updates.items()}
    other.cores = step.cores.copied()
    number = next(step.sequence)
    step.sequence, other.sequence = itertools.count(number + 1), itertools.count(number + 1)
    # Actions are methods of the step itself.
    other.events = [
        (time, turn, order, getattr(other, action.__name__), data) for time, turn, order, action, data in step.events
    ]
    return other
