"""Plans: constructors, every refusal, the JSON form and the printed table."""

import json
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.plan import Plan, PlanError, PlanOptions, StagePlan
from dapple_tf.describe.plan_checks import REFUSED, Refused
from dapple_tf.schedules.schedules import POLICIES, in_flight

VALID: dict[str, Any] = {
    "cuts": ["block_3"],
    "devices": [[0, 1, 2], [3]],
    "micro_batches": 4,
    "global_batch_size": 14,
}


def test_a_manual_plan_turns_lists_into_tuples_and_has_the_documented_defaults() -> None:
    plan = Plan.manual(cuts=["block_3"], devices=[[0, 1, 2], [3]], micro_batches=4, global_batch_size=64)
    assert plan == Plan((StagePlan("block_3", (0, 1, 2)), StagePlan(None, (3,))), 4, 64, "dapple_a", None, None, 2**25)
    assert plan.num_stages == 2
    assert plan.replicas == (3, 1)
    assert hash(plan) == hash(Plan.manual(**{**VALID, "global_batch_size": 64}))


def test_warm_up_is_the_policys_or_the_given_one() -> None:
    assert Plan.straight(["a", "b"], 8, 4).warm_up_counts() == (3, 2, 1)
    assert Plan.straight(["a", "b"], 8, 4, "dapple_b").warm_up_counts() == (4, 3, 1)
    assert Plan.straight(["a", "b"], 8, 4, "gpipe").warm_up_counts() == (4, 4, 4)
    assert Plan.straight(["a", "b"], 8, 4, warm_up=(4, 2, 2)).warm_up_counts() == (4, 2, 2)


@pytest.mark.parametrize("policy", ["fast_forward_a", "modulo", "zb_h1", "zb_h2", "zero_bubble"])
def test_warm_up_bounds_what_a_schedule_with_weight_gradients_of_its_own_has_in_flight(policy: str) -> None:
    plan = Plan.straight(["a", "b"], 8, 4, policy, warm_up=(2, 1, 3), task_seconds=((1, 2, 1), (1, 1, 1), (2, 3, 4)))
    schedule = plan.order_tasks()
    counts = in_flight(schedule)
    assert all(count <= most for count, most in zip(counts, plan.warm_up_counts(), strict=True))
    assert all(count <= most for count, most in zip(counts, (2, 1, 3), strict=True))


def test_the_whole_text_of_too_many_replicas() -> None:
    with pytest.raises(PlanError) as caught:
        Plan.manual(["block_3"], [[0, 1, 2], [3]], micro_batches=4, global_batch_size=11)
    assert str(caught.value) == (
        "stage 0 has 3 replicas but the smallest of the 4 micro-batches has 2 samples (global batch 11): use at most 3 "
        "micro-batches, at most 2 replicas, or a global batch of at least 12"
    )


