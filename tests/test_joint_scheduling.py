"""Multi-region joint scheduling (Out-Of-Order BackProp, section 4.1): the algorithm, and both streams simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from dapple_tf.joint.joint_scheduling import (
    Ready,
    StreamTimes,
    check_regions,
    fit_memory,
    joint_schedule,
    peak_bytes,
    schedule_regions,
    similar_regions,
    stage_regions,
    two_streams,
)


def late() -> StreamTimes:
    """All Bw gain most at the backward's end."""
    return StreamTimes((1.0,) * 3, (1.0,) * 3, {}, {(2, 1): 1.0, (2, 0): 2.0, (1, 0): 1.5})


# ---- algorithm 1


def test_the_pseudo_code_followed_by_hand() -> None:
    speedups = {(3, 1): 1.2, (3, 2): 1.5, (3, 3): 1.1, (2, 2): 1.4, (2, 3): 1.3, (1, 3): 1.6}
    schedule = joint_schedule(
        [2.0, 3.0, 2.0, 4.0],
        lambda kernel, region: 2.0,
        lambda kernel, region: speedups[kernel, region],
        {3: Ready(1), 2: Ready(2), 1: Ready(3)},
    )
    # tmp = [-, (3, 1.2), (3, 1.5), (1, 1.6)]: dW1 in R4, now = 2 of 4
    # tmp = [-, (3, 1.2), (3, 1.5), (2, 1.3)]: dW3 in R3, now = 2 of 2, R3 is closed
    # tmp = [-, -, closed, (2, 1.3)]:          dW2 in R4
    assert schedule == ((), (), (3,), (1, 2))


@pytest.mark.parametrize(
    ("main", "sub", "speedup", "ready", "expected"),
    [
        pytest.param(
            [3.0, 3.0], 2.0, (2.0, 1.0), {k: Ready(0) for k in range(4)}, ((0, 1), (2, 3)), id="until it ends"
        ),
        pytest.param(
            *([1.0, 9.0], 1.0, (1.0, 1.0), {0: Ready(1), 1: Ready(0, 0.0), 2: Ready(0, 0.0)}, ((1,), (2, 0))),
            id="of equal speedups the earliest region, and in it the kernel that was ready first",
        ),
        pytest.param(
            *([1.0, 1.0], 5.0, (1.0, 2.0), {2: Ready(0), 1: Ready(1), 0: Ready(1, 1.0)}, ((), (2, 1, 0))),
            id="behind the last region",
        ),
        pytest.param([3.0], 1.0, (1.0,), {0: Ready(0, 2.0), 1: Ready(0, 1.0)}, ((1, 0),), id="idle until one is ready"),
    ],
)
def test_small_schedules(
    main: list[float],
    sub: float,
    speedup: tuple[float, ...],
    ready: dict[int, Ready],
    expected: tuple[tuple[int, ...], ...],
) -> None:
    assert joint_schedule(main, lambda k, i: sub, lambda k, i: speedup[i], ready) == expected


