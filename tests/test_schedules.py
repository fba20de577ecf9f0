"""Tasks and schedules as text, policies against hand-written staircases, and the check of wrong schedules."""

import copy
import doctest
import itertools
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from schedule_runs import in_micro_batch_order, there_and_back

from dapple_tf.schedules import schedules
from dapple_tf.schedules.one_forward_one_backward import one_forward_one_backward
from dapple_tf.schedules.schedule_check import lockstep
from dapple_tf.schedules.schedules import POLICIES, ScheduleError, in_flight, make_schedule, resolve_warm_up, validate
from graph_passes.ir.tasks import Phase, Schedule, Task

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD
RULE = ("gpipe", "dapple_a", "dapple_b")
"""The policies that run forwards and whole backwards in turn."""


# --- tasks and schedules as text ---

TEXT = "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n2: 1F0.r1 1B0.r1\n5:"


def test_every_small_task_has_its_own_text_that_parses_back() -> None:
    examples = [Task(2, F, 0), Task(0, B, 13), Task(10, BX, 3), Task(1, BW, 4, replica=12)]
    assert list(map(str, examples)) == ["2F0", "0B13", "10Bx3", "1Bw4.r12"]
    tasks = [*examples, *(Task(*fields) for fields in itertools.product(range(2), Phase, range(2), range(3)))]
    assert [Task.parse(str(task)) for task in tasks] == tasks
    assert len({str(task) for task in tasks}) == len(set(tasks))


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "2F0.r", "2F0.c1", "2F0>1F0", "2F0 ", "-1F0", "2F0.x1", "٢F0"]
)
def test_a_text_that_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="isn't a task; write <stage><phase><micro-batch>") as caught:
        Task.parse(text)
    assert repr(text) in str(caught.value)
    with pytest.raises(ValueError, match="task's replica is -1; it must be 0 or more"):
        Task(0, F, 0, replica=-1)


def test_tasks_sort_by_stage_then_phase_then_micro_batch() -> None:
    expected = [*Schedule.parse("0: 0F0 0F1 0B0 0Bx0 0Bw0 1F0 1F0.r1 1B0").tasks]
    assert sorted(reversed(expected)) == expected
    assert Task(0, F, 0) <= Task(0, B, 0) and Task(0, B, 0) > Task(0, F, 5)
    with pytest.raises(TypeError):
        _ = F < "F"


def test_a_schedule_prints_parses_compares_and_pickles() -> None:
    schedule = Schedule.parse(TEXT, name="mine")
    assert str(schedule) == TEXT
    backwards = Schedule("mine", dict(sorted(schedule.orders.items(), reverse=True)))
    for again in (
        Schedule.parse(TEXT, "mine"),
        backwards,
        copy.deepcopy(schedule),
        pickle.loads(pickle.dumps(schedule)),
    ):
        assert again == schedule and hash(again) == hash(schedule)
    assert schedule != Schedule.parse(TEXT) and schedule != Schedule.parse("0: 0F0", "mine")
    assert schedule.split == frozenset()


def test_devices_of_tasks() -> None:
    schedule = Schedule.parse(TEXT, name="mine")
    assert schedule.device_of(Task(1, B, 0, replica=1)) == 2
    with pytest.raises(
        LookupError, match=r"no device runs 1F1\.r1 in schedule 'mine', which has 10 tasks on 4 devices"
    ):
        schedule.device_of(Task(1, F, 1, replica=1))


def test_a_schedule_does_not_change_with_the_dict_it_was_made_from() -> None:
    orders = {0: [Task(0, F, 0)]}
    schedule = Schedule("mine", orders)  # type: ignore[arg-type]
    orders[0].append(Task(0, B, 0))
    orders[1] = []
    assert str(schedule) == "0: 0F0"
    with pytest.raises(TypeError):
        schedule.orders[1] = ()  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: 0F0\n\n0: 0B0", "line 3 of the schedule lists device 0 again"),
        ("0F0 0B0", "line 1 of the schedule is '0F0 0B0'; write <device>: <task> <task> ..."),
        ("zero: 0F0", "line 1 of the schedule is 'zero: 0F0'"),
        ("0: 0F0\n1: 1G0", "line 2 of the schedule: '1G0' isn't a task"),
    ],
)
def test_a_wrong_schedule_text_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Schedule.parse(text)
    assert message in str(caught.value)