GROUPS = "operator_devices"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": [[0, 1, 2]]}, "cuts make 2 stages, but devices has 1 list; give one list for each stage"),
        ({"cuts": ["a", "a"], "devices": [[0], [1], [2]]}, "stages 0 and 1 are both cut after layer 'a'; name each"),
        ({"cuts": "block_3"}, "cuts is 'block_3'; give a list, such as ['block_3']"),
        ({"devices": [[0], []]}, "stage 1 has no devices; give it at least one"),
        ({"devices": [[0, 1], [1]]}, "device 1 stands in stage 0 on devices [0, 1] and in stage 1 on [1], but"),
        ({"devices": [[0], [1, 1]]}, "device 1 stands twice, in stage 1; a device runs one replica of a stage"),
        ({"devices": [[0], [1]], "schedule": "zb_v"}, "zb_v wants stages i and 2 - 1 - i on the same devices, such"),
        ({"micro_batches": 2.5}, "micro_batches: 2.5 isn't a whole number"),
        ({"global_batch_size": 3}, "a global batch of 3 samples can't be cut into 4 micro-batches; use a global"),
        ({"micro_batches": 1, "global_batch_size": 2}, "stage 0 has 3 replicas but the only micro-batch has 2 samples"),
        ({"schedule": "1f1b"}, f"unknown schedule '1f1b'; use one of {', '.join(POLICIES)}"),
        ({"recompute": "all"}, "unknown recompute 'all'; use one of none, boundary, min_cut"),
        ({"recompute": ["none"]}, "recompute has 1 value for 2 stages; give one for each"),
        ({"warm_up": [2]}, "warm_up has 1 entries for 2 stages; give one for each stage"),
        ({"warm_up": [5, 1]}, "warm_up of stage 0 is 5, but the plan has 4 micro-batches; lower it to at most 4"),
        ({"warm_up": [1, 2]}, "warm_up rises from 1 at stage 0 to 2 at stage 1, which deadlocks: stage 1 waits for 2"),
        ({"schedule": "gpipe", "warm_up": [4, 4]}, "warm_up [4, 4] is given for gpipe, which always runs all 4"),
        ({GROUPS: [[0, 1], [3]]}, "stage 0 has 3 replicas and operator_devices has 1 group for it; give one group"),
        (
            {"devices": [[0, 2], [3]], GROUPS: [[[0, 1], [2]], [[3]]]},
            "the replicas of stage 0 place their operators on groups of [2, 1] devices; give them groups of the same",
        ),
        (
            {"devices": [[0, 1], [3]], GROUPS: [[[0, 1], [2, 4]], [[3]]]},
            "stage 0 has devices [0, 1], but its operator_devices are [[0, 1], [2, 4]]; each replica's device must be",
        ),
        ({"devices": [[0, 2], [3]], GROUPS: [[[0, 1], [2, 1]], [[3]]]}, "device 1 stands twice, in operator_devices"),
        ({GROUPS: [[[0, 1]]]}, "operator_devices has 1 value for 2 stages; give one for each"),
        ({"task_seconds": [[1, 1, 1]]}, "task_seconds has 1 value for 2 stages; give one for each"),
        ({"shares": [[1, 2], [1]]}, "shares of stage 0 are 2 numbers for 3 replicas on its devices; give one for each"),
        ({"relays": [2]}, "relays has stage 2; with 2 stages they are numbered 0 to 1"),
        ({"optimizer_shards": 1}, "optimizer_shards is 1; it must be True or False"),
        ({"devices": [[0], [3]], GROUPS: [[0, 3], [3]]}, "stages 0 and 1 both place operators on device 3; give each"),
    ],
)
def test_a_contradictory_plan_is_refused_with_a_fix_and_from_json_also_with_its_file(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.manual(**(VALID | change))
    assert str(caught.value).startswith(message)
    with pytest.raises(PlanError) as of_file:
        Plan.from_json(json.dumps({"format": "dapple_tf.plan/1"} | VALID | change), source="plan.json")
    assert str(of_file.value).startswith(f"plan.json: {caught.value}")


# ---- single operators


def test_plans_that_place_operators() -> None:
    whole = Plan.by_operators(3, 8)
    assert (whole.devices, whole.operator_devices, whole.micro_batches) == (((0,),), (((0, 1, 2),),), 1)
    assert Plan.by_operators([2, 0], 8, recompute="boundary").operator_devices == (((2, 0),),)
    staged = Plan.manual(**VALID).with_placed_operators()
    assert (staged.devices, staged.operator_devices) == (((0,), (3,)), (((0, 1, 2),), ((3,),)))
    assert staged.with_options(operator_devices=[[0, 1, 2], [3]]) == staged  # as before there were replicas
    assert staged.working_devices == ((0, 1, 2), (3,)) and Plan.manual(**VALID).working_devices == ((0, 1, 2), (3,))
    assert Plan.from_json(staged.to_json()) == staged
    assert "operators placed one by one" in str(staged)
    with pytest.raises(PlanError, match="stage 0 has 3 devices, which can't be divided into 2 groups of the same size"):
        Plan.manual(**VALID).with_placed_operators(2)
    with pytest.raises(PlanError, match="device 1 stands twice, in operator_devices of stage 0"):
        Plan.by_operators([0, 1, 1], 8)


def test_replicas_place_operators_on_groups_of_devices() -> None:
    plan = Plan.manual(["block_3"], [[0, 1, 2, 3], [4, 5]], 4, 64).with_placed_operators([2, 2])
    assert (plan.devices, plan.operator_devices) == (((0, 2), (4, 5)), (((0, 1), (2, 3)), ((4,), (5,))))
    assert plan.working_devices == ((0, 1, 2, 3), (4, 5)) and plan.spread_stages == {0}
    assert '"operator_devices": [[[0, 1], [2, 3]], [[4], [5]]]' in plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan
    assert "0 1 | 2 3" in str(plan) and plan.device_labels()[3] == "device 3: stage 0.r1 (operators)"
    assert Plan.data_parallel(4, 8).with_placed_operators(2).operator_devices == (((0, 1), (2, 3)),)


def test_like_places_of_replicas_have_devices_of_one_type() -> None:
    plan = Plan.data_parallel(4, 8).with_placed_operators(2)

    def cluster(*names: str) -> Cluster:
        return Cluster(tuple(Device(f"/job:localhost/replica:0/task:0/device:{name}", 0) for name in names))

    plan.validate_on(cluster("GPU:0", "CPU:0", "GPU:1", "CPU:1"))
    with pytest.raises(PlanError) as caught:
        plan.validate_on(cluster("GPU:0", "GPU:1", "GPU:2", "CPU:0"))
    assert str(caught.value) == (
        "place 1 in the groups of stage 0 has unlike devices: device 1 (GPU), device 3 (CPU). All replicas run the "
        "same operators; give it devices of one type"
    )
    with pytest.raises(PlanError, match=r"^stage 1 has unlike devices: device 1 \(GPU\), device 2 \(CPU\)\."):
        Plan.manual(["a"], [[0], [1, 2]], 2, 8).validate_on(cluster("GPU:0", "GPU:1", "CPU:0"))


PLACED = {"devices": [[0], [3]], GROUPS: [[[0]], [[3, 4]]]}
USES: dict[str, dict[str, Any]] = {
    "operator_devices": PLACED,
    "operator_devices of several replicas": {"devices": [[0, 1], [3]], GROUPS: [[[0], [1]], [[3]]]},
    "operator_devices, several for each replica": {"devices": [[0], [3]], GROUPS: [[[0, 1]], [[3, 4]]]},
    "backward_cuts": {"backward_cuts": ["block_1"]},
    "relays": {"relays": [1]},
    "optimizer_shards": {"optimizer_shards": True},
    "row_shards": {"row_shards": True},
    "all_reduce='hierarchical'": {"all_reduce": "hierarchical"},
    "jit_compile=True": {"jit_compile": True},
    "wait_free=False": {"wait_free": False},
}


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: f"{pair.option} {pair.other}")
def test_refused_pairs_of_options_are_those_that_the_documents_show(pair: Refused) -> None:
    for option in (pair.option, pair.other):
        Plan.manual(**(VALID | USES[option]))
    with pytest.raises(PlanError) as caught:
        Plan.manual(**(VALID | USES[pair.option] | USES[pair.other]))
    assert str(caught.value) == f"no plan has {pair.option} and {pair.other}: {pair.reason}. Leave one of them out"
    table = Path("docs/reference/plans.md").read_text().partition("| option | not with | because |")[2]
    shown = [line.replace("`", "") for line in table.splitlines() if line.startswith("| `")]
    assert len(shown) == len(REFUSED)
    assert f"| {pair.option} | {pair.other} | {pair.reason} |" in shown


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([StagePlan("a", (0,))], "stage 0 of 1 stage has cut 'a'; name one for each, None for the last"),
        ([StagePlan(None, (0,)), StagePlan(None, (1,))], "stage 0 of 2 stages has cut None; name one for each"),
        (
            [StagePlan("a", (0,), task_seconds=(1, 1, 1)), StagePlan(None, (1,))],
            "only one of stages 0 and 1 has task_seconds; give them for each stage, or for none",
        ),
        ([["a", [0]], StagePlan(None, (1,))], "stage 0 is ['a', [0]]; give a StagePlan, or use Plan.manual"),
        ([StagePlan(None, (0,), recompute="all")], "unknown recompute 'all'; use one of none, boundary, min_cut"),
        ([StagePlan(None, (0, 1), shares=(1, 2, 3))], "shares of stage 0 are 3 numbers for 2 replicas"),
    ],
)
def test_stages_are_checked(stages: list[Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(tuple(stages), 1, 4)
    assert str(caught.value).startswith(message)


def test_stages_and_shards_may_be_lists() -> None:
    made = Plan.manual(["a"], [[0, 1], [2]], 2, 8, shares=[[2, 1], [1]], optimizer_shards=True, row_shards=True)
    stages: Any = [StagePlan("a", [0, 1], [4, 2]), StagePlan(None, [2])]  # type: ignore[arg-type]
    plan = Plan(stages, 2, 8, shards=["rows", "optimizer"])  # type: ignore[arg-type]
    assert plan == made and hash(plan) == hash(made) and plan.to_json() == made.to_json()


def test_options_make_the_same_plan() -> None:
    plan = Plan.manual(["a"], [[0, 1], [2]], 2, 8, "zb_h1", shares=[[4, 2], [3]], recompute=["none", "boundary"])
    assert plan.stages[0].shares == (2, 1) and plan.stages[1] == StagePlan(None, (2,), recompute="boundary")
    assert Plan.manual(**plan.options) == plan and plan.options["shares"] == ((2, 1), (1,))
    assert plan.with_options(devices=[[0, 2], [1]]).options == plan.options | {"devices": ((0, 2), (1,))}


def test_constructors_say_which_argument_an_unknown_one_is_like() -> None:
    with pytest.raises(
        TypeError, match=r"Plan.manual\(\) has no argument 'microbatches'; did you mean 'micro_batches'"
    ):
        Plan.manual(microbatches=1)  # type: ignore[call-arg]


def test_devices_beyond_the_cluster_are_refused_with_the_stage() -> None:
    plan = Plan.manual(["block_3"], [[0, 1], [4]], 4, 64)
    plan.validate_on(Cluster.local(5, kind="cpu"))
    with pytest.raises(PlanError) as caught:
        plan.validate_on(Cluster.local(4, kind="cpu"))
    assert str(caught.value) == (
        "plan puts stage 1 on device 4, but the cluster has 4 devices (0 to 3); choose one of these or use a larger "
        "cluster"
    )
    with pytest.raises(PlanError, match=r"stage 0 on device 1, but the cluster has 1 device \(0\)"):
        plan.validate_on(Cluster.local(1, kind="cpu"))


def test_the_json_form_has_a_line_for_each_key() -> None:
    lines = Plan.manual(**VALID, warm_up=(2, 1)).to_json().splitlines()
    assert lines[1:4] == ['  "format": "dapple_tf.plan/1",', '  "cuts": ["block_3"],', '  "devices": [[0, 1, 2], [3]],']
    assert '  "warm_up": [2, 1],' in lines and len(lines) == len(PlanOptions.__annotations__) + 8


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ({"parameter_shards": True}, "parameter_shards is true, and no plan has parameters in shards any more"),
        ({"recompute": ["none", "offload"]}, "recompute has 'offload', and residuals no longer wait in the host's mem"),
        ({"weight_devices": [[2], [3]]}, "weight_devices is given, and Bw no longer run on devices of their own"),
        ({"schedule": "dapple_tf.joint:JOINT"}, "its schedule is joint, which no step runs any more"),
    ],
)
def test_files_of_older_plans_say_which_option_is_gone(gone: dict[str, Any], message: str) -> None:
    data = {"format": "dapple_tf.plan/1"} | VALID
    unused = {"parameter_shards": False, "weight_devices": None, "weight_regions": None}
    assert Plan.from_json(json.dumps(data | unused)) == Plan.manual(**VALID)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data | gone))


