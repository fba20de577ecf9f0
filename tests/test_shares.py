"""Shares of replicas on unlike devices: their text, costs and choice; their slices train as plain Keras does."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_variables, pair, pipeline, use_float64
from hardware import cluster_of, profile_of
from keras import layers
from models_for_tests import Computed

import dapple_tf as dapple
from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.errors import CaptureError
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.capture import Mode
from dapple_tf.planning.moves import neighbours
from dapple_tf.planning.plan_request import PlanRequest
from dapple_tf.planning.planner import plan
from dapple_tf.planning.replanning import shrink
from dapple_tf.planning.shares import best_split, with_shares
from dapple_tf.planning.stage_cuts import chunked
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import simulate
from graph_passes.errors import PassError
from graph_passes.ir.tasks import Phase, Task

PLAN = Plan.manual(["layer_3"], [[0, 1], [2, 3, 4]], 2, 30, shares=[[6, 4], [1, 2, 2]])


# ---- in plans


def test_shares_are_reduced_to_lowest_terms_and_shown_as_slices() -> None:
    assert PLAN.options["shares"] == ((3, 2), (1, 2, 2))
    assert "9+6" in str(PLAN) and "3+6+6" in str(PLAN)
    assert Plan.data_parallel(2, 8, shares=[[5, 5]]) == Plan.data_parallel(2, 8)
    assert Plan.manual(["a"], [[0], [1, 2]], 1, 8, shares=[[7], [1, 3]]).options["shares"] == ((1,), (1, 3))


def test_shares_count_in_the_fingerprint() -> None:
    equal = PLAN.with_options(shares=None)
    assert equal.fingerprint != PLAN.fingerprint
    old = json.loads(equal.to_json())
    del old["shares"]
    assert Plan.from_json(json.dumps(old)).fingerprint == equal.fingerprint


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([[1, 2]], "shares has 1 value for 2 stages; give one for each"),
        ([[1], [1, 1, 1]], "shares of stage 0 are 1 number for 2 replicas on its devices; give one for each"),
        ([[1, 0], [1, 1, 1]], r"shares of stage 0 are \[1, 0\]; give each replica a whole number of at least 1"),
        ([[1, 0.5], [1, 1, 1]], "shares of stage 0: 0.5 isn't a whole number"),
        ("1:2", r"shares is '1:2'; give a list, such as \[\[2, 1\], \[1\]\]"),
        (
            [[1, 99], [1, 1, 1]],
            "replica 0 of stage 0 gets no sample of a micro-batch of 15: its share is 1 of 100. Raise its share, leave "
            "its device 0 out of the stage, or use fewer micro-batches",
        ),
    ],
)
def test_wrong_shares_are_refused(shares: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        Plan.manual(["layer_3"], [[0, 1], [2, 3, 4]], 2, 30, shares=shares)


def test_chunks_and_remaining_replicas_keep_their_shares() -> None:
    cut = chunked(PLAN, profile_of(8), 2)
    assert [*zip(cut.replicas, cut.options["shares"], strict=True)] == [(2, (3, 2))] * 2 + [(3, (1, 2, 2))] * 2
    assert shrink(PLAN, cluster_of(1, 1, 1, 1, 1), {2}).options["shares"] == ((3, 2), (1, 1))
    assert shrink(PLAN, cluster_of(1, 1, 1, 1, 1), {4}).options["shares"] == ((3, 2), (1, 2))


# ---- what they cost


def test_tasks_take_the_time_of_their_slices_at_the_speed_of_their_device() -> None:
    cluster = cluster_of(2, speeds=(1.0, 0.5), intra_bandwidth=1e12)
    costs = CostModel(Plan.data_parallel(2, 12, shares=[[2, 1]]), profile_of(1, parameters=0), cluster)
    seconds = [costs.seconds(Task(0, Phase.FORWARD, 0, replica)) for replica in (0, 1)]
    assert seconds == [pytest.approx(8e-3), pytest.approx(8e-3)]
    assert costs.task_seconds[0][0] == max(seconds)
    assert simulate(costs.plan, costs.profile, cluster).latency == pytest.approx(24e-3)


def limited(*sizes: int | None, speeds: tuple[float, ...] = (1.0, 1.0)) -> Cluster:
    devices = zip(sizes, speeds, strict=True)
    return Cluster(tuple(Device(f"d{i}", 0, *own) for i, own in enumerate(devices)), real=False)


def test_each_replicas_memory_is_its_own_slices() -> None:
    profile = profile_of(1, parameters=0, residual=100.0)
    even, uneven = (Plan.data_parallel(2, 12, shares=shares) for shares in (None, [[3, 1]]))
    assert CostModel(even, profile, limited(1000, 400)).holds == (0,)
    assert CostModel(uneven, profile, limited(1000, 400)).holds == (1,)
    assert CostModel(uneven, profile, limited(800, 400)).holds == (0,)
    with pytest.raises(PlanError, match=r"for one slice of 9 samples\), .* more than that device has"):
        CostModel(uneven, profile, limited(800, 400)).check_memory()
    step = simulate(uneven, profile, limited(1000, 400))
    assert step.peak_bytes == {0: 900, 1: 300}


# ---- the best ones


@pytest.mark.parametrize("seed", range(12))
def test_no_other_split_ends_earlier(seed: int) -> None:
    draw = random.Random(seed)
    workers = draw.randint(1, 3)
    samples = draw.randint(workers, 12)
    lines = [(draw.choice([0.0, 1.0, 3.0]), draw.choice([0.5, 1.0, 1.7])) for _ in range(workers)]
    most = [draw.randint(1, samples) for _ in range(workers)]

    def line(start: float, each: float, count: int) -> float:
        return start + each * count

    def last(sizes: tuple[int, ...]) -> float:
        return max(start + each * size for size, (start, each) in zip(sizes, lines, strict=True))

    legal = [sizes for sizes in itertools.product(*(range(1, limit + 1) for limit in most)) if sum(sizes) == samples]
    split = best_split(samples, [functools.partial(line, *own) for own in lines], most)
    assert (split is None) == (not legal)
    if split is not None:
        assert split in legal
        assert last(split) == min(map(last, legal))


def test_like_devices_have_equal_shares() -> None:
    cluster = cluster_of(2, 2, speeds=(2.0, 2.0, 0.5, 0.5))
    wanted = Plan.manual(["layer_3"], [[0, 1], [2, 3]], 2, 30)
    assert with_shares(wanted.with_options(shares=((1, 3), (1, 1))), profile_of(8), cluster) == wanted


def test_a_fixed_time_per_slice_counts() -> None:
    """8 samples in 4 + 8 s and 2 in (4 + 2) / 0.5; in proportion to speed, 7 and 3, the second would take 14 s."""
    layer = LayerProfile("a", Cost(4.0, 1.0), Cost(), parameter_bytes=1)
    cluster = cluster_of(2, speeds=(1.0, 0.5))
    shared = with_shares(Plan.data_parallel(2, 10), Profile("one", "none", (1,), (layer,), ()), cluster)
    assert shared.options["shares"] == ((4, 1),)


def test_memory_limits_shares() -> None:
    profile = profile_of(1, parameters=0, residual=100.0)
    plain = Plan.data_parallel(2, 12)
    assert with_shares(plain, profile, limited(None, None, speeds=(3.0, 1.0))).options["shares"] == ((3, 1),)
    fast = with_shares(plain, profile, limited(750, 600, speeds=(3.0, 1.0)))
    assert fast.options["shares"] == ((7, 5),)
    assert with_shares(plain, profile, limited(1000, 400)).options["shares"] == ((2, 1),)  # as fast, but smaller
    assert with_shares(plain, profile, limited(500, 400)).options["shares"] is None  # nothing fits


def test_shares_that_fit_one_micro_batch_leave_k_to_memory() -> None:
    profile = profile_of(2, parameters=0, residual=100.0, size=1.0)
    plan = Plan.manual(["layer_0"], [[0, 1], [2]], 4, 48, "dapple_b", warm_up=(3, 1))
    for memory, warm_up in ((2500, (3, 1)), (1500, None)):  # three slices of 8 samples, or one of 9
        shared = with_shares(plan, profile, limited(memory, 1400, None, speeds=(3.0, 1.0, 1.0)))
        assert shared.options["shares"] is not None and shared.warm_up == warm_up


def test_shares_leave_room_for_the_larger_micro_batches() -> None:
    profile = profile_of(1, parameters=0, residual=100.0)
    plain = Plan.data_parallel(2, 25, 2)  # 13 + 12 samples
    cluster = limited(800, 550, speeds=(3.0, 1.0))
    assert (CostModel(with_shares(plain, profile, cluster), profile, cluster).holds or (0,))[0] >= 1


def test_equal_shares_are_a_move() -> None:
    cluster = cluster_of(2, speeds=(1.0, 0.5))
    request = PlanRequest(profile_of(8), cluster, 12)
    start = request.plan((), [[0, 1]], 1)
    assert start.options["shares"] == ((2, 1),)
    moved = list(neighbours(start, request))
    assert start.with_options(shares=None) in moved
    assert all(
        other.options["shares"] is not None for other in moved if other.replicas == (2,) and other.micro_batches == 2
    )


# ---- planned


def test_the_planner_gives_fast_devices_more() -> None:
    cluster = cluster_of(2, 2, speeds=(1.0, 1.0, 0.5, 0.5), intra_bandwidth=1e11, inter_bandwidth=1e11)
    best = plan(profile_of(parameters=100), cluster, 48)
    assert best.replicas == (4,)
    assert best.options["shares"] == ((2, 2, 1, 1),)
    assert best.report is not None
    assert best.report.latency == pytest.approx(48 * 8 * 3e-3 / 3.0, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_planned_shares_are_never_slower_than_equal_ones(seed: int) -> None:
    draw = random.Random(seed)
    unlike = [
        dataclasses.replace(
            layer,
            forward=Cost(draw.choice([0.0, 1e-4]), draw.uniform(1e-4, 2e-3)),
            backward=Cost(draw.choice([0.0, 2e-4]), draw.uniform(1e-4, 4e-3)),
            parameter_bytes=draw.choice([1_000, 4_000_000]),
        )
        for layer in profile_of(draw.randint(2, 7)).layers
    ]
    profile = dataclasses.replace(profile_of(len(unlike)), layers=tuple(unlike))
    cluster = cluster_of(2, 1, 2, speeds=[0.3, 1.0, 0.5, 1.7, 1.0], intra_bandwidth=1e10, inter_bandwidth=1e9)
    best = plan(profile, cluster, 37)
    equal = simulate(best.with_options(shares=None), profile, cluster).latency
    assert best.options["shares"] is not None and best.report is not None
    assert best.report.latency <= equal * (1 + 1e-3)


# ---- training

EXACT = 1e-12


def dense() -> keras.Model:
    features = keras.Input((4,))
    x = layers.Dense(6, "tanh", name="first")(features)
    x = layers.Dense(5, "tanh", name="second")(x)
    model = keras.Model(features, layers.Dense(3, name="last")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, weighted_metrics=["accuracy"])
    return model


def batch(samples: int, seed: int) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    weights = draw.uniform(0.5, 2, samples)
    return draw.normal(size=(samples, 4)), draw.integers(0, 3, samples), weights


def test_slices_are_as_large_as_their_shares_say() -> None:
    plan = dapple.Plan.manual(["first"], [[0, 1], [2, 3]], 2, 10, shares=[[3, 2], [1, 4]])
    passes = StepPasses(plan, dapple.Cluster.local(4, kind="cpu"))
    slices = [[part.size for part in passes.layout(10).slices(stage, 0)] for stage in (0, 1)]
    assert slices == [[3, 2], [1, 4]]
    assert [part.size for part in passes.layout(4).slices(1, 0)] == [1, 3]
    assert passes.slice_samples(Mode.TRAIN, 10) == (None, None)


def test_evaluation_and_prediction_are_those_of_plain_keras() -> None:
    use_float64()
    model, plain = pair(dense)
    pipelined = pipeline(model, ["first"], (2, 2), 2, 10, shares=[[3, 2], [1, 4]])
    x, y, weights = batch(23, 5)
    np.testing.assert_allclose(pipelined.predict_on_batch(x), plain.predict_on_batch(x), rtol=EXACT)
    own = pipelined.test_on_batch(x, y, sample_weight=weights, return_dict=True)
    other = plain.test_on_batch(x, y, sample_weight=weights, return_dict=True)
    assert own == pytest.approx(other, rel=1e-5)


def swapped(x: Any) -> Any:
    """The first two axes in each other's place."""
    return tf.transpose(x, (1, 0, *range(2, len(x.shape))))


