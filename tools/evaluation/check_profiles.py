"""Compares the ways of profiling a model: layer by layer, by operator, and by rooflines.

    python -m tools.evaluation.check_profiles --models=mlp,conv,gpt

Measurements layer by layer count as true. The table compares the layers' shares of a step by the other ways, the
order of layers by their time, and the loss from planning with them: how much longer the plan's step takes than that
of the plan by the true profile, both simulated with the true profile.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import keras
import numpy as np
from absl import flags

import dapple_tf as dapple
from dapple_tf import text_table
from dapple_tf.automatic import slice_sizes
from dapple_tf.measuring.links import measure_links
from dapple_tf.measuring.time_budget import TimeBudget
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import cells
from dapple_tf.tools.evaluation.check_prediction import MAKERS

FLAGS = flags.FlagValues()

_MODELS = flags.DEFINE_list("models", ["mlp", "conv", "gpt"], "Models: mlp, conv or gpt.", flag_values=FLAGS)
_DEVICES = flags.DEFINE_integer("devices", 2, "Local devices to plan for.", lower_bound=2, flag_values=FLAGS)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Measurements of each time.", lower_bound=1, flag_values=FLAGS)


class OneWay(TimeBudget):
    """A budget that allows only one way of measuring.

    Args:
        method: a value of `Profile.method`.
    """

    def __init__(self, method: str) -> None:
        super().__init__(None)
        self._method = method

    def allows(self, *phases: str, more: float = 0.0) -> bool:
        """Returns whether this is the allowed way."""
        return self._method in phases


def ranks(values: np.ndarray) -> np.ndarray:
    """Returns the rank of each value."""
    return np.argsort(np.argsort(values))


def layer_seconds(profile: dapple.Profile, samples: int) -> np.ndarray:
    """Returns the seconds of each layer's F and B."""
    return np.asarray([layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers])


def row(
    true: dapple.Profile, other: dapple.Profile, cluster: dapple.Cluster, batch: int, seconds: float
) -> dict[str, Any]:
    """Returns a row that compares a profile with one measured layer by layer.

    Args:
        true: the profile measured layer by layer.
        other: the compared profile.
        cluster: the cluster to plan for.
        batch: samples of a step.
        seconds: time that the compared profile took.
    """
    samples = true.batch_sizes[len(true.batch_sizes) // 2]
    truth, compared = layer_seconds(true, samples), layer_seconds(other, samples)
    best, chosen = (dapple.plan(profile, cluster, global_batch_size=batch) for profile in (true, other))
    expected, lost = (dapple.simulate(plan, true, cluster).latency for plan in (best, chosen))
    return {
        "method": other.method,
        "seconds": seconds,
        "total": compared.sum() / truth.sum() - 1,
        "misplaced": np.abs(compared / compared.sum() - truth / truth.sum()).sum() / 2,
        "ranks": np.corrcoef(ranks(truth), ranks(compared))[0, 1],
        "loss": lost / expected - 1,
    }


def check(name: str) -> list[dict[str, Any]]:
    """Profiles a model in all ways; returns a row for each."""
    model, x, _ = MAKERS[name]()
    batch = len(x)
    cluster = measure_links(dapple.Cluster.local(_DEVICES.value, kind="cpu"))
    profiles = {}
    for method in ("layers", "operators", "rooflines"):
        start = time.perf_counter()
        profile = dapple.profile(
            model,
            slice_sizes(batch, _DEVICES.value),
            cluster=cluster,
            cache=False,
            repeats=_REPEATS.value,
            budget=OneWay(method),
        )
        profiles[method] = (profile, time.perf_counter() - start)
        keras.backend.clear_session()
    true = profiles["layers"][0]
    return [{"model": name} | row(true, profile, cluster, batch, took) for profile, took in profiles.values()]


COLUMNS = {
    "model": "{model}", "method": "{method}", "takes s": "{seconds:.1f}", "F + B": "{total:+.1%}",
    "misplaced": "{misplaced:.1%}", "rank correlation": "{ranks:.3f}", "plan's loss": "{loss:+.2%}",
}  # fmt: skip
"""Columns of the table."""


def main() -> None:
    """Runs the comparison."""
    command.check_choices(_MODELS, MAKERS)
    rows = [row for name in _MODELS.value for row in check(name)]
    sys.stdout.write(text_table.table(cells(rows, COLUMNS), left=2) + "\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