@pytest.mark.parametrize("seed", range(12))
def test_every_kernel_runs_once_never_before_it_is_ready_and_the_greedy_choice_is_kept(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(1, 7)
    main = [draw.uniform(0.0, 3.0) for _ in range(count)]
    ready = {kernel: Ready(draw.randrange(count), draw.choice([0.0, 0.5])) for kernel in range(draw.randrange(9))}
    sub = {(k, i): draw.uniform(0.2, 3.0) for k in ready for i in range(count)}
    gain = {(k, i): draw.uniform(0.5, 2.0) for k in ready for i in range(count)}
    schedule = joint_schedule(main, lambda k, i: sub[k, i], lambda k, i: gain[k, i], ready)
    assert sorted(kernel for kernels in schedule for kernel in kernels) == sorted(ready)
    for region, kernels in enumerate(schedule):
        assert all(ready[kernel].region <= region for kernel in kernels)
    # Each choice is that with the highest speedup of all that could be made.
    left, now, taken = set(ready), [0.0] * count, [0] * count
    while True:
        choices = {
            (k, i): gain[k, i]
            for k in left
            for i in range(count)
            if (now[i] < main[i] or (now[i] == 0.0 and not taken[i])) and ready[k] <= Ready(i, now[i])
        }
        if not choices:
            later = sorted(ready[k] for k in left if ready[k].offset > now[ready[k].region])
            later = [when for when in later if when.offset < main[when.region] and now[when.region] < main[when.region]]
            if not later:
                break
            now[later[0].region] = later[0].offset
            continue
        (kernel, region) = max(choices, key=lambda pair: choices[pair])
        assert schedule[region][taken[region]] == kernel
        taken[region] += 1
        left.remove(kernel)
        now[region] += sub[kernel, region]
    assert list(schedule[-1][taken[-1] :]) == sorted(left, key=lambda kernel: ready[kernel])


# ---- regions of stages


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: joint_schedule([], max, max, {}), "there are no regions"),
        (lambda: joint_schedule([1.0], max, max, {4: Ready(2)}), "kernel 4 becomes runnable in region 2, but regions"),
        (lambda: similar_regions([1.0], -1), "tolerance is -1; it must be at least 0"),
        (lambda: check_regions([(2,), (0,), (1,)], 3), r"region 1 is \[0\], where stage 1 should come next"),
        (lambda: check_regions([(2, 1)], 3), "regions end at stage 1; they run through all stages from 2 down to 0"),
        (lambda: check_regions([(2,), ()], 3), "region 1 has no stages"),
        (lambda: StreamTimes((1.0, 1.0), (1.0,)), "2 times of Bx and 1 of Bw"),
        (lambda: StreamTimes((1.0,), (1.0,), {(2, 0): 1.0}), r"stages \(2, 0\) are a pair, but there are 1 stages"),
        (lambda: schedule_regions(late(), stage_regions(3), 4), "prescheduled is 4; with 3 regions it must be 0 to 3"),
    ],
)
def test_impossible_regions_and_times_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_stages_of_similar_compute_are_one_region() -> None:
    assert stage_regions(3) == ((2,), (1,), (0,))
    assert similar_regions([1.0, 1.1, 5.0, 4.0, 4.2]) == ((4, 3, 2), (1, 0))
    assert similar_regions([1.0, 1.1, 5.0, 4.0, 4.2], 0.0) == stage_regions(5)
    check_regions([(2, 1), (0,)], 3)


def test_a_regions_speedup_is_the_mean_over_its_stages_by_their_times() -> None:
    times = StreamTimes((1.0, 3.0, 1.0), (1.0, 1.0, 2.0), {(2, 1): 4.0}, {(2, 1): 1.2, (2, 0): 2.0})
    assert times.region_speedup(2, (1, 0)) == pytest.approx((3 * 1.2 + 2.0) / 4)
    assert times.sub_seconds(2, (1, 0)) == pytest.approx((3 * 4.0 + 2.0) / 4)  # by itself where it wasn't measured
    without_weights = StreamTimes((0.0, 1.0, 1.0), (1.0, 0.0, 1.0))
    assert schedule_regions(without_weights, stage_regions(3)) == ((), (2,), (0,))
    one_region = schedule_regions(StreamTimes((1.0,) * 3, (0.5,) * 3), [(2, 1, 0)])
    assert one_region == ((2, 1, 0),), "also in the region of its own stage, once that has run"


# ---- the memory rule


def test_regions_are_prescheduled_until_the_schedule_fits() -> None:
    times, regions = late(), stage_regions(3)
    schedule, early = (schedule_regions(times, regions, prescheduled) for prescheduled in (0, 2))
    assert (schedule, early) == (((), (), (2, 1, 0)), ((), (2,), (1, 0)))
    # Bx2: 20 + 10 + 10; Bx1: 20 + 10, and 20 for Bw2; Bx0: 20, and 20 for each of Bw2 and Bw1
    assert peak_bytes(times, regions, schedule, [10] * 3, [20] * 3) == 60
    assert peak_bytes(times, regions, early, [10] * 3, [20] * 3) == 50
    fits = [fit_memory(times, regions, [10] * 3, [20] * 3, limit) for limit in (None, 60, 55, 50, 40)]
    # The last resort doesn't fit either.
    assert [(fit.prescheduled, fit.peak) for fit in fits] == [(0, 60), (0, 60), (2, 50), (2, 50), (3, 50)]