def views(x: Any) -> Any:
    return tf.concat([x, 2 * x + 1], 0)


def together(x: Any, *parts: int) -> Any:
    """What belongs to one sample, in one row; ``parts`` before its place, -1 for the samples, and those after it."""
    place, shape = parts.index(-1), (*parts, *x.shape[1:])
    moved = tf.transpose(tf.reshape(x, shape), (place, *(axis for axis in range(len(shape)) if axis != place)))
    return tf.reshape(moved, (-1, int(np.prod(shape[:place] + shape[place + 1 :]))))


ORDERS: dict[str, tuple[Any, Any]] = {
    "views": (views, lambda x: together(x, 2, -1)),
    "repeated, in two views": (lambda x: views(tf.repeat(x, 2, 0)), lambda x: together(x, 2, -1, 2)),
    "heads before samples": (
        lambda x: tf.reshape(swapped(tf.reshape(x, (-1, 3, 2))), (-1, 2)),
        lambda x: together(x, 3, -1),
    ),
    "steps of time": (
        lambda x: swapped(tf.reshape(views(x), (-1, 3, 2))),
        lambda x: together(swapped(x), 2, -1),
    ),
    "by places": (
        lambda x: tf.gather(x, tf.range(2 * tf.shape(x)[0]) % tf.shape(x)[0]),
        lambda x: together(x, 2, -1),
    ),
    "by a function": (tf.function(views), lambda x: tf.multiply(*tf.split(x, 2))),
    "blocks": (
        lambda x: tf.reshape(tf.space_to_batch(x[..., None, None], (2, 1), ((0, 0), (0, 0))), (-1, 3)),
        lambda x: together(x, 2, -1),
    ),
}


