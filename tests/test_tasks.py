"""Tasks and schedules as data: text forms, order and equality."""

import copy
import itertools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_runs import there_and_back

from dapple_tf.schedules.schedules import POLICIES, make_schedule
from graph_passes.ir.tasks import Phase, Schedule, Task

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD

TEXT = """\
0: 0F0 0F1 0B0 0B1
1: 1F0 1B0 1F1 1B1
2: 1F0.r1 1B0.r1
5:"""


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Task(2, F, 0), "2F0"),
        (Task(0, B, 13), "0B13"),
        (Task(2, F, 0, replica=1), "2F0.r1"),
        (Task(10, BX, 3), "10Bx3"),
        (Task(1, BW, 4, replica=12), "1Bw4.r12"),
    ],
)
def test_a_task_prints_in_the_text_form_and_parses_back(task: Task, text: str) -> None:
    assert str(task) == text
    assert Task.parse(text) == task


def test_every_small_task_has_its_own_text_that_parses_back() -> None:
    numbers = range(3)
    tasks = [Task(*fields) for fields in itertools.product(numbers, Phase, numbers, numbers)]
    assert [Task.parse(str(task)) for task in tasks] == tasks
    assert len({str(task) for task in tasks}) == len(tasks)


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "2F0.r", "2F0.c1", "2F0>1F0", "2F0 ", "-1F0", "2F0.x1", "٢F0"]
)
def test_a_text_that_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="isn't a task; write <stage><phase><micro-batch>") as caught:
        Task.parse(text)
    assert repr(text) in str(caught.value)


def test_a_negative_number_in_a_task_is_refused() -> None:
    with pytest.raises(ValueError, match="task's replica is -1; it must be 0 or more"):
        Task(0, F, 0, replica=-1)


def test_tasks_sort_by_stage_then_phase_then_micro_batch() -> None:
    expected = [*Schedule.parse("0: 0F0 0F1 0B0 0Bx0 0Bw0 1F0 1F0.r1 1B0").tasks]
    assert sorted(reversed(expected)) == expected
    assert Task(0, F, 0) <= Task(0, B, 0) and Task(0, B, 0) > Task(0, F, 5)


def test_a_phase_compares_with_phases_only() -> None:
    with pytest.raises(TypeError):
        _ = F < "F"


def test_a_schedule_prints_a_line_for_each_device_and_parses_back() -> None:
    schedule = Schedule.parse(TEXT, name="mine")
    assert str(schedule) == TEXT
    assert Schedule.parse(str(schedule), name="mine") == schedule
    assert schedule.orders[0] == (Task(0, F, 0), Task(0, F, 1), Task(0, B, 0), Task(0, B, 1))
    assert schedule.orders[5] == ()


def test_equal_schedules_have_equal_hashes_whatever_the_order_of_their_devices() -> None:
    schedule = Schedule.parse(TEXT)
    backwards = Schedule("parsed", dict(sorted(schedule.orders.items(), reverse=True)))
    assert schedule == backwards
    assert hash(schedule) == hash(backwards)
    assert schedule != Schedule.parse(TEXT, name="another")
    assert schedule != Schedule.parse("0: 0F0")


def test_a_schedule_copies_and_pickles() -> None:
    schedule = Schedule.parse(TEXT)
    assert copy.deepcopy(schedule) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_a_schedule_does_not_change_with_the_dict_it_was_made_from() -> None:
    orders = {0: [Task(0, F, 0)]}
    schedule = Schedule("mine", orders)  # type: ignore[arg-type]
    orders[0].append(Task(0, B, 0))
    orders[1] = []
    assert str(schedule) == "0: 0F0"
    with pytest.raises(TypeError):
        schedule.orders[1] = ()  # type: ignore[index]


def test_a_stage_with_bx_or_bw_is_split() -> None:
    assert Schedule.parse(TEXT).split == frozenset()
    assert Schedule.parse("0: 0F0 0B0 2F0 2Bx0\n1: 1F0 1Bx0 1Bw0").split == {1, 2}


def test_tasks_are_listed_device_by_device() -> None:
    schedule = Schedule.parse("1: 1F0 1B0\n0: 0F0 0B0")
    assert [str(task) for task in schedule.tasks] == ["0F0", "0B0", "1F0", "1B0"]


def test_device_of_finds_the_device_or_says_that_there_is_none() -> None:
    schedule = Schedule.parse(TEXT, name="mine")
    assert schedule.device_of(Task(1, B, 0, replica=1)) == 2
    with pytest.raises(
        LookupError, match=r"no device runs 1F1\.r1 in schedule 'mine', which has 10 tasks on 4 devices"
    ):
        schedule.device_of(Task(1, F, 1, replica=1))


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


def placements(policy: str, stages: int, replicas: int) -> list[list[int]]:
    """Devices on which a policy runs, each stage with so many replicas."""
    vee = there_and_back(policy)
    positions = max(2, stages) if vee or policy == "interleaved" else stages
    straight = [[position * replicas + replica for replica in range(replicas)] for position in range(positions)]
    if vee:
        return straight + straight[::-1]
    return straight * 2 if policy == "interleaved" else straight


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_schedules_of_every_policy_parse_back(policy: str, data: st.DataObject) -> None:
    stages, replicas, count = (data.draw(st.integers(1, most)) for most in (4, 3, 7))
    devices = placements(policy, stages, replicas)
    options: dict[str, Any] = {}
    if policy in ("gpipe", "dapple_a"):
        options["reverse_first_k"] = data.draw(st.integers(0, stages))
    left_out = data.draw(st.none() | st.tuples(st.integers(0, stages - 1), st.integers(0, replicas - 1)))
    active = None if left_out is None else lambda *slice_: slice_ != (left_out[0], count - 1, left_out[1])
    schedule = make_schedule(policy, devices, count, active=active, **options)
    again = Schedule.parse(str(schedule), policy)
    assert again == schedule and str(again) == str(schedule) and hash(again) == hash(schedule)
