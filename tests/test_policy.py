"""Policies as values: the built-in ones, one's own, and what stands for them in a plan's file."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hardware import cluster_of, profile_of
from schedule_runs import straight, vee

import dapple_tf as dapple
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.planner import plan as find_plan
from dapple_tf.schedules.policies import BUILT_IN, own_policy
from dapple_tf.schedules.policy import Placement, Planning, Policy
from dapple_tf.schedules.schedule_request import Job, Orders, ScheduleRequest
from dapple_tf.schedules.schedules import ScheduleError, make_schedule, policy_of
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.planned import planned
from dapple_tf.tools.evaluation.bench_accuracy import pipeline
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


def devices_for(policy: Policy) -> list[list[int]]:
    return vee(3) if policy.planning.placements == (Placement.VEE,) else straight(3)


@pytest.mark.parametrize("policy", BUILT_IN, ids=str)
def test_built_in_policies_are_values_that_say_how_they_order(policy: Policy) -> None:
    """Copies of functools.partial aren't equal by themselves: functions of policies are bound to options."""
    assert policy_of(policy.name) is policy is policy_of(policy) and str(policy) == policy.name
    assert policy.summary and "\n" not in policy.summary and policy.summary[-1] not in ".;"
    assert policy.source is None
    for copied in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
        assert copied == policy and hash(copied) == hash(policy)
    assert policy != dataclasses.replace(policy, name="another")
    assert [other.name for other in BUILT_IN if other == policy] == [policy.name]
    assert own_policy(copy.deepcopy(policy)) == policy.name
    devices = devices_for(policy)
    split = make_schedule(policy, devices, 4).split
    assert split == (frozenset(range(len(devices))) if policy.splits else frozenset())
    if policy.reverses:
        assert 0 in make_schedule(policy, devices, 4, reverse_first_k=1).split
    if policy.needs_all:
        with pytest.raises(ScheduleError, match="keeps all 4 micro-batches in flight"):
            make_schedule(policy, devices, 4, holds=[2] * len(devices))
    if not policy.planning.by_seconds:
        even, odd = [[1, 1, 1]] * len(devices), [[1, 4, 1]] * (len(devices) - 1) + [[9, 9, 9]]
        orders = {str(make_schedule(policy, devices, 4, task_seconds=seconds)) for seconds in (even, odd)}
        assert len(orders) == 1
    plan, profile, cluster = pipeline(4, 5, policy.name, [2, 1], 0.1)
    assert dapple.simulate(plan, profile, cluster).latency > 0, "the simulator's check has a pipeline for it"


def test_ranks_order_policies_and_no_placement_is_in_doubt() -> None:
    assert all(policy.planning.placements for policy in BUILT_IN)
    assert len({policy.name for policy in BUILT_IN}) == len({policy.summary for policy in BUILT_IN}) == len(BUILT_IN)
    assert len({policy.planning.rank for policy in BUILT_IN}) == len(BUILT_IN)
    assert Placement.STRAIGHT.stages("ab", 1) == ["a", "b"] and Placement.STRAIGHT.stages("ab", 2) is None
    assert Placement.PERIODIC.stages("ab", 2) == ["a", "b", "a", "b"] and Placement.PERIODIC.stages("ab", 1) is None
    assert Placement.VEE.stages("ab", 2) == ["a", "b", "b", "a"] and Placement.VEE.stages("ab", 3) is None


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


def test_a_built_in_policy_is_its_name() -> None:
    assert plan_of(policy_of("zb_h1")).schedule == "zb_h1"
    assert plan_of(policy_of("zb_h1")) == plan_of("zb_h1")


def test_memory_and_options_are_asked_of_an_own_policy() -> None:
    plan = plan_of(RUN_AHEAD)
    assert plan.order_tasks(holds=[2, 2, 1]).orders[0] == plan_of("dapple_a", warm_up=[2, 2, 1]).order_tasks().orders[0]
    assert plan_of(RUN_AHEAD, warm_up=[2, 1, 1]).warm_up_counts() == (2, 1, 1)
    costs = CostModel(plan_of(SPLIT_FIRST), PROFILE, cluster_of(4))
    assert [costs.delays(stage) for stage in range(3)] == [True, False, False]
    last = plan_of(SPLIT_FIRST, reverse_first_k=1).order_tasks().orders[0][-1]
    assert str(last) == "0Bw3"


def too_many(request: ScheduleRequest) -> Orders:
    numbers = range(request.micro_batches)
    return {
        device: [Job(stage, phase, number) for phase in (F, B) for number in numbers]
        for stage, devices in enumerate(request.devices)
        for device in devices
    }


