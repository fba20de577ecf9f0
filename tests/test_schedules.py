"""Policies against hand-written staircases, and the validator against wrong schedules."""

import doctest
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from schedule_runs import in_micro_batch_order, there_and_back
from selection import thorough

from dapple_tf.schedules import schedule_check, schedules
from dapple_tf.schedules.one_forward_one_backward import one_forward_one_backward
from dapple_tf.schedules.schedules import (
    POLICIES,
    ScheduleError,
    in_flight,
    make_schedule,
    resolve_warm_up,
    validate,
)
from graph_passes.ir.batching import split_evenly
from graph_passes.ir.tasks import Phase, Schedule, Task

RULE = ("gpipe", "dapple_a", "dapple_b")
"""The policies that run forwards and whole backwards in turn."""


def place(replicas: Sequence[int]) -> list[list[int]]:
    """Devices 0, 1, ... handed out to stages with the given numbers of replicas."""
    numbers = itertools.count()
    return [list(itertools.islice(numbers, count)) for count in replicas]


def staircase(text: str) -> str:
    """Take the gaps out of a schedule that is drawn with one column for each unit of time."""
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def peak_in_flight(tasks: Sequence[Task]) -> int:
    """Count the most forwards that ever wait for their backward."""
    changes = (1 if task.phase is Phase.FORWARD else -1 for task in tasks)
    return max(itertools.accumulate(changes))


# --- what the policies generate ---


def test_dapple_a_with_two_stages_and_three_micro_batches_is_figure_10c() -> None:
    expected = """
        0: 0F0 0F1         0B0 0F2 0B1     0B2
        1:     1F0 1B0 1F1 1B1 1F2 1B2
    """
    assert str(make_schedule("dapple_a", [[0], [1]], 3)) == staircase(expected)


def test_dapple_a_with_three_stages_and_five_micro_batches() -> None:
    expected = """
        0: 0F0 0F1 0F2         0B0 0F3 0B1 0F4 0B2         0B3     0B4
        1:     1F0 1F1     1B0 1F2 1B1 1F3 1B2 1F4     1B3     1B4
        2:         2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4
    """
    assert str(make_schedule("dapple_a", [[0], [1], [2]], 5)) == staircase(expected)


def test_dapple_b_with_three_stages_and_six_micro_batches_warms_up_with_5_3_1() -> None:
    expected = """
        0: 0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
        1:     1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2:         2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
    """
    assert str(make_schedule("dapple_b", [[0], [1], [2]], 6)) == staircase(expected)


def test_gpipe_runs_all_forwards_then_all_backwards_in_micro_batch_order() -> None:
    expected = """
        0: 0F0 0F1 0F2             0B0 0B1 0B2
        1:     1F0 1F1 1F2     1B0 1B1 1B2
    """
    assert str(make_schedule("gpipe", [[0], [1]], 3)) == staircase(expected)


def test_every_replica_runs_its_slice_of_each_micro_batch_in_the_order_of_its_stage() -> None:
    expected = """
        1: 1F0 1B0 1F1 1B1
        4: 0F0.r1 0F1.r1 0B0.r1 0B1.r1
        7: 0F0 0F1 0B0 0B1
    """
    assert str(make_schedule("dapple_a", [[7, 4], [1]], 2)) == staircase(expected)


def test_one_stage_under_dapple_accumulates_gradients_one_micro_batch_at_a_time() -> None:
    assert str(make_schedule("dapple_a", [[0]], 3)) == "0: 0F0 0B0 0F1 0B1 0F2 0B2"


@pytest.mark.parametrize("policy", POLICIES)
def test_forward_only_runs_the_forwards_in_order_under_every_policy(policy: str) -> None:
    schedule = make_schedule(policy, [[0, 1], [2]], 3, holds=[1, 1], forward_only=True)
    assert str(schedule) == "0: 0F0 0F1 0F2\n1: 0F0.r1 0F1.r1 0F2.r1\n2: 1F0 1F1 1F2"
    assert schedule.name == "forward"
    validate(schedule, [[0, 1], [2]], 3, holds=[1, 1], forward_only=True)


