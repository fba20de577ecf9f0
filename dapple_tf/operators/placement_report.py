"""Reports of a step's placement as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dapple_tf.text_table import table
from dapple_tf.units import counted, gib, ms_text

if TYPE_CHECKING:
    from dapple_tf.operators.op_graph import OpPlacement

_SHOWN = 8
"""The most op types named for operators that are split alike."""
_HERE = "/job:localhost/replica:0/task:0"


def placement_report(placement: OpPlacement) -> str:
    """Reports the simulated step, the splits, and what each device runs and holds: ``str(placement)``."""
    count, devices = len(placement.devices), len(placement.peak_bytes)
    lines = [
        f"{counted(count, 'operator')} on {counted(devices, 'device')}, "
        f"{ms_text(placement.seconds)} ms simulated for a step"
    ]
    lines += [f"split: {text}" for text in _splits(placement)] or ["no operator is split"]
    held = Counter(placement.devices.values())
    rows = [("device", "operators", "peak memory")]
    for device, peak in enumerate(placement.peak_bytes):
        rows.append((device_name(placement, device), f"{held[device]:,}", gib(peak)))
    return "\n".join([*lines, table(rows, left=1)])


def queue_report(placement: OpPlacement) -> str:
    """Lists every operator in the order of the queue Q: its position, its device, and its name."""
    position = len(str(max(len(placement.order) - 1, 0)))
    names = [device_name(placement, device) for device in range(len(placement.peak_bytes))]
    width = max(map(len, names), default=0)
    return "\n".join(
        f"{number:{position}}  {names[placement.devices[name]].ljust(width)}  {name}"
        for number, name in enumerate(placement.order)
    )


def placements_report(placements: Mapping[int, OpPlacement], groups: Sequence[Sequence[Sequence[int]]]) -> str:
    """Reports the placements of all stages, each with its queue.

    Args:
        placements: stage -> where its operators are.
        groups: for each stage the numbers, in the cluster, of the devices of each replica; replicas are alike.
    """
    parts = []
    for stage, placement in sorted(placements.items()):
        numbers = " and ".join(" ".join(map(str, group)) for group in groups[stage])
        parts.append(f"stage {stage} on devices {numbers}: {placement}\n\nqueue: position, device, operator")
        parts.append(queue_report(placement))
    return "\n\n".join(parts) + "\n"


def device_name(placement: OpPlacement, device: int) -> str:
    """Returns a device's name in reports: ``GPU:3``, on a cluster ``job:worker/task:1/GPU:3``.

    If names aren't known, it is the number within the placement.
    """
    if not placement.device_names:
        return str(device)
    name = placement.device_names[device].removeprefix(_HERE).replace("/replica:0", "").replace("device:", "")
    return name.removeprefix("/")


def _splits(placement: OpPlacement) -> list[str]:
    """Counts split operators by type for each dimension and number of parts; the most frequent first."""
    counts: dict[tuple[str, int], Counter[str]] = {}
    for name, split in placement.splits.items():
        counts.setdefault((split.dimension, split.parts), Counter())[placement.ops.get(name, "of unknown type")] += 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1].total(), item[0]))
    lines = []
    for (dimension, parts), types in ordered:
        kinds = sorted(types.items(), key=lambda item: (-item[1], item[0]))
        shown = [f"{count:,} {op}" for op, count in kinds[:_SHOWN]]
        if rest := sum(count for _, count in kinds[_SHOWN:]):
            shown.append(f"{rest:,} others")
        lines.append(f"{types.total():,} by {dimension} into {parts}: {', '.join(shown)}")
    return lines
