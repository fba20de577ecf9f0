"""The document of `combined_workers`' measurements.

python -m tools.evaluation.combined_workers_report    # docs/results/combined_workers.json -> combined_workers.md
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from dapple_tf.text_table import table
from dapple_tf.tools import command
from dapple_tf.tools.evaluation.bench_report import markdown, write_document
from dapple_tf.tools.evaluation.ratios import quartiles, ratios

FLAGS = flags.FlagValues()

_JSON = flags.DEFINE_string("json", "docs/results/combined_workers.json", "Measurements.", flag_values=FLAGS)

_TOGETHER = ("combined", "groups")
"""Ways that may have stages and placed operators together."""

_HEAD = """\
# Stages of placed operators between two hosts

Written by `python -m tools.evaluation.combined_workers_report` from combined_workers.json, which these runs measured
(with root); the load is the mean number of processes that wanted a core in a run's last minute, its own and all others:

{commands}

Real steps: two network namespaces are hosts, with a link between them that `tc tbf` limits. Each device is a worker of
its own, with a part of a core's time (a control group's quota); workers of one namespace are one server of the cluster
and reach each other over its loopback device. The model is a chain of wide layers with parallel branches inside, which
groups of devices can divide and stages can't. All ways are planned by the same times of operators and the same links,
measured just before, layers as the sum of their operators, and train in turns from the same values by the same batch.

*data_parallel* is the fastest number of replicas by simulation, *stages* what `dapple.plan` finds without placed
operators, *operators* FD-DPS' placement on all devices (or those of a host, if that is faster by its own simulation),
*operators_on_a_host* that on one host's, *combined* what the planner finds with groups of devices, too, and *groups*,
where it finds something else, the best plan of at least two stages that are all on groups. Milliseconds, medians
with quartiles; "error" is predicted over measured, less 1; "this / best" is a step over that of the fastest way of a
single level in the same round. A device's quota also pays for what it sends and receives, which predictions take to be
free, and whoever has used it up answers no message until the next period of 10 ms.

What follows for the case of 50 Mbit/s was read once, by hand, from TensorFlow's traces of single steps of another run,
which isn't in the file. FD-DPS' placement on one host splits operators, so that 25 tensors of 2.6 MB go from one device
to the other. Its operators keep the two devices busy for 846 and 1011 ms, together 35 % longer than one device is with
the same work (1372 ms), probably since sending and receiving take their quotas' time meanwhile, which wasn't measured
apart: a step for which that run's prediction was 555 ms takes a thousand. In two stages on groups there are 28 tensors
of half the size within the hosts, and the four devices are busy for 1461 ms together, 6 % longer than one device; what
they wait for is the link between the hosts, on which the results of two micro-batches take 80 to 100 ms each where 44
were predicted for one alone. The planner takes sending to be free for devices, which favours whatever sends much, and
chose one host.

Earlier runs of the same case: two stages on groups were 1.087 (1.044 to 1.096) times as fast as the best way of a
single level at b0285ea, and 1.070 (1.049 to 1.137) at a818a67, before a range with the loss let its backward wait for
its forward when operators are placed, too (decision 0046). On a machine that others used for 1.5 of its 2 cores, and
without precedence for the devices' quotas, 1.109 (1.071 to 1.131) and 0.948 (0.934 to 0.989), which don't agree. At
7dffdb0 the best plan of several stages had one stage on a group and one without (1 x 2:2, 1 micro-batch): 0.942 (0.885
to 1.023) times as fast, and by trial it chose operators on one host; stages that are all on groups are tried since.
"""


def best_alone(record: Mapping[str, Any]) -> str:
    """Returns the way of a single level with the shortest measured step."""
    alone = {row["way"]: statistics.median(row["steps_s"]) for row in record["rows"] if row["way"] not in _TOGETHER}
    return min(alone, key=lambda way: alone[way])


def losses_apart(record: Mapping[str, Any]) -> float:
    """Returns the largest difference of any way's loss from the first one's after the same step, relative to it."""
    first = record["rows"][0]["losses"]
    return max(
        abs(other - own) / abs(own)
        for row in record["rows"][1:]
        for own, other in zip(first, row["losses"], strict=True)
    )


def rows(record: Mapping[str, Any]) -> list[Sequence[str]]:
    """Returns a table of a record's ways, with a header."""
    steps = {row["way"]: row["steps_s"] for row in record["rows"]}
    base = steps[best_alone(record)]
    lines: list[Sequence[str]] = [("way", "plan", "predicted", "measured", "error", "this / best", "loss")]
    for row in record["rows"]:
        times = quartiles([1e3 * seconds for seconds in row["steps_s"]])
        lines.append(
            (
                *(row["way"], row["plan"], f"{row['predicted_s'] * 1e3:.0f}"),
                f"{times.median:.0f} ({times.low:.0f} to {times.high:.0f})",
                f"{row['predicted_s'] * 1e3 / times.median - 1:+.1%}",
                *(str(ratios(row["steps_s"], base)), f"{row['losses'][-1]:.6f}"),
            )
        )
    return lines


