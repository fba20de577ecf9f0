"""Out-of-order backprop: the paper's worked examples, sub-streams, reverse first-k and the search for k."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from schedule_runs import execute, straight

from dapple_tf.schedules.out_of_order import best_reverse_first_k, modulo_devices
from dapple_tf.schedules.schedules import ScheduleError, in_flight, make_schedule, resolve_warm_up, validate
from graph_passes.ir.tasks import Phase, Task


def layers(count: int) -> list[list[float]]:
    """Every F, dO and dW of a layer takes one unit; the first layer has no dO."""
    return [[1, 1 if layer else 0, 1] for layer in range(count)]


def staircase(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


# --- gradient fast-forwarding and modulo allocation (section 5.2) ---


@pytest.mark.parametrize(("policy", "units"), [("gpipe", 23), ("fast_forward", 19), ("modulo", 16)])
def test_figure_5_takes_23_19_and_16_units(policy: str, units: int) -> None:
    """Eight layers, two devices, one micro-batch."""
    devices = modulo_devices(8, 2) if policy == "modulo" else [[layer // 4] for layer in range(8)]
    schedule = make_schedule(policy, devices, 1, task_seconds=layers(8))
    assert execute(schedule, layers(8)).makespan == units
    if policy != "modulo":
        halves = [[4, 3, 4], [4, 4, 4]]
        assert execute(make_schedule(policy, [[0], [1]], 1, task_seconds=halves), halves).makespan == units


@pytest.mark.parametrize(
    ("policy", "units", "speedup"), [("gpipe", 83, 1.0), ("fast_forward", 68, 1.22), ("modulo", 51, 1.62)]
)
def test_figure_12_with_16_layers_has_the_papers_speedups(policy: str, units: int, speedup: float) -> None:
    """Section 8.4.1: four devices, four micro-batches; "1.22x speedup over GPipe" and "1.62x faster"."""
    devices = modulo_devices(16, 4) if policy == "modulo" else [[layer // 4] for layer in range(16)]
    schedule = make_schedule(policy, devices, 4, task_seconds=layers(16))
    assert execute(schedule, layers(16)).makespan == units
    assert 83 / units == pytest.approx(speedup, abs=0.01)


def test_figure_5b_in_full() -> None:
    schedule = make_schedule("fast_forward", [[0], [0], [1], [1]], 1)
    expected = """
        0: 0F0 1F0                 1Bx0 0Bx0 1Bw0 0Bw0
        1:         2F0 3F0 3Bx0 2Bx0 3Bw0 2Bw0
    """
    assert str(schedule) == staircase(expected)


def test_fast_forwarding_fills_a_wait_with_weight_gradients() -> None:
    expected = """
        0: 0F0 0F1           0Bx0 0Bw0 0Bx1 0Bw1
        1:     1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1
    """
    assert str(make_schedule("fast_forward_a", [[0], [1]], 2)) == staircase(expected)


def test_fast_forwarding_computes_weight_gradients_early_where_memory_demands_it() -> None:
    free = make_schedule("fast_forward_a", straight(3), 6)
    assert in_flight(free) == resolve_warm_up("fast_forward_a", 3, 6) == (3, 3, 3)
    tight = make_schedule("fast_forward_a", straight(3), 6, holds=[3, 2, 1])
    assert in_flight(tight) == resolve_warm_up("fast_forward_a", 3, 6, holds=[3, 2, 1]) == (3, 2, 1)
    assert str(tight).splitlines()[2] == "2: " + " ".join(f"2F{i} 2Bx{i} 2Bw{i}" for i in range(6))
    seconds = [[1, 1, 1]] * 3
    assert execute(free, seconds).makespan < execute(tight, seconds).makespan


@pytest.mark.parametrize(("base", "policy"), [("gpipe", "fast_forward"), ("dapple_a", "fast_forward_a")])
def test_fast_forwarding_keeps_the_order_of_forwards_and_backwards(base: str, policy: str) -> None:
    plain = make_schedule(base, straight(3), 6)
    split = make_schedule(policy, straight(3), 6)
    for device, tasks in plain.orders.items():
        kept = [task for task in split.orders[device] if task.phase is not Phase.WEIGHT_GRAD]
        phases = {Phase.INPUT_GRAD: Phase.BACKWARD}
        assert [(phases.get(task.phase, task.phase), task.micro_batch) for task in kept] == [
            (task.phase, task.micro_batch) for task in tasks
        ]


def test_gaps_are_found_by_the_given_times() -> None:
    """With a slow second stage the first one has time for all its weight gradients between the others' arrivals."""
    slow = [[1, 1, 1], [4, 4, 4]]
    equal = make_schedule("fast_forward", [[0], [1]], 2)
    timed = make_schedule("fast_forward", [[0], [1]], 2, task_seconds=slow)
    assert str(equal).splitlines()[0] == "0: 0F0 0F1 0Bx0 0Bx1 0Bw0 0Bw1"
    assert str(timed).splitlines()[0] == "0: 0F0 0F1 0Bx0 0Bw0 0Bx1 0Bw1"


