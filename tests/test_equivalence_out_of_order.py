"""Whatever the order of tasks and wherever weight gradients are computed: training gives what plain Keras gives.

Each policy takes models with weights used twice in a stage, weights tied across stages, skip connections and rows of
embeddings. BatchNormalization and dropout depend on how a batch is sliced (docs/equivalence.md): with them policies are
compared with plain Keras where there is one slice, else with a single stage that has the same slices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import (
    assert_equal_training,
    assert_same_variables,
    largest_difference,
    pair,
    use_float64,
    variables_of,
)
from references import SAMPLES, reference
from selection import one_of_each, sampled
from zoo import ZOO

import dapple_tf as dapple

Devices = Sequence[Sequence[int]]

STRAIGHT: Devices = [[0], [1], [2]]
REPLICATED: Devices = [[0, 1, 2], [3], [4, 5]]
CHUNKS: Devices = [[0, 1], [0, 1], [0, 1], [0, 1]]
GROUPS: Devices = [[0, 1], [0, 1], [2], [2]]
PERIODIC: Devices = [[0], [1], [0], [1]]
PERIODIC_REPLICAS: Devices = [[0, 1], [2, 3], [0, 1], [2, 3]]
OVERLAPPING: Devices = [[0, 1], [1, 2], [0], [2, 1]]
VEE: Devices = [[0], [1], [1], [0]]


@dataclasses.dataclass(frozen=True)
class Case:
    schedule: str
    devices: Devices
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    micro_batches: int = 4

    def __str__(self) -> str:
        lists = "_".join("".join(map(str, devices)) for devices in self.devices)
        return "-".join(
            [self.schedule, lists, f"M{self.micro_batches}", *(f"{k}={v}" for k, v in self.options.items())]
        )


CASES = [
    Case("fast_forward", STRAIGHT),
    Case("fast_forward", REPLICATED, {"recompute": "boundary"}),
    Case("fast_forward", GROUPS, {"reverse_first_k": 2}),
    Case("fast_forward_a", STRAIGHT, {"recompute": "min_cut"}),
    Case("fast_forward_a", REPLICATED, {"reverse_first_k": 1}, 7),
    Case("fast_forward_b", REPLICATED),
    Case("fast_forward_b", GROUPS, {"wait_free": False}, 1),
    Case("modulo", PERIODIC),
    Case("modulo", PERIODIC_REPLICAS, {"recompute": "boundary"}, 3),
    Case("modulo", OVERLAPPING, {"task_seconds": [[1, 2, 1], [1, 1, 3], [2, 1, 1], [1, 1, 1]]}),
    Case("interleaved", PERIODIC),
    Case("interleaved", PERIODIC_REPLICAS, {"recompute": "min_cut"}, 5),
    Case("zb_h1", STRAIGHT),
    Case("zb_h1", GROUPS, {"recompute": "min_cut"}),
    Case("zb_h2", REPLICATED, {}, 7),
    Case("zb_v", VEE),
    Case("zb_v", VEE, {"recompute": "boundary"}, 7),
    Case("zero_bubble", STRAIGHT, {"warm_up": [2, 2, 1]}),
    Case("dapple_a", CHUNKS, {"reverse_first_k": 3}, 1),
    Case("dapple_a", CHUNKS, {"reverse_first_k": 4}),
    Case("gpipe", CHUNKS, {"reverse_first_k": 2, "recompute": "boundary"}, 3),
    Case("dapple_b", CHUNKS, {"wait_free": False}),
    Case("dapple_a", CHUNKS, {"reverse_first_k": 3, "carried_updates": 2}, 1),
    Case("zb_h1", GROUPS, {"carried_updates": 3}),
    Case("fast_forward", [[0], [0]], {"weight_devices": [[1], [1]]}),
    Case("dapple_a", [[0, 1], [2]], {"weight_devices": [[3, 4], [5]]}),
]


def check(model: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = ZOO[model].cuts_for(len(case.devices))
    plan = dapple.Plan.manual(cuts, case.devices, case.micro_batches, SAMPLES, case.schedule, **case.options)
    weights = plan.weight_devices or ()
    count = 1 + max(device for devices in (*plan.devices, *weights) for device in devices)
    cluster = dapple.Cluster.local(count, kind="cpu")
    # What is carried over meets a batch of another size.
    steps = 3 if plan.carried_updates else 2
    assert_equal_training(ZOO[model], cluster, plan, reference(model), monkeypatch, steps=steps)


def in_turn() -> list[tuple[str, Case]]:
    """Each policy with both models: its cases take them in turn; an only case takes both, and so do rare options."""
    rare = {"carried_updates", "task_seconds", "weight_devices"}
    pairs = []
    for policy in dict.fromkeys(case.schedule for case in CASES):
        cases = [case for case in CASES if case.schedule == policy]
        for model, case in zip(itertools.cycle(("branches", "tied")), cases):
            both = len(cases) == 1 or rare & case.options.keys()
            pairs += [(name, case) for name in (("branches", "tied") if both else (model,))]
    return pairs


def shape(pair: tuple[str, Case]) -> tuple[bool, bool, frozenset[str]]:
    """What tasks there are: split or not, whether whole ones' stages share a device, two streams, carried updates.

    Of cases of one shape the policies give other orders, which change nothing: test_schedule_pass.py. One case of
    carried updates, split, stands for all: those of whole backwards are in test_equivalence_reductions.py.
    """
    _, case = pair
    split = (
        "carried_updates" in case.options
        or case.schedule in ("modulo", "zero_bubble")
        or case.schedule.startswith(("fast_forward", "zb_"))
    )
    several = split or any(sum(device in devices for devices in case.devices) > 1 for device in range(3))
    return split, several, frozenset(case.options.keys() & {"weight_devices", "carried_updates"})


@pytest.mark.slow
@pytest.mark.parametrize(("model", "case"), one_of_each(in_turn(), shape), ids=str)
def test_every_policy_trains_as_plain_keras(model: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64()
    check(model, case, monkeypatch)


def others() -> list[tuple[str, Case]]:
    """Each policy and option with another model, and each model with each kind of option that it isn't refused.

    Two of the models clip gradients by a global norm, so that nothing can be carried over. The transformer takes
    several times as long as the others: it gets a case only where they have had those options.
    """
    kinds = {key for case in CASES for key in case.options}
    lacking = {model: set(kinds) for model in ("cnn", "multi_output", "transformer")}
    for model in ("cnn", "transformer"):
        lacking[model].remove("carried_updates")
    count = {"cnn": 0, "multi_output": 0, "transformer": 2}
    met: set[str] = set()
    pairs = []
    for case in sorted(CASES, key=lambda case: -len(case.options)):
        told = {case.schedule, *(f"{key}={value}" for key, value in case.options.items())}
        if told <= met:
            continue
        met |= told
        may = ["multi_output"] if "carried_updates" in case.options else list(lacking)
        model = min(may, key=lambda model: (-len(lacking[model] & case.options.keys()), count[model]))
        lacking[model] -= case.options.keys()
        count[model] += 1
        pairs.append((model, case))
    for model, keys in lacking.items():
        pairs += [(model, next(case for case in CASES if list(case.options) == [key])) for key in sorted(keys)]
    return pairs


def test_each_model_meets_each_policy_or_option() -> None:
    kinds = {key for case in CASES for key in case.options}
    met = {(model, key) for model, case in (*in_turn(), *others()) for key in case.options}
    refused = {("cnn", "carried_updates"), ("transformer", "carried_updates")}
    models = ("branches", "tied", "cnn", "multi_output", "transformer")
    assert met == set(itertools.product(models, kinds)) - refused
    assert {case.schedule for _, case in others()} == {case.schedule for case in CASES}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("model", "case"), sampled(others(), 4), ids=str)
def test_other_models_take_the_policies_in_turn(model: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    use_float64()
    check(model, case, monkeypatch)


def test_an_optimizer_that_must_know_all_gradients_carries_nothing_over() -> None:
    plan = dapple.Plan.manual(ZOO["cnn"].cuts_for(4), CHUNKS, 1, 13, reverse_first_k=3, carried_updates=2)
    with pytest.raises(dapple.DappleError, match="carried_updates is 2, but the optimizer needs all gradients"):
        dapple.transform(ZOO["cnn"].build(), dapple.Cluster.local(2, kind="cpu"), plan)


@pytest.mark.thorough
@pytest.mark.slow
def test_what_is_carried_over_is_made_up_for_before_anyone_looks() -> None:
    """The learning rate changes, a batch is evaluated, values are read: each time all updates have been made."""
    use_float64()
    own, plain = pair(ZOO["branches"].build)
    plan = dapple.Plan.manual(
        ZOO["branches"].cuts_for(4), CHUNKS, 3, 13, "dapple_a", reverse_first_k=3, carried_updates=2
    )
    pipelined = dapple.transform(own, dapple.Cluster.local(2, kind="cpu"), plan)
    rng = np.random.default_rng(0)
    for number, size in enumerate((13, 13, 13, 5, 13)):
        x, y, _ = ZOO["branches"].batch(rng, size)
        for model in (pipelined, plain):
            model.train_on_batch(x, y)
        if number == 1:
            losses = [model.test_on_batch(x, y, return_dict=True)["loss"] for model in (pipelined, plain)]
            np.testing.assert_allclose(*losses, rtol=2e-6)
        if number == 2:
            for model in (own, plain):
                model.optimizer.learning_rate = 0.1
        if number == 3:
            pipelined.sync()
            assert_same_variables(own, plain, 1e-10)
    pipelined.sync()
    assert_same_variables(own, plain, 1e-10)


# ---- BatchNormalization and dropout


def sensitive() -> keras.Model:
    """What slices matter to, a layer used twice in a stage, and weights tied over the first and the last stage."""
    layers = keras.layers
    tied = layers.Dense(6, activation="tanh", name="tied")
    twice = layers.Dense(6, activation="tanh", name="twice")
    x = features = keras.Input((6,))
    x = layers.Dropout(0.3, seed=1, name="drop_0")(tied(x))
    x = layers.BatchNormalization(name="norm_0")(x)
    x = layers.Dropout(0.3, seed=2, name="drop_1")(twice(twice(x)))
    x = layers.Dense(6, activation="tanh", name="dense")(layers.BatchNormalization(name="norm_1")(x))
    x = layers.Dropout(0.3, seed=3, name="drop_2")(tied(x))
    model = keras.Model(features, layers.Dense(2, name="outputs")(x))
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse")
    return model


SINGLE = [
    *(Case(policy, [[0], [1], [2], [3]]) for policy in ("fast_forward", "fast_forward_a", "fast_forward_b")),
    *(Case(policy, [[0], [1], [2], [3]]) for policy in ("zb_h1", "zb_h2", "zero_bubble")),
    *(Case(policy, PERIODIC) for policy in ("modulo", "interleaved")),
    Case("zb_v", VEE, {"recompute": "boundary"}),
    Case("dapple_a", [[0], [0], [0], [0]], {"reverse_first_k": 3, "carried_updates": 2}),
    Case("fast_forward", [[0]] * 4, {"weight_devices": [[1]] * 4}),
]


def trained(plan: dapple.Plan | None, cluster: dapple.Cluster) -> tuple[list[float], list[keras.Variable]]:
    """Losses of three steps, and the variables after them; None is plain Keras."""
    keras.utils.set_random_seed(3)
    model = sensitive()
    model.run_eagerly = plan is None
    trainer = model if plan is None else dapple.transform(model, cluster, plan)
    rng = np.random.default_rng(0)
    losses = []
    for size in (13, 6, 13):
        x, y = rng.normal(size=(size, 6)), rng.normal(size=(size, 2))
        losses.append(trainer.train_on_batch(x, y, return_dict=True)["loss"])
    if isinstance(trainer, dapple.PipelinedModel):
        trainer.close()
    return losses, variables_of(model)


@functools.cache
def unsplit(micro_batches: int) -> tuple[list[float], list[keras.Variable]]:
    """What every policy has to give: plain Keras for one slice, a single stage for several."""
    whole = None if micro_batches == 1 else dapple.Plan.manual([], [[0]], micro_batches, 13)
    return trained(whole, dapple.Cluster.local(4, kind="cpu"))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "micro_batches"),
    # Of one slice there is little to order: it takes those that change more than the order.
    sampled(
        [*((case, 4) for case in SINGLE), *((case, 1) for case in SINGLE if case.options or case.devices == PERIODIC)],
        3,
    ),
    ids=str,
)
def test_every_policy_agrees_where_slices_matter(case: Case, micro_batches: int) -> None:
    use_float64()
    expected, reference = unsplit(micro_batches)
    cuts = ["norm_0", "drop_1", "dense"]
    plan = dapple.Plan.manual(cuts, case.devices, micro_batches, 13, case.schedule, **case.options)
    losses, variables = trained(plan, dapple.Cluster.local(4, kind="cpu"))
    np.testing.assert_allclose(losses, expected, rtol=2e-6, err_msg=str(case))
    for own, other in zip(variables, reference, strict=True):
        assert largest_difference(own.value, other.value) <= 1e-10, own.path


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "clip_norm", "scaled"),
    [
        (Case("zb_v", VEE), None, True),
        # The next step scaled by the value from before the carried update, and unscaled by the one after it.
        (Case("dapple_a", [[0]], {"carried_updates": 1}, 2), None, True),
        (Case("dapple_a", [[0, 1]], {"carried_updates": 1}, 2), None, True),
        (Case("modulo", PERIODIC), 0.01, False),
        (Case("dapple_a", CHUNKS, {"reverse_first_k": 3}), 0.01, True),
        (Case("zb_h1", GROUPS, {"jit_compile": True}), None, False),
    ],
    ids=str,
)
def test_optimizers_that_look_at_all_gradients_and_xla(case: Case, clip_norm: float | None, scaled: bool) -> None:
    """Global-norm clipping, loss scaling with a step that is skipped for an infinite gradient, and compiled stages."""

    def build() -> keras.Model:
        model = ZOO["branches"].build()
        optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=clip_norm)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=2)
        model.compile(optimizer, "mse")
        return model

    carried = "carried_updates" in case.options
    if carried:
        use_float64()
    own, plain = pair(build)
    cuts = ZOO["branches"].cuts_for(len(case.devices))
    plan = dapple.Plan.manual(cuts, case.devices, case.micro_batches, 13, case.schedule, **case.options)
    cluster = dapple.Cluster.local(3, kind="cpu")
    pipelined = dapple.transform(own, cluster, plan)
    rng = np.random.default_rng(0)
    for number in range(6):
        x, y, _ = ZOO["branches"].batch(rng, 13)
        if scaled and number == 3:
            y = np.array(y)
            y[0] = np.inf
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(own, plain, 1e-10 if carried else 1e-4)