def test_tasks_can_be_used_without_tensorflow() -> None:
    code = "import sys, graph_passes.ir.tasks; sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras')))"
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# --- what the policies generate ---


def place(replicas: Sequence[int]) -> list[list[int]]:
    """Devices 0, 1, ... handed out to stages with the given numbers of replicas."""
    numbers = itertools.count()
    return [list(itertools.islice(numbers, count)) for count in replicas]


V3 = [[0], [1], [2], [2], [1], [0]]
IN_FULL: dict[str, tuple[str, list[list[int]], int, dict[str, Any]]] = {
    "DAPPLE, figure 10c": ("dapple_a", [[0], [1]], 3, {}),
    "warm-up of 5, 3 and 1": ("dapple_b", [[0], [1], [2]], 6, {}),
    "all forwards, then all backwards": ("gpipe", [[0], [1]], 3, {}),
    "replicas": ("dapple_a", [[7, 4], [1]], 2, {}),
    "one stage": ("dapple_a", [[0]], 3, {}),
    "a given warm-up": ("dapple_a", [[0], [1]], 3, {"warm_up": [3, 2]}),
    "a device without slices": ("gpipe", [[0, 1]], 1, {"active": lambda *slice_: slice_[2] == 0}),
    "forwards in rounds": ("modulo", [[0], [1], [0], [1]], 5, {"forward_only": True}),
    "two stages on each of two devices": ("interleaved", [[0], [1], [0], [1]], 4, {}),
    "zero bubble": ("zb_h1", [[0], [1]], 4, {}),
    "zero bubble with room for one micro-batch": ("zb_h1", [[0], [1]], 2, {"holds": [1, 1]}),
    "V-Min": ("v_min", V3, 3, {}),
    "DualPipeV": ("dualpipe_v", [[0], [1], [1], [0]], 4, {}),
    "Out-Of-Order BackProp, figure 5b": ("fast_forward", [[0], [0], [1], [1]], 1, {}),
    "a wait is filled with weight gradients": ("fast_forward_a", [[0], [1]], 2, {}),
    "gaps by the given times": ("fast_forward", [[0], [1]], 2, {"task_seconds": [[1, 1, 1], [4, 4, 4]]}),
    "algorithm 2, figure 4c": ("gpipe", [[0]] * 5, 1, {"reverse_first_k": 3}),
    "only the last micro-batch is reversed": ("dapple_a", [[0]] * 3, 2, {"reverse_first_k": 2}),
    "section 6, reversed and fast-forwarded": ("fast_forward", [[0], [0], [1], [1]], 1, {"reverse_first_k": 2}),
}


def test_schedules_in_full(golden: Callable[[str, str], None]) -> None:
    texts = []
    for title, (policy, devices, micro_batches, options) in IN_FULL.items():
        schedule = make_schedule(policy, devices, micro_batches, **options)
        texts.append(f"{title}: {policy} of {micro_batches} micro-batches on {devices}\n{schedule}\n")
    golden("schedules.txt", "\n".join(texts))


