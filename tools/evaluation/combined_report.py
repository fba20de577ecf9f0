"""The document of `combined`'s and `column_rows`' numbers.

python -m tools.evaluation.combined_report        # docs/results/combined.json -> combined.md beside it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import markdown, write_document

FLAGS = flags.FlagValues()

_JSON = flags.DEFINE_string("json", "docs/results/combined.json", "Numbers of combined.", flag_values=FLAGS)

_HEAD = """\
# Stages, replicas and placed operators together

Written by `python -m tools.evaluation.combined_report` from combined.json, which `{command}` wrote in half
an hour of a core (at {commit}, {date}). Nothing was run: all is simulated, from a P100's rooflines, with momentum
SGD.

Milliseconds of a step. *Data parallel* is on all GPUs with the best number of micro-batches, *stages alone* the
planner's best plan of all its features but placed operators, *operators* FD-DPS' placement of all operators, on all
GPUs and on those of one server, in one slice. A stage on a group takes the profile's time for it, times what FD-DPS
says of the group relative to one GPU ([decision 0043](../decisions/0043-one-plan-across-all-levels.md)); "operators"
are counted in the same way. "1 x 2:1 x 2" are two stages of one replica each, on groups of two GPUs. The combined
plan has to gain 5 % over stages alone, otherwise it is that plan.

{table}

## What gains, and why

{wins}

## What doesn't

{losses}

Where the batch is small and the weights are many (*blocks*), one group of the GPUs of a server is the best plan,
which the planner finds, or is close to: a single stage whose operators are all placed, as FD-DPS alone has it. A second
server then gains nothing: with two stages each step has borders between tasks, at which updates wait for all of a
stage's backward, and a batch that is too small to be cut. Where a model is replicated cheaply (*inception*, *chain*),
stages and replicas without groups are {cheap} FD-DPS's placement of operators within a server. A placement over several
servers isn't among the combined plans, and was {elsewhere}.

`tests/test_combined_training.py` has a case made for it, and trains by its plan: a chain with two very wide layers,
each much for one device and cut by no layer, a batch of 2, and two machines of two slow devices with slow links.

## What isn't in these numbers

FD-DPS had a tenth of the search that it has in a real step, so that a placement may be some percent slower than it
could be, on whatever devices: more of them don't always come out faster. Operators that run one by one, without
fusion across them, cost more than their kernels on a real machine; nothing here has run on GPUs, and on CPU workers
placing operators was the fastest way in one of eight measured settings ([operator_workers.md](operator_workers.md)).
Groups are of one server; a placement over several servers is in the column "operators" alone.
"""

_BLOCKS = """
## A transformer block on four GPUs

Written by `{command}`
(at {commit}, {date}), simulated: forward, backward and update of a block (heads of 128) on four GPUs of
one server, in one slice. *Megatron's layout* is prescribed: products with weights that begin attention and MLP are
split by columns, those that end them by rows, all between them alike, attention by heads; FD-DPS places the rest.
*With rounds* it also has the rounds that FD-DPS ends with. *Pairs* are how many of the two halves FD-DPS splits by
columns, then rows, of its own accord. *Samples split* is data parallelism's graph, all operators split by samples; a
dash is for fewer than GPUs.

{blocks}

{verdict} In this simulation
every variable is whole on one device, which sends slices to the others and updates all of it; Megatron's own runtime
keeps slices where they are used, and would be faster than either.
"""


_REASONS = {
    "gpt": "Two samples are too few for replicas or straight stages on eight GPUs, and all operators on one server "
    "leave the other idle: two stages work on a sample each, with four GPUs for every task, and only a block's output "
    "crosses the network.",
    "images_then_branches": "Convolutions with few parameters have replicas on one server, branches with nearly all "
    "parameters are placed on the other, where no gradient is reduced.",
}
"""Why the combined plan gains, by model: for rows in which it does."""

_REPLICATED = ("inception", "chain")
"""Models with few parameters for their computation."""


def best_alone(record: Mapping[str, Any]) -> tuple[str, float]:
    """Returns the best of each level alone: its name, and its milliseconds."""
    ways = {
        "data parallelism": record["data_parallel_ms"],
        "operators on all GPUs": record["operators_ms"],
        "operators on one server": record["operators_on_a_server_ms"],
        "stages alone": record["stages_ms"],
    }
    name = min((name for name, value in ways.items() if value is not None), key=lambda name: ways[name])
    return name, ways[name]


def gain(record: Mapping[str, Any]) -> float:
    """Returns how many times as fast the combined plan is as the best of each level alone."""
    return float(best_alone(record)[1] / record["combined_ms"])


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the records as Markdown: a line for each model and cluster."""

    def ms(value: float | None) -> str:
        return "doesn't fit" if value is None else f"{value:.2f}"

    lines: list[tuple[object, ...]] = [
        (
            *("model", "batch", "devices", "one GPU", "data parallel", "operators, all", "operators, one server"),
            *("stages alone", "combined", "best alone / combined", "the combined plan"),
        )
    ]
    keys = ("one_device_ms", "data_parallel_ms", "operators_ms", "operators_on_a_server_ms", "stages_ms")
    for record in records:
        lines.append(
            (
                *(record["model"], record["batch"], record["cluster"], *(ms(record[key]) for key in keys)),
                ms(record["combined_ms"]) if record["combined"] else "as stages alone",
                f"{gain(record):.2f}",
                record["combined"] or record["stages"],
            )
        )
    return markdown(lines)