@pytest.mark.parametrize("seed", range(8))
def test_less_memory_never_means_fewer_prescheduled_regions(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randrange(1, 8)
    pairs = [(k, r) for k in range(stages) for r in range(k)]
    times = StreamTimes(
        tuple(draw.uniform(0, 2) for _ in range(stages)),
        tuple(draw.choice([0.0, draw.uniform(0.1, 2)]) for _ in range(stages)),
        {pair: draw.uniform(0.1, 3) for pair in pairs},
        {pair: draw.uniform(0.8, 2) for pair in pairs},
    )
    regions = draw.choice([stage_regions(stages), similar_regions(times.input_grad)])
    residual, delayed = ([draw.randrange(1, 100) for _ in range(stages)] for _ in range(2))
    before = 0
    for limit in (1000, 500, 300, 200, 100, 50, 0):
        fit = fit_memory(times, regions, residual, delayed, limit)
        assert fit.prescheduled >= before
        assert fit.peak <= limit or fit.prescheduled == len(regions)
        assert fit.peak >= sum(residual)
        kernels = [kernel for kernels in fit.schedule for kernel in kernels]
        assert sorted(kernels) == [stage for stage in range(stages) if times.weight_grad[stage]]
        spans = two_streams(times, regions, fit.schedule).spans
        ends = {span.stage: span.end for span in spans if span.kind == "Bx"}
        subs = [span for span in spans if span.kind == "Bw"]
        assert [span.stage for span in subs] == kernels
        assert all(span.start >= ends[span.stage] for span in subs)
        assert all(second.start >= first.end for first, second in itertools.pairwise(subs))
        before = fit.prescheduled


# ---- the policy


SCHEDULES: list[tuple[int, int, dict[str, Any]]] = [
    (3, 1, {}),
    (4, 1, {"weight_regions": [0, 1, 0, 1]}),
    (4, 1, {"weight_regions": [0, 0, 1, 0]}),
    (2, 3, {}),
    (2, 2, {"holds": [1, 1]}),
    (4, 2, {"weight_regions": [0, 0, 0, 1], "reverse_first_k": 2}),
    (2, 2, {"weight_regions": [0, 0], "holds": [1, 1], "replicas": 2}),
]


def test_schedules_of_streams_in_full(golden: Callable[[str, str], None]) -> None:
    """The second replica has no slice of the second micro-batch."""
    texts = []
    for stages, micro_batches, given in SCHEDULES:
        options = dict(given)
        replicas = options.pop("replicas", 1)
        devices, weights = [range(replicas)] * stages, [range(replicas, 2 * replicas)] * stages
        common: dict[str, Any] = {"weight_devices": weights, "active": lambda _, number, replica: number * replica == 0}
        schedule = make_schedule(JOINT, devices, micro_batches, **options, **common)
        holds = options.get("holds")
        limits = resolve_warm_up(JOINT, stages, micro_batches, devices=devices, weight_devices=weights, holds=holds)
        validate(schedule, devices, micro_batches, holds=limits, **common)
        assert Schedule.parse(str(schedule), JOINT.name) == schedule
        texts.append(f"{stages} stages, {micro_batches} micro-batches, {given}\n{schedule}\n")
    golden("joint_schedules.txt", "\n".join(texts))


VALID: dict[str, Any] = {
    "cuts": ["a", "b"],
    "devices": [[0], [0], [0]],
    "micro_batches": 2,
    "global_batch_size": 8,
    "schedule": "dapple_tf.joint:JOINT",
    "weight_devices": [[1], [1], [1]],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_devices": None}, "joint runs Bw on a sub-stream, but device 0 stands in the devices and in the"),
        ({"weight_devices": [[1], [2], [1]]}, "one sub-stream for each device, but weight_devices of stage 0 are [1]"),
        ({"devices": [[0], [0], [2]]}, "schedules the two streams of one device, but stage 0 is on devices [0] and"),
        ({"weight_regions": [0]}, "weight_regions has 1 entries for 3 stages; give one for each"),
        ({"weight_regions": [0, 2, 0]}, "but the Bx of stage 2 runs before that of stage 1; give a stage from 0 to 1"),
        ({"weight_regions": [0, -1, 0]}, "beside the Bx of stage -1, but there is no such stage; give a stage from 0"),
        ({"weight_regions": "012"}, "weight_regions is '012'; give a list, such as [0, 1]"),
        ({"weight_regions": [0, 0.5, 0]}, "weight_regions: 0.5 isn't a whole number"),
        ({"schedule": "fast_forward", "weight_regions": [0, 0, 0]}, "are given for fast_forward, which has no regions"),
    ],
)
def test_impossible_plans_of_streams_are_refused_early(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**(VALID | change))
    assert message in str(caught.value)