AHEAD, NUMBER, OTHER = [Job(0, B, 0), Job(0, F, 0)], [Job(0, "F", 0)], [Job(2, F, 0)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: plan_of(SPLIT_FIRST, reverse_first_k=2), "split_first doesn't split the backward of stage 1; set it"),
        (
            lambda: returning({0: AHEAD}),
            r"^schedule 'wrong': device 0 runs 0B0 before 0F0; a backward needs its forward",
        ),
        (lambda: returning({0: OTHER}), r"wrong has device 0 run 2F0, but stages are 0 to 0"),
        (
            lambda: plan_of(Policy("wrong", lambda _: {0: OTHER})),
            r"0 run 2F0, but stage 2 is on \[3\]; give each stage",
        ),
        (lambda: plan_of(Policy("greedy", too_many), warm_up=[2] * 3), "device 0 has 3 micro-batches in flight after"),
        (
            lambda: plan_of(Policy("gpipe", too_many)),
            "a built-in schedule is called gpipe too; give yours another name",
        ),
        (lambda: Policy("", too_many), "give a text without a colon and slashes"),
        (lambda: Policy("a:b", too_many), "give a text without a colon and slashes"),
        (lambda: Policy(3, too_many), "give a text without a colon and slashes"),  # type: ignore[arg-type]
        (lambda: returning(None), "policy wrong returned None; let it return a dict: device -> its jobs"),
        (lambda: returning([Job(0, F, 0)]), r"policy wrong returned \[Job"),
        (lambda: returning({0: Job}), "policy wrong gives device 0 <class .*; give a list of its jobs"),
        (lambda: returning({0: iter(())}), "policy wrong gives device 0 <.*; give a list of its jobs"),
        (lambda: returning({0: [(0, F, 0)]}), r"wrong has \(0, .* among the jobs of device 0; give each as Job\(stage"),
        (lambda: returning({0: NUMBER}), r"policy wrong has Job\(.* among the jobs of device 0"),
        (lambda: plan_of(checking(False)), "check of policy run_ahead returned False; let it raise a Schedule"),
        (lambda: plan_of(checking("no")), "check of policy run_ahead returned 'no'; let it raise a Schedule"),
        (lambda: Policy("mine", None), "order of policy mine is None; give a function of a request"),  # type: ignore[arg-type]
        (lambda: plan_of(run_ahead), r"is the function run_ahead; wrap it: dapple.Policy\('run_ahead', run_ahead\)"),  # type: ignore[arg-type]
        (lambda: planned_by(run_ahead), r"the schedule is the function run_ahead; wrap it: dapple.Policy"),
        (lambda: planned_by(Policy("gpipe", too_many)), "a built-in schedule is called gpipe too"),
        (lambda: plan_of("nowhere:MINE"), "'nowhere:MINE' is of a module that isn't imported; import its module, or"),
        (lambda: plan_of(f"{__name__}:PROFILE"), "isn't a Policy of that module; import its module, or give the pol"),
        (lambda: planned_by("nowhere:MINE"), "'nowhere:MINE' is of a module that isn't imported"),
        (lambda: Plan.straight([], 8, 4, devices=[[0]]), r"stage i on device i; choose devices by Plan.manual"),  # type: ignore[call-arg]
    ],
)
def test_wrong_policies_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises((PlanError, ScheduleError), match=text):
        make()


def checking(answer: object) -> Policy:
    return dataclasses.replace(RUN_AHEAD, check=lambda request: answer)


def returning(made: Any) -> Plan:
    return Plan.data_parallel(1, 8, schedule=Policy("wrong", lambda request: made))


def planned_by(schedule: Any, **options: Any) -> Plan:
    return find_plan(PROFILE, cluster_of(1, 1, inter_bandwidth=1e10), 8, micro_batches=4, schedule=schedule, **options)


def test_an_own_policy_that_fails_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        plan_of(Policy("failing", lambda request: 1 // 0))  # type: ignore[arg-type, return-value]
    assert caught.value.__notes__ == ["in the schedule failing, of 4 micro-batches on ((0,), (1, 2), (3,))"]


def test_the_planner_takes_own_policies_and_names_of_modules() -> None:
    named = f"{__name__}:RUN_AHEAD"
    assert plan_of(named) == plan_of(RUN_AHEAD) and plan_of(named).schedule is RUN_AHEAD
    assert planned_by(named).schedule == RUN_AHEAD
    assert planned_by([RUN_AHEAD, "gpipe"]).policy in (RUN_AHEAD, policy_of("gpipe"))
    alone = planned_by(RUN_AHEAD)
    assert alone.schedule == RUN_AHEAD and alone.report is not None
    assert "run_ahead" in str(alone)


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
