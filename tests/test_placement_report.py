"""Where operators are, in words."""

from __future__ import annotations

import dataclasses

from dapple_tf.operators.op_graph import OpPlacement
from dapple_tf.operators.placement_report import device_name, placements_report, queue_report
from graph_passes.analysis.split_rules import Split

PLACEMENT = OpPlacement(
    devices={"a/part0": 0, "a/part1": 1, "b": 1, "read": 1},
    order=("read", "a/part1", "a/part0", "b"),
    splits={"a": Split("batch", 2)},
    seconds=0.0123456,
    peak_bytes=(3 * 2**20, 100.0),
)
LOCAL = "/job:localhost/replica:0/task:0/device:CPU:"


def test_what_was_found_is_told() -> None:
    assert str(PLACEMENT).splitlines() == [
        "4 operators on 2 devices, 12.35 ms simulated for a step",
        "split: 1 by batch into 2: 1 of unknown type",
        "device  operators  peak memory",
        "0               1        3 MiB",
        "1               3    100 bytes",
    ]


def test_splits_are_counted_by_dimension_parts_and_op_type() -> None:
    splits = {name: Split("batch", 2) for name in "abc"} | {"d": Split("channel", 4), "e": Split("batch", 4)}
    ops = {"a": "Relu", "b": "Conv2D", "c": "Conv2D", "d": "Conv2D", "e": "Conv2D"}
    assert str(dataclasses.replace(PLACEMENT, splits=splits, ops=ops)).splitlines()[1:4] == [
        "split: 3 by batch into 2: 2 Conv2D, 1 Relu",
        "split: 1 by batch into 4: 1 Conv2D",
        "split: 1 by channel into 4: 1 Conv2D",
    ]
    assert "no operator is split" in str(dataclasses.replace(PLACEMENT, splits={}))


def test_of_many_op_types_the_most_frequent_are_named() -> None:
    ops = {f"op{number}": f"Type{min(number, 9)}" for number in range(12)}
    placement = dataclasses.replace(PLACEMENT, splits=dict.fromkeys(ops, Split("batch", 2)), ops=ops)
    line = str(placement).splitlines()[1]
    assert line.startswith("split: 12 by batch into 2: 3 Type9, 1 Type0, ")
    assert line.endswith(", 1 Type6, 2 others")


def test_one_operator_on_one_device() -> None:
    one = OpPlacement({"a": 0}, ("a",), {}, 0.5, (8.0,))
    assert str(one).splitlines()[0] == "1 operator on 1 device, 500 ms simulated for a step"
    assert queue_report(one) == "0  0  a"
    nothing = OpPlacement({}, (), {}, 0.0, (0.0,))
    assert str(nothing).splitlines()[0] == "0 operators on 1 device, 0 ms simulated for a step"
    assert queue_report(nothing) == ""


def test_devices_are_called_by_their_names() -> None:
    local = dataclasses.replace(PLACEMENT, device_names=(f"{LOCAL}2", f"{LOCAL}10"))
    assert str(local).splitlines()[-2:] == ["CPU:2           1        3 MiB", "CPU:10          3    100 bytes"]
    assert queue_report(local).splitlines() == [
        "0  CPU:10  read",
        "1  CPU:10  a/part1",
        "2  CPU:2   a/part0",
        "3  CPU:10  b",
    ]
    away = dataclasses.replace(PLACEMENT, device_names=("/job:worker/replica:0/task:1/device:GPU:0", ""))
    assert device_name(away, 0) == "job:worker/task:1/GPU:0"


def test_each_stage_has_its_devices_and_queue() -> None:
    placements = {1: PLACEMENT, 0: dataclasses.replace(PLACEMENT, seconds=1.0)}
    text = placements_report(placements, [[[3, 0]], [[1, 2], [4, 5]]])
    lines = text.splitlines()
    assert lines[0] == "stage 0 on devices 3 0: 4 operators on 2 devices, 1000 ms simulated for a step"
    assert "stage 1 on devices 1 2 and 4 5: 4 operators on 2 devices, 12.35 ms simulated for a step" in lines
    assert lines.count("2  0  a/part0") == 2
    assert text.endswith("3  1  b\n")
