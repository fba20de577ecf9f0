"""The parts of DAPPLE's evaluation, each computed alone, and what differs between two results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dapple_tf.tools.evaluation import paper_experiments as experiments
from dapple_tf.tools.evaluation import paper_figure_11, paper_figures
from dapple_tf.tools.evaluation import paper_transfers as transfers
from dapple_tf.tools.evaluation.paper_figures import claims
from dapple_tf.tools.evaluation.paper_models import (
    CONFIGS,
    FIGURE_11_MODELS,
    MODELS,
    TABLE_3,
    TABLE_4,
    TABLE_6,
    TABLE_7,
)
from dapple_tf.tools.evaluation.paper_outcomes import Record
from dapple_tf.tools.evaluation.paper_verdicts import Results

TOLERANCE = 0.02
"""The difference of numbers, as a fraction of the larger, that counts as a change: in either direction."""
_ONLY = {True: "is stored, but not computed", False: "isn't stored"}
_FREE = ("first",)
"""Texts that aren't compared: they quote numbers."""


def parts() -> dict[str, Callable[[], Record]]:
    """Returns all parts: name -> what computes its record. The ones that take long come first."""
    rows = [*TABLE_4, *TABLE_6]
    configs = [(model, config) for config in "ABC" for model in FIGURE_11_MODELS]
    return {
        **{f"opponents, {row.key}": functools.partial(experiments.run_opponents, row) for row in TABLE_4},
        **{row.key: functools.partial(experiments.run_row, row) for row in rows},
        **{
            f"figure 14: {model}": functools.partial(experiments.run_scaling, model)
            for model in experiments.FIGURE_14_BATCHES
        },
        **{f"figure 12, 4 x 8: {row.model}": functools.partial(experiments.run_larger, row) for row in TABLE_6},
        **{f"figure 11, flat ring: {m}": functools.partial(experiments.run_flat, m) for m in FIGURE_11_MODELS},
        **{f"figure 11, GBS 128: {m}/{c}": functools.partial(experiments.run_small_batch, m, c) for m, c in configs},
        **{f"table 3: {model}": functools.partial(experiments.run_policies, model) for model in TABLE_3},
        **{
            f"gain over ACR: {model}": functools.partial(transfers.run_ratios, model)
            for model in ("gnmt-16", "bert-48")
        },
        "figure 8": transfers.run_figure_8,
        "table 5": experiments.run_table_5,
        **{line.key: functools.partial(experiments.run_table_7, line) for line in TABLE_7},
    }


def rounded(value: Any) -> Any:
    """Returns a record with six digits of each number, as it is stored."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def verdicts(results: Results) -> dict[str, dict[str, str]]:
    """Returns what is stored of claims: what the paper says, the bands and the verdict."""
    return {
        claim.name: {"paper": claim.paper, "band": claim.band, "verdict": claim.verdict} for claim in claims(results)
    }


def limits() -> dict[str, str]:
    """Returns what is stored of limits of sentences' verdicts, and of Tables 1 and 2; `verdicts` has bands."""
    models = {f"table 1, {model.name}": f"{model.samples} samples, {_bytes(model.memory)}" for model in MODELS.values()}
    clusters = {
        f"table 2, {name}": f"{cluster.num_servers} servers, {cluster.num_devices} devices of "
        f"{_bytes(cluster.devices[0].memory_bytes)}, inside servers {_bytes(cluster.intra_bandwidth)}/s, between them "
        f"{_bytes(cluster.inter_bandwidth)}/s"
        for name, cluster in CONFIGS.items()
    }
    return {
        **models,
        **clusters,
        "plans are as fast within": f"{paper_figures.TIE:.6g}",
        "figure 14, a change of efficiency": f"{paper_figures.STEP:.6g}",
        "figure 11, gains more": f"{paper_figure_11.MORE:.6g}x",
    }


def _bytes(number: float | None) -> str:
    return "no memory" if number is None else f"{number:.8g} bytes"


def differences(stored: Any, fresh: Any, where: str) -> Iterator[str]:
    """Yields what differs: numbers by more than `TOLERANCE`, anything else at all.

    >>> list(differences({"ms": 100.0, "plan": "8:8"}, {"ms": 97.0, "plan": "8:8"}, "row"))
    ['row: ms: 100 is stored, 97 now']
    """
    if isinstance(stored, Mapping) and isinstance(fresh, Mapping):
        for key in dict.fromkeys([*stored, *fresh]):
            if key in _FREE:
                continue
            if key not in fresh or key not in stored:
                yield f"{where}: {key}: {_ONLY[key in stored]}"
            else:
                yield from differences(stored[key], fresh[key], f"{where}: {key}")
    elif isinstance(stored, list) and isinstance(fresh, list) and len(stored) == len(fresh):
        for index, (before, after) in enumerate(zip(stored, fresh, strict=True)):
            yield from differences(before, after, f"{where}: {index}")
    elif _is_number(stored) and _is_number(fresh):
        if not math.isclose(stored, fresh, rel_tol=TOLERANCE, abs_tol=1e-9):
            yield f"{where}: {stored:.6g} is stored, {fresh:.6g} now"
    elif stored != fresh:
        yield f"{where}: {stored} is stored, {fresh} now"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
