"""The CSV form of torch.distributed.pipelining: facts of that project, round trips and errors."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hardware import cluster_of, profile_of
from schedule_runs import straight, there_and_back, vee

import dapple_tf as dapple
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.schedules import schedule_csv
from dapple_tf.schedules.schedule_check import lockstep
from dapple_tf.schedules.schedule_csv import csv_policy, from_csv, to_csv
from dapple_tf.schedules.schedules import POLICIES, ScheduleError, make_schedule
from graph_passes.ir.tasks import Schedule, Task


def lines(schedule: Schedule) -> list[str]:
    return str(schedule).splitlines()


def looped(ranks: int, stages: int) -> list[list[int]]:
    """Stage i on rank i modulo their number."""
    return [[stage % ranks] for stage in range(ranks * stages)]


# --- that project's schedules, by the rules that its documentation and code state ---


# Written out: a warm-up of forwards, one backward and one forward in turn, and the remaining backwards; interleaved,
# in rounds of as many micro-batches as ranks; with zero bubble a rank's W follow its I by as many as its number.
THEIRS = {
    ("gpipe", 1): """\
0F0,0F1,0F2,0B0,0B1,0B2
1F0,1F1,1F2,1B0,1B1,1B2
""",
    ("dapple_a", 1): """\
0F0,0F1,0F2,0F3,0B0,0F4,0B1,0F5,0B2,0B3,0B4,0B5
1F0,1F1,1F2,1B0,1F3,1B1,1F4,1B2,1F5,1B3,1B4,1B5
2F0,2F1,2B0,2F2,2B1,2F3,2B2,2F4,2B3,2F5,2B4,2B5
3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,3F4,3B4,3F5,3B5
""",
    ("interleaved", 2): """\
0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3
""",
    ("zb_h1", 1): """\
