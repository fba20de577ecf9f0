"""The document of `bench_shards`' numbers.

python -m tools.evaluation.shards_report        # docs/results/shards.json -> shards.md beside it
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import markdown, write_document
from dapple_tf.tools.evaluation.ratios import ratios

FLAGS = flags.FlagValues()

_JSON = flags.DEFINE_string("json", "docs/results/shards.json", "Numbers of bench_shards.", flag_values=FLAGS)

WAYS = {"none": (False, False), "slots": (True, False), "slots, parameters": (True, True)}
"""What is in shards -> `Plan.optimizer_shards` and `Plan.parameter_shards`."""

_HEAD = """\
# Slots and parameters in shards

Written by `python -m tools.evaluation.shards_report` from shards.json, which these runs wrote; the load is the mean
number of processes that wanted a core in a run's last minute, its own among them:

{commands}

## Measured: data parallelism over slow links

Eight dense layers with Adam, whose slots take twice the parameters' bytes, on network namespaces with a worker each
and a core, or half of one on four hosts; `tc tbf` limits the links. Steps with nothing, the optimizer's slots, and
parameters, too, in shards take turns; the ratio is that of the steps of a turn, median and quartiles. "Predicted" is
the simulation by a profile of the model and the measured links. The peak is that of the fullest device, by allocation
records of a traced step on top of what the device keeps between steps; of n replicas each keeps an n-th of what is in
shards, which saves what the last column says, and what the update of the rest would need besides.

{measured}

All ways send as many bytes: what gradients in shards save, parameters cost, which are gathered after the update, or
where they are in shards before the first forward. What shards gain in time is the update, of which each replica makes
an n-th: the less, the more steps wait for the link.

## Simulated: the largest BERT on eight V100s of 16 GB

As in DAPPLE's Table 7 (one sample in a replica's micro-batch, recomputation, Adam), with a stage on each device as
there, and with fewer stages of several replicas. "Same model" is the step of the largest BERT that fits without
shards, with shards over without.

{simulated}

The more replicas, the more of each device are slots, and the more shards make room for; one stage for each device
still holds the most, and computes the fewest samples a second. Parameters in shards lower peaks at the end of a step,
as of the dense layers above, where gradients are reduced and applied. These pipelines are fullest between forward and
backward, where a device has all parameters of its stage, gathered, besides its own shard: fewer layers fit than with
slots in shards alone.
"""


def measured_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns what was measured, as Markdown: a line for each number of hosts, rate of the links, and way."""
    rows: list[tuple[object, ...]] = [
        (
            *("hosts", "Mbit/s", "MB of gradients", "in shards", "step, ms", "none / this"),
            *("predicted ms", "predicted ratio", "peak, MB", "saved, MB", "of these in others' shards, MB"),
        )
    ]
    for record in records:
        whole = record["rows"][0]
        for row in record["rows"]:
            size = f"{record['parameter_bytes'] / 1e6:.1f}"
            setting = (record["hosts"], f"{record['rate_mbit']:g}", size, row["way"])
            times = f"{statistics.median(row['steps']) * 1e3:.0f}", f"{row['predicted'] * 1e3:.0f}"
            saved = whole["peak_bytes"] - row["peak_bytes"], _in_others_shards(record, row["way"])
            sizes = f"{row['peak_bytes'] / 1e6:.1f}", *(f"{size / 1e6:.1f}" for size in saved)
            if row is whole:
                rows.append((*setting, times[0], "", times[1], "", sizes[0], "", ""))
            else:
                ratio = f"{whole['predicted'] / row['predicted']:.3f}"
                rows.append((*setting, times[0], ratios(whole["steps"], row["steps"]), times[1], ratio, *sizes))
    return markdown(rows)


def _in_others_shards(record: Mapping[str, Any], way: str) -> float:
    """Returns the bytes of Adam's slots, and parameters, that a replica doesn't keep."""
    slots, parameters = WAYS[way]
    copies = 2 * slots + parameters
    return float(copies * record["parameter_bytes"] * (1 - 1 / record["hosts"]))


def simulated_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns what was simulated, as Markdown: a line for each pipeline."""
    rows: list[tuple[object, ...]] = [
        ("stages", "replicas", "in shards", "encoder layers", "billion parameters", "samples/s", "same model")
    ]
    for record in records:
        same = record["same_model"]
        rows.append(
            (
                *(record[key] for key in ("stages", "replicas", "way", "layers")),
                *(f"{record['billion_parameters']:.2f}", f"{record['samples_per_s']:.2f}"),
                "" if same is None else f"{same:.3f}",
            )
        )
    return markdown(rows)


def document(results: Mapping[str, Any]) -> str:
    """Returns the text of the document.

    Args:
        results: what `bench_shards` has written.
    """
    commands = "\n".join(f"* `{entry['command']}`\n  {_origin(entry)}" for entry in results.values())
    measured = [record for name, entry in results.items() if name.startswith("measured") for record in entry["records"]]
    simulated = simulated_table(results["simulated"]["records"])
    return _HEAD.format(commands=commands, measured=measured_table(measured), simulated=simulated)


def _origin(entry: Mapping[str, Any]) -> str:
    machine = entry["machine"]
    return (
        f"at {entry['commit']} on {machine['cpu']}, {machine['cores']} cores, TensorFlow "
        f"{machine['versions']['tensorflow']}, load {machine['load_1min']}, {machine['date']}"
    )


def main() -> None:
    """Writes the document beside the numbers."""
    write_document(_JSON.value, document)


if __name__ == "__main__":
    command.start(main, FLAGS)