def test_rows_of_samples_in_every_order() -> None:
    """The first stage sends rows, the second works on rows, and the third puts together the rows of a sample."""

    def rows() -> keras.Model:
        features = keras.Input((6,))
        x = layers.Dense(6, "tanh")(features)
        sent = [Computed(send, name=f"send{number}")(x) for number, (send, _) in enumerate(ORDERS.values())]
        mid = [layers.Dense(4, "tanh", name=f"row{number}")(own) for number, own in enumerate(sent)]
        joined = [Computed(join)(own) for (_, join), own in zip(ORDERS.values(), mid, strict=True)]
        model = keras.Model(features, layers.Add()([layers.Dense(3)(own) for own in joined]))
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        return model

    use_float64()
    model, plain = pair(rows)
    last = len(ORDERS) - 1
    pipelined = pipeline(model, [f"send{last}", f"row{last}"], (1, 2, 3), 1, 11)
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(11, 6)), draw.normal(size=(11, 3))
    assert pipelined.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=EXACT)
    pipelined.sync()
    assert_same_variables(model, plain, EXACT)
    np.testing.assert_allclose(pipelined.predict_on_batch(x), plain.predict_on_batch(x), atol=EXACT)
    assert not pipelined.notes


def test_rows_in_an_order_that_is_not_known_are_refused_where_stages_cut_them_differently() -> None:
    def sums(x: Any) -> Any:
        places = tf.reverse(tf.range(2 * tf.shape(x)[0]), [0])
        return tf.math.unsorted_segment_sum(tf.repeat(x, 2, 0), places, tf.size(places))

    features = keras.Input((4,))
    x = layers.Dense(3, name="a")(Computed(sums, name="sums")(features))
    model = keras.Model(features, Computed(lambda x: tf.reshape(x, (-1, 6)), name="back")(layers.Dense(3, name="b")(x)))
    model.compile("sgd", "mse")
    told = (
        r"tensor \S+ of layer 'a' has 2 rows for each sample in an order that isn't known, so that it can't be cut: "
        r"stage 0 makes it in slices of \[4\] samples, stage 1 reads it in slices of \[2, 2\]; give both stages the "
        r"same number of replicas and the same shares, or cut elsewhere"
    )
    given = np.random.default_rng(0).normal(size=(4, 4))
    with pytest.raises(PassError, match=told):
        pipeline(model, ["a"], (1, 2), 1, 4).predict_on_batch(given)
    expected = model.predict_on_batch(given)
    np.testing.assert_allclose(pipeline(model, ["a"], (1, 1), 1, 4).predict_on_batch(given), expected, rtol=1e-6)


