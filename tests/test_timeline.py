"""The form that all timelines have: lanes, bubbles, memory and labels."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.timeline import Lane, Span, Timeline

DEVICES = {4: "device 4: stage 0", 2: "device 2: stage 1"}


def test_lanes_are_by_device_with_computing_first_and_spans_by_time() -> None:
    late, early = Span("B", 2.0, 4.0, 2, 1, 0), Span("F", 0.0, 2.0, 2, 1, 0)
    send = Span("send", 4.0, 5.0, 2, 1, 0, target=4, bytes=8.0)
    reduce = Span("all_reduce", 5.0, 6.0, None, 0, reduction=0)
    unknown = Span("all_reduce", 5.0, 6.0, None, 0)
    spans = (late, send, early, reduce, unknown)
    timeline = Timeline("step", 6.0, spans, DEVICES, reduced_on={0: (2, 4)})
    assert list(timeline.lanes.items()) == [
        (Lane(4, "compute"), ()),
        (Lane(4, "all_reduce"), (reduce,)),
        (Lane(2, "compute"), (early, late)),
        (Lane(2, "send"), (send,)),
        (Lane(2, "all_reduce"), (reduce,)),
    ]
    assert timeline.devices_of(reduce) == (2, 4) and timeline.devices_of(send) == (2,)
    assert timeline.devices_of(unknown) == ()


def test_bubbles_count_what_overlaps_once() -> None:
    spans = tuple(Span(kind, start, end, 2, 1) for kind, start, end in [("B", 1.0, 4.0), ("accumulate", 3.0, 5.0)])
    timeline = Timeline("step", 8.0, (*spans, Span("send", 0.0, 8.0, 2, 1)), DEVICES)
    assert timeline.busy == {4: 0.0, 2: 4.0} and timeline.bubbles == {4: 1.0, 2: 0.5}
    assert Timeline("none", 0.0, (), DEVICES).bubbles == {4: 0.0, 2: 0.0}
    shorter = Timeline("short", 2.0, spans, DEVICES)  # a step that ends before its spans do has no negative bubbles
    assert shorter.bubbles[2] == 0.0


def test_peaks_and_throughput() -> None:
    memory = {2: ((0.0, 1.0), (1.0, 9.0), (2.0, 3.0)), 4: ()}
    timeline = Timeline("step", 0.5, (), DEVICES, memory, samples=8)
    assert timeline.peak_bytes == {2: 9.0} and timeline.throughput == 16.0
    assert Timeline("step", 0.5, (), DEVICES).throughput is None
    assert Timeline("step", 0.5, (), DEVICES, samples=8, unit="F").throughput is None
    assert Timeline("step", 0.0, (), DEVICES, samples=8).throughput == math.inf


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span("F", 2.0, 1.0, 2, 1, 0), "1F0 2.000000..1.000000 of the step timeline ends before it starts"),
        (
            Span("F", 0.0, 1.0, 7, 1, 0),
            "1F0 0.000000..1.000000 of the step timeline is on device 7, which isn't among its 2 devices",
        ),
        (Span("all_reduce", 0.0, 1.0, None, 0, reduction=0), "is on device 9, which isn't among its 2 devices"),
    ],
)
def test_spans_that_cannot_be_are_refused(span: Span, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Timeline("step", 4.0, (span,), DEVICES, reduced_on={0: (2, 9)})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency": math.nan}, "1 times or sizes that aren't finite, such as nan"),
        ({"memory": {0: ((0.0, math.inf), (math.nan, 1.0))}}, "2 times or sizes that aren't finite, such as inf"),
        ({"latency": -1.0}, "the step timeline takes -1.0; give 0 or more"),
    ],
)
def test_numbers_that_nobody_can_draw_are_refused(changes: dict[str, Any], message: str) -> None:
    """Pages refused them; texts, images and traces failed on them each in its way, or drew nonsense."""
    given: dict[str, Any] = {"name": "step", "latency": 4.0, "spans": (), "devices": DEVICES}
    with pytest.raises(ValueError) as caught:
        Timeline(**given | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "labels"),
    [
        (
            Plan.manual(["a"], [[3, 1], [2]], 2, 4),
            ["device 3: stage 0.r0", "device 1: stage 0.r1", "device 2: stage 1"],
        ),
        (Plan.manual(["a", "b"], [[0], [1], [0]], 2, 2, "modulo"), ["device 0: stages 0, 2", "device 1: stage 1"]),
    ],
)
def test_devices_are_called_by_what_they_do(plan: Plan, labels: list[str]) -> None:
    assert list(plan.device_labels().values()) == labels


def test_a_simulated_step_becomes_a_timeline_of_the_same_numbers() -> None:
    layers = [LayerProfile(f"layer{i}", Cost(1.0), Cost(2.0), parameter_bytes=2**20) for i in range(2)]
    model = Profile("model", "none", (1,), tuple(layers), (Tensor(0, (1,), Cost(0.0, 8.0)),))
    cluster = Cluster(
        (*(Device(f"d{i}", 0, 2**30) for i in range(2)), Device("d2", 1)), real=False, inter_bandwidth=2**20
    )
    step = simulate(Plan.manual(["layer0"], [[0, 1], [2]], 4, 8), model, cluster)
    timeline = step.drawn()
    assert (timeline.name, timeline.latency, timeline.spans) == ("simulated", step.latency, step.spans)
    assert timeline.throughput == step.throughput and timeline.peak_bytes == step.peak_bytes
    assert timeline.bubbles == pytest.approx(step.idle) and timeline.limits == {0: 2.0**30, 1: 2.0**30}
    assert timeline.reduced_on == {0: (0, 1)}
    assert len(timeline.lanes[Lane(0, "all_reduce")]) == 1
    assert step.drawn("emulated").name == "emulated"