def test_tasks_of_empty_slices_are_left_out_on_both_ways() -> None:
    def active(stage: int, micro_batch: int, replica: int) -> bool:
        return (stage, micro_batch, replica) != (0, 1, 1)

    schedule = make_schedule("dapple_a", [[0, 1], [2]], 2, active=active)
    assert str(schedule) == "0: 0F0 0F1 0B0 0B1\n1: 0F0.r1 0B0.r1\n2: 1F0 1B0 1F1 1B1"
    validate(schedule, [[0, 1], [2]], 2, active=active)
    with pytest.raises(ScheduleError, match=r"no device runs 0F1.r1; add it to device 1"):
        validate(schedule, [[0, 1], [2]], 2)


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
        ("dapple_a", 3, 4, [1, 4, 4], (1, 1, 1)),  # stage by stage (1, 2, 1), and stage 1 would wait for ever
    ],
)
def test_warm_up_follows_the_papers_formulas(
    policy: str, stages: int, micro_batches: int, holds: list[int] | None, expected: tuple[int, ...]
) -> None:
    assert resolve_warm_up(policy, stages, micro_batches, holds=holds) == expected


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "zigzag"}, f"unknown schedule 'zigzag'; use one of {', '.join(POLICIES)}"),
        ({"micro_batches": 0}, "micro_batches is 0; it must be at least 1"),
        ({"devices": []}, "number of stages is 0; it must be at least 1"),
        ({"devices": [[0], []]}, "stage 1 has no devices; give it at least one"),
        ({"devices": [[0], [1], [0]]}, "but dapple_a wants all stages of a device next to each other and with one"),
        ({"devices": [[0, 1], [1]]}, "device 1 stands in stage 0 on devices [0, 1] and in stage 1 on [1], but"),
        ({"devices": [[0], [1, 1]]}, "device 1 stands twice, in stage 1; a device runs one replica of a stage"),
        ({"reverse_first_k": 3}, "reverse_first_k is 3; with 2 stages it must be from 0 to 2"),
        ({"policy": "interleaved", "reverse_first_k": 1}, "but interleaved doesn't split backwards"),
        ({"task_seconds": [[1, 1, 1]]}, "task_seconds has 1 entries for 2 stages; give one for each"),
        ({"task_seconds": [[1, 1, 1], [1, -1, 1]]}, "task_seconds of stage 1 is [1, -1, 1]; give the times of F, Bx"),
        ({"devices": [[0], [0]], "warm_up": [2, 1]}, "warm_up falls from 2 at stage 0 to 1 at stage 1, but both run"),
        ({"holds": [4]}, "holds has 1 entries for 2 stages; give one for each stage"),
        ({"holds": [4, 0]}, "holds of stage 1 is 0; it must be at least 1"),
        ({"warm_up": [2, 1, 1]}, "warm_up has 3 entries for 2 stages; give one for each stage"),
        ({"warm_up": [2, 0]}, "warm_up of stage 1 is 0; it must be at least 1"),
        ({"warm_up": [3, 1], "holds": [2, 2]}, "warm_up of stage 0 is 3, but its devices hold 2 micro-batches; lower"),
        ({"warm_up": [1, 2]}, "stage 0 gives only 1 before it needs that backward. Lower stage 1 to 1 or raise stage"),
        ({"policy": "gpipe", "warm_up": [4, 4]}, "warm_up [4, 4] is given for gpipe, which always runs all 4 forwards"),
        ({"policy": "gpipe", "holds": [4, 3]}, "gpipe keeps all 4 micro-batches in flight, but stage 1 holds 3; use"),
    ],
)
def test_impossible_schedules_are_refused(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"policy": "dapple_a", "devices": [[0], [1]], "micro_batches": 4} | arguments
    with pytest.raises(ScheduleError) as caught:
        make_schedule(**given)
    assert message in str(caught.value)
    if "task_seconds" not in arguments:
        policy, micro_batches = given.pop("policy"), given.pop("micro_batches")
        with pytest.raises(ScheduleError) as caught:
            resolve_warm_up(policy, len(given["devices"]), micro_batches, **given)
        assert message.removeprefix("number of ") in str(caught.value)


# --- sweeps ---


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
        options["warm_up"] = [draw.randint(1, room) for room in options.get("holds", [6] * len(devices))]
    if draw.random() < 0.5:
        options["task_seconds"] = [[draw.choice([0, 1, draw.random()]) for _ in range(3)] for _ in devices]
    if draw.random() < 0.4 and policy != "interleaved":
        options["reverse_first_k"] = draw.randint(0, len(devices))
    return options


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_legal_schedules_within_its_limits(policy: str) -> None:
    for number in range(8):
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
            assert all(task.phase is BW and task.micro_batch == micro_batches - 1 for task in late)
        forward = make_schedule(policy, devices, micro_batches, forward_only=True, active=active)
        validate(forward, devices, micro_batches, forward_only=True, active=active)
        assert forward.name == "forward" and in_micro_batch_order(forward)


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