def blocks_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the records of `column_rows` as Markdown: a line for each block."""
    lines: list[tuple[object, ...]] = [
        (
            *("tokens", "width", "samples", "one GPU", "samples split", "Megatron's layout", "with rounds", "FD-DPS"),
            *("FD-DPS / Megatron's", "FD-DPS / with rounds", "pairs"),
        )
    ]
    for record in records:
        parallel, ours = record["data_parallel_ms"], record["fd_dps_ms"]
        steps = (f"{record[key]:.2f}" for key in ("megatron_ms", "megatron_rounds_ms", "fd_dps_ms"))
        lines.append(
            (
                *(record["sequence"], record["width"], record["samples"], f"{record['one_device_ms']:.2f}"),
                *("-" if parallel is None else f"{parallel:.2f}", *steps),
                *(f"{ours / record[key]:.3f}" for key in ("megatron_ms", "megatron_rounds_ms")),
                f"{record['pairs']} of 2",
            )
        )
    return markdown(lines)


def _verdict(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns how far FD-DPS is from Megatron's layout, with the same rounds, too, and from data parallelism."""
    ahead = [record for record in records if record["fd_dps_ms"] < record["megatron_ms"]]
    behind = max(record["fd_dps_ms"] / record["megatron_rounds_ms"] - 1 for record in records)
    parallel = [record for record in records if record["data_parallel_ms"] is not None]
    slower = [record for record in parallel if record["fd_dps_ms"] > 1.001 * record["data_parallel_ms"]]
    return (
        f"FD-DPS's step is shorter than Megatron's layout in {len(ahead)} of {len(records)} blocks, "
        f"at most {max(behind, 0.0):.1%} longer than it is with\nthe same rounds, and longer than with samples split "
        f"in {len(slower)} of {len(parallel)} blocks with enough of them."
    )


def _wins(records: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for record in records:
        if record["combined"] and gain(record) >= 1.01:
            name, seconds = best_alone(record)
            best = "" if name == "stages alone" else f"{name} {seconds:.2f}, "
            reason = _REASONS.get(record["model"], "")
            lines.append(
                f"* {record['model']}, batch {record['batch']}, on {record['cluster']}: {record['combined_ms']:.2f} ms "
                f"by {record['combined']}; {best}stages alone {record['stages_ms']:.2f} "
                f"({record['stages']}). Its critical path: {record['limited_by']}. {reason}".rstrip()
            )
    return "\n".join(lines) or "Nothing here: the combined plan is never faster than the best of each level alone."


def _losses(records: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for record in records:
        if not record["combined"] or gain(record) < 1.01:
            name, seconds = best_alone(record)
            what = f"is {record['combined']}" if record["combined"] else "has no groups"
            lines.append(
                f"* {record['model']}, batch {record['batch']}, on {record['cluster']}: the plan {what}, "
                f"{record['combined_ms']:.2f} ms; the best alone is {name}, {seconds:.2f}."
            )
    return "\n".join(lines) or "Nothing."


def document(results: Mapping[str, Any]) -> str:
    """Returns the text of the document.

    Args:
        results: what `combined` and `column_rows` have written.
    """
    entry = results["combined"]
    records = entry["records"]
    wide = [record for record in records if record["operators_ms"] < record["operators_on_a_server_ms"]]
    most = max((record["combined_ms"] / record["operators_ms"] - 1 for record in wide), default=0.0)
    replicated = [record for record in records if record["model"] in _REPLICATED]
    longer = max((record["stages_ms"] / record["operators_on_a_server_ms"] - 1 for record in replicated), default=0.0)
    elsewhere = f"up to {most:.0%} faster" if most > 0 else "never faster"
    blocks = results["blocks"]
    return _HEAD.format(
        command=entry["command"],
        commit=entry["commit"],
        date=entry["machine"]["date"],
        table=table(records),
        wins=_wins(records),
        losses=_losses(records),
        elsewhere=elsewhere,
        cheap="as fast as" if longer <= 0.0005 else f"at most {longer:.1%} slower than",
    ) + _BLOCKS.format(
        command=blocks["command"],
        commit=blocks["commit"],
        date=blocks["machine"]["date"],
        blocks=blocks_table(blocks["records"]),
        verdict=_verdict(blocks["records"]),
    )


def main() -> None:
    """Writes the document beside the numbers."""
    write_document(_JSON.value, document)


if __name__ == "__main__":
    command.start(main, FLAGS)