0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0F4,0I2,0W2,0F5,0I3,0W3,0I4,0W4,0I5,0W5
1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1F4,1I3,1W2,1F5,1I4,1W3,1I5,1W4,1W5
2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2F4,2I4,2W2,2F5,2I5,2W3,2W4,2W5
""",
}


@pytest.mark.parametrize(("policy", "local"), THEIRS)
def test_our_schedules_are_theirs(policy: str, local: int) -> None:
    text = THEIRS[policy, local]
    schedule = make_schedule(policy, looped(text.count("\n"), local), 1 + max(map(int, re.findall(r"F(\d)", text))))
    assert to_csv(schedule) == text
    assert from_csv(text, policy) == schedule


def test_the_table_of_1f1b_with_two_ranks() -> None:
    """Their table has a column for each action, and None while a rank waits: the same order, its last F later."""
    table = "0F0,,,0F1,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2,,\n"
    assert lines(from_csv(table)) == lines(make_schedule("dapple_a", straight(2), 3))
    aligned = "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2,\n"
    assert to_csv(make_schedule("dapple_a", straight(2), 3), aligned=True) == aligned


# --- reading ---


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            "0UNSHARD,0F0,0SEND_F0,,0F1,0SEND_F1, 0RECV_B0 ,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
            "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,,,1REDUCE_GRAD\n",
            ["0: 0F0 0F1 0B0 0B1", "1: 1F0 1B0 1F1 1B1"],
            id="communication and sharding are left out",
        ),
        pytest.param(  # Both kinds of backwards in a stage, as in ScheduleDualPipeV.
            "0F0,0F1,1F0,1I0,1W0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\n",
            ["0: 0F0 0F1 1F0 1Bx0 1Bw0 1F1 0Bx0 0Bw0 1Bx1 1Bw1 0Bx1 0Bw1"],
            id="overlapping tasks follow each other",
        ),
        ("(0F0 ; )OVERLAP_F_B,()OVERLAP_F_B", ["0: 0F0"]),
        pytest.param("0F0,0F1,0B0,0W0,0BW1\n", ["0: 0F0 0F1 0Bx0 0Bw0 0Bx1 0Bw1"], id="files from before I"),
        ("0F0,0BW0\n", ["0: 0F0 0B0"]),
        ("\n\n", []),
        ("0F0\n\n1F0\n", ["0: 0F0", "1:", "2: 1F0"]),
        ('0F0\n""\n', ["0: 0F0", "1:"]),
        ("0F0\r\n1F0\r\n\r\n", ["0: 0F0", "1: 1F0"]),
        ("\ufeff0F0,0B0", ["0: 0F0 0B0"]),
    ],
)
def test_files_are_read(rows: str, expected: list[str]) -> None:
    assert lines(from_csv(rows)) == expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0\n1F0,1G0\n", "row 2, column 2: '1G0' isn't an action; write <stage><F, B, I or W><micro-batch>, such as"),
        ("0F", "row 1, column 1: '0F' isn't an action"),
        *(
            (cell, f"row 1, column 1: '{cell}' isn't an")
            for cell in ("0F0x", "0F0 0F1", "F0", "-1F0", "\u0662F0", "0Bx0")
        ),
        ("9999999999F0", "isn't an action"),
        ("0F0,(0F1;0X0)OVERLAP_F_B", "row 1, column 2: '(0F1;0X0)OVERLAP_F_B' isn't an action"),
        ("(0F1;1B0)", "'(0F1;1B0)' isn't an action"),
        ("0F0,0F1,0F0", "row 1, column 3: '0F0' is 0F0, which row 1, column 1: '0F0' is already; a task runs once"),
        ("0F0,0I0,0B0,0W0", "row 1, column 3: '0B0' is 0Bx0, which row 1, column 2: '0I0' is already"),
        ("0F0\n1F0,0B0", "row 2, column 2: '0B0' is of a stage that row 1, column 1 has on device 0; keep it on one"),
        ('0F0,"0F1\x00' + "0" * 200_000, "the text isn't CSV: field larger than field limit"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(rows: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_csv(rows)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


# --- writing ---


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (make_schedule("dapple_a", [[0, 1], [2]], 2), "device 1 runs 0F0.r1, of another replica than the first; in"),
        (Schedule.parse("0: 0F0\n2: 1F0"), "the schedule is for devices [0, 2], but rows are ranks 0 to 1; number"),
    ],
)
def test_schedules_that_the_form_cannot_say_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        to_csv(schedule)
    assert message in str(caught.value)


def test_a_schedule_that_deadlocks_is_written_but_not_aligned() -> None:
    schedule = Schedule.parse("0: 0B0 0F0\n1: 1B0 1F0")
    assert to_csv(schedule) == "0B0,0F0\n1B0,1F0\n"
    stuck = Schedule.parse("0: 0B0 0F0\n1: 1F0 1B0")
    assert lines(from_csv(to_csv(stuck))) == lines(stuck)
    with pytest.raises(ScheduleError, match="deadlocks after 0 of 4 tasks"):
        to_csv(stuck, aligned=True)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("positions", [2, 4])
def test_schedules_of_every_policy_read_back(policy: str, positions: int) -> None:
    devices = vee(positions) if there_and_back(policy) else straight(positions)
    if policy in ("modulo", "interleaved"):
        devices = looped(positions, 2)
    first = 1 if policy in ("gpipe", "dapple_a") else 0
    for count in (1, 2 * positions + 1):
        schedule = make_schedule(policy, devices, count, reverse_first_k=first)
        assert from_csv(to_csv(schedule), policy) == schedule
        aligned = to_csv(schedule, aligned=True)
        assert from_csv(aligned, policy) == schedule
        table = [row.split(",") for row in aligned.splitlines()]
        assert len({len(row) for row in table}) == 1
        assert all(any(column) for column in zip(*table, strict=True))
        forward = make_schedule(policy, devices, count, forward_only=True)
        assert from_csv(to_csv(forward), "forward") == forward


def test_devices_without_tasks_keep_their_rows() -> None:
    schedule = Schedule("mine", {0: (), 1: Schedule.parse("1: 0F0").tasks, 2: ()})
    assert to_csv(schedule) == '""\n0F0\n""\n'
    assert from_csv(to_csv(schedule), "mine") == schedule
    assert from_csv(to_csv(schedule, aligned=True), "mine") == schedule
    assert to_csv(Schedule("none", {})) == "" and from_csv("", "none") == Schedule("none", {})


def test_lockstep_runs_each_task_in_the_first_step_that_its_inputs_allow() -> None:
    steps = lockstep(make_schedule("dapple_a", straight(2), 2))
    expected = [("0F0", None), ("0F1", "1F0"), (None, "1B0"), ("0B0", "1F1"), (None, "1B1"), ("0B1", None)]
    pairs = [tuple(None if (task := step.get(device)) is None else str(task) for device in (0, 1)) for step in steps]
    assert pairs == expected and isinstance(steps[0][0], Task)


def test_the_examples_in_the_docstrings_run() -> None:
    assert doctest.testmod(schedule_csv).failed == 0


def csv_file(folder: Path, text: str | None = None) -> Path:
    path = folder / "mine.csv"
    path.write_text(to_csv(make_schedule("zb_h1", straight(3), 4)) if text is None else text)
    return path


# --- as the schedule of a plan


PROFILE = profile_of(6)


def plan_of(schedule: Any) -> Plan:
    return Plan.manual(["layer_1", "layer_3"], [[0], [1, 2], [3]], 4, 8, schedule)


def test_a_csv_file_is_a_schedule(tmp_path: Path) -> None:
    plan = plan_of(csv_policy(csv_file(tmp_path)))
    assert plan == plan_of(str(tmp_path / "mine.csv"))
    assert plan.order_tasks().orders == plan_of("zb_h1").order_tasks().orders
    assert plan.split_backward_stages == {0, 1, 2} and "schedule mine.csv" in str(plan)
    fewer = plan.order_tasks(2)
    assert str(fewer).splitlines()[3] == "3: 2F0 2Bx0 2F1 2Bx1 2Bw0 2Bw1"
    simulated = dapple.simulate(plan, PROFILE, cluster_of(4))
    assert simulated.latency == dapple.simulate(plan_of("zb_h1"), PROFILE, cluster_of(4)).latency


def test_a_csv_files_path_stands_in_a_plans_file(tmp_path: Path) -> None:
    (tmp_path / "schedules").mkdir()
    plan = plan_of(str(csv_file(tmp_path / "schedules")))
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["schedule"] == "schedules/mine.csv"
    assert Plan.load(tmp_path / "plan.json") == plan
    (tmp_path / "elsewhere").mkdir()
    plan.save(tmp_path / "elsewhere" / "plan.json")
    assert Plan.load(tmp_path / "elsewhere" / "plan.json") == plan == Plan.from_json(plan.to_json())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,what", r"row 1, column 2: 'what' isn't an action"),
        ("0F0,0B0\n1F0,1B0", r"mine.csv has 2 stages, but there are 3; cut the model into 2"),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0", r"mine.csv has 1 micro-batch, but there are 4; use at most 1"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0,2F3", r"mine.csv has stages 0 and 1, which are on devices \[0\] and \[1, 2\]"),
        ("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F3,1B3\n2F0", r"no device runs 1F0; add it to device 1"),
        ("", r"mine.csv. has no tasks"),
    ],
)
def test_a_wrong_csv_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_of(str(csv_file(tmp_path, text)))


def test_a_csv_file_that_isnt_one(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for path, text in {
        tmp_path / "missing.csv": r"missing.csv' can't be read: No such file",
        tmp_path / "folder.csv": r"folder.csv': it isn't a file",
        "\0.csv": "csv",
        "x" * 5000 + ".csv": "csv",
    }.items():
        with pytest.raises(PlanError, match=text):
            plan_of(str(path))
    with pytest.raises(ScheduleError, match=r"isn't a CSV file's path; give one that ends in \.csv"):
        csv_policy(tmp_path / "plan.json")
    rows = to_csv(make_schedule("dapple_a", straight(2), 4))
    with pytest.raises(PlanError, match=r"rows 1 and 2 of mine.csv are both for device 0"):
        Plan.manual(["a"], [[0], [0]], 4, 8, str(csv_file(tmp_path, rows)))