def test_reports_of_older_plans_stay_valid() -> None:
    """Fields that are gone had dropped out of the fingerprint, so that every plan of before lost its report."""
    assert Plan.straight(["a"], 4, 2).fingerprint == "0d3e112645b058b3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"format": "dapple_tf.plan/2"}',
            "mine: 'format' is 'dapple_tf.plan/2'; this version reads 'dapple_tf.plan/1'",
        ),
        (
            '{"format": "dapple_tf.plan/1", "microbatches": 4}',
            "mine: unknown key 'microbatches'; the keys are format, cuts, devices, micro_batches, ",
        ),
    ],
)
def test_a_text_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text, source="mine")
    assert str(caught.value).startswith(message)


def test_a_plan_prints_a_table() -> None:
    assert str(Plan.manual(**VALID)) == (
        "Plan: global batch 14, 4 micro-batches (2 x 4 + 2 x 3 samples), schedule dapple_a, recompute none, jit off\n"
        "stage  up to layer  devices  replicas  slice sizes    warm-up K\n"
        "0      block_3      0-2      3         2+1+1 | 1+1+1  2\n"
        "1      (last)       3        1         4 | 3          1"
    )


def test_cuts_of_backwards_are_within_stages() -> None:
    with pytest.raises(PlanError, match="layer 'a' is in both cuts and backward_cuts"):
        Plan.manual(["a"], [[0], [1]], 1, 2, backward_cuts=["a"])