def test_tasks_of_empty_slices_are_left_out_on_both_ways() -> None:
    sizes = [split_evenly(size, 2) for size in (2, 1)]  # the last micro-batch has nothing for replica 1

    def active(stage: int, micro_batch: int, replica: int) -> bool:
        return stage == 1 or sizes[micro_batch][replica] > 0

    schedule = make_schedule("dapple_a", [[0, 1], [2]], 2, active=active)
    assert str(schedule) == "0: 0F0 0F1 0B0 0B1\n1: 0F0.r1 0B0.r1\n2: 1F0 1B0 1F1 1B1"
    validate(schedule, [[0, 1], [2]], 2, active=active)
    with pytest.raises(ScheduleError, match=r"no device runs 0F1.r1; add it to device 1"):
        validate(schedule, [[0, 1], [2]], 2)


def test_a_device_whose_slices_are_all_empty_keeps_its_line() -> None:
    schedule = make_schedule("gpipe", [[0, 1]], 1, active=lambda stage, micro_batch, replica: replica == 0)
    assert str(schedule) == "0: 0F0 0B0\n1:"


# --- warm-up ---


@pytest.mark.parametrize(
    ("policy", "stages", "micro_batches", "holds", "expected"),
    [
        ("gpipe", 3, 8, None, (8, 8, 8)),
        ("gpipe", 2, 8, [8, 9], (8, 8)),
        ("dapple_a", 4, 8, None, (4, 3, 2, 1)),
        ("dapple_a", 4, 2, None, (2, 2, 2, 1)),
        ("dapple_a", 4, 8, [3, 3, 3, 3], (3, 3, 2, 1)),
        ("dapple_b", 4, 8, None, (7, 5, 3, 1)),
        ("dapple_b", 4, 4, None, (4, 4, 3, 1)),
        ("dapple_b", 4, 8, [4, 4, 4, 4], (4, 4, 3, 1)),
        ("dapple_a", 1, 8, None, (1,)),
    ],
)
def test_warm_up_follows_the_papers_formulas(
    policy: str, stages: int, micro_batches: int, holds: list[int] | None, expected: tuple[int, ...]
) -> None:
    assert resolve_warm_up(policy, stages, micro_batches, holds=holds) == expected


def test_a_stage_with_little_memory_also_limits_the_stages_after_it() -> None:
    """Taken stage by stage, P_A gives (1, 2, 1) here, and stage 1 would wait for a second forward for ever."""
    assert resolve_warm_up("dapple_a", 3, 4, holds=[1, 4, 4]) == (1, 1, 1)
    validate(make_schedule("dapple_a", place([1, 1, 1]), 4, holds=[1, 4, 4]), place([1, 1, 1]), 4, holds=[1, 4, 4])
    with pytest.raises(ScheduleError, match="warm_up rises from 1 at stage 0 to 2 at stage 1, which deadlocks"):
        make_schedule("dapple_a", place([1, 1, 1]), 4, warm_up=[1, 2, 1])


def test_one_forward_one_backward_deadlocks_just_where_warm_up_rises() -> None:
    stages, micro_batches = 3, 4
    for counts in itertools.product(range(1, micro_batches + 1), repeat=stages):
        orders = {
            stage: tuple(
                Task(stage, phase, micro_batch) for phase, micro_batch in one_forward_one_backward(micro_batches, count)
            )
            for stage, count in enumerate(counts)
        }
        rises = any(a < b for a, b in itertools.pairwise(counts))
        schedule = Schedule(str(counts), orders)
        if rises:
            with pytest.raises(ScheduleError, match="deadlocks"):
                validate(schedule, place([1] * stages), micro_batches)
            with pytest.raises(ScheduleError, match="warm_up rises"):
                resolve_warm_up("dapple_a", stages, micro_batches, warm_up=counts)
        else:
            validate(schedule, place([1] * stages), micro_batches)
            assert resolve_warm_up("dapple_a", stages, micro_batches, warm_up=counts) == counts