def test_a_plan_of_streams_loads_back_equal() -> None:
    plan = Plan(**VALID, weight_regions=[0, 0, 0])
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.weight_regions == (0, 0, 0)
    assert plan.warm_up_counts() == (2, 2, 2)


# ---- devices


def test_a_sub_stream_is_a_second_logical_device() -> None:
    cluster = Cluster.local(2, memory_bytes=1000, kind="cpu").with_sub_streams(0.25)
    assert [name.rsplit("/", 1)[1] for name in cluster.device_names] == [f"device:CPU:{i}" for i in range(4)]
    assert [device.memory_bytes for device in cluster.devices] == [750, 750, 250, 250]
    assert cluster.sub_streams == 2
    assert cluster.capacity(0) == 2  # two streams of a device are no two devices
    assert session_config(cluster).device_count["CPU"] == 4
    assert not session_config(cluster).gpu_options.experimental.virtual_devices


def gpus(count: int, memory: int | None = 2**34, **options: Any) -> Cluster:
    names = [f"/job:localhost/replica:0/task:0/device:GPU:{index}" for index in range(count)]
    return Cluster(tuple(Device(name, 0, memory) for name in names), **options)


def test_a_session_makes_two_logical_devices_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus(monkeypatch, 3)
    assert not session_config(gpus(2)).gpu_options.experimental.virtual_devices
    cluster = gpus(2).with_sub_streams(0.25)
    assert [name.rsplit(":", 1)[1] for name in cluster.device_names] == ["0", "1", "2", "3"]
    options = session_config(cluster).gpu_options
    assert options.visible_device_list == "0,1"
    made = options.experimental.virtual_devices
    assert [list(gpu.memory_limit_mb) for gpu in made] == [[0.75 * 2**14, 0.25 * 2**14]] * 2
    # Main streams first: they keep the numbers of their GPUs. TensorFlow looks priorities up by these numbers.
    assert [list(gpu.device_ordinal) for gpu in made] == [[0, 1], [0, 1]]
    assert [list(gpu.priority) for gpu in made] == [[-1, -1], [0, 0]]
    show_gpus(monkeypatch, 1)
    (single,) = session_config(gpus(1).with_sub_streams()).gpu_options.experimental.virtual_devices
    assert list(single.priority) == [-1, 0]  # lower is higher


def test_sub_streams_come_before_all_that_uses_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow said "GPU:1 is being mapped to multiple devices", if anything."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    show_gpus(monkeypatch, 2)
    with pytest.raises(ClusterError, match="has sub-streams of 3 GPUs, but this machine has 2"):
        configure_gpus(gpus(3).with_sub_streams())
    configure_gpus(gpus(1).with_sub_streams())
    context.context().ensure_initialized()
    configure_gpus(gpus(1).with_sub_streams())
    configure_gpus(gpus(2))
    with pytest.raises(
        ClusterError, match=r"already, without the sub-streams of 2 GPUs: call dapple_tf\..*configure_gpus"
    ):
        dapple.transform(model, gpus(2).with_sub_streams(), global_batch_size=2)


LOCAL = Cluster.local(1, kind="cpu")