def test_a_deadlock_text_names_devices_that_are_done_and_all_replicas() -> None:
    crossed = Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1 1F0 1B0\n2: 0F0.r1 0F1.r1 0B0.r1 0B1.r1")
    with pytest.raises(ScheduleError) as caught:
        validate(crossed, [[0, 2], [1]], 2)
    assert str(caught.value).splitlines()[1:] == [
        "step      0       1",
        "device 0  0F0     .       -> 0B0 waits for 1B0 on device 1",
        "device 1  .       .       -> 1F1 waits for 0F1 on device 0",
        "device 2  0F0.r1  0F1.r1  -> 0B0.r1 waits for 1B0 on device 1",
    ]
    stuck = Schedule.parse("0: 0B0 0F0\n1: 1F0 1B0\n2: 1F0.r1 1B0.r1")
    with pytest.raises(
        ScheduleError, match=r"device 0  -> 0B0 waits for 0F0 on device 0, 1B0 on device 1, 1B0.r1 on device 2"
    ):
        lockstep(stuck)


def test_a_long_deadlock_shows_the_last_steps_only() -> None:
    warm = make_schedule("dapple_a", [[0], [1]], 40)
    late = [Task(0, F, 30), Task(0, B, 30)]  # after every other backward
    first = [*(task for task in warm.orders[0] if task not in late), *late]
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("long", {0: tuple(first), 1: warm.orders[1]}), [[0], [1]], 40)
    header, *lines = str(caught.value).splitlines()[1:]
    assert len(header.split()) == 13 and int(header.split()[1]) > 40
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("0F0 0B0 0F1 0B1", "1F0 1B0 1F1", "no device runs 1B1; add it to device 1"),
        ("0F0 0Bx0 0F1 0Bx1 0Bw0", "1F0 1B0 1F1 1B1", "no device runs 0Bw1; add it to device 0"),
        ("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1 1B1", "device 1 runs 1B1 2 times; it must run once"),
        ("0F0 0B0 0F1 0B1 1F0", "1B0 1F1 1B1", "device 0 runs 1F0, which belongs on device 1; move it"),
        ("0F0 0B0 0F1 0B1 0F2", "1F0 1B0 1F1 1B1", "device 0 runs 0F2, which isn't a task of this step of 8 tasks"),
        ("0F0 0B0 0F1 0Bx1", "1F0 1B0 1F1 1B1", "device 0 runs 0B0, but other backwards of stage 0 are split; give"),
        ("0F0 0Bw0 0Bx0 0F1 0Bx1 0Bw1", "1F0 1B0 1F1 1B1", "0Bw0 before 0Bx0; a weight gradient needs its Bx first"),
        ("0F0 0F1 0Bx0 0Bx1 0Bw1 0Bw0", "1F0 1B0 1F1 1B1", "0Bw0 after 0Bw1; weight gradients are added up in micro"),
        ("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1", "0B0 after 0B1; weight gradients are added up in micro-batch order"),
        ("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1", "device 0 runs 0B1 before 0F1; a backward needs its forward first"),
        ("0F0 0B0 0F1 0B1", "1F0 1Bx0 1F1 1Bx1 1Bw0 1Bw1", "2 micro-batches in flight after 1F1, but stage 1 holds 1"),
        ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2 micro-batches in flight after 1F1, but stage 1 holds 1; run a back"),
    ],
)
def test_a_wrong_schedule_is_refused_with_its_task_and_device(first: str, second: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.parse(f"0: {first}\n1: {second}"), [[0], [1]], 2, holds=[2, 1])
    assert message in str(caught.value)


def test_a_training_schedule_is_no_forward_only_schedule() -> None:
    with pytest.raises(ScheduleError, match="device 0 runs 0B0, which isn't a task of this step of 2 tasks"):
        validate(make_schedule("gpipe", [[0]], 2), [[0]], 2, forward_only=True)


def test_the_example_in_the_documentation_is_true() -> None:
    assert doctest.testmod(schedules) == (0, 2)