def test_modulo_keeps_limits_without_deadlock_where_devices_have_several_stages() -> None:
    devices = modulo_devices(6, 2)
    for limit in range(1, 5):
        schedule = make_schedule("modulo", devices, 7, holds=[limit] * 6)
        validate(schedule, devices, 7, holds=[limit] * 6)
        assert max(in_flight(schedule)) == limit


# --- reverse first-k (section 5.1, algorithm 2) ---


def test_algorithm_2_on_one_device() -> None:
    """With k = 3 of 5 layers, figure 4 (c): dW_1, dW_2 and dW_3 last and in this order."""
    assert str(make_schedule("gpipe", [[0]] * 5, 1, reverse_first_k=3)) == staircase("""
        0: 0F0 1F0 2F0 3F0 4F0 4B0 3B0 2Bx0 1Bx0 0Bx0 0Bw0 1Bw0 2Bw0
    """)


def test_only_the_last_micro_batch_is_reversed() -> None:
    assert str(make_schedule("dapple_a", [[0]] * 3, 2, reverse_first_k=2)) == staircase("""
        0: 0F0 1F0 2F0 2B0 1Bx0 1Bw0 0Bx0 0Bw0 0F1 1F1 2F1 2B1 1Bx1 0Bx1 0Bw1 1Bw1
    """)


def test_the_first_k_stages_reversed_and_the_rest_fast_forwarded() -> None:
    """Section 6: reverse first-k for the first k layers, fast-forwarding for the last L - k."""
    schedule = make_schedule("fast_forward", [[0], [0], [1], [1]], 1, reverse_first_k=2)
    assert str(schedule) == staircase("""
        0: 0F0 1F0                 1Bx0 0Bx0 0Bw0 1Bw0
        1:         2F0 3F0 3Bx0 2Bx0 3Bw0 2Bw0
    """)


def test_interleaved_refuses_reverse_first_k() -> None:
    with pytest.raises(ScheduleError, match="reverse_first_k is 1, but interleaved doesn't split backwards"):
        make_schedule("interleaved", [[0], [1], [0], [1]], 2, reverse_first_k=1)


def counted(throughput: Callable[[int], float]) -> tuple[Callable[[int], float], list[int]]:
    asked: list[int] = []

    def measure(k: int) -> float:
        asked.append(k)
        return throughput(k)

    return measure, asked


@pytest.mark.parametrize("layers", [1, 2, 7, 10, 25, 48, 121])
def test_the_search_finds_the_best_k_of_any_concave_throughput(layers: int) -> None:
    for best in range(layers):
        measure, asked = counted(lambda k, best=best: -abs(k - best))  # type: ignore[misc]
        assert best_reverse_first_k(layers, measure) == best
        assert len(asked) == len(set(asked)), "a k is measured once"
        assert set(asked) <= set(range(layers))


def test_the_search_takes_the_papers_steps() -> None:
    measure, asked = counted(lambda k: -((k - 57) ** 2))
    assert best_reverse_first_k(100, measure) == 57
    assert asked == [*range(0, 100, 10), 55, 65, 51, 53, 57, 59, 56, 58], "steps of 10, 5, 2 and 1"


def test_of_equal_throughputs_the_smallest_k_wins() -> None:
    assert best_reverse_first_k(30, lambda k: 1.0) == 0


def test_a_search_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="layers is 0; it must be at least 1"):
        best_reverse_first_k(0, float)


def test_reversing_starts_the_first_reduction_first() -> None:
    """Figure 4: the first layer's gradient is complete before the second's."""
    plain = execute(make_schedule("fast_forward", [[0]] * 3, 2), [[1, 1, 1]] * 3)
    reversed_ = execute(make_schedule("fast_forward", [[0]] * 3, 2, reverse_first_k=3), [[1, 1, 1]] * 3)
    ends = [[run.ends[Task(stage, Phase.WEIGHT_GRAD, 1)] for stage in range(3)] for run in (plain, reversed_)]
    assert ends[0] == sorted(ends[0], reverse=True) and ends[1] == sorted(ends[1])
