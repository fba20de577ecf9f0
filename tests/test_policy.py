"""Policies as values: the built-in ones, one's own, and what stands for them in a plan's file."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hardware import cluster_of, profile_of
from schedule_runs import straight

import dapple_tf as dapple
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.planner import plan as find_plan
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.schedules.policy import Placement, Planning, Policy
from dapple_tf.schedules.policy_names import own_policy
from dapple_tf.schedules.schedule_csv import csv_policy, to_csv
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleRequest
from dapple_tf.schedules.schedules import POLICIES, ScheduleError, make_schedule, policy_of
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.planned import planned
from dapple_tf.tools.evaluation.check_simulator import pipeline
from dapple_tf.view.text import timeline_text
from graph_passes.ir.tasks import Phase

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD
ROOT = Path(__file__).resolve().parent.parent


def run_ahead(request: ScheduleRequest) -> Orders:
    """1F1B in which every stage but the last begins with one forward more."""
    orders: Orders = {}
    for stage, devices in enumerate(request.devices):
        left = request.stages - stage
        ahead = request.limit(stage, left + (left > 1))
        numbers = range(request.micro_batches)
        jobs = [Job(stage, F, number) for number in numbers[:ahead]]
        for number in numbers:
            jobs += [Job(stage, B, number)] + [Job(stage, F, later) for later in numbers[number + ahead :][:1]]
        orders |= {device: jobs for device in devices}
    return orders


RUN_AHEAD = Policy("run_ahead", run_ahead, planning=Planning(rank=1000))


def split_first(request: ScheduleRequest) -> Orders:
    """Each micro-batch by itself, with the backward of stage 0 split."""
    phases = {stage: (F, BX, BW) if stage == 0 else (F, B) for stage in range(request.stages)}
    return {
        device: [Job(stage, phase, number) for number in range(request.micro_batches) for phase in phases[stage]]
        for stage, devices in enumerate(request.devices)
        for device in devices
    }


SPLIT_FIRST = Policy("split_first", split_first)
PROFILE = profile_of(6)
CUTS = ["layer_1", "layer_3"]


def plan_of(schedule: str | Policy, micro_batches: int = 4, **options: object) -> Plan:
    return Plan.manual(CUTS, [[0], [1, 2], [3]], micro_batches, 8, schedule, **options)  # type: ignore[arg-type]


# ---- the built-in ones


def test_built_in_policies_have_names_and_summaries_of_their_own() -> None:
    assert len({policy.name for policy in BUILT_IN}) == len({policy.summary for policy in BUILT_IN}) == len(BUILT_IN)
    for policy in BUILT_IN:
        assert policy_of(policy.name) is policy is policy_of(policy) and str(policy) == policy.name
        assert policy.summary and "\n" not in policy.summary and policy.summary[-1] not in ".;"
        assert policy.source is None


def test_ranks_order_policies_and_no_placement_is_in_doubt() -> None:
    assert all(policy.planning.placements for policy in BUILT_IN)
    assert len({policy.planning.rank for policy in BUILT_IN}) == len(BUILT_IN)
    assert Placement.STRAIGHT.stages("ab", 1) == ["a", "b"] and Placement.STRAIGHT.stages("ab", 2) is None
    assert Placement.PERIODIC.stages("ab", 2) == ["a", "b", "a", "b"] and Placement.PERIODIC.stages("ab", 1) is None
    assert Placement.VEE.stages("ab", 2) == ["a", "b", "b", "a"] and Placement.VEE.stages("ab", 3) is None


def test_flags_say_what_orders_do() -> None:
    for policy in BUILT_IN:
        devices = straight(3)
        if policy.planning.placements == (Placement.VEE,):
            devices = devices + devices[::-1]
        split = make_schedule(policy, devices, 4).split
        assert split == (frozenset(range(len(devices))) if policy.splits else frozenset())
        if policy.reverses:
            assert 0 in make_schedule(policy, devices, 4, reverse_first_k=1).split
        else:
            with pytest.raises(ScheduleError, match="doesn't split backwards"):
                make_schedule(policy, devices, 4, reverse_first_k=1)
        if policy.needs_all:
            with pytest.raises(ScheduleError, match="keeps all 4 micro-batches in flight"):
                make_schedule(policy, devices, 4, holds=[2] * len(devices))


def test_a_plan_has_the_times_by_which_its_policy_orders_tasks() -> None:
    for policy in BUILT_IN:
        if policy.planning.by_seconds:
            continue
        devices = straight(3)
        if policy.planning.placements == (Placement.VEE,):
            devices = devices + devices[::-1]
        even, odd = [[1, 1, 1]] * len(devices), [[1, 4, 1]] * (len(devices) - 1) + [[9, 9, 9]]
        orders = {str(make_schedule(policy, devices, 4, task_seconds=seconds)) for seconds in (even, odd)}
        assert len(orders) == 1, policy.name


@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulators_check_has_a_pipeline_for_every_policy(policy: str) -> None:
    plan, profile, cluster = pipeline(4, 5, policy, [2, 1], 0.1)
    assert dapple.simulate(plan, profile, cluster).latency > 0


NAMES = "|".join(policy.name for policy in BUILT_IN)


def test_no_policy_is_known_by_its_name_outside_schedules() -> None:
    """Whoever adds a policy then touches its file and the tuple: comparisons and tables of names are refused."""
    compared = re.compile(rf"""(==|!=|\bin\b|\{{|:)\s*\(?["']({NAMES})["']|["']({NAMES})["']\s*(==|!=|\bin\b|:)""")
    for package in ("planning", "describe", "simulation", "measuring", "execution", "view", "variables", "tracing"):
        for path in (ROOT / "dapple_tf" / package).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                assert not compared.search(line), f"{path}: {line}"


def test_the_document_lists_every_policy() -> None:
    text = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    assert [policy.name for policy in BUILT_IN if f"`{policy.name}`" not in text] == []


# ---- one's own


def test_an_own_policy_is_checked_simulated_and_drawn() -> None:
    plan = plan_of(RUN_AHEAD)
    assert plan.warm_up_counts() == (4, 3, 1)
    assert str(plan.order_tasks()).splitlines()[0] == "0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert "schedule run_ahead" in str(plan) and plan._repr_html_()
    step = dapple.simulate(plan, PROFILE, cluster_of(4, memory=2**30))
    assert step.latency > 0 and step.fits
    assert "0" in timeline_text([step.drawn("run_ahead"), planned(plan)])
    assert dataclasses.replace(plan, micro_batches=2).schedule == RUN_AHEAD
    assert plan == plan_of(RUN_AHEAD) and hash(plan) == hash(plan_of(RUN_AHEAD)) and plan != plan_of("dapple_a")
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_an_own_policy_is_emulated() -> None:
    plan, profile, cluster = pipeline(2, 3, RUN_AHEAD, [1], 0.0)
    step = dapple.emulate(plan, profile, cluster, steps=1)
    assert step.order.orders == plan.order_tasks().orders
    assert str(step.order).splitlines()[0] == "0: 0F0 0F1 0F2 0B0 0B1 0B2"


def test_a_built_in_policy_is_its_name() -> None:
    assert plan_of(policy_of("zb_h1")).schedule == "zb_h1"
    assert plan_of(policy_of("zb_h1")) == plan_of("zb_h1")
    assert pickle.loads(pickle.dumps(plan_of("zb_h1"))).policy is policy_of("zb_h1")


@pytest.mark.parametrize("policy", BUILT_IN, ids=str)
def test_copies_of_a_policy_are_equal_to_it(policy: Policy) -> None:
    """Those whose functions are bound to options, too: copies of functools.partial aren't equal by themselves."""
    for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert copied == policy and hash(copied) == hash(policy)
    assert policy != dataclasses.replace(policy, name="another")
    assert [other.name for other in BUILT_IN if other == policy] == [policy.name]
    assert own_policy(copy.deepcopy(policy)) == policy.name


def test_memory_and_options_are_asked_of_an_own_policy() -> None:
    plan = plan_of(RUN_AHEAD)
    assert plan.order_tasks(holds=[2, 2, 1]).orders[0] == plan_of("dapple_a", warm_up=[2, 2, 1]).order_tasks().orders[0]
    assert plan_of(RUN_AHEAD, warm_up=[2, 1, 1]).warm_up_counts() == (2, 1, 1)
    costs = CostModel(plan_of(SPLIT_FIRST), PROFILE, cluster_of(4))
    assert [costs.delays(stage) for stage in range(3)] == [True, False, False]
    last = plan_of(SPLIT_FIRST, reverse_first_k=1).order_tasks().orders[0][-1]
    assert str(last) == "0Bw3"
    with pytest.raises(PlanError, match="split_first doesn't split the backward of stage 1; set it to at most 1"):
        plan_of(SPLIT_FIRST, reverse_first_k=2)


def backwards_first(request: ScheduleRequest) -> Orders:
    return {device: [Job(0, B, 0), Job(0, F, 0)] for device in request.devices[0]}


def of_another(request: ScheduleRequest) -> Orders:
    return {request.devices[0][0]: [Job(2, F, 0)]}


def too_many(request: ScheduleRequest) -> Orders:
    return make_orders(request, request.micro_batches)


def make_orders(request: ScheduleRequest, ahead: int) -> Orders:
    numbers = range(request.micro_batches)
    return {
        device: [Job(stage, phase, number) for phase in (F, B) for number in numbers]
        for stage, devices in enumerate(request.devices)
        for device in devices
    }


def test_an_own_policy_with_a_wrong_order_is_refused_when_the_plan_is_made() -> None:
    with pytest.raises(PlanError, match=r"device 0 runs 0B0 before 0F0; a backward needs its forward first"):
        Plan.data_parallel(1, 8, schedule=Policy("wrong", backwards_first))
    with pytest.raises(PlanError, match=r"^schedule 'wrong': device 0 runs 0B0"):
        Plan.data_parallel(1, 8, schedule=Policy("wrong", backwards_first))
    with pytest.raises(PlanError, match=r"wrong has device 0 run 2F0, but stages are 0 to 0"):
        Plan.data_parallel(1, 8, schedule=Policy("wrong", of_another))
    with pytest.raises(PlanError, match=r"wrong has device 0 run 2F0, but stage 2 is on \[3\]; give each stage"):
        plan_of(Policy("wrong", of_another))
    with pytest.raises(PlanError, match=r"device 0 has 3 micro-batches in flight after 0F2, but stage 0 holds 2"):
        plan_of(Policy("greedy", too_many), warm_up=[2, 2, 2])
    with pytest.raises(PlanError, match="a built-in schedule is called gpipe too; give yours another name"):
        plan_of(Policy("gpipe", too_many))
    for name in ("", "a:b", "a/b", 3):
        with pytest.raises(ScheduleError, match="give a text without a colon and slashes"):
            Policy(name, too_many)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (None, "policy wrong returned None; let it return a dict: device -> its jobs"),
        ([Job(0, F, 0)], r"policy wrong returned \[Job"),
        ({0: Job}, "policy wrong gives device 0 <class .*; give a list of its jobs"),
        ({0: iter(())}, "policy wrong gives device 0 <.*; give a list of its jobs"),
        ({0: [(0, F, 0)]}, r"policy wrong has \(0, .* among the jobs of device 0; give each as Job\(stage"),
        ({0: [Job(0, "F", 0)]}, r"policy wrong has Job\(.* among the jobs of device 0"),  # type: ignore[arg-type]
    ],
)
def test_what_an_own_policy_returns_is_checked(made: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Plan.data_parallel(1, 8, schedule=Policy("wrong", lambda request: made))


def test_an_own_policy_that_fails_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        plan_of(Policy("failing", lambda request: 1 // 0))  # type: ignore[arg-type, return-value]
    assert caught.value.__notes__ == ["in the schedule failing, of 4 micro-batches on ((0,), (1, 2), (3,))"]


def test_checks_raise_and_dont_answer() -> None:
    for answer in (False, "too many stages"):
        own = dataclasses.replace(RUN_AHEAD, check=lambda request, answer=answer: answer)
        with pytest.raises(PlanError, match=f"check of policy run_ahead returned {answer!r}; let it raise a Schedule"):
            plan_of(own)


def test_policies_are_made_of_functions() -> None:
    with pytest.raises(ScheduleError, match="order of policy mine is None; give a function of a request"):
        Policy("mine", None)  # type: ignore[arg-type]
    for name in ("check", "in_flight"):
        with pytest.raises(ScheduleError, match=f"{name} of policy mine is 3; give a function of a request"):
            Policy("mine", run_ahead, **{name: 3})  # type: ignore[arg-type]
    for make in (lambda: plan_of(run_ahead), lambda: find_plan(PROFILE, cluster_of(2), 8, schedule=run_ahead)):  # type: ignore[arg-type]
        with pytest.raises(
            PlanError, match=r"the schedule is the function run_ahead; wrap it: dapple.Policy\('run_ahead', run_ahead\)"
        ):
            make()


def test_an_own_policys_module_and_name_stand_for_it_where_the_module_is_imported() -> None:
    named = f"{__name__}:RUN_AHEAD"
    assert plan_of(named) == plan_of(RUN_AHEAD) and plan_of(named).schedule is RUN_AHEAD
    cluster = cluster_of(1, 1, inter_bandwidth=1e10)
    assert find_plan(PROFILE, cluster, 8, micro_batches=4, schedule=named).schedule == RUN_AHEAD
    for make in (plan_of, lambda schedule: find_plan(PROFILE, cluster, 8, schedule=schedule)):
        with pytest.raises(PlanError, match="'nowhere:MINE' is of a module that isn't imported; import its module, or"):
            make("nowhere:MINE")
        with pytest.raises(PlanError, match="isn't a Policy of that module; import its module, or give the policy"):
            make(f"{__name__}:PROFILE")


def test_a_straight_plan_refuses_devices() -> None:
    with pytest.raises(PlanError, match=r"stage i on device i; choose devices by Plan.manual\(cuts, devices, ...\)"):
        Plan.straight(CUTS, 8, 4, devices=[[0], [1], [2]])  # type: ignore[call-arg]


def test_the_planner_takes_own_policies() -> None:
    chosen = find_plan(PROFILE, cluster_of(1, 1, inter_bandwidth=1e10), 8, schedule=[RUN_AHEAD, "gpipe"])
    assert chosen.policy in (RUN_AHEAD, policy_of("gpipe"))
    alone = find_plan(PROFILE, cluster_of(1, 1, inter_bandwidth=1e10), 8, micro_batches=4, schedule=RUN_AHEAD)
    assert alone.schedule == RUN_AHEAD and alone.report is not None
    assert "run_ahead" in str(alone)
    with pytest.raises(PlanError, match="a built-in schedule is called gpipe too"):
        find_plan(PROFILE, cluster_of(2), 8, schedule=Policy("gpipe", too_many))


def one_by_one(request: ScheduleRequest) -> Orders:
    """Each micro-batch by itself, there and back, whatever devices have which stages."""
    return {
        device: [
            Job(stage, phase, number)
            for number in range(request.micro_batches)
            for phase, way in ((F, 1), (B, -1))
            for stage in range(request.stages)[::way]
            if device in request.devices[stage]
        ]
        for devices in request.devices
        for device in devices
    }


def test_the_planner_looks_for_no_k_where_it_isnt_known_that_backwards_are_split() -> None:
    profile, cluster = profile_of(parameters=10**6, size=1e7), cluster_of(1, 1, 1, 1, inter_bandwidth=5e8)
    own = Policy("one_by_one", one_by_one)
    chosen = find_plan(
        profile, cluster, 16, micro_batches=1, schedule=own, reverse_first_k="auto", only=["chunks", "first_k"]
    )
    assert chosen.num_stages > 1 and chosen.schedule == own and chosen.reverse_first_k == 0


# ---- in a plan's file


def test_an_own_policy_stands_in_a_plans_file_by_a_name_that_can_be_imported(tmp_path: Path) -> None:
    plan = plan_of(RUN_AHEAD)
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["schedule"] == f"{__name__}:RUN_AHEAD"
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.from_json(plan.to_json()) == plan


def test_reading_a_plan_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_schedules.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = plan_of("gpipe").to_json().replace('"gpipe"', '"their_schedules:MINE"')
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text, source="plan.json")
    assert str(caught.value) == (
        "plan.json: the schedule 'their_schedules:MINE' is of a module that isn't imported, and reading a plan imports "
        "nothing; import the module that has it first, or give the policy: Plan.load(path, schedules=[...])"
    )
    assert "their_schedules" not in sys.modules
    given = Policy("mine", run_ahead, source="their_schedules:MINE")
    assert Plan.from_json(text, [given]).schedule is given


def test_only_a_policy_of_a_module_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy_schedules")
    lazy.__dict__.update(__getattr__=lambda name: pytest.fail("looked up"), other=3)
    monkeypatch.setitem(sys.modules, "lazy_schedules", lazy)
    for name in ("other", "missing", "other.real", ""):
        text = plan_of("gpipe").to_json().replace('"gpipe"', f'"lazy_schedules:{name}"')
        with pytest.raises(PlanError, match="isn't a Policy of that module, and reading a plan imports nothing"):
            Plan.from_json(text)


def test_a_policy_without_a_name_in_a_module_is_found_among_those_that_are_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = Policy("mine", lambda request: run_ahead(request))
    with caplog.at_level("WARNING"):
        text = plan_of(mine).to_json()
    assert caplog.messages == [
        "no name of a module is bound to the schedule mine, so that reading the plan takes the policy: "
        "Plan.load(path, schedules=[...])"
    ]
    assert json.loads(text)["schedule"] == "mine"
    assert Plan.from_json(text, schedules=[RUN_AHEAD, mine]).schedule is mine
    with pytest.raises(
        PlanError, match=r"unknown schedule 'mine'; use one of gpipe, .*, or give your own policy of that"
    ):
        Plan.from_json(text)
    with pytest.raises(PlanError, match=r"schedules is Policy.*; give a list of policies, such as schedules="):
        Plan.from_json(text, schedules=mine)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"schedules has <function .*; give policies"):
        Plan.from_json(text, schedules=[run_ahead])  # type: ignore[list-item]


# ---- from a CSV file


def csv_file(folder: Path, text: str | None = None) -> Path:
    path = folder / "mine.csv"
    path.write_text(to_csv(make_schedule("zb_h1", straight(3), 4)) if text is None else text)
    return path


def test_a_csv_file_is_a_schedule(tmp_path: Path) -> None:
    plan = plan_of(csv_policy(csv_file(tmp_path)))
    assert plan == plan_of(str(tmp_path / "mine.csv"))
    assert plan.order_tasks().orders == plan_of("zb_h1").order_tasks().orders
    assert plan.split_stages == {0, 1, 2} and "schedule mine.csv" in str(plan)
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
    with pytest.raises(PlanError, match=r"missing.csv' can't be read: No such file"):
        plan_of(str(tmp_path / "missing.csv"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(PlanError, match=r"folder.csv': it isn't a file"):
        plan_of(str(tmp_path / "folder.csv"))
    with pytest.raises(ScheduleError, match=r"isn't a CSV file's path; give one that ends in \.csv"):
        csv_policy(tmp_path / "plan.json")
    for path in ("\0.csv", "x" * 5000 + ".csv"):
        with pytest.raises(PlanError, match="csv"):
            plan_of(path)
    rows = to_csv(make_schedule("dapple_a", straight(2), 4))
    with pytest.raises(PlanError, match=r"rows 1 and 2 of mine.csv are both for device 0"):
        Plan.manual(["a"], [[0], [0]], 4, 8, str(csv_file(tmp_path, rows)))