def test_an_explicit_warm_up_replaces_the_policys_and_counts_as_m_above_m() -> None:
    assert str(make_schedule("dapple_a", [[0], [1]], 3, warm_up=[3, 2])) == staircase("""
        0: 0F0 0F1 0F2     0B0 0B1     0B2
        1:     1F0 1F1 1B0 1F2 1B1 1B2
    """)
    assert resolve_warm_up("dapple_b", 2, 2, warm_up=[5, 3]) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "zigzag"}, f"unknown schedule 'zigzag'; use one of {', '.join(POLICIES)}"),
        ({"micro_batches": 0}, "micro_batches is 0; it must be at least 1"),
        ({"devices": []}, "number of stages is 0; it must be at least 1"),
        ({"devices": [[0], []]}, "stage 1 has no devices; give it at least one"),
        (
            {"devices": [[0, 1], [1]]},
            "device 1 stands in stage 0 on devices [0, 1] and in stage 1 on [1], but dapple_a wants all stages of a "
            "device next to each other and with one list of devices; use modulo, interleaved or zb_v, or other devices",
        ),
        (
            {"devices": [[0], [1], [0]], "policy": "zero_bubble"},
            "device 0 stands in stage 0 on devices [0] and in stage 2 on [0], but zero_bubble wants all stages of a "
            "device next to each other and with one list of devices; use modulo, interleaved or zb_v, or other devices",
        ),
        ({"devices": [[0], [1, 1]]}, "device 1 stands twice, in stage 1; a device runs one replica of a stage"),
        ({"reverse_first_k": 3}, "reverse_first_k is 3; with 2 stages it must be from 0 to 2"),
        ({"task_seconds": [[1, 1, 1]]}, "task_seconds has 1 entries for 2 stages; give one for each"),
        (
            {"task_seconds": [[1, 1, 1], [1, -1, 1]]},
            "task_seconds of stage 1 is [1, -1, 1]; give the times of F, Bx and Bw, such as [1, 1, 1]",
        ),
        (
            {"devices": [[0], [0]], "warm_up": [2, 1]},
            "warm_up falls from 2 at stage 0 to 1 at stage 1, but both run on devices [0] in one order; give both the "
            "same",
        ),
        ({"holds": [4]}, "holds has 1 entries for 2 stages; give one for each stage"),
        ({"holds": [4, 0]}, "holds of stage 1 is 0; it must be at least 1"),
        ({"warm_up": [2, 1, 1]}, "warm_up has 3 entries for 2 stages; give one for each stage"),
        ({"warm_up": [2, 0]}, "warm_up of stage 1 is 0; it must be at least 1"),
        (
            {"warm_up": [3, 1], "holds": [2, 2]},
            "warm_up of stage 0 is 3, but its devices hold 2 micro-batches; lower it to 2",
        ),
        (
            {"warm_up": [1, 2]},
            "warm_up rises from 1 at stage 0 to 2 at stage 1, which deadlocks: stage 1 waits for 2 forwards before its "
            "first backward, stage 0 gives only 1 before it needs that backward. Lower stage 1 to 1 or raise stage 0 "
            "to 2",
        ),
        (
            {"policy": "gpipe", "warm_up": [4, 4]},
            "warm_up [4, 4] is given for gpipe, which always runs all 4 forwards first; leave it out, or use dapple_a "
            "or dapple_b",
        ),
        (
            {"policy": "gpipe", "holds": [4, 3]},
            "gpipe keeps all 4 micro-batches in flight, but stage 1 holds 3; use dapple_a, at most 3 micro-batches, or "
            "smaller ones",
        ),
    ],
)
def test_what_cannot_be_scheduled_is_refused_with_a_fix(arguments: dict[str, object], message: str) -> None:
    defaults: dict[str, object] = {"policy": "dapple_a", "devices": [[0], [1]], "micro_batches": 4}
    with pytest.raises(ScheduleError) as caught:
        make_schedule(**(defaults | arguments))  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("policy", "devices", "options", "message"),
    [
        ("dapple_a", [[0], [1], [0]], {}, "wants all stages of a device next to each other"),
        ("interleaved", [[0], [1]], {"reverse_first_k": 1}, "interleaved doesn't split backwards"),
    ],
)
def test_what_cannot_be_scheduled_has_no_warm_up(
    policy: str, devices: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        resolve_warm_up(policy, len(devices), 4, devices=devices, **options)


def test_warm_up_of_no_stages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stages is 0; it must be at least 1"):
        resolve_warm_up("dapple_a", 0, 4)


# --- full sweep of small cases ---


@pytest.mark.parametrize("policy", RULE)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_every_small_schedule_is_valid_and_holds_just_k_micro_batches(policy: str, stages: int) -> None:
    for micro_batches, replicas in itertools.product(range(1, 7), itertools.product((1, 2, 3), repeat=stages)):
        devices = place(replicas)
        counts = resolve_warm_up(policy, stages, micro_batches)
        schedule = make_schedule(policy, devices, micro_batches)
        validate(schedule, devices, micro_batches, holds=counts)
        for tasks in schedule.orders.values():
            assert peak_in_flight(tasks) == counts[tasks[0].stage]
        assert Schedule.parse(str(schedule), name=policy) == schedule


@pytest.mark.parametrize("policy", ["dapple_a", "dapple_b"])
def test_every_small_memory_limit_is_kept_without_deadlock(policy: str) -> None:
    for stages, micro_batches in itertools.product((1, 2, 3), (1, 2, 5)):
        for holds in itertools.product(range(1, 5), repeat=stages):
            devices = place([1] * stages)
            schedule = make_schedule(policy, devices, micro_batches, holds=holds)
            validate(schedule, devices, micro_batches, holds=holds)


@pytest.mark.parametrize("policy", RULE)
def test_small_batches_that_leave_slices_empty_are_valid(policy: str) -> None:
    for replicas, samples in itertools.product(itertools.product((1, 2, 3), repeat=2), range(3, 10)):
        sizes = split_evenly(samples, 3)

        def active(
            stage: int,
            micro_batch: int,
            replica: int,
            replicas: tuple[int, ...] = replicas,
            sizes: tuple[int, ...] = sizes,
        ) -> bool:
            return split_evenly(sizes[micro_batch], replicas[stage])[replica] > 0

        for forward_only in (False, True):
            schedule = make_schedule(policy, place(replicas), 3, active=active, forward_only=forward_only)
            validate(schedule, place(replicas), 3, active=active, forward_only=forward_only)


# --- all policies ---


def random_devices(policy: str, draw: random.Random) -> list[list[int]]:
    """Devices on which the policy can run."""
    if policy == "modulo":
        return [draw.sample(range(5), draw.randint(1, 3)) for _ in range(draw.randint(1, 6))]
    numbers = itertools.count()
    lists = [list(itertools.islice(numbers, draw.randint(1, 3))) for _ in range(draw.randint(2, 4))]
    if policy == "interleaved":
        return lists * draw.randint(1, 3)
    devices = [devices for devices in lists for _ in range(draw.choice([1, 1, 2, 3]))]
    if there_and_back(policy) or (policy == "zero_bubble" and draw.random() < 0.3):
        return devices + devices[::-1]
    return devices


def random_options(policy: str, devices: Sequence[Sequence[int]], draw: random.Random) -> dict[str, Any]:
    """Options that the policy takes."""
    options: dict[str, Any] = {}
    if draw.random() < 0.5 and policy != "gpipe":
        options["holds"] = [draw.randint(1, 6) for _ in devices]
    if draw.random() < 0.3 and policy not in RULE:
        options["warm_up"] = [draw.randint(1, 6) for _ in devices]
    if draw.random() < 0.5:
        options["task_seconds"] = [[draw.choice([0, 1, draw.random()]) for _ in range(3)] for _ in devices]
    if draw.random() < 0.4 and policy != "interleaved":
        options["reverse_first_k"] = draw.randint(0, len(devices))
    return options


@pytest.mark.parametrize("draws", [range(8), thorough(range(8, 60))], ids=["some", "others"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_legal_schedules_within_its_limits(policy: str, draws: range) -> None:
    for number in draws:
        draw = random.Random(f"{policy} {number}")
        devices = random_devices(policy, draw)
        micro_batches = draw.randint(1, 9)
        options = random_options(policy, devices, draw)
        cells = itertools.product(range(len(devices)), range(micro_batches), range(1, 3))
        empty = {cell for cell in cells if draw.random() < draw.choice([0.0, 0.2])}

        def active(stage: int, micro_batch: int, replica: int, empty: set[tuple[int, ...]] = empty) -> bool:
            return (stage, micro_batch, replica) not in empty

        schedule = make_schedule(policy, devices, micro_batches, active=active, **options)
        for limits in (options.get("holds"), options.get("warm_up")):
            validate(schedule, devices, micro_batches, holds=limits, active=active)
        assert in_micro_batch_order(schedule)
        most = resolve_warm_up(policy, len(devices), micro_batches, devices=devices, **options)
        counts = in_flight(schedule)
        assert all(count <= limit for count, limit in zip(counts, most, strict=False)), (devices, options, counts, most)
        assert Schedule.parse(str(schedule), name=policy) == schedule
        late = [task for tasks in schedule.orders.values() for task in tasks[-1:]]
        if options.get("reverse_first_k", 0) == len(devices) and not empty:
            assert all(task.phase is Phase.WEIGHT_GRAD and task.micro_batch == micro_batches - 1 for task in late)
        forward = make_schedule(policy, devices, micro_batches, forward_only=True, active=active)
        validate(forward, devices, micro_batches, forward_only=True, active=active)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gets_along_with_one_micro_batch_in_flight(policy: str) -> None:
    devices = [[0], [1], [1], [0]] if there_and_back(policy) else [[0], [1], [2]]
    if policy == "gpipe":
        devices = devices[:1]
    micro_batches = 1 if policy == "gpipe" else 5
    schedule = make_schedule(policy, devices, micro_batches, holds=[1] * len(devices))
    assert in_flight(schedule) == (1,) * len(devices)


@pytest.mark.parametrize("policy", RULE)
def test_a_group_of_stages_runs_as_one_stage(policy: str) -> None:
    whole = make_schedule(policy, [[0, 1], [2]], 4)
    parts = make_schedule(policy, [[0, 1], [0, 1], [0, 1], [2]], 4)
    for device, tasks in whole.orders.items():
        order = [(task.phase, task.micro_batch) for task in parts.orders[device]]
        count = 3 if device < 2 else 1
        assert order == [(task.phase, task.micro_batch) for task in tasks for _ in range(count)]
    assert str(make_schedule(policy, [[0], [0]], 1)) == "0: 0F0 1F0 1B0 0B0"
    assert resolve_warm_up(policy, 4, 4, devices=[[0, 1], [0, 1], [0, 1], [2]]) == (
        (4, 4, 4, 4) if policy == "gpipe" else {"dapple_a": (2, 2, 2, 1), "dapple_b": (3, 3, 3, 1)}[policy]
    )


def test_forwards_of_a_ring_keep_all_devices_busy_in_rounds() -> None:
    schedule = make_schedule("modulo", [[0], [1], [0], [1]], 5, forward_only=True)
    assert str(schedule).splitlines()[0] == "0: 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 0F4 2F4"


# --- what the validator refuses ---


def test_a_deadlock_is_drawn_with_what_each_device_is_stuck_on() -> None:
    schedule = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1\n2: 2F0 2B0 2F1 2B1", name="mine")
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, [[0], [1], [2]], 2)
    assert (
        str(caught.value)
        == """\
schedule 'mine' deadlocks after 4 of 12 tasks; move the tasks that others wait for forward, or the stuck ones (->) back
step      0    1    2    3
device 0  0F0  .    .    .    -> 0B0 waits for 1B0 on device 1
device 1  .    1F0  .    .    -> 1F1 waits for 0F1 on device 0
device 2  .    .    2F0  2B0  -> 2F1 waits for 1F1 on device 1"""
    )


def test_a_deadlock_text_names_all_replicas_waited_for_and_devices_that_are_done() -> None:
    text = "0: 0F0 0F1\n1: 0F1.r1 0F0.r1\n2: 1F0 1F1"
    devices = [[0, 1], [2]]
    validate(Schedule.parse(text), devices, 2, forward_only=True)
    stuck = Schedule.parse("0: 0B0 0F0\n1: 1F0 1B0\n2: 1F0.r1 1B0.r1")
    device_of = {task: device for device, tasks in stuck.orders.items() for task in tasks}
    with pytest.raises(ScheduleError) as caught:  # validate() refuses 0B0 before 0F0 earlier, with a shorter message
        schedule_check._check_progress(stuck, device_of)
    assert "device 0  -> 0B0 waits for 1B0 on device 1, 1B0.r1 on device 2" in str(caught.value)
    crossed = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1 1F0 1B0\n2: 0F0.r1 0F1.r1 0B0.r1 0B1.r1")
    with pytest.raises(ScheduleError) as caught:
        validate(crossed, [[0, 2], [1]], 2)
    assert str(caught.value).splitlines()[1:] == [
        "step      0       1",
        "device 0  0F0     .       -> 0B0 waits for 1B0 on device 1",
        "device 1  .       .       -> 1F1 waits for 0F1 on device 0",
        "device 2  0F0.r1  0F1.r1  -> 0B0.r1 waits for 1B0 on device 1",
    ]


def test_a_long_deadlock_shows_the_last_steps_only() -> None:
    warm = make_schedule("dapple_a", [[0], [1]], 40)
    first = list(warm.orders[0])
    position = first.index(Task(0, Phase.FORWARD, 30))
    first[position:] = [*first[position + 1 :], first[position]]  # 0F30 after every backward but 0B30
    last = first.index(Task(0, Phase.BACKWARD, 30))
    first.append(first.pop(last))
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("long", {0: tuple(first), 1: warm.orders[1]}), [[0], [1]], 40)
    header = str(caught.value).splitlines()[1].split()
    assert len(header) == 13 and int(header[1]) > 40
    assert all(len(line) <= 120 for line in str(caught.value).splitlines()[1:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: 0F0 0B0 0F1 0B1\n1: 1F0 1B0 1F1", "no device runs 1B1; add it to device 1"),
        ("0: 0F0 0B0 0F1 0B1\n1: 1F0 1B0 1F1 1B1 1B1", "device 1 runs 1B1 2 times; it must run once"),
        (
            "0: 0F0 0B0 0F1 0B1 1F0\n1: 1B0 1F1 1B1",
            "device 0 runs 1F0, which belongs on device 1; move it",
        ),
        (
            "0: 0F0 0B0 0F1 0B1 0F2\n1: 1F0 1B0 1F1 1B1",
            "device 0 runs 0F2, which isn't a task of this step of 8 tasks; remove it",
        ),
        (
            "0: 0F0 0B0 0F1 0Bx1\n1: 1F0 1B0 1F1 1B1",
            "device 0 runs 0B0, but other backwards of stage 0 are split; give all of them as Bx and Bw, or all as B",
        ),
        ("0: 0F0 0Bx0 0F1 0Bx1 0Bw0\n1: 1F0 1B0 1F1 1B1", "no device runs 0Bw1; add it to device 0"),
        (
            "0: 0F0 0Bw0 0Bx0 0F1 0Bx1 0Bw1\n1: 1F0 1B0 1F1 1B1",
            "device 0 runs 0Bw0 before 0Bx0; a weight gradient needs its Bx first",
        ),
        (
            "0: 0F0 0F1 0Bx0 0Bx1 0Bw1 0Bw0\n1: 1F0 1B0 1F1 1B1",
            "device 0 runs 0Bw0 after 0Bw1; weight gradients are added up in micro-batch order, so move it before",
        ),
        (
            "0: 0F0 0F1 0B1 0B0\n1: 1F0 1B0 1F1 1B1",
            "device 0 runs 0B0 after 0B1; weight gradients are added up in micro-batch order, so move it before",
        ),
        (
            "0: 0F0 0B0 0F1 0B1\n1: 1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1",
            "device 1 has 2 micro-batches in flight after 1F1, but stage 1 holds 1; run a backward before it",
        ),
        (
            "0: 0F0 0B1 0F1 0B0\n1: 1F0 1B0 1F1 1B1",
            "device 0 runs 0B1 before 0F1; a backward needs its forward first",
        ),
        (
            "0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B0 1B1",
            "device 1 has 2 micro-batches in flight after 1F1, but stage 1 holds 1; run a backward before it",
        ),
    ],
)
def test_a_wrong_schedule_is_refused_with_its_task_and_device(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.parse(text), [[0], [1]], 2, holds=[2, 1])
    assert str(caught.value) == message


def test_a_training_schedule_is_no_forward_only_schedule() -> None:
    with pytest.raises(ScheduleError, match="device 0 runs 0B0, which isn't a task of this step of 2 tasks"):
        validate(make_schedule("gpipe", [[0]], 2), [[0]], 2, forward_only=True)


def test_the_example_in_the_documentation_is_true() -> None:
    assert doctest.testmod(schedules) == (0, 2)