def verdict(record: Mapping[str, Any]) -> str:
    """Returns in words whether stages and placed operators together were the fastest, predicted and measured."""
    best = best_alone(record)
    of = {row["way"]: row for row in record["rows"]}
    together = [of[way] for way in _TOGETHER if way in of]
    own = min(together, key=lambda row: statistics.median(row["steps_s"]))
    measured = ratios(of[best]["steps_s"], own["steps_s"])
    expected_best = min(
        (row for row in record["rows"] if row["way"] not in _TOGETHER), key=lambda row: row["predicted_s"]
    )
    expected = min(together, key=lambda row: row["predicted_s"])
    gain = expected_best["predicted_s"] / expected["predicted_s"]
    apart, others = losses_apart(record), record["others_cores"]
    missed = ""
    if "groups" in of:
        missed = (
            f"The planner didn't choose stages on groups: it expected {of['groups']['predicted_s'] * 1e3:.0f} ms of "
            f"them, and {of['combined']['predicted_s'] * 1e3:.0f} of {of['combined']['plan']}. "
        )
    ways = " and ".join(record["by_trial_ways"]) or "none of these ways"
    tried = f"By trial (`by_trial=True`) it chose {record['by_trial']}, the plan of {ways}. "
    return (
        f"The fastest way of a single level was {best}; {own['way']} ({own['plan']}) was {measured} times as fast. "
        f"Predicted: {expected['way']} {gain:.3f} times as fast as {expected_best['way']}. {missed}{tried}"
        f"Losses agree to {apart:.1e} after each of {len(record['rows'][0]['losses'])} steps; other processes used at "
        f"most {max(others):.2f} cores during a round, in the median {statistics.median(others):.2f}."
    )


def name(record: Mapping[str, Any]) -> str:
    """Returns what was measured together, for people."""
    return (
        f"{record['hosts']} hosts of {record['devices']} devices, {record['rate_mbit']:g} Mbit/s, "
        f"batch {record['batch']}, {record['blocks']} layers of {record['branches']} branches"
    )


def setting(record: Mapping[str, Any]) -> str:
    """Returns the numbers of the model, the devices and the links."""
    links = record["links"]
    return (
        f"Samples of {record['tokens']} tokens of {record['width']} numbers, {record['hidden']} within branches; "
        f"{record['share']:g} of a core for each device. Measured links: {links['intra_bandwidth'] / 1e6:.0f} MB/s and "
        f"{links['intra_latency'] * 1e3:.2f} ms within a host, {links['inter_bandwidth'] / 1e6:.1f} MB/s and "
        f"{links['inter_latency'] * 1e3:.2f} ms between hosts."
    )


def text(record: Mapping[str, Any]) -> str:
    """Returns a record for a terminal."""
    return f"{name(record)}\n{setting(record)}\n{table(rows(record), left=2)}\n{verdict(record)}\n"


def document(results: Mapping[str, Any]) -> str:
    """Returns the text of the document.

    Args:
        results: those that `combined_workers` has written, one benchmark for each setting.
    """
    commands = "\n".join(
        f"* `{entry['command']}`\n  at {entry['commit']}, on {machine['cpu']}, {machine['cores']} cores, TensorFlow "
        f"{machine['versions']['tensorflow']}, load {machine['load_1min']}, {machine['date']}"
        for entry in results.values()
        for machine in [entry["machine"]]
    )
    parts = [_HEAD.format(commands=commands)]
    for entry in results.values():
        for record in entry["records"]:
            parts += [f"## {name(record)}\n", setting(record), "", markdown(rows(record)), "", verdict(record), ""]
    return "\n".join(parts)


def main() -> None:
    """Writes the document beside the measurements."""
    write_document(_JSON.value, document)


if __name__ == "__main__":
    command.start(main, FLAGS)