@pytest.mark.parametrize(
    ("cluster", "share", "message"),
    [
        (LOCAL.with_sub_streams(), 0.5, "the cluster has sub-streams already"),
        (Cluster.of_servers(["10.0.0.1:2222"], devices_per_server=1), 0.5, r"is of a worker at 10.0.0.1:2222"),
        (Cluster((Device("a:CPU:0", 0), Device("b:CPU:0", 1))), 0.5, "the cluster is of 2 servers"),
        (LOCAL, 1.0, "memory_share is 1.0; it must be between 0 and 1"),
        (gpus(1, None), 0.5, r"device 0 is a GPU of unknown memory.*Cluster.local\(1, memory_bytes=...\)"),
        (Cluster((Device("a:CPU:1", 0),)), 0.5, "device 0 is a:CPU:1; sub-streams are for devices in order"),
    ],
)
def test_clusters_that_cannot_have_sub_streams_are_refused(cluster: Cluster, share: float, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster.with_sub_streams(share)
    with pytest.raises(ClusterError, match="sub_streams is 1, but the cluster has 3 devices; give 0, or half of them"):
        gpus(3, sub_streams=1)


# ---- training


def test_a_joint_schedule_trains_as_plain_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions, the first stages' Bw last, and an update that the next step begins with."""
    use_float64()
    model, one = ZOO["branches"], [[0]] * 4
    options = {"weight_regions": [0, 0, 0, 1], "reverse_first_k": 2, "carried_updates": 1, "weight_devices": [[1]] * 4}
    plan = Plan.manual(model.cuts_for(4), one, 2, SAMPLES, JOINT, **options)
    assert_equal_training(model, LOCAL.with_sub_streams(), plan, reference("branches"), monkeypatch, steps=2)


# ---- planning


@functools.cache
def small_model() -> keras.Model:
    layers = [keras.layers.Dense(width, activation="relu", name=f"dense_{i}") for i, width in enumerate((32, 32, 16))]
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3, name="logits")])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def test_a_model_is_measured_and_planned_on_two_streams() -> None:
    model = small_model()
    before = [np.asarray(variable.value) for variable in model.variables]
    cluster = LOCAL.with_sub_streams()
    plan = plan_streams(model, cluster, stages=3, global_batch_size=12, micro_batches=2, progress=False)
    assert (plan.devices, plan.weight_devices, plan.schedule) == (((0,),) * 3, ((1,),) * 3, JOINT)
    profile = measure_speedups(model, cluster, plan, repeats=1, progress=False)
    times = profile.times
    assert times.input_grad[0] == 0.0  # nothing that stage 0 receives has a gradient
    assert all(seconds > 0 for seconds in (*times.input_grad[1:], *times.weight_grad, *times.speedup.values()))
    assert set(times.speedup) == set(times.beside) == {(k, r) for k in range(3) for r in range(1, k)}
    # Relu's gradient is of its output: dense_1 keeps what it received and its output, 6 samples of 32 numbers each.
    assert profile.residual_bytes[1] >= 6 * 32 * 4
    assert all(np.array_equal(a, np.asarray(b.value)) for a, b in zip(before, model.variables, strict=True))


def test_a_memory_limit_preschedules_or_says_what_would_fit() -> None:
    cluster = Cluster.local(2, kind="cpu").with_sub_streams()
    profile = StreamProfile(late(), (10,) * 3, (20,) * 3)
    arguments: dict[str, Any] = {"global_batch_size": 8, "profile": profile}
    free = plan_streams(small_model(), cluster, ["dense_0", "dense_1"], **arguments)
    assert free.weight_regions == (0, 0, 0)
    assert free.devices == ((0, 1),) * 3
    assert free.weight_devices == ((2, 3),) * 3
    tight = plan_streams(small_model(), cluster, ["dense_0", "dense_1"], memory_limit=50, **arguments)
    assert tight.weight_regions == (0, 0, 1)
    assert tight.warm_up == (1, 1, 1)
    with pytest.raises(PlanError, match=r"keeps 50 bytes even if all weight gradients.* memory_limit is 40; use more"):
        plan_streams(small_model(), cluster, ["dense_0", "dense_1"], memory_limit=40, **arguments)
    grouped = plan_streams(small_model(), cluster, ["dense_0", "dense_1"], tolerance=0.5, **arguments)
    assert grouped.weight_regions == (0, 1, 2)  # one region: as soon as they are ready


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": LOCAL}, r"the cluster has no sub-streams; make them with Cluster.with_sub_streams\(\)"),
        ({"stages": None}, "give either cuts"),
        ({"stages": 9}, "stages is 9, but the model can be cut into at most 4; lower it"),
        ({"schedule": "gpipe"}, "plan_streams doesn't take 'schedule'"),
    ],
)
def test_impossible_requests_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"cluster": LOCAL.with_sub_streams(), "stages": 2, "global_batch_size": 4}
    with pytest.raises(PlanError, match=message):
        plan_streams(small_model(), **given | options)


def test_a_plan_without_sub_streams_and_another_models_profile_are_refused() -> None:
    plan = Plan.manual(["dense_0"], [[0], [0]], 1, 4)
    with pytest.raises(PlanError, match="the plan has no sub-stream to measure; give weight_devices"):
        measure_speedups(small_model(), LOCAL.with_sub_streams(), plan)
    with pytest.raises(PlanError, match="the profile is of 3 stages, the plan has 2"):
        with_joint_schedule(plan, StreamProfile(late(), (1,) * 3, (1,) * 3))