OUTPUTS: dict[str, Any] = {
    "views": views,
    "repeated": lambda x: tf.repeat(x, 2, 0),
    "steps of time": lambda x: swapped(tf.reshape(tf.tile(x, (1, 3)), (-1, 3, 4))),
    "views on the last axis": lambda x: tf.transpose(views(x)),
    "classes of views": lambda x: tf.argmax(views(x), -1),
    "from Python": lambda x: tf.ensure_shape(tf.numpy_function(np.tanh, [x], x.dtype), (None, 4)),
    "constant": lambda x: tf.constant([[1.0, 2.0]]),
}


def test_predictions_have_their_rows_in_the_order_of_plain_keras() -> None:
    features = keras.Input((3,))
    x = layers.Dense(4, name="first")(features)

    def compiled(outputs: Any) -> keras.Model:
        model = keras.Model(features, outputs)
        model.compile("sgd")
        return model

    plain = compiled({name: Computed(function)(x) for name, function in OUTPUTS.items()})
    given = np.random.default_rng(0).normal(size=(12, 3))
    expected = plain.predict_on_batch(given)
    own = pipeline(plain, ["first"], (1, 2), 2, 12).predict_on_batch(given)
    for name, value in expected.items():
        np.testing.assert_array_equal(own[name], value, err_msg=name)
    mean = compiled(Computed(lambda x: tf.reduce_mean(x, 0, keepdims=True))(x))
    with pytest.raises(CaptureError, match=r"output 0 of the model has shape \[1, 4\] for a slice of 3 samples"):
        pipeline(mean, ["first"], (1, 2), 2, 12).predict_on_batch(given)
